"""Handle Ctrl-C and SIGTERM during training: a step is finished or dropped, never left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from emailrl.base.process import handled_by, is_importing


class Interrupts:
    """Turns the first SIGINT or SIGTERM into a KeyboardInterrupt when nothing is lost by it.

    Inside ``droppable()`` it is raised at once, since that work can be repeated; elsewhere, and during an import, which
    may swallow it, it waits for ``check()``. A SIGINT after it raises immediately. Works only in the main thread; in
    others the signals are left alone.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._requested = False
        self._droppable = False
        self._from_rank = False
        self.impatient = False  # Whether a SIGINT came after the first signal: save nothing more.

    @contextmanager
    def installed(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        with handled_by(self._handle):
            yield

    @contextmanager
    def droppable(self) -> Iterator[None]:
        """Mark work that may be interrupted anywhere."""
        self.check()
        self._droppable = True
        try:
            yield
        finally:
            self._droppable = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Mark work inside ``droppable()`` that must not be interrupted because other ranks take part."""
        before, self._droppable = self._droppable, False
        try:
            yield
        finally:
            self._droppable = before
        if before:
            self.check()

    def request(self) -> None:
        """Request an interrupt from another thread, as a first signal would: a rank was lost or asked to stop."""
        self._from_rank = True
        main = threading.main_thread().ident
        if not self._requested and main is not None:
            signal.pthread_kill(main, signal.SIGINT)

    def check(self) -> None:
        """Raise a pending KeyboardInterrupt."""
        if self._requested:
            raise KeyboardInterrupt

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._requested and number == signal.SIGTERM:
            return  # one comes from the service manager, which signals every process, and one from the launcher
        self.impatient = self._requested
        self._requested = True
        if self.impatient or (self._droppable and not is_importing(frame)):
            raise KeyboardInterrupt
        # In a thread: the main thread may be writing the same log, and its stream refuses to be entered twice.
        notice = "Stopping after this step."
        if number == signal.SIGINT and not self._from_rank:
            notice = "Interrupted: stopping after this step (press again to stop now without saving)."
        threading.Thread(target=self._notify, args=(notice,)).start()
