"""Where every second of a whole GRPO step goes, on one GPU: vLLM in process asleep while the trainer works.

    python tests/gpu/bench_grpo_step.py --shape 14B --db data/enron_emails.db --questions art_e_questions.jsonl \\
        --tokenizer qwen_tokenizer --folder models --out step.jsonl --figure step.svg
    python tests/gpu/bench_grpo_step.py --shape 4B --tokenizer qwen_tokenizer --completion 1024 --set beta=0
    python tests/gpu/bench_grpo_step.py --report step.jsonl --figure step.svg      # draws again, without a GPU
    python tests/gpu/bench_grpo_step.py --smoke                                    # a rehearsal on the CPU

The steps are those of ``emailrl train``: its own run, its own loop, default settings but for the batch (8 questions x 6
rollouts); clocks are put on its methods (``step_timeline``). Random weights of the true shapes say nothing sensible, so
the conversation is played by a script as in ``bench_sampling``, and rewards are drawn by seed, so that every group is
trained. The first step warms up (vLLM starts, kernels are compiled) and does not count. Evaluation is left out.
Afterwards one micro-batch of the last step runs under the profiler. ``--completion N``: one turn of exactly N tokens
instead of the script, as ``bench_grpo_trl`` compares. Without ``--db``: the demo's mailbox. No step begins after
``--seconds``.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

from bench_sampling import save_model
from measured import settle
from step_figure import draw, tables
from step_run import LONGEST, Bench, TimeUp, prepare
from step_timeline import Timeline

from emailrl.records import read_records

SETTINGS: dict[str, Any] = {
    "per_device_train_batch_size": 8,
    "num_generations": 6,
    "max_model_len": 16384,
    "max_tokens": LONGEST,
    "learning_rate": 1e-4,  # so large that the engine's proof sees the adapter move
    "warmup_steps": 1,
    "vllm_probe_tolerance": 0.3,  # random weights amplify rounding: 0.04 nats between two kernels in bf16
    "judge": "offline",
    "allow_shared_inbox": True,
    "wandb_mode": "disabled",
}
SMOKE: dict[str, Any] = {
    "model_name": "nano",
    "num_generations": 3,
    "per_device_train_batch_size": 2,
    "max_model_len": 4096,
    "vllm_enforce_eager": True,
}


def main() -> None:
    """Measure, or read what was measured; print the tables and draw."""
    given = arguments()
    if given.report:
        found = list(read_records(given.report))
        print(tables(found))
    else:
        found = measure(given)
    if not any(record["kind"] == "step" and record["counts"] for record in found):
        sys.exit(1)
    if given.figure:
        draw(found, given.figure)


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="14B", choices=["0.6B", "4B", "14B"])
    parser.add_argument("--engine", default="vllm", choices=["vllm", "transformers"])
    parser.add_argument("--steps", type=int, default=3, help="steps, the first of which does not count")
    parser.add_argument("--db", type=Path, help="a mail database; default: the demo's")
    parser.add_argument("--questions", type=Path, help="questions on it (JSONL)")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer with a chat template, written beside the weights")
    parser.add_argument("--folder", type=Path, help="where the weights are, or are written")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="further settings: beta=0")
    parser.add_argument("--completion", type=int, help="one turn of so many tokens")
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--smoke", action="store_true", help="the packaged policy on the demo's mail")
    parser.add_argument("--out", type=Path, help="results as JSON lines")
    parser.add_argument("--figure", type=Path, help="the picture (SVG or PNG)")
    parser.add_argument("--report", type=Path, help="read results instead of measuring")
    given = parser.parse_args()
    if given.tokenizer is None and not (given.smoke or given.report):
        parser.error("--tokenizer is needed")
    return given


# -- one run


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the steps; returns the records. A failure is told with the phase it came in, and what there is with it."""
    bench = Bench(given, Timeline(settle))
    try:
        with tempfile.TemporaryDirectory(prefix="grpo-step-") as folder:
            run_steps(bench, Path(folder))
    except TimeUp:
        note(f"stopped after {given.seconds:.0f} s")
    except Exception:
        print(traceback.format_exc()[-4000:])
        where = " > ".join(bench.timeline.failed_in) or "outside the steps"
        print(f"FAILED after {sum(one['kind'] == 'step' for one in bench.records)} steps, in: {where}")
    print(tables(bench.records))
    return bench.records


