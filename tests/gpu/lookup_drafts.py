"""How many tokens per step n-gram speculation would sample on trajectories that were recorded, without a GPU.

    python tests/gpu/lookup_drafts.py outputs/rollouts/0001.jsonl
    python tests/gpu/lookup_drafts.py outputs/grpo_masked/trajectories/step-*.jsonl --drafted 4 8

Drafts continue the earliest occurrence of the longest n-gram that ends the text, as vLLM's `ngram` does. A draft token
counts as accepted if the policy sampled it; that is also how often a rejection sampler accepts it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

SHORTEST, LONGEST = 2, 4
"""Tokens of an n-gram, as in ``vllm_arguments.speculation``."""


def main() -> None:
    """Print a row for each number of draft tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="trajectories (JSONL)")
    parser.add_argument("--drafted", type=int, nargs="+", default=[4, 8], help="draft tokens per step")
    given = parser.parse_args()
    turns = [turn for file in given.files for turn in turns_of(file)]
    print(f"{len(turns):,} completions of {sum(len(completion) for _, completion in turns):,} tokens")
    print("| draft tokens | tokens per step | drafted per step | accepted |\n|---|---|---|---|")
    for most in given.drafted:
        counts = [lookup(context, completion, most) for context, completion in turns]
        steps, drafted, accepted = (sum(column) for column in zip(*counts, strict=True))
        tokens = sum(len(completion) for _, completion in turns)
        print(f"| {most} | {tokens / steps:.2f} | {drafted / steps:.2f} | {accepted / max(drafted, 1):.0%} |")


def turns_of(file: Path) -> Iterator[tuple[list[int], list[int]]]:
    """Context and sampled tokens of every completion, from trajectories with one token sequence."""
    with file.open(encoding="utf-8") as lines:
        for line in lines:
            trajectory = json.loads(line)
            ids, mask = trajectory.get("token_ids") or [], trajectory.get("loss_mask") or []
            begin = 0
            for place, sampled in enumerate([*mask, 0]):
                before = mask[place - 1] if place else 0
                if sampled and not before:
                    begin = place
                elif before and not sampled:
                    yield ids[:begin], ids[begin:place]


def lookup(context: Sequence[int], completion: Sequence[int], most: int) -> tuple[int, int, int]:
    """Steps that sample the completion, tokens drafted, and tokens accepted."""
    text = list(context)
    first: dict[tuple[int, ...], int] = {}
    """Where the token after the first occurrence of each n-gram is."""
    indexed = steps = drafted = accepted = 0
    while len(text) < len(context) + len(completion):
        for end in range(indexed + 1, len(text)):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                first.setdefault(tuple(text[end - length : end]), end)
        indexed = max(indexed, len(text) - 1)
        begin = next(
            (first[key] for n in range(LONGEST, SHORTEST - 1, -1) if (key := tuple(text[-n:])) in first), len(text)
        )
        draft, ahead = text[begin : begin + most], completion[len(text) - len(context) :]
        right = next((n for n, pair in enumerate(zip(draft, ahead, strict=False)) if pair[0] != pair[1]), None)
        right = min(len(draft), len(ahead)) if right is None else right
        text += ahead[: right + 1]
        steps, drafted, accepted = steps + 1, drafted + len(draft), accepted + right
    return steps, drafted, accepted


if __name__ == "__main__":
    main()
