"""Invented personal mailboxes: their mail, questions on it, and experts that search as a strong language model would.

    python tests/gpu/personal.py write data/personal        # personal.mbox, train.jsonl, val.jsonl, test.jsonl
    emailrl gen-db --source data/personal/personal.mbox --db data/small/mail.db --append
    python tests/gpu/personal.py sft --adapter mixture --questions mixed.jsonl --db data/small/mail.db \\
        --max-steps 150 --batch-size 32 --learning-rate 4e-4       # `emailrl sft` with other experts

``personal/*.jsonl`` has a mailbox a line, of which a strong language model wrote every email and every question, each
split by other instances. Questions are in their owner's words, seldom in the email's, so experts that search for words
of the question find too few sources: for the training questions, an instance that saw the question alone wrote what it
would search for (``searches``). ``sft`` plays experts with those.
"""

from __future__ import annotations

import json
import mailbox
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from email.message import EmailMessage
from email.utils import format_datetime, formataddr, parseaddr
from pathlib import Path
from typing import Any

from emailrl.cli.app import main
from emailrl.facts.words import STOPWORDS
from emailrl.questions.load import I_DONT_KNOW, write_scenarios
from emailrl.records.trajectory import Scenario
from emailrl.sft import searching
from emailrl.sft.searching import FEWEST_RESULTS, Hit, Result, Searcher, Turns

Row = dict[str, Any]
MAILBOXES = Path(__file__).with_suffix("")
SPLITS = ("train", "val", "test")
FREE = searching.by_words


def mailboxes(split: str) -> list[Row]:
    return [json.loads(line) for line in (MAILBOXES / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()]


def message_id(box: Row, name: str) -> str:
    return f"<{name}.{box['name']}@mail.invalid>"


def messages(box: Row) -> Iterator[EmailMessage]:
    """The mailbox's emails, with their threads."""
    for mail in box["mails"]:
        made = EmailMessage()
        made["Message-ID"] = message_id(box, mail["id"])
        made["Date"] = format_datetime(datetime.fromisoformat(mail["date"]).replace(tzinfo=UTC))
        for field in ("from", "to", "cc"):
            people = mail.get(field) or []
            people = [people] if isinstance(people, str) else people
            if people:
                made[field.title()] = ", ".join(formataddr(parseaddr(person)) for person in people)
        made["Subject"] = " ".join(mail["subject"].split())
        if mail.get("in_reply_to"):
            made["In-Reply-To"] = made["References"] = message_id(box, mail["in_reply_to"])
        made.set_content(f"{mail['body']}\n")
        yield made


def scenarios(box: Row, split: str) -> list[Scenario]:
    """The mailbox's questions; further emails that state the answer are twins."""
    found = []
    for number, asked in enumerate(box["questions"]):
        sources = [message_id(box, name) for name in asked["message_ids"]]
        found.append(
            Scenario(
                id=f"own-{box['name']}-{number}",
                question=asked["question"],
                answer=asked["answer"] if sources else I_DONT_KNOW,
                message_ids=sources[:1],
                twins=sources[1:],
                how_realistic=0.9,
                inbox_address=box["address"],
                query_date=box["query_date"],
                split=split,
                kind="free" if sources else "free_absent",
                answerable=bool(sources),
            )
        )
    return found


def write(out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "personal.mbox").unlink(missing_ok=True)
    archive = mailbox.mbox(out / "personal.mbox")
    for split in SPLITS:
        boxes = mailboxes(split)
        for message in (message for box in boxes for message in messages(box)):
            archive.add(message)
        asked = [scenario for box in boxes for scenario in scenarios(box, split)]
        write_scenarios(out / f"{split}.jsonl", asked)
        emails = sum(len(box["mails"]) for box in boxes)
        print(f"{split}: {len(boxes)} mailboxes, {emails} emails, {len(asked)} questions")
    archive.close()


def by_given(searcher: Searcher) -> Turns[Result]:
    """As ``searching.by_words``, with the searches given for the question; if there are none, just that."""
    question = searcher.scenario.question
    if question not in GIVEN:
        return (yield from FREE(searcher))
    told = list(GIVEN[question])
    if searcher.rng.random() < searcher.habits.other_first:
        told[:2] = told[1::-1]
    asked = {word for word in searching._words(question) if word not in STOPWORDS}
    asked |= {word for search in told for keyword in search for word in searching._words(keyword)}
    hits, shown, ranked = dict[str, Hit](), dict[str, set[str]](), list[Hit]()
    for keywords in told:
        found = yield from searcher.search(keywords=keywords)
        for hit in found:
            hits[hit["message_id"]] = hit
            seen = asked.intersection(searching._words(searching._plain(hit)))
            shown[hit["message_id"]] = shown.get(hit["message_id"], set()) | seen
        ranked = sorted(hits.values(), key=lambda hit: -len(shown[hit["message_id"]]))
        likely = [hit for hit in ranked if hit in found] if len(found) < FEWEST_RESULTS else ranked
        if answer := (yield from searcher.first_that_answers(likely, searcher.rng.randint(1, 2))):
            return answer
    return (yield from searcher.first_that_answers(ranked, 1))


GIVEN = {
    asked["question"]: asked["searches"]
    for box in mailboxes("train")
    for asked in box["questions"]
    if "searches" in asked
}
searching.by_words = by_given  # here, so that it holds in the processes that play later passes, too

if __name__ == "__main__":
    if sys.argv[1:2] == ["write"]:
        write(Path(sys.argv[2]))
    else:
        main()
