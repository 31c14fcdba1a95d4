"""The proof that an engine took an adapter, where two adapters are one and where they differ."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from emailrl.engines.vllm import probe as module
from emailrl.engines.vllm.probe import Expected, Probe, ProbeError
from emailrl.model.policy import Policy


@pytest.fixture
def make(policy: Policy) -> Callable[..., Probe]:
    return lambda temperature=1.0, tolerance=0.1: Probe(policy, temperature=temperature, tolerance=tolerance)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_drawn_tokens_are_compared_with_the_trainers(
    make: Callable[..., Probe], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's log-probability is that of a pass over what precedes it, after a prefix and in a completion."""
    probe = make(temperature, 0.001)
    expected, drawn = probe.load(None), [3, 7] * (module.PREFIXES // 2)
    assert probe.prefixes[-1] == probe.ids and len(probe.prefixes) == module.PREFIXES

    def alone(texts: list[list[int]], temperature: float) -> list[float]:
        return [probe.score(text, len(text) - 1, temperature)[0] for text in texts]

    after = [[*prefix, token] for prefix, token in zip(probe.prefixes, drawn, strict=True)]
    sampled = [[*probe.ids, *drawn[: count + 1]] for count in range(8)]
    for texts, check in (
        (after, lambda logprobs: probe.check("vLLM", drawn, logprobs, expected)),
        (sampled, lambda logprobs: probe.check_completion("vLLM", probe.ids, drawn[:8], logprobs)),
    ):
        own, plain = alone(texts, temperature), alone(texts, 1.0)
        check(own)
        with pytest.raises(ProbeError, match=r"off by 0\.0100 nats\."):
            check([value - 0.01 for value in own])
        if temperature < 1:
            with pytest.raises(ProbeError, match="taken before temperature"):
                check(plain)


def test_equal_answers_are_right_only_under_the_same_adapter(make: Callable[..., Probe]) -> None:
    """The trainer's opinion moves by less than the tolerance."""
    probe, drawn = make(), [3, 7] * (module.PREFIXES // 2)
    base = probe.load(None)
    own = module._logprobs(base.logits, drawn, 1.0)
    probe.check("vLLM", drawn, own, base)
    moved = base.logits + 0.05 * torch.randn(base.logits.shape, generator=torch.Generator().manual_seed(0))
    probe.check("vLLM", drawn, own, Expected(None, moved))  # after a step without an update
    probe.check("vLLM", drawn, own, base)
    probe.check("another", drawn, own, Expected("its hash", moved))
    with pytest.raises(ProbeError, match="bit-identical"):
        probe.check("vLLM", drawn, own, Expected("its hash", moved))
