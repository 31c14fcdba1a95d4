"""The mail database: built by ``emailrl gen-db``, searched and read through ``open_mailbox``."""

from emailrl.mail.database import database_fingerprint
from emailrl.mail.mailbox import Email, Mailbox, SearchHit, open_mailbox

__all__ = ["Email", "Mailbox", "SearchHit", "database_fingerprint", "open_mailbox"]
