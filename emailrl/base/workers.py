"""Worker processes: only this process reacts to SIGINT and SIGTERM, which its whole group may get, and ends them.

A thread serves each worker through a pipe of its own; they share no queue or lock, so that one that dies blocks nobody.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from queue import SimpleQueue
from typing import Any, TypeVar

from emailrl.base.errors import EmailRLError
from emailrl.base.process import SIGNALS

T = TypeVar("T")
Submit = Callable[..., Future[Any]]
"""Called as ``submit(function, *arguments)``; both are pickled, and so is the result."""


@contextmanager
def worker_processes(count: int, *, hint: str, method: str = "spawn") -> Iterator[Submit]:
    """So many processes, killed at the end of the block; ``hint`` is what to do if one dies, an EmailRLError."""
    context: Any = multiprocessing.get_context(method)
    if method == "spawn":
        resource_tracker.ensure_running()  # the first process would start it, and unblock the signals
    idle: SimpleQueue[Connection] = SimpleQueue()
    processes: list[BaseProcess] = []
    threads = ThreadPoolExecutor(count, thread_name_prefix="worker")

    def call(function: Callable[..., Any], *arguments: object) -> Any:
        connection = idle.get()
        try:
            connection.send((function, arguments))
            result, error = connection.recv()
        except (EOFError, OSError):
            raise EmailRLError("A worker process died, perhaps out of memory.", hint) from None
        finally:
            idle.put(connection)
        if error is not None:
            raise error
        return result

    try:
        with _signals_blocked():
            for _ in range(count):
                own, other = context.Pipe()
                processes.append(context.Process(target=_serve, args=(other,), daemon=True))
                processes[-1].start()
                other.close()
                idle.put(own)
        yield lambda *call_of: threads.submit(call, *call_of)
    finally:
        with _signals_blocked():
            for process in processes:
                process.kill()
            threads.shutdown(cancel_futures=True)
            for process in processes:
                process.join()


def in_order(submit: Submit, function: Callable[..., T], calls: Iterable[tuple[Any, ...]], ahead: int) -> Iterator[T]:
    """The results for the arguments in ``calls``, at most ``ahead`` of them begun before the first is taken."""
    begun: deque[Future[T]] = deque()
    for arguments in calls:
        begun.append(submit(function, *arguments))
        if len(begun) > ahead:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block the signals in this thread; a process started in the block inherits that, from its first instruction."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _serve(connection: Connection) -> None:
    """Answer calls until the parent process ends, even if it is killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            function, arguments = connection.recv()
            reply: tuple[Any, Exception | None]
            try:
                reply = function(*arguments), None
            except Exception as error:
                reply = None, error
            connection.send(reply)
