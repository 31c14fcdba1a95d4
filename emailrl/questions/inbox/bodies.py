"""Separates an email's own text from quoted and forwarded text."""

from __future__ import annotations

import re

_QUOTE_BEGINS = re.compile(
    r"""^[ \t]*(?:
        -{2,}\s*original\ message          # Outlook
      | -{4,}\s*forwarded                  # Lotus Notes
      | -{4,}\s*$ (?=\s*from:)
      | >                                  # quoted line
      | (?:from|to|sent|cc|subject):[ \t]  # headers of a quoted mail
      | .{6,100}\b(?:wrote|writes):\s*$
      | .{0,80}\d{1,2}/\d{1,2}/\d{2,4}\ \d{1,2}:\d{2}(?::\d{2})?(?:\ ?[ap]m)?\s*$   # Lotus Notes: who wrote it when
      | (?:please\ )?respond\ to\ \S+@
    )""",
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)


def own_text(body: str) -> str:
    """Return the text above the first quoted or forwarded part."""
    found = _QUOTE_BEGINS.search(body)
    return body[: found.start()] if found else body
