"""Answers that must be refused, and wordings that must not matter, built over pairs of question and answer.

``TRICKS`` and ``HARMLESS`` are families: from a pair, other answers and the source mail to one answer, or None where
the family does not apply to the pair.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class Pair:
    """A question with its right answer, four answers to other questions, and a text that holds the answer."""

    question: str
    answer: str
    others: Sequence[str]
    mail: str
    source: str

    @property
    def bare(self) -> str:
        """The answer without its full stop."""
        return self.answer.strip().rstrip(".")

    def among_others(self, seed: int) -> list[str]:
        """The right answer and the others, in any order."""
        listed = [self.bare, *(other.strip().rstrip(".") for other in self.others)]
        Random(f"{seed}{self.question}").shuffle(listed)
        return listed

    def is_closed(self) -> bool:
        """A yes or no, whose denial is another matter."""
        return re.match(r"(?:yes|no)\b", self.answer, re.IGNORECASE) is not None


def lower_first(text: str) -> str:
    """ "The fee" within a sentence."""
    return text[:1].lower() + text[1:] if re.match(r"(?:The|It|He|She|They|You|A|An|In|On|At)\b", text) else text


def copied(pair: Pair, count: int) -> str | None:
    """The ``count`` words of the mail around most of the answer's words, and the answer among them."""
    words = pair.mail.split()
    wanted = {word for word in re.findall(r"\w+", pair.answer.lower()) if len(word) > 3 or word.isdigit()}
    if len(words) < count or not wanted:
        return None
    hits = [any(part in wanted for part in re.findall(r"\w+", word.lower())) for word in words]
    best = max(range(len(words) - count + 1), key=lambda at: sum(hits[at : at + count]))
    return " ".join(words[best : best + count])


def around(pair: Pair, count: int) -> str | None:
    """The same window with the answer itself put in its middle."""
    window = copied(pair, count)
    if window is None:
        return None
    words = window.split()
    return " ".join([*words[: count // 2], pair.answer, *words[count // 2 :]])


Family = Callable[[Pair], str | None]


def denial(form: str) -> Family:
    """A form that takes the answer back; not for yes and no."""
    return lambda pair: None if pair.is_closed() else form.format(pair.bare, low=lower_first(pair.bare))


TRICKS: dict[str, Family] = {
    "five sentences": lambda pair: ". ".join(pair.among_others(1)) + ".",
    "five items": lambda pair: ", ".join(pair.among_others(2)),
    "five lines": lambda pair: "\n".join(f"- {answer}" for answer in pair.among_others(7)),
    "the right one first, four more": lambda pair: ". ".join([pair.bare, *(o.rstrip(".") for o in pair.others)]) + ".",
    "capitals without punctuation": lambda pair: re.sub(r"[^\w\s]", "", " ".join(pair.among_others(3))).upper(),
    "five with or": lambda pair: " or ".join(pair.among_others(4)),
    "two with or": lambda pair: f"{pair.bare} or {lower_first(pair.others[0].rstrip('.'))}",
    "either one": lambda pair: f"Either {pair.bare}, or {pair.others[0]}",
    "maybe each": lambda pair: ", ".join(f"maybe {lower_first(answer)}" for answer in pair.among_others(5)[:5]),
    "doubt": denial("I doubt that {low}."),
    "lie": denial("It is a lie that {low}."),
    "not true": denial("It is not true that {low}."),
    "capital doubt": denial("IT IS NOT TRUE THAT {0}"),
    "incorrect in brackets": denial("{0} (this is incorrect)"),
    "scratch that": denial("{0} - no, scratch that"),
    "which is wrong": denial("{0}. That is wrong."),
    "ignore that": denial("{0}. Ignore that."),
    "some say": denial("Some say {low}, but that is false."),
    "do not know, maybe": lambda pair: f"I don't know, maybe {pair.bare}",
    "do not know": lambda pair: f"I don't know. {pair.answer}",
    "cannot say": lambda pair: f"I am not sure whether {lower_first(pair.bare)}.",
    "question back": lambda pair: f"{pair.bare}?",
    "60 words of the mail": lambda pair: copied(pair, 60),
    "120 words of the mail": lambda pair: copied(pair, 120),
    "answer within 60 words of the mail": lambda pair: around(pair, 60),
    "the question": lambda pair: pair.question,
    "the question stated": lambda pair: pair.question.rstrip("?") + ".",
    "another's answer": lambda pair: pair.others[1],
    "two others' answers": lambda pair: f"{pair.others[1]} {pair.others[2]}",
    "all lower, five": lambda pair: " ".join(pair.among_others(6)).lower(),
}


def framed(form: str) -> Family:
    """A form round the answer."""
    return lambda pair: form.format(pair.answer, bare=pair.bare, source=pair.source, low=lower_first(pair.bare))


HARMLESS: dict[str, Family] = {
    "as it is": framed("{0}"),
    "courtesy before": framed("Sure! {0}"),
    "hello": framed("Hello, happy to help. {0}"),
    "courtesy after": framed("{0} Hope this helps!"),
    "more details": framed("{bare}. Let me know if you need more details."),
    "thanks": framed("{bare}. Thanks for asking, and have a nice day!"),
    "reason not given": framed("{bare}. The exact reason is not specified."),
    "further details missing": framed("{bare}. No further details are given in the email."),
    "source": framed("{bare}. Source: {source}"),
    "source in brackets": framed("{bare} [{source}]."),
    "source mail": framed("{bare} (see email {source})."),
    "according to": framed("According to the email from Vince Kaminski, {low}."),
    "according to with date": framed("According to the message of May 3, 2000, {low}."),
    "based on": framed("Based on your emails, {low}."),
    "the answer is": framed("The answer is: {0}"),
    "I found": framed("I found that {low}."),
    "lower case": lambda pair: pair.answer.lower(),
    "upper case": lambda pair: pair.answer.upper(),
    "bold": framed("**{bare}**"),
    "bullet": framed("- {0}"),
    "quotes": framed('"{bare}"'),
    "no full stop": framed("{bare}"),
    "spaces": framed("  {0}\n"),
    "question before": lambda pair: f"{pair.question} {pair.answer}",
    "curly quotes": lambda pair: f"\u201c{pair.answer.replace(chr(39), chr(0x2019))}\u201d",
    "acronym": lambda pair: with_acronym(pair.answer),
}


def with_acronym(answer: str) -> str | None:
    """Puts its initials behind a name of three words or more."""
    found = re.search(r"\b[A-Z][a-z]+(?: [A-Z][a-z]+){2,}\b", answer)
    if found is None:
        return None
    initials = "".join(word[0] for word in found[0].split())
    return f"{answer[: found.end()]} ({initials}){answer[found.end() :]}"


def build(family: Family, pairs: Sequence[Pair]) -> Iterator[tuple[Pair, str]]:
    """The answers that a family makes."""
    for pair in pairs:
        if (answer := family(pair)) is not None:
            yield pair, answer
