"""Check emailrl's requirements against the installed packages."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata
from typing import TYPE_CHECKING

from emailrl.doctor.check import Check, Status
from emailrl.doctor.child import run_child
from emailrl.policy.smol_base import SMOL, find_converted
from emailrl.policy.smol_source import INSTALL as INSTALL_SMOL
from emailrl.policy.smol_source import PACKAGE as SMOLLM2

if TYPE_CHECKING:
    from packaging.requirements import Requirement


DEVELOPERS = ("bench", "browser", "dev")
"""Extras for work on emailrl itself, shown only if something of them is installed."""


def examine_packages(deep: bool) -> Iterable[Check]:
    """Compare installed packages with emailrl's declared requirements, including extras.

    A package of several extras is shown in the first.
    """
    try:
        wanted = _requirements()
    except metadata.PackageNotFoundError:
        yield Check("packages", "emailrl", "note", "running from source, not installed", "pip install --editable .")
        return
    present = {name: version for name in wanted if (version := _installed(name))}
    begun = {wanted[name][1] for name in present}
    modules = _modules(present) if deep else {}
    errors = import_errors(list(modules.values())) if deep else {}
    for item, extra in wanted.values():
        version = present.get(item.name)
        if (extra in DEVELOPERS and extra not in begun) or (extra == SMOL and version is None):
            continue
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
            yield Check(area, item.name, "broken", f"{version} fails to import: {error}", remedy, essential)
        elif not item.specifier.contains(version, prereleases=True):
            yield Check(area, item.name, "note", f"{version}, expected {item.specifier}", install)
        else:
            yield Check(area, item.name, "ok", version)


def examine_smollm2() -> Iterable[Check]:
    """The package with smol's base model, not in an extra because pip would build llama.cpp with it; and its reader."""
    if version := _installed(SMOLLM2):
        yield Check("extra smol", SMOLLM2, "ok", version)
    missing = [name for name in (SMOLLM2, "gguf") if not _installed(name)]
    if missing and find_converted(SMOL, None):
        yield Check("extra smol", missing[0], "ok", f"not installed, and not needed: {SMOL} is already converted")
    elif missing:
        yield Check("extra smol", missing[0], "note", "not installed", f"For --model {SMOL}: {INSTALL_SMOL}")


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
