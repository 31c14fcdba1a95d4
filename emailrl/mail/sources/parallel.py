"""Parses in worker processes: batches of messages are handed out and come back in order."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

from emailrl.base.workers import in_order, worker_processes
from emailrl.mail.schema import clean_text
from emailrl.mail.sources.message import parse_message
from emailrl.mail.sources.raw_email import RawEmail, Skipped
from emailrl.mail.sources.rows import JsonLine, TableMail, parse_line

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
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    with worker_processes(workers, hint="Try --workers 0.", method=method) as submit:
        calls = ((batch, judge, max_message_bytes) for batch in batches)
        for judged in in_order(submit, _parse_batch, calls, ahead=2 * workers + 1):
            yield from judged


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
