"""What goes to stdout is one JSON value on one line, whatever it is made of."""

from __future__ import annotations

import io
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console

from emailrl.cli.output import print_json, program, say


@dataclass
class Report:
    db: Path
    mean: float
    skipped: dict[str, int]


def test_one_line_with_absolute_paths_and_no_nan(capsys, tmp_path: Path) -> None:
    report = Report(Path("a/b.db"), float("nan"), {"too long": 2})
    print_json({"reports": (report,), "text": "line\nbreak \u2028 é", "flag": True, "inf": float("-inf")})
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and err == "" and out.isascii()
    reports = [{"db": str(Path.cwd() / "a/b.db"), "mean": None, "skipped": {"too long": 2}}]
    assert json.loads(out) == {"reports": reports, "text": "line\nbreak \u2028 é", "flag": True, "inf": None}


def test_a_path_has_no_way_up_in_it_and_need_not_be_text(capsys, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "deep").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "deep")
    print_json([tmp_path / "link" / ".." / "mail.db", tmp_path / "link"])
    shown = json.loads(capsys.readouterr().out)
    assert shown == [str(tmp_path / "elsewhere" / "mail.db"), str(tmp_path / "link")]
    print_json({"out": Path("/a/b\udcff.db")})
    out = capsys.readouterr().out
    assert out == '{"out": "/a/b\\udcff.db"}\n' and json.loads(out) == {"out": "/a/b\udcff.db"}
    with pytest.raises(TypeError):
        print_json({"object": object()})


def test_a_terminal_breaks_a_line_between_words_and_a_file_gets_it_whole() -> None:
    words = [f"word{number}" for number in range(30)]
    line = " ".join(words)
    for terminal, lines in ((True, 3), (False, 1)):
        out = io.StringIO()
        say(f"{line}\x07", Console(file=out, force_terminal=terminal, color_system=None, width=80))
        printed = out.getvalue().splitlines()
        assert len(printed) == lines and max(map(len, printed)) <= (80 if terminal else len(line))
        assert " ".join(printed).split() == words


def test_the_command_is_named_as_the_shell_in_a_folder_finds_it(tmp_path: Path, monkeypatch) -> None:
    scripts, folder = tmp_path / ".venv" / "bin", tmp_path / "quickstart"
    scripts.mkdir(parents=True)
    folder.mkdir()
    monkeypatch.setattr("sys.executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert program(folder) == f"{scripts}/python -m emailrl"  # not installed, run as a module
    (scripts / "emailrl").write_text("#!/bin/sh\necho ran")
    (scripts / "emailrl").chmod(0o755)
    assert program(folder) == "../.venv/bin/emailrl"
    ran = subprocess.run(program(folder), shell=True, cwd=folder, capture_output=True, text=True)
    assert ran.stdout == "ran\n"
    monkeypatch.setenv("PATH", f"{scripts}:/usr/bin:/bin")
    assert program(folder) == "emailrl"
    other = tmp_path / "other"
    other.mkdir()
    (other / "emailrl").write_text("#!/bin/sh\necho another")
    (other / "emailrl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{other}:{scripts}:/usr/bin:/bin")
    assert program(folder) == "../.venv/bin/emailrl"  # the shell would find another
