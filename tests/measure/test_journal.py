"""The journal: conditions that steer a trajectory, and what a resumed one plays again."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tiny import make_questions, settings_of

from emailrl.base.errors import UsageError
from emailrl.measure.journal import Conditions, differences, playing_conditions
from emailrl.model import policy as load


def test_all_that_steers_a_trajectory_is_compared(tmp_path: Path) -> None:
    template, path = tmp_path / "chat.jinja", tmp_path / "conditions.json"
    template.write_text("one")

    def conditions(**changed: Any) -> dict[str, Any]:
        settings = settings_of(tmp_path, chat_template=template, **changed)
        return playing_conditions(settings, make_questions(1), temperature=0)

    path.write_text(json.dumps(conditions()))
    assert differences(path, conditions()) == []
    assert differences(path, conditions(question_template="Q: {}")) == ["question template was {}, now Q: {}"]
    assert differences(path, conditions(load_in_4bit=True)) == ["load in 4bit was false, now true"]
    told = differences(path, conditions(judge_api_key="k", judge_base_url="https://me:secret@judge.example/v1"))
    assert told == [
        "judge was offline, now llm",
        "judge model was null, now google/gemini-2.0-flash-001",
        "judge server was null, now https://judge.example/v1",
    ]
    template.write_text("two")
    assert differences(path, conditions()) == ["other chat template"]


def test_the_dtype_is_the_one_that_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "computes_bf16", lambda: True)

    def dtype(*models: str, **changed: Any) -> str | None:
        settings = settings_of(tmp_path, device="cpu", model_name="nano", **changed)
        found = playing_conditions(settings, make_questions(1), temperature=0, models=models)["dtype"]
        assert found is None or isinstance(found, str)
        return found

    large = "Qwen/Qwen3-0.6B"  # 600 M parameters by its name
    assert [dtype(), dtype("nano", "nano"), dtype(large)] == ["fp32", "fp32", "bf16"]
    assert dtype("nano", large) == "nano: fp32, Qwen/Qwen3-0.6B: bf16"
    assert dtype("nano", large, dtype="fp16") == "fp16"
    monkeypatch.setattr(load, "computes_bf16", lambda: False)
    assert dtype(large) == "fp32"
    urls = "http://localhost:8001"
    assert [dtype(engine=engine, vllm_urls=urls) for engine in ("openai", "vllm", "auto")] == [None, None, "fp32"]


def test_of_another_database_it_is_said_how_one_changes(tmp_path: Path) -> None:
    path = tmp_path / "conditions.json"
    path.write_text(json.dumps({"database": "0" * 16, "seed": 1}))
    with pytest.raises(UsageError, match="other database") as refused:
        Conditions(path, {"database": "1" * 16, "seed": 1}, resume=True)
    assert "gen-db --append" in (refused.value.hint or "")
    with pytest.raises(UsageError, match="seed was 1, now 2") as refused:
        Conditions(path, {"database": "0" * 16, "seed": 2}, resume=True)
    assert "gen-db" not in (refused.value.hint or "")


def test_where_nothing_was_played_nothing_is_left(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "er" / "conditions.json"
    with Conditions(path, {}, resume=False):
        assert path.is_file()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UsageError, match="Nothing to resume"):
        Conditions(path, {}, resume=True)


def test_nothing_waits_for_a_pipe_in_the_place_of_the_conditions(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "conditions.json")
    for resume in (True, False):
        with pytest.raises(UsageError, match="pipe"):
            Conditions(tmp_path / "conditions.json", {}, resume=resume)
