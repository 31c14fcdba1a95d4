"""Every host that gets mail is named once."""

from __future__ import annotations

import pytest

from emailrl.base.destination import tell


@pytest.fixture(autouse=True)
def nothing_told() -> None:
    tell.cache_clear()


@pytest.mark.parametrize(
    ("url", "with_key", "line"),
    [
        ("https://openrouter.ai/api/v1", True, "mail goes to openrouter.ai: judge"),
        ("https://me:hush@gpu.example:8000/v1", True, "mail goes to gpu.example:8000: judge"),
        ("http://127.0.0.1:8000/v1", True, "mail goes to 127.0.0.1:8000: judge"),
        ("http://localhost:8000", True, "mail goes to localhost:8000: judge"),
        ("http://[::1]:8000", True, "mail goes to [::1]:8000: judge"),
        (
            "http://gpu.example/v1",
            True,
            "mail goes to gpu.example: judge (warning: plain http, readable by anyone on the way, key included)",
        ),
        (
            "http://10.0.0.2/v1",
            False,
            "mail goes to 10.0.0.2: judge (warning: plain http, readable by anyone on the way)",
        ),
        (
            "http://localhost.evil.example",
            False,
            "mail goes to localhost.evil.example: judge (warning: plain http, readable by anyone on the way)",
        ),
    ],
)
def test_the_line(capsys: pytest.CaptureFixture[str], url: str, with_key: bool, line: str) -> None:
    tell(url, "judge", with_key=with_key)
    assert capsys.readouterr() == ("", line + "\n")


def test_once_a_host_and_use(capsys: pytest.CaptureFixture[str]) -> None:
    for use in ("judge", "policy", "judge"):
        tell("https://a.example", use, with_key=False)
    assert capsys.readouterr().err.splitlines() == ["mail goes to a.example: judge", "mail goes to a.example: policy"]
