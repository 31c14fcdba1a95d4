"""Custom rewards, by Python path (``emailrl.custom``).

The attribute is called with a finished ``Trajectory`` (its ``rubric["answer_correct"]`` is known) and returns a number,
or a dict of named numbers that are added up. One that takes ``queries, prompts, labels`` is an OpenRLHF
``reward_func``: it is called with lists, and its dict is read as a remote scorer's reply is (``http_protocol``).
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

from emailrl.custom import CustomPart, is_path, load_part
from emailrl.errors import EmailRLError, UsageError
from emailrl.rewards.http_protocol import read_reply, read_terms, request_body
from emailrl.rewards.rubric import Reward
from emailrl.rewards.scorer import BatchReward, Terms
from emailrl.trajectory import Trajectory

_OPENRLHF = ["queries", "prompts", "labels"]


def load_reward(name: str) -> Reward | BatchReward:
    """The reward at a Python path; raises ``UsageError`` if it is missing or cannot be loaded.

    When called, it raises ``EmailRLError`` if the user's code raises or returns an invalid reward.
    """
    if not is_path(name):
        hint = "Built-in rewards: art_e, simple, heuristic. Your own: module:attribute, path.py:attribute or a URL."
        raise UsageError(f"Unknown reward: {name!r}.", hint)
    part = load_part(name, "reward")
    if _parameters(part) == _OPENRLHF:
        return OpenRLHFReward(part)

    def reward(trajectory: Trajectory) -> dict[str, float]:
        return read_terms(part.run("The reward", part.call, trajectory), part.attribute, f"The reward {name}")

    return reward


class OpenRLHFReward:
    """A function of OpenRLHF's signature ``(queries, prompts, labels)``, called once for all trajectories of a step."""

    def __init__(self, part: CustomPart) -> None:
        self._part = part

    def score_batch(self, trajectories: Sequence[Trajectory]) -> list[Terms]:
        """One dict of terms per trajectory; the same error for all if the function failed."""
        body = request_body(trajectories)
        try:
            reply = self._part.run("The reward", self._part.call, body["query"], body["prompts"], body["labels"])
            if isinstance(reply, dict):
                reply = {name: _plain(value) for name, value in reply.items()}
            return [*read_reply(reply, trajectories, f"The reward {self._part.name}")]
        except EmailRLError as error:
            return [error] * len(trajectories)


def _parameters(part: CustomPart) -> list[str]:
    try:
        return [name for name in inspect.signature(part.call).parameters if name != "kwargs"]
    except (TypeError, ValueError):  # a callable written in C has no signature to read
        return []


def _plain(value: Any) -> Any:
    """Tensors and arrays as lists, dicts of them too."""
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value.tolist() if hasattr(value, "tolist") else value
