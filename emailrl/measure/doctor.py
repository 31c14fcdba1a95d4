"""Checks this installation: packages, GPU, models, databases and settings, each with what to do; imports that might
crash run in an interpreter of their own."""

from __future__ import annotations

import json
import netrc
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from emailrl.base.errors import EmailRLError
from emailrl.base.plain import counted
from emailrl.mail.connection import how_to_get
from emailrl.model.smol_base import INSTALL as INSTALL_SMOL
from emailrl.model.smol_base import PACKAGE as SMOLLM2
from emailrl.model.smol_base import SMOL, SMOL_BASE, check_source, find_converted, find_local, in_hub_cache
from emailrl.questions.beside import has_enron_email, questions_file
from emailrl.questions.load import HUB_QUESTIONS
from emailrl.settings import ModelSettings, RewardSettings, Settings, Untrusted, load_settings

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_SECONDS = 60


def run_child(program: str, *arguments: str) -> Any:
    """Run ``program`` in a fresh interpreter; return the JSON it prints last, or a string describing the failure."""
    command = [sys.executable, "-P", "-c", program, *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {_SECONDS} s"
    if ended.returncode:
        last = ended.stderr.strip().splitlines()[-1:]
        return last[0] if last else f"the process exited with {ended.returncode}"
    return json.loads(ended.stdout.strip().splitlines()[-1])


Status = Literal["ok", "note", "missing", "broken"]


@dataclass(frozen=True, slots=True)
class Check:
    """One item checked, what was found, and the remedy if something is wrong."""

    name: str
    status: Status
    """``note`` works, but may not be what was intended."""
    found: str
    remedy: str = ""
    essential: bool = False
    """Whether every command needs it."""
    area: str = ""

    @property
    def fatal(self) -> bool:
        """Whether it prevents emailrl from working."""
        return self.essential and self.status in ("missing", "broken")


GIB = 1024**3
LOW_DISK_GIB = 10

_TORCH_PROBE = """
import json, torch
gpus = [{"name": torch.cuda.get_device_name(i), "memory": torch.cuda.mem_get_info(i)}
        for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""


def read_torch() -> Any:
    """Import torch in a child process: its version, CUDA and each GPU, or one line on why the import fails."""
    return run_child(_TORCH_PROBE)


def examine_hardware(model: ModelSettings, output_dir: Path) -> Iterable[Check]:
    """Check the processor, torch, each GPU, the disk of OUTPUT_DIR and the model of MODEL_NAME."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("cpu", "ok", f"{cores} cores, {memory:.1f} GiB of memory")
    torch = read_torch()
    if not isinstance(torch, dict):
        remedy = "Reinstall torch for this machine: https://pytorch.org/get-started"
        yield Check("torch", "broken", str(torch), remedy, essential=True)
        gpus = []
    else:
        gpus = torch["gpus"]
        yield Check("torch", "ok", f"{torch['version']}, CUDA {torch['cuda'] or 'not built in'}")
    for number, gpu in enumerate(gpus):
        free, total = (value / GIB for value in gpu["memory"])
        yield Check(f"gpu {number}", "ok", f"{gpu['name']}, {free:.1f} of {total:.1f} GiB free")
    if not gpus:
        remedy = "Fine for --model nano and smol; larger models need a CUDA GPU and a CUDA build of torch."
        yield Check("gpu", "note", "none usable by torch", remedy)
    yield _disk(output_dir)
    yield _model(model, has_gpu=bool(gpus))


def _disk(output_dir: Path) -> Check:
    folder = next(parent for parent in output_dir.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free / GIB
    found = f"{free:.1f} GiB free at {folder}"
    if free < LOW_DISK_GIB:
        return Check("disk", "note", found, "Free some space, or set OUTPUT_DIR to a larger disk.")
    return Check("disk", "ok", found)


def _model(model: ModelSettings, *, has_gpu: bool) -> Check:
    name = model.name
    if name in (SMOL, SMOL_BASE):
        return _smol(name, model.smol_base)
    if name == "nano" or Path(name).is_dir():
        return Check("model", "ok", "nano, the packaged policy" if name == "nano" else f"{name}, a local folder")
    from huggingface_hub import try_to_load_from_cache

    cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    found = f"{name}, {'in the hub cache' if cached else 'downloaded from the hub on first use'}"
    if has_gpu:
        return Check("model", "ok", found)
    return Check("model", "note", found, "Without a GPU, use --model smol, or nano for the demo mailbox.")


def _smol(name: str, given: Path | None) -> Check:
    """The converted model in the cache, or the base that the first use converts."""
    from huggingface_hub import is_offline_mode

    try:
        if converted := find_converted(name, given):
            return Check("model", "ok", f"{name}, converted in {converted}")
        if source := find_local(given):
            check_source(source)
            return Check("model", "ok", f"{name} from {source.origin}, converted on first use")
    except EmailRLError as error:
        return Check("model", "missing", error.message, error.hint)
    if in_hub_cache():
        return Check("model", "ok", f"{name} from the hub cache, converted on first use")
    if is_offline_mode():
        found = f"{name}, not on this machine, and HF_HUB_OFFLINE is set"
        return Check("model", "missing", found, f"Run: {INSTALL_SMOL}")
    found = f"{name}, downloaded from the hub on first use (270 MB)"
    return Check("model", "ok", found, f"Without the hub, run: {INSTALL_SMOL}")


DEVELOPERS = ("bench", "browser", "dev")
"""Extras for work on emailrl itself, shown only if something of them is installed."""


def examine_packages(deep: bool) -> Iterable[Check]:
    """Compare installed packages with emailrl's declared requirements, including extras.

    A package of several extras is shown in the first.
    """
    try:
        wanted = _requirements()
    except metadata.PackageNotFoundError:
        yield Check("emailrl", "note", "running from source, not installed", "pip install --editable .")
        return
    present = {name: version for name in wanted if (version := _installed(name))}
    begun = {wanted[name][1] for name in present}
    modules = _modules(present) if deep else {}
    errors = import_errors(list(modules.values())) if deep else {}
    for item, extra in wanted.values():
        version = present.get(item.name)
        if (extra in DEVELOPERS and extra not in begun) or (extra == SMOL and version is None):
            continue
        area, essential = f"extra {extra}" if extra else "", extra is None
        remedy = f"in the clone: pip install -e '.[{extra}]'" if extra else f'pip install "{item.name}{item.specifier}"'
        status: Status = "note"
        if version is None:
            status, found = "missing" if essential else "note", "not installed"
        elif (error := errors.get(modules.get(item.name, ""))) is not None:
            status, found = "broken", f"{version} fails to import: {error}"
            remedy = f"Reinstall it: pip install --force-reinstall {item.name}"
        elif not item.specifier.contains(version, prereleases=True):
            found = f"{version}, expected {item.specifier}"
        else:
            status, found, remedy = "ok", version, ""
        yield Check(item.name, status, found, remedy, essential, area)


def examine_smollm2() -> Iterable[Check]:
    """The package with smol's base model, not in an extra because pip would build llama.cpp with it; and its reader."""
    if version := _installed(SMOLLM2):
        yield Check(SMOLLM2, "ok", version)
    missing = [name for name in (SMOLLM2, "gguf") if not _installed(name)]
    if missing and find_converted(SMOL, None):
        yield Check(missing[0], "ok", f"not installed, and not needed: {SMOL} is already converted")
    elif missing:
        yield Check(missing[0], "note", "not installed", f"For --model {SMOL}: {INSTALL_SMOL}")


def _modules(distributions: Iterable[str]) -> dict[str, str]:
    """The module to import for each distribution: the one of the same name if it exists (torch also has functorch)."""
    from packaging.utils import canonicalize_name

    modules: dict[str, list[str]] = {}
    for module, owners in metadata.packages_distributions().items():
        for owner in owners:
            modules.setdefault(canonicalize_name(owner), []).append(module)
    chosen = {}
    for name in distributions:
        namesake = name.replace("-", "_")
        found = modules.get(canonicalize_name(name), [])
        chosen[name] = namesake if namesake in found or not found else found[0]
    return chosen


def _requirements() -> dict[str, tuple[Requirement, str | None]]:
    """Each required package by name, with the first extra that needs it; None if emailrl always does."""
    from packaging.requirements import Requirement

    extras = metadata.metadata("emailrl").get_all("Provides-Extra") or []
    found: dict[str, tuple[Requirement, str | None]] = {}
    for line in metadata.requires("emailrl") or []:
        item = Requirement(line)
        found.setdefault(item.name, (item, next((name for name in extras if _needs(item, name)), None)))
    return found


def _needs(requirement: Requirement, extra: str) -> bool:
    marker = requirement.marker
    return marker is not None and not marker.evaluate({"extra": ""}) and marker.evaluate({"extra": extra})


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


_IMPORT_PROBE = """
import importlib, json, sys
errors = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except BaseException as error:
        errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
print(json.dumps(errors))
"""


def import_errors(modules: list[str]) -> dict[str, str]:
    """Return the modules that fail to import, with their errors; all are imported in one child process."""
    found = run_child(_IMPORT_PROBE, *modules)
    return found if isinstance(found, dict) else dict.fromkeys(modules, str(found))


def examine_data(db: Path, questions: Path | None) -> Iterable[Check]:
    """Open the mail database and count the questions."""
    database = _database(db)
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


def _database(db: Path) -> Check:
    if not db.is_file():
        return Check("database", "missing", f"no such file: {db}", how_to_get(db))
    size = db.stat().st_size / 1024**2
    try:
        with closing(sqlite3.connect(f"{db.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            emails = connection.execute("SELECT count(*) FROM emails").fetchone()[0]
            connection.execute("SELECT rowid FROM emails_fts LIMIT 1").fetchall()
    except sqlite3.Error as error:
        return Check("database", "broken", f"{db}: {error}", "Move it away and build it again: emailrl gen-db")
    return Check("database", "ok", f"{db}, {emails:,} emails, {size:,.1f} MiB")


def examine_accounts(wandb_mode: str, rewards: RewardSettings) -> Iterable[Check]:
    """Whether W&B and the judge have the keys they need; no key is used or shown."""
    if wandb_mode != "online":
        yield Check("wandb", "ok", f"WANDB_MODE={wandb_mode}")
    elif _logged_in_to_wandb():
        yield Check("wandb", "ok", "logged in")
    else:
        remedy = "Log in (wandb login), or set WANDB_MODE=disabled."
        yield Check("wandb", "note", "not logged in: runs are logged offline", remedy)
    if rewards.openrouter_api_key:
        yield Check("OPENROUTER_API_KEY", "ok", f"set: answers are judged by {rewards.judge_model}")
    else:
        remedy = "Set it to have a language model judge answers (a key in .env counts once the folder is trusted)."
        yield Check("OPENROUTER_API_KEY", "note", "not set: answers are matched offline", remedy)


def _logged_in_to_wandb() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].strip("/")
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def examine(*, deep: bool = False) -> list[Check]:
    """Run all checks; one that itself fails becomes a ``broken`` check, never an exception.

    ``deep`` also imports every installed package in a child process (ten seconds or so).
    """
    checks: list[Check] = []
    settings = Settings()
    named = "emailrl.toml, .env"
    try:
        settings = load_settings()
    except Untrusted as error:
        checks.append(Check(named, "note", error.message, error.hint, area="settings"))
        settings = load_settings(looks_only=True)
    except EmailRLError as error:
        checks.append(Check(named, "broken", error.message, error.hint, essential=True, area="settings"))
    looks: dict[str, Callable[[], Iterable[Check]]] = {
        "python": _python,
        "packages": lambda: examine_packages(deep),
        "extra smol": examine_smollm2,
        "hardware": lambda: examine_hardware(settings.model, settings.output.output_dir),
        "data": lambda: examine_data(settings.store.db, settings.data.questions),
        "accounts": lambda: examine_accounts(settings.tracking.wandb_mode, settings.rewards),
    }
    for area, look in looks.items():
        try:
            checks += [replace(check, area=check.area or area) for check in look()]
        except Exception as error:
            checks.append(Check("look", "broken", f"{type(error).__name__}: {error}", "Please report this.", area=area))
    areas = list(dict.fromkeys(check.area for check in checks))
    return sorted(checks, key=lambda check: areas.index(check.area))


def verdict(checks: Sequence[Check]) -> tuple[bool, str]:
    """Whether bare ``train`` would start here, and a line that says so or what to do first."""
    needed = [check for check in checks if check.area in ("settings", "data")]
    needed += [check for check in checks if check.name == "model"]
    failed = [check for check in checks if check.fatal] + [check for check in needed if check.status != "ok"]
    for check in failed:
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
