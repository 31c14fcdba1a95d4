"""The evidence of a trajectory: which email held the answer, and whether it was found, read and cited."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from emailrl.evaluation import verdict
from emailrl.records import Entry, Record
from emailrl.records.trajectory import StopReason, Trajectory, Turn

_STOPS: dict[str | None, str] = {
    StopReason.CANT_PARSE_TOOL_CALL: "tool call not readable",
    StopReason.BAD_TOOL_CALL_NAME: "no such tool",
    StopReason.BAD_TOOL_CALL_ARGS: "wrong tool arguments",
    StopReason.TRUNCATED: "cut off at a token limit",
}
"""Stop reasons that are failures in themselves, however far the search came."""


def evidence(trajectory: Trajectory) -> Record:
    """Return ``gold``, a list of each gold email's ``id``, ``found``, ``read`` (turns from 1, or None) and ``cited``,
    and ``others``, the cited emails that are not gold."""
    found, read = _first_turns(trajectory.turns)
    gold = trajectory.scenario.message_ids
    cited = set(trajectory.final_sources)
    return {
        "gold": [
            {"id": each, "found": found.get(each), "read": read.get(each), "cited": each in cited} for each in gold
        ],
        "others": [each for each in dict.fromkeys(trajectory.final_sources) if each not in gold],
    }


def failure(played: Trajectory | Entry, *, found: bool | None, read: bool | None) -> str:
    """Return why a trajectory failed, as one of a few classes; ``""`` if it was correct or has no verdict.

    A wrong answer, no answer and "I don't know" are split by whether a gold email was found and read; None if there is
    no gold email.
    """
    came_to = verdict(played)
    if came_to in ("correct", "not judged"):
        return ""
    if came_to == "crashed" or played.stop_reason in _STOPS:
        return "crashed" if came_to == "crashed" else _STOPS[played.stop_reason]
    if found is None:
        return came_to
    progress = "gold email read" if read else "gold email found, not read" if found else "gold email not found"
    return f"{came_to}, {progress}"


def _first_turns(turns: list[Turn]) -> tuple[dict[str, int], dict[str, int]]:
    """The turns (from 1) in which each message id was first found by a search, and first read."""
    found: dict[str, int] = {}
    read: dict[str, int] = {}
    for number, turn in enumerate(turns, 1):
        result = _parsed(turn.tool_result)
        if turn.tool_name == "search_emails":
            for message_id in _ids(result):
                found.setdefault(message_id, number)
        elif turn.tool_name == "read_email" and isinstance(result, dict) and isinstance(result.get("message_id"), str):
            read.setdefault(result["message_id"], number)
    return found, read


def _ids(hits: Any) -> Iterator[str]:
    for hit in hits if isinstance(hits, list) else ():
        if isinstance(hit, dict) and isinstance(hit.get("message_id"), str):
            yield hit["message_id"]


def _parsed(result: str | None) -> Any:
    """The tool's JSON; None for a result of another environment's tool that is not JSON."""
    try:
        return json.loads(result or "null")
    except (ValueError, RecursionError):
        return None
