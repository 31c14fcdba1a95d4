"""How long a training process with vLLM in it takes to be gone: after its last step, after an error, after Ctrl-C.

    python tests/gpu/vllm_endings.py FOLDER [done] [error] [interrupt]      # about a minute each, one after the other

A random Llama of SmolLM2-135M's shape trains on the demo mailbox with a reward made of nothing, vLLM asleep between the
rollouts. Prints how each process ended, what it said last, and what it left running.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

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
LIMIT = 120


def main() -> None:
    """Run the endings named, or all, and print what came of each."""
    root = Path(sys.argv[1])
    prepare(root)
    for how in sys.argv[2:] or ("done", "error", "interrupt"):
        one = Watched(root, how)
        one.join()
        print(one.report(), flush=True)


def prepare(root: Path) -> None:
    """The model, the mailbox and its questions."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from emailrl.policy.resolve import NANO_DIR

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

    def __init__(self, root: Path, how: str) -> None:
        self.how = how
        folder = root / how
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reward.py").write_text(REWARD.format(fails=how == "error"))
        command = [
            sys.executable, "-m", "emailrl", "train", "--mode", "masked", "--engine", "vllm", "--model", "../model",
            "--db", "../demo.db", "--questions", "../q", "--reward", "reward.py:reward", "--max-steps", "2",
            "--batch-size", "2", "--num-generations", "8", "--max-tokens", "200", "--max-turns", "2",
            "--eval-size", "4", "--learning-rate", "1e-2", "--wandb", "disabled", "--json",
        ]  # fmt: skip
        settings = "vllm_gpu_memory_utilization = 0.2\nvllm_enforce_eager = true\nmax_batch_trajectories = 32\n"
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
        end = time.monotonic() + LIMIT
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

    def join(self) -> None:
        self.waiter.join()
        time.sleep(2)

    def report(self) -> str:
        """One line of facts, then what it said last."""
        left = [child.pid for child in self.children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        marks = ("Done", "made to fail", "interrupt", "Interrupted", "best_accuracy")
        said = [at for at, line in self.lines if any(mark in line for mark in marks)]
        since = self.asked or (said[0] if said else None)
        took = "NEVER" if self.gone is None else "?" if since is None else f"{self.gone - since:.1f} s"
        cuda = [line for _, line in self.lines if "CUDA Error" in line]
        tail = "\n    ".join(f"{at - self.lines[0][0]:6.1f} {line[:200]}" for at, line in self.lines[-14:])
        return (
            f"{self.how}: exit {self.process.returncode}, gone {took} after its word, {len(cuda)} CUDA errors, "
            f"children left {left}\n    {tail}"
        )


main()
