"""Training's notes on a step's trajectories, by id, in ``training/step-NNNNNN.jsonl``."""

from __future__ import annotations

from pathlib import Path

from emailrl.disk import not_a_file
from emailrl.errors import EmailRLError
from emailrl.records.fields import check_note
from emailrl.records.lines import Record, parse_line

_SAMPLES = b',"samples":'


def notes_path(trajectories: Path) -> Path:
    """Return the path of training's notes on a trajectory file."""
    return trajectories.parent.parent / "training" / trajectories.name


def training_notes(trajectories: Path) -> tuple[dict[str, Record], list[str]]:
    """Return the notes on the trajectories of a file by id, and errors for skipped lines.

    A note has ``id``, ``advantage`` (of all trained tokens, or null), ``dropped`` (why it was not trained, or null) and
    ``samples``, one object of lists per training sequence. Files not written by training have none.
    """
    return _read(trajectories, brief=False)


def brief_notes(trajectories: Path) -> dict[str, Record]:
    """Return the same without ``samples`` as far as possible, for lists: they hold nearly all of the file's bytes."""
    return _read(trajectories, brief=True)[0]


def _read(trajectories: Path, *, brief: bool) -> tuple[dict[str, Record], list[str]]:
    path = notes_path(trajectories)
    found: dict[str, Record] = {}
    complaints: list[str] = []
    if instead := not_a_file(path):
        complaints.append(f"training/{path.name} is {instead}")
    if not path.is_file():
        return found, complaints
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.endswith(b"\n"):
                break  # still being written
            try:
                note = _brief(path, number, line) if brief else None
                note = note or check_note(path, number, parse_line(path, number, line))
            except EmailRLError as error:
                complaints.append(f"training/{error.message.removeprefix(f'{path.parent}/')}")
            else:
                found[note["id"]] = note
    return found, complaints


def _brief(path: Path, number: int, line: bytes) -> Record | None:
    """The part of a note before its samples; None if advantages differ by token, which needs the whole note."""
    head, samples, _ = line.partition(_SAMPLES)
    if not samples:
        return None
    note = check_note(path, number, parse_line(path, number, head + b"}"))
    return None if note["advantage"] is None and note["dropped"] is None else note
