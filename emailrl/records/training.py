"""What training records beside trajectories: metrics per step, and notes on a step's trajectories."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, Field, TypeAdapter

from emailrl.base.disk import replace_bytes
from emailrl.base.errors import EmailRLError
from emailrl.records.lines import JsonlWriter, Record, checked, numbered_lines, parse_line, readable
from emailrl.records.trajectory import Integer, Mask, Number


class _Metrics(BaseModel, extra="allow"):
    """The fields of a metrics record; all others are a number or null."""

    __pydantic_extra__: dict[str, Number | None] = Field(init=False)
    step: Integer
    seconds: dict[str, Number] = {}
    dropped: dict[str, Number] = {}


_METRICS = TypeAdapter(Annotated[Record, AfterValidator(lambda record: _Metrics.model_validate(record) and record)])


class MetricsWriter(JsonlWriter):
    """``metrics.jsonl``: one object per step, in order; non-finite values are null."""

    def __init__(self, path: Path, *, after_step: int | None = None) -> None:
        """Open for appending, after removing the lines of steps past ``after_step`` that an interrupted run left."""
        if after_step is not None and path.exists():
            kept = []
            for number, line in numbered_lines(path):
                step = parse_line(path, number, line).get("step", 0)
                if not isinstance(step, int):
                    raise EmailRLError(f"{path}: the step {step!r:.40} is not a whole number.", "Delete that line.")
                if step <= after_step:
                    kept.append(line)
            replace_bytes(path, b"".join(kept))  # the bytes of each line as they were
        super().__init__(path)


def read_metrics(path: Path) -> tuple[list[Record], list[str]]:
    """Return the lines of metrics or evaluations, and errors for skipped ones."""
    return readable(path, partial(checked, _METRICS, "a metrics record"))


class SampleNote(BaseModel):
    """Training's numbers on one sequence: lists with a value per token, null where it was not trained."""

    loss_mask: Mask = []
    old_logprobs: list[Number | None] = []
    ratio: list[Number | None] = []
    advantages: list[Number | None] = []  # empty if all trained tokens have the trajectory's advantage


class TrainingNote(BaseModel):
    """Training's note on a trajectory."""

    id: str
    advantage: Number | None = None
    """Advantage of all its trained tokens; None if they differ by token, or it was not trained."""
    dropped: str | None = None  # why it was not trained, if recorded
    samples: list[SampleNote] = []

    @property
    def token_advantages(self) -> list[float]:
        """The advantages of the trained tokens, if they differ (PPO, whitening, a KL in the reward)."""
        return [each for sample in self.samples for each in sample.advantages if each is not None]


def notes_path(trajectories: Path) -> Path:
    """The file of training's notes on a trajectory file."""
    return trajectories.parent.parent / "training" / trajectories.name


def training_notes(trajectories: Path, *, brief: bool = False) -> tuple[dict[str, TrainingNote], list[str]]:
    """Return the notes on the trajectories of a file by id, and errors for skipped lines. ``brief`` leaves out
    ``samples`` as far as possible, for lists: they hold nearly all of the file's bytes."""
    notes, complaints = readable(notes_path(trajectories), _brief_note if brief else _note)
    return {note.id: note for note in notes}, [f"training/{each}" for each in complaints]


_note = partial(checked, TypeAdapter(TrainingNote), "a training note")


def _brief_note(path: Path, number: int, line: bytes) -> TrainingNote:
    """The part of a note before its samples, or the whole if advantages differ by token."""
    head, samples, _ = line.partition(b',"samples":')
    note = _note(path, number, head + b"}" if samples else line)
    return _note(path, number, line) if note.advantage is None and note.dropped is None else note
