"""Which of a model's questions are kept: nothing it says is believed that the database does not bear out.

A reply may be wrong, or written by whoever wrote a mail in the prompt. So an item becomes a question only if its ids
name mails of its own prompt, its answer stands in those mails, and its text is plain printable text. What cannot be
checked is whether the mailbox holds another answer as well; the template questions can prove that, these cannot.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from random import Random
from typing import Any

from emailrl.scenarios.inbox.mailbox import MAX_DAYS_LATER, Mail, spell_day
from emailrl.scenarios.llm.prompts import Batch
from emailrl.trajectory import Scenario

MAX_QUESTION_CHARS = 400
MAX_ANSWER_CHARS = 300
MIN_FOUND = 0.5
"""Share of an answer's words that its mails must hold; of its numbers they must hold all."""

_NUMBER_WORDS = {
    "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
    "eight": "8", "nine": "9", "ten": "10", "eleven": "11", "twelve": "12",
}  # fmt: skip
_MONTH = re.compile(
    r"jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?"
)


def check_item(
    item: Any, batch: Batch, *, is_stored: Callable[[str], bool], seed: int, dropped: Counter[str]
) -> Scenario | None:
    """The question that an item of a reply makes, or None with the reason counted in ``dropped``.

    ``is_stored`` says whether the database holds a message id. Reasons: ``malformed``, ``confabulated_id`` (counted
    once an id; the item goes on with its other ids), ``no_source`` (all its ids were confabulated), ``outside_prompt``
    (an id of a mail that was not shown), ``yes_or_no``, ``answer_in_question``, ``answer_not_found``.
    """
    fields = _fields(item)
    if fields is None:
        dropped["malformed"] += 1
        return None
    question, answer, named, realistic = fields
    sources, strangers = _sources(named, batch)
    confabulated = [stranger for stranger in strangers if not is_stored(stranger)]
    if confabulated:
        dropped["confabulated_id"] += len(confabulated)
    reason = _objection(question, answer, sources, len(strangers) > len(confabulated))
    if reason:
        dropped[reason] += 1
        return None
    ids = sorted(mail.message_id for mail in sources)
    identity = hashlib.sha256("\0".join((batch.inbox, question, *ids)).encode()).hexdigest()
    return Scenario(
        id=f"llm-{identity[:12]}",
        question=question,
        answer=answer,
        message_ids=ids,
        inbox_address=batch.inbox,
        query_date=_ask_day(batch, seed),
        how_realistic=realistic,
        split=batch.split,
        kind="llm",
    )


def is_stated(answer: str, mails: list[Mail]) -> bool:
    """Whether mails hold every number of an answer and at least half of its words; an answer of neither is in none."""
    numbers, words = _tokens(answer)
    text = "\n".join(_text(mail) for mail in mails)
    if words and _plain(answer) in _plain(text):  # also where words are not set apart by spaces
        return True
    known_numbers, known_words = _tokens(text)
    if not numbers <= known_numbers:
        return False
    telling = {word for word in words if len(word) > 3} or (set() if numbers else {w for w in words if len(w) > 1})
    if not telling:
        return bool(numbers)
    stems = {_stem(word) for word in known_words}
    return sum(_stem(word) in stems for word in telling) >= MIN_FOUND * len(telling)


def _stem(word: str) -> str:
    """The beginning of a word, which its other forms share; of a month's name, what its abbreviation keeps of it."""
    return word[:3] if _MONTH.fullmatch(word) else word[:5]


def _fields(item: Any) -> tuple[str, str, list[str], float] | None:
    """Question, answer, ids and realism of an item, or None where one of them is missing or of the wrong kind."""
    if not isinstance(item, dict):
        return None
    question, answer = _line(item.get("question"), MAX_QUESTION_CHARS), _line(item.get("answer"), MAX_ANSWER_CHARS)
    ids = item.get("message_ids")
    ids = [ids] if isinstance(ids, str) else ids
    realistic = item.get("how_realistic")
    if isinstance(realistic, bool) or not isinstance(realistic, int | float) or not 0 <= realistic <= 1:
        return None
    if question is None or answer is None or not isinstance(ids, list) or not ids:
        return None
    if not all(isinstance(message_id, str) and message_id.isprintable() for message_id in ids):
        return None
    return question, answer, ids, float(realistic)


def _line(value: Any, most: int) -> str | None:
    """Text on one line; None for anything else, and for characters that are not to be printed."""
    line = " ".join(value.split()) if isinstance(value, str) else ""
    return line if line and len(line) <= most and line.isprintable() else None


def _sources(named: list[str], batch: Batch) -> tuple[list[Mail], list[str]]:
    """The batch's mails that ids name, with or without their brackets, and the ids that name none of them."""
    shown = {mail.message_id.strip("<> "): mail for mail in batch.mails}
    bare = dict.fromkeys(message_id.strip("<> ") for message_id in named)
    sources = [shown[name] for name in bare if name in shown]
    strangers = [message_id.strip() for message_id in named if message_id.strip("<> ") not in shown]
    return sources, list(dict.fromkeys(strangers))


def _objection(question: str, answer: str, sources: list[Mail], names_others: bool) -> str | None:
    if names_others:
        return "outside_prompt"
    if not sources:
        return "no_source"
    if re.match(r"(?:yes|no)\b(?!\.?\s*\d)", answer, re.IGNORECASE):
        return "yes_or_no"
    if f" {_plain(answer)} " in f" {_plain(question)} ":
        return "answer_in_question"
    return None if is_stated(answer, sources) else "answer_not_found"


def _ask_day(batch: Batch, seed: int) -> str:
    """A day soon after the newest mail of the batch, so that all of it can be seen."""
    newest = batch.mails[-1]
    later = Random(f"{seed}/{batch.inbox}/{newest.message_id}").randint(1, MAX_DAYS_LATER)
    return (newest.day + timedelta(days=later)).isoformat()


def _text(mail: Mail) -> str:
    """Everything a mail says, its date in words included."""
    day = f"{mail.day:%A} {spell_day(mail.day)} {mail.day.month}/{mail.day.day} {mail.sent_at}"
    return "\n".join((mail.subject, mail.body, day, mail.sender, *mail.to, *mail.cc, *mail.bcc))


def _tokens(text: str) -> tuple[set[str], set[str]]:
    """The numbers (no thousands separators, no leading zeros, 3:00 as 3) and the words of a text."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text.lower())
    text = re.sub(r"(?<=\d)[:.]00\b", "", text)
    numbers = {found.lstrip("0") or "0" for found in re.findall(r"\d+", text)}
    words = set(re.findall(r"[^\W\d_]+", text))
    return numbers | {_NUMBER_WORDS[word] for word in words & _NUMBER_WORDS.keys()}, words - _NUMBER_WORDS.keys()


def _plain(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))
