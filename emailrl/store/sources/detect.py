"""Which reader a source needs, told by its content, never by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from emailrl.errors import UsageError
from emailrl.store.sources.archive import BLOCK, BROKEN, decompressed, is_tar_header, read_archive
from emailrl.store.sources.folder import read_folder
from emailrl.store.sources.hub import DATASET, is_dataset_folder, read_dataset_folder, read_hub
from emailrl.store.sources.message import RawEmail, Skipped
from emailrl.store.sources.parallel import Item, default_workers, parse_all
from emailrl.store.sources.table import is_mail_table, read_table

_KINDS = (
    "Known are a folder tree of mails, a tar / tar.gz / tar.xz of one, an emails.csv (columns file, message) "
    "and a dataset folder."
)
_START_BYTES = 4096

T = TypeVar("T")


@dataclass
class Source:
    """An opened source of mail."""

    description: str
    items: Iterator[Item]
    fraction: Callable[[], float | None] = lambda: None
    """How much of it has been read, 0 to 1; None where that cannot be told."""

    def __iter__(self) -> Iterator[RawEmail | Skipped]:
        """Every message, parsed in this process."""
        return self.read(_unchanged, 0)

    def read(self, judge: Callable[[RawEmail | Skipped], T], workers: int | None = None) -> Iterator[T]:
        """What ``judge`` makes of every message, in order; parsing and ``judge`` run in ``workers`` processes beside
        this one (None: as many as the machine has use for; 0: in this one)."""
        return parse_all(self.items, judge, default_workers() if workers is None else workers)


def _unchanged(email: RawEmail | Skipped) -> RawEmail | Skipped:
    return email


def open_source(source: str | Path, *, allow_truncated: bool = False) -> Source:
    """Open ``hf`` (the hub's dataset) or a path of any known kind.

    Raises ``UsageError`` where the path does not exist, cannot be read or is of no known kind; reading it raises
    ``EmailRLError`` where it breaks off, unless ``allow_truncated``, and where the hub's dataset cannot be had.
    """
    if not str(source).strip():  # as a path it would mean the folder one happens to be in
        raise UsageError("The source is empty.", "Name hf, demo or a path with --source.")
    if source == "hf":
        return Source(f"the dataset {DATASET}", read_hub())
    path = Path(source).expanduser()
    try:
        if path.is_dir():
            return _open_folder(path)
        if path.is_file():
            return _open_file(path, allow_truncated)
        exists = path.exists()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}.") from error
    if exists:
        raise UsageError(f"{path} is neither a file nor a folder.", _KINDS)
    raise UsageError(f"There is no file or folder {path}.", "Name an existing one, or use --source demo or hf.")


def _open_folder(path: Path) -> Source:
    if is_dataset_folder(path):
        return Source(f"the dataset in {path}", read_dataset_folder(path))
    if next(path.iterdir(), None) is None:
        raise UsageError(f"The folder {path} is empty.", _KINDS)
    return Source(f"the folder {path}", read_folder(path))


def _open_file(path: Path, allow_truncated: bool) -> Source:
    size = path.stat().st_size
    if size == 0:
        raise UsageError(f"{path} is empty.", _KINDS)
    file = path.open("rb")

    def fraction() -> float:
        return 1.0 if file.closed else min(file.tell() / size, 1.0)

    start = _start(path)
    if is_tar_header(start[:BLOCK]):
        return Source(f"the archive {path}", read_archive(path, file, allow_truncated=allow_truncated), fraction)
    if is_mail_table(start):
        stream = decompressed(file)
        return Source(f"the table {path}", read_table(path, stream, allow_truncated=allow_truncated), fraction)
    file.close()
    if not start:
        raise UsageError(f"{path} breaks off or is damaged before its first message.", "Get the file again.")
    if not start.strip(b"\0"):
        raise UsageError(f"The archive {path} is empty.", _KINDS)
    raise UsageError(f"{path} is no mail archive.", _KINDS)


def _start(path: Path) -> bytes:
    """The first bytes of a file's decompressed content; fewer where it is damaged."""
    start = b""
    with path.open("rb") as file:
        try:
            stream = decompressed(file)
            while len(start) < _START_BYTES and (piece := stream.read(BLOCK)):
                start += piece
        except BROKEN:
            return start
    return start
