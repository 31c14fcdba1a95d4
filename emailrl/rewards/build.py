"""From settings to a scorer."""

from __future__ import annotations

from emailrl.rewards.custom import HttpReward, is_url, load_reward
from emailrl.rewards.heuristic import heuristic_reward
from emailrl.rewards.judge import LLMJudge, judge_key
from emailrl.rewards.rubric import Reward, art_e_reward, simple_reward
from emailrl.rewards.scorer import AnswerCheck, BatchReward, OfflineMatcher, Scorer
from emailrl.settings import Settings
from emailrl.settings.tree import RewardSettings


def build_scorer(settings: Settings, *, reward: str | None = None) -> Scorer:
    """The scorer configured in ``settings.rewards``; ``reward`` overrides its reward (mode simple: ``heuristic``)."""
    return Scorer(_answer_check(settings), _reward(settings, reward or settings.rewards.reward))


def uses_judge(rewards: RewardSettings) -> bool:
    """Whether an LLM judges answers: if configured, or by default if a key for its endpoint is set."""
    return rewards.judge == "llm" or (rewards.judge == "auto" and bool(judge_key(rewards)))


def _answer_check(settings: Settings) -> AnswerCheck:
    if uses_judge(settings.rewards):
        return LLMJudge(settings.rewards, concurrency=settings.agent.rollout_concurrency)
    return OfflineMatcher()


def _reward(settings: Settings, name: str) -> Reward | BatchReward:
    if name == "art_e":
        return art_e_reward(settings.reward_weights, settings.agent.max_turns)
    if name == "simple":
        return simple_reward
    if name == "heuristic":
        return heuristic_reward(settings.agent.max_tokens)
    if is_url(name):
        return HttpReward(name, settings.rewards, concurrency=settings.agent.rollout_concurrency)
    return load_reward(name)
