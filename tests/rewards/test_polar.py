"""A yes or no and what follows it, and decisions that something lasts until a time."""

from __future__ import annotations

import pytest

from emailrl.rewards.matching import match

SIGNED = ("Has the lease of the quay been signed?", "No")
AGREED = ("Did Mara agree to the new rent?", "Yes")


@pytest.mark.parametrize(
    ("question", "reference", "answer"),
    [
        (*SIGNED, "No, it has been signed."),
        (*SIGNED, "No, it was signed on Tuesday."),
        (*SIGNED, "No. Everyone has signed the lease."),
        (*AGREED, "Yes, Mara refused the new rent."),
        (*AGREED, "Yes, she said no."),
        (*AGREED, "Yes, Mara did not agree."),
        ("Did Bo cancel the trip?", "Yes", "Yes, Bo did not cancel it."),
    ],
)
def test_its_opposite_takes_a_yes_or_no_back(question: str, reference: str, answer: str) -> None:
    assert not match(question, reference, answer)


@pytest.mark.parametrize(
    ("question", "reference", "answer"),
    [
        (*SIGNED, "No, it was not signed."),
        (*SIGNED, "No, it will be signed on Monday."),
        (*SIGNED, "No, only the draft was signed."),
        (*SIGNED, "No, some have signed."),
        (*AGREED, "Yes, she agreed."),
        (*AGREED, "Yes, but not to all of it."),
        (*AGREED, "Yes, she did not refuse."),
        ("Did Bo cancel the trip?", "Yes", "Yes, he cancelled it."),
        ("Was it signed on Friday?", "No", "No, it was signed on Monday."),
        ("Is Mara the chair?", "No, the deputy chair", "No, she is the deputy chair."),
        ("Was the boiler not repaired?", "Yes", "Yes, it was not repaired."),
    ],
)
def test_details_do_not_take_it_back(question: str, reference: str, answer: str) -> None:
    assert match(question, reference, answer)


DECIDED = ("What did the crew decide about the crane?", "to delay the repair until May")


@pytest.mark.parametrize(
    "answer",
    [
        "They decided not to delay the repair until May.",
        "They didn't decide to delay the repair until May.",
        "They will not delay the repair until May.",
        "not to delay the repair until May",
    ],
)
def test_a_denied_decision(answer: str) -> None:
    assert not match(*DECIDED, answer)
    assert match(*DECIDED, "They decided to delay the repair until May.")


@pytest.mark.parametrize("answer", ["It will not open until May 14.", "The yard won't open until May 14."])
def test_not_until_names_a_beginning(answer: str) -> None:
    assert match("When will the yard open?", "May 14", answer)
    assert match("When will the yard open?", "Not until May 14", answer)
