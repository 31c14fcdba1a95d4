"""vLLM, family by family: a small random model of each, its weights and adapters proven against transformers.

For the bare base, for an adapter on all projections and for one on each projection alone: the proof that the engine
makes of a version (``probe``), then two completions, whose log-probabilities are compared with those of transformers
with the same adapter and with the bare base. ``gap`` is the mean difference in nats with the adapter on all
projections, ``off`` the same without the adapter: the engine uses it if ``gap`` is far below ``off``.
"""

from __future__ import annotations

import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
from families import FAMILIES, make_family
from runner import Bench, Given, Row

from emailrl.base.errors import EmailRLError
from emailrl.engines import Request, SamplingParams, build_engine
from emailrl.engines.vllm.probe import Probe, mean_gap
from emailrl.model.policy import Policy, load_policy
from emailrl.settings import load_settings

PROMPTS = ("When does the lease on the office end?", "Ann signed the agreement in Houston, and Bob the other one.")


def measure(given: Given, case: Row) -> Row:
    folder = make_family(case["family"], given.tokenizer, given.folder / case["case"], wide=not given.smoke)
    values = {"model_name": str(folder), "engine": "transformers" if given.smoke else "vllm", "kv_cache_gib": 0.5}
    values |= {"vllm_enforce_eager": True, "vllm_enable_sleep": "off", "max_model_len": 1024, "lora_rank": 8}
    values |= {"dtype": "auto" if given.smoke else given.dtype, "max_batch_trajectories": 8}
    settings = load_settings(values, environ={}, cwd=given.out)
    policy = load_policy(settings, trainable=True)
    targets, probe = policy.lora["target_modules"], Probe(policy, temperature=1.0)
    engine, row = build_engine(settings, policy), dict[str, Any](layers=kinds_of(policy), targets=len(targets))
    begun = time.perf_counter()
    row["bare"] = compared(engine, probe, policy, None)["gap"]
    row["start"] = time.perf_counter() - begun
    row |= compared(engine, probe, policy, save_adapter(policy, folder / "all", targets))
    refused = []
    for target in targets:
        try:
            alone = compared(engine, probe, policy, save_adapter(policy, folder / target, [target]))
        except EmailRLError as error:
            refused.append(f"{target}: {error}")
            continue
        print(f"{case['case']} {target}: {alone}", file=sys.stderr)
        if not alone["gap"] < alone["off"] / 3:
            refused.append(f"{target}: gap {alone['gap']:.4f}, off {alone['off']:.4f}")
    return row | {"refused": "; ".join(refused) or "none"}


def kinds_of(policy: Policy) -> str:
    config = policy.model.config.get_text_config()
    return ", ".join(sorted(set(getattr(config, "layer_types", None) or ["full_attention"])))


@torch.no_grad()
def save_adapter(policy: Policy, folder: Path, targets: list[str]) -> Path:
    """An adapter that changes the ``targets`` alone, by amounts that follow from their names."""
    for name, parameter in policy.trainable_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        value = torch.randn(parameter.shape, generator=generator) * (0.1 if "lora_A" in name else 0.2)
        changed = any(f".{target}.lora" in name for target in targets)
        parameter.copy_(value if changed or "lora_A" in name else torch.zeros_like(value))
    policy.save_adapter(folder)
    return folder


def compared(engine: Any, probe: Probe, policy: Policy, adapter: Path | None) -> dict[str, float]:
    """Load a version, which proves it, and sample; the gaps to transformers with its adapter and without."""
    engine.load_adapter(adapter, str(adapter))
    prompts = [policy.tokenizer.encode(text) for text in PROMPTS]
    requests = [Request(str(n), SamplingParams(32), prompt, seed=n) for n, prompt in enumerate(prompts)]
    sampled = engine.generate(requests)
    gaps = {}
    for name, path in (("gap", adapter), ("off", None)):
        probe.load(path)
        own = [
            probe.score([*prompt, *one.token_ids], len(prompt)) for prompt, one in zip(prompts, sampled, strict=True)
        ]
        gaps[name] = sum(mean_gap(one.logprobs, logprobs) for one, logprobs in zip(sampled, own, strict=True)) / len(
            own
        )
    return gaps


def cases(given: Given) -> list[Row]:
    return [{"case": family.replace(" ", "-"), "family": family} for family in given.family]


bench = Bench(
    __file__, __doc__, measure, cases=cases, seconds=540, limit=100, shapes=lambda given: [],
    columns={"family": "family", "layers": "layers", "bare gap": "bare:.4f", "gap": "gap:.4f", "off": "off:.3f",
             "targets": "targets", "refused": "refused", "start s": "start:.0f", "s": "wall:.0f"},
    options={"--family": {"nargs": "+", "default": list(FAMILIES)}, "--dtype": {"default": "bf16"}},
)  # fmt: skip

if __name__ == "__main__":
    bench.main()
