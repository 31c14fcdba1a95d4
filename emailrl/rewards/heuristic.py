"""The reward of mode ``simple``: one completion on the static first prompt, scored without a rollout.

A useful first move is a valid tool call: a search for words of the question.
Terms (their sum lies between -0.25 and 1.1):

    readable   +0.25 a tool call that can be read · -0.25 markup that cannot · 0 no call
    valid      +0.25 a tool that exists, with arguments that fit its signature
    useful     +0.5 * the share of the keywords' words that occur in the question, less where there are more than three;
               for an immediate final answer, +0.5 if the offline matcher finds it right
    brevity    +0.1 * the share of the completion budget left
"""

from __future__ import annotations

import re

from emailrl.agent.tools import TOOLS, check_arguments
from emailrl.base.errors import ToolError
from emailrl.records.trajectory import Scenario, ToolCall, Trajectory
from emailrl.rewards.matching import match
from emailrl.rewards.rubric import Reward

ENOUGH_WORDS = 3
"""Keywords are joined by AND: every additional word makes an empty result likelier."""


def heuristic_reward(max_tokens: int) -> Reward:
    """The reward described above, for completions of at most ``max_tokens`` tokens."""

    def reward(trajectory: Trajectory) -> dict[str, float]:
        message = next((m for m in trajectory.messages if m.role == "assistant"), None)
        if message is None:
            raise ValueError(f"trajectory {trajectory.id} holds no completion")
        used = len(trajectory.turns[0].completion_ids) if trajectory.turns else 0
        terms = {"readable": 0.0, "valid": 0.0, "useful": 0.0, "brevity": 0.1 * max(0.0, 1 - used / max_tokens)}
        if message.parse_error is not None:
            terms["readable"] = -0.25
        elif message.tool_calls:
            terms["readable"] = 0.25
            useful = _usefulness(message.tool_calls[0], trajectory.scenario)
            if useful is not None:
                terms |= {"valid": 0.25, "useful": 0.5 * useful}
        return terms

    return reward


def _usefulness(call: ToolCall, scenario: Scenario) -> float | None:
    """Between 0 and 1, or None if the call is not valid; a mail cannot usefully be read before any search."""
    if call.name not in TOOLS:
        return None
    try:
        check_arguments(call.name, call.arguments)
    except ToolError:
        return None
    if call.name == "search_emails":
        words, asked = (
            re.findall(r"\w+", text.lower()) for text in (" ".join(call.arguments["keywords"]), scenario.question)
        )
        share = sum(word in asked for word in words) / max(1, len(words))
        return share * min(1.0, ENOUGH_WORDS / max(1, len(words)))
    if call.name == "return_final_answer":
        return float(match(scenario.question, scenario.answer, call.arguments["answer"], kind=scenario.kind))
    return 0.0
