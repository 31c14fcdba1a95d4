"""Commands look for what they read before they load anything, and suggest the next one with its options."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import ANN, make_database

from emailrl.base.errors import UsageError
from emailrl.cli.inputs import suggest, suggest_benchmark
from emailrl.questions.load import write_scenarios
from emailrl.questions.splits import SPLITS
from emailrl.records.trajectory import Scenario
from emailrl.settings import Settings, load_settings
from emailrl.sft.data import source_of

Emailrl = Callable[..., tuple[int, str, str]]


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


def test_without_a_network_train_ends_in_one_line_before_anything_slow(tmp_path: Path) -> None:
    (tmp_path / "mail").mkdir()
    (tmp_path / "mail" / "1.eml").write_text("From: kay@enron.com\nTo: bob@x.org\nMessage-ID: <1@x>\n\nhello\n")
    with socket.create_server(("127.0.0.1", 0)) as server:
        refusing = f"http://127.0.0.1:{server.getsockname()[1]}"
    online = {"HF_HUB_OFFLINE": "", "HF_DATASETS_OFFLINE": "", "HF_ENDPOINT": refusing, "HF_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "emailrl"]
    subprocess.run([*command, "gen-db", "--source", "mail"], cwd=tmp_path, check=True, capture_output=True)
    done = subprocess.run(
        [*command, "train", "--model", "nano"], cwd=tmp_path, env=os.environ | online, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done.stderr
    assert "the hub cannot be reached. Name a local file or folder with --questions" in done.stderr


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


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (
            ("--questions", "shared.jsonl"),
            "error: shared.jsonl: inbox ann@example.com is in the splits train, val and test.",
        ),
        (("--questions", "q.jsonl"), "error: The transformers engine cannot sample from a sharded base model"),
        (("--questions", "q.jsonl", "--engine", "vllm"), "error: No vLLM server available (1 configured): "),
    ],
)
def test_train_refuses_what_needs_no_model_before_loading_one(
    emailrl, tmp_path: Path, monkeypatch, arguments: tuple[str, ...], error: str
) -> None:
    make_database(tmp_path / "mail.db")
    rows = [Scenario(f"q{split}", "When?", "Now.", ["<m0@x>"], ANN, "2001-06-01", split=split) for split in SPLITS]
    write_scenarios(tmp_path / "shared.jsonl", rows)
    write_scenarios(tmp_path / "q.jsonl", [replace(rows[0], split=None)])
    monkeypatch.setenv("VLLM_URLS", "http://127.0.0.1:9")
    if arguments == ("--questions", "q.jsonl"):
        monkeypatch.setenv("SHARD", "host")
    code, _, said = emailrl("train", "--db", "mail.db", "--model", "nano", *arguments)
    assert code and said.splitlines()[-1].startswith(error), said
    assert "Loading the model" not in said and not (tmp_path / "outputs").exists()


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
