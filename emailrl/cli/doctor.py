"""Show what is installed, what is missing, and how to fix it.

The first line says whether emailrl train can start in this folder, or what to do first. Checks only this machine: no
network access, no secrets shown. Exits 1 only if something essential is broken.

Examples:

\b
  emailrl doctor
  emailrl doctor --json
"""

from __future__ import annotations

import json as jsonlib
import netrc
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import typer
from rich.table import Table
from rich.text import Text

from emailrl.base.errors import EmailRLError
from emailrl.base.install import how, requirements
from emailrl.base.plain import counted, plain_line
from emailrl.cli.options import Json
from emailrl.cli.output import near, print_json, print_next, result_console
from emailrl.model.resolve import SMOL, SMOL_BASE, find_converted, find_source, how_to_install, is_at_hand
from emailrl.settings import ModelSettings, RewardSettings, Settings, Untrusted, load_settings

Status = Literal["ok", "note", "missing", "broken"]
STYLES = {"ok": "green", "note": "yellow", "missing": "red", "broken": "bold red"}
GIB = 1024**3
LOW_DISK_GIB = 10
DEVELOPERS = ("browser", "dev")  # extras for work on emailrl itself, which are not shown
_SECONDS = 60
_TORCH_PROBE = """
import json, torch
gpus = [{"name": torch.cuda.get_device_name(i), "memory": torch.cuda.mem_get_info(i)}
        for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One item checked, what was found, and the remedy if something is wrong."""

    name: str
    status: Status  # ``note`` works, but may not be what was intended.
    found: str
    remedy: str = ""
    essential: bool = False  # Whether every command needs it.
    area: str = ""

    @property
    def fatal(self) -> bool:
        return self.essential and self.status in ("missing", "broken")


def doctor(json: Json = False) -> None:
    checks = examine()
    is_broken = any(check.fatal for check in checks)
    is_ready, sentence = verdict(checks)
    table = Table.grid(padding=(0, 2))
    for check in checks:
        found = Text(near(plain_line(check.found)), overflow="fold")
        if check.remedy:
            found.append(f"\n→ {near(plain_line(check.remedy))}", style="dim")
        table.add_row(Text(check.status, style=STYLES[check.status]), Text(plain_line(check.name)), found)
    if json:
        print_json({"ok": not is_broken, "ready": is_ready, "verdict": sentence, "checks": checks})
    else:
        said, _, why = sentence.partition(": ")
        head = Text(said, "bold green" if is_ready else "bold red")
        result_console().print(head, near(plain_line(why)), "", table, "", sep="\n")
        if is_ready:
            print_next(["train"])
    if is_broken:
        raise typer.Exit(1)


def examine() -> list[Check]:
    """Run all checks; one that itself fails becomes a ``broken`` check, never an exception."""
    checks: list[Check] = []
    settings = Settings()
    try:
        settings = load_settings()
    except Untrusted as error:
        checks.append(Check("emailrl.toml, .env", "note", error.message, error.hint, area="settings"))
        settings = load_settings(looks_only=True)
    except EmailRLError as error:
        checks.append(Check("emailrl.toml, .env", "broken", error.message, error.hint, True, "settings"))
    looks: dict[str, Callable[[], Iterable[Check]]] = {
        "python": _python,
        "packages": examine_packages,
        "hardware": lambda: _hardware(settings.model, settings.output.output_dir),
        "data": lambda: _data(settings.store.db, settings.data.questions),
        "accounts": lambda: _accounts(settings.tracking.wandb_mode, settings.rewards),
    }
    for area, look in looks.items():
        try:
            checks += [replace(check, area=area) for check in look()]
        except Exception as error:
            checks.append(Check("look", "broken", f"{type(error).__name__}: {error}", "Please report this.", area=area))
    return checks


