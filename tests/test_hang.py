"""The guard itself: what does not end fails, what does is left alone."""

from __future__ import annotations

import re
import signal

import pytest
from hang import must_end


def test_work_without_an_end_fails_inside_a_pattern_too() -> None:
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(AssertionError, match="not done"), must_end(0.2):
        re.fullmatch("(a+)+b", "a" * 40)  # doubles with each letter
    assert signal.getsignal(signal.SIGALRM) is before


def test_what_ends_is_not_disturbed_later() -> None:
    with must_end(0.5):
        pass
    assert signal.setitimer(signal.ITIMER_REAL, 0) == (0.0, 0.0)
