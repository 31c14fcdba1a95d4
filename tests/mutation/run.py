"""Whether the tests notice each mutant, package by package.

A mutant within a function is tried in place (see ``session``). One that acts when its module is imported (a default, a
table, what a decorator says) takes the module's place in a fork that has imported neither the module nor a test.
"""

from __future__ import annotations

import gc
import importlib
import importlib.machinery
import importlib.util
import os
import pickle
import sys
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from .mutants import Mutant
from .session import FLAGS, Functions, Reached, Tests, forked, ordered, reaching, recorded, traced
from .targets import drawn, imports, source_file, test_files

PRELOADED = ("hypothesis", "torch", "emailrl.base.errors", "emailrl.settings", "emailrl.records.trajectory")
WALL_SECONDS = 600
"""No try lasts longer, not even one that waits without computing."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one mutant: ``killed`` by a failing test, ``timeout`` (killed too), or ``survived``."""

    module: str
    mutant: Mutant
    outcome: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Task:
    """One mutant of a module, and the file of that module."""

    module: str
    path: str
    mutant: Mutant


Outcome = tuple[str, float]
Say = Callable[[str], None]


def preload(modules: Sequence[str] = PRELOADED) -> None:
    """Import what all forks share, and keep tests the same from fork to fork."""
    for name in modules:
        importlib.import_module(name)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        torch.testing.assert_close(torch.zeros(1), torch.zeros(1))  # the first call imports for a second
    if hypothesis := sys.modules.get("hypothesis"):
        hypothesis.settings.register_profile("mutation", derandomize=True, database=None, deadline=None)
        hypothesis.settings.load_profile("mutation")
    sys.dont_write_bytecode = False  # or every fork would compile its tests anew
    gc.freeze()  # a fork has nothing of this to collect
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins of whatever else is installed: they only cost time


def run(modules: Sequence[str], folder: Path, *, sample: int, workers: int, say: Say) -> list[Result]:
    """Try the mutants of one package's modules; raises RuntimeError if the tests fail without any."""
    tasks = [Task(name, str(source_file(name)), one) for name in modules for one in drawn(name, sample)[0]]
    if loaded := [name for name in modules if name in sys.modules]:
        raise RuntimeError(f"{loaded[0]} was imported before its mutants: the tests would see the original")
    files = [str(path) for path in test_files(modules, folder)]
    with TemporaryDirectory() as scratch:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = scratch  # where pytest makes the folders of tests
        told = Path(scratch, "told")
        jobs = [lambda: _in_place(modules, tasks, files, told, workers, say)]
        ((_, outcome, _),) = forked(jobs, 1)
        if outcome != "survived":
            raise RuntimeError(f"the mutants of {modules[0]} and others could not be tried")
        outcomes, later = pickle.loads(told.read_bytes())
        outcomes |= _imported(tasks, later, workers, say)
    return [Result(task.module, task.mutant, *outcomes[i]) for i, task in enumerate(tasks)]


def _in_place(
    modules: Sequence[str], tasks: Sequence[Task], files: list[str], told: Path, workers: int, say: Say
) -> int:
    """In a fork: try what can be tried in place; write the outcomes, and the tests of every other mutant."""
    paths = {str(source_file(name)) for name in modules}
    with traced(paths) as at_import:
        for name in modules:
            importlib.import_module(name)

    def work(tests: Tests) -> None:
        reached = recorded(tests, paths, told.parent)
        cost = sum(test.cost for test in reached)
        say(f"{modules[0].rpartition('.')[0]}: {len(reached)} tests of {len(files)} files pass in {cost:.0f} s")
        functions, sources = Functions(paths), {path: Path(path).read_text() for path in paths}
        jobs, outcomes, later = {}, {}, {}
        for i, task in enumerate(tasks):
            mutant, chosen = task.mutant, reaching(task.mutant, task.path, reached)
            lines = {(task.path, line) for line in range(mutant.first, mutant.last + 1)}
            changed = functions.changed(task.path, sources[task.path], mutant.source) if mutant.is_late else []
            if not changed or not lines.isdisjoint(at_import):
                later[i] = chosen if chosen and not mutant.is_late else _wide(task, modules, reached)
            elif chosen:
                jobs[i] = lambda changed=changed, chosen=chosen: _patched(tests, changed, chosen)
            else:
                outcomes[i] = ("survived", 0.0)
        told.write_bytes(pickle.dumps((outcomes | _tried(jobs, workers, say), later)))

    return int(pytest.main([*files, *FLAGS], plugins=[Tests(work)]))


def _patched(tests: Tests, changed: Iterable[tuple[types.FunctionType, types.CodeType]], chosen: list[Reached]) -> int:
    for function, code in changed:
        function.__code__ = code
    return tests.play(chosen)


def _tried(jobs: dict[int, Callable[[], int]], workers: int, say: Say) -> dict[int, Outcome]:
    outcomes, keys = {}, list(jobs)
    for i, outcome, seconds in forked(list(jobs.values()), workers, is_quiet=True, limit=WALL_SECONDS):
        outcomes[keys[i]] = (outcome, seconds)
        if len(outcomes) % 50 == 0:
            say(f"{len(outcomes)} of {len(jobs)}")
    return outcomes


def _wide(task: Task, modules: Sequence[str], reached: Sequence[Reached]) -> list[Reached]:
    """The tests of every module that builds on this one, and of the files that import it."""
    known = {task.module}
    while more := {
        name for name in modules if name not in known and imports(source_file(name), name.rpartition(".")[0]) & known
    }:
        known |= more
    paths = {str(source_file(name)) for name in known}
    naming = {
        str(path) for path in {Path(test.test.partition("::")[0]) for test in reached} if task.module in imports(path)
    }
    return ordered(
        [
            test
            for test in reached
            if test.test.partition("::")[0] in naming or any(path in paths for path, _ in test.lines)
        ]
    )


def _imported(tasks: Sequence[Task], later: dict[int, list[Reached]], workers: int, say: Say) -> dict[int, Outcome]:
    """Try mutants in their module's place, each from its import on."""
    return _tried({i: lambda i=i: _installed(tasks[i], later[i]) for i in later if later[i]}, workers, say) | {
        i: ("survived", 0.0) for i in later if not later[i]
    }


def _installed(task: Task, chosen: Sequence[Reached]) -> int:
    sys.meta_path.insert(0, _Mutated(task.module, task.path, task.mutant.source))
    try:
        importlib.import_module(task.module)
    except Exception:
        return 1
    for file, group in groupby(chosen, lambda test: test.file):
        if code := _played(file, list(group)):
            return code
    return 0


def _played(file: str, chosen: Sequence[Reached]) -> int:
    codes: list[int] = []
    ended = int(pytest.main([file, *FLAGS], plugins=[Tests(lambda tests: codes.append(tests.play(chosen)))]))
    return ended or codes[0]


class _Mutated(importlib.machinery.SourceFileLoader):
    """Finds and loads one module with other source."""

    def __init__(self, module: str, path: str, source: str) -> None:
        super().__init__(module, path)
        self._source = source

    def find_spec(self, module: str, _: object = None, __: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(module, self.path, loader=self) if module == self.name else None

    def get_code(self, _: str) -> types.CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)
