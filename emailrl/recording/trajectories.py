"""Trajectories as objects of a JSONL file, and back."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from pathlib import Path

from emailrl.disk import replace_bytes
from emailrl.errors import EmailRLError
from emailrl.recording.index import IndexWriter, entry_line, write_index
from emailrl.recording.lines import JsonlWriter, Record, encode, numbered_records
from emailrl.trajectory import Message, Scenario, StopReason, TokenSample, ToolCall, Trajectory, Turn, scenario_fields


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
        yield trajectory_in_line(path, number, record)


def trajectory_in_line(path: Path, number: int, record: Record) -> Trajectory:
    """The trajectory of one line's object; ``EmailRLError`` names file and line where it is not one."""
    try:
        return trajectory_from_dict(record)
    except KeyError as error:
        raise EmailRLError(f"{path}, line {number}: not a trajectory, {error.args[0]!r} is missing.") from None
    except (TypeError, ValueError, AttributeError) as error:
        raise EmailRLError(f"{path}, line {number}: not a trajectory ({error}).") from None


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write a whole file of trajectories at once, and its index; the file is there complete or not at all."""
    lines: list[bytes] = []
    entries: list[bytes] = []
    offset = 0
    for number, record in enumerate(map(trajectory_to_dict, trajectories), 1):
        lines.append(encode(record))
        entries.append(entry_line(number, offset, lines[-1], record))
        offset += len(lines[-1])
    replace_bytes(path, b"".join(lines))
    if path.is_file():  # no index beside a pipe
        write_index(path, entries)


class TrajectoryWriter(JsonlWriter):
    """Appends trajectories to a JSONL file and its index as they come."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._index = IndexWriter(path)

    def append(self, trajectory: Trajectory) -> None:
        """Append one trajectory."""
        record = trajectory_to_dict(trajectory)
        line = encode(record)
        self.write_bytes(line)
        self._index.append(line, record)

    def close(self) -> None:
        """Put everything on disk."""
        super().close()
        self._index.close()
