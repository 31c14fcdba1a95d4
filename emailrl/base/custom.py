"""Loads the user's own parts by Python path: ``package.module:attribute`` or ``path/to/file.py:attribute``.

A module is searched on Python's path and then in the working directory; a file may import its neighbors. It always runs
from source, which is what the user read and trusted, while compiled files next to it may contain anything.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib.abc import PathEntryFinder
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from emailrl.base.errors import EmailRLError, UsageError


@dataclass(frozen=True, slots=True)
class CustomPart:
    """A callable of the user, the name under which it was requested, and its file."""

    name: str
    attribute: str
    call: Callable[..., Any]
    file: str | None

    def run(self, what: str, function: Callable[..., Any], *arguments: object) -> Any:
        """Call the user's ``function``; an EmailRLError names the line of their file that raised."""
        try:
            return function(*arguments)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # even SystemExit: only an interrupt is not the user's
            raise EmailRLError(f"{what} {self.name} raised: {blame(error, self.file)}") from error


def is_path(name: str) -> bool:
    """Whether a name has the form ``place:attribute``."""
    place, _, attribute = name.rpartition(":")
    return bool(place) and attribute.isidentifier()


def load_part(name: str, use: str) -> CustomPart:
    """Load the callable ``name`` for its ``use``, such as ``reward``; UsageError, with the line, if that fails."""
    place, _, attribute = name.rpartition(":")
    if not is_path(name):
        raise UsageError(f"{name!r} is not a Python path to a {use}.", "Write module:attribute or path.py:attribute.")
    file = Path(os.path.expanduser(place)).absolute() if place.endswith(".py") else None
    if file is not None and not file.is_file():
        raise UsageError(f"No such file: {file} (for the {use}).")
    try:
        if file is None:
            _search(Path.cwd())
        module = importlib.import_module(place) if file is None else _import_file(file)
    except (EmailRLError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise UsageError(f"The {use} {name} failed to load: {blame(error, str(file) if file else None)}") from error
    call = getattr(module, attribute, None)
    if not callable(call):
        raise UsageError(f"{place} has no function or class {attribute!r} for the {use}.")
    return CustomPart(name, attribute, call, getattr(module, "__file__", None))


def blame(error: BaseException, file: str | None) -> str:
    """Return a description of an error with the file and line of the user's code."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}, line {error.lineno}: {type(error).__name__}: {error.msg}"
    # Where loading fails before the user's code runs (no such module), the machinery's own frames say nothing.
    own = [
        f"{frame.filename}, line {frame.lineno}: "
        for frame in traceback.extract_tb(error.__traceback__)
        if (frame.filename == file if file else "importlib" not in frame.filename and frame.filename != __file__)
    ]
    return f"{own[-1] if own else ''}{type(error).__name__}: {error}"


def _import_file(path: Path) -> ModuleType:
    """The module in a file, loaded once per content, so that a reward and an environment in one file share state."""
    digest = hashlib.sha256(bytes(path) + b"\0" + path.read_bytes()).hexdigest()[:16]
    name = f"emailrl_custom_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path, loader=_SourceLoader(name, str(path)))
    assert spec is not None and spec.loader is not None  # the one that is passed
    _search(path.parent)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by name while it is still being run.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _search(folder: Path) -> None:
    """Let imports find the folder's modules after all others, so that it hides nothing installed."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    _folders.add(str(folder))
    if _source_finder not in sys.path_hooks:
        sys.path_hooks.insert(0, _source_finder)
    for path in [path for path in sys.path_importer_cache if Path(path).is_relative_to(folder)]:
        del sys.path_importer_cache[path]  # found by Python's own finder, which takes compiled files


_folders: set[str] = set()


class _SourceLoader(SourceFileLoader):
    """Compiles a module from source each time, and neither reads nor writes ``__pycache__``."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


_find_sources = FileFinder.path_hook((_SourceLoader, SOURCE_SUFFIXES))


def _source_finder(path: str) -> PathEntryFinder:
    """A path hook for folders of the user's code, except folders in them that are on Python's own path."""
    full = Path(path).absolute()
    entries = [str(Path(entry).absolute()) for entry in sys.path]
    owner = max((entry for entry in entries if full.is_relative_to(entry)), key=len, default="")
    if owner not in _folders:
        raise ImportError(path)
    return _find_sources(path)
