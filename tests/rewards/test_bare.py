"""Rivals in answers without a sentence, however the two candidates are separated."""

from __future__ import annotations

import pytest

from emailrl.rewards.matching import match

PAIRS = [
    ("Who wrote the pump report?", "Ada Moss", "Bo Hale"),
    ("Which firm painted the quay?", "Corvane", "Selwick"),
    ("How much was the crane?", "$4,150", "$4,510"),
    ("When is the survey?", "May 14, 2002", "May 17, 2002"),
    ("What is the permit number?", "KT30-118-200", "KT30-181-200"),
    ("Which program reads the meters?", "Dial Reader", "Gauge"),
    ("On which day is the drill?", "Tuesday", "Thursday"),
]
BETWEEN = ["vs", "vs.", "versus", "aka", "alias", "|", "/", "\\", ">", "->", "=>", "\u00b7", "\u2026", "or"]


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize(("question", "right", "other"), PAIRS)
def test_no_separator_hides_a_second_candidate(question: str, right: str, other: str, between: str) -> None:
    assert match(question, right, right)
    assert not match(question, right, f"{right} {between} {other}")
    assert not match(question, right, f"{other} {between} {right}")


@pytest.mark.parametrize(("question", "right", "other"), PAIRS)
@pytest.mark.parametrize(
    "form",
    [
        *("{a} [{b}]", "{b} [{a}]", "{a}, {b}", "{b}, {a}", "{a}; {b}", "{a}. {b}.", "{a}\n{b}", "{a} - {b}"),
        *("{b} Zeta {a} Sigma", "{b} / Zeta / {a} / Sigma", "{b}, unlike {a}"),
    ],
)
def test_no_layout_hides_a_second_candidate(form: str, question: str, right: str, other: str) -> None:
    assert not match(question, right, form.format(a=right, b=other))


@pytest.mark.parametrize(
    ("question", "right", "answer"),
    [
        ("What color is the buoy?", "green", "green, white"),
        ("What color is the buoy?", "green", "green white red black"),
        ("What color is the buoy?", "green", "GREEN WHITE RED BLACK"),
        ("What is the state of the parcel?", "lost", "lost, returned"),
        ("Who wrote the pump report?", "Ada Moss", "Bo Hale Ada Moss"),
        ("What is the gate code?", "730415", "730415 retired; enter 730451"),
    ],
)
def test_loose_words_are_candidates(question: str, right: str, answer: str) -> None:
    assert not match(question, right, answer)


@pytest.mark.parametrize(
    ("question", "right", "answer"),
    [
        ("Where is the survey office?", "Ostend", "Ostend, Flanders"),
        ("Which town has the office?", "Ostend", "Ostend, Belgium"),
        ("Who wrote the pump report?", "Moss", "Ada Moss"),
        ("Who wrote the pump report?", "Ada Moss", "Ada Moss (Harbor Office)"),
        ("Which firm painted the quay?", "Corvane", "Corvane Ltd"),
        ("Which agency signs?", "Harbor Safety Board", "Harbor Safety Board, HSB"),
        ("What color is the buoy?", "green", "green, the old one"),
        ("What is the state of the parcel?", "lost", "lost, presumed stolen"),
        ("What is the dog called?", "Biscuit", "Biscuit, a beagle"),
        ("When is the survey?", "May 14", "May 14 (formerly May 17)"),
        ("When is the survey?", "May 14", "May 14, previously May 17"),
        ("Which firm painted the quay?", "Corvane", "Corvane [1]"),
        ("Which firm painted the quay?", "Corvane", "Corvane [see message 4411]"),
        ("Which firm painted the quay?", "Corvane", "Corvane [<4.1075@thyme.example>]"),
        ("Which firm painted the quay?", "Corvane", "Corvane [mail](https://mail.example/4)"),
    ],
)
def test_details_of_the_right_answer_are_no_rivals(question: str, right: str, answer: str) -> None:
    assert match(question, right, answer)
