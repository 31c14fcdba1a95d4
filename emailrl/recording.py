"""Trajectories and metrics on disk: one JSON object a line, whole after any crash.

A line counts once its newline is on disk. A process that dies in the middle of one leaves a torn last line, which
the next writer cuts off and readers pass over; a bad line anywhere else is an error with its file and number.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from emailrl.disk import naming, replace_bytes
from emailrl.errors import EmailRLError
from emailrl.trajectory import Message, Scenario, StopReason, TokenSample, ToolCall, Trajectory, Turn, scenario_fields

Record = dict[str, Any]


# -- lines ----------------------------------------------------------------------------------------------------------


def encode(record: Record) -> bytes:
    """One line of strict JSON, newline included; NaN and infinity, which JSON lacks, become null."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError:
        text = json.dumps(finite(record), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Mail is hostile: a lone surrogate has no UTF-8 form, but does have a JSON escape.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def finite(value: Any) -> Any:
    """The value with None for every NaN and infinity in it, however deep."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return value


def read_records(path: Path) -> Iterator[Record]:
    """The objects of a JSONL file in order; ``EmailRLError`` names file and line of one that cannot be read.

    A last line without newline that is not whole is one still being written, or torn by a crash: it is passed over.
    """
    for _, record in numbered_records(path):
        yield record


def numbered_records(path: Path) -> Iterator[tuple[int, Record]]:
    """As ``read_records``, with each object's line number (from 1)."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return
                raise EmailRLError(f"{path}, line {number}: not JSON ({error}).") from None
            if not isinstance(record, dict):
                raise EmailRLError(f"{path}, line {number}: expected a JSON object, found {type(record).__name__}.")
            yield number, record


class JsonlWriter:
    """Appends objects to a JSONL file, each in one write; a torn last line is cut off when the file is opened."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        mend(path)
        self._file = path.open("ab", buffering=0)

    def write(self, record: Record) -> None:
        """Append one object; OSError, which names the file, where the disk holds only a part of it."""
        rest = memoryview(encode(record))
        with naming(self.path):
            while rest:  # a disk that fills up takes a part, and says so at the next write
                rest = rest[self._file.write(rest) :]

    def close(self) -> None:
        """Put everything on disk."""
        if not self._file.closed:
            os.fsync(self._file.fileno())
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def mend(path: Path) -> None:
    """Make the file end in a whole line: a torn last line is cut off, a whole one without newline gets it."""
    if not path.exists():
        return
    content = path.read_bytes()
    if not content or content.endswith(b"\n"):
        return
    end = content.rfind(b"\n") + 1
    try:
        json.loads(content[end:])
    except (ValueError, RecursionError):
        with path.open("rb+") as file:
            file.truncate(end)
    else:
        with path.open("ab") as file:
            file.write(b"\n")


def keep_records(path: Path, keep: Callable[[Record], bool]) -> None:
    """Rewrite a JSONL file with only the objects ``keep`` accepts, their bytes unchanged (beside, then renamed)."""
    if not path.exists():
        return
    mend(path)
    wanted = {number for number, record in numbered_records(path) if keep(record)}
    with path.open("rb") as file:
        lines = [line for number, line in enumerate(file, start=1) if number in wanted]
    replace_bytes(path, b"".join(lines))


def write_records(path: Path, records: Iterable[Record]) -> None:
    """Write a whole JSONL file at once (beside, then renamed): it is there complete or not at all."""
    replace_bytes(path, b"".join(map(encode, records)))


# -- trajectories ---------------------------------------------------------------------------------------------------


def trajectory_to_dict(trajectory: Trajectory) -> Record:
    """The trajectory as the JSONL files hold it (``docs/architecture.md``, contracts).

    One sample stands at the top level as ``token_ids``, ``loss_mask``, ``sampler_logprobs``; several, or none, stand
    in ``samples`` and those three names are missing, save that none is three empty lists.
    """
    record: Record = {
        "id": trajectory.id,
        "group_id": trajectory.group_id,
        "run_id": trajectory.run_id,
        "step": trajectory.step,
        "mode": trajectory.mode,
        "policy_version": trajectory.policy_version,
        "adapter_sha256": trajectory.adapter_sha256,
        "scenario": scenario_fields(trajectory.scenario),
        "messages": [_message_to_dict(message) for message in trajectory.messages],
        "turns": [_fields(turn) for turn in trajectory.turns],
    }
    if len(trajectory.samples) > 1:
        record["samples"] = [_fields(sample) for sample in trajectory.samples]
    else:
        record |= _fields(trajectory.samples[0] if trajectory.samples else TokenSample())
    return record | {
        "reward": trajectory.reward,
        "reward_terms": trajectory.reward_terms,
        "rubric": trajectory.rubric,
        "final_answer": trajectory.final_answer,
        "final_sources": trajectory.final_sources,
        "stop_reason": trajectory.stop_reason,
        "seconds": trajectory.seconds,
        "exception": trajectory.exception,
    }


def trajectory_from_dict(record: Record) -> Trajectory:
    """The inverse of ``trajectory_to_dict``; KeyError, TypeError or ValueError where the record is not one."""
    if "samples" in record:
        samples = [TokenSample(**sample) for sample in record["samples"]]
    else:
        samples = [TokenSample(record["token_ids"], record["loss_mask"], record["sampler_logprobs"])]
    for sample in samples:
        if not len(sample.token_ids) == len(sample.loss_mask) == len(sample.sampler_logprobs):
            raise ValueError("token_ids, loss_mask and sampler_logprobs differ in length")
    plain = {name: record[name] for name in _PLAIN_FIELDS}
    reward = plain["reward"]
    if not isinstance(reward, int | float) or not abs(reward) < math.inf:
        raise ValueError("its reward is no finite number")
    return Trajectory(
        **plain,
        scenario=Scenario(**record["scenario"]),
        messages=[_message_from_dict(message) for message in record["messages"]],
        turns=[Turn(**turn) for turn in record["turns"]],
        samples=[sample for sample in samples if sample.token_ids],
        stop_reason=None if record["stop_reason"] is None else StopReason(record["stop_reason"]),
        final_answer=record.get("final_answer"),
        final_sources=record.get("final_sources", []),
        exception=record.get("exception"),
    )


_PLAIN_FIELDS = ("id", "group_id", "run_id", "step", "mode", "policy_version", "adapter_sha256", "reward",
                 "reward_terms", "rubric", "seconds")  # fmt: skip


def _fields(node: Turn | TokenSample) -> Record:
    # dataclasses.asdict copies every token id one by one; these lists run to thousands.
    return {name: getattr(node, name) for name in node.__slots__}


def _message_to_dict(message: Message) -> Record:
    record: Record = {"role": message.role, "content": message.content}
    if message.tool_calls:
        record["tool_calls"] = [
            {"name": call.name, "arguments": call.arguments} | ({"id": call.id} if call.id else {})
            for call in message.tool_calls
        ]
    optional = {"tool_call_id": message.tool_call_id, "name": message.name, "parse_error": message.parse_error}
    return record | {name: value for name, value in optional.items() if value is not None}


def _message_from_dict(record: Record) -> Message:
    if not isinstance(record.get("content"), str):
        raise ValueError("the content of a message is no text")
    calls = [ToolCall(**call) for call in record.get("tool_calls", [])]
    return Message(**(record | {"tool_calls": calls}))


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """The trajectories of a JSONL file in order; ``EmailRLError`` names file and line of one that is not whole."""
    for number, record in numbered_records(path):
        try:
            yield trajectory_from_dict(record)
        except KeyError as error:
            raise EmailRLError(f"{path}, line {number}: not a trajectory, {error.args[0]!r} is missing.") from None
        except (TypeError, ValueError, AttributeError) as error:
            raise EmailRLError(f"{path}, line {number}: not a trajectory ({error}).") from None


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write a whole file of trajectories at once; it is there complete or not at all."""
    write_records(path, map(trajectory_to_dict, trajectories))


class TrajectoryWriter(JsonlWriter):
    """Appends trajectories to a JSONL file as they come."""

    def append(self, trajectory: Trajectory) -> None:
        """Append one trajectory."""
        self.write(trajectory_to_dict(trajectory))


class MetricsWriter(JsonlWriter):
    """``metrics.jsonl``: one object a step, in the order of the steps; what is not finite is null."""

    def __init__(self, path: Path, *, after_step: int | None = None) -> None:
        """Open to append; lines of steps beyond ``after_step``, left by a run cut short, are removed first."""
        if after_step is not None:
            keep_records(path, lambda record: record.get("step", 0) <= after_step)
        super().__init__(path)
