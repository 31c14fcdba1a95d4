"""``python -m tests.mutation``: how many mutants of the algorithms, the facts and the answer check the tests kill.

With ``MODULE`` names only those modules or packages. The tests are found by their imports and by the lines they run.
Survivors are listed with the reason that ``survivors.toml`` gives. Ends with 1 where a share of mutants below
``--min-score`` is killed; an equivalent mutant counts as not killed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import tomllib
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from .run import MODULES, SAMPLED, Result, drawn, modules, preload, run

REASONS = Path(__file__).with_name("survivors.toml")


def report(results: Sequence[Result], sample: int, seconds: float) -> dict[str, Any]:
    """The results as JSON values."""
    reasons = tomllib.loads(REASONS.read_text())

    def tally(of: Sequence[Result]) -> dict[str, float]:
        killed = sum(result.outcome != "survived" for result in of)
        return {"mutants": len(of), "killed": killed, "score": killed / len(of) if of else 1.0}

    told: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "seconds": round(seconds)}
    told["all"] = tally(results) | {"timeouts": sum(result.outcome == "timeout" for result in results)}
    told["modules"] = {
        name: tally([one for one in results if one.module == name]) | {"of": drawn(name, sample)[1]}
        for name in dict.fromkeys(one.module for one in results)
    }
    told["survivors"] = []
    for one in results:
        if one.outcome == "survived":
            shown = {key: getattr(one.mutant, key) for key in ("line", "scope", "kind", "original", "mutated")}
            change = f"{one.mutant.scope}: {one.mutant.original} → {one.mutant.mutated}"
            reason = reasons.get(one.module, {}).get(change, "no test tells it apart yet")
            told["survivors"].append(shown | {"module": one.module, "reason": reason})
    return told


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, run, print, write; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("modules", nargs="*", default=MODULES, metavar="MODULE")
    parser.add_argument("--tests", type=Path, default=Path("tests"), help="the folder of test files")
    parser.add_argument("--workers", type=int, default=1, help="mutants tried at once")
    parser.add_argument("--sample", type=int, default=30, help=f"a file's mutants in {', '.join(SAMPLED)}; 0: all")
    parser.add_argument("--min-score", type=float, default=0.97)
    parser.add_argument("--json", type=Path, help="write the report here")
    wanted = parser.parse_args(argv)
    started = time.monotonic()
    preload(wanted.modules)
    say = lambda line: print(line, file=sys.stderr, flush=True)  # noqa: E731
    results: list[Result] = []
    for _, room in groupby(modules(wanted.modules), lambda name: name.startswith(SAMPLED)):
        results += run(list(room), wanted.tests, sample=wanted.sample, workers=wanted.workers, say=say)
    told = report(results, wanted.sample, time.monotonic() - started)
    for name, row in told["modules"].items():
        drawn_from = f"  (drawn from {row['of']})" if row["of"] > row["mutants"] else ""
        print(f"{name:36} {row['killed']:4} of {row['mutants']:4}  {row['score']:7.1%}{drawn_from}")
    for one in told["survivors"]:
        print(f"survived  {one['module']}:{one['line']}  [{one['kind']}]  {one['original']}  →  {one['mutated']}")
        print(f"          {one['scope']}: {one['reason']}")
    every = told["all"]
    print(f"\n{every['killed']} of {every['mutants']} mutants killed ({every['score']:.1%}), {told['seconds']} s")
    if wanted.json:
        wanted.json.write_text(json.dumps(told, indent=1) + "\n")
    return 0 if every["score"] >= wanted.min_score else 1


if __name__ == "__main__":
    sys.exit(main())
