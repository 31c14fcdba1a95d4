"""Mail sources: each yields ``RawEmail``, or ``Skipped`` with a reason, for every message it sees."""

from emailrl.mail.sources.detect import Source, open_source
from emailrl.mail.sources.message import parse_message
from emailrl.mail.sources.reading import RawEmail, Skipped

__all__ = ["RawEmail", "Skipped", "Source", "open_source", "parse_message"]
