"""What an engine has to tell while it works."""

from __future__ import annotations

import logging
import sys

from emailrl.plain import one_line


def report(line: str) -> None:
    """Tell the user on stderr, and the run's log where there is one."""
    line = one_line(line)
    logger = logging.getLogger("emailrl.engines")
    if logger.hasHandlers():
        logger.warning("%s", line)
    print(line, file=sys.stderr)
