"""Mail in any number, made of a real archive: the benchmarks' stand-in for a corpus larger than the one at hand."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

from emailrl.mail.sources import RawEmail, Skipped, Source, open_source
from emailrl.mail.sources.detect import Item

T = TypeVar("T")

_SHIFT = timedelta(hours=17)


class Copies(Source):
    """An archive over and over without end, streamed and parsed anew each time (``limit`` of the build ends it).

    A copy has ids and bodies of its own, so that no filter takes it for a repeat, and dates 17 hours after those of the
    copy before, so that mails of the same words do not lie side by side. Every second copy is other people's mail: a
    large corpus holds more mailboxes, not only larger ones.
    """

    def __init__(self, archive: Path) -> None:
        super().__init__(f"copies of {archive}", _items(archive))

    def read(self, judge: Callable[[RawEmail | Skipped], T], workers: int | None = None) -> Iterator[T]:
        """As ``Source.read``, of the copies."""
        return super().read(functools.partial(_judge_copy, judge=judge), workers)


def _items(archive: Path) -> Iterator[Item]:
    for number in itertools.count():
        for item in open_source(archive).items:
            yield (f"{number}/{item[0]}", item[1]) if isinstance(item, tuple) else item


def _judge_copy(email: RawEmail | Skipped, judge: Callable[[RawEmail | Skipped], T]) -> T:
    return judge(email if isinstance(email, Skipped) else _copied(email, int(email.file_name.partition("/")[0])))


def _copied(email: RawEmail, number: int) -> RawEmail:
    if number == 0:
        return email
    changed = replace(
        email, message_id=f"{email.message_id}-{number}", body=f"{email.body}\ncopy{number}",
        date=email.date and email.date + number * _SHIFT,
    )  # fmt: skip
    if number % 2:
        return changed
    to, cc, bcc = ([f"{number}.{address}" for address in addresses] for addresses in (email.to, email.cc, email.bcc))
    sender = email.from_address and f"{number}.{email.from_address}"
    return replace(changed, from_address=sender, to=to, cc=cc, bcc=bcc)