def run_steps(bench: Bench, folder: Path) -> None:
    """Write the model if need be, open the run, put clocks on it, run its loop, and profile a micro-batch."""
    from micro_batch_profile import profile_micro_batch

    from emailrl.ranks import ALONE
    from emailrl.runs.log import Display
    from emailrl.settings import load_settings
    from emailrl.training.assemble import open_run
    from emailrl.training.loop import loop

    given = bench.given
    faulthandler.dump_traceback_later(300, exit=False)
    begun = time.perf_counter()
    overrides = SETTINGS | {"output_dir": folder / "run", "max_steps": given.steps, "engine": given.engine}
    overrides |= {"max_tokens": given.completion} if given.completion else {}
    overrides |= SMOKE if given.smoke else real_settings(given, folder)
    overrides |= {"db": given.db, "questions": given.questions} if given.db else demo_settings(folder)
    overrides |= dict(one.split("=", 1) for one in given.set)
    settings = load_settings(overrides, environ={})
    start = {"weights written": time.perf_counter() - begun}
    begun = time.perf_counter()
    with open_run(settings, ALONE, Display(note), resume=None, overwrite=False) as run, run.interrupts.installed():
        start["model loaded"] = time.perf_counter() - begun
        bench.tell(described(bench, settings) | {"startup": start})
        prepare(bench, run)
        bench.timeline.cut()  # the first step begins here
        loop(run)
        saved = bench.timeline.whole["Run.save"]
        bench.prepared.sort(key=lambda item: item.num_tokens)
        micro_batch = profile_micro_batch(run.updater, bench.prepared[len(bench.prepared) // 2])
        bench.tell({"kind": "micro_batch", "of": len(bench.prepared), "checkpoint": saved} | micro_batch)
    faulthandler.cancel_dump_traceback_later()


def note(line: str) -> None:
    """What the run says goes where it is not in the way of the tables."""
    print(line, file=sys.stderr, flush=True)


def demo_settings(folder: Path) -> dict[str, Any]:
    """The demo's mailbox and questions."""
    from emailrl.questions.beside import questions_file, write_demo
    from emailrl.settings import load_settings

    db = folder / "demo.db"
    write_demo(db, settings=load_settings({}, environ={}).store, seed=1, overwrite=True)
    return {"db": db, "questions": questions_file(db)}


def real_settings(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """A model of the shape, its weights written where they are not there yet."""
    import torch

    path: Path = (given.folder or folder) / given.shape
    if not (path / "tokenizer_config.json").exists():  # written last
        note(f"writing random weights to {path}")
        path.mkdir(parents=True, exist_ok=True)
        save_model(given.shape, given.tokenizer, path)
        gc.collect()
        torch.cuda.empty_cache()
    return {"model_name": str(path)}


def described(bench: Bench, settings: Any) -> dict[str, Any]:
    """What was run, on what."""
    import torch

    from emailrl.runs.run import versions

    training, vllm = settings.training, settings.vllm
    return {
        "kind": "run",
        "shape": "nano" if bench.given.smoke else bench.given.shape,
        "engine": bench.given.engine,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": versions(),
        "date": time.strftime("%Y-%m-%d"),
        "set": bench.given.set,
        "settings": {
            "questions": training.per_device_train_batch_size,
            "rollouts": training.num_generations,
            "beta": settings.algorithm.beta,
            "gradient_checkpointing": training.gradient_checkpointing,
            "vllm_gpu_memory_utilization": vllm.vllm_gpu_memory_utilization,
        },
    }


if __name__ == "__main__":
    main()
