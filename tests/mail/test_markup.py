"""HTML mail as text: what is seen, a line a block; hostile markup takes no huge time."""

from __future__ import annotations

import pytest
from hang import must_end
from hypothesis import given, settings
from hypothesis import strategies as st
from mail.mails import TABLES

from emailrl.mail.sources.text import MAX_CHARS, flowed_to_text, html_to_text


@pytest.mark.parametrize(("html", "text"), TABLES["test_visible_text"])
def test_visible_text(html: str, text: str) -> None:
    defects: list[str] = []
    assert (html_to_text(html, defects), defects) == (text, [])


WHOLE = ["<p>", "<div>x", "<td>", "</p>"]
OPEN = ["<!--", "<a ", "<a href='", "<![CDATA[", "<script>", "<style><", "&#", "<?"]
CASES = [(piece, 200_000, "") for piece in WHOLE] + [(p, 700_000, end) for p in OPEN for end in ("", "\"'>-->]]>")]


@pytest.mark.parametrize(("piece", "length", "end"), CASES)
def test_hostile_markup_takes_no_huge_time(piece: str, length: int, end: str) -> None:
    defects: list[str] = []
    with must_end():
        text = html_to_text(piece * (length // len(piece)) + end, defects)
    assert len(text) <= MAX_CHARS and ("long_text" in defects) == (length > MAX_CHARS)


def test_much_hidden_text_and_one_long_flowed_paragraph_take_no_huge_time() -> None:
    for html in ("<p style='display:none'>" * 20_000, "<i>x</i><b style='display:none'>y</b>" * 13_000):
        with must_end():
            assert "y" not in html_to_text(html, [])
    with must_end():
        assert flowed_to_text("a \n" * 1_000_000, delete_spaces=False) == "a " * 1_000_000 + "\n"


SIGNS = ["<", ">", "!", "[", "]", "--", "p", " ", "a=", '"', "'", "&", ";", "/", "script", "?", "\n", "x"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(SIGNS)))
def test_any_markup_gives_text(pieces: list[str]) -> None:
    assert isinstance(html_to_text("".join(pieces), []), str)
