"""Shell completion: what is offered, and that bash and zsh put it on the line (docs/reference/terminal.md)."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest
from screen import Screen
from tiny import ANN, make_checkpoint, make_database, make_model


@pytest.fixture
def offered(emailrl, monkeypatch):
    """What bash is offered for the last word of a line."""

    def complete(line: str) -> list[str]:
        monkeypatch.setenv("_EMAILRL_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(len(line.split(" ")) - 1))
        code, out, err = emailrl()
        assert (code, err) == (0, "")
        return out.split()

    return complete


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("emailrl be", ["benchmark"]),
        ("emailrl checkpoints ", ["list", "show", "prune"]),
        ("emailrl benchmark --seq", ["--sequential"]),
        ("emailrl train --mode ", ["simple", "rollout", "masked"]),
        ("emailrl train --preset m", ["medium"]),
        ("emailrl train --resume ", ["auto", "latest", "best"]),
        ("emailrl ask --model n", ["nano"]),
        ("emailrl benchmark --model smol-", ["smol-base"]),
        ("emailrl export --format ", ["adapter", "merged", "gguf", "gguf-lora"]),
        ("emailrl rollout --split t", ["train", "test"]),
        ("emailrl ask --inbox a", []),  # there is no database
        ("emailrl gen-db --db ", []),  # the shell then offers files
    ],
)
def test_commands_options_and_values_are_offered(offered, line: str, expected: list[str]) -> None:
    assert offered(line) == expected


def test_checkpoints_and_mailboxes_of_the_folder_are_offered(offered, tmp_path: Path) -> None:
    make_database(tmp_path / "mail.db")
    assert offered("emailrl ask --db mail.db --inbox a") == [ANN]
    assert offered("emailrl gen-questions --db mail.db --inbox ") == [ANN, "bob@example.com"]
    (tmp_path / "emailrl.toml").write_text('db = "mail.db"\nopenai_base_url = "http://elsewhere"\n')
    assert offered("emailrl ask --inbox b") == ["bob@example.com"]  # also in a folder that is not trusted
    make_checkpoint(tmp_path / "outputs" / "grpo_masked" / "best_model", make_model(tmp_path / "model"))
    best = "outputs/grpo_masked/best_model"
    assert offered("emailrl export --checkpoint ") == ["best", "latest", best]
    assert offered("emailrl checkpoints show out") == [best]
    (tmp_path / "emailrl.toml").write_text("nonsense = 1\n")
    assert offered("emailrl export --checkpoint ") == ["best", "latest"]


@pytest.mark.parametrize(("shell", "start"), [("bash", "--norc --noprofile -i"), ("zsh", "-f -i")])
def test_a_shell_completes_the_line(tmp_path: Path, shell: str, start: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    program = tmp_path / "bin" / "emailrl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m emailrl "$@"\n')
    program.chmod(0o755)
    (tmp_path / "mail").mkdir()
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    screen = Screen([shell, *start.split()], tmp_path, PATH=path, PS1="$ ", HOME=str(tmp_path), TERM="dumb")
    try:
        init = "autoload -Uz compinit; compinit -u; " if shell == "zsh" else ""
        screen.type(f'{init}eval "$(_EMAILRL_COMPLETE=source_{shell} emailrl)"; echo read""y\n')
        screen.wait_for("ready")
        screen.type("emailrl ben\t")
        screen.wait_for("emailrl benchmark ")
        screen.type("--engi\tvl\t")
        screen.wait_for("--engine")
        screen.wait_for("vllm")
        screen.type("--db ma\t")
        screen.wait_for("mail/")
    finally:
        screen.close()
