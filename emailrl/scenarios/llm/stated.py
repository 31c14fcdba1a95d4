"""Whether mails state an answer, and whether it says enough that they could not have stated it by chance."""

from __future__ import annotations

import re
from typing import Final

from emailrl.scenarios.inbox.mailbox import Mail, spell_day

MIN_FOUND: Final = 0.5
"""Share of an answer's words that its mails must hold; of its numbers they must hold all."""

_NUMBER_WORDS: Final = {
    "zero": "0", "one": "1", "two": "2", "three": "3", "four": "4", "five": "5", "six": "6", "seven": "7",
    "eight": "8", "nine": "9", "ten": "10", "eleven": "11", "twelve": "12",
}  # fmt: skip
_MONTH: Final = re.compile(
    r"jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?"
)
_WEEKDAY: Final = re.compile(r"(?:mon|tues?|wed(?:nes)?|thu(?:rs?)?|fri|sat(?:ur)?|sun)(?:day)?")
_WORD: Final = re.compile(r"[^\W\d_]+")
_COMMON: Final = frozenset(
    re.findall(
        r"\w+",
        "a about after all also am an and any are as asap at be because been before being best both but by can could "
        "day days did do does doing done during each either else email emails ever every few first for from further "
        "get give go going good got had has have having he hello her here hers hi him his how however i if in into is "
        "it its just know last later let like look mail mails make many me meeting message more most much must my "
        "need new next no none not nothing now of off ok on once only or other our ours out over own people person "
        "please question questions re regards same see send sent several shall she should since so some something "
        "soon such sure take than thank thanks that the their theirs them then there these they thing things this "
        "those though through time to today tomorrow too under until up upon us very via want was way we week well "
        "were what when where which while who whom why will with within without work would year yes yesterday yet you "
        "your yours",
    )
)
"""Words that nearly every mail holds, so that finding one shows nothing."""


def is_stated(answer: str, mails: list[Mail]) -> bool:
    """Whether mails hold every number of an answer and at least half of its words; an answer of neither is in none."""
    numbers, words = _tokens(answer)
    text = "\n".join(_text(mail) for mail in mails)
    if words and plain(answer) in plain(text):  # also where words are not set apart by spaces
        return True
    known_numbers, known_words = _tokens(text)
    if not numbers <= known_numbers:
        return False
    telling = {word for word in words if len(word) > 3} or (set() if numbers else {w for w in words if len(w) > 1})
    if not telling:
        return bool(numbers)
    stems = {_stem(word) for word in known_words}
    return sum(_stem(word) in stems for word in telling) >= MIN_FOUND * len(telling)


def is_specific(answer: str, mails: list[Mail]) -> bool:
    """Whether an answer holds a number, a month or weekday, a name, or two words of meaning.

    Of a number of one digit alone, every mail's date holds one. A name is a word that the mails never write in lower
    case, or part of an address of theirs; where a script has no lower case, any word may be one.
    """
    numbers, words = _tokens(answer)
    telling = {word for word in words if len(word) > 1 and word not in _COMMON}
    if len(telling) > 1 or (telling and numbers) or any(len(number) > 1 for number in numbers):
        return True
    names = _names(mails)
    return any(
        word in names or word.upper() == word or _MONTH.fullmatch(word) or _WEEKDAY.fullmatch(word) for word in telling
    )


def plain(text: str) -> str:
    """A text's words and numbers alone, in lower case."""
    return " ".join(re.findall(r"\w+", text.lower()))


def _names(mails: list[Mail]) -> set[str]:
    written = {word for mail in mails for word in _WORD.findall(f"{mail.subject}\n{mail.body}")}
    addresses = {word for mail in mails for address in mail.addresses for word in _WORD.findall(address.lower())}
    return {word.lower() for word in written if not word.islower()} - written | addresses


def _stem(word: str) -> str:
    """The beginning of a word, which its other forms share; of a month's name, what its abbreviation keeps of it."""
    return word[:3] if _MONTH.fullmatch(word) else word[:5]


def _text(mail: Mail) -> str:
    """Everything a mail says, its date in words included."""
    day = f"{mail.day:%A} {spell_day(mail.day)} {mail.day.month}/{mail.day.day} {mail.sent_at}"
    return "\n".join((mail.subject, mail.body, day, mail.sender, *mail.to, *mail.cc, *mail.bcc))


def _tokens(text: str) -> tuple[set[str], set[str]]:
    """The numbers (no thousands separators, no leading zeros, 3:00 as 3) and the words of a text."""
    text = re.sub(r"(?<=\d),(?=\d{3})", "", text.lower())
    text = re.sub(r"(?<=\d)[:.]00\b", "", text)
    numbers = {found.lstrip("0") or "0" for found in re.findall(r"\d+", text)}
    words = set(_WORD.findall(text))
    return numbers | {_NUMBER_WORDS[word] for word in words & _NUMBER_WORDS.keys()}, words - _NUMBER_WORDS.keys()
