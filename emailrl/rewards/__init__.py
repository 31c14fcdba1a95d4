"""Rewards: the answer check, the named rewards, and the scorer made of one of each."""

from emailrl.rewards.build import build_scorer
from emailrl.rewards.scorer import AnswerCheck, OfflineMatcher, Scorer

__all__ = ["AnswerCheck", "OfflineMatcher", "Scorer", "build_scorer"]
