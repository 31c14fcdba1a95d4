"""A run's directory: which one it takes, how it is locked, and what ``--overwrite`` replaces in it.

Overwriting deletes nothing until it is replaced. The old run is moved into a hidden folder next to the new one and
removed once the new run has its first checkpoint; if the new run ends earlier, the old one is restored:

    .replacing  the old run being moved out or back; complete together with what is still in the directory
    .replaced   the old run, complete

The next run started or resumed under the same OUTPUT_DIR cleans up after a process that died.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path

from emailrl.base.disk import LOCK, Lock, check_own, check_place
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.checkpoints import list_checkpoints, remove_checkpoints

OPTION = "--out"
ELSEWHERE = f"Choose another folder with {OPTION}."
STATE_FILE = "trainer_state.pt"  # in a checkpoint: what a resumed run needs besides the weights
REPLACED = ".replaced"
REPLACING = ".replacing"
RECORD_FOLDERS = ("trajectories", "training", "policy", "skipped")  # where only what a run records belongs to it
RECORD = re.compile(
    r"(?P<hidden>\.?)(?=[a-z]+-(?P<step>\d+))(?:v-\d+(?:\.trash)?"
    r"|(?:step|eval|confirm)-\d+(?:\.jsonl(?:\.index)?|-\d+\.(?:json|safetensors))(?:\.\d+)?)"
)
"""What a run records there, with its step; hidden names were being written or removed."""
_OWN = re.compile(
    r"best_model|final|checkpoint-\d+|\.(?:best_model|final|checkpoint-\d+)\.(?:incoming|outgoing|trash)"
    r"|wandb|tensorboard|training\.log|(?:confirmed|status)\.json|curve\.(?:png|svg)|(?:metrics|evaluations)\.jsonl"
    r"|(?P<hidden>\.(?:(?:metrics|evaluations)\.jsonl|(?:confirmed|status)\.json|curve\.(?:png|svg))\.\d+)"
)
"""Everything else a run writes to its directory; hidden names were being written."""


@contextmanager
def held(directory: Path, option: str = OPTION) -> Iterator[None]:
    """Lock a run's directory, or raise EmailRLError if another process trains there; clean up after a dead one."""
    with _held(directory, option) as is_held:
        if not is_held:
            raise EmailRLError(f"Another process is training in {directory}.", "Wait for it to finish.")
        _settle(directory)
        for path in directory.glob(".*"):
            if (found := _OWN.fullmatch(path.name)) and found["hidden"]:
                _remove(path)
        yield


@contextmanager
def new_directory(base: Path, *, overwrite: bool) -> Iterator[Path]:
    """The directory of a new run, locked against other processes: ``base``, else ``base-2``, ``base-3``. ``overwrite``
    takes the first, whose old run is restored if the block ends before it has a checkpoint. Raises UsageError for a
    place that cannot be used."""
    if not overwrite:
        check_place(base, OPTION)
        with ExitStack() as stack:
            directory = free_directory(base)
            while not stack.enter_context(_held(directory)):  # a run that started at the same moment has taken it
                directory = free_directory(base)
            yield directory
        return
    check_replaceable(base)
    with held(base):
        try:
            clear_run(base, into=base / REPLACING)
            (base / REPLACING).rename(base / REPLACED)
            yield base
        finally:
            _settle(base)


def clear_run(directory: Path, *, into: Path | None = None) -> None:
    """Remove what a run wrote to its directory, and nothing else, or move it into another folder."""
    if into is not None:
        into.mkdir(exist_ok=True)
    own = [entry for entry in directory.iterdir() if _OWN.fullmatch(entry.name)]
    own += [path for name in RECORD_FOLDERS for path in directory.glob(f"{name}/*") if RECORD.fullmatch(path.name)]
    for path in own:
        if into is None:
            _remove(path)
            continue
        goal = into / path.relative_to(directory)
        goal.parent.mkdir(exist_ok=True)
        path.rename(goal)
    for name in RECORD_FOLDERS:
        with suppress(OSError):  # missing, or it holds a user's files
            (directory / name).rmdir()


def remove_records(directory: Path, *, after: int) -> None:
    """Remove a run's records of steps after this one, and half-written files."""
    for path in (path for name in RECORD_FOLDERS for path in directory.glob(f"{name}/*")):
        found = RECORD.fullmatch(path.name)
        if found and (found["hidden"] or int(found["step"]) > after):
            _remove(path)


def check_replaceable(directory: Path) -> None:
    """Raise UsageError for a non-empty folder without any sign that a run made it."""
    if not directory.is_dir():
        return
    entries = {entry.name for entry in directory.iterdir()}
    is_run = {"metrics.jsonl", "training.log"} <= entries or entries & {REPLACED, REPLACING}
    if entries - {LOCK} and not (is_run or list_checkpoints(directory)):
        problem = f"{directory} is not an emailrl run, so --overwrite leaves it alone."
        raise UsageError(problem, "Drop --overwrite, or choose another folder with --out.")


def give_back_replaced(base: Path) -> list[str]:
    """Finish or undo the overwrite by a process that died; returns a note if the old run is restored."""
    if any((base / name).exists() for name in (REPLACED, REPLACING)):
        with _held(base) as is_held:
            if is_held and not _settle(base):
                return [f"{base} is restored: the run that --overwrite started ended before its first checkpoint"]
    return []


@contextmanager
def _held(directory: Path, option: str = OPTION) -> Iterator[bool]:
    """Lock a directory, created if missing, against other processes; False if another one holds it."""
    # This is the only way into a run's directory: who writes there need not look for links.
    try:
        str(directory.absolute()).encode()
        check_own(directory, option)
        directory.mkdir(parents=True, exist_ok=True)
        lock = Lock(directory / LOCK)
    except BlockingIOError:
        lock = None
    except OSError as error:  # also of a file system without locks
        raise UsageError(f"{directory} cannot be written: {error.strerror}.", ELSEWHERE) from None
    except UnicodeEncodeError:  # tokenizers and safetensors reject such paths
        raise UsageError(f"{directory} is not valid UTF-8.", ELSEWHERE) from None
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.close()


def _settle(directory: Path) -> bool:
    """Finish or undo an overwrite: if the new run has a checkpoint (True), the old one is removed, else restored."""
    replaced, replacing = directory / REPLACED, directory / REPLACING
    if replaced.exists():
        if list_checkpoints(directory):
            shutil.rmtree(replaced)
            return True
        clear_run(directory)
        replaced.rename(replacing)
    if replacing.exists():
        clear_run(replacing, into=directory)
        replacing.rmdir()
    return False


def _remove(path: Path) -> None:
    if not path.is_dir():
        path.unlink(missing_ok=True)  # already removed with the leftovers
    elif path.name.startswith("."):
        shutil.rmtree(path)
    else:
        remove_checkpoints([path])  # a half-removed adapter must not carry its name


def free_directory(base: Path) -> Path:
    """``base``, else ``base-2``, ``base-3``: the first that is missing or empty."""
    names = (base if number == 1 else base.with_name(f"{base.name}-{number}") for number in count(1))
    return next(each for each in names if not each.exists() or (each.is_dir() and not any(each.iterdir())))
