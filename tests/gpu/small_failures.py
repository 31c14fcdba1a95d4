"""Why a benchmark's answers are wrong: counts by class and kind of question, with one example of each class.

    python tests/gpu/small_failures.py bench/trajectories/01-best_model.jsonl --out failures.md
    python tests/gpu/small_failures.py once/trajectories/00-smol.jsonl --against again/trajectories/00-smol.jsonl

The first reads one policy's trajectories (CPU only) and writes Markdown. A failure belongs to the first class that
applies: raised, not judged, malformed call, out of turns or tokens, "I don't know" or no answer; then by how far it
came: the source email (all of them, if all are needed) was cited with another fact; was never among the hits; was not
read; or was read, but another was cited. The second says how far two measurements of the same weights agree.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from emailrl.measure.evaluation import Evaluation, is_correct, is_judged, paired_test, verdict, wilson_interval
from emailrl.records import read_trajectories
from emailrl.records.trajectory import StopReason, Trajectory

PROGRESS = ("source never among the hits", "source among the hits, not read", "source read, another email cited")
CLASSES = ["raised", "not judged", "malformed call", "out of turns", "out of tokens"]
CLASSES += ["answered a question without an answer", *PROGRESS, "source cited, wrong fact", "did not know", "no answer"]
MALFORMED = {StopReason.CANT_PARSE_TOOL_CALL, StopReason.BAD_TOOL_CALL_NAME, StopReason.BAD_TOOL_CALL_ARGS}
LONGEST = 160  # characters of a question, call or answer in an example


def failure(trajectory: Trajectory) -> str | None:
    """The class of a trajectory; None if it is right."""
    if is_correct(trajectory):
        return None
    early = {"crashed": "raised", "not judged": "not judged"}.get(verdict(trajectory))
    if early is not None:
        return early
    if trajectory.stop_reason in MALFORMED:
        return "malformed call"
    if trajectory.stop_reason == StopReason.RAN_OUT_OF_TURNS:
        return "out of turns"
    if trajectory.stop_reason == StopReason.TRUNCATED:
        return "out of tokens"
    rubric, outcome = trajectory.rubric, verdict(trajectory)
    if outcome != "wrong":
        return outcome
    if not trajectory.scenario.answerable:
        return "answered a question without an answer"
    if rubric["sources_correct"]:  # even unread: a count is taken from the hits
        return "source cited, wrong fact"
    return PROGRESS[0] if not rubric["ever_found_right_email"] else PROGRESS[1 + rubric["ever_read_right_email"]]


def report(trajectories: Sequence[Trajectory]) -> str:
    found = {id(each): failure(each) for each in trajectories}
    kinds = sorted({each.scenario.kind or "–" for each in trajectories})
    counts = Counter((found[id(each)], each.scenario.kind or "–") for each in trajectories)
    classes = [name for name in CLASSES if any(counts[name, kind] for kind in kinds)]
    low, high = (evaluation := Evaluation(trajectories)).interval
    lines = [
        f"{len(trajectories)} answers, {evaluation.accuracy:.1%} right ({low:.1%} to {high:.1%}).",
        "",
        "| kind | questions | right | " + " | ".join(classes) + " |",
        "|---" * (3 + len(classes)) + "|",
    ]
    for kind in [*kinds, "all"]:
        chosen = kinds if kind == "all" else [kind]
        cells = [sum(counts[name, one] for one in chosen) for name in (None, *classes)]
        lines.append(f"| {kind} | " + " | ".join(map(str, [sum(cells), *cells])) + " |")
    for name in classes:
        lines += ["", f"**{name}**", "", *example(next(each for each in trajectories if found[id(each)] == name))]
    return "\n".join(lines) + "\n"


def agreement(first: Sequence[Trajectory], second: Sequence[Trajectory]) -> str:
    """How many conversations and verdicts differ between two measurements, and what they make of the accuracy."""
    others = {each.scenario.id: each for each in second if is_judged(each)}
    pairs = [(each, others[each.scenario.id]) for each in first if is_judged(each) and each.scenario.id in others]
    n = len(pairs)
    parted = sum(
        [t.completion_ids for t in one.turns] != [t.completion_ids for t in other.turns] for one, other in pairs
    )
    changes = [(one.scenario.inbox_address, is_correct(other) - is_correct(one)) for one, other in pairs]
    worse, better = (sum(change == sign for _, change in changes) for sign in (-1, 1))
    flips = worse + better
    low, high = wilson_interval(flips, n)
    sd, most = ((share / n) ** 0.5 for share in (flips / n, high))
    p_value, unit = paired_test(changes)
    return (
        f"{n} questions: {parted} conversations part, {flips} verdicts change ({flips / n:.1%}, {low:.1%} to "
        f"{high:.1%}), {worse} to the worse; accuracy {(better - worse) / n:+.1%}, p = {p_value:.2g} by {unit}.\n"
        f"If flips are independent, the difference has a standard deviation of {sd:.2%} (at most {most:.2%}).\n"
    )


def example(trajectory: Trajectory) -> list[str]:
    """A trajectory in a few lines: question, calls, answer."""
    scenario = trajectory.scenario
    lines = [f"- question ({scenario.id}): {_short(scenario.question)}"]
    for turn in trajectory.turns:
        call = f"`{turn.tool_name}` {turn.tool_args}" if turn.tool_name else "a turn without a readable call"
        lines.append(f"- {_short(call)}")
    given = trajectory.final_answer if trajectory.final_answer is not None else trajectory.exception or "none"
    lines.append(f"- answer: {_short(given)}; right: {_short(scenario.answer or 'not in the mailbox')}")
    return lines


def _short(text: str) -> str:
    flat = " ".join(text.split()).replace("|", "\\|")
    return flat if len(flat) <= LONGEST else flat[:LONGEST] + " …"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trajectories", type=Path, help="a benchmark's trajectories/NN-MODEL.jsonl")
    parser.add_argument("--against", type=Path, help="a second measurement of the same weights, to compare with")
    parser.add_argument("--out", type=Path, help="default: stdout")
    given = parser.parse_args()
    found = list(read_trajectories(given.trajectories))
    text = agreement(found, list(read_trajectories(given.against))) if given.against else report(found)
    if given.out:
        given.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
