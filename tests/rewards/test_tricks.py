"""Answers made to fool the offline check, and wordings that must not matter to it, over pairs of question and answer.

``TRICKS`` and ``HARMLESS`` are families: from a pair, other answers and the source mail to one answer, or None where
the family does not apply to the pair.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from emailrl.rewards.matching import match


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
