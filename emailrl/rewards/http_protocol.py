"""The remote scorer protocol: OpenRLHF's remote reward API, with additions for mail agents.

Request, version 1; every list has one entry per trajectory, in the same order:

    {"version": 1, "query": [text], "prompts": [text], "labels": [reference answer], "trajectories": [object]}

``query`` begins with its prompt, as in OpenRLHF. Both are the messages as plain text, for a scorer knows nothing of a
policy's chat template: a departure from OpenRLHF, whose queries hold the template's markup.

Reply:

    {"rewards": [number or {term: number}], "ids": [id], "scores": [number], "extra_logs": {name: [number]}}

Only ``rewards`` is required. ``ids``, where given, must be the request's in its order. ``scores`` and ``extra_logs``
go into the rubric as ``remote_score`` and ``remote_<name>``, and so into every table of rubric means.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

from emailrl.errors import EmailRLError
from emailrl.recording import trajectory_to_dict
from emailrl.trajectory import Message, Trajectory

T = TypeVar("T")
VERSION: Final = 1
_TERM: Final = "remote"
MAX_REWARD: Final = 1e9
"""Larger rewards are rejected: their squares, used for standard deviations, would overflow."""
MAX_NAMES: Final = 1000
"""Maximum number of a reward's terms, or of a reply's extra logs."""


def request_body(trajectories: Sequence[Trajectory]) -> dict[str, Any]:
    """The request for these trajectories as JSON values; no token ids, they are the policy's own."""
    split = [_first_assistant(trajectory.messages) for trajectory in trajectories]
    prompts = [_text(each.messages[:start]) for each, start in zip(trajectories, split, strict=True)]
    return {
        "version": VERSION,
        "query": [_text(trajectory.messages) for trajectory in trajectories],
        "prompts": prompts,
        "labels": [trajectory.scenario.answer for trajectory in trajectories],
        "trajectories": [_described(trajectory) for trajectory in trajectories],
    }


def read_reply(
    reply: Any, trajectories: Sequence[Trajectory], scorer: str, tellable: Callable[[str], str] = str
) -> list[dict[str, float]]:
    """One dict of terms a trajectory; scores and extra logs are written into the rubrics.

    ``scorer`` names the sender in errors; ``tellable`` makes a server-chosen name safe to record. Raises EmailRLError
    unless there is one finite reward per trajectory, in order: a partly valid reply is not used.
    """
    if not isinstance(reply, dict) or "rewards" not in reply:
        raise EmailRLError(f"{scorer} replied without rewards: {_shown(reply)}.", 'Reply {"rewards": [number, …]}.')
    count = len(trajectories)
    if "ids" in reply and reply["ids"] != [trajectory.id for trajectory in trajectories]:
        raise EmailRLError(f"{scorer} replied with ids that differ from those sent, or in another order.")
    rewards = _list_of(reply["rewards"], count, "rewards", scorer)
    terms = [_renamed(read_terms(reward, _TERM, scorer), tellable, scorer) for reward in rewards]
    extras = {"score": reply["scores"]} if reply.get("scores") is not None else {}
    logs = reply.get("extra_logs") or {}
    if not isinstance(logs, dict):
        raise EmailRLError(f"{scorer} replied with extra_logs that are not an object: {_shown(logs)}.")
    columns = {name: _numbers(values, count, name, scorer) for name, values in (extras | logs).items()}
    for name, column in _renamed(columns, tellable, scorer).items():
        for trajectory, number in zip(trajectories, column, strict=True):
            trajectory.rubric[f"remote_{name}"] = number
    return terms


def read_terms(value: Any, term: str, scorer: str) -> dict[str, float]:
    """A reward as named terms: a number becomes the one called ``term``; raises EmailRLError for anything else."""
    values = value if isinstance(value, dict) else {term: value}
    try:
        terms = {str(name): float(number) for name, number in values.items() if not isinstance(number, str)}
    except (TypeError, ValueError, OverflowError):
        terms = {}
    if not terms or len(terms) != len(values):
        raise EmailRLError(f"{scorer} returned {_shown(value)}.", "Return a number, or a dict of numbers.")
    if not all(math.isfinite(number) for number in terms.values()):
        raise EmailRLError(f"{scorer} returned {_shown(value)}.", "Rewards must be finite.")
    if any(abs(number) > MAX_REWARD for number in (*terms.values(), sum(terms.values()))):
        raise EmailRLError(f"{scorer} returned {_shown(value)}.", f"Rewards must lie within ±{MAX_REWARD:g}.")
    return terms


def _renamed(named: dict[str, T], tellable: Callable[[str], str], scorer: str) -> dict[str, T]:
    if len(named) > MAX_NAMES:
        raise EmailRLError(f"{scorer} replied with {len(named):,} names for one reward.", f"Send at most {MAX_NAMES}.")
    renamed = {tellable(name): value for name, value in named.items()}
    if len(renamed) != len(named):
        raise EmailRLError(
            f"{scorer} replied with names that cannot be distinguished.", "Give terms and logs short names."
        )
    return renamed


def _list_of(values: Any, count: int, name: str, scorer: str) -> list[Any]:
    if not isinstance(values, list) or len(values) != count:
        found = f"{len(values)} {name}" if isinstance(values, list) else f"{name} that are not a list"
        raise EmailRLError(f"{scorer} replied with {found} for {count} trajectories.")
    return values


def _numbers(values: Any, count: int, name: str, scorer: str) -> list[float]:
    return [read_terms(value, name, scorer)[name] for value in _list_of(values, count, name, scorer)]


def _described(trajectory: Trajectory) -> dict[str, Any]:
    scenario = trajectory.scenario
    return {
        "id": trajectory.id,
        "group_id": trajectory.group_id,
        "question": scenario.question,
        "reference_answer": scenario.answer,
        "reference_sources": scenario.message_ids,
        "inbox_address": scenario.inbox_address,
        "query_date": scenario.query_date,
        "final_answer": trajectory.final_answer,
        "final_sources": trajectory.final_sources,
        "stop_reason": trajectory.stop_reason,
        "rubric": trajectory.rubric,
        "messages": trajectory_to_dict(trajectory)["messages"],
    }


def _first_assistant(messages: Sequence[Message]) -> int:
    return next((place for place, message in enumerate(messages) if message.role == "assistant"), len(messages))


def _text(messages: Sequence[Message]) -> str:
    return "\n\n".join(f"{message.role}: {_spoken(message)}" for message in messages)


def _spoken(message: Message) -> str:
    """The content, and the calls of a chat server's message; sampled text holds its calls already."""
    if not message.tool_calls or "<tool_call>" in message.content:
        return message.content
    calls = [json.dumps({"name": call.name, "arguments": call.arguments}) for call in message.tool_calls]
    return "\n".join(filter(None, [message.content, *calls]))


def _shown(value: Any) -> str:
    """Whole: it is cut where secrets are taken out of it, for half of one would not be found."""
    return " ".join(repr(value).split())
