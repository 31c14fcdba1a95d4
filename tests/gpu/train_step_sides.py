"""The sides of ``bench_train_step``: one batch of trajectories, one forward and backward pass over all of it.

Every side loads the same random weights, gets the same LoRA values and the same token ids and mask, and takes the
gradient of the same loss: minus advantage times log-probability, averaged over the trained tokens of the whole batch.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from runner import forget_peak, now, peak_gib
from shapes import LINEAR, advantage, set_lora
from torch import Tensor

from emailrl.model.load import load_policy
from emailrl.model.logprobs import token_logprobs
from emailrl.model.packing import shares_prefixes, takes_packed
from emailrl.settings import Settings
from emailrl.training.batch import Layout, TrainingSample, micro_batches
from emailrl.training.losses import policy_loss


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


def lora_settings(folder: Path, *, dtype: str = "bf16", backend: str = "transformers", **training: Any) -> Settings:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = {"name": str(folder), "dtype": dtype, "device": device, "backend": backend, "max_model_len": 8192}
    lora = {"lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.0, "target_modules": "all-linear"}
    return Settings.model_validate({"model": model, "lora": lora, "training": training})


def policy_side(settings: Settings, max_tokens: int) -> Side:
    """emailrl's own way, over whatever backend and layers ``settings`` choose."""
    policy = load_policy(settings, trainable=True)
    model, device = policy.model, policy.device
    if settings.model.backend == "transformers" and settings.training.fused_layers and device.type == "cpu":
        from emailrl.model.fused import enable_fused

        assert enable_fused(model, settings.training.gradient_checkpointing) is None
    set_lora(model)
    model.train()
    shares = settings.training.prefix_sharing and shares_prefixes(model)
    layout = Layout(max_tokens, device=device, packing=takes_packed(model), share_prefixes=shares)

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
    from transformers import AutoModelForCausalLM, AutoTokenizer
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
