"""A base in 4 bits (bitsandbytes): it loads, samples and trains, near the 16-bit one, in the memory that is planned."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from gpu.loop import RunLeft, finish, make_workplace, start

from emailrl.plan import Known, make_plan, this_machine
from emailrl.plan.devices import GIB
from emailrl.settings import load_settings

pytestmark = pytest.mark.gpu

STEPS = """
import json, sys, torch
from pathlib import Path
from emailrl.training.batch import micro_batches
from gpu.small import make_samples, make_updater, paid

found = {}
for bits in (16, 4):
    four = bits == 4
    updater = make_updater(Path(sys.argv[1]), dtype="bf16", load_in_4bit=four, lora_rank=16, fused_layers=four)
    updater.optimizer = torch.optim.AdamW(updater.parameters, lr=1e-3)
    kind = type(updater.policy.model.get_base_model().model.layers[0].mlp.up_proj.base_layer).__name__
    samples = make_samples(12, 2000, 4000)
    torch.cuda.synchronize(), torch.cuda.reset_peak_memory_stats()
    steps = [updater.train(samples, paid(samples), step=step) for step in (1, 2)]
    norms = [step.metrics["grad_norm"] for step in steps]
    rows = zip(samples, steps[0].tokens)
    logprobs = torch.tensor([now for one, row in rows for now, on in zip(row.logprobs, one.loss_mask) if on])
    lengths = [len(one.token_ids) for one in samples]
    share = sum(one.num_trainable for one in samples) / sum(lengths)
    largest = max(batch.num_tokens for batch in micro_batches(samples, updater.forward.layout()))
    found[bits] = {
        "kind": kind, "norms": norms, "peak": torch.cuda.max_memory_allocated(), "std": float(logprobs.std()),
        "lengths": lengths, "share": share, "largest": largest,
    }
    if bits == 16:
        first = logprobs
    else:
        found["gap"] = float((logprobs - first).abs().mean())
        found["correlation"] = float(torch.corrcoef(torch.stack([logprobs, first]))[0, 1])
    del updater
    torch.cuda.empty_cache()
print(json.dumps(found))
"""


def test_two_steps_in_four_bits(larger_model: Path, needs: Callable[..., None], tmp_path: Path) -> None:
    needs("bitsandbytes")
    done = subprocess.run(
        [sys.executable, "-c", STEPS, str(larger_model)], cwd=Path(__file__).parents[1], capture_output=True, text=True,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    few, full = found["4"], found["16"]
    lengths = few["lengths"]
    planned = {}
    for bits, one in (("4", few), ("16", full)):
        values = {
            "model_name": str(larger_model), "dtype": "bf16", "load_in_4bit": bits == "4", "lora_rank": 16,
            "lora_dropout": 0.0, "fused_layers": bits == "4", "per_device_train_batch_size": 3, "num_generations": 4,
            "max_tokens_per_micro_batch": one["largest"],
        }  # fmt: skip
        known = Known(round(sum(lengths) / len(lengths)), one["share"])
        memory = make_plan(load_settings(values, environ={}, cwd=tmp_path), this_machine(), known=known).memory
        assert memory.layout.layers == "transformers"
        planned[bits] = memory.training_peak - memory.resident["sampler's copy"]
        print(f"{bits} bits: peak {one['peak'] / GIB:.3f} GiB, planned {planned[bits] / GIB:.3f}"
               f" ({planned[bits] / one['peak'] - 1:+.1%})")  # fmt: skip
    print(f"log-probabilities: mean difference {found['gap']:.3f}, correlation {found['correlation']:.3f}")
    assert few["kind"] == "Linear4bit" and full["kind"] == "Linear"
    assert found["correlation"] > 0.9 and found["gap"] < full["std"] / 2
    assert all(0 < norm < float("inf") for norm in few["norms"])
    assert planned["4"] == pytest.approx(few["peak"], rel=0.15)
    assert planned["16"] == pytest.approx(full["peak"], rel=0.15)


@pytest.mark.parametrize("backend", ["transformers", "unsloth"])
def test_the_loop_in_four_bits(tmp_path: Path, needs: Callable[..., None], backend: str) -> None:
    """Sampled through the adapter beside the base, which cannot be merged."""
    needs("bitsandbytes", backend)
    folder = make_workplace(tmp_path / "work")
    finish(start(folder, "--backend", backend, "--max-steps", "2", "--out", "outputs/four", LOAD_IN_4BIT="true"))
    metrics = RunLeft(folder / "outputs" / "four_masked").metrics
    print(f"gap to the sampler {[round(one['sampler_gap_mean'], 4) for one in metrics]}")
    assert [one["step"] for one in metrics] == [1, 2]
    assert all(one["sampler_gap_mean"] < 0.05 and one["grad_norm"] > 0 for one in metrics)
