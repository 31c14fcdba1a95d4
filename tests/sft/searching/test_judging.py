"""Which mail fits a question, and what it answers, as a reader of the mail can tell."""

from __future__ import annotations

from typing import Any

import pytest

from emailrl.sft.searching.asked import answer_of, read_question

ME, BOB, EVE = "ann.lee@example.com", "bob.ross@example.com", "eve@other.example"


def mail(subject: str = "Lease of the barn", sender: str = BOB, **fields: Any) -> dict[str, Any]:
    people = {"to_addresses": [ME], "cc_addresses": [], "bcc_addresses": []}
    first = {"message_id": "<1@x>", "date": "2001-05-03 09:00:00", "subject": subject, "from_address": sender}
    return first | people | {"body": "The rent is $450 a month.", "file_name": ""} | fields


def answer(question: str, read: dict[str, Any]) -> str | None:
    asked = read_question(question)
    assert asked is not None
    return answer_of(asked, read, ME)


@pytest.mark.parametrize(
    ("question", "read", "expected"),
    [
        ('Who wrote to me about "Lease of the barn"?', mail(), "Bob Ross"),
        ('Who wrote to me about "Lease of the barn"?', mail("RE: Lease of the barn", EVE), EVE),
        ('Who wrote to me about "Lease of the barn"?', mail("Lease of the barn and the yard"), None),
        ('Who wrote to me about "Lease of the barn"?', mail(sender=ME), None),
        ('When did Bob Ross write to me about "Lease of the barn"?', mail(), "May 3, 2001"),
        ('When did Bob Ross write to me about "Lease of the barn"?', mail(sender="al.ross@example.com"), None),
        ('When did I send the mail about "Lease of the barn"?', mail(sender=ME), "May 3, 2001"),
        ("What did Bob Ross write to me about on May 3, 2001?", mail("Fw: Lease"), "Lease"),
        ("What did Bob Ross write to me about on May 2, 2001?", mail(), None),
        ("Who sent me a mail on Thursday, May 3, 2001?", mail(sender=EVE), EVE),
        ('Who did I send the mail "Lease of the barn" to?', mail(sender=ME, to_addresses=[BOB]), "Bob Ross"),
        ('Who was copied on my mail about "Lease of the barn"?', mail(sender=ME, cc_addresses=[EVE]), EVE),
        ('Who was copied on my mail about "Lease of the barn"?', mail(sender=ME), None),
        (
            'Who else received Bob Ross\' mail about "Lease of the barn"?',
            mail(to_addresses=[ME, EVE], bcc_addresses=[EVE]),
            EVE,
        ),
        ('Who replied to my mail about "Lease of the barn"?', mail("Re: Lease of the barn"), "Bob Ross"),
        ('Who replied to my mail about "Lease of the barn"?', mail(), None),
        ('Who started the thread "Lease of the barn"?', mail(), "Bob Ross"),
        ('Who started the thread "Lease of the barn"?', mail("Re: Lease of the barn"), None),
        ('Who started the thread "Lease of the barn"?', mail(body="> The rent?\nYes."), None),
        ("What was the first message from Bob Ross after May 2, 2001 about?", mail(), "Lease of the barn"),
        ("What was the first message from Bob Ross after May 3, 2001 about?", mail(), None),
        ("Before May 4, 2001, what was the subject of the latest mail from Bob Ross?", mail(), "Lease of the barn"),
        ("Before May 3, 2001, what was the subject of the latest mail from Bob Ross?", mail(), None),
        ('What dollar amount is mentioned in the mail "Lease of the barn" from Bob Ross?', mail(), "$450 a month"),
        ('What phone number is given in the mail "Lease of the barn" from Bob Ross?', mail(), None),
        ("What did Bob Ross write to me about on May 3, 2001?", mail(date=None), None),
    ],
)  # fmt: skip
def test_what_a_mail_answers(question: str, read: dict[str, Any], expected: str | None) -> None:
    assert answer(question, read) == expected
