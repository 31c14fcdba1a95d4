"""N-gram speculation on real conversations: a trained small policy in vLLM, with drafts and without.

    python tests/gpu/bench_speculation.py --smol-base FOLDER --db mail.db --questions questions.jsonl --gpus 0 1
    python tests/gpu/bench_speculation.py --smol-base FOLDER --variants off 4 --questions-asked 3 --smoke   # a CPU vLLM

`smol` answers ``--questions-asked`` test questions ``--rollouts`` times each, all at once, with the in-process engine:
first greedily, then at ``--temperature``. A variant is VLLM_SPECULATIVE_TOKENS (0: off), or `gpu-N` for vLLM's
`ngram_gpu`. Each runs in a process of its own. The first rollouts, which compile kernels, do not count.

``tokens a turn of a row``: sampled tokens per row and step that samples, 1 without speculation. ``as off``: greedy
trajectories with the same tokens as without speculation (in bf16, near-ties differ between any two batches).
``gap``: mean absolute difference of the sampler's log-probabilities to those that the policy in this process computes,
in nats. ``surprise``: mean of -log p of the sampled tokens beyond the policy's entropy, with its standard error: 0 for
a sampler that draws from the policy, whatever log-probabilities it returns. The rejection sampler of vLLM's CPU build
(0.31) draws from something else, so ``--smoke`` is greedy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from bench_grpo_step import demo_settings
from measured import Row, markdown, note
from processes import environment, hand_out, itself, row_of

SCORED = 24
"""Trajectories whose log-probabilities are compared."""


def main() -> None:
    """Measure one variant, or hand them out to the GPUs and print the table."""
    given = arguments()
    given.work.mkdir(parents=True, exist_ok=True)
    if given.variant:
        print(json.dumps(measure(given)), flush=True)
        os._exit(0)  # vLLM's own end may hang

    def run(variant: str, gpu: str) -> Row:
        environ = environment(gpu, VLLM_USE_FLASHINFER_SAMPLER="0")
        log = given.work / f"{variant}.log"
        row = {"variant": variant} | row_of(itself("--variant", variant), log=log, limit=given.limit, environ=environ)
        note(row, given.out, unseen=("greedy", "sampled"))
        return row

    rows = hand_out(given.variants, given.gpus, run)
    print(table(rows))
    sys.exit(any("error" in row for row in rows))


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smol")
    parser.add_argument("--smol-base", type=Path, help="folder of SmolLM2's GGUF file")
    parser.add_argument("--db", type=Path, help="default: the demo's")
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--questions-asked", type=int, default=64)
    parser.add_argument("--rollouts", type=int, default=1)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--variants", nargs="+", default=["off", "4", "8", "gpu-4"])
    parser.add_argument("--gpus", nargs="+", default=["0"])
    parser.add_argument("--limit", type=float, default=200, help="seconds for one variant")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "speculation")
    parser.add_argument("--out", type=Path, help="the rows as JSON lines")
    parser.add_argument("--smoke", action="store_true", help="on the CPU")
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.smoke:
        given.gpus, given.limit, given.temperature = [""], 900, 0.0
    return given


# -- one variant


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Open the policy, ask everything twice, compare log-probabilities."""
    from emailrl.engines.opened import open_policy
    from emailrl.questions.load import load_scenarios
    from emailrl.rollout.collect import build_collector

    settings = settings_of(given)
    begun = time.perf_counter()
    opened = open_policy(settings)
    collector = build_collector(opened.settings, opened.policy, opened.engine)
    scenarios = load_scenarios(None, "test", limit=given.questions_asked, seed=1, data=settings.data)
    collector.collect(scenarios[:8], 1, step=0, seed=1, split_label="warm-up")
    row: dict[str, Any] = {"variant": given.variant, "start": round(time.perf_counter() - begun, 1)}
    accepted = watch(opened.engine)
    for name, temperature in (("greedy", 0.0), ("sampled", given.temperature)):
        accepted.clear()
        begun, steps = time.perf_counter(), opened.engine.steps
        groups = collector.collect(scenarios, given.rollouts, step=1, seed=1, temperature=temperature)
        seconds = time.perf_counter() - begun
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        tokens = sum(len(turn.completion_ids) for each in trajectories for turn in each.turns)
        row[name] = {
            "trajectories": len(trajectories),
            "seconds": round(seconds, 2),
            "tokens": tokens,
            "tokens_per_second": round(tokens / seconds),
            "steps": opened.engine.steps - steps,
            "tokens_per_row": round(accepted["tokens"] / max(accepted["rows"], 1), 2),
            "reward": round(statistics.mean(each.reward or 0.0 for each in trajectories), 3),
            "ids": [[sample.token_ids for sample in each.samples] for each in trajectories],
        }
    return row | checked(opened.policy, trajectories[:SCORED], given.temperature or 1.0)


