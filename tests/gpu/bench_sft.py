"""Tokens per second of supervised fine-tuning: `emailrl sft` beside TRL's SFTTrainer with packing.

    python tests/gpu/bench_sft.py                    # on one GPU, under 120 s in all
    python tests/gpu/bench_sft.py --smoke --no-trl   # a rehearsal on a CPU without TRL, figures mean nothing

Random weights of SmolLM2-135M's shape in bf16; 256 conversations of about 2,000 tokens of which about 9 % are learned,
32 a step. An adapter of rank 16 on every linear layer, then all weights. A side's figure is the mean of the steps
behind its warm-up: data, forward, backward, clipping and AdamW. TRL packs rows of 8,192 tokens ("bfd") without gradient
checkpointing, on PyTorch's variable-length FlashAttention (flash-attn itself need not be there) or on SDPA; of its ways
(rows a batch, with and without Liger kernels) the best counts. ``shared`` gives every conversation the same first 600
tokens, as a system prompt with tools does; emailrl computes them once a micro-batch.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measured import forget_peak, markdown, note, now, peak_gib
from small import PLAIN, save_tokenizer

from emailrl.model.load import load_policy
from emailrl.settings import load_settings
from emailrl.sft.data import batches_of
from emailrl.sft.examples import Example
from emailrl.sft.fit import Fitter

SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3, "vocab_size": 49152, "max_position_embeddings": 8192}  # fmt: skip
SMOKE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512, "max_position_embeddings": 8192}  # fmt: skip
NUM, BATCH, ROW = 256, 32, 8192
WARMUP, STEPS = 3, 5
VARLEN, SDPA = "bench_varlen", "sdpa"
TRL_WAYS = [(8, True, VARLEN), (2, True, VARLEN), (8, False, VARLEN), (1, False, SDPA)]
"""Rows a batch, whether with Liger kernels, and the attention; batches are accumulated to 8 rows."""


def main() -> None:
    """Measure every side and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--no-trl", action="store_true")
    parser.add_argument("--seconds", type=float, default=110, help="seconds after which no further side begins")
    parser.add_argument("--out", type=Path, default=None, help="the rows as JSON lines")
    given = parser.parse_args()
    begun, table = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as temporary:
        folder = save_model(Path(temporary) / "model", SMOKE if given.smoke else SHAPE)
        for row, measure in sides(folder, smoke=given.smoke, trl=not given.no_trl):
            if time.perf_counter() - begun > given.seconds:
                table.append(row | {"error": "no time left"})
                continue
            started = time.perf_counter()
            try:
                table.append(row | measure())
            except Exception as error:  # a side that fails is a row of the table
                table.append(row | {"error": repr(error)[:120]})
            table[-1]["wall"] = round(time.perf_counter() - started, 1)
            note(table[-1], given.out)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    print_table(table)


def sides(folder: Path, *, smoke: bool, trl: bool) -> Iterator[tuple[dict[str, Any], Callable[[], dict[str, Any]]]]:
    """What is measured, the most telling first, each with the function that measures it."""
    plain, shared = conversations(0, smoke=smoke), conversations(60 if smoke else 600, smoke=smoke)
    both = ((False, "adapter"), (True, "all weights"))
    ways = TRL_WAYS if trl else []
    for full, what in both:
        yield {"side": "emailrl 8 rows", "trains": what}, partial(ours, folder, plain, full, 8 * ROW)
        for way in ways[:1]:
            yield {"side": _named(*way), "trains": what}, partial(theirs, folder, plain, full, *way)
    for full, what in both:
        yield {"side": "emailrl", "trains": what}, partial(ours, folder, plain, full, None)
        yield {"side": "emailrl 8 rows, shared", "trains": what}, partial(ours, folder, shared, full, 8 * ROW)
    for way in ways[1:]:
        for full, what in both:
            yield {"side": _named(*way), "trains": what}, partial(theirs, folder, plain, full, *way)


def _named(rows: int, liger: bool, attention: str) -> str:
    return f"TRL {rows} rows{' Liger' if liger else ''}{' sdpa' if attention == SDPA else ''}"


