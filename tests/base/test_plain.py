"""Terminal neutralisation, character by character."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emailrl.base.plain import counted, plain, plain_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\x1b[31mred\x1b[0m", "a␛[31mred␛[0m"), ("bell\x07 back\x08 del\x7f nul\x00", "bell␇ back␈ del␡ nul␀"),
        ("c1\x9b31m", "c1<U+009B>31m"),
        ("paid\rdue", "paid␍due"), ("one\r\ntwo\nthree", "one\ntwo\nthree"),  # cannot overwrite a line
        ("abc\u202edef\u2066x\u2069", "abc<U+202E>def<U+2066>x<U+2069>"),
        ("a\u200bb\ufeffc\u2028d", "a<U+200B>b<U+FEFF>c<U+2028>d"), ("\U000e0041", "<U+E0041>"), ("\ud800", "<U+D800>"),
        *((text, text) for text in ("naïve café, 東京, [bold]not markup[/bold], 100 €", "a\tb")),
    ],
)  # fmt: skip
def test_what_a_terminal_acts_on_becomes_visible(text: str, shown: str) -> None:
    assert plain(text) == shown
    assert plain_line(text) == shown.replace("\n", "⏎")


@given(st.text())
def test_nothing_a_terminal_acts_on_survives(text: str) -> None:
    left = plain(text).replace("\n", "").replace("\t", "")
    assert all(unicodedata.category(character) not in {"Cc", "Cf", "Cs"} for character in left)
    assert plain(plain(text)) == plain(text)


def test_one_has_no_s() -> None:
    assert [counted(number, "step") for number in (0, 1, 1589)] == ["0 steps", "1 step", "1,589 steps"]
    assert [counted(number, "inbox") for number in (1, 2)] == ["1 inbox", "2 inboxes"]
    assert [counted(number, "trajectory") for number in (1, 2)] == ["1 trajectory", "2 trajectories"]
