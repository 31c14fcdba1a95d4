"""Classes of failures of ``gpu/small_failures``, each by a trajectory made by hand, and its table. No GPU is needed."""

from __future__ import annotations

from typing import Any

import pytest
from gpu.small_failures import agreement, failure, report

from emailrl.records.trajectory import Scenario, StopReason, Trajectory, Turn

READ = {"ever_found_right_email": True, "ever_read_right_email": True, "attempted_answer": True}


def trajectory(stop: StopReason = StopReason.ANSWERED, *, answerable: bool = True, **rubric: Any) -> Trajectory:
    scenario = Scenario("s-1", "When?", "May", ["<1>"], "ann@example.com", "2001-01-01", kind="first_after")
    scenario.answerable = answerable
    usual = {"answer_correct": False, "sources_correct": False, "ever_found_right_email": False,
             "ever_read_right_email": False, "attempted_answer": False, "returned_i_dont_know": False}  # fmt: skip
    exception = "OSError: gone" if stop == StopReason.EXCEPTION else None
    turns = [Turn([], [], "stop", tool_name="search_emails", tool_args={"keywords": ["a|b"]})]
    return Trajectory("t", "g", scenario, turns=turns, rubric=usual | rubric, stop_reason=stop, exception=exception)


@pytest.mark.parametrize(
    ("expected", "stop", "rubric"),
    [
        (None, StopReason.ANSWERED, READ | {"answer_correct": True}),
        ("raised", StopReason.EXCEPTION, {}),
        ("not judged", StopReason.ANSWERED, READ | {"answer_correct": None}),
        ("malformed call", StopReason.BAD_TOOL_CALL_ARGS, {}),
        ("out of turns", StopReason.RAN_OUT_OF_TURNS, {"ever_found_right_email": True}),
        ("out of tokens", StopReason.TRUNCATED, {}),
        ("did not know", StopReason.ANSWERED, READ | {"returned_i_dont_know": True}),
        ("no answer", StopReason.COMPLETED, {}),
        ("source never among the hits", StopReason.ANSWERED, {"attempted_answer": True}),
        (
            "source among the hits, not read",
            StopReason.ANSWERED,
            {"attempted_answer": True, "ever_found_right_email": True},
        ),
        ("source read, another email cited", StopReason.ANSWERED, READ),
        ("source cited, wrong fact", StopReason.ANSWERED, READ | {"sources_correct": True}),
        (  # a count, taken from the hits
            "source cited, wrong fact",
            StopReason.ANSWERED,
            {"attempted_answer": True, "ever_found_right_email": True, "sources_correct": True},
        ),
    ],
)
def test_the_first_class_that_applies(expected: str | None, stop: StopReason, rubric: dict[str, Any]) -> None:
    assert failure(trajectory(stop, **rubric)) == expected


def test_an_answer_to_a_question_that_has_none() -> None:
    assert failure(trajectory(answerable=False, attempted_answer=True)) == "answered a question without an answer"


def test_the_report_counts_by_kind_and_shows_an_example() -> None:
    text = report([trajectory(**READ, answer_correct=True), trajectory(**READ), trajectory(**READ)])
    assert "3 answers, 33.3% right" in text
    assert "| first_after | 3 | 1 | 2 |" in text and "| all | 3 | 1 | 2 |" in text
    assert "**source read, another email cited**" in text and "a\\|b" in text


def test_the_agreement_of_two_measurements() -> None:
    def measured(right: str) -> list[Trajectory]:
        made = [trajectory(**READ | {"answer_correct": verdict == "1"}) for verdict in right]
        for number, each in enumerate(made):
            each.scenario.id, each.turns[0].completion_ids = str(number), [int(right[number])]
        return made

    first, second = measured("1111100000"), measured("0001110000")
    second[9].turns[0].completion_ids = [7]  # parts, with the same verdict
    text = agreement(first, second[::-1])
    assert "10 questions: 5 conversations part, 4 verdicts change (40.0%, 16.8% to 68.7%), 3 to the worse" in text
    assert "accuracy -20.0%, p = 0.62 by question" in text  # 2 · (1 + 4)/16
    assert "deviation of 20.00% (at most 26.22%)" in text  # √4 / 10, √(0.687 / 10)
