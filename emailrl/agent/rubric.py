"""The rubric of a rollout: ART-E's fifteen fields, and features of its answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Rubric:
    """ART-E's rubric of one trajectory; ``dataclasses.asdict`` of it is ``Trajectory.rubric``.

    The environment fills everything but ``answer_correct`` and what follows the token counts (the scorer), and these
    (the runner).

    Differences from ART-E, each fixing a defect: success counts any of the scenario's source emails, not only the first
    (one is enough, as a question's source emails usually repeat the same fact); an email counts as read only when the
    tool returned it; ``num_sources`` is set, and counts distinct ids.
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
    """Length of an attempted answer; this and the fields below are None without one, so that means are over answers."""
    answer_candidates: int | None = None
    """How many candidate answers it offers (``rewards.wording.count_candidates``)."""
    answer_capitals: float | None = None
    """Share of capitals among its letters."""
    offline_correct: bool | None = None
    """The offline check's verdict, if a judge decided and the answer is in the compared sample."""
