"""Terminal neutralisation, character by character."""

from __future__ import annotations

import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from emailrl.base.plain import counted, plain, plain_line


def test_escape_sequences_and_controls_become_visible() -> None:
    assert plain("a\x1b[31mred\x1b[0m") == "a␛[31mred␛[0m"
    assert plain("bell\x07 back\x08 del\x7f nul\x00") == "bell␇ back␈ del␡ nul␀"
    assert plain("c1\x9b31m") == "c1<U+009B>31m"


def test_carriage_return_cannot_overwrite_a_line() -> None:
    assert plain("paid\rdue") == "paid␍due"
    assert plain("one\r\ntwo\nthree") == "one\ntwo\nthree"


def test_bidi_zero_width_and_separators_are_named() -> None:
    assert plain("abc\u202edef\u2066x\u2069") == "abc<U+202E>def<U+2066>x<U+2069>"
    assert plain("a\u200bb\ufeffc\u2028d") == "a<U+200B>b<U+FEFF>c<U+2028>d"
    assert plain("\U000e0041") == "<U+E0041>"
    assert plain("\ud800") == "<U+D800>"


def test_ordinary_text_stays() -> None:
    ordinary = "naïve café, 東京, [bold]not markup[/bold], 100 €"
    assert plain(ordinary) == ordinary
    assert plain("a\tb") == "a\tb"
    assert plain_line("a\nb\tc") == "a⏎b\tc"


@given(st.text())
def test_nothing_a_terminal_acts_on_survives(text: str) -> None:
    left = plain(text).replace("\n", "").replace("\t", "")
    assert all(unicodedata.category(character) not in {"Cc", "Cf", "Cs"} for character in left)
    assert plain(plain(text)) == plain(text)


def test_one_has_no_s() -> None:
    assert [counted(number, "step") for number in (0, 1, 1589)] == ["0 steps", "1 step", "1,589 steps"]
    assert [counted(number, "inbox") for number in (1, 2)] == ["1 inbox", "2 inboxes"]
    assert [counted(number, "trajectory") for number in (1, 2)] == ["1 trajectory", "2 trajectories"]
