"""Questions answered by one fact in one email's text: a phone number, an amount, a time, a place."""

from __future__ import annotations

from random import Random

from emailrl.facts import mentions
from emailrl.facts.mentions import Extractor
from emailrl.questions.inbox.mailbox import Inbox, Mail
from emailrl.questions.template.kinds import Finding, Kind, refer_to


def _fact_kind(name: str, realism: float, extractor: Extractor, *wordings: str) -> Kind:
    def find(box: Inbox, mail: Mail, rng: Random) -> Finding | None:
        if not mail.topic.is_telling or not (fact := mail.only_fact(extractor)):
            return None
        if fact.text.lower() in mail.addresses:  # the header already shows this address
            return None
        if fact.text.startswith("100") and extractor is mentions.PERCENT:  # a figure of speech
            return None
        if extractor is mentions.URL and box.is_boilerplate(fact.text, mail):
            return None
        day = box.ask_day(mail, rng)
        if extractor.find(mail.topic.text) or not box.is_told_by_topic(mail, day, with_sender=True):
            return None
        return Finding(fact.text, day, {"mail": refer_to(box, mail, rng)})

    return Kind(name, realism, wordings, find, fact=extractor)


def _numbered_kind(noun: str) -> Kind:
    return _fact_kind(
        f"{noun}_number",
        0.7,
        mentions.numbered(noun),
        f"What {noun} number is given in {{mail}}?",
        f"Which {noun} number does {{mail}} mention?",
        f"What is the number of the {noun} mentioned in {{mail}}?",
    )


FACT_KINDS = (
    _fact_kind(
        "phone",
        0.9,
        mentions.PHONE,
        "What phone number is given in {mail}?",
        "Which phone number can I find in {mail}?",
        "I need the phone number from {mail}. What is it?",
    ),
    _fact_kind(
        "amount",
        0.9,
        mentions.AMOUNT,
        "What dollar amount is mentioned in {mail}?",
        "How much money does {mail} speak of?",
        "Which sum in dollars is named in {mail}?",
    ),
    _fact_kind(
        "percentage",
        0.8,
        mentions.PERCENT,
        "What percentage is mentioned in {mail}?",
        "Which percentage does {mail} give?",
        "What percent figure is in {mail}?",
    ),
    _fact_kind(
        "time",
        0.8,
        mentions.TIME,
        "What time is mentioned in {mail}?",
        "Which time of day does {mail} give?",
        "What is the time named in {mail}?",
    ),
    _fact_kind(
        "date_stated",
        0.8,
        mentions.DATE,
        "What date is mentioned in {mail}?",
        "Which date does {mail} speak of?",
        "What is the date given in the text of {mail}?",
    ),
    _fact_kind(
        "deadline",
        0.9,
        mentions.DEADLINE,
        "What deadline is set in {mail}?",
        "By when is something due according to {mail}?",
        "Which deadline does {mail} give?",
    ),
    _fact_kind(
        "room",
        0.9,
        mentions.ROOM,
        "Which room is named in {mail}?",
        "What room does {mail} mention?",
        "What is the room given in {mail}?",
    ),
    _fact_kind(
        "venue",
        0.9,
        mentions.VENUE,
        "What place is named in {mail}?",
        "Which venue does {mail} mention?",
        "Where is it, going by {mail}?",
    ),
    _fact_kind(
        "url",
        0.7,
        mentions.URL,
        "Which web address is given in {mail}?",
        "What link is in {mail}?",
        "What is the web address mentioned in {mail}?",
    ),
    _fact_kind(
        "email_address",
        0.7,
        mentions.EMAIL_ADDRESS,
        "Which e-mail address is given in {mail}?",
        "What e-mail address does the text of {mail} mention?",
        "I need the e-mail address from {mail}. What is it?",
    ),
    _fact_kind(
        "attachment",
        0.8,
        mentions.ATTACHMENT,
        "What file was attached to {mail}?",
        "What is the name of the attachment of {mail}?",
        "Which file came with {mail}?",
    ),
    _fact_kind(
        "quantity",
        0.8,
        mentions.QUANTITY,
        "What quantity is stated in {mail}?",
        "Which quantity does {mail} mention?",
        "What is the quantity named in {mail}?",
    ),
    _fact_kind(
        "flight",
        0.9,
        mentions.FLIGHT,
        "Which flight is named in {mail}?",
        "What flight number is given in {mail}?",
        "What is the flight mentioned in {mail}?",
    ),
    *map(_numbered_kind, ("deal", "ticket", "meter", "contract", "invoice")),
)
