"""What is not installed, and the command that installs it where this Python would find it."""

from __future__ import annotations

import shlex
import sys
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from emailrl.base.errors import EmailRLError, UsageError

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def need(package: str, what: str, otherwise: str = "") -> None:
    """Raise UsageError if a package is missing that ``what`` needs; ``otherwise`` says what else would do."""
    if find_spec(package) is None:
        raise UsageError(f"{what} needs {package}, which is not installed.", f"Run: {how(package)}{otherwise}")


def how(package: str, *options: str) -> str:
    """The command of pip, pipx or uv that installs a package in the versions that emailrl takes, and with it what else
    is missing of its extra, or of what is always needed."""
    known = requirements()
    own = next((each for each in known if each.name == package), None)
    together = [each for each in known if own and str(each.marker) == str(own.marker)]
    there = [each for each in together if each is not own and any(metadata.distributions(name=each.name))]
    named = [f"{each.name}{each.specifier}" for each in together if each not in there]
    python = shlex.quote(sys.executable)  # a bare pip may be another Python's
    tool = f"{python} -m pip install" if find_spec("pip") else f"uv pip install --python {python}"
    tool = "pipx runpip emailrl install" if "pipx" in Path(sys.prefix).parts else tool
    return f"{tool} {shlex.join([*options, *(named or [package])])}"


def explained(error: ImportError) -> EmailRLError:
    """The error for a package that is not installed or cannot be imported; ``error`` again for a file of emailrl."""
    if (name := (error.name or "").partition(".")[0]) == "emailrl":
        raise error
    if isinstance(error, ModuleNotFoundError) and name in [each.name for each in requirements()]:
        return EmailRLError(f"{name} is not installed.", f"Run: {how(name)}")
    return EmailRLError(f"A package cannot be imported: {str(error).rstrip('.')}.", "Run: emailrl doctor")


def requirements() -> list[Requirement]:
    """What emailrl requires, its extras with a marker; nothing if it runs from source."""
    from packaging.requirements import Requirement

    with suppress(metadata.PackageNotFoundError):
        return [*map(Requirement, metadata.requires("emailrl") or [])]
    return []
