"""Names: which capitalised words make one, and when two words of names are the same."""

from __future__ import annotations

import pytest
from facts.tables import CASES

from emailrl.facts.names import find_names, name_of, same_token, word_before
from emailrl.facts.reading import read


@pytest.mark.parametrize(("text", "names"), CASES["test_names"])
def test_names(text: str, names: list[list[str]]) -> None:
    assert [[*name.tokens] for name in find_names(read(text))] == names


def test_a_name_stands_where_it_is_written() -> None:
    (name,) = find_names(read("we met Ada Moss there"))
    assert (name.start, name.end) == (7, 15)


@pytest.mark.parametrize(("one", "other", "is_same"), CASES["test_the_same_word_of_a_name"])
def test_the_same_word_of_a_name(one: str, other: str, is_same: bool) -> None:
    assert same_token(one, other) is is_same


@pytest.mark.parametrize(
    ("text", "position", "word"),
    [
        ("paid By  Ada", 9, "by"),
        ("Ada", 0, ""),
        ("from Ada", 5, "from"),
        ("from", 4, ""),  # the word has not ended
        ("(by) Ada", 5, "by"),
        ("one two Ada", 8, "two"),
        ("by" + 28 * " " + "Ada", 30, "by"),
        ("by" + 29 * " " + "Ada", 31, "y"),  # looks back over 30 characters
    ],
)
def test_the_word_before(text: str, position: int, word: str) -> None:
    assert word_before(text, position) == word


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("sara.shackleton@enron.com", "Sara Shackleton"),
        ("sara_b.shackleton@enron.com", "Sara Shackleton"),
        ("mary-ann.o'neil@x.org", "Mary-Ann O'neil"),
        ("s.shackleton@enron.com", None),
        ("sara@enron.com", None),
        ("a.b.c.d@enron.com", None),
        ("sara.2@enron.com", None),
        ("sales.team@enron.com", None),
        ("mike.enron@enron.com", None),
        ("nobody", None),
    ],
)
def test_the_name_in_an_address(address: str, name: str | None) -> None:
    assert name_of(address) == name
