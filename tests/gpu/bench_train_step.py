"""Seconds per forward and backward pass of one GRPO batch: emailrl, TRL and Unsloth's layers side by side.

    python tests/gpu/bench_train_step.py --shape 0.6B 4B --sides fast lean

48 trajectories (8 questions x 6) of 2 to 6 thousand tokens, LoRA of rank 16 on every linear layer, bf16, random weights
of the true shapes. ``selective`` to ``wide`` compute a prefix that trajectories share in a micro-batch once, but for
``apart``, which is ``fast`` without. Tokens a second are those of the trajectories, however often a prefix is computed;
``computed`` says how many went through the layers, and MFU counts these. That sides agree: ``test_layers``. Every side
loads the same weights, gets the same LoRA values, token ids and mask, and takes the gradient of the same loss: minus
advantage times log-probability, averaged over the trained tokens of the whole batch.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

if '"side": "unsloth"' in sys.argv[-1]:  # the process of such a case
    import unsloth  # noqa: F401  before transformers, which it patches
from runner import Bench, Given, Row, forget_peak, now, peak_gib
from shapes import LINEAR, advantage, config_of, make_samples, set_lora
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from emailrl.model.fused import enable_fused
from emailrl.model.logprobs import token_logprobs
from emailrl.model.packing import shares_prefixes, takes_packed
from emailrl.model.policy import load_policy
from emailrl.settings import Settings
from emailrl.training.batch import Layout, TrainingSample, micro_batches
from emailrl.training.losses import policy_loss

PEAK_TFLOPS = 790
OURS: dict[str, tuple[int, dict[str, Any]]] = {
    "padded": (16384, {"packing": False, "fused_layers": False, "gradient_checkpointing": "on"}),
    "packed": (16384, {"fused_layers": False, "prefix_sharing": False, "gradient_checkpointing": "on"}),
    "unsloth": (16384, {"backend": "unsloth", "gradient_checkpointing": "on"}),
    "selective": (8192, {"gradient_checkpointing": "selective"}),
    "lean": (4096, {"gradient_checkpointing": "on"}),
    "apart": (16384, {"gradient_checkpointing": "auto", "prefix_sharing": False}),
    "fast": (16384, {"gradient_checkpointing": "auto"}),
    "wide": (32768, {"gradient_checkpointing": "auto"}),
}
"""Tokens of a micro-batch, and settings."""
TRL = {"trl": (4, False), "trl 8": (8, False), "trl 4 Liger": (4, True), "trl 8 Liger": (8, True)}
"""Sequences in a batch, and whether with Liger kernels; ``x TRL`` is against the fastest of those in the table."""
SIDES = [*TRL, *OURS]


@dataclass(frozen=True)
class Work:
    """What a side has to compute of a list of samples: no padding, nothing twice, shared prefixes once."""

    tokens: int
    pairs: int  # twice the pairs of a token and one that it attends to


def work_apart(samples: list[TrainingSample]) -> Work:
    """Where every sample is computed on its own."""
    return Work(sum(len(one.token_ids) for one in samples), sum(len(one.token_ids) ** 2 for one in samples))


@dataclass
class Side:
    """How a side runs a list of samples: forward and backward, gradients left in the parameters."""

    model: Any
    run: Callable[[list[TrainingSample]], None]
    work: Callable[[list[TrainingSample]], Work] = work_apart


def policy_side(folder: Path, max_tokens: int, backend: str = "transformers", **training: Any) -> Side:
    """emailrl's own way, over whatever backend and layers the settings choose."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = {"name": str(folder), "dtype": "bf16", "device": device, "backend": backend, "max_model_len": 8192}
    lora = {"lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
    settings = Settings.model_validate({"model": model, "lora": lora, "training": training})
    policy = load_policy(settings, trainable=True)
    model = policy.model
    if backend == "transformers" and settings.training.fused_layers and device == "cpu":
        assert enable_fused(model, settings.training.gradient_checkpointing) is None
    set_lora(model)
    model.train()
    shares = settings.training.prefix_sharing and shares_prefixes(model)
    layout = Layout(max_tokens, device=policy.device, packing=takes_packed(model), share_prefixes=shares)

    def run(samples: list[TrainingSample]) -> None:
        batches = micro_batches(samples, layout)
        total = float(sum(batch.num_trainable for batch in batches))
        for batch in batches:
            mask, shared = batch.loss_mask, batch.shared
            logprobs = token_logprobs(model, batch.token_ids, mask, entropy=True, shared=shared).logprobs
            advantages = torch.tensor([advantage(samples[i]) for i in batch.indices], device=mask.device)
            loss, _ = policy_loss(logprobs, logprobs.detach(), advantages, mask, denominator=total)
            loss.backward()

    def work(samples: list[TrainingSample]) -> Work:
        batches, pairs = micro_batches(samples, layout), 0
        for batch in batches:
            ends = torch.arange(1, batch.loss_mask.shape[1] + 1, device=batch.shared.device)
            lengths = (batch.loss_mask * ends).amax(1)
            pairs += int((lengths.square() - batch.shared.square()).sum())
        return Work(sum(batch.num_tokens for batch in batches), pairs)

    return Side(model, run, work)


def trl_side(folder: Path, per_batch: int, liger: bool) -> Side:
    """TRL's GRPOTrainer with its own model preparation; only its loss and the backward pass are run. Batches are padded
    to their own longest row, which is less than the trainer itself pads to."""
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer

    cuda = torch.cuda.is_available()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda" if cuda else "cpu")
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=lambda **columns: [0.0] * len(columns["prompts"]),
        args=GRPOConfig(
            output_dir=str(folder / "trl"), bf16=True, use_cpu=not cuda, gradient_checkpointing=True,
            gradient_checkpointing_kwargs={"use_reentrant": False}, use_liger_kernel=liger, report_to=[], beta=0.0,
            per_device_train_batch_size=per_batch, num_generations=2, loss_type="bnpo", max_completion_length=8192,
        ),
        train_dataset=Dataset.from_list([{"prompt": "a"}] * 8),
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules=LINEAR, task_type="CAUSAL_LM"),
    )  # fmt: skip
    # Both are set in Trainer.train(), which would also generate.
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    set_lora(trainer.model)
    trainer.model.train()

    def run(samples: list[TrainingSample]) -> None:
        total = sum(sample.num_trainable for sample in samples)
        for start in range(0, len(samples), per_batch):
            rows = samples[start : start + per_batch]
            loss = trainer.compute_loss(trainer.model, _trl_inputs(rows, "cuda" if cuda else "cpu"))
            # TRL averages over the batch's own tokens; the whole batch is what everyone divides by.
            (loss * (sum(sample.num_trainable for sample in rows) / total)).backward()

    return Side(trainer.model, run)