def verdict(checks: Sequence[Check]) -> tuple[bool, str]:
    """Whether bare ``train`` would start here; and that in words, then after a colon with what, or what to do first."""
    needed = [check for check in checks if check.area in ("settings", "data")]
    needed += [check for check in checks if check.name == "model"]
    for check in [*(check for check in checks if check.fatal), *(check for check in needed if check.status != "ok")]:
        return False, f"Not ready to train: {check.name}: {check.found.rstrip('.')}. {check.remedy}"
    gpus = sum(check.name.startswith("gpu ") for check in checks)
    found = "; ".join(check.found for check in needed)
    return True, f"Ready to train on {counted(gpus, 'GPU') if gpus else 'CPU'}: {found}"


def _python() -> Iterable[Check]:
    yield Check("python", "ok", f"{platform.python_version()} ({sys.executable})")
    try:
        sqlite3.connect(":memory:").execute("CREATE VIRTUAL TABLE probe USING fts5(body)")
    except sqlite3.Error as error:
        remedy = "Use a Python whose SQLite has FTS5 (python.org, conda and Linux builds do)."
        yield Check("sqlite fts5", "missing", f"{sqlite3.sqlite_version}: {error}", remedy, essential=True)
    else:
        yield Check("sqlite fts5", "ok", f"SQLite {sqlite3.sqlite_version}")


def examine_packages() -> Iterable[Check]:
    """Compare installed packages with emailrl's declared requirements, including extras: those that fit in one check,
    extras that are absent in one, and every other in its own."""
    if not (known := requirements()):
        yield Check("emailrl", "note", "running from source, not installed", "pip install --editable .")
    fitting, absent = list[str](), list[str]()
    for item in {each.name: each for each in reversed(known)}.values():
        extra = str(item.marker or "").partition('"')[2].rstrip('"')  # of: extra == "mcp"
        version = next((each.version for each in metadata.distributions(name=item.name)), None)
        if extra in DEVELOPERS:
            continue
        if version is not None and item.specifier.contains(version, prereleases=True):
            fitting.append(item.name)
        elif extra and version is None:
            absent.insert(0, item.name)
        else:
            found = f"{version}, expected {item.specifier}" if version else "not installed"
            yield Check(item.name, "note" if version else "missing", found, how(item.name), not extra)
    yield Check("packages", "ok", f"{len(fitting)} in supported versions")
    if absent:
        remedy = f"Install one where you use it, such as {absent[0]}: {how(absent[0])}"
        yield Check("extras", "note", f"not installed: {', '.join(absent)}", remedy)


def read_torch() -> Any:
    """Import torch in a child process: its version, CUDA and each GPU, or one line on why the import fails."""
    command = [sys.executable, "-P", "-c", _TORCH_PROBE]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {_SECONDS} s"
    if ended.returncode:
        return (ended.stderr.strip().splitlines() or [f"the process exited with {ended.returncode}"])[-1]
    return jsonlib.loads(ended.stdout.strip().splitlines()[-1])


