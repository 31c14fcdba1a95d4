"""Where mail goes is named once, and when a server is asked again."""

from __future__ import annotations

import pytest

from emailrl.base.http import may_pass, pause, pause_asked_for, tell


def test_waits_double_up_to_a_minute_or_last_as_long_as_asked_for() -> None:
    assert [pause(tries) for tries in (1, 2, 3, 6, 7, 5000)] == [1, 2, 4, 32, 60, 60]
    assert [pause(1, asked) for asked in (0.5, 7, 3600)] == [1, 7, 60]


def test_what_may_pass_and_what_stays() -> None:
    assert all(map(may_pass, (408, 409, 425, 429, 500, 502, 503, 529)))
    assert not any(map(may_pass, (301, 307, 400, 401, 402, 403, 404, 413, 422)))


@pytest.mark.parametrize(
    ("said", "seconds"), [("7", 7), ("0.5", 0.5), ("-3", 0), ("soon", 0), ("", 0), ("nan", 0), ("inf", float("inf"))]
)
def test_what_a_server_asks_for(said: str, seconds: float) -> None:
    assert pause_asked_for({"retry-after": said}) == seconds
    assert pause_asked_for({}) == 0


OPEN = "(warning: plain http, readable by anyone on the way"


@pytest.mark.parametrize(
    ("url", "with_key", "line"),
    [
        ("https://openrouter.ai/api/v1", True, "openrouter.ai: judge"),
        ("https://me:hush@gpu.example:8000/v1", True, "gpu.example:8000: judge"),
        ("http://127.0.0.1:8000/v1", True, "127.0.0.1:8000: judge"),
        ("http://localhost:8000", True, "localhost:8000: judge"),
        ("http://[::1]:8000", True, "[::1]:8000: judge"),
        ("http://gpu.example/v1", True, f"gpu.example: judge {OPEN}, key included)"),
        ("http://10.0.0.2/v1", False, f"10.0.0.2: judge {OPEN})"),
        ("http://localhost.evil.example", False, f"localhost.evil.example: judge {OPEN})"),
    ],
)
def test_a_host_is_told_once_for_each_use(
    capsys: pytest.CaptureFixture[str], url: str, with_key: bool, line: str
) -> None:
    tell.cache_clear()
    for use in ("judge", "judge", "policy"):
        tell(url, use, with_key=with_key)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == f"mail goes to {line}" and len(said) == 2 and ": policy" in said[1]
