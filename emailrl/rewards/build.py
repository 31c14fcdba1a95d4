"""From settings to a scorer."""

from __future__ import annotations

from emailrl.errors import UsageError
from emailrl.rewards.custom import load_reward
from emailrl.rewards.heuristic import heuristic_reward
from emailrl.rewards.http_reward import HttpReward, is_url
from emailrl.rewards.judge import LLMJudge
from emailrl.rewards.overlong import with_overlong_charge
from emailrl.rewards.rubric import Reward, art_e_reward, simple_reward
from emailrl.rewards.scorer import AnswerCheck, BatchReward, OfflineMatcher, Scorer
from emailrl.settings import Settings


def build_scorer(settings: Settings, *, reward: str | None = None, overlong_buffer: int = 0) -> Scorer:
    """The scorer that ``settings.rewards`` asks for; ``reward`` overrides its reward (mode simple: ``heuristic``).

    ``overlong_buffer``: tokens before MAX_TOKENS over which a completion is charged (`overlong`); 0 charges nothing.
    """
    terms = _reward(settings, reward or settings.rewards.reward)
    max_tokens = settings.agent.max_tokens
    if overlong_buffer > max_tokens:
        raise UsageError(
            f"OVERLONG_BUFFER={overlong_buffer} is more than MAX_TOKENS={max_tokens}.", "Give a smaller buffer."
        )
    if overlong_buffer:
        penalty = settings.algorithm.overlong_penalty
        terms = with_overlong_charge(terms, max_tokens=max_tokens, buffer=overlong_buffer, penalty=penalty)
    return Scorer(_answer_check(settings), terms)


def _answer_check(settings: Settings) -> AnswerCheck:
    rewards = settings.rewards
    has_key = bool(rewards.openrouter_api_key and rewards.openrouter_api_key.get_secret_value())
    if rewards.judge == "llm" or (rewards.judge == "auto" and has_key):
        return LLMJudge(rewards, concurrency=settings.agent.rollout_concurrency)
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
