"""A folder in which a reader's commands are run: demo mail, an mbox, ``nano``, and limits that keep runs short."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from email.message import EmailMessage
from email.utils import format_datetime
from pathlib import Path

from documents.pages import ROOT, Block

from emailrl.questions.load import write_demo
from emailrl.settings import StoreSettings

PEOPLE = ["bo.lind@example.net", "cy.marsh@example.net"]
SETTINGS = """\
model_name = "nano"
db = "demo.db"
questions = "demo_questions.jsonl"
"""
LIMITS = {
    **{"MAX_STEPS": "2", "PER_DEVICE_TRAIN_BATCH_SIZE": "2", "NUM_GENERATIONS": "2", "TRAIN_DATASET_SIZE": "20"},
    **{"EVAL_DATASET_SIZE": "4", "TEST_SET_SIZE": "4", "MAX_TURNS": "4", "MAX_TOKENS": "96", "MIN_GROUP_STD": "0"},
    **{"SFT_STEPS": "2", "SFT_BATCH_SIZE": "4", "EMAILRL_JUDGE": "offline", "WANDB_MODE": "disabled"},
}
"""The environment outranks a page's ``emailrl.toml``, so that its runs end in seconds."""
STAND_INS = {
    **{r"Qwen/Qwen3-\w+(?:\.\w+)?": "nano", r"--model smol(?:-base)?": "--model nano"},
    **{r" --engine vllm": "", r'engine = "vllm"': "", r"~/": "./"},
}
"""What a scratch folder lacks, and what takes its place."""


def make_home(folder: Path) -> Path:
    """Fill a folder: ``emailrl`` on the path of its scripts, settings, demo mail, and the mail of one person."""
    program = folder / "bin" / "emailrl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m emailrl "$@"\n')
    program.chmod(0o755)
    (folder / "emailrl.toml").write_text(SETTINGS)
    write_demo(folder / "demo.db", seed=42, settings=StoreSettings())
    write_mbox(folder / "mail.mbox")
    return folder


def write_mbox(path: Path) -> None:
    """Sixty emails between ``me@example.org`` and two others."""
    lines = []
    for number in range(60):
        mail = EmailMessage()
        other = PEOPLE[number % 2]
        mail["From"], mail["To"] = (other, "Me <me@example.org>") if number % 3 else ("me@example.org", other)
        mail["Subject"] = f"Survey of jetty {chr(97 + number // 26)}{chr(97 + number % 26)}x by the crew"
        sent_at = datetime(2024, 3, 1, 9, tzinfo=UTC) + timedelta(hours=17 * number)
        mail["Date"], mail["Message-ID"] = format_datetime(sent_at), f"<{number}@example.net>"
        mail.set_content(f"The repair costs ${number + 11},000.\nFrom now on we go on.\n" + "We saw all of it.\n" * 12)
        lines.append(f"From {other} {sent_at:%a %b %d %H:%M:%S %Y}\n{mail.as_string(unixfrom=False)}\n")
    path.write_text("".join(lines))


def with_stand_ins(text: str) -> str:
    for wanted, stand_in in STAND_INS.items():
        text = re.sub(wanted, stand_in, text)
    return text


def run(script: str, home: Path, *, small: bool = True) -> subprocess.CompletedProcess[str]:
    """Run a script in the folder, ``small`` with the limits and stand-ins above; the caller judges how it ended."""
    if small:
        script = with_stand_ins(script)
    environment = os.environ | (LIMITS if small else {}) | {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config")}
    path = f"{home / 'bin'}{os.pathsep}{os.environ['PATH']}"
    environment |= {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    command = ["bash", "-euo", "pipefail", "-c", script]
    return subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, timeout=900)


def run_block(block: Block, home: Path, *, small: bool) -> None:
    """Run a block of commands; of a ``console`` block, compare what each command prints with what the page shows."""
    for command, shown in _parts(block):
        done = run(command, home, small=small)
        assert done.returncode == 0, f"{block.page}:{block.line}: {command}\n{done.stdout}{done.stderr}"
        if shown:
            printed = "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())
            assert re.fullmatch(_pattern(shown), printed), f"{block.page}:{block.line}\n{printed}"


def _parts(block: Block) -> list[tuple[str, str]]:
    if block.language != "console":
        return [(block.text, "")]
    found = re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE)
    return [(command, shown.rstrip()) for command, shown in found]


def _pattern(shown: str) -> str:
    """``…`` stands for anything: in a line for a part of it, alone for any number of lines."""
    text = re.escape(shown).replace("\\\n", "\n")
    return re.sub(r"…", "[^\n]*", re.sub(r"^…$", r"(?s:.*?)", text, flags=re.MULTILINE))