def save_model(folder: Path, shape: dict[str, int]) -> Path:
    """Write random weights in bf16 and a byte tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**shape, tie_word_embeddings=True, bos_token_id=None, eos_token_id=256, pad_token_id=257)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return save_tokenizer(folder, PLAIN)


def conversations(shared: int, *, smoke: bool) -> list[list[Example]]:
    """A prompt, then three to five turns of some 45 learned tokens between results of some hundreds."""
    draw, vocabulary = random.Random(1), 512 if smoke else 49152
    scale = 10 if smoke else 1
    numbers = np.random.default_rng(1)
    common = numbers.integers(300, vocabulary, shared)
    made = []
    for n in range(NUM):
        spoken = [False] * (draw.randrange(620, 700) // scale)
        for _ in range(draw.randrange(3, 6)):
            spoken += [True] * (draw.randrange(35, 55) // scale) + [False] * (draw.randrange(220, 400) // scale)
        spoken += [True] * (40 // scale)
        ids = numbers.integers(300, vocabulary, len(spoken)).astype(np.uint32)
        ids[:shared] = common
        made.append([Example(str(n), "inbox", ids, np.array(spoken))])
    return made


def ours(folder: Path, groups: list[list[Example]], full: bool, micro: int | None) -> dict[str, Any]:
    """Steps of ``emailrl sft``, with so many tokens in a micro-batch (None: the default)."""
    given = {"model_name": str(folder), "full_finetuning": full, "sft_steps": 1000, "sft_batch_size": BATCH}
    given |= {"max_tokens_per_micro_batch": micro} if micro else {}
    settings = load_settings(given, environ={}, cwd=folder)
    fitter = Fitter(
        load_policy(settings, trainable=True, full=full), settings.training, settings.sft, settings.agent.temperature
    )
    batches = batches_of(lambda number: groups, len(groups), BATCH, 1, 0)
    tokens, seconds, loss = 0, 0.0, 0.0
    for step in range(1, WARMUP + STEPS + 1):
        start = now()
        batch = next(batches)
        loss = fitter.step(batch, step=step)["loss"]
        if step > WARMUP:
            tokens, seconds = tokens + sum(len(example.token_ids) for example in batch), seconds + now() - start
        elif step == WARMUP:
            forget_peak()
    return result(tokens, seconds, loss)


def theirs(
    folder: Path, groups: list[list[Example]], full: bool, rows: int, liger: bool, attention: str
) -> dict[str, Any]:
    """Steps of TRL's SFTTrainer, timed by a callback."""
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
    if attention == VARLEN:
        register_varlen()
    model.set_attn_implementation(attention)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
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
        peft_config=None if full else LoraConfig(r=16, lora_alpha=32, target_modules=targets, task_type="CAUSAL_LM"),
        callbacks=[Clock()],
    )  # fmt: skip
    packed = sum(len(row["input_ids"]) for row in trainer.train_dataset)
    trainer.train()
    # Rows are drawn at random: a step holds 8 rows of the packed set's mean length.
    tokens = round(STEPS * 8 * packed / len(trainer.train_dataset))
    return result(tokens, ends[-1] - ends[WARMUP - 1], losses[-1] if losses else float("nan"))


def register_varlen() -> None:
    """Give transformers PyTorch's own variable-length FlashAttention, which TRL's packing asks for.

    Where a sample begins its position is 0.
    """
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
    """A side's figures."""
    return {"tokens_per_second": round(tokens / seconds), "step_seconds": round(seconds / STEPS, 3),
            "peak_gib": round(peak_gib(), 1), "loss": round(loss, 3)}  # fmt: skip


def print_table(table: list[dict[str, Any]]) -> None:
    """Print the sides by what they train, and emailrl's rate over TRL's best."""
    names = ("tokens_per_second", "step_seconds", "peak_gib", "loss")
    lines: list[list[object]] = []
    for what in ("adapter", "all weights"):
        rows = [row for row in table if row["trains"] == what]
        lines += [[what, row["side"], *(row.get(name, row.get("error", "–")) for name in names)] for row in rows]
        rates = {row["side"]: row.get("tokens_per_second", 0) for row in rows}
        best = max((rate for side, rate in rates.items() if side.startswith("TRL")), default=0)
        own = max(rates.get(side, 0) for side in ("emailrl", "emailrl 8 rows"))
        if best:
            lines.append([what, "emailrl's best over TRL's best", f"{own / best:.2f} x"])
    print(markdown(["trains", "side", "tokens/s", "s a step", "peak GiB", "loss"], lines))


if __name__ == "__main__":
    main()
