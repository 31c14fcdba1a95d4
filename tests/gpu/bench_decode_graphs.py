"""Trajectories per second of the in-process engine with and without CUDA graphs, 128 at once, and whether they agree.

    python tests/gpu/bench_decode_graphs.py              # one GPU, under 60 s
    python tests/gpu/bench_decode_graphs.py --smoke      # a rehearsal on a CPU: graphs fall back, figures mean nothing

A model of SmolLM2-135M's shape in bf16 (``--model FOLDER``: that model) plays trajectories of four turns: a common
prompt of 600 tokens, completions of 32 to 96 tokens (by seed, the same on every side), 100 to 500 tokens of tool
results. Sides: ``plain`` decodes kernel by kernel; ``gathered`` also lets prompts wait for others; ``graphs`` is
CUDA_GRAPHS=true. Checked first: in float32 all sides sample the same tokens, greedy and at temperature 1, with
log-probabilities within 1e-3; in bf16 the mean gap is printed, up to the first token that differs.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measured import forget_peak, markdown, note, now, peak_gib
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from emailrl.engines.base import Completion, Request, SamplingParams
from emailrl.engines.local.engine import TransformersEngine
from emailrl.engines.local.graphs import DecodeGraphs

SHAPE = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
         "num_key_value_heads": 3, "vocab_size": 49152}  # fmt: skip
SMOKE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "vocab_size": 512}  # fmt: skip
SIDES = ("plain", "gathered", "graphs")
SHARED = 600
TOLERANCE = 1e-3
NEAR_TIES = 0.05
"""Share of completions in which two tokens are so near that the order of a sum decides between them."""


class NoGraphs(DecodeGraphs):
    """Prompts wait as beside graphs; every step runs without one."""

    def logits(self, *step: Any) -> None:
        """No graph."""


def main() -> None:
    """Check, measure, and print one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a model; default: random weights of SmolLM2-135M's shape")
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, help="the rows as JSON lines")
    parser.add_argument("--seconds", type=float, default=150, help="after which no further side begins")
    given = parser.parse_args()
    begun = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = 6 if given.smoke else given.rows
    check(load(given, torch.float32, device), rows=min(rows, 24))
    model = load(given, torch.bfloat16, device)
    play(model, "graphs", rows=4, turns=1)  # kernels are loaded, libraries started
    table, ended = [], {}
    for side in SIDES:
        if time.perf_counter() - begun > given.seconds:
            print(f"{side}: no time left", flush=True)
            continue
        forget_peak()
        ended[side], seconds = play(model, side, rows=rows, turns=2 if given.smoke else 4)
        tokens = sum(len(one.token_ids) for one in ended[side])
        table.append({"side": side, "rows": rows, "seconds": round(seconds, 2), "peak_gib": round(peak_gib(), 2),
                      "trajectories_per_second": round(rows / seconds, 2), "tokens_per_second": round(tokens / seconds),
                      "bf16_gap": round(gap(ended["plain"], ended[side])[0], 4)})  # fmt: skip
        note(table[-1], given.out)
    columns = ["side", "trajectories/s", "sampled tokens/s", "s", "peak GiB", "bf16 gap to plain", "over plain"]
    rows_shown = [
        [row["side"], row["trajectories_per_second"], f"{row['tokens_per_second']:,}", row["seconds"], row["peak_gib"],
         row["bf16_gap"], f"{table[0]['seconds'] / row['seconds']:.2f} x"]
        for row in table
    ]  # fmt: skip
    print(markdown(columns, rows_shown))


def load(given: argparse.Namespace, dtype: torch.dtype, device: str) -> Any:
    """The model in ``dtype`` on ``device``."""
    if given.model:
        return AutoModelForCausalLM.from_pretrained(given.model, dtype=dtype).to(device).eval()
    torch.manual_seed(0)
    shape = dict(SMOKE if given.smoke else SHAPE, max_position_embeddings=8192, initializer_range=0.05)
    config = LlamaConfig(**shape, tie_word_embeddings=True, eos_token_id=None, bos_token_id=None)
    return LlamaForCausalLM(config).to(device, dtype).eval()


def check(model: Any, rows: int) -> None:
    """Raise AssertionError unless all sides sample the same tokens in float32, rare near-ties apart."""
    for temperature in (0.0, 1.0):
        ended = {side: play(model, side, rows=rows, turns=2, longest=24, temperature=temperature)[0] for side in SIDES}
        for side in SIDES[1:]:
            mean, differing = gap(ended["plain"], ended[side])
            said = f"{side}, float32, temperature {temperature}: {differing} of {len(ended[side])} completions differ"
            print(f"{said} from plain, mean gap {mean:.1e}", flush=True)
            assert differing <= NEAR_TIES * len(ended[side]) and mean < TOLERANCE, said


def play(
    model: Any, side: str, *, rows: int, turns: int, longest: int = 96, temperature: float = 1.0
) -> tuple[list[Completion], float]:
    """Play all trajectories; completions by trajectory and turn, and the seconds they took."""
    engine = TransformersEngine(model, [], max_rows=rows, max_model_len=8192, cuda_graphs=side == "graphs")
    engine.stop_ids = frozenset()
    if side == "gathered":
        engine.passes.graphs = NoGraphs(model, engine.cache, most_rows=rows, most_tokens=8192)
    vocabulary = model.config.vocab_size
    common = random.Random(1).choices(range(vocabulary), k=SHARED)
    prompts = {str(n): [*common, *random.Random(n).choices(range(vocabulary), k=30)] for n in range(rows)}
    played = dict.fromkeys(prompts, 1)

    def ask(name: str) -> Request:
        draw = random.Random(f"{name} {played[name]}")
        sampling = SamplingParams(draw.randrange(longest // 3, longest + 1), temperature)
        return Request(name, sampling, prompts[name], seed=draw.randrange(1 << 30))

    def advance(ended: Completion) -> Request | None:
        name = ended.trajectory_id
        if played[name] == turns:
            return None
        played[name] += 1
        draw = random.Random(f"result {name} {played[name]}")
        prompts[name] = [*prompts[name], *ended.token_ids, *draw.choices(range(vocabulary), k=draw.randrange(100, 501))]
        return ask(name)

    before = now()
    ended = engine.generate([ask(name) for name in prompts], advance)
    seconds = now() - before
    engine.close()
    return sorted(ended, key=lambda one: (int(one.trajectory_id), one.prompt_tokens)), seconds


def gap(some: Sequence[Completion], others: Sequence[Completion]) -> tuple[float, int]:
    """Mean gap of log-probabilities of trajectories up to their first differing token, and completions that differ."""
    gaps, differing, broken = [], 0, set()
    for one, other in zip(some, others, strict=True):
        if one.trajectory_id in broken:
            continue
        pairs = list(zip(one.token_ids, other.token_ids, strict=True))
        same = next((n for n, (a, b) in enumerate(pairs) if a != b), len(pairs))
        gaps += [abs(a - b) for a, b in zip(one.logprobs[:same], other.logprobs[:same], strict=True)]
        if same < len(pairs):
            differing += 1
            broken.add(one.trajectory_id)
    return sum(gaps) / max(len(gaps), 1), differing


if __name__ == "__main__":
    main()
