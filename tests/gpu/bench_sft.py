"""Tokens per second of supervised fine-tuning: `emailrl sft` beside TRL's SFTTrainer with packing.

    python tests/gpu/bench_sft.py                                                      # on one GPU
    python tests/gpu/bench_sft.py --shape 4B --sides emailrl "TRL 2 rows Liger"        # 0.6B, 4B, 14B: Qwen3's
    python tests/gpu/bench_sft.py --gpus all --shape 0.6B --sides emailrl "emailrl 2 alone" "emailrl 2 ranks"

Random weights of SmolLM2-135M's shape, or of others, in bf16; 256 conversations of about 2,000 tokens of which about 9%
are learned, 32 a step. An adapter of rank 16 on every linear layer, then all weights. A figure is the mean of the steps
behind its warm-up: data, forward, backward, clipping and AdamW. TRL packs rows of 8,192 tokens ("bfd") without gradient
checkpointing, on PyTorch's variable-length FlashAttention (flash-attn itself need not be there); of its ways (rows a
batch, with and without Liger kernels) the best counts. Weak scaling: two ranks have 64 a step, two processes "alone" on
a GPU each 32, which tells what the ranks cost each other from what the host costs both. Of a step on rank 0, "own" is
forward and backward, "waiting" for the others, "sum" the all-reduce; the rest is dealing, clipping and AdamW.
"""

from __future__ import annotations

import inspect
import itertools
import os
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from runner import Bench, Given, Row, forget_peak, now, peak_gib, torchrun
from shapes import LINEAR

from emailrl.model.policy import load_policy
from emailrl.ranks import ALONE, RankGroup, joined
from emailrl.settings import load_settings
from emailrl.sft.data import batches_of
from emailrl.sft.examples import Example
from emailrl.sft.fit import Fitter

NUM, BATCH, ROW = 256, 32, 8192
WARMUP, STEPS = 3, 5
VARLEN = "bench_varlen"
SIDES: dict[str, Row] = {
    "emailrl": {},
    "emailrl 2 alone": {"ranks": 2, "alone": True},
    "emailrl 2 ranks": {"ranks": 2},
    "TRL 8 rows Liger": {"way": [8, True]},
    "TRL 2 rows Liger": {"way": [2, True]},
    "TRL 8 rows": {"way": [8, False]},
}
"""TRL's rows a batch, accumulated to 8, and whether with Liger kernels."""
ALONE_ON_ONE = [name for name, how in SIDES.items() if "ranks" not in how]


def cases(given: Given) -> list[Row]:
    made = [
        {"case": f"{shape} {side}, {trains}", "shape": shape, "side": side, "trains": trains} | SIDES[side]
        for shape in given.shape
        for side in given.sides
        for trains in ("adapter", "all weights")
    ]
    return [one for one in made if "way" not in one and one["trains"] == "adapter"] if given.smoke else made


def measure(given: Given, case: Row) -> Row:
    full, folder = case["trains"] == "all weights", given.folder / case["shape"]
    groups = conversations(smoke=given.smoke)
    return theirs(folder, groups, full, *case["way"]) if "way" in case else ours(folder, groups, full, case)


