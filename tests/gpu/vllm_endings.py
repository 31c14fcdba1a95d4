"""How long a training process with vLLM in it takes to be gone: after its last step, after an error, after Ctrl-C.

    python tests/gpu/vllm_endings.py FOLDER                      # all three at once, about 90 s
    python tests/gpu/vllm_endings.py FOLDER --endings error      # one of them

A random Llama of SmolLM2-135M's shape trains on the demo mailbox with a reward made of nothing, vLLM asleep between the
rollouts. Prints how each process ended, what it said last, and what it left running; the last lines are a table. A
process that is there after ``--seconds`` is killed.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
from measured import markdown

REWARD = """\
from pathlib import Path
calls = 0
def reward(trajectory):
    global calls
    calls += 1
    if {fails} and calls > 24:
        raise RuntimeError("made to fail")
    return float(hash(trajectory.id) % 7)
"""
ENDINGS = ("done", "error", "interrupt")


def main() -> None:
    """Run the endings at once, and print what came of each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--endings", nargs="+", default=ENDINGS, choices=ENDINGS)
    parser.add_argument("--seconds", type=float, default=150)
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    prepare(given.folder)
    watched = [Watched(given.folder, how, given.seconds) for how in given.endings]
    for one in watched:
        one.join()
        print(one.report(), flush=True)
    columns = ["ending", "exit", "gone after s", "CUDA errors", "children left"]
    print("\n" + markdown(columns, [one.facts() for one in watched]))


def prepare(root: Path) -> None:
    """The model, the mailbox and its questions."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from emailrl.model.resolve import NANO_DIR

    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(NANO_DIR)
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=4096, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(root / "model")
    tokenizer.save_pretrained(root / "model")
    for command in (
        ["gen-db", "--source", "demo", "--db", "demo.db"],
        ["gen-questions", "--db", "demo.db", "--out", "q"],
    ):
        subprocess.run([sys.executable, "-m", "emailrl", *command], cwd=root, check=True, capture_output=True)


class Watched:
    """A training process, and when it said and did what."""

    def __init__(self, root: Path, how: str, seconds: float) -> None:
        self.how, self.limit = how, seconds
        folder = root / how
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reward.py").write_text(REWARD.format(fails=how == "error"))
        command = [
            sys.executable, "-m", "emailrl", "train", "--mode", "masked", "--engine", "vllm", "--model", "../model",
            "--db", "../demo.db", "--questions", "../q", "--reward", "reward.py:reward", "--max-steps", "2",
            "--batch-size", "2", "--num-generations", "8", "--max-tokens", "200", "--max-turns", "2",
            "--eval-size", "4", "--learning-rate", "1e-2", "--wandb", "disabled", "--json",
        ]  # fmt: skip
        # A given cache, since free memory changes while the others start.
        settings = "vllm_gpu_memory_utilization = 0.2\nvllm_enforce_eager = true\nmax_batch_trajectories = 32\n"
        settings += "kv_cache_gib = 4\nvllm_enable_sleep = true\n"
        (folder / "emailrl.toml").write_text(settings)
        self.process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.lines: list[tuple[float, str]] = []
        self.asked: float | None = None
        self.gone: float | None = None
        self.children: list[psutil.Process] = []
        self.reader = threading.Thread(target=self._read)
        self.waiter = threading.Thread(target=self._wait)
        self.reader.start()
        self.waiter.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))
            if self.how == "interrupt" and "step 1" in line.lower() and self.asked is None:
                self.asked = time.monotonic()
                self.process.send_signal(signal.SIGINT)

    def _wait(self) -> None:
        end = time.monotonic() + self.limit
        while self.process.poll() is None and time.monotonic() < end:
            try:
                for child in psutil.Process(self.process.pid).children(recursive=True):
                    if child not in self.children:
                        self.children.append(child)
            except psutil.NoSuchProcess:
                pass
            time.sleep(0.2)
        if self.process.poll() is not None:
            self.gone = time.monotonic()
        else:
            self.process.kill()
            self.process.wait()

    def join(self) -> None:
        self.waiter.join()
        time.sleep(2)

    def facts(self) -> tuple[object, ...]:
        """Its ending, exit status, seconds from its last word until it was gone, CUDA errors, children left."""
        left = [child.pid for child in self.children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        marks = ("Done", "made to fail", "interrupt", "Interrupted", "best_accuracy")
        said = [at for at, line in self.lines if any(mark in line for mark in marks)]
        since = self.asked or (said[0] if said else None)
        took = "never" if self.gone is None else "?" if since is None else f"{self.gone - since:.1f}"
        cuda = [line for _, line in self.lines if "CUDA Error" in line]
        return self.how, self.process.returncode, took, len(cuda), left

    def report(self) -> str:
        """What it said last."""
        tail = "\n    ".join(f"{at - self.lines[0][0]:6.1f} {line[:200]}" for at, line in self.lines[-14:])
        return f"{self.how}:\n    {tail}"


if __name__ == "__main__":
    main()
