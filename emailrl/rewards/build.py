"""From settings to a scorer."""

from __future__ import annotations

from emailrl.rewards.custom import HttpReward, load_reward
from emailrl.rewards.judge import LLMJudge, judge_key
from emailrl.rewards.rubric import Reward, art_e_reward, heuristic_reward, simple_reward
from emailrl.rewards.scorer import AnswerCheck, BatchReward, OfflineMatcher, Scorer
from emailrl.settings import AgentSettings, RewardSettings, RewardWeightSettings


def build_scorer(
    rewards: RewardSettings, weights: RewardWeightSettings, agent: AgentSettings, *, reward: str | None = None
) -> Scorer:
    """The configured scorer; ``reward`` overrides the setting (mode simple: ``heuristic``)."""
    name, concurrency = reward or rewards.reward, agent.rollout_concurrency
    answers: AnswerCheck = LLMJudge(rewards, concurrency=concurrency) if uses_judge(rewards) else OfflineMatcher()
    chosen: Reward | BatchReward
    if name == "art_e":
        chosen = art_e_reward(weights, agent.max_turns)
    elif name == "simple":
        chosen = simple_reward
    elif name == "heuristic":
        chosen = heuristic_reward(agent.max_tokens)
    else:
        chosen = (
            HttpReward(name, rewards, concurrency=concurrency)
            if name.lower().startswith(("http://", "https://"))
            else load_reward(name)
        )
    return Scorer(answers, chosen)


def uses_judge(rewards: RewardSettings) -> bool:
    """Whether an LLM judges answers: if configured, or by default if a key for its endpoint is set."""
    return rewards.judge == "llm" or (rewards.judge == "auto" and bool(judge_key(rewards)))
