"""Whether an answer agrees with a reference answer, without a model: ``match(question, reference, answer)``."""

from emailrl.rewards.matching.agreement import match

__all__ = ["match"]
