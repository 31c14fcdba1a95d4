"""The full cycle on a demo mailbox with the packaged policy: index, benchmark, train, benchmark again."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from emailrl.base.disk import check_own, replace_bytes
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.checkpoints import find_checkpoint
from emailrl.measure.benchmark import Progress, Report, Subject, run_benchmark
from emailrl.measure.evaluation import is_correct
from emailrl.model.adapter import Adapter
from emailrl.questions.load import questions_file, read_questions, write_demo
from emailrl.records.trajectory import Trajectory
from emailrl.runs.log import Display
from emailrl.settings import Settings, load_settings

STEPS = 15
NUM_TEST_QUESTIONS = 300

SETTINGS = Path(__file__).with_suffix(".toml").read_text("utf-8").replace("{questions}", str(NUM_TEST_QUESTIONS))
"""The ``emailrl.toml`` to write, but for the number of steps."""
MARK = SETTINGS.partition("\n")[0]

Begin = Callable[[Subject, int], None]
"""Called when a benchmark begins, with its subject and its number of questions."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the quickstart: a report with one result before training, and one after."""

    before: Report
    after: Report
    run_dir: Path
    curve: Path
    """Picture of accuracy and reward by step."""
    best_step: int
    """The step of the best model, which ``after`` measures; 0 for the untrained one."""
    seconds: float

    def record(self) -> dict[str, Any]:
        """Return the object that ``quickstart --json`` prints."""
        (before,), (after,) = self.before.records(), self.after.records()
        run = {"run_dir": self.run_dir, "curve": self.curve, "best_step": self.best_step, "seconds": self.seconds}
        return {"before": before, "after": after, **run}

    def example(self) -> tuple[Trajectory, Trajectory] | None:
        """Both trajectories of the first question answered wrongly before and rightly after; None if there is none."""
        both = (report.results[0].evaluation.trajectories for report in (self.before, self.after))
        pairs = zip(*both, strict=True)
        return next(((old, new) for old, new in pairs if is_correct(new) and not is_correct(old)), None)


def free_folder(wanted: Path) -> Path:
    """Return ``wanted``, or the next free name (``quickstart-2``); an unfinished folder is used again."""
    names = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([wanted], names) if not folder.exists() or is_unfinished(folder))


def is_unfinished(folder: Path) -> bool:
    """Whether an unfinished quickstart is in the folder."""
    return _is_quickstart(folder) and not (folder / "quickstart.json").exists()


def _is_quickstart(folder: Path) -> bool:
    """Whether a quickstart wrote the folder's settings, rather than a user."""
    settings = folder / "emailrl.toml"
    return settings.is_file() and settings.read_text(encoding="utf-8", errors="replace").startswith(MARK)


def quickstart(
    out: Path,
    *,
    steps: int = STEPS,
    overwrite: bool = False,
    say: Callable[[str], None],
    begin: Begin = lambda subject, questions: None,
    progress: Progress | None = None,
    display: Display | None = None,
) -> Outcome:
    """Run the cycle in ``out``; ``say`` receives every line for the console, ``progress`` each benchmarked trajectory.

    ``begin`` is called when a benchmark begins; ``display`` shows the training. An interrupted quickstart in ``out`` is
    continued. Raises UsageError if ``out`` contains anything else, unless ``overwrite``. Only the ``emailrl.toml``
    written here counts, no ``.env`` and no environment.
    """
    started = time.monotonic()
    settings = _settle(out, steps, overwrite)
    say(f"Demo mailbox: {settings.store.db}")
    say("Loading the model ...")
    write_demo(settings.store.db, settings=settings.store, seed=settings.training.seed, overwrite=True)

    def measure(subject: Subject, name: str) -> Report:
        policy = "the trained policy" if subject.adapter else subject.label
        say(f"Benchmarking {policy} on questions about held-out mailboxes")
        data, file = settings.data, questions_file(settings.store.db)
        chosen = read_questions(file, data).of("test", limit=data.test_set_size, seed=settings.training.seed)
        begin(subject, len(chosen.scenarios))
        report = run_benchmark(
            [subject], chosen.scenarios, settings, out / "benchmarks" / name,
            notes=chosen.notes, progress=progress, overwrite=True,
        )  # fmt: skip
        if report.interrupted:
            raise KeyboardInterrupt
        evaluation = report.results[0].evaluation
        low, high = evaluation.interval
        interval = f"95% interval {low:.1%} to {high:.1%}"
        say(f"Accuracy {evaluation.accuracy:.1%}, {interval}, {evaluation.num_questions} questions")
        return report

    before = measure(Subject("nano", "nano"), "before")

    from emailrl.training.loop import train

    run_dir = train(settings, resume="auto", progress=say, display=display).run_dir
    best = find_checkpoint("best", settings.output.output_dir)
    subject = Subject("trained", best.metadata.base_model, Adapter.of(best))
    after = measure(subject, "after")
    step, seconds = best.metadata.step, time.monotonic() - started
    outcome = Outcome(before, after, run_dir, run_dir / "curve.png", step, seconds)
    replace_bytes(out / "quickstart.json", json.dumps(outcome.record(), default=str, indent=2).encode())
    return outcome


def kept(out: Path) -> str:
    """Return in words what an interrupted quickstart in ``out`` need not repeat."""
    try:
        latest = find_checkpoint("latest", out / "outputs" / "grpo")
    except EmailRLError:
        return "training had not started"
    return f"training up to step {latest.metadata.step} is saved in {out}"


def _settle(out: Path, steps: int, overwrite: bool) -> Settings:
    """Create the folder and its ``emailrl.toml``, or read those of an interrupted quickstart."""
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file.", "Name a folder with --out.")
    check_own(out, "--out")
    if out.exists() and not is_unfinished(out) and any(out.iterdir()):
        if not overwrite:
            raise UsageError(f"{out} is not empty.", "Name another folder with --out, or replace it with --overwrite.")
        if not _is_quickstart(out):
            raise UsageError(f"{out} contains something other than a quickstart.", "Name another folder with --out.")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    replace_bytes(out / "emailrl.toml", SETTINGS.format(steps=steps).encode())
    return load_settings(cwd=out, environ={}, dotenv=False)
