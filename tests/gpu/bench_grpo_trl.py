"""A whole GRPO step: emailrl beside TRL's own GRPOTrainer with vLLM in process, same model, prompts, batch and card.

    python tests/gpu/bench_grpo_trl.py --shape 4B --tokenizer qwen_tokenizer --work work --gpus 0 1 2 3    # all at once
    python tests/gpu/bench_grpo_trl.py --tokenizer qwen_tokenizer --work work --gpus 0    # one after the other
    python tests/gpu/bench_grpo_trl.py --tokenizer qwen_tokenizer --work work --gpus 0 1 --sides emailrl-awake TRL-awake
    python tests/gpu/bench_grpo_trl.py --smoke --work work    # a rehearsal on the CPU with nano

Random weights of the shape, bf16, LoRA of rank 16 on all linear layers; 8 questions x 6 rollouts of one turn (TRL has
no mailbox): emailrl's own prompts on the demo's mail, completions of exactly ``--completion`` tokens, rewards drawn at
random, no reference (BETA=0), one optimizer step, importance correction on as both have it by default. emailrl runs by
``bench_grpo_step``; TRL with sequences in batches of 4 (its fastest in ``bench_train_step``) and gradient
checkpointing, merged weights copied to vLLM every step. Both run with vLLM asleep during the update and with vLLM awake
throughout, in 0.3 of the memory; emailrl also by default, awake if both fit. The first step warms up. Each side runs in
a process of its own and ends after ``--seconds``. TRL's sleeping and waking of the cache counts as its sampling.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench_sampling import write_model
from measured import markdown, now, peak_gib, records
from processes import environment, hand_out, in_time, itself, show_end

QUESTIONS, ROLLOUTS, ROWS = 8, 6, 4
SIDES = ("emailrl-asleep", "TRL-asleep", "emailrl-awake", "TRL-awake", "emailrl-default")
SHARE = 0.3
"""Of the card's memory, for a vLLM that stays awake."""


def main() -> None:
    """Write the model, run both sides, print one table."""
    given = arguments()
    if given.side:
        trl(given)
        sys.stdout.flush()
        os._exit(0)  # vLLM's own end may hang
    given.work.mkdir(parents=True, exist_ok=True)
    if not given.smoke:
        write_model(given.shape, given.tokenizer, given.work / given.shape, given.gpus[0])
    hand_out(given.sides, given.gpus, lambda side, gpu: run(given, side, gpu))
    print_table(given, {side: steps_of(given.work / f"{side}.jsonl") for side in given.sides})


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="4B", choices=["0.6B", "4B", "14B"])
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer with a chat template, written beside the weights")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--gpus", nargs="+", default=["0"])
    parser.add_argument("--completion", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=4, help="the first of which does not count")
    parser.add_argument("--seconds", type=float, default=280, help="for each side")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=SIDES)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.work = given.work.absolute()
    if given.smoke:
        given.completion, given.steps, given.gpus, given.sides = 24, 3, [""], ["emailrl-awake", "TRL-awake"]
    elif given.tokenizer is None:
        parser.error("--tokenizer is needed")
    return given


def run(given: argparse.Namespace, side: str, gpu: str) -> None:
    """One side in its process, on its card; a failure shows the end of its log."""
    here = Path(__file__).parent
    out = given.work / f"{side}.jsonl"
    out.unlink(missing_ok=True)
    command = itself("--side", side)
    if side.startswith("emailrl"):
        command = [sys.executable, str(here / "bench_grpo_step.py"), "--folder", str(given.work), "--out", str(out)]
        command += ["--shape", given.shape, "--completion", str(given.completion), "--steps", str(given.steps)]
        command += ["--seconds", str(given.seconds), "--engine", "transformers" if given.smoke else "vllm"]
        command += ["--tokenizer", str(given.tokenizer)] if given.tokenizer else []
        command += ["--smoke"] if given.smoke else []
        command += ["--set", "beta=0", "temperature=1"]
        awake = ["vllm_enable_sleep=off", f"vllm_gpu_memory_utilization={SHARE}"]
        states = {"asleep": ["vllm_enable_sleep=on"], "awake": awake, "default": []}
        command += states[side.split("-")[1]]
    log = given.work / f"{side}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment(gpu))
    in_time(process, given.seconds + 20, by=signal.SIGKILL)
    if process.returncode:
        show_end(log, f"ended with {process.returncode}")