def settings_of(given: argparse.Namespace) -> Any:
    """The settings of a variant."""
    from emailrl.questions.beside import questions_file
    from emailrl.settings import load_settings

    rows = given.questions_asked * given.rollouts
    chosen: dict[str, Any] = {
        "model_name": given.model, "engine": "vllm",
        "max_batch_trajectories": rows, "reward": "simple", "temperature": given.temperature,
        "vllm_enforce_eager": given.smoke, "vllm_enable_sleep": False,
    }  # fmt: skip
    if given.db:
        chosen |= {"db": given.db, "questions": given.questions or questions_file(given.db)}
    else:
        chosen |= demo_settings(given.work)
    if given.smol_base:
        chosen["smol_base"] = given.smol_base
    if given.variant.startswith("gpu-"):
        drafted = int(given.variant.removeprefix("gpu-"))
        lookup = {"method": "ngram_gpu", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
        chosen["vllm_engine_args"] = json.dumps({"speculative_config": lookup | {"num_speculative_tokens": drafted}})
    elif given.variant != "off":
        chosen["vllm_speculative_tokens"] = int(given.variant)
    return load_settings(chosen, environ={})


def watch(engine: Any) -> Counter[str]:
    """Count the rows that sample in vLLM's batches, and their tokens."""
    counts: Counter[str] = Counter()
    scheduler = engine._engine.engine_core.engine_core.scheduler
    inner = scheduler.update_from_output

    def update_from_output(scheduled: Any, output: Any, *others: Any, **named: Any) -> Any:
        sampled = [len(ids) for ids in output.sampled_token_ids if len(ids)]
        counts["rows"] += len(sampled)
        counts["tokens"] += sum(sampled)
        return inner(scheduled, output, *others, **named)

    scheduler.update_from_output = update_from_output
    return counts


def checked(policy: Any, trajectories: list[Any], temperature: float) -> dict[str, float]:
    """Compare the sampler with the policy in this process, over the sampled tokens (see the module's text)."""
    import torch

    gaps, surprises = [], []
    with torch.inference_mode():
        for each in (sample for trajectory in trajectories for sample in trajectory.samples):
            ids = torch.tensor([each.token_ids], device=policy.device)
            logprobs = (policy.model(ids).logits[0, :-1].float() / temperature).log_softmax(-1)
            entropies = -(logprobs.exp() * logprobs).sum(-1)
            own = logprobs.gather(-1, ids[0, 1:, None])[:, 0]
            for place, sampled in enumerate(each.loss_mask[1:]):
                if sampled:
                    gaps.append(abs(each.sampler_logprobs[place + 1] - own[place].item()))
                    surprises.append((-own[place] - entropies[place]).item())
    error = statistics.stdev(surprises) / len(surprises) ** 0.5
    return {"gap": statistics.mean(gaps), "surprise": statistics.mean(surprises), "standard_error": error}


# -- the table


def table(rows: list[dict[str, Any]]) -> str:
    """All variants beside the first."""
    columns = ["variant", "greedy tokens/s", "x off", "tokens a turn of a row", "as off", "reward",
               "sampled tokens/s", "x off", "tokens a turn of a row", "reward", "gap", "surprise",
               "start s"]  # fmt: skip
    off = next((row for row in rows if "error" not in row), {})
    return markdown(columns, [cells(row, off) for row in rows])


def cells(row: Row, off: Row) -> list[str]:
    """A row of the table."""
    if "error" in row:
        return [row["variant"], row["error"]]
    found = [row["variant"]]
    for name in ("greedy", "sampled"):
        one, other = row[name], off[name]
        rate = one["tokens_per_second"]
        found += [f"{rate:,}", f"{rate / other['tokens_per_second']:.2f}", f"{one['tokens_per_row']:.2f}"]
        if name == "greedy":
            same = sum(ids == others for ids, others in zip(one["ids"], other["ids"], strict=True))
            found.append(f"{same} of {len(other['ids'])}")
        found.append(f"{one['reward']:.3f}")
    return [*found, f"{row['gap']:.4f}", f"{row['surprise']:+.4f} ± {row['standard_error']:.4f}", str(row["start"])]


if __name__ == "__main__":
    main()
