"""Scoring: are the answers right, and what is each trajectory worth."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, runtime_checkable

from emailrl.errors import EmailRLError
from emailrl.rewards.matching import match
from emailrl.rewards.rubric import Reward
from emailrl.trajectory import Trajectory

logger = logging.getLogger(__name__)


class AnswerCheck(Protocol):
    """Says whether an answer to a question agrees with the reference answer."""

    concurrency: int
    """Most checks in flight at once; 1 for checks that compute."""

    def check(self, question: str, reference: str, answer: str) -> bool:
        """True if right; raises ``EmailRLError`` where no verdict could be had."""
        ...


Terms = dict[str, float] | EmailRLError
"""The named terms of one trajectory's reward, or the error that stands for them."""


@runtime_checkable
class BatchReward(Protocol):
    """A reward that is given many trajectories at once, such as a remote one."""

    def score_batch(self, trajectories: Sequence[Trajectory]) -> list[Terms]:
        """One entry a trajectory, in their order."""
        ...


class OfflineMatcher:
    """The check without a model: ``matching.match``."""

    concurrency = 1

    def check(self, question: str, reference: str, answer: str) -> bool:
        """True if right."""
        return match(question, reference, answer)


class Scorer:
    """Fills ``rubric["answer_correct"]``, ``reward`` and ``reward_terms`` of finished trajectories."""

    def __init__(self, answers: AnswerCheck, reward: Reward | BatchReward) -> None:
        self.answers = answers
        self.reward = reward

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Score in place; ``reward`` equals ``sum(reward_terms.values())`` exactly.

        Trajectories that already hold an exception are left alone. One whose answer could not be judged, or whose
        reward could not be had, gets its ``exception`` set and no reward: an outage is never a wrong answer.
        """
        finished = [trajectory for trajectory in trajectories if trajectory.exception is None]
        verdicts = self._judge({_claim(trajectory) for trajectory in finished if _attempted(trajectory)})
        judged = []
        for trajectory in finished:
            verdict = verdicts[_claim(trajectory)] if _attempted(trajectory) else False
            if isinstance(verdict, EmailRLError):
                trajectory.exception = f"{type(verdict).__name__}: {verdict}"
                continue
            trajectory.rubric["answer_correct"] = verdict
            judged.append(trajectory)
        for trajectory, terms in zip(judged, self._terms(judged), strict=True):
            if isinstance(terms, EmailRLError):
                trajectory.exception = f"{type(terms).__name__}: {terms}"
                continue
            trajectory.reward_terms = terms
            trajectory.reward = sum(terms.values())

    def _terms(self, trajectories: Sequence[Trajectory]) -> list[Terms]:
        reward = self.reward
        if isinstance(reward, BatchReward):
            return reward.score_batch(trajectories)
        terms: list[Terms] = []
        for trajectory in trajectories:
            try:
                terms.append(reward(trajectory))
            except EmailRLError as error:
                logger.warning("a trajectory got no reward: %s", error)
                terms.append(error)
        return terms

    def _judge(self, claims: set[tuple[str, str, str]]) -> dict[tuple[str, str, str], bool | EmailRLError]:
        """One verdict for each different claim, or the error that stands for it."""
        ordered = sorted(claims)
        workers = min(self.answers.concurrency, len(ordered))
        if workers <= 1:
            return {claim: self._verdict(claim) for claim in ordered}
        with ThreadPoolExecutor(workers, thread_name_prefix="judge") as pool:
            return dict(zip(ordered, pool.map(self._verdict, ordered), strict=True))

    def _verdict(self, claim: tuple[str, str, str]) -> bool | EmailRLError:
        try:
            return self.answers.check(*claim)
        except EmailRLError as error:
            logger.warning("an answer could not be judged: %s", error)
            return error


def _attempted(trajectory: Trajectory) -> bool:
    return bool(trajectory.rubric.get("attempted_answer"))


def _claim(trajectory: Trajectory) -> tuple[str, str, str]:
    scenario = trajectory.scenario
    return scenario.question, scenario.answer, trajectory.final_answer or ""
