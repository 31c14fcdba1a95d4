"""Cleaning and stems."""

from __future__ import annotations

import pytest

from emailrl.facts.words import clean, has_word, says_something, stem


@pytest.mark.parametrize(
    "forms", ["postpone postponed postpones postponing", "finish finished finishes", "study studies"]
)
def test_forms_of_a_word_have_one_stem(forms: str) -> None:
    assert len({stem(form) for form in forms.split()}) == 1


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("\u201cIt\u2019s **done**\u201d", "It's done"),
        ("Szczepa\u0144ski", "Szczepanski"),
        ("1. first\n2) second", "first\nsecond"),
        ("- first\n\u2022 second", "first\nsecond"),
        ("82. The rest is unknown", "82. The rest is unknown"),
        ("Washington, D. C. and P.V. Rao", "Washington, DC. and PV. Rao"),
        ("Dr. Moss, Mr Hale", "Moss, Hale"),
        ("a\u00a0b\t c", "a b c"),
        ("\ue000x\u200b", "x"),
    ],
)
def test_one_spelling(text: str, cleaned: str) -> None:
    assert clean(text) == cleaned


def test_a_longer_form_is_the_same_word() -> None:
    assert has_word("meeting", {"meeting"}) and has_word("volatil", {"volatility"})
    assert not has_word("gas", {"gasoline"}) and not has_word("tariff", {"target"})


def test_grammar_says_nothing() -> None:
    assert not says_something("The") and not says_something("wouldn't")
    assert says_something("Tariff")
