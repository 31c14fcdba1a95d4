"""The command line's manners: one line on stderr and an exit code for every way a command can end."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from emailrl import __version__
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.cli import app as cli


@pytest.fixture
def broken(emailrl, monkeypatch):
    """Run `main` with an app that raises; returns (exit code, stdout, stderr)."""

    def run(error: BaseException) -> tuple[int, str, str]:
        app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)

        @app.command()
        def fails() -> None:
            raise error

        monkeypatch.setattr(cli, "app", app)
        return emailrl()

    return run


def test_bare_help_and_version(emailrl) -> None:
    assert emailrl() == emailrl("--help") == emailrl("-h")
    assert "Examples:" in emailrl()[1]
    assert emailrl("--version") == (0, f"emailrl {__version__}\n", "")


UNKNOWN = "error: No such option: --"
EXTRA = "error: Got unexpected extra argument(s) "


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("--nonsense", f"{UNKNOWN}nonsense. See emailrl --help.\n"),
        ("plan --max-model-len 9", f"{UNKNOWN}max-model-len. Set MAX_MODEL_LEN in the environment or emailrl.toml;"),
        ("gen-db --lime 3", f"{UNKNOWN}lime. Did you mean --limit? See emailrl gen-db --help.\n"),
        ("sft --steps 3", f"{UNKNOWN}steps. Did you mean --max-steps? See emailrl sft --help.\n"),
        ("sft --packing", f"{UNKNOWN}packing. See emailrl sft --help.\n"),
        ("train --per-device-train-batch-size 4", f"{UNKNOWN}per-device-train-batch-size. Did you mean --batch-size? "),
        ("nonsense", "error: No such command 'nonsense'. See emailrl --help.\n"),
        ("trian", "error: No such command 'trian'. Did you mean 'train'? See emailrl --help.\n"),
        ("gen-db --limit few", "error: Invalid value for '--limit': 'few' "),
        ("train --batch-size 0", "error: Invalid value for '--batch-size': '0' should be "),
        ("train --learning-rate fast", "error: learning_rate='fast' (command line): should be a valid number"),
        (
            "ask When? --date yesterday",
            "error: Invalid value for '--date': 'yesterday' does not match the format",
        ),
        ("rollout --split dev", "error: Invalid value for '--split': 'dev' is not one of 'train', "),
        ("benchmark best", f"{EXTRA}(best). Values need an option, such as --checkpoint or --model; see "),
        ("checkpoints list a b", f"{EXTRA}(b). See emailrl checkpoints list --help.\n"),
    ],
)
def test_wrong_usage(emailrl, command: str, line: str) -> None:
    code, out, err = emailrl(*command.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(line)


NO_TEXT = UnicodeEncodeError("utf-8", "post\udcff", 4, 5, "surrogates not allowed")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (EmailRLError("it broke.", "Mend it."), 1, "error: it broke. Mend it.\n"),
        (UsageError("no such file: a.mbox.", "Name one."), 2, "error: no such file: a.mbox. Name one.\n"),
        (UsageError("two\nlines \x1b[31m\x07red"), 2, "error: two lines [31m red\n"),
        (PermissionError(13, "Permission denied", "/x"), 1, "error: /x: Permission denied. Change its permissions or "),
        (OSError("the hub\ncannot be reached"), 1, "error: the hub cannot be reached\n"),
        (NO_TEXT, 1, "error: A file or folder name here is not valid UTF-8, which some libraries reject. Rename it.\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (typer.Abort(), 130, "interrupted\n"),
        (typer.Exit(3), 3, ""),
    ],
)
def test_errors_become_one_line_and_a_code(broken, error: BaseException, code: int, line: str) -> None:
    ended, out, err = broken(error)
    assert (ended, out, err.count("\n")) == (code, "", bool(line)) and err.startswith(line)


@pytest.mark.parametrize(("no_color", "label"), [("", "\x1b[31merror:\x1b[0m "), ("1", "error: ")])
def test_on_a_terminal_an_error_has_a_red_label_and_wraps_between_words(no_color: str, label: str) -> None:
    ours, theirs = pty.openpty()
    environ = os.environ | {"COLUMNS": "30", "TERM": "xterm", "NO_COLOR": no_color}
    command = [sys.executable, "-m", "emailrl", "nonsense"]
    assert subprocess.run(command, stderr=theirs, env=environ, check=False).returncode == 2
    lines = os.read(ours, 4096).decode().replace(label, "error: ", 1).splitlines()
    assert [line.rstrip() for line in lines] == ["error: No such command", "'nonsense'. See emailrl", "--help."]
    os.close(ours)
    os.close(theirs)


def test_a_bug_is_not_dressed_up(broken) -> None:
    with pytest.raises(ZeroDivisionError):
        broken(ZeroDivisionError())


def test_a_reader_that_leaves_is_no_traceback(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    for arguments in (["--help"], ["checkpoints", "list", "--json"]):
        command = [sys.executable, "-m", "emailrl", *arguments]
        done = subprocess.run(command, cwd=tmp_path, stdout=write, stderr=subprocess.PIPE, text=True)
        assert (done.returncode, done.stderr) == (1, ""), arguments  # as click and pip do
    os.close(write)


def in_shell(line: str, folder: Path) -> tuple[int, str]:
    command = f"{sys.executable} -m emailrl {line}"
    done = subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stderr


LOST = "error: The output was lost: stdout is closed. Leave it open, or redirect it to a file or /dev/null.\n"
FULL = "error: The output cannot be written: No space left on device. Free some space, or write elsewhere.\n"


@pytest.mark.parametrize("redirect", [(">&-", LOST), (">/dev/full", FULL)], ids=["closed", "full"])
@pytest.mark.parametrize("arguments", ["--version", "checkpoints list --json"])
def test_output_that_cannot_be_written_is_an_error(tmp_path: Path, arguments: str, redirect: tuple[str, str]) -> None:
    assert in_shell(f"{arguments} {redirect[0]}", tmp_path) == (1, redirect[1])


def test_a_command_without_output_needs_no_stdout(tmp_path: Path) -> None:
    code, error = in_shell("checkpoints list >&-", tmp_path)
    assert code == 0 and error.startswith("No checkpoints yet in the runs of OUTPUT_DIR (outputs/grpo).")


@pytest.mark.parametrize(("closed", "code"), [(">&-", 1), ("2>&-", 0), (">&- 2>&-", 1), ("<&-", 0)])
def test_a_closed_stream_is_no_traceback(tmp_path: Path, closed: str, code: int) -> None:
    ended, said = in_shell(f"gen-db --source demo --limit 3 --db mail.db --json {closed}", tmp_path)
    assert ended == code and "Traceback" not in said and (tmp_path / "mail.db").is_file()


def test_a_terminal_without_the_characters_of_a_name_is_no_traceback(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "emailrl", "gen-db", "--source", "demo", "--limit", "3", "--db", "post\udcff-ß.db"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, env=environment)
    assert done.returncode == 0 and rb"post<U+DCFF>-\xdf.db, 0 skipped" in done.stdout.replace(b"\n", b"")


def test_another_ctrl_c_while_the_process_ends_is_the_end() -> None:
    code = """
import atexit, os, signal, time
from emailrl.cli import app
atexit.register(time.sleep, 600)
atexit.register(lambda: (print("ending", flush=True), os.kill(os.getpid(), signal.SIGINT)))
def interrupted(**_): raise KeyboardInterrupt
app.app = interrupted
app.main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "ending\n", "interrupted\n")
