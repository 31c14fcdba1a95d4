"""Parses in worker processes: batches of messages are handed out and come back in order."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

from emailrl.errors import EmailRLError
from emailrl.store.parties import clean_text
from emailrl.store.sources.message import parse_message
from emailrl.store.sources.raw_email import RawEmail, Skipped
from emailrl.store.sources.rows import JsonLine, parse_line
from emailrl.store.sources.table import TableMail

Unread = tuple[str, bytes | Path]
"""A message not yet parsed: its name in the source, and its bytes or the file that holds them.

The bytes are a ``JsonLine`` for a row of JSONL and a ``TableMail`` for a row of Kaggle's table.
"""

Item = Unread | RawEmail | Skipped

T = TypeVar("T")

CMU_NAME = re.compile(r"(?:^|/)\d+\.$")
"""File names such as ``allen-p/inbox/1.``, which are specific to CMU's Enron release."""
_MAX_WORKERS = 4
_BATCH_BYTES = 1 << 20
_BATCH_ITEMS = 512
_ASSUMED_FILE_BYTES = 4096


def default_workers() -> int:
    """Return the number of parsing processes: one per usable core, limited by what the reading process can feed."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MAX_WORKERS) if cores > 1 else 0


def parse_all(
    items: Iterable[Item], judge: Callable[[RawEmail | Skipped], T], workers: int, max_message_bytes: int
) -> Iterator[T]:
    """Yield the result of ``judge`` for every item's ``RawEmail`` or ``Skipped``, in order.

    ``workers`` processes do the work, or this process if it is 0. Only a few batches per worker are in flight at any
    time, so memory does not grow with the source.
    """
    batches = _batches(items)
    first = list(islice(batches, 2))
    batches = chain(first, batches)
    if workers < 1 or len(first) < 2:
        for batch in batches:
            yield from _parse_batch(batch, judge, max_message_bytes)
        return
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_begin_worker)
    pending: deque[Future[list[T]]] = deque()
    try:
        with _interrupts_held():
            pool.submit(int)  # the first task makes the pool fork its workers
        for batch in batches:
            pending.append(pool.submit(_parse_batch, batch, judge, max_message_bytes))
            if len(pending) > 2 * workers + 1:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except BrokenProcessPool as error:
        raise EmailRLError("A parsing process died, perhaps out of memory.", "Try --workers 0.") from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block SIGINT and SIGTERM: while forking, Python would drop the ``KeyboardInterrupt``.

    Workers inherit the mask and leave both signals to the writing process.
    """
    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


def _begin_worker() -> None:
    """End with the writing process, even if it is killed, and at its SIGTERM, which a broken pool sends.

    A SIGTERM sent by others to all processes is left to the writing process: if a worker died while handing over a
    batch, it would wait for the rest forever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    def end_when_told() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
            continue
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    if hasattr(signal, "sigwaitinfo"):
        threading.Thread(target=end_when_told, daemon=True).start()
    else:  # macOS cannot tell who sends a signal
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _batches(items: Iterable[Item]) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for item in items:
        batch.append(item)
        if isinstance(item, tuple):
            size += len(item[1]) if isinstance(item[1], bytes) else _ASSUMED_FILE_BYTES
        if size >= _BATCH_BYTES or len(batch) >= _BATCH_ITEMS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _parse_batch(batch: list[Item], judge: Callable[[RawEmail | Skipped], T], largest: int) -> list[T]:
    return [judge(_parse(item, largest) if isinstance(item, tuple) else item) for item in batch]


def _parse(item: Unread, largest: int) -> RawEmail | Skipped:
    name, content = clean_text(item[0]), item[1]
    if isinstance(content, Path):
        try:
            if content.stat().st_size > largest:
                return Skipped("too_large", name)
            content = content.read_bytes()
        except OSError:
            return Skipped("unreadable", name)
    if len(content) > largest:
        return Skipped("too_large", name)
    if isinstance(content, JsonLine):
        return parse_line(content, name)
    email = parse_message(content, name)
    if isinstance(email, RawEmail):
        email.is_research = isinstance(content, TableMail) or CMU_NAME.search(name) is not None
    return email
