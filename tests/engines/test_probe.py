"""The proof that an engine took an adapter, where two adapters are one and where they differ."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny import make_checkpoint, make_model

from emailrl.engines.probe import Probe, ProbeError
from emailrl.policy.load import load_policy
from emailrl.settings import load_settings


@pytest.fixture
def probe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Probe:
    """A trainer whose opinion of the text moves by 0.01 nats at every adapter, within the tolerance."""
    settings = load_settings({"model_name": str(make_model(tmp_path / "model"))}, environ={}, cwd=tmp_path)
    probe = Probe(load_policy(settings), temperature=1.0, tolerance=0.1)
    opinions = iter([-1.0, -1.01])
    monkeypatch.setattr(probe, "score", lambda ids, start=1, temperature=1.0: [value] * len(ids[start:]))
    value = -1.0

    def load(path: Path | None, load=probe.load) -> None:
        nonlocal value
        value = next(opinions)
        load(path)

    monkeypatch.setattr(probe, "load", load)
    return probe


def answer(probe: Probe) -> None:
    probe.check("vLLM", [-1.0] * (len(probe.ids) - 1), [5, 6], [-1.0, -1.0])


def test_equal_answers_after_another_adapter_are_refused(probe: Probe, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "run" / "best_model", tmp_path / "model")
    probe.load(None)
    answer(probe)
    probe.load(checkpoint.path)
    with pytest.raises(ProbeError, match="bit"):
        answer(probe)


def test_equal_answers_after_the_same_adapter_are_right(probe: Probe, tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "run" / "best_model", tmp_path / "model")
    probe.load(checkpoint.path)
    answer(probe)
    probe.load(checkpoint.path)  # after a step without an update
    answer(probe)
