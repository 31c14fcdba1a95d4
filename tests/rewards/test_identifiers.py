"""Codes and file names are compared character by character."""

from __future__ import annotations

import pytest

from emailrl.rewards.matching import match

DEAL = ("What is the deal number of the quay sale?", "TW5520.7")
FILE = ("Which file holds the quay plan?", "quay_plan_v2.xls")


@pytest.mark.parametrize(
    "answer", ["TW5520.7", "tw5520.7", "Deal no. TW5520.7", "deal No. TW5520.7.", "The sale has the number TW5520.7."]
)
def test_a_code_with_a_dot_in_any_sentence(answer: str) -> None:
    assert match(*DEAL, answer)


@pytest.mark.parametrize("answer", ["TW5502.7", "TW5520.9", "TW9999.7", "QQ5520.7", "TW5520", "55.20.7", "TW5520.71"])
def test_another_code_with_a_dot(answer: str) -> None:
    assert not match(*DEAL, answer)


def test_an_abbreviated_number_is_no_denial() -> None:
    assert match("What is the deal number of the sale?", "MK77130", "Deal no. MK77130")
    assert not match("Was the sale closed?", "Yes", "They said no. MK77130 is open.")


@pytest.mark.parametrize("answer", ["quay_plan_v2.xls", "Quay_Plan_v2.XLS", "quay_plan_v2", "It is quay plan v2.xls."])
def test_a_file_name(answer: str) -> None:
    assert match(*FILE, answer)


@pytest.mark.parametrize("answer", ["quay_v2_plan.xls", "plan_quay_v2.xls", "quay_plan_v3.xls", "quay_plan_v2.doc"])
def test_another_file_name(answer: str) -> None:
    assert not match(*FILE, answer)
