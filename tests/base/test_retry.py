"""When a server is asked again."""

from __future__ import annotations

import pytest

from emailrl.base.retry import may_pass, pause, pause_asked_for


def test_waits_double_up_to_a_minute_or_last_as_long_as_asked_for() -> None:
    assert [pause(tries) for tries in (1, 2, 3, 6, 7, 5000)] == [1, 2, 4, 32, 60, 60]
    assert [pause(1, asked) for asked in (0.5, 7, 3600)] == [1, 7, 60]


@pytest.mark.parametrize("status", [408, 409, 425, 429, 500, 502, 503, 529])
def test_what_may_pass(status: int) -> None:
    assert may_pass(status)


@pytest.mark.parametrize("status", [301, 307, 400, 401, 402, 403, 404, 413, 422])
def test_what_stays(status: int) -> None:
    assert not may_pass(status)


@pytest.mark.parametrize(
    ("said", "seconds"), [("7", 7), ("0.5", 0.5), ("-3", 0), ("soon", 0), ("", 0), ("nan", 0), ("inf", float("inf"))]
)
def test_what_a_server_asks_for(said: str, seconds: float) -> None:
    assert pause_asked_for({"retry-after": said}) == seconds
    assert pause_asked_for({}) == 0
