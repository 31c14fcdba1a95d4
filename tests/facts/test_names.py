"""Names: which capitalised words make one, and when two words of names are the same."""

from __future__ import annotations

import pytest

from emailrl.facts.names import find_names, name_of, same_token, word_before
from emailrl.facts.reading import read


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("we met Ada Moss there", [("ada", "moss")]),
        ("we met Ludwig van der Berg there", [("ludwig", "berg")]),
        ("ask Dr Ada or Vice President Bo Hale", [("dr", "ada"), ("bo", "hale")]),
        ("we met Ada Moss's cousin", [("ada", "moss")]),
        ("we met J. P. Moss there", [("j", "p", "moss")]),
        ("we met J. there", []),  # a letter alone names nobody
        ("we met Jo there", [("jo",)]),
        ("ask the Manager of I", []),
        ("we went to Winston-Salem", [("winston", "salem")]),
        ("MOSS WILL PAY Bo", []),  # more than seven of ten letters are capitals
        ("MOSs", []),
        ("mos MOSSABE", [("mossabe",)]),  # seven of ten
        ("mos MOSSABEL", []),
        ("Ada will pay", [("ada",)]),
        ("Delay it", []),
        ("Delayed, it came", []),  # a verb's form is no subject
        ("We paid. Bo was glad", [("bo",)]),
        ("We paid. Call now", []),
        ("We paid - Call now", []),
        ("we paid (Call now)", []),
        ("(Call now)", []),
        ("so Delay it", [("delay",)]),  # a capital within a sentence
        ("/Delay it", [("delay",)]),
        ("Ada", [("ada",)]),
        ("Red called", []),  # ends like a participle
        ("Ada stopped", [("ada",)]),
        ("Ada Moss delay it", [("ada", "moss")]),
        ("Our bank pays", []),
        ("1200 and May 3", []),
        ("", []),
    ],
)
def test_names(text: str, names: list[tuple[str, ...]]) -> None:
    assert [name.tokens for name in find_names(read(text))] == names


def test_a_name_stands_where_it_is_written() -> None:
    (name,) = find_names(read("we met Ada Moss there"))
    assert (name.start, name.end) == (7, 15)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("moss", "moss", True),
        ("a", "ada", True),
        ("ada", "a", True),
        ("a", "bo", False),
        ("moss", "m", True),
        ("s", "moss", False),
        ("moss", "s", False),
        ("b", "ab", False),
        ("ab", "abe", False),  # two letters are no initial
        ("marseille", "marseilles", True),
        ("marseilles", "marseille", True),
        ("marsei", "marseix", True),
        ("mocab", "mocabo", False),  # five letters are too few for one more
        ("marseix", "marseiyy", False),
        ("marseill", "marseillxy", False),
        ("xmarsei", "marsei", False),
        ("bill", "william", True),
        ("bill", "bob", False),
        ("moss", "hale", False),
    ],
)
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
