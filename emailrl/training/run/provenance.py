"""Which code made a checkpoint: versions of its dependencies, and the commit of emailrl's repository."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import version
from pathlib import Path

import emailrl

PACKAGES = ("torch", "transformers", "peft")


@cache
def versions() -> dict[str, str]:
    """Name → version."""
    return {
        "emailrl": emailrl.__version__,
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


@cache
def git_commit() -> str | None:
    """The checked-out commit if emailrl runs from its repository; None if it is installed."""
    package = Path(emailrl.__file__).parent
    if not (package.parent / ".git").exists():
        return None
    try:
        found = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=package, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip()
