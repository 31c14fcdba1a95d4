"""The proof that an engine took an adapter, where two adapters are one and where they differ."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny import make_checkpoint, make_model

from emailrl.base.errors import EmailRLError
from emailrl.engines.vllm import probe as module
from emailrl.engines.vllm.probe import Expected, Probe, ProbeError
from emailrl.model.load import load_policy
from emailrl.settings import load_settings


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Probe]:
    settings = load_settings({"model_name": str(make_model(tmp_path / "model"))}, environ={}, cwd=tmp_path)
    policy = load_policy(settings)
    return lambda temperature=1.0, tolerance=0.1: Probe(policy, temperature=temperature, tolerance=tolerance)


def moved(expected: Expected, nats: float, sha256: str) -> Expected:
    return Expected(sha256, [value + nats for value in expected.prompt], expected.logits)


def test_equal_answers_after_another_adapter_are_refused(make: Callable[..., Probe]) -> None:
    """The trainer's opinion of the text moves by 0.01 nats, within the tolerance."""
    probe = make()
    base = probe.load(None)
    probe.check_prompt("vLLM", base.prompt, base)
    probe.check_prompt("another", moved(base, 0.02, "").prompt, base)
    adapted = moved(base, 0.01, "its hash")
    with pytest.raises(ProbeError, match="bit"):
        probe.check_prompt("vLLM", base.prompt, adapted)
    probe.check_prompt("another", base.prompt, adapted)


def test_equal_answers_after_the_same_adapter_are_right(make: Callable[..., Probe], tmp_path: Path) -> None:
    probe, checkpoint = make(), make_checkpoint(tmp_path / "run" / "best_model", tmp_path / "model")
    first = probe.load(checkpoint.path)
    assert first.adapter_sha256 is not None
    probe.check_prompt("vLLM", first.prompt, first)
    probe.check_prompt("vLLM", first.prompt, moved(first, 0.01, first.adapter_sha256))  # after a step without an update


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_drawn_after_prefixes_are_compared_without_the_model(
    make: Callable[..., Probe], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each prefix's next token has the log-probability that a pass over that prefix alone gives it."""
    probe = make(temperature, 0.001)
    expected, drawn = probe.load(None), [3, 7] * (module.PREFIXES // 2)
    assert probe.prefixes[-1] == probe.ids and len(probe.prefixes) == module.PREFIXES
    own = [
        probe.score([*prefix, token], len(prefix), temperature)[0]
        for prefix, token in zip(probe.prefixes, drawn, strict=True)
    ]
    plain = [probe.score([*prefix, token], len(prefix))[0] for prefix, token in zip(probe.prefixes, drawn, strict=True)]
    monkeypatch.setattr(module, "hidden_states", None)
    probe.check_next("vLLM", drawn, own, expected)
    with pytest.raises(ProbeError, match=r"off by 0\.0100 nats\."):
        probe.check_next("vLLM", drawn, [value - 0.01 for value in own], expected)
    if temperature < 1:
        with pytest.raises(ProbeError, match="taken before temperature"):
            probe.check_next("vLLM", drawn, plain, expected)
    other = Expected(None, expected.prompt, expected.logits + torch.randn(expected.logits.shape))
    with pytest.raises(ProbeError, match="vLLM returns log-probabilities of sampled tokens that are off"):
        probe.check_next("vLLM", drawn, own, other)


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_drawn_after_the_text_are_compared_one_after_another(
    make: Callable[..., Probe], temperature: float, tmp_path: Path
) -> None:
    """The answer is what single passes give, over the text with every token before the one drawn."""
    probe, drawn = make(temperature, 0.001), [3, 7, 3]
    probe.load(make_checkpoint(tmp_path / "run" / "best_model", tmp_path / "model").path)
    texts = [[*probe.ids, *drawn[: count + 1]] for count in range(3)]
    own = [probe.score(ids, len(ids) - 1, temperature)[0] for ids in texts]
    plain = [probe.score(ids, len(ids) - 1)[0] for ids in texts]
    probe.check_sampled("vLLM", drawn, own)
    with pytest.raises(ProbeError, match=r"off by 0\.0100 nats\."):
        probe.check_sampled("vLLM", drawn, [value - 0.01 for value in own])
    if temperature < 1:
        with pytest.raises(ProbeError, match="taken before temperature"):
            probe.check_sampled("vLLM", drawn, plain)
    probe.load(None)
    with pytest.raises(ProbeError):
        probe.check_sampled("vLLM", drawn, own)


def test_a_damaged_adapter_is_refused_before_an_engine_is_asked(make: Callable[..., Probe], tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    with pytest.raises(EmailRLError, match="is not an adapter"):
        make().load(tmp_path / "bad")
