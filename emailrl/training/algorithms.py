"""Algorithms as data: advantage, ratio and clipping, KL estimator and placement, aggregation.

The update reads these fields, never the name; a new algorithm is a new row of ``ALGORITHMS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LossMask = Literal["sampled", "after_prompt", "completion"]
"""Tokens that a mode trains: the sampled ones (masked), all after the prompt including tool results (rollout), or
those of the completion (simple: the sampled ones of a single-completion trajectory)."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """One policy-gradient algorithm. ``docs/reference/algorithms.md`` compares each field with its paper."""

    name: str
    advantage: str
    """A key of ``advantages.ESTIMATORS``, or ``gae`` (per token, from a critic)."""
    whiten: bool = False
    """Shift and scale the advantages to mean 0 and variance 1 over all trainable tokens of the step."""
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    ratio_level: Literal["token", "sequence"] = "token"
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    kl_in: Literal["loss", "reward"] = "loss"
    value_clip: float | None = None
    """Maximum change of a value from its old estimate before its error is clipped."""
    dynamic_filtering: bool = False
    """Train only on groups whose mean is inside a range, and replace the others with more questions."""
    importance_correction: Literal["off", "tis", "icepop", "sequence_mask"] = "off"
    """Importance weighting of tokens when the sampler differs from the trainer's policy."""
    overlong_share: float = 0.0
    """Final share of MAX_TOKENS over which the length penalty grows; 0 is off."""

    @property
    def has_critic(self) -> bool:
        """Whether a value head estimates returns."""
        return self.advantage == "gae"

    @property
    def group_estimator(self) -> str:
        """Estimator from a group's rewards to one number per trajectory; with a critic, the reward itself."""
        return "reinforce" if self.has_critic else self.advantage

    @property
    def compares_rollouts(self) -> bool:
        """Whether rewards are compared within their group: if so, equal rewards teach nothing."""
        return self.advantage not in ("reinforce", "gae")

    @property
    def min_group_size(self) -> int:
        """Fewest rollouts per question for which the advantage is defined."""
        return 2 if self.compares_rollouts else 1


ALGORITHMS: dict[str, Algorithm] = {
    algorithm.name: algorithm
    for algorithm in (
        Algorithm("grpo", advantage="group_norm"),
        Algorithm("dr_grpo", advantage="dr_grpo", aggregation="constant"),
        Algorithm("dapo", advantage="group_norm", clip_high=0.28, dynamic_filtering=True, overlong_share=0.2),
        Algorithm(
            "gspo",
            advantage="group_norm",
            ratio_level="sequence",
            aggregation="sequence_mean",
            clip_low=3e-4,
            clip_high=4e-4,
        ),
        Algorithm("rloo", advantage="rloo", kl_estimator="k1", kl_in="reward"),
        Algorithm("reinforce_pp", advantage="reinforce", whiten=True, kl_estimator="k1", kl_in="reward"),
        Algorithm("reinforce_pp_baseline", advantage="reinforce_baseline", whiten=True, kl_estimator="k2"),
        Algorithm("ppo", advantage="gae", whiten=True, kl_estimator="k1", kl_in="reward", value_clip=0.5),
    )
}


def default_low(correction: str) -> float:
    """Lower bound of importance weights: 0 for ``tis``, as raising small weights biases the gradient, else 0.5."""
    return 0.0 if correction == "tis" else 0.5