def conversations(*, smoke: bool) -> list[list[Example]]:
    """A prompt, then three to five turns of some 45 learned tokens between results of some hundreds."""
    draw, vocabulary = random.Random(1), 512 if smoke else 49152
    scale = 10 if smoke else 1
    numbers = np.random.default_rng(1)
    made = []
    for n in range(NUM):
        spoken = [False] * (draw.randrange(620, 700) // scale)
        for _ in range(draw.randrange(3, 6)):
            spoken += [True] * (draw.randrange(35, 55) // scale) + [False] * (draw.randrange(220, 400) // scale)
        spoken += [True] * (40 // scale)
        ids = numbers.integers(300, vocabulary, len(spoken)).astype(np.uint32)
        made.append([Example(str(n), "inbox", ids, np.array(spoken))])
    return made


def ours(folder: Path, groups: list[list[Example]], full: bool, case: Row) -> Row | list[Row]:
    """Steps of ``emailrl sft`` with its default settings."""
    given = {"model_name": str(folder), "full_finetuning": full, "sft_steps": 1000, "sft_batch_size": BATCH}
    settings = load_settings(given, environ={}, cwd=folder)
    if "alone" in case and torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    with nullcontext(ALONE) if "alone" in case else joined(settings.training) as ranks:
        policy = load_policy(settings, trainable=True, full=full)
        fitter = Fitter(policy, settings.training, settings.sft, settings.agent.temperature, ranks)
        ranks.started()
        if isinstance(ranks, RankGroup) and not ranks.is_first:
            ranks.follow(lambda: fitter.take(ranks.scatter(None)))
            return []
        size = BATCH * ranks.world
        batches = batches_of(itertools.repeat(groups), len(groups), size, 1, 0)
        watch = {"own": Watch(fitter, "_sum")}
        watch |= {} if ranks.is_alone else {"waiting": Watch(ranks, "gather"), "sum": Watch(ranks, "all_reduce")}
        tokens, seconds, loss = 0, 0.0, 0.0
        for step in range(1, WARMUP + STEPS + 1):
            start = now()
            batch = next(batches)
            loss = fitter.step(batch, step=step)["loss"]
            if step > WARMUP:
                tokens, seconds = tokens + sum(len(example.token_ids) for example in batch), seconds + now() - start
            elif step == WARMUP:
                forget_peak()
                for each in watch.values():
                    each.seconds = 0.0
        return result(tokens, seconds, loss) | {name: each.seconds / STEPS for name, each in watch.items()}


class Watch:
    """The time spent in a method of an object."""

    def __init__(self, of: Any, name: str) -> None:
        self.seconds, method = 0.0, getattr(of, name)

        def watched(*given: Any, **named: Any) -> Any:
            begun = now()
            try:
                return method(*given, **named)
            finally:
                self.seconds += now() - begun

        setattr(of, name, watched)


def theirs(folder: Path, groups: list[list[Example]], full: bool, rows: int, liger: bool) -> dict[str, Any]:
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    cuda = torch.cuda.is_available()
    ends: list[float] = []
    losses: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            ends.append(now())
            if len(ends) == WARMUP:
                forget_peak()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **others: Any) -> None:
            losses.extend([logs["loss"]] if "loss" in (logs or {}) else [])

    examples = [
        {"input_ids": e.token_ids.astype(int).tolist(), "completion_mask": e.spoken.astype(int).tolist()}
        for group in groups
        for e in group
    ]
    # Weights that are trained stay in float32 under autocast, as the trainer's own loading leaves them.
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32 if full else torch.bfloat16)
    register_varlen()
    model.set_attn_implementation(VARLEN)
    trainer = SFTTrainer(
        model=model.to("cuda" if cuda else "cpu"),
        args=SFTConfig(
            output_dir=str(folder.parent / "trl"), bf16=cuda, use_cpu=not cuda, report_to=[], save_strategy="no",
            logging_steps=1, max_steps=WARMUP + STEPS, per_device_train_batch_size=rows,
            gradient_accumulation_steps=8 // rows, gradient_checkpointing=False, packing=True, max_length=ROW,
            completion_only_loss=True, use_liger_kernel=liger, learning_rate=2e-4, disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(examples),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=None if full else LoraConfig(r=16, lora_alpha=32, target_modules=LINEAR, task_type="CAUSAL_LM"),
        callbacks=[Clock()],
    )  # fmt: skip
    packed = sum(len(row["input_ids"]) for row in trainer.train_dataset)
    trainer.train()
    # Rows are drawn at random: a step holds 8 rows of the packed set's mean length.
    tokens = round(STEPS * 8 * packed / len(trainer.train_dataset))
    return result(tokens, ends[-1] - ends[WARMUP - 1], losses[-1] if losses else float("nan"))


def register_varlen() -> None:
    """Give transformers PyTorch's own variable-length FlashAttention, which TRL's packing asks for. Where a sample
    begins its position is 0."""
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface, AttentionMaskInterface

    causal = "is_causal" in inspect.signature(varlen_attn).parameters
    how: dict[str, Any] = {"is_causal": True} if causal else {"window_size": (-1, 0)}

    def attend(module: Any, query: Any, key: Any, value: Any, mask: Any, **named: Any) -> tuple[Any, None]:
        positions = named["position_ids"].flatten()
        starts = (positions == 0).nonzero()[:, 0]
        bounds = torch.cat((starts, starts.new_tensor([len(positions)]))).int()
        longest = int((bounds[1:] - bounds[:-1]).max())
        groups = query.shape[1] // key.shape[1]
        heads = [query, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)]
        flat = [one.transpose(1, 2).flatten(0, 1).to(torch.bfloat16).contiguous() for one in heads]
        out = varlen_attn(*flat, bounds, bounds, longest, longest, **how)
        return out[None].to(query.dtype), None

    AttentionInterface.register(VARLEN, attend)
    AttentionMaskInterface.register(VARLEN, lambda *arguments, **named: None)


def result(tokens: int, seconds: float, loss: float) -> dict[str, Any]:
    return {"tokens_per_second": round(tokens / seconds), "step_seconds": round(seconds / STEPS, 3),
            "peak_gib": round(peak_gib(), 1), "loss": round(loss, 3)}  # fmt: skip


def compare(rows: list[Row]) -> None:
    """Add what a GPU of several does of one alone."""
    ones = {(row["shape"], row["trains"]): row for row in rows if row["side"] == "emailrl" and "error" not in row}
    for row in rows:
        if "ranks" in row and "error" not in row and (one := ones.get((row["shape"], row["trains"]))):
            each = row["tokens_per_second"] / (1 if "alone" in row else row["ranks"])
            row["of_one"] = each / one["tokens_per_second"]


BENCH = Bench(
    __file__,
    __doc__,
    measure,
    {
        "shape": "shape", "trains": "trains", "side": "side", "tokens/s": "tokens_per_second:,",
        "s a step": "step_seconds:.3f", "peak GiB": "peak_gib:.1f", "loss": "loss:.3f",
        "a GPU of one": "of_one:.3f", "own s": "own:.3f", "waiting s": "waiting:.3f", "sum s": "sum:.3f",
    },
    {
        "--shape": {"nargs": "+", "default": ["135M"]},
        "--sides": {"nargs": "+", "default": ALONE_ON_ONE, "choices": [*SIDES]},
    },
    cases=cases,
    smoke={"shape": ["smoke"]},
    launcher=lambda case: torchrun(case) if "ranks" in case else [sys.executable],
    add=compare,
    seconds=400,
)  # fmt: skip

if __name__ == "__main__":
    BENCH.main()
