"""A GPU that really runs out of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu.small import distance, make_samples, make_updater, moved, paid, weights

from emailrl.base.errors import EmailRLError
from emailrl.training.batch import MicroBatch
from emailrl.training.update import Updater

pytestmark = pytest.mark.gpu
WHOLE, SAFE = 65536, 4096  # tokens of a micro-batch that holds all samples, and of one that always fits


@pytest.fixture
def no_limit() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


def limit_memory(allowed: float) -> None:
    """Let this process take so many bytes of the GPU, its own cache included."""
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(allowed / total)


def peak_of(action: Callable[[], Any]) -> float:
    """Bytes reserved at most while ``action`` runs."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    action()
    return torch.cuda.max_memory_reserved()


def watched(updater: Updater) -> list[str]:
    """Where memory runs out from now on: in the forward pass of a micro-batch, or behind it."""
    places, inside = [], ["behind"]
    forward, ran_out = updater.forward.train, updater.forward.ran_out

    def watched_forward(batch: MicroBatch, **options: Any) -> Any:
        inside[0] = "forward"
        result = forward(batch, **options)
        inside[0] = "backward"
        return result

    def noted(batch: MicroBatch) -> None:
        places.append(inside[0])
        ran_out(batch)

    updater.forward.train, updater.forward.ran_out = watched_forward, noted  # type: ignore[method-assign]
    return places


@pytest.mark.usefixtures("no_limit")
@pytest.mark.parametrize("layers", ["fused", "transformers"])
@pytest.mark.parametrize("share", [0.3, 0.7])
def test_memory_that_runs_out(model: Path, layers: str, share: float) -> None:
    """Weights after three steps are those of a run with memory to spare; the third runs out no more."""
    samples = make_samples(48, 600, 1300)
    plain = {"dtype": "fp32", "gradient_checkpointing": "off", "fused_layers": layers == "fused"}
    rich = make_updater(model, **plain, max_tokens_per_micro_batch=SAFE)
    poor = make_updater(model, **plain, max_tokens_per_micro_batch=WHOLE)
    start = weights(rich)
    least = peak_of(lambda: rich.train(samples, paid(samples), step=1))
    most = peak_of(
        lambda: make_updater(model, **plain, max_tokens_per_micro_batch=WHOLE).train(samples, paid(samples), step=1)
    )
    assert most > 2 * least
    places = watched(poor)
    limit_memory(least + share * (most - least))
    halved = [poor.train(samples, paid(samples), step=step).metrics["micro_batches_halved"] for step in (1, 2, 3)]
    limit_memory(torch.cuda.get_device_properties(0).total_memory)
    for step in (2, 3):
        rich.train(samples, paid(samples), step=step)
    gap = distance(moved(start, weights(poor)), moved(start, weights(rich)))
    print(f"{most / 2**20:.0f} MiB wanted, {(least + share * (most - least)) / 2**20:.0f} allowed: ran out in"
           f" {', '.join(places)}; halved {halved}, updates differ by {gap:.1e}")  # fmt: skip
    assert sum(halved) == len(places) > 0 and halved[2] == 0
    assert poor.forward.max_tokens < WHOLE
    assert gap < 1e-4
    for one, other in zip(weights(poor), weights(rich), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


@pytest.mark.usefixtures("no_limit")
def test_one_sample_too_large(model: Path) -> None:
    samples = make_samples(4, 6000, 7000)
    updater = make_updater(model, dtype="fp32", gradient_checkpointing="off")
    before = weights(updater)
    torch.cuda.empty_cache()
    limit_memory(torch.cuda.memory_reserved() + 64 * 2**20)
    with pytest.raises(EmailRLError, match=r"Out of memory on a single sample of 6\d\d\d tokens") as caught:
        updater.train(samples, paid(samples), step=1)
    assert "GRADIENT_CHECKPOINTING" in caught.value.hint
    assert distance(weights(updater), before) == 0
    limit_memory(torch.cuda.get_device_properties(0).total_memory)
    updater.train(samples, paid(samples), step=1)
    assert distance(weights(updater), before) > 0
