"""Run the whole cycle on a CPU in minutes: demo mailbox, packaged small policy, training and its effect.

The policy answers questions about mailboxes it has never seen, is trained on others with reinforcement learning, and
answers again; one page compares both, and opens where there is a browser. The folder's emailrl.toml lets gen-db, train,
benchmark and inspect-trajectory run there without options. Ctrl-C saves the last step, and the same command resumes
from it.

Examples:

\b
  emailrl quickstart
  emailrl quickstart --max-steps 5 --out /tmp/try --json
"""

from __future__ import annotations

import itertools
import os
import shutil
import sys
import time
import webbrowser
from contextlib import suppress
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

import emailrl
from emailrl.base.disk import check_own, replace_bytes
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.plain import one_line
from emailrl.cli.options import Json, Overwrite, path_option
from emailrl.cli.output import print_json, print_next, result_console, say

if TYPE_CHECKING:
    from emailrl.cli.live import LiveRun, Tally
    from emailrl.measure.benchmark import Report, Subject

SETTINGS = Path(emailrl.__file__).with_name("quickstart.toml").read_text("utf-8")  # to write, but for the steps
MARK = SETTINGS.partition("\n")[0]
UNTRAINED = (
    "The best model is the untrained one: no evaluation during training was more accurate, so before and after are the "
    "same model. Try more --max-steps."
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A report with one result before training, and one after."""

    before: Report
    after: Report
    run_dir: Path
    page: Path  # Shows the run and both tests.
    best_step: int  # The step of the best model, which ``after`` measures; 0 for the untrained one.
    seconds: float

    def record(self) -> dict[str, Any]:
        (before,), (after,) = self.before.records(), self.after.records()
        run = {"run_dir": self.run_dir, "curve": self.run_dir / "curve.png", "best_step": self.best_step}
        return {"before": before, "after": after, **run, "page": self.page, "seconds": self.seconds}


def quickstart(
    max_steps: Annotated[int, Option("--max-steps", min=1, help="Maximum optimizer steps.")] = 15,
    out: Annotated[Path | None, path_option(help="Output folder. Default: quickstart, or the next number.")] = None,
    overwrite: Overwrite = False,
    no_open: Annotated[bool, Option("--no-open", help="Do not open the page in a browser.")] = False,
    json: Json = False,
) -> None:
    from emailrl.checkpoints import find_checkpoint
    from emailrl.cli.live import LiveRun, Tally
    from emailrl.measure.evaluation import is_correct
    from emailrl.settings import Settings

    folder = out or free_folder(Path("quickstart"))
    with Tally() as tally, LiveRun(Settings(), json=True) as live:
        try:
            outcome = cycle(folder, max_steps, overwrite, tally, live)
        except KeyboardInterrupt:
            kept = "training had not started"
            with suppress(EmailRLError):
                latest = find_checkpoint("latest", folder / "outputs" / "grpo")
                kept = f"training up to step {latest.metadata.step} is saved in {folder}"
            say(f"Stopped: {kept}. Run the same command again to continue.")
            raise
    console = result_console(json=json)
    reports = {"before": outcome.before, "after": outcome.after}
    console.print("\nTest accuracy", style="bold")
    for name, report in reports.items():
        evaluation = report.results[0].evaluation
        told = "95% interval {:.1%} to {:.1%}   {} questions".format(*evaluation.interval, evaluation.num_questions)
        console.print(f"  {name:<7} {evaluation.accuracy:6.1%}   {told}, greedy decoding")
    if outcome.best_step == 0:
        console.print(UNTRAINED, style="yellow")
    both = zip(*(report.results[0].evaluation.trajectories for report in reports.values()), strict=True)
    for old, new in itertools.islice(((old, new) for old, new in both if is_correct(new) and not is_correct(old)), 1):
        console.print(f"\n{one_line(new.scenario.question)}", style="bold")
        for name, each in (("before", old), ("after", new)):
            console.print(f"  {name:<7}  {one_line(each.final_answer or 'no answer')}", soft_wrap=True)
    console.print(f"\nFinished in {outcome.seconds / 60:.1f} minutes. Page: {outcome.page}", soft_wrap=True)
    if not (no_open or json) and has_browser():
        webbrowser.open(outcome.page.absolute().as_uri())
    print_next(["view", str(outcome.run_dir.parent)], "serves the page")
    print_next(["inspect-trajectory", "--verbose"], folder=folder)
    if json:
        print_json(outcome.record())


def cycle(out: Path, steps: int, overwrite: bool, tally: Tally, live: LiveRun) -> Outcome:
    """Index, benchmark, train and benchmark again in ``out``; an interrupted quickstart there is continued. Raises
    UsageError if ``out`` contains anything else, unless ``overwrite``. Only the ``emailrl.toml`` written here counts,
    no ``.env`` and no environment."""
    from emailrl.checkpoints import find_checkpoint
    from emailrl.measure.benchmark import Subject, run_benchmark
    from emailrl.model.resolve import Adapter
    from emailrl.page.build import gather, page
    from emailrl.page.place import place_of
    from emailrl.questions.load import questions_file, read_questions, write_demo
    from emailrl.settings import load_settings
    from emailrl.training.loop import train

    started = time.monotonic()
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file.", "Name a folder with --out.")
    check_own(out, "--out")
    if out.exists() and not _is_unfinished(out) and any(out.iterdir()):
        if not overwrite:
            raise UsageError(f"{out} is not empty.", "Name another folder with --out, or replace it with --overwrite.")
        if not _is_quickstart(out):
            raise UsageError(f"{out} contains something other than a quickstart.", "Name another folder with --out.")
        shutil.rmtree(out)
    out.mkdir(parents=True, exist_ok=True)
    replace_bytes(out / "emailrl.toml", SETTINGS.format(steps=steps).encode())
    settings = load_settings(cwd=out, environ={}, dotenv=False)
    data, db, seed = settings.data, settings.store.db, settings.training.seed
    live.say(f"Demo mailbox: {db}")
    live.say("Loading the model ...")
    write_demo(db, settings=settings.store, seed=seed, overwrite=True)

    def measure(subject: Subject, name: str) -> Report:
        policy = "the trained policy" if subject.adapter else subject.label
        live.say(f"Benchmarking {policy} on questions about held-out mailboxes")
        chosen = read_questions(questions_file(db), data).of("test", limit=data.test_set_size, seed=seed)
        title, total = f"benchmark of {subject.label}", len(chosen.scenarios)
        tally.begin(title, total)
        report = run_benchmark(
            [subject], chosen.scenarios, settings, settings.output.output_dir.parent / "benchmarks" / name,
            notes=chosen.notes, progress=lambda *_: tally.advance(title, total), overwrite=True,
        )  # fmt: skip
        if report.interrupted:
            raise KeyboardInterrupt
        evaluation = report.results[0].evaluation
        interval = "95% interval {:.1%} to {:.1%}".format(*evaluation.interval)
        live.say(f"Accuracy {evaluation.accuracy:.1%}, {interval}, {evaluation.num_questions} questions")
        return report

    before = measure(Subject("nano", "nano"), "before")
    run_dir = train(settings, resume="auto", display=live).run_dir
    best = find_checkpoint("best", settings.output.output_dir)
    after = measure(Subject("trained", best.metadata.base_model, Adapter.of(best)), "after")
    target = out / "quickstart.html"
    replace_bytes(target, page(gather(place_of(run_dir), model_name="nano")).encode("utf-8", "replace"))
    outcome = Outcome(before, after, run_dir, target, best.metadata.step, time.monotonic() - started)
    replace_bytes(out / "quickstart.json", dumps(outcome.record(), default=str, indent=2).encode())
    return outcome


def has_browser() -> bool:
    """Whether somebody sits before a screen who may be shown a page: a terminal, no CI, and a desktop."""
    has_desktop = sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    return has_desktop and sys.stdout.isatty() and not os.environ.get("CI")


def free_folder(wanted: Path) -> Path:
    """Return ``wanted``, or the next free name (``quickstart-2``); an unfinished folder is used again."""
    names = (wanted.with_name(f"{wanted.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([wanted], names) if not folder.exists() or _is_unfinished(folder))


def _is_unfinished(folder: Path) -> bool:
    return _is_quickstart(folder) and not (folder / "quickstart.json").exists()


def _is_quickstart(folder: Path) -> bool:
    """Whether a quickstart wrote the folder's settings, rather than a user."""
    settings = folder / "emailrl.toml"
    return settings.is_file() and settings.read_text(encoding="utf-8", errors="replace").startswith(MARK)
