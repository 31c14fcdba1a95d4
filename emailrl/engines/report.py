"""Progress reports from engines."""

from __future__ import annotations

import logging
import sys

from emailrl.plain import one_line


def report(line: str) -> None:
    """Report to the user on stderr, and to the run's log if there is one."""
    line = one_line(line)
    logger = logging.getLogger("emailrl.engines")
    if logger.hasHandlers():
        logger.warning("%s", line)
    print(line, file=sys.stderr)
