"""Every check of the machine, in display order."""

from __future__ import annotations

import platform
import sqlite3
import sys
from collections.abc import Callable, Iterable, Sequence

from emailrl.doctor.check import Check
from emailrl.doctor.data import examine_accounts, examine_data
from emailrl.doctor.hardware import examine_hardware
from emailrl.doctor.packages import examine_packages, examine_smollm2
from emailrl.errors import EmailRLError
from emailrl.plain import counted
from emailrl.settings import Settings, Untrusted, load_settings


def examine(*, deep: bool = False) -> list[Check]:
    """Run all checks; one that itself fails becomes a ``broken`` check, never an exception.

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
        ("packages", lambda: examine_packages(deep)),
        ("packages", examine_smollm2),
        ("hardware", lambda: examine_hardware(settings)),
        ("data", lambda: examine_data(settings)),
        ("accounts", lambda: examine_accounts(settings)),
    ]
    for area, look in looks:
        try:
            checks += look()
        except Exception as error:
            checks.append(Check(area, "look", "broken", f"{type(error).__name__}: {error}", "Please report this."))
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
    yield Check("python", "python", "ok", f"{platform.python_version()} ({sys.executable})")
    try:
        sqlite3.connect(":memory:").execute("CREATE VIRTUAL TABLE probe USING fts5(body)")
    except sqlite3.Error as error:
        remedy = "Use a Python whose SQLite has FTS5 (python.org, conda and Linux builds do)."
        yield Check("python", "sqlite fts5", "missing", f"{sqlite3.sqlite_version}: {error}", remedy, essential=True)
    else:
        yield Check("python", "sqlite fts5", "ok", f"SQLite {sqlite3.sqlite_version}")
