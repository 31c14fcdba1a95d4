"""Which lines each test reaches, and what the tests say of a mutant in place: one pytest session, a fork for each try.

The session collects once. A first fork runs every test with its lines traced. Then, for each mutant within a function,
a fork gives that function the mutant's code and runs the tests that reach it, the cheapest file first, up to a failure.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import pickle
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import pytest

from .mutants import Mutant

Lines = set[tuple[str, int]]
UNUSED = ("cacheprovider", "warnings", "unraisableexception")
FLAGS = ("-qs", "--no-header", "--no-summary", "--tb=no", *(f"-pno:{plugin}" for plugin in UNUSED))


@dataclass(frozen=True, slots=True)
class Reached:
    """A test, its seconds of processor time, and the lines of mutated files it runs."""

    test: str
    cost: float
    lines: Lines

    @property
    def file(self) -> str:
        """The file of the test."""
        return self.test.partition("::")[0]

    @property
    def files(self) -> set[str]:
        """The mutated files of which it runs lines."""
        return {path for path, _ in self.lines}

    @property
    def limit(self) -> float:
        """Seconds of processor time after which the test counts as endless."""
        return 2 + 10 * self.cost


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


@dataclass(eq=False)
class Tests:
    """The tests of a session, as pytest's plugin: they run when ``work`` asks, not when pytest would."""

    work: Callable[[Tests], None]
    items: dict[str, pytest.Item] = field(default_factory=dict)
    has_failed: bool = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted("a file of tests cannot be imported")
        self.items = {item.nodeid: item for item in session.items}
        self.work(self)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.has_failed |= report.failed

    def play(self, tests: Sequence[Reached]) -> int:
        """Run the tests in their order up to the first failure; returns whether one failed (0 or 1)."""
        for test, after in zip(tests, [*tests[1:], None], strict=True):
            signal.setitimer(signal.ITIMER_VIRTUAL, test.limit)  # in processor time: its signal ends the process
            self._run(test.test, after and after.test)
            if self.has_failed:
                return 1
        return 0

    def record(self, files: set[str], path: Path) -> int:
        """Run every test and write what it reaches, or the name of the first to fail; returns 1 then."""
        found, names = [], list(self.items)
        for name, after in zip(names, [*names[1:], None], strict=True):
            self.has_failed = False
            started = time.process_time()
            with traced(files) as lines:
                self._run(name, after)
            if self.has_failed:
                path.write_text(name)
                return 1
            found.append(Reached(name, time.process_time() - started, lines))
        path.write_bytes(pickle.dumps(found))
        return 0

    def _run(self, name: str, after: str | None) -> None:
        item = self.items[name]
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=after and self.items[after])


def recorded(tests: Tests, files: set[str], folder: Path) -> list[Reached]:
    """What every test reaches; ends the session if one fails."""
    path = folder / "reached"
    ((_, outcome, _),) = forked([lambda: tests.record(files, path)], 1, is_quiet=True)
    if outcome != "survived":
        pytest.exit(f"{path.read_text()} fails without a mutant", returncode=1)
    return pickle.loads(path.read_bytes())


def ordered(tests: Sequence[Reached]) -> list[Reached]:
    """The tests file by file, cheapest file first, and within a file the cheapest first."""
    groups = [list(group) for _, group in groupby(sorted(tests, key=lambda test: test.file), lambda test: test.file)]
    groups.sort(key=lambda group: sum(test.cost for test in group))
    return [test for group in groups for test in sorted(group, key=lambda test: test.cost)]


def reaching(mutant: Mutant, path: str, tests: Sequence[Reached]) -> list[Reached]:
    """The tests that run one of a mutant's lines."""
    lines = {(path, line) for line in range(mutant.first, mutant.last + 1)}
    return ordered([test for test in tests if not lines.isdisjoint(test.lines)])


class Functions:
    """Every function made from some files, to be given other code."""

    def __init__(self, files: set[str]) -> None:
        self._of: dict[str, list[types.FunctionType]] = {}
        for one in gc.get_objects():
            if type(one) is types.FunctionType and one.__code__.co_filename in files:
                self._of.setdefault(one.__code__.co_filename, []).append(one)
            elif type(one) is functools._lru_cache_wrapper and (one.__module__ or "").startswith("emailrl"):
                one.cache_clear()  # filled while tests were collected

    def changed(self, path: str, source: str, mutated: str) -> list[tuple[types.FunctionType, types.CodeType]]:
        """The functions that the mutant changes, each with its code then; empty where that cannot be done in place."""
        before, after = list(_codes(source, path)), list(_codes(mutated, path))
        if [code.co_qualname for code in before] != [code.co_qualname for code in after]:
            return []
        codes = {old: new for old, new in zip(before, after, strict=True) if old != new}
        pairs = [(one, codes[one.__code__]) for one in self._of.get(path, []) if one.__code__ in codes]
        return pairs if all(one.__code__.co_freevars == code.co_freevars for one, code in pairs) else []


def _codes(source: str, path: str) -> Iterator[types.CodeType]:
    waiting = [compile(source, path, "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        yield code
        waiting.extend(part for part in code.co_consts if isinstance(part, types.CodeType))


# -- forks

POLL_SECONDS = 0.003


def forked(
    jobs: Sequence[Callable[[], int]], workers: int, *, is_quiet: bool = False, limit: float = math.inf
) -> Iterator[tuple[int, str, float]]:
    """Run each job in a fork of its own, for ``limit`` seconds at most.

    Yields its index, outcome (``survived``, ``killed``, ``timeout``) and seconds as they end.
    """
    waiting, running = list(enumerate(jobs))[::-1], dict[int, tuple[int, float]]()
    while waiting or running:
        while waiting and len(running) < workers:
            i, job = waiting.pop()
            running[_fork(job, is_quiet)] = i, time.monotonic()
        time.sleep(POLL_SECONDS)
        for pid, (i, started) in list(running.items()):
            seconds = time.monotonic() - started
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                outcome = _outcome(os.waitstatus_to_exitcode(status))
            elif seconds > limit:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                outcome = "timeout"
            else:
                continue
            del running[pid]
            yield i, outcome, seconds


def _outcome(code: int) -> str:
    if code in (0, 1, 2):  # pytest: all passed; some failed; a test file could not be imported
        return "killed" if code else "survived"
    if code == -signal.SIGVTALRM:
        return "timeout"
    if code < 0:  # ended by a signal, as by a stack overflow
        return "killed"
    raise RuntimeError(f"a process of the mutation run ended with {code}: it could not run the tests")


def _fork(job: Callable[[], int], is_quiet: bool) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        errors = os.dup(2)
        if is_quiet:
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
        code = job()
    except BaseException:
        os.write(errors, traceback.format_exc().encode())
    finally:
        os._exit(code)
