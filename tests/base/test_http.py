"""Where mail goes is named once, when a server is asked again, and an interrupt that no library loses."""

from __future__ import annotations

import asyncio
import signal
import threading
import time

import pytest

from emailrl.base.http import may_pass, pause, pause_asked_for, run, tell
from emailrl.base.process import SIGNALS, handled_by


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


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("waiting", [False, True])
def test_a_signal_is_raised_after_the_work_whatever_that_makes_of_it(number: signal.Signals, waiting: bool) -> None:
    undone: list[str] = []

    async def masking() -> None:  # as a library does whose clean-up fails half-way
        try:
            if waiting:
                main = threading.main_thread().ident
                assert main is not None
                threading.Timer(0.2, signal.pthread_kill, (main, number)).start()
            else:
                signal.raise_signal(number)
            await asyncio.sleep(600)
        except BaseException as error:
            undone.append(type(error).__name__)
            raise RuntimeError("lost") from None

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    started = time.monotonic()
    with handled_by(interrupt):
        with pytest.raises(KeyboardInterrupt):
            run(masking())
        assert signal.getsignal(number) is interrupt
    assert undone == ["CancelledError"] and time.monotonic() - started < 300