def _hardware(model: ModelSettings, output_dir: Path) -> Iterable[Check]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("cpu", "ok", f"{cores} cores, {memory:.1f} GiB of memory")
    torch, gpus = read_torch(), []
    if isinstance(torch, dict):
        gpus = torch["gpus"]
        yield Check("torch", "ok", f"{torch['version']}, CUDA {torch['cuda'] or 'not built in'}")
    elif any(metadata.distributions(name="torch")):
        remedy = f"{how('torch', '--force-reinstall')}; other builds: https://pytorch.org/get-started"
        yield Check("torch", "broken", str(torch), remedy, essential=True)
    for number, gpu in enumerate(gpus):
        free, total = (value / GIB for value in gpu["memory"])
        yield Check(f"gpu {number}", "ok", f"{gpu['name']}, {free:.1f} of {total:.1f} GiB free")
    if not gpus:
        remedy = "Fine for --model nano and smol; larger models need a CUDA GPU and a CUDA build of torch."
        yield Check("gpu", "note", "no CUDA GPU usable by torch; Apple's are not used", remedy)
    folder = next(parent for parent in output_dir.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free / GIB
    remedy = "Free some space, or set OUTPUT_DIR to a larger disk." if free < LOW_DISK_GIB else ""
    yield Check("disk", "note" if remedy else "ok", f"{free:.1f} GiB free at {folder}", remedy)
    yield _model(model, has_gpu=bool(gpus))


def _model(model: ModelSettings, *, has_gpu: bool) -> Check:
    """The model of the settings; smol's converted copy in the cache, or the base that the first use converts."""
    from huggingface_hub import try_to_load_from_cache

    name = model.name
    if name == "nano" or (name not in (SMOL, SMOL_BASE) and Path(name).is_dir()):
        return Check("model", "ok", "nano, the packaged policy" if name == "nano" else f"{name}, a local folder")
    if name not in (SMOL, SMOL_BASE):
        cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
        found = f"{name}, {'in the hub cache' if cached else 'downloaded from the hub on first use'}"
        if has_gpu:
            return Check("model", "ok", found)
        smol = SMOL if is_at_hand(SMOL, model.smol_base) else f"{SMOL} (first: {how_to_install()})"
        return Check("model", "note", found, f"Without a GPU, use --model nano for the demo mailbox, else {smol}.")
    try:
        if converted := find_converted(name, model.smol_base):
            return Check("model", "ok", f"{name}, converted in {converted}")
        source = find_source(model.smol_base, fetch=False)
    except EmailRLError as error:
        return Check("model", "missing", error.message, error.hint)
    hint = f"Without the hub, run: {how_to_install()}" if source.from_hub else ""
    return Check("model", "ok", f"{name} from {source.origin}, converted on first use", hint)


def _data(db: Path, questions: Path | None) -> Iterable[Check]:
    from emailrl.mail.database import how_to_get, opened
    from emailrl.questions.load import HUB_QUESTIONS, has_enron_email, questions_file

    database = Check("database", "missing", f"no such file: {db}", how_to_get(db))
    if db.is_file():
        try:
            with opened(db) as connection:
                emails = connection.exec_driver_sql("SELECT count(*) FROM emails").scalar_one()
            database = Check("database", "ok", f"{db}, {emails:,} emails, {db.stat().st_size / 1024**2:,.1f} MiB")
        except EmailRLError as error:
            database = Check("database", "broken", error.message, error.hint)
    yield database
    beside = questions_file(db)
    questions = questions or (beside if beside.is_file() else None)
    if questions is None and database.status == "ok" and has_enron_email(db):
        yield Check("questions", "ok", f"{HUB_QUESTIONS}, from the hub")
    elif questions is None:
        remedy = "Generate some (emailrl gen-questions), or name a file with --questions."
        yield Check("questions", "note", f"none named, and none next to the database: {beside}", remedy)
    elif questions.is_file():
        with questions.open("rb") as file:
            lines = sum(1 for line in file if line.strip())
        yield Check("questions", "ok", f"{questions}, {lines:,} questions")
    else:
        yield Check("questions", "missing", f"no such file: {questions}", "Generate some: emailrl gen-questions")


def _accounts(wandb_mode: str, rewards: RewardSettings) -> Iterable[Check]:
    """Whether W&B and the judge have the keys they need; no key is used or shown."""
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].strip("/")
    try:
        logged_in = os.environ.get("WANDB_API_KEY") or netrc.netrc(os.environ.get("NETRC")).authenticators(host)
    except (OSError, netrc.NetrcParseError):
        logged_in = None
    if wandb_mode == "online" and not logged_in:
        remedy = "Log in (wandb login), or set WANDB_MODE=disabled."
        yield Check("wandb", "note", "not logged in: runs are logged offline", remedy)
    else:
        yield Check("wandb", "ok", "logged in" if wandb_mode == "online" else f"WANDB_MODE={wandb_mode}")
    if rewards.openrouter_api_key:
        yield Check("OPENROUTER_API_KEY", "ok", f"set: answers are judged by {rewards.judge_model}")
    else:
        remedy = "Set it to have a language model judge answers (a key in .env counts once the folder is trusted)."
        yield Check("OPENROUTER_API_KEY", "note", "not set: answers are matched offline", remedy)
