"""Writes trajectories as objects of a JSONL file; ``fields`` reads them back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from emailrl.disk import replace_bytes
from emailrl.records.entry import entry_line
from emailrl.records.fields import trajectory_in_line
from emailrl.records.index import IndexWriter, write_index
from emailrl.records.lines import JsonlWriter, Record, encode, numbered_records
from emailrl.records.trajectory import Message, TokenSample, Trajectory, Turn, scenario_fields


def trajectory_to_dict(trajectory: Trajectory) -> Record:
    """Return the trajectory in its JSONL form (``docs/architecture.md``, contracts).

    A single sample is stored at the top level as ``token_ids``, ``loss_mask`` and ``sampler_logprobs``; without a
    sample, these are empty lists; several samples are stored in ``samples`` instead.
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


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Yield the trajectories of a JSONL file in order; ``EmailRLError`` names file and line of an invalid one."""
    for number, record in numbered_records(path):
        yield trajectory_in_line(path, number, record)


def write_trajectories(path: Path, trajectories: Iterable[Trajectory]) -> None:
    """Write a whole file of trajectories at once, and its index, atomically."""
    lines: list[bytes] = []
    entries: list[bytes] = []
    offset = 0
    for number, trajectory in enumerate(trajectories, 1):
        lines.append(encode(trajectory_to_dict(trajectory)))
        entries.append(entry_line(number, offset, lines[-1], trajectory))
        offset += len(lines[-1])
    replace_bytes(path, b"".join(lines))
    if path.is_file():  # no index beside a pipe
        write_index(path, entries)


class TrajectoryWriter(JsonlWriter):
    """Appends trajectories to a JSONL file and its index."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._index = IndexWriter(path)

    def append(self, trajectory: Trajectory) -> None:
        """Append one trajectory."""
        line = encode(trajectory_to_dict(trajectory))
        self.write_bytes(line)
        self._index.append(line, trajectory)

    def close(self) -> None:
        """Flush everything to disk."""
        super().close()
        self._index.close()
