"""A whole GRPO step: emailrl beside TRL's own GRPOTrainer with vLLM in process, same model, prompts, batch and card.

    python tests/gpu/bench_grpo_trl.py --shape 4B --tokenizer qwen_tokenizer --folder work --gpus 0 1 2 3  # all at once
    python tests/gpu/bench_grpo_trl.py --tokenizer qwen_tokenizer --folder work --sides emailrl-awake TRL-awake

Random weights of the shape, bf16, LoRA of rank 16 on all linear layers; 8 questions x 6 rollouts of one turn (TRL has
no mailbox): emailrl's own prompts on the demo's mail, completions of exactly ``--completion`` tokens, rewards drawn at
random, no reference (BETA=0), one optimizer step, importance correction on as both have it by default. emailrl runs by
``bench_grpo_step``; TRL with sequences in batches of 4 (its fastest in ``bench_train_step``) and gradient
checkpointing, merged weights copied to vLLM every step. Both run with vLLM asleep during the update and with vLLM awake
throughout, in 0.3 of the memory; emailrl also by default, awake if both fit. The first step warms up. TRL's
sleeping and waking of the cache counts as its sampling. Every step is a row; the table has the means without the first.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import bench_grpo_step
from bench_grpo_step import demo
from clocks import Clocks
from runner import Bench, Given, Row, now, peak_gib
from shapes import LINEAR

QUESTIONS, ROLLOUTS, ROWS = 8, 6, 4
SHARE = 0.3  # of the card's memory, for a vLLM that stays awake
AWAKE = ["vllm_enable_sleep=off", f"vllm_gpu_memory_utilization={SHARE}"]
SIDES: dict[str, list[str]] = {
    "emailrl-asleep": ["vllm_enable_sleep=on"], "TRL-asleep": [], "emailrl-awake": AWAKE, "TRL-awake": [],
    "emailrl-default": [],
}  # fmt: skip


def measure(given: Given, case: Row) -> list[Row]:
    side = case["case"]
    if side.startswith("TRL"):
        return trl(given, asleep=side.endswith("asleep"))
    more = {"engine": "transformers" if given.smoke else "vllm", "db": None, "questions": None}
    changes = ["beta=0", "temperature=1", *SIDES[side]]
    rows = bench_grpo_step.measure(SimpleNamespace(**vars(given) | more, set=changes), case)  # type: ignore[arg-type]
    return [row if "error" in row else row | {"hand-over": row["adapter"] + row["wake"] + row["sleep"]} for row in rows]


def prompts(model: Path) -> list[str]:
    """The first prompt of the first questions, as emailrl renders it."""
    from transformers import AutoTokenizer

    from emailrl.agent import MailEnvironment, tool_schemas
    from emailrl.engines.renderer import ChatRenderer
    from emailrl.mail import open_mailbox
    from emailrl.questions.load import read_questions
    from emailrl.settings import DataSettings

    renderer = ChatRenderer(AutoTokenizer.from_pretrained(model), tool_schemas())
    with tempfile.TemporaryDirectory() as folder:
        db, file = demo(Path(folder))
        texts = []
        questions = read_questions(file, DataSettings()).of(None, limit=QUESTIONS, seed=1, check_inboxes=False)
        for scenario in questions.scenarios:
            with closing(open_mailbox(db, scenario.inbox_address, until=scenario.query_date)) as box:
                texts.append(renderer.start(MailEnvironment(scenario, box, max_turns=10).start()).text)
    return texts


def trl(given: Given, *, asleep: bool) -> list[Row]:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    model = given.folder / given.shape
    texts = prompts(model)
    clocks, counts, rows = Clocks(now), dict[str, int](), list[Row]()

    class Steps(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *given: Any, **named: Any) -> None:
            clocks.cut()

        def on_step_end(self, args: Any, state: Any, control: Any, **named: Any) -> None:
            seconds, own = clocks.cut()
            row = {"step": state.global_step, "seconds": seconds, "peak_gib": peak_gib()} | counts
            rows.append(row | {name: own.get(name, 0.0) for name in ("sampling", "hand-over")})
            if now() - begun > given.limit - 30:
                control.should_training_stop = True

    begun = now()
    draw = random.Random(1)
    trainer = GRPOTrainer(
        model=str(model),
        reward_funcs=lambda prompts, **columns: [draw.uniform(-1, 1) for _ in prompts],
        args=GRPOConfig(
            output_dir=str(given.out / "trl"), max_steps=given.steps, per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=QUESTIONS * ROLLOUTS // ROWS, num_generations=ROLLOUTS,
            max_completion_length=given.completion, temperature=1.0, beta=0.0, learning_rate=1e-4, bf16=True,
            gradient_checkpointing=True, report_to=[], save_strategy="no", logging_steps=1,
            disable_tqdm=True, model_init_kwargs={"dtype": "bfloat16"},
            use_vllm=True, vllm_mode="colocate", vllm_gpu_memory_utilization=SHARE, vllm_enable_sleep_mode=asleep,
            vllm_max_model_length=8192, generation_kwargs={"ignore_eos": True},
        ),
        train_dataset=Dataset.from_list([{"prompt": text} for text in texts]),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=LINEAR, task_type="CAUSAL_LM"),
        callbacks=[Steps()],
    )  # fmt: skip
    kind = type(trainer.vllm_generation)
    clocks.time(f"{kind.__module__}:{kind.__qualname__}.generate", "sampling")
    clocks.time(f"{kind.__module__}:{kind.__qualname__}.sync_weights", "hand-over")
    took_in = trainer._generate_and_score_completions

    def counted(*arguments: Any, **named: Any) -> Any:
        made = took_in(*arguments, **named)
        prompts, sampled = (int(made[f"{part}_mask"].sum()) for part in ("prompt", "completion"))
        counts.update(sampled_tokens=sampled, tokens=prompts + sampled)
        return made

    trainer._generate_and_score_completions = counted
    trainer.train()
    return rows


def add_means(rows: list[Row]) -> None:
    """Each side's means over the steps but the first, in place of them, and how many times as fast emailrl is."""
    sides: dict[str, list[Row]] = {}
    for row in rows:
        sides.setdefault(row["case"], []).append(row)
    rows.clear()
    for name, steps in sides.items():
        counted = [row for row in steps if row.get("step", 0) > 1]
        names = ("seconds", "sampling", "hand-over", "tokens", "sampled_tokens")
        mean = {name: statistics.fmean(row[name] for row in counted) for name in names} if counted else {}
        rows.append(steps[-1] | mean | {"steps": len(counted)})
        if counted:
            rows[-1]["rest"] = mean["seconds"] - mean["sampling"] - mean["hand-over"]
            rows[-1]["rate"] = mean["tokens"] / mean["seconds"]
    seconds = {row["case"]: row["seconds"] for row in rows if row.get("steps")}
    for row in rows:
        if (peer := row["case"].replace("emailrl", "TRL")) in seconds and row["case"] in seconds:
            row["x_trl"] = seconds[peer] / row["seconds"]


BENCH = Bench(
    __file__,
    __doc__,
    measure,
    {
        "side": "case", "steps": "steps", "s a step": "seconds:.2f", "of it sampling": "sampling:.2f",
        "hand-over of weights": "hand-over:.2f", "update and rest": "rest:.2f", "tokens": "tokens:,.0f",
        "sampled": "sampled_tokens:,.0f", "tokens/s": "rate:,.0f", "x TRL": "x_trl:.2f",
    },
    {
        "--shape": {"default": "4B"},
        "--completion": {"type": int, "default": 1024},
        "--steps": {"type": int, "default": 4, "help": "the first of which does not count"},
        "--sides": {"nargs": "+", "default": list(SIDES), "choices": SIDES},
    },
    lambda given: [{"case": side} for side in given.sides],
    smoke={"shape": "nano", "completion": 24, "steps": 3, "sides": ["emailrl-awake"]},
    shapes=lambda given: [] if given.smoke else [given.shape],
    add=add_means,
    seconds=1500,
    limit=300,
)  # fmt: skip

if __name__ == "__main__":
    BENCH.main()
