"""Mail sources: each yields ``RawEmail``, or ``Skipped`` with a reason, for every message it sees."""

from emailrl.store.sources.detect import Source, open_source
from emailrl.store.sources.message import parse_message
from emailrl.store.sources.raw_email import RawEmail, Skipped

__all__ = ["RawEmail", "Skipped", "Source", "open_source", "parse_message"]
