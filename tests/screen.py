"""A program on a terminal: what it shows is waited for, keys are typed."""

from __future__ import annotations

import os
import pty
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

SECONDS = 300


class Screen:
    """Runs ``words`` in ``folder`` on a terminal of its own, with the variables of ``more`` over the environment."""

    def __init__(self, words: Sequence[str], folder: Path, **more: str) -> None:
        self._leader, follower = pty.openpty()
        self.child = subprocess.Popen(
            words, cwd=folder, env=os.environ | more,
            stdin=follower, stdout=follower, stderr=follower, start_new_session=True,
        )  # fmt: skip
        os.close(follower)
        os.set_blocking(self._leader, False)
        self._seen = ""

    def type(self, keys: str) -> None:
        """Send keys as they would be typed."""
        os.write(self._leader, keys.encode())

    def wait_for(self, text: str) -> str:
        """Read on until ``text`` has come; returns what came before it, and none of it is seen again."""
        until = time.monotonic() + SECONDS
        while text not in self._seen:
            assert time.monotonic() < until, f"{text!r} did not come: {self._seen}"
            if not self._read():
                raise AssertionError(f"it ended before {text!r} came: {self._seen}")
        before, _, self._seen = self._seen.partition(text)
        return before

    def rest(self) -> str:
        """All that it shows until it ends."""
        until = time.monotonic() + SECONDS
        while self._read():
            assert time.monotonic() < until, f"it did not end: {self._seen}"
        self.child.wait()
        return self._seen

    def _read(self) -> bool:
        """Take what there is; False where the program has ended."""
        try:
            self._seen += os.read(self._leader, 65536).decode(errors="replace")
        except BlockingIOError:
            time.sleep(0.02)
        except OSError:  # nobody holds the other side any more
            return False
        return True

    def close(self) -> None:
        """End the program."""
        self.child.kill()
        self.child.wait()
        os.close(self._leader)
