"""Snippets of long emails: FTS5's own where that is fast, otherwise an excerpt, always in linear time."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mail.mails import rows

from emailrl.mail import SearchHit, open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.snippets import LONGEST_SNIPPET, excerpt, has_few_matches, short_text
from emailrl.settings import StoreSettings

ANY_LENGTH = StoreSettings(max_body_chars=0)


@pytest.fixture
def search(tmp_path: Path, email: Any) -> Callable[..., tuple[SearchHit, float]]:
    """Searches a mailbox of one email with that body; returns the hit and the processor seconds it took."""

    def search(body: str, *keywords: str, order: Any = "newest") -> tuple[SearchHit, float]:
        build_database([email(1, subject="s", body=body)], tmp_path / "mail.db", overwrite=True, settings=ANY_LENGTH)
        box = open_mailbox(tmp_path / "mail.db", "ann@x.org", order=order)
        began = time.process_time()
        (hit,) = box.search(list(keywords))
        return hit, time.process_time() - began

    return search


@pytest.mark.parametrize("order", ["newest", "relevance"])
@pytest.mark.parametrize(
    ("piece", "keywords", "shown"),
    [
        ("gas ", ("gas",), " ... " + " ".join(["<b>gas</b>"] * 15) + " ... "),
        ("gas budget ", ("budget", "gas"), " ... " + "<b>gas</b> <b>budget</b> " * 7 + "<b>gas</b> ... "),
        ("gas budget ", ("gas budget",), " ... " + "<b>gas budget</b> " * 7 + "<b>gas</b> ... "),
        ("gäs. ", ("gas",) * 32, " ... " + ". ".join(["<b>gäs</b>"] * 15) + " ... "),
        ("多 ", ("多",), " ... " + " ".join(["<b>多</b>"] * 15) + " ... "),
    ],
    ids=["one word", "two words", "phrase", "sentences", "multibyte"],
)
def test_a_megabyte_of_matches_takes_a_moment(
    search: Any, piece: str, keywords: tuple[str, ...], shown: str, order: str
) -> None:
    hit, seconds = search(piece * (1_000_000 // len(piece)), *keywords, order=order)
    assert hit.snippet == shown
    assert seconds < 5, "FTS5's snippet() takes minutes"


def test_a_snippet_is_short_even_if_its_words_are_not(search: Any) -> None:
    for body in ("gas " + "y" * 1_000_000 + " end", "gas" + "!" * 1_000_000 + "end"):
        hit, _ = search(body, "gas")
        assert hit.snippet.startswith(" ... <b>gas</b>") and len(hit.snippet) <= LONGEST_SNIPPET


@pytest.mark.parametrize("keywords", [("gas",), ("gas", "price"), ("gas price",), ("GÁS",)], ids=" ".join)
def test_a_long_email_with_few_matches_has_fts5_s_snippet(search: Any, tmp_path: Path, keywords: tuple[str]) -> None:
    body = "Some of the other words. " * 20_000 + "At last the gas price is known. " + "And more. " * 20_000
    hit, _ = search(body, *keywords)
    query = "SELECT snippet(emails_fts, -1, '<b>', '</b>', ' ... ', 15) FROM emails_fts WHERE emails_fts MATCH ?"
    match = " AND ".join(f'"{keyword}"' for keyword in keywords)
    assert rows(tmp_path / "mail.db", query, match) == [(hit.snippet,)]
    assert "At last the <b>gas" in hit.snippet


def test_matches_are_counted_up_to_two_thousand() -> None:
    assert has_few_matches("gas " * 2000, ["gas"]) and not has_few_matches("gas " * 2001, ["gas"])
    assert has_few_matches("gas " * 1000, ["gas", "Gás"]) and not has_few_matches("gas " * 1001, ["gas", "Gás"])
    assert has_few_matches("a gas " * 2000 + "a " * 9000, ["a gas"]), "a phrase is as rare as its rarest word"
    assert has_few_matches("gas " * 2000, ["gas", "budget", "!!!"])
    assert short_text(["gas"]) == 8000  # 2,000 matches of three letters and a space
    assert short_text(["gas", "Gas"]) == 4000 and short_text(["gas", "the pay"]) == 8000  # a word matches one of two
    assert short_text(["the gas", "é", "É", "!!!"]) == 2000  # a letter and a space, twice
    body = "a. " * 1_000_000  # sentences count too
    assert has_few_matches(body + "gas " * 300, ["gas"]) and not has_few_matches(body + "gas " * 400, ["gas"])


def test_an_excerpt_is_the_part_that_holds_most_keywords() -> None:
    body = "gas " + "x " * 1000 + "the gas budget of May " + "x " * 1000
    assert " <b>gas</b> <b>budget</b> of May x" in excerpt("s", body, ["gas", "budget", "!!!"])
    # Without a match, it is how the email begins.
    assert excerpt("Gas", "one two\n" * 20, ["gas"]) == "Gas ... " + "one two " * 7 + "one ..."
