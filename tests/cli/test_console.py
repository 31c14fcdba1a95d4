"""Texts of others on the terminal: no markup is read, no escape sequence gets there, whichever way they are printed."""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from pathlib import Path

import pytest
from rich.panel import Panel
from rich.progress import Progress, TextColumn
from rich.table import Table
from rich.text import Text

import emailrl as package
from emailrl.base.plain import guard_streams, tell
from emailrl.checkpoints import read_checkpoint
from emailrl.cli.app import LONGEST_ERROR, fail
from emailrl.cli.output import print_json, progress_console, result_console, say
from emailrl.records.trajectory import Trajectory
from emailrl.rewards.scorer import build_scorer
from emailrl.runs.log import open_log
from emailrl.settings import RewardSettings, Settings

HOSTILE = "\x1b[2J[red]x[/red]\x1b]8;;http://evil.example\x07\u202egpj.\x9b31m"
SHOWN = "␛[2J[red]x[/red]␛]8;;http://evil.example"
STEERING = ("\x1b[2J", "\x1b]8", "\x07", "\u202e", "\x9b")


def is_harmless(stream: str) -> bool:
    return not any(sign in stream for sign in STEERING)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("FORCE_COLOR", "1")


def table(text: str) -> Table:
    made = Table(text, title=text)
    made.add_row(text)
    made.add_row(Text(text, style="bold"))
    return made


@pytest.mark.parametrize("renderable", [HOSTILE, Text(HOSTILE), table(HOSTILE), Panel(HOSTILE)])
def test_what_is_printed_is_shown_and_not_acted_on(capsys, renderable: object) -> None:
    result_console().print(renderable, style="green")
    progress_console().print(renderable)
    for stream in capsys.readouterr():
        assert SHOWN in stream and is_harmless(stream)
    with Progress(TextColumn("{task.description}", markup=False), console=progress_console()) as bar:
        bar.add_task(HOSTILE)
    error = capsys.readouterr().err
    assert SHOWN in error and is_harmless(error)


def test_an_error_is_one_line_of_bounded_length(capsys, monkeypatch) -> None:
    monkeypatch.delenv("FORCE_COLOR")  # a terminal wraps it
    with pytest.raises(SystemExit):
        fail(HOSTILE + "y" * 10**6, "hint", 1)
    error = capsys.readouterr().err
    assert error.startswith("error: [2J[red]x[/red] ]8;;http://evil.example gpj. 31my") and error.count("\n") == 1
    assert len(error) == LONGEST_ERROR + 2


def test_no_command_prints_past_these_consoles() -> None:
    for path in (Path(package.__file__).parent / "cli").glob("*.py"):
        assert not re.search(r"(?<!\w)Console\((?!\):)", path.read_text("utf-8")), path


def test_a_strangers_metadata(emailrl, tmp_path: Path) -> None:
    folder = tmp_path / "outputs" / "grpo_masked" / "best_model"
    folder.mkdir(parents=True)
    record = {
        "run_id": "run", "kind": HOSTILE, "step": 1, "mode": HOSTILE, "algorithm": HOSTILE, "base_model": HOSTILE,
        "lora": {HOSTILE: HOSTILE}, "metrics": {HOSTILE: HOSTILE}, "settings": {HOSTILE: {HOSTILE: HOSTILE}},
        "parent": HOSTILE, "resumed_from": HOSTILE, "seed": 1, "versions": {}, "database_fingerprint": "", "files": {},
        "questions_fingerprint": "", "git_commit": HOSTILE, "created_at": "2026-01-01T00:00:00+00:00",
        "schema_version": 1,
    }  # fmt: skip
    (folder / "metadata.json").write_text(json.dumps(record))
    assert read_checkpoint(folder).metadata.kind == HOSTILE
    for arguments in (("list",), ("show", folder), ("show", folder, "--verbose"), ("list", "--json")):
        code, *streams = emailrl("checkpoints", *arguments)
        assert code == 0 and any("[red]x[/red]" in stream for stream in streams)
        assert all(map(is_harmless, streams))
    (folder / "metadata.json").write_text(json.dumps(record | {"files": {HOSTILE: "0"}}))
    error = emailrl("checkpoints", "show", folder)[2] + emailrl("checkpoints", "list")[2]
    assert error.count("[red]x[/red]") == 2 and is_harmless(error)


# -- into every sink

FOREIGN = "ME\x1b[31mX\x1b]0;title\x07\x9b1m\u202e\rY"


@pytest.mark.parametrize("logs", [False, True])
def test_no_text_steers_any_sink(logs: bool, trajectory: Trajectory, tmp_path: Path, capsys) -> None:
    guard_streams()
    handler = open_log(tmp_path / "training.log", verbose=True) if logs else None
    logging.getLogger("emailrl").propagate = False
    (tmp_path / "own.py").write_text(f"def reward(trajectory):\n    raise ValueError({FOREIGN!r})\n")
    settings = Settings(rewards=RewardSettings(judge="offline", reward=f"{tmp_path / 'own.py'}:reward"))
    try:
        build_scorer(settings.rewards, settings.reward_weights, settings.agent).score([trajectory])  # logs the error
        sinks = (print, tell, say, warnings.warn, sys.stdout.write, sys.stderr.write, logging.getLogger("other").error,
                 logging.getLogger("emailrl.x").error, result_console().print, progress_console().print)  # fmt: skip
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            for sink in sinks:
                sink(FOREIGN)
        sys.stdout.writelines([FOREIGN, "\n"])
        with progress_console().status("busy"):
            print(FOREIGN, file=sys.stderr)
        print_json({"said": FOREIGN})
    finally:
        logging.getLogger("emailrl").propagate = True
        if handler:
            logging.getLogger("emailrl").removeHandler(handler)
            handler.close()
    streams = capsys.readouterr()
    log = (tmp_path / "training.log").read_text() if logs else ""
    assert "ME␛[31mX" in (log if logs else streams.err)
    for sink in (*streams, log):
        assert not any(sign in sink for sign in ("\x1b[31mX", "\x1b]0", "\x07", "\x9b", "\u202e", "\rY"))
    assert json.loads(streams.out.splitlines()[-1]) == {"said": FOREIGN}
