"""``emailrl trust``: what it shows, asks and keeps."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from cli.conftest import Terminal

from emailrl.cli.quickstart import SETTINGS
from emailrl.settings.trust import folders

TOML = 'judge_base_url = "http://127.0.0.1:9/v1"\nreward = "own.py:f"\nmax_steps = 3\n'


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "emailrl.toml").write_text(TOML)
    return tmp_path


def test_nobody_to_ask_is_an_error_that_shows_what_there_is(emailrl, here: Path) -> None:
    code, out, err = emailrl("trust", ".")
    assert (code, out) == (2, "")
    assert err.splitlines() == [
        f"{here}:",
        "  emailrl.toml sets reward = 'own.py:f', which runs that code",
        "  emailrl.toml sets judge_base_url = 'http://127.0.0.1:9/v1',"
        " which gets questions and answers, with RULER whole conversations, and your JUDGE_API_KEY",
        "error: Trusting a folder needs confirmation. Add --yes once you have read the list.",
    ]
    assert emailrl("plan")[0] == 2


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("n\n", 1)])
def test_it_asks(emailrl, here: Path, monkeypatch, answer: str, code: int) -> None:
    monkeypatch.setattr(sys, "stdin", Terminal(answer))
    assert emailrl("trust")[0] == code
    assert list(folders()) == ([str(here)] if code == 0 else [])


def test_yes_and_revoke(emailrl, here: Path) -> None:
    code, out, _ = emailrl("trust", here, "--yes", "--json")
    record = json.loads(out)
    reward, judge = record["trusted"]
    assert code == 0 and record["folder"] == str(here) and judge["setting"] == "judge_base_url"
    given = {"file": "emailrl.toml", "setting": "reward", "value": "'own.py:f'", "effect": "runs that code"}
    assert (
        reward == given
        and judge["effect"] == "gets questions and answers, with RULER whole conversations, and your JUDGE_API_KEY"
    )
    assert list(folders()) == [str(here)]
    assert "is no longer trusted" in emailrl("trust", "--revoke")[2]
    assert emailrl("plan")[0] == 2
    assert folders() == {}


@pytest.mark.parametrize("lines", ['model_name = "nano"\ndb = "mail.db"\nmax_steps = 3\n', SETTINGS.format(steps=3)])
def test_a_folder_with_nothing_dangerous_or_of_a_quickstart(emailrl, tmp_path: Path, lines: str) -> None:
    (tmp_path / "emailrl.toml").write_text(lines)
    code, out, err = emailrl("trust", ".")
    assert (code, out, err) == (0, "", f"{tmp_path}: nothing in it requires trust.\n")
    assert "is not a folder" in emailrl("trust", "emailrl.toml")[2]


def test_control_characters_of_a_value_do_not_reach_the_terminal(emailrl, tmp_path: Path) -> None:
    (tmp_path / "emailrl.toml").write_text('reward = "\\u001b[2Jown.py:f\\nyes\\u202e"\n')
    err = emailrl("trust")[2]
    assert "'\\x1b[2Jown.py:f\\nyes\\u202e'" in err and "\x1b" not in err and "\u202e" not in err
