"""Commands look for what they read before they load anything, and suggest the next one with its options."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from tiny import make_database

from emailrl.base.errors import UsageError
from emailrl.cli.inputs import suggest, suggest_benchmark
from emailrl.settings import Settings, load_settings
from emailrl.sft.data import source_of


def test_settings_that_cannot_train_are_refused_before_ranks_start(emailrl, monkeypatch) -> None:
    def launched(*_: object) -> int:
        raise AssertionError("a rank was started")

    monkeypatch.setattr("emailrl.cli.train.launch", launched)
    monkeypatch.setenv("MAX_STALENESS", "1")
    code, _, said = emailrl("train", "--nproc", "2")
    assert code == 2 and said.startswith("error: MAX_STALENESS=1 needs samplers of their own") and said.count("\n") == 1
    monkeypatch.delenv("MAX_STALENESS")
    code, _, said = emailrl("train", "--nproc", str(2**63 - 1))
    assert code == 2 and said.startswith(f"error: --nproc {2**63 - 1} needs more memory") and said.count("\n") == 1


@pytest.mark.parametrize("command", ["report", "view", "inspect-trajectory"])
def test_a_folder_too_large_to_search_is_refused_at_once(emailrl, tmp_path: Path, monkeypatch, command: str) -> None:
    monkeypatch.setattr("emailrl.cli.inputs.MAX_FOLDERS", 3)
    (tmp_path / "home" / "a" / "b" / "c").mkdir(parents=True)  # four with home
    code, _, said = emailrl(command, "home")
    assert code == 2 and said.startswith("error: home contains more than 3 folders, too many to search for a run.")
    assert said.count("\n") == 1


def test_sft_takes_the_questions_beside_the_database_or_says_that_it_is_not_used(
    emailrl, tmp_path: Path, monkeypatch
) -> None:
    make_database(tmp_path / "mail.db")
    asked: list[Settings] = []

    def run(settings: Settings, **_: object) -> None:
        asked.append(settings)
        raise UsageError("far enough")

    monkeypatch.setattr("emailrl.sft.loop.sft", run)
    said = emailrl("sft", "--db", "mail.db", "--model", "nano")[2]
    assert said.startswith("Note: mail.db is not used: it has no questions next to it (mail_questions.jsonl), nor --q")
    (tmp_path / "mail_questions.jsonl").touch()
    said = emailrl("sft", "--db", "mail.db", "--model", "nano")[2]
    assert said.startswith("Questions: mail_questions.jsonl (next to the database)\n")
    assert [settings.data.questions for settings in asked] == [None, Path("mail_questions.jsonl")]
    assert [source_of(settings) for settings in asked] == ["demo", "questions"]


# -- the next command


def settings_with(folder: Path, **values: Any) -> Settings:
    return load_settings(values, environ={}, cwd=folder)


def suggested(capsys) -> str:
    """The printed command without its program."""
    out, error = capsys.readouterr()
    assert out == ""
    return shlex.join(shlex.split(error)[2:])


def test_a_benchmark_names_its_model_and_questions(tmp_path: Path, capsys) -> None:
    settings = settings_with(tmp_path, model_name="m", db=Path("mine.db"))
    for questions, options in ((Path("mine_questions.jsonl"), ""), (Path("other.jsonl"), " --questions other.jsonl")):
        suggest_benchmark(settings, questions)
        assert suggested(capsys) == f"benchmark --db mine.db{options}"
    db = make_database(tmp_path / "mail.db")
    suggest_benchmark(settings_with(tmp_path, db=db), tmp_path / "mail_questions.jsonl")
    assert suggested(capsys) == f"benchmark --model smol --limit 40 --db {db}"


def test_a_command_keeps_the_data_and_the_task_that_the_folder_does_not_set(tmp_path: Path, capsys) -> None:
    data = {"db": Path("mine.db"), "questions": Path("mine_questions.jsonl"), "allow_shared_inbox": True}
    bare, given = settings_with(tmp_path), settings_with(tmp_path, **data)
    task = {"environment": "my.py:Env", "reward": "http://me:pw@host/r"}
    for settings, before, options in (
        (bare, bare, ""),
        (given, bare, " --db mine.db --allow-shared-inbox"),
        (settings_with(tmp_path, **data | {"questions": Path("b.jsonl")}), given, " --questions b.jsonl"),
        (settings_with(tmp_path, **task), bare, " --environment my.py:Env --reward http://host/r"),
    ):
        suggest(["train", "--adapter", "a"], settings, before)
        assert suggested(capsys) == f"train --adapter a{options}"
