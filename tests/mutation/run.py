"""Whether the tests notice each mutant: every try is a fork in which the mutant takes its module's place.

The test files that import one of the modules run once, the lines of each test traced. A mutant is then imported in a
fork that has imported neither the module nor a test, and plays the tests that reach its lines, the cheapest file first,
up to a failure; one that acts when its module is imported (a default, a table) plays all tests.
"""

from __future__ import annotations

import ast
import functools
import gc
import importlib
import importlib.machinery
import importlib.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import pytest

from .mutants import Mutant, mutants

MODULES = (
    *(f"emailrl.training.{name}" for name in ("advantages", "algorithms", "kl", "losses", "batch")),
    "emailrl.settings.needs",
    *(f"emailrl.training.{name}" for name in ("state",)),
    "emailrl.facts",
    "emailrl.rewards.matching",
)
SAMPLED = ("emailrl.facts", "emailrl.rewards.matching")
"""Packages with so many mutants that each file's are sampled."""
ELSEWHERE = ("end_to_end", "gpu", "benchmarks", "mutation")
"""Folders of tests that run the package in other processes, where a mutant is not, or on other machines."""
SLOW = ("emailrl.model", "emailrl.training.loop", "emailrl.training.run", "emailrl.training.update")
"""What loads a model: a file of tests that imports it takes minutes, and is left out."""
PRELOADED = ("torch", "emailrl.base.errors", "emailrl.settings", "emailrl.records.trajectory")
FLAGS = ["-xqs", "--rootdir=.", "--no-header", "--no-summary", "--tb=no"]
FLAGS += [f"-pno:{plugin}" for plugin in ("cacheprovider", "warnings", "unraisableexception")]
WALL_SECONDS = 600
"""No try lasts longer, not even one that waits without computing."""
Lines = set[tuple[str, int]]
Say = Callable[[str], None]


# -- what is mutated, and which tests know it


@functools.cache
def source_file(module: str) -> Path | None:
    """Where the source of a module or package lies, without importing it; None if there is none."""
    root, *below = module.split(".")
    spec = importlib.util.find_spec(root)
    if spec is None or spec.origin is None:
        return None
    top = Path(spec.origin)
    places = [top.parent.joinpath(*below, "__init__.py"), top.parent.joinpath(*below).with_suffix(".py")]
    return next((path for path in (places if below else [top]) if path.is_file()), None)


def modules(names: Iterable[str]) -> Iterator[str]:
    """The modules by their names, with every module of a package in its place."""
    for name in names:
        path = source_file(name)
        if path is None:
            raise ModuleNotFoundError(name)
        inner = sorted(path.parent.glob("*.py")) if path.name == "__init__.py" else []
        yield from (f"{name}.{one.stem}" for one in inner if one != path) if inner else (name,)


def drawn(module: str, sample: int) -> tuple[list[Mutant], int]:
    """A module's mutants, and how many there are: at most ``sample`` where sampled, always the same ones (0: all)."""
    path = source_file(module)
    assert path is not None, module
    every = mutants(path.read_text())
    if not sample or len(every) <= sample or not module.startswith(SAMPLED):
        return every, len(every)
    kept = set(Random(module).sample(range(len(every)), sample))
    return [one for i, one in enumerate(every) if i in kept], len(every)


def test_files(wanted: Sequence[str], folder: Path) -> list[str]:
    """The quick test files that import one of the modules or its package, or a file of tests beside them that does."""
    known = {*wanted, *(module.rpartition(".")[0] for module in wanted)} - {""}
    files = [path for path in sorted(folder.rglob("test_*.py")) if path.relative_to(folder).parts[0] not in ELSEWHERE]
    of = {str(path): imported(path, folder) for path in files}
    return [path for path, names in of.items() if known & names and not any(name.startswith(SLOW) for name in names)]


