"""Chat servers as the policy of rollouts and benchmarks."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from engines.asking import ANSWER, SEARCH, settings_for
from engines.chat_server import StubServer, said
from tiny import make_database, make_questions

from emailrl.measure.benchmark import Subject, players
from emailrl.questions import write_scenarios
from emailrl.records import read_trajectories
from emailrl.records.trajectory import StopReason


def test_a_rollout_through_the_mailbox_sums_usage(serve: Callable[..., StubServer], tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        return 200, said(None, ANSWER if body["messages"][-1]["role"] == "tool" else SEARCH)

    server = serve(reply)
    make_database(tmp_path / "mail.db")
    settings = settings_for(server.url, tmp_path, db=tmp_path / "mail.db", input_price=1.0, output_price=5.0)
    with closing(players([Subject("model", settings.model.name)], settings)) as playing:
        _, collector = next(playing)
        [group] = collector.collect(make_questions(1), 1, step=0, seed=1)
    [trajectory] = group.trajectories
    assert trajectory.exception is None and trajectory.stop_reason is StopReason.ANSWERED
    assert trajectory.final_answer == "31 May 2002" and trajectory.rubric["answer_correct"] is True
    assert trajectory.rubric["prompt_tokens"] == 200 and trajectory.rubric["completion_tokens"] == 40
    assert [turn.cost for turn in trajectory.turns] == [pytest.approx(0.0002)] * 2
    [_, (_, second)] = server.requests
    told = [message["role"] for message in second["messages"]]
    assert told == ["system", "user", "assistant", "tool"]
    assert second["messages"][3]["tool_call_id"] == second["messages"][2]["tool_calls"][0]["id"] == "id0"
    assert "ends on 31 May 2002" in second["messages"][3]["content"]


def test_benchmark_end_to_end(
    serve: Callable[..., StubServer],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from emailrl.cli.app import main

    def reply(body: dict[str, Any]) -> tuple[int, Any]:
        if body["model"] == "dull":
            return 200, said("I would rather chat.")
        return 200, said(None, ANSWER if body["messages"][-1]["role"] == "tool" else SEARCH)

    server = serve(reply)
    make_database(tmp_path / "mail.db")
    write_scenarios(tmp_path / "questions.jsonl", make_questions(3))
    monkeypatch.chdir(tmp_path)
    for name, value in {"OPENAI_BASE_URL": server.url, "INPUT_PRICE": "1", "OUTPUT_PRICE": "5"}.items():
        monkeypatch.setenv(name, value)
    arguments = "benchmark --engine openai --model good --model dull --db mail.db --questions questions.jsonl --json"
    monkeypatch.setattr("sys.argv", ["emailrl", *arguments.split()])
    with pytest.raises(SystemExit) as caught:
        main()
    printed = capsys.readouterr()
    assert caught.value.code == 0, printed.err
    good, dull = json.loads(printed.out.splitlines()[-1])
    assert (good["model"], good["accuracy"], good["tokens"]) == ("good", 1.0, 240.0)
    assert good["cost"] == pytest.approx(3 * 2 * 0.0002) and dull["cost"] == pytest.approx(3 * 0.0002)
    assert (dull["accuracy"], dull["bad_tool_call_args"], dull["exceptions"]) == (0.0, 1.0, 0)
    told = " ".join(printed.err.split())
    assert "cost" in told and "p = 0.25" in told  # 2 · (1/2)³
    played = list(read_trajectories(Path(good["trajectories"])))
    assert {t.policy_version for t in played} == {"good"} and all(not t.samples for t in played)
