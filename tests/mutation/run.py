"""Whether the tests notice each mutant: one forked process a mutant, which imports it in place of the module.

What every process needs (torch above all) is imported once, before the forks; neither the module nor a test is.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import os
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .mutants import Mutant, mutants

PRELOADED = ("torch", "hypothesis", "pytest", "emailrl.errors", "emailrl.settings", "emailrl.trajectory")
POLL_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Suite:
    """A module by its dotted name, and the test files that must notice its mutants."""

    module: str
    tests: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one mutant: ``killed`` by a failing test, ``timeout`` (killed too), or ``survived``."""

    module: str
    mutant: Mutant
    outcome: str
    seconds: float


def preload(modules: Sequence[str] = PRELOADED) -> None:
    """Import what all forks share."""
    for name in modules:
        importlib.import_module(name)
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)
        torch.testing.assert_close(torch.zeros(1), torch.zeros(1))  # the first call imports for a second
    if hypothesis := sys.modules.get("hypothesis"):
        hypothesis.settings.register_profile("mutation", derandomize=True, database=None, deadline=None)
        hypothesis.settings.load_profile("mutation")


def run(suites: Sequence[Suite], *, workers: int, timeout: float, say: Callable[[str], None]) -> list[Result]:
    """Try every mutant of the suites, in the order of the source; raises RuntimeError if the tests fail without any."""
    tasks = [(suite, mutant) for suite in suites for mutant in mutants(_file(suite.module).read_text())]
    for suite in suites:
        if suite.module in sys.modules:
            raise RuntimeError(f"{suite.module} was imported before its mutants: the tests would see the original")
        plain = _file(suite.module).read_text()
        (outcome,) = _forked([lambda suite=suite, plain=plain: _test(suite, plain, quiet=False)], 1, timeout)
        if outcome[1] != "survived":
            raise RuntimeError(f"the tests of {suite.module} fail without a mutant ({outcome[1]})")
        say(f"{suite.module}: tests pass in {outcome[2]:.1f} s")
    jobs = [lambda suite=suite, mutant=mutant: _test(suite, mutant.source, quiet=True) for suite, mutant in tasks]
    results: dict[int, Result] = {}
    for i, outcome, seconds in _forked(jobs, workers, timeout):
        suite, mutant = tasks[i]
        results[i] = Result(suite.module, mutant, outcome, seconds)
        if len(results) % 50 == 0:
            say(f"{len(results)} of {len(jobs)} mutants")
    return [results[i] for i in range(len(jobs))]


def _file(module: str) -> Path:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError(module)
    return Path(spec.origin)


def _forked(jobs: Sequence[Callable[[], int]], workers: int, timeout: float) -> Iterator[tuple[int, str, float]]:
    """Run each job in a fork of its own; yields its index, outcome and seconds as they end."""
    waiting, running = list(enumerate(jobs))[::-1], dict[int, tuple[int, float]]()
    while waiting or running:
        while waiting and len(running) < workers:
            i, job = waiting.pop()
            running[_fork(job)] = i, time.monotonic()
        time.sleep(POLL_SECONDS)
        for pid, (i, started) in list(running.items()):
            seconds = time.monotonic() - started
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                outcome = _outcome(os.waitstatus_to_exitcode(status))
            elif seconds > timeout:
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
    if code < 0:  # ended by a signal, as by a stack overflow
        return "killed"
    raise RuntimeError(f"pytest ended with {code}: it could not run the tests")


def _fork(job: Callable[[], int]) -> int:
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 3
    try:
        code = job()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _test(suite: Suite, source: str, *, quiet: bool) -> int:
    """In a fork: put the source in the module's place, run the tests up to the first failure, return pytest's code."""
    import pytest

    if quiet:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
    try:
        _install(suite.module, source)
    except Exception:
        return 1
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # plugins of whatever else is installed: they only cost time
    return int(
        pytest.main([*suite.tests, "-x", "-q", "--no-header", "--tb=no", "-p", "no:cacheprovider", "-p", "no:warnings"])
    )


def _install(module: str, source: str) -> None:
    path = str(_file(module))
    package, _, name = module.rpartition(".")
    stand_in = types.ModuleType(module)
    stand_in.__spec__ = importlib.machinery.ModuleSpec(module, None, origin=path)
    stand_in.__file__, stand_in.__package__ = path, package
    sys.modules[module] = stand_in
    exec(compile(source, path, "exec"), stand_in.__dict__)
    if package:
        setattr(importlib.import_module(package), name, stand_in)
