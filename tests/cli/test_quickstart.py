"""What the quickstart prints at its end, on outcomes made by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emailrl.cli.quickstart import Outcome
from emailrl.measure.benchmark import Report, Result, Subject
from emailrl.measure.evaluation import Evaluation
from emailrl.records.trajectory import Scenario, StopReason, Trajectory

CONDITIONS = {"temperature": 0, "max_turns": 6, "samples": 1, "sequential": False, "reward_name": "art_e"}


def outcome(run_dir: Path, best_step: int) -> Outcome:
    """One wrong answer before and after training, two evaluations and a step."""
    (run_dir / "metrics.jsonl").write_text('{"step": 1, "accuracy": 0.5}\n')
    (run_dir / "evaluations.jsonl").write_text('{"step": 0, "accuracy": 0.5}\n{"step": 1, "accuracy": 0.25}\n')
    scenario = Scenario("q", "?", "!", [], "a@x", "2001-01-01")
    wrong = Trajectory("t", "g", scenario, rubric={"answer_correct": False}, stop_reason=StopReason.ANSWERED)
    result = Result(Subject("nano", "nano"), Evaluation([wrong]), True, Path("00-nano.jsonl"))
    report = Report([result], CONDITIONS, 1)
    return Outcome(report, report, run_dir, best_step, 60.0)


@pytest.mark.parametrize("best_step", [0, 1])
def test_an_untrained_best_model_is_named_as_such(emailrl, tmp_path: Path, monkeypatch, best_step: int) -> None:
    monkeypatch.setattr("emailrl.cli.quickstart.cycle", lambda *_, **__: outcome(tmp_path, best_step))
    code, out, said = emailrl("quickstart", "--out", "my demo")
    assert code == 0
    assert ("The best model is the untrained one" in out) is (best_step == 0)
    assert "Test accuracy" in out and "Finished in 1.0 minutes." in out and "Next: " not in out
    assert said.startswith("Next: cd 'my demo' && ") and said.endswith("emailrl inspect-trajectory --verbose\n")
    _, out, said = emailrl("quickstart", "--out", "my demo", "--json")
    assert json.loads(out)["best_step"] == best_step and "Test accuracy" in said