# -- TRL


def prompts(model: Path, settings: Any) -> list[str]:
    """The first prompt of the first questions, as emailrl renders it."""
    from contextlib import closing

    from bench_grpo_step import demo_settings
    from transformers import AutoTokenizer

    from emailrl.agent import MailEnvironment, tool_schemas
    from emailrl.engines.renderer import ChatRenderer
    from emailrl.mail import open_mailbox
    from emailrl.questions import load_scenarios

    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model), tool_schemas())
    with tempfile.TemporaryDirectory() as folder:
        demo = demo_settings(Path(folder))
        found = load_scenarios(
            demo["questions"], None, limit=QUESTIONS, seed=1, data=settings.data, check_inboxes=False
        )
        texts = []
        for scenario in found:
            with closing(open_mailbox(demo["db"], scenario.inbox_address, until=scenario.query_date)) as box:
                texts.append(renderer.start(MailEnvironment(scenario, box, max_turns=10).start()).text)
    return texts


def trl(given: argparse.Namespace) -> None:
    """Steps of TRL's GRPOTrainer; a line of JSON for each as it ends."""
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from emailrl.model.resolve import NANO_DIR
    from emailrl.settings import load_settings

    model = NANO_DIR if given.smoke else given.work / given.shape
    texts = prompts(model, load_settings({}, environ={}))
    clocks: dict[str, float] = {}
    marks = [time.perf_counter()]

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *given: Any, **named: Any) -> None:
            marks[0] = now()

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            marks.append(now())
            row = {"step": state.global_step, "seconds": marks[-1] - marks[-2], "peak_gib": peak_gib()} | clocks
            clocks.clear()
            with (given.work / f"{given.side}.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            if marks[-1] - begun > given.seconds:
                control.should_training_stop = True

    begun, cuda, samples_with_vllm = now(), torch.cuda.is_available(), find_spec("vllm") is not None
    if not cuda:
        without_triton()
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    draw = random.Random(1)
    sampler: dict[str, Any] = {
        "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": SHARE,
        "vllm_enable_sleep_mode": given.side.endswith("asleep"),
        "vllm_max_model_length": 8192 if cuda else 2048, "generation_kwargs": {"ignore_eos": True},
    }  # fmt: skip
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=lambda prompts, **columns: [draw.uniform(-1, 1) for _ in prompts],
        args=GRPOConfig(
            output_dir=str(given.work / given.side), max_steps=given.steps, per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=QUESTIONS * ROLLOUTS // ROWS, num_generations=ROLLOUTS,
            max_completion_length=given.completion, temperature=1.0, beta=0.0, learning_rate=1e-4, bf16=cuda,
            use_cpu=not cuda, gradient_checkpointing=True, report_to=[], save_strategy="no", logging_steps=1,
            disable_tqdm=True, model_init_kwargs={"dtype": "bfloat16" if cuda else "float32"},
            **(sampler if samples_with_vllm else {"generation_kwargs": {"min_new_tokens": given.completion}}),
        ),
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"),
        callbacks=[Clock()],
    )  # fmt: skip
    if samples_with_vllm and not cuda:
        trainer.vllm_generation.sync_weights = lambda: None  # vLLM packs weights on a CPU, and takes no others
    if samples_with_vllm:
        for method in ("generate", "sync_weights"):
            timed(trainer.vllm_generation, method, clocks)
    took_in = trainer._generate_and_score_completions

    def counted(*arguments: Any, **named: Any) -> Any:
        made = took_in(*arguments, **named)
        clocks["prompt_tokens"] = int(made["prompt_mask"].sum())
        clocks["completion_tokens"] = int(made["completion_mask"].sum())
        return made

    trainer._generate_and_score_completions = counted
    print(f"ready after {now() - begun:.0f} s", flush=True)
    trainer.train()


