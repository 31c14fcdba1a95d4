"""Progress reports from engines."""

from __future__ import annotations

import logging

from emailrl.plain import tell


def report(line: str) -> None:
    """Report to the user on stderr, and to the run's log if there is one."""
    logger = logging.getLogger("emailrl.engines")
    if logger.hasHandlers():
        logger.warning("%s", line)
    tell(line)
