"""The named rewards: ART-E's as terms that add up to it, the binary one, and that of mode ``simple``.

ART-E's formula, with p = found + read + no_invalid_id + cited; the first case that holds decides:

    unreadable call    -2 + p    wrong answer                 -1 + p
    unknown tool     -1.9 + p    "I don't know", out of turns  0 + p
    bad arguments    -1.8 + p      right answer   1 + 0.3*cited + 0.1 / num_sources + 0.1*(1 - num_turns / max_turns)

If the mailbox holds no answer, "I don't know" is right and earns 1 whatever it cites and however many turns it took,
but only after a search: said at once, it earns 0 + p as on any other question. If all source emails are needed,
``cited`` takes every one, and the third term is 0.1 * needed / num_sources, at most 0.1.

Departures from ART-E: ``num_sources`` is set (there it stayed 0, and with it the bonus); a completion truncated at the
token limit is a separate case, with ART-E's reward for the bad tool call it leaves behind.

Mode ``simple`` scores one completion on the static first prompt, without a rollout. A useful first move is a valid tool
call: a search for words of the question. Terms (their sum lies between -0.25 and 1.1):

    readable   +0.25 a tool call that can be read · -0.25 markup that cannot · 0 no call
    valid      +0.25 a tool that exists, with arguments that fit its signature
    useful     +0.5 * the share of the keywords' words that occur in the question, less where there are more than three;
               for an immediate final answer, +0.5 if the offline matcher finds it right
    brevity    +0.1 * the share of the completion budget left
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from emailrl.agent.tools import TOOLS, check_arguments
from emailrl.base.errors import EmailRLError, ToolError
from emailrl.records.trajectory import Scenario, StopReason, ToolCall, Trajectory
from emailrl.rewards.matching import match
from emailrl.settings import RewardWeightSettings

Reward = Callable[[Trajectory], dict[str, float]]
"""Named terms of one finished trajectory whose ``rubric["answer_correct"]`` is known; their sum is its reward."""
Terms = dict[str, float] | Exception  # The named terms of one trajectory's reward, or an error.


@dataclass(frozen=True, slots=True)
class BatchReward:
    """A reward computed for many trajectories at once, such as a remote one."""

    score: Callable[[Sequence[Trajectory]], Sequence[Terms]]


ART_E_TERMS = ("outcome", "found", "read", "no_invalid_id", "cited", "few_sources", "few_turns")


def art_e_reward(weights: RewardWeightSettings, max_turns: int) -> Reward:
    """ART-E's reward with the given weights: the same seven terms each time, 0.0 where one does not apply."""

    def reward(trajectory: Trajectory) -> dict[str, float]:
        rubric, scenario = trajectory.rubric, trajectory.scenario
        case = _case(trajectory)
        terms = dict.fromkeys(ART_E_TERMS, 0.0) | {"outcome": getattr(weights, case)}
        if case != "reward_correct":
            return terms | {
                "found": weights.bonus_found if rubric["ever_found_right_email"] else 0.0,
                "read": weights.bonus_read if rubric["ever_read_right_email"] else 0.0,
                "no_invalid_id": 0.0 if rubric["ever_tried_to_read_invalid_email"] else weights.bonus_no_invalid_id,
                "cited": weights.bonus_cited_wrong if rubric["sources_correct"] else 0.0,
            }
        num_sources = rubric["num_sources"] if scenario.answerable else 0
        needed = min(len(scenario.message_ids), num_sources) if scenario.needs_all else 1
        turns_left = 1 - rubric["num_turns"] / max_turns if scenario.answerable else 0.0
        return terms | {
            "cited": weights.bonus_cited if rubric["sources_correct"] else 0.0,
            "few_sources": weights.bonus_few_sources * needed / num_sources if num_sources else 0.0,
            "few_turns": weights.bonus_few_turns * turns_left,
        }

    return reward


def simple_reward(trajectory: Trajectory) -> dict[str, float]:
    """1 for a right answer, else 0 (ART-E's ablation); "I don't know" without a search is not one."""
    return {"outcome": float(trajectory.rubric["answer_correct"] and _has_looked(trajectory))}


