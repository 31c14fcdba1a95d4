"""Answers made to fool the offline check, and wordings that must not matter to it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest
from rewards.tricks import HARMLESS, TRICKS, Family, Pair, build

from emailrl.rewards.matching import match

MAIL = (
    "Ola, thanks for the note on the pumps. We looked at the spare parts last week and my people tell me that the old "
    "seals leak again, so please do not order more of them before the survey is done. I spoke to our friends in the "
    "harbour office, who want us to pay for the second crane as well. {} Can you tell me by Friday whether your crew "
    "could help us with the fence, the lamps and the gate? Otherwise I will ask somebody else. I also enclose the plan "
    "of the new quay, the invoice for the paint and a few words on the budget that we discussed at lunch. Regards, Ira"
)
ASKED = [
    ("Who will repair the north pump?", "Mara Lindqvist will repair the north pump."),
    ("When is the harbour survey due?", "June 14, 2002"),
    ("How much does the second crane cost?", "The second crane costs $18,500."),
    ("Where are the spare seals kept?", "In the red shed behind the boiler house"),
    ("What did Ola say about the quay?", "Ola said the quay needs new timber before the winter storms."),
    ("Which firm delivers the paint?", "Corvane Coatings"),
    ("What is the extension of the gate office?", "30396"),
    ("Why was the fence moved?", "Because the lorries could not turn at the old gate."),
]


def paired(asked: Sequence[tuple[str, str]], mails: Sequence[str]) -> list[Pair]:
    """Every question with four other questions' answers."""
    pairs = []
    for at, ((question, answer), mail) in enumerate(zip(asked, mails, strict=True)):
        others = [other for _, other in Random(at).sample(asked, min(9, len(asked))) if other != answer][:4]
        pairs.append(Pair(question, answer, others, mail, f"<{at}9157.1075@thyme.example>"))
    return pairs


INVENTED = paired(ASKED, [MAIL.format(answer) for _, answer in ASKED])


def share_accepted(family: Family, pairs: Sequence[Pair]) -> float:
    verdicts = [match(pair.question, pair.answer, answer) for pair, answer in build(family, pairs)]
    return sum(verdicts) / len(verdicts) if verdicts else float("nan")


@pytest.mark.parametrize("name", TRICKS)
def test_a_trick_does_not_pay(name: str) -> None:
    fooled = [answer for pair, answer in build(TRICKS[name], INVENTED) if match(pair.question, pair.answer, answer)]
    assert fooled == []


@pytest.mark.parametrize("name", HARMLESS)
def test_wording_does_not_matter(name: str) -> None:
    refused = [a for pair, a in build(HARMLESS[name], INVENTED) if not match(pair.question, pair.answer, a)]
    assert refused == []


@pytest.fixture(scope="module")
def art_e(shared_data: Path, enron_db: Path) -> list[Pair]:
    rows = [json.loads(line) for line in (shared_data / "enron" / "art_e_questions.jsonl").read_text().splitlines()]
    connection = sqlite3.connect(enron_db)
    query = "SELECT body FROM emails WHERE message_id = ?"
    mails = [(connection.execute(query, row["message_ids"][:1]).fetchone() or ("",))[0] for row in rows]
    return paired([(row["question"], row["answer"]) for row in rows], mails)


@pytest.mark.slow
def test_tricks_and_wordings_over_art_e(art_e: list[Pair]) -> None:
    assert len(art_e) == 859
    paying = {name: share for name, family in TRICKS.items() if (share := share_accepted(family, art_e)) > 0.05}
    costly = {name: share for name, family in HARMLESS.items() if (share := share_accepted(family, art_e)) < 0.95}
    assert (paying, costly) == ({}, {})


@pytest.mark.slow
def test_no_excerpt_of_real_mail_raises(enron_db: Path) -> None:
    """Answers, references and questions out of 100,000 random places in real mails; the same verdict twice."""
    bodies = [body for (body,) in sqlite3.connect(enron_db).execute("SELECT body FROM emails ORDER BY id") if body]
    rng = Random(11)

    def excerpt(longest: int) -> str:
        body = rng.choice(bodies)
        start = rng.randrange(len(body))
        return body[start : start + rng.randint(1, longest)]

    for number in range(34_000):
        question, reference, answer = excerpt(80), excerpt(120), excerpt(300)
        kind = rng.choice([None, "date", "person", "subject", "amount", "nonsense"])
        verdict = match(question, reference, answer, kind=kind)
        assert verdict in (True, False)
        if number % 50 == 0:
            assert match(question, reference, answer, kind=kind) is verdict
