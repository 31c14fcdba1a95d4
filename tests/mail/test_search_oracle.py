"""Searches on the demo mailbox against a plain-Python search of the same mails: exactly the same hits, newest first."""

from __future__ import annotations

import re
import unicodedata
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from emailrl.mail import open_mailbox
from emailrl.mail.build import build_database
from emailrl.mail.demo import make_world
from emailrl.mail.sources import RawEmail

WORLDS = [make_world(7, "train", number) for number in range(3)]
EMAILS = [mail for world in WORLDS for mail in world.emails]
OWNERS = [world.inbox for world in WORLDS]
PEOPLE = sorted({person for mail in EMAILS for person in (mail.from_address, *mail.to, *mail.cc, *mail.bcc)})
DAYS = sorted({f"{mail.date:%Y-%m-%d}" for mail in EMAILS})


def words(text: str) -> list[str]:
    """As FTS5's unicode61 tokenizer: runs of letters and digits, folded, without diacritics."""
    plain = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return re.findall(r"[^\W_]+", plain.lower())


INDEX = {mail.message_id: (words(mail.subject), words(mail.body)) for mail in EMAILS}
VOCABULARY = sorted({word for texts in INDEX.values() for text in texts for word in text})
PHRASES = sorted({f"{one} {two}" for texts in INDEX.values() for text in texts for one, two in pairwise(text)})


def holds(text: list[str], keyword: str) -> bool:
    phrase = words(keyword)
    return any(text[n : n + len(phrase)] == phrase for n in range(len(text) - len(phrase) + 1))


def oracle(
    inbox: str, keywords: list[str], sender: str | None = None, recipient: str | None = None, after: str | None = None,
    before: str | None = None,
) -> list[str]:  # fmt: skip
    def matches(mail: RawEmail) -> bool:
        day = f"{mail.date:%Y-%m-%d}"
        received = (*mail.to, *mail.cc, *mail.bcc)
        return (
            inbox in (mail.from_address, *received)
            and all(any(holds(text, keyword) for text in INDEX[mail.message_id]) for keyword in keywords)
            and sender in (None, mail.from_address)
            and (recipient is None or recipient in received)
            and (after or "") <= day < (before or "~")
        )

    found = [mail for mail in EMAILS if matches(mail)]
    return [mail.message_id for mail in sorted(found, key=lambda m: (str(m.date), m.message_id), reverse=True)]


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("oracle") / "demo.db"
    assert build_database(iter(EMAILS), path).emails == len(EMAILS)
    return path


KEYWORDS = st.lists(
    st.one_of(st.sampled_from(VOCABULARY), st.sampled_from(VOCABULARY).map(str.upper), st.sampled_from(PHRASES)),
    max_size=3,
)  # fmt: skip
ANYONE = st.one_of(st.none(), st.sampled_from(PEOPLE))
ANY_DAY = st.one_of(st.none(), st.sampled_from(DAYS))


@settings(max_examples=250, deadline=None)
@given(
    keywords=KEYWORDS, inbox=st.sampled_from(OWNERS + PEOPLE), filters=st.tuples(ANYONE, ANYONE, ANY_DAY, ANY_DAY),
    limit=st.integers(1, 10),
)  # fmt: skip
def test_the_hits_are_those_of_a_plain_search(
    db: Path, keywords: list[str], inbox: str, filters: tuple[str | None, ...], limit: int
) -> None:
    assume(keywords or any(filters))
    hits = open_mailbox(db, inbox, names=False).search(keywords, *filters, max_results=limit)
    assert [hit.message_id for hit in hits] == oracle(inbox, keywords, *filters)[:limit]
