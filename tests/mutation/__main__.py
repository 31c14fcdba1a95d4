"""``python -m tests.mutation``: how many mutants of the algorithm modules the tests kill, and which survive.

With ``MODULE`` names only those; ``MODULE=TEST_FILE,...`` for any module and its tests. Ends with 1 where a share of
mutants below ``--min-score`` is killed; an equivalent mutant counts as not killed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from .run import Result, Suite, preload, run

ROOM = "emailrl.training"
MODULES = ("advantages", "kl", "losses", "samples", "batches", "filtering", "shaping")
EVERY = ("tests/training/test_edges.py", "tests/training/test_independent.py", "tests/training/test_gradients.py")
"""Run for each module after its own tests."""


def suite(name: str) -> Suite:
    """``MODULE`` or ``MODULE=TEST_FILE,...`` as written on the command line."""
    module, _, tests = name.partition("=")
    if tests:
        return Suite(module, tuple(tests.split(",")))
    module = module.rpartition(".")[2]
    return Suite(f"{ROOM}.{module}", (f"tests/training/test_{module}.py", *EVERY))


def report(results: Sequence[Result], seconds: float) -> dict[str, object]:
    """The results as JSON values."""

    def tally(of: Sequence[Result]) -> dict[str, float]:
        killed = sum(result.outcome != "survived" for result in of)
        return {"mutants": len(of), "killed": killed, "score": killed / len(of)}

    survivors = [result for result in results if result.outcome == "survived"]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "python": platform.python_version(),
        "torch": version("torch"),
        "seconds": round(seconds),
        "all": tally(results) | {"timeouts": Counter(result.outcome for result in results)["timeout"]},
        "modules": {name: tally([one for one in results if one.module == name]) for name in _names(results, "module")},
        "kinds": {
            kind: tally([one for one in results if one.mutant.kind == kind])
            for kind in sorted({one.mutant.kind for one in results})
        },
        "survivors": [
            {key: value for key, value in asdict(one.mutant).items() if key != "source"} | {"module": one.module}
            for one in survivors
        ],
    }


def _names(results: Sequence[Result], attribute: str) -> list[str]:
    return list(dict.fromkeys(getattr(result, attribute) for result in results))


def _print(told: dict) -> None:
    for title in ("modules", "kinds"):
        for name, row in told[title].items():
            print(f"{name:32} {row['killed']:4} of {row['mutants']:4}  {row['score']:7.1%}")
        print()
    for one in told["survivors"]:
        print(f"survived  {one['module']}:{one['line']}  [{one['kind']}]  {one['original']}  →  {one['mutated']}")
    every = told["all"]
    print(f"\n{every['killed']} of {every['mutants']} mutants killed ({every['score']:.1%}), {told['seconds']} s")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", default=MODULES, metavar="MODULE[=TEST_FILE,...]")
    parser.add_argument("--workers", type=int, default=1, help="mutants tried at once")
    parser.add_argument("--timeout", type=float, default=120, help="seconds after which a mutant counts as killed")
    parser.add_argument("--min-score", type=float, default=0.95)
    parser.add_argument("--json", type=Path, help="write the report here")
    wanted = parser.parse_args(argv)
    started = time.monotonic()
    preload()
    say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    results = run([suite(name) for name in wanted.modules], workers=wanted.workers, timeout=wanted.timeout, say=say)
    told = report(results, time.monotonic() - started)
    _print(told)
    if wanted.json:
        wanted.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0 if told["all"]["score"] >= wanted.min_score else 1


if __name__ == "__main__":
    sys.exit(main())
