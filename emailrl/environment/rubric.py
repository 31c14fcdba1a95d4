"""What a rollout did and did not do: ART-E's fifteen rubric fields, and what its answer looks like."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(slots=True)
class Rubric:
    """ART-E's rubric of one trajectory; ``dataclasses.asdict`` of it is ``Trajectory.rubric``.

    The environment fills everything but ``answer_correct`` and what follows the token counts (the scorer), and these
    (the runner).

    Departures from ART-E, each mending a defect there: success counts any of the scenario's source mails, not the
    first alone (one is enough, as a question's source mails usually repeat the same fact); a mail counts as read
    only when the tool handed it over; ``num_sources`` is set, and counts distinct ids.
    """

    answer_correct: bool = False
    sources_correct: bool = False
    num_turns: int = 0
    """Completions so far; ``max_turns + 1`` when the agent ran out of turns, as in ART-E."""
    attempted_answer: bool = False
    ever_found_right_email: bool = False
    ever_read_right_email: bool = False
    cant_parse_tool_call: bool = False
    bad_tool_call_name: bool = False
    bad_tool_call_args: bool = False
    ran_out_of_turns: bool = False
    returned_i_dont_know: bool = False
    num_sources: int = 0
    ever_tried_to_read_invalid_email: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0
    answer_words: int | None = None
    """Of an attempted answer, as the other fields below; None without one, so that means are over answers."""
    answer_candidates: int | None = None
    """How many things it offers (``rewards.wording.count_candidates``)."""
    answer_capitals: float | None = None
    """Share of capitals among its letters."""
    offline_correct: bool | None = None
    """What the offline check says, where a judge decided and the answer is in the sample that is compared."""


_I_DONT_KNOW = re.compile(
    r"(?:(?:sorry|i am sorry|i'?m sorry|unfortunately),?\s*)?(?:but )?(?:i\s+)?(?:do\s+not|don'?t)\s+know"
    r"(?:\s+(?:the\s+answer|that|this|it))?(?:\s+to\s+(?:that|this|the|your)(?:\s+question)?)?|idk"
)


def is_i_dont_know(answer: str) -> bool:
    """Whether an answer says no more than "I don't know", whatever its apostrophe, case and full stop."""
    text = re.sub(r"[\u2018\u2019\u02bc`\u00b4]", "'", answer).lower().strip(" \t\r\n.!\"'")
    return _I_DONT_KNOW.fullmatch(text) is not None
