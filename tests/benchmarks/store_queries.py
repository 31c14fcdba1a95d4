"""Searches as agents make them, for benchmarks: words of questions and common words, in large and small inboxes."""

from __future__ import annotations

import json
import random
import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

COMMON = (["the"], ["enron"], ["gas"], ["the", "enron"], ["the", "gas"], ["enron", "gas"], ["of the"])
SIZES = {"large": (2_000, 10**9), "middle": (200, 2_000), "small": (10, 200)}
"""Mails in an inbox, from and below."""
_YEARS = 2


@dataclass(frozen=True)
class Query:
    """One search with its inbox and dates."""

    inbox: str
    keywords: list[str]
    sent_after: str
    sent_before: str


def of_questions(questions: Path, number: int, rng: random.Random) -> list[Query]:
    """One to three words of a question, in its inbox, in the two years before its date."""
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    queries = []
    for _ in range(number):
        row = rng.choice(rows)
        words = re.findall(r"\w{3,}", row["question"])
        keywords = rng.sample(words, min(len(words), rng.randint(1, 3)))
        queries.append(Query(row["inbox_address"].lower(), keywords, *_years_before(row["query_date"][:10])))
    return queries


def elsewhere(queries: list[Query], inboxes: list[str], rng: random.Random) -> list[Query]:
    """The same words and dates in other inboxes."""
    return [Query(rng.choice(inboxes), query.keywords, query.sent_after, query.sent_before) for query in queries]


def common(queries: list[Query], inboxes: list[str], rng: random.Random) -> list[Query]:
    """Common words and pairs of them, with the dates of ``queries``."""
    return [
        Query(rng.choice(inboxes), COMMON[number % len(COMMON)], query.sent_after, query.sent_before)
        for number, query in enumerate(queries)
    ]


def inboxes_by_size(db: Path) -> dict[str, list[str]]:
    """The addresses of a database in those classes of ``SIZES`` that it has any for."""
    with closing(sqlite3.connect(f"file:{db}?mode=ro", uri=True)) as connection:
        counts = connection.execute(
            "SELECT address, count(*) FROM (SELECT from_address AS address, id FROM emails WHERE from_address <> '' "
            "UNION SELECT recipient_address, email_id FROM recipients) GROUP BY address ORDER BY address"
        ).fetchall()
    found = {size: [name for name, mails in counts if low <= mails < high] for size, (low, high) in SIZES.items()}
    return {size: addresses for size, addresses in found.items() if addresses}


def _years_before(day: str) -> tuple[str, str]:
    return f"{int(day[:4]) - _YEARS}{day[4:8]}01", day