def imported(path: Path, folder: Path) -> set[str]:
    """The modules that a test file imports, with those that files of tests import which it imports."""
    found, waiting = set[str](), [path]
    while waiting:
        for node in ast.walk(ast.parse(waiting.pop().read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names = [name if source_file(name) else node.module for name in inner]
            for name in set(names) - found:
                found.add(name)
                beside = folder / (name.replace(".", "/") + ".py")
                waiting += [beside] if beside.is_file() else []
    return found


# -- which lines a test reaches


@dataclass(frozen=True, slots=True)
class Reached:
    """A test, its file, its seconds of processor time, and the lines of mutated files it runs."""

    test: str
    file: str
    cost: float
    lines: Lines


@contextmanager
def traced(files: set[str]) -> Iterator[Lines]:
    """The lines of the files that run within functions meanwhile."""
    lines: Lines = set()

    def within(frame: types.FrameType, event: str, _: object) -> object:
        if event == "line":
            lines.add((frame.f_code.co_filename, frame.f_lineno))
        return within

    def called(frame: types.FrameType, _: str, __: object) -> object:
        code = frame.f_code
        is_call = code.co_flags & 0x0001  # neither a module's top nor the body of a class
        return within if is_call and code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(called)
    threading.settrace(called)
    try:
        yield lines
    finally:
        sys.settrace(before)
        threading.settrace(before)


class Recorder:
    """A plugin of pytest that notes what every test reaches."""

    def __init__(self, files: set[str]) -> None:
        self.files, self.reached, self.failed = files, list[Reached](), ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        started = time.process_time()
        with traced(self.files) as lines:
            result = yield
        self.reached.append(Reached(item.nodeid, str(item.path), time.process_time() - started, lines))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.failed = report.nodeid if report.failed else self.failed


class Chosen:
    """A plugin of pytest that plays some tests in their order, each for a limited processor time."""

    def __init__(self, tests: Sequence[Reached]) -> None:
        self.costs = {test.test: test.cost for test in tests}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[name] for name in self.costs]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        signal.setitimer(signal.ITIMER_VIRTUAL, 2 + 10 * self.costs[item.nodeid])  # its signal ends the process


def recorded(files: Sequence[str], paths: set[str], told: Path) -> int:
    """In a fork: run every test and write what it reaches, or the name of the first to fail."""
    recorder = Recorder(paths)
    code = int(pytest.main([*files, *FLAGS], plugins=[recorder]))
    told.write_bytes(pickle.dumps(recorder.failed or recorder.reached))
    return code


def chosen_for(mutant: Mutant, path: str, tests: Sequence[Reached]) -> list[Reached]:
    """The tests to play, file by file, the cheapest file and test first; those that reach its lines, or its file."""
    lines = {(path, line) for line in range(mutant.first, mutant.last + 1)}
    near = [test for test in tests if not lines.isdisjoint(test.lines)]
    if not mutant.is_late:
        near = list(tests)
    costs = {file: sum(test.cost for test in near if test.file == file) for file in {test.file for test in near}}
    touching = {test.file for test in near if any(place == path for place, _ in test.lines)}
    return sorted(near, key=lambda test: (test.file not in touching, costs[test.file], test.file, test.cost))


# -- trying


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one mutant: ``killed`` by a failing test, ``timeout`` (killed too), or ``survived``."""

    module: str
    mutant: Mutant
    outcome: str


def preload(names: Sequence[str]) -> None:
    """Import what all forks share that try the package's own modules, and keep tests the same from fork to fork."""
    if any(name.startswith("emailrl") for name in names):
        for name in PRELOADED:
            importlib.import_module(name)
        torch = sys.modules["torch"]
        torch.set_num_threads(1)
        torch.testing.assert_close(torch.zeros(1), torch.zeros(1))  # the first call imports for a second
    import hypothesis

    hypothesis.settings.register_profile("mutation", derandomize=True, database=None, deadline=None)
    hypothesis.settings.load_profile("mutation")
    sys.dont_write_bytecode = False  # or every fork would compile its tests anew
    gc.freeze()  # a fork has nothing of this to collect
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins of whatever else is installed: they only cost time


def run(names: Sequence[str], folder: Path, *, sample: int, workers: int, say: Say) -> list[Result]:
    """Try the mutants of some modules; raises RuntimeError if the tests fail without any."""
    if loaded := [name for name in names if name in sys.modules]:
        raise RuntimeError(f"{loaded[0]} was imported before its mutants: the tests would see the original")
    files, paths = test_files(names, folder), {name: str(source_file(name)) for name in names}
    tasks = [(name, mutant) for name in names for mutant in drawn(name, sample)[0]]
    with TemporaryDirectory() as scratch:
        os.environ["PYTEST_DEBUG_TEMPROOT"] = scratch  # where pytest makes the folders of tests
        told = Path(scratch, "told")
        [(_, outcome)] = forked([lambda: recorded(files, {*paths.values()}, told)], 1)
        tests = pickle.loads(told.read_bytes())
        if outcome != "survived":
            raise RuntimeError(f"{tests or 'a file of tests'} fails without a mutant")
        cost = sum(test.cost for test in tests)
        say(f"{names[0].rpartition('.')[0]}: {len(tests)} tests of {len(files)} files pass in {cost:.0f} s")
        jobs = [functools.partial(play, name, paths[name], mutant, tests) for name, mutant in tasks]
        outcomes = dict[int, str]()
        for i, outcome in forked(jobs, workers):
            outcomes[i] = outcome
            if len(outcomes) % 50 == 0:
                say(f"{len(outcomes)} of {len(jobs)}")
    return [Result(name, mutant, outcomes[i]) for i, (name, mutant) in enumerate(tasks)]


def play(module: str, path: str, mutant: Mutant, tests: Sequence[Reached]) -> int:
    """In a fork: put the mutant in its module's place and run the tests; 1 where one fails, or the import."""
    chosen = chosen_for(mutant, path, tests)
    sys.meta_path.insert(0, Mutated(module, path, mutant.source))
    try:
        importlib.import_module(module)
    except Exception:
        return 1
    played = (
        int(pytest.main([file, *FLAGS], plugins=[Chosen(list(group))]))
        for file, group in groupby(chosen, lambda test: test.file)
    )
    return next(filter(None, played), 0)


class Mutated(importlib.machinery.SourceFileLoader):
    """Finds and loads one module with other source."""

    def __init__(self, module: str, path: str, source: str) -> None:
        super().__init__(module, path)
        self._source = source

    def find_spec(self, module: str, _: object = None, __: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_file_location(module, self.path, loader=self) if module == self.name else None

    def get_code(self, _: str) -> types.CodeType:
        return compile(self._source, self.path, "exec", dont_inherit=True)


def forked(jobs: Sequence[Callable[[], int]], workers: int) -> Iterator[tuple[int, str]]:
    """Run each job in a fork of its own; yields its index and outcome as they end."""
    waiting, running = list(enumerate(jobs))[::-1], dict[int, tuple[int, float]]()
    while waiting or running:
        while waiting and len(running) < workers:
            i, job = waiting.pop()
            running[_fork(job)] = i, time.monotonic()
        time.sleep(0.003)
        for pid, (i, started) in list(running.items()):
            is_late = time.monotonic() - started > WALL_SECONDS
            if is_late:
                os.kill(pid, signal.SIGKILL)
            done, status = os.waitpid(pid, 0 if is_late else os.WNOHANG)
            if done:
                del running[pid]
                yield i, "timeout" if is_late else _outcome(os.waitstatus_to_exitcode(status))


def _outcome(code: int) -> str:
    if code in (0, 1, 2):  # pytest: all passed; some failed; a test file could not be imported
        return "killed" if code else "survived"
    if code < 0:  # ended by a signal, that of its limit or as by a stack overflow
        return "timeout" if code == -signal.SIGVTALRM else "killed"
    raise RuntimeError(f"a process of the mutation run ended with {code}: it could not run the tests")


def _fork(job: Callable[[], int]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    if pid := os.fork():
        return pid
    code, errors, null = 3, os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 1)
        os.dup2(null, 2)
        code = job()
    except BaseException:
        os.write(errors, traceback.format_exc().encode())
    finally:
        os._exit(code)
