"""Run the whole cycle on a CPU in minutes: demo mailbox, packaged small policy, training and its effect.

The policy answers questions about mailboxes it has never seen, is trained on others with reinforcement learning, and
answers again. The folder's emailrl.toml lets gen-db, train, benchmark and inspect-trajectory run there without
options. Ctrl-C saves the last step, and the same command resumes from it.

Examples:

\b
  emailrl quickstart
  emailrl quickstart --max-steps 5 --out /tmp/try --json
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

from emailrl.cli.live import LiveRun, Tally
from emailrl.cli.options import Json, Overwrite, path_option
from emailrl.cli.output import print_json, print_next, result_console, say
from emailrl.settings import Settings

if TYPE_CHECKING:
    from emailrl.measure.benchmark import Subject

UNTRAINED = (
    "The best model is the untrained one: no evaluation during training was more accurate, so before and after are the "
    "same model. Try more --max-steps."
)


def quickstart(
    max_steps: Annotated[int, Option("--max-steps", min=1, help="Maximum optimizer steps.")] = 15,
    out: Annotated[
        Path | None, path_option("--out", help="Output folder. Default: quickstart, or the next free number.")
    ] = None,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    from emailrl.cli.trajectory import render_trajectory
    from emailrl.quickstart import NUM_TEST_QUESTIONS, free_folder, kept
    from emailrl.quickstart import quickstart as run
    from emailrl.records import read_records

    folder = out or free_folder(Path("quickstart"))
    with Tally() as tally, LiveRun(Settings(), json=True) as live:

        def begin(subject: Subject, questions: int) -> None:
            tally.begin(f"benchmark of {subject.label}", questions)

        def ended(subject: Subject, _trajectory: object) -> None:
            tally.advance(f"benchmark of {subject.label}", NUM_TEST_QUESTIONS)

        try:
            outcome = run(
                folder, steps=max_steps, overwrite=overwrite, say=live.say, begin=begin, progress=ended, display=live
            )
        except KeyboardInterrupt:
            say(f"Stopped: {kept(folder)}. Run the same command again to continue.")
            raise
    console = result_console(json=json)
    for name, trajectory in zip(("Before", "After"), outcome.example() or (), strict=False):
        origin = f"benchmark of {trajectory.policy_version}"
        console.print(render_trajectory(trajectory, title=f"{name} training", origin=origin))
    console.print("\nValidation accuracy by step", style="bold")
    for point in read_records(outcome.run_dir / "evaluations.jsonl"):
        step, accuracy = point["step"], point["accuracy"]
        console.print(f"  {step:>4}  {'█' * round(40 * accuracy):<40} {accuracy:6.1%}")
    console.print("\nTest accuracy", style="bold")
    for name, report in (("before", outcome.before), ("after", outcome.after)):
        evaluation, temperature = report.results[0].evaluation, report.conditions["temperature"]
        low, high = evaluation.interval
        decoding = "greedy decoding" if temperature == 0 else f"sampled at temperature {temperature:g}"
        interval = f"95% interval {low:.1%} to {high:.1%}   {evaluation.num_questions} questions, {decoding}"
        console.print(f"  {name:<7} {evaluation.accuracy:6.1%}   {interval}")
    if outcome.best_step == 0:
        console.print(UNTRAINED, style="yellow")
    console.print(f"\nFinished in {outcome.seconds / 60:.1f} minutes. Plot: {outcome.curve}", soft_wrap=True)
    print_next(["inspect-trajectory", "--verbose"], folder=folder)
    if json:
        print_json(outcome.record())
