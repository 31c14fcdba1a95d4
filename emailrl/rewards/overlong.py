"""A penalty for completions near the token limit, so that truncation is not a cliff.

DAPO's soft overlong punishment (arXiv 2503.14476, section 3.4; OpenRLHF's ``overlong_buffer_len``): with ``expected =
max_tokens - buffer`` a completion of ``length`` tokens costs ``min(length - expected, buffer) / buffer * penalty``, and
nothing up to ``expected``. In a conversation the limit holds for each completion, and so does the charge: ``length`` is
that of the longest one. Difference: OpenRLHF compares the length of all turns, including tool results, with the limit
of one generation, so an agent pays for reading long emails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from emailrl.errors import UsageError
from emailrl.rewards.scorer import Scorer
from emailrl.trajectory import Trajectory

TERM = "overlong"


@dataclass(frozen=True)
class OverlongScorer:
    """A scorer that adds the reward term ``overlong``, between ``-penalty`` and 0."""

    scorer: Scorer
    max_tokens: int
    """Maximum tokens per completion."""
    buffer: int
    """Tokens before ``max_tokens`` over which the penalty rises."""
    penalty: float

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.max_tokens:
            raise UsageError(
                f"OVERLONG_BUFFER={self.buffer} does not fit into MAX_TOKENS={self.max_tokens}.",
                "Use a smaller buffer, or 0 for none.",
            )

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Score in place; ``reward`` equals ``sum(reward_terms.values())`` exactly."""
        self.scorer.score(trajectories)
        for trajectory in trajectories:
            if trajectory.exception is None:
                terms = trajectory.reward_terms
                trajectory.reward_terms = terms | {TERM: terms.get(TERM, 0.0) - self.charge(trajectory)}
                trajectory.reward = sum(trajectory.reward_terms.values())

    def charge(self, trajectory: Trajectory) -> float:
        """The penalty of the trajectory's longest completion, 0 to ``penalty``; only sampled tokens count."""
        longest = max((len(turn.completion_ids) for turn in trajectory.turns), default=0)
        over = max(longest - (self.max_tokens - self.buffer), 0)
        return min(over, self.buffer) / self.buffer * self.penalty