def _case(trajectory: Trajectory) -> str:
    """The first of ART-E's cases that holds, as the setting of its weight."""
    rubric = trajectory.rubric
    if rubric["cant_parse_tool_call"]:
        return "reward_cant_parse"
    if rubric["bad_tool_call_name"]:
        return "reward_bad_name"
    if rubric["bad_tool_call_args"]:
        return "reward_bad_args"
    if trajectory.stop_reason is StopReason.TRUNCATED:
        return "reward_truncated"
    if rubric["answer_correct"] and _has_looked(trajectory):
        return "reward_correct"
    if rubric["attempted_answer"]:
        return "reward_wrong"
    if rubric["returned_i_dont_know"] or rubric["ran_out_of_turns"]:
        return "reward_no_answer"
    what = f"The art_e reward does not cover this outcome: no answer, stop_reason {trajectory.stop_reason}."
    raise EmailRLError(what, "A custom environment needs its own reward.")


def _has_looked(trajectory: Trajectory) -> bool:
    """Whether the question has an answer, or a tool other than those that read was used before the last turn."""
    searched = any(turn.tool_name not in (None, "read_email", "read_thread") for turn in trajectory.turns[:-1])
    return trajectory.scenario.answerable or searched


_FACTS = {
    "found": ("ever_found_right_email", True, "No search returned a source email."),
    "read": ("ever_read_right_email", True, "No source email was read."),
    "no_invalid_id": ("ever_tried_to_read_invalid_email", False, "An email that does not exist was requested."),
    "cited": ("sources_correct", True, "The source emails that the answer needs are not cited."),
}
"""Terms of one fact: its field in the rubric, the value that earns the term, and the reason without it."""


def reasons(trajectory: Trajectory) -> dict[str, str]:
    """Why each term of ``art_e`` or ``simple`` is what it is, a sentence per term, from the rubric and in the words of
    the settings that weigh it; empty if another reward made the terms."""
    names = trajectory.reward_terms.keys() - {"overlong"}
    if names not in ({"outcome"}, {*ART_E_TERMS}) or "ran_out_of_turns" not in trajectory.rubric:
        return {}
    fields = RewardWeightSettings.model_fields.items()
    words = {name: " ".join((field.description or "").split()).rstrip(".") for name, field in fields}
    rubric, scenario, case = trajectory.rubric, trajectory.scenario, _case(trajectory)
    said = {"outcome": f"{words[case]}."}
    if names == {"outcome"}:
        return said
    words["bonus_cited"] = words["bonus_cited" if case == "reward_correct" else "bonus_cited_wrong"]
    for name, (field, earns, otherwise) in _FACTS.items():
        said[name] = f"{words[f'bonus_{name}']}." if rubric[field] == earns else otherwise
    if case != "reward_correct":
        return said | dict.fromkeys(("few_sources", "few_turns"), "Only a correct answer earns this.")
    said |= dict.fromkeys(("found", "read", "no_invalid_id"), "Not given with a correct answer.")
    if not scenario.answerable:
        return said | dict.fromkeys(("few_sources", "few_turns"), "Not given where the mailbox holds no answer.")
    cited = rubric["num_sources"]
    of = f"{min(len(scenario.message_ids), cited)} needed of {cited}" if scenario.needs_all else cited
    few = f"{words['bonus_few_sources']}: {of}." if cited else "The answer cites no email."
    return said | {"few_sources": few, "few_turns": f"{words['bonus_few_turns']}: {rubric['num_turns']} used."}


ENOUGH_WORDS = 3  # Keywords are joined by AND: every additional word makes an empty result likelier.


def heuristic_reward(max_tokens: int) -> Reward:
    """The reward of mode ``simple``, for completions of at most ``max_tokens`` tokens."""

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
            with suppress(ToolError):
                useful = _usefulness(message.tool_calls[0], trajectory.scenario)
                terms |= {"valid": 0.25, "useful": 0.5 * useful}
        return terms

    return reward


def _usefulness(call: ToolCall, scenario: Scenario) -> float:
    """Between 0 and 1; a mail cannot usefully be read before any search; raises ToolError for an invalid call."""
    if call.name not in TOOLS:
        raise ToolError(f"no tool {call.name}")
    check_arguments(call.name, call.arguments)
    if call.name == "search_emails":
        words, asked = (
            re.findall(r"\w+", text.lower()) for text in (" ".join(call.arguments["keywords"]), scenario.question)
        )
        share = sum(word in asked for word in words) / max(1, len(words))
        return share * min(1.0, ENOUGH_WORDS / max(1, len(words)))
    if call.name == "return_final_answer":
        return float(match(scenario.question, scenario.answer, call.arguments["answer"], kind=scenario.kind))
    return 0.0