def _trl_inputs(rows: list[TrainingSample], device: str) -> dict[str, Tensor]:
    """Prompts padded on the left, what follows on the right."""
    starts = [sample.loss_mask.index(1) for sample in rows]
    longest = max(len(sample.token_ids) - start for sample, start in zip(rows, starts, strict=True))
    columns: dict[str, list[list[int]]] = {"prompt_ids": [], "prompt_mask": []}
    columns |= {"completion_ids": [], "completion_mask": [], "tool_mask": []}
    for sample, start in zip(rows, starts, strict=True):
        before, after = [0] * (max(starts) - start), [0] * (longest - len(sample.token_ids) + start)
        columns["prompt_ids"].append(before + sample.token_ids[:start])
        columns["prompt_mask"].append(before + [1] * start)
        columns["completion_ids"].append(sample.token_ids[start:] + after)
        columns["completion_mask"].append([1] * (longest - len(after)) + after)
        columns["tool_mask"].append(list(sample.loss_mask[start:]) + after)
    inputs = {name: torch.tensor(column) for name, column in columns.items()}
    inputs["advantages"] = torch.tensor([advantage(sample) for sample in rows])
    return {name: one.to(device) for name, one in inputs.items()} | {"num_items_in_batch": torch.tensor(1.0)}


def timed(side: Side, samples: list[TrainingSample], repeats: int) -> tuple[float, float]:
    """Least seconds of ``repeats`` passes over ``samples``, and the peak GiB of them."""
    best = float("inf")
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    forget_peak()
    for _ in range(repeats):
        side.model.zero_grad(set_to_none=True)
        start = now()
        side.run(samples)
        best = min(best, now() - start)
    return best, peak_gib()


def measure(given: Given, case: Row) -> Row:
    shape, side = case["shape"], case["side"]
    folder, samples = given.folder / shape, make_samples(shape)
    trained = sum(one.num_trainable for one in samples)
    row: Row = {"tokens": sum(len(one.token_ids) for one in samples), "trainable": trained}
    if side in TRL:
        ran, row["setting"] = trl_side(folder, *TRL[side]), f"batches of {TRL[side][0]}"
    else:
        tokens, settings = OURS[side]
        ran = policy_side(folder, tokens, **settings)
        row["setting"] = ", ".join([f"{tokens} tokens", *(f"{name} {value}" for name, value in settings.items())])
    ran.run(samples[:10])
    seconds, peak = timed(ran, samples, 1 if side in TRL or side == "padded" else 2)
    work = ran.work(samples)
    row |= {"seconds": seconds, "peak_gib": peak, "tokens_per_second": row["tokens"] / seconds}
    return row | {"computed": work.tokens, "mfu": flops(shape, work, trained) / seconds / PEAK_TFLOPS / 1e12}


def flops(shape: str, work: Work, trained: int) -> float:
    """Operations of a side's ``work``: no recomputation, no gradient of frozen weights."""
    config = config_of(shape)
    inner, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    layer = config.hidden_size * (2 * inner + 2 * keys + 3 * config.intermediate_size)
    attention, linear = work.pairs * inner * 2 * 3, 4 * work.tokens * layer
    return float(config.num_hidden_layers * (linear + attention) + 4 * trained * config.hidden_size * config.vocab_size)


def add_ratios(rows: list[Row]) -> None:
    timed_rows = [row for row in rows if "seconds" in row]
    for row in timed_rows:
        for peer, sides in {"trl": [*TRL], "unsloth": ["unsloth"]}.items():
            theirs = [one["seconds"] for one in timed_rows if one["shape"] == row["shape"] and one["side"] in sides]
            if theirs:
                row[f"x_{peer}"] = min(theirs) / row["seconds"]


BENCH = Bench(
    __file__,
    __doc__,
    measure,
    {
        "shape": "shape", "side": "side", "setting": "setting", "computed": "computed:,.0f", "seconds": "seconds:.2f",
        "tokens/s": "tokens_per_second:,.0f", "x TRL": "x_trl:.2f", "x Unsloth": "x_unsloth:.2f",
        "peak GiB": "peak_gib:.1f", "MFU": "mfu:.1%",
    },
    {
        "--shape": {"nargs": "+", "default": ["4B"]},
        "--sides": {"nargs": "+", "default": ["trl", *OURS], "choices": SIDES},
    },
    smoke={"shape": ["smoke"], "sides": ["padded", "fast"]},
    add=add_ratios,
)  # fmt: skip

if __name__ == "__main__":
    BENCH.main()
