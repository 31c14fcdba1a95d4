"""A small mailbox written by hand, for the tests of template questions: Ana Roe's, in May and June 2001."""

from __future__ import annotations

from emailrl.questions.inbox.mail import Mail
from emailrl.questions.inbox.mailbox import Inbox

ANA, BO, CY, DEE = "ana.roe@x.org", "bo.lind@x.org", "cy.marsh@y.net", "dee.orr@x.org"


def mail(
    number: int,
    sent_at: str,
    sender: str,
    to: str | list[str],
    subject: str,
    body: str = "",
    cc: str | list[str] = (),  # type: ignore[assignment]
    bcc: str | list[str] = (),  # type: ignore[assignment]
) -> Mail:
    """Mail ``<number@x>``; ``sent_at`` is ``MM-DD HH:MM`` of 2001."""
    people = [[field] if isinstance(field, str) else list(field) for field in (to, cc, bcc)]
    return Mail(f"<{number}@x>", subject, sender, f"2001-{sent_at}:00", body, *people)


def box(*mails: Mail) -> Inbox:
    """Ana's mailbox of these mails."""
    return Inbox(ANA, mails)
