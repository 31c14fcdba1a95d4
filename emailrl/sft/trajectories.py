"""Conversations from trajectory files: the highest-reward one per question, from any policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from emailrl.errors import UsageError
from emailrl.plain import counted
from emailrl.recording import read_trajectories
from emailrl.sft.examples import Conversation
from emailrl.trajectory import Message, StopReason, Trajectory

_UNFIT = (StopReason.TRUNCATED, StopReason.EXCEPTION)


def read_conversations(
    files: Sequence[Path], *, best_of: int | None = None, min_reward: float | None = None
) -> tuple[list[Conversation], list[str]]:
    """The highest-reward conversation per question (the first of equals), and notes on the rest.

    ``best_of`` considers only that many first trajectories per question; ``min_reward`` drops lower rewards.
    Trajectories that raised, were truncated, or have no assistant reply are never used. Raises UsageError for a missing
    file or if nothing is left, EmailRLError (file and line) for one that cannot be read.
    """
    for file in files:
        if not file.is_file():
            raise UsageError(f"No such trajectory file: {file}.", "Record one: emailrl rollout --out FILE.jsonl")
    counts: Counter[str] = Counter()
    best = _best_by_question((each for file in files for each in read_trajectories(file)), best_of, min_reward, counts)
    if not best:
        raise UsageError(f"No trajectory is left to train on ({_told(counts)}).", "Lower --min-reward, or add files.")
    notes = [f"{counted(len(best), 'conversation')} from trajectories ({_told(counts)})"]
    if held_out := sum(trajectory.scenario.split == "test" for trajectory in best):
        notes.append(f"{held_out} of them are on test questions: a benchmark on those is no longer held out")
    return [_conversation(trajectory) for trajectory in best], notes


def _best_by_question(
    trajectories: Iterable[Trajectory], best_of: int | None, min_reward: float | None, counts: Counter[str]
) -> list[Trajectory]:
    seen: Counter[tuple[str, str]] = Counter()
    best: dict[tuple[str, str], Trajectory] = {}
    for trajectory in trajectories:
        question = (trajectory.scenario.id, trajectory.scenario.inbox_address)
        counts["read"] += 1
        seen[question] += 1
        if best_of is not None and seen[question] > best_of:
            counts["beyond --best-of"] += 1
        elif trajectory.exception is not None or trajectory.stop_reason in _UNFIT or not trajectory.turns:
            counts["cut off or raised"] += 1
        elif not _is_conversation(trajectory.messages):
            counts["no conversation"] += 1
        elif min_reward is not None and trajectory.reward < min_reward:
            counts["below --min-reward"] += 1
        elif question not in best or trajectory.reward > best[question].reward:
            best[question] = trajectory
    return list(best.values())


def _is_conversation(messages: Sequence[Message]) -> bool:
    """Whether an assistant replies to something, all of it in characters that a tokenizer takes."""
    roles = [message.role for message in messages]
    try:
        "".join(message.content for message in messages).encode()
    except UnicodeEncodeError:
        return False
    return "assistant" in roles[1:] and roles[0] != "assistant"


def _told(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {what}" for what, count in counts.items()) or "none read"


def _conversation(trajectory: Trajectory) -> Conversation:
    """All messages up to the last assistant turn: nothing after it is trained."""
    messages = trajectory.messages
    end = max(place for place, message in enumerate(messages) if message.role == "assistant") + 1
    scenario = trajectory.scenario
    return Conversation(trajectory.id, scenario.inbox_address, scenario.split, messages[:end])