def without_triton() -> None:
    """Put plain torch where TRL has a Triton kernel, for the rehearsal."""
    import torch
    from trl.trainer import utils

    def apply(hidden: Any, weight: Any, bias: Any, labels: Any, temperature: float, *others: Any) -> Any:
        logits = torch.nn.functional.linear(hidden, weight, bias).float().div(temperature)
        logprobs = logits.log_softmax(-1)
        chosen, probs = logprobs.gather(-1, labels[:, None])[:, 0], logprobs.detach().exp()
        entropy, is_top1 = -(probs * logprobs.detach()).sum(-1), labels == logits.argmax(-1)
        return chosen, entropy, probs.square().sum(-1).log(), logits.detach().mean(-1), is_top1

    utils._ChunkedLogProbFunction = SimpleNamespace(apply=apply)


def timed(owner: Any, method: str, clocks: dict[str, float]) -> None:
    """Sum the seconds of a method."""
    inner = getattr(owner, method)

    def timing(*given: Any, **named: Any) -> Any:
        before = now()
        result = inner(*given, **named)
        clocks[method] = clocks.get(method, 0.0) + now() - before
        return result

    setattr(owner, method, timing)


# -- the table


def steps_of(file: Path) -> list[dict[str, Any]]:
    """A side's steps after the first, in common words."""
    found = records(file)
    if file.stem.startswith("TRL"):
        return [
            {
                "seconds": one["seconds"], "prompt": one["prompt_tokens"], "sampled": one["completion_tokens"],
                "sampling": one.get("generate", 0.0), "hand-over": one.get("sync_weights", 0.0),
            }
            for one in found if one["step"] > 1
        ]  # fmt: skip
    steps = [one for one in found if one["kind"] == "step" and one["counts"]]
    return [
        {
            "seconds": one["seconds"], "prompt": one["batch"]["tokens"] - one["batch"]["sampled_tokens"],
            "sampled": one["batch"]["sampled_tokens"],
            "sampling": sum(value for name, value in one["own"].items() if name.startswith("sampling/")),
            "hand-over": sum(one["own"].get(name, 0.0) for name in OVER),
        }
        | {name: one["own"].get(name, 0.0) for name in OVER}
        for one in steps
    ]  # fmt: skip


OVER = ("adapter/save", "adapter/read", "adapter/load", "adapter/trainer", "adapter/proof", "wake", "sleep")


def cells(mean: dict[str, float] | None) -> list[str]:
    """A side's figures."""
    if mean is None:
        return ["no step was measured"]
    rest = mean["seconds"] - mean["sampling"] - mean["hand-over"]
    seconds = [f"{value:.2f}" for value in (mean["seconds"], mean["sampling"], mean["hand-over"], rest)]
    rate = (mean["prompt"] + mean["sampled"]) / mean["seconds"]
    return [*seconds, f"{mean['prompt']:,.0f}", f"{mean['sampled']:,.0f}", f"{rate:,.0f}"]


def print_table(given: argparse.Namespace, sides: dict[str, list[dict[str, Any]]]) -> None:
    """Means over the steps, and how many times as fast emailrl is."""
    columns = ("seconds", "sampling", "hand-over", "prompt", "sampled")
    means = {
        side: {name: statistics.fmean(step[name] for step in steps) for name in columns}
        for side, steps in sides.items()
        if steps
    }
    print(f"\n{'nano' if given.smoke else given.shape}, {QUESTIONS} x {ROLLOUTS} completions of {given.completion}")
    head = ["side", "steps", "s a step", "of it sampling", "hand-over of weights", "update and rest", "prompt tokens",
            "sampled tokens", "tokens/s"]  # fmt: skip
    print(markdown(head, [[side, len(steps), *cells(means.get(side))] for side, steps in sides.items()]))
    print()
    for side in means:
        parts = {name: statistics.fmean(step.get(name, 0.0) for step in sides[side]) for name in OVER}
        if any(parts.values()):
            print(f"{side}: hand-over is", ", ".join(f"{name} {value:.2f}" for name, value in parts.items()))
    for state in ("asleep", "awake"):
        mine, other = (means.get(f"{library}-{state}") for library in ("emailrl", "TRL"))
        if mine and other:
            print(f"vLLM {state}: emailrl is {other['seconds'] / mine['seconds']:.2f} x as fast")


if __name__ == "__main__":
    main()
