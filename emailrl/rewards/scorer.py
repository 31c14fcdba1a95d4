"""From settings to a scorer, which scores trajectories with the named reward, and measures surface features of answers.

The features do not affect the reward: they change first when a policy games it, as longer answers, lists or capitals.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Protocol

from emailrl.base.credentials import redacted
from emailrl.base.errors import EmailRLError, UsageError
from emailrl.base.http import Bill, CostReached
from emailrl.base.plain import counted
from emailrl.records.trajectory import Trajectory
from emailrl.rewards.custom import http_reward, load_reward
from emailrl.rewards.judge import LLMJudge, judge_key
from emailrl.rewards.matching import match
from emailrl.rewards.rubric import BatchReward, Reward, Terms, art_e_reward, heuristic_reward, simple_reward
from emailrl.rewards.ruler import ruler_reward
from emailrl.settings import AgentSettings, RewardSettings, RewardWeightSettings

_NO_TEXT = re.compile(r"https?://\S+|<[^\s<>]+>")
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n+")
_JOINT = re.compile(r" ?[,;] (?:(?:and|or) )?| (?:and/or|or|and) | ?/ ?(?=[^\W\d])", re.IGNORECASE)
_CHOICE = re.compile(r"or\b|[;/]", re.IGNORECASE)
_YEAR_AFTER_COMMA = re.compile(r",(?=\s+\d{4}\b)")
_BULLET = re.compile(r"^[ \t]*(?:[-*•]|\d{1,2}[.)])[ \t]+\S", re.MULTILINE)
_MOST_WORDS = 4  # Longer items are clauses, not list items.


def measure(answer: str) -> dict[str, float]:
    """The rubric's numbers of an answer: ``answer_words``, ``answer_candidates``, ``answer_capitals``."""
    letters = [char for char in answer if char.isalpha()]
    return {
        "answer_words": len(answer.split()),
        "answer_candidates": count_candidates(answer),
        "answer_capitals": sum(map(str.isupper, letters)) / len(letters) if letters else 0.0,
    }


def count_candidates(answer: str) -> int:
    """The number of candidates in an answer: the items of its longest list or choice, at least 1. A list is three items
    or more of at most four words in one sentence, or bulleted lines; joined by "or", ";" or "/", two are a choice. So
    "Tuesday or Friday" offers 2, "May 3, May 4, or May 5" 3, "in Houston, Texas" 1."""
    text = _YEAR_AFTER_COMMA.sub("", _NO_TEXT.sub("", answer))
    longest = max(1, len(_BULLET.findall(text)))
    for sentence in (" ".join(part.split()) for part in _SENTENCE.split(text)):
        length, choice = 1, False  # of the run of short items so far, the one that the sentence leads up to included
        for joint, item in zip(_JOINT.findall(sentence), _JOINT.split(sentence)[1:], strict=True):
            short = 0 < len(item.split()) <= _MOST_WORDS
            length, choice = (length + 1, choice or _CHOICE.search(joint) is not None) if short else (1, False)
            if choice or length > 2:
                longest = max(longest, length)
    return longest


logger = logging.getLogger(__name__)

COMPARED_SHARE = 0.5  # Share of judged answers that the offline check also grades, sampled by their text.

LONGEST = 500  # Maximum characters of an error kept for a missing verdict or reward.


class AnswerCheck(Protocol):
    """Says whether an answer to a question agrees with the reference answer."""

    concurrency: int  # Maximum concurrent checks; 1 for CPU-bound ones.

    def check(self, question: str, reference: str, answer: str, kind: str | None = None) -> bool:
        """True if correct; ``kind`` is the question's, if any; raises if no verdict is available."""
        ...


Claim = tuple[str, str, str, str]  # Question, reference, answer and the question's kind, empty if unknown.


class OfflineMatcher:
    """The check without a model: ``matching.match``."""

    concurrency = 1

    def check(self, question: str, reference: str, answer: str, kind: str | None = None) -> bool:
        return match(question, reference, answer, kind=kind)


@dataclass
class Scorer:
    """Fills ``rubric["answer_correct"]``, ``reward`` and ``reward_terms`` of finished trajectories."""

    answers: AnswerCheck
    reward: Reward | BatchReward

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        """Score in place; ``reward`` equals ``sum(reward_terms.values())`` exactly. Trajectories that already hold an
        exception are skipped. If judging or the reward fails for one, its ``exception`` is set and it gets no reward;
        without a verdict ``answer_correct`` is None: an outage is never a wrong answer, and a failure affects no other
        trajectory. If the mailbox holds no answer, only "I don't know" is right, and nothing needs a check. A question
        without a reference answer (an empty one) has no verdict, but a reward. Raises CostReached."""
        finished = [trajectory for trajectory in trajectories if trajectory.exception is None]
        claims = {
            id(each): (each.scenario.question, each.scenario.answer, each.final_answer or "", each.scenario.kind or "")
            for each in finished
            if each.scenario.answerable and each.scenario.answer and each.rubric.get("attempted_answer")
        }
        verdicts = self._judge(set(claims.values()))
        judged = []
        for trajectory in finished:
            claim, rubric = claims.get(id(trajectory)), trajectory.rubric
            knows_not = not trajectory.scenario.answerable and bool(rubric.get("returned_i_dont_know"))
            verdict = verdicts[claim] if claim is not None else knows_not if trajectory.scenario.answer else None
            if isinstance(verdict, Exception):
                rubric["answer_correct"] = None
                _give_up(trajectory, verdict)
                continue
            rubric["answer_correct"] = verdict
            if rubric.get("attempted_answer"):
                rubric |= measure(trajectory.final_answer or "")
            if claim is not None:
                # Of an answer that a model judged, the offline check's verdict is kept too, always or never for a text.
                offline = isinstance(self.answers, OfflineMatcher)
                drawn = not offline and Random("\x1f".join(claim[:3])).random() < COMPARED_SHARE
                rubric["offline_correct"] = OfflineMatcher().check(*claim) if drawn else None
            judged.append(trajectory)
        for trajectory, terms in zip(judged, self._terms(judged), strict=True):
            if isinstance(terms, Exception):
                _give_up(trajectory, terms)
                continue
            trajectory.reward_terms = terms
            trajectory.reward = sum(terms.values())

    def _judge(self, claims: set[Claim]) -> dict[Claim, bool | Exception]:
        """One verdict, or an error, for each distinct claim."""

        def verdict(claim: Claim) -> bool | Exception:
            try:
                return self.answers.check(*claim)
            except CostReached:
                raise
            except Exception as error:
                logger.warning("an answer could not be judged: %s", _message(error))
                return error

        ordered = sorted(claims)
        workers = min(self.answers.concurrency, len(ordered))
        if workers <= 1:
            return {claim: verdict(claim) for claim in ordered}
        with ThreadPoolExecutor(workers, thread_name_prefix="judge") as pool:
            return dict(zip(ordered, pool.map(verdict, ordered), strict=True))

    def _terms(self, trajectories: Sequence[Trajectory]) -> list[Terms]:
        """The reward's terms, or its error, per trajectory; each distinct failure is logged once, with its number."""
        reward, failures = self.reward, Counter[str]()

        def terms_of(part: Sequence[Trajectory]) -> Sequence[Terms]:
            try:
                return reward.score(part) if isinstance(reward, BatchReward) else [reward(each) for each in part]
            except CostReached:
                raise
            except Exception as error:
                failures[_message(error)] += len(part)
                return [error] * len(part)

        parts = [trajectories] if isinstance(reward, BatchReward) else [[each] for each in trajectories]
        found = [terms for part in parts for terms in terms_of(part)]
        for message, count in failures.items():
            logger.warning("%s got no reward: %s", counted(count, "trajectory"), message)
        return found


def _give_up(trajectory: Trajectory, error: Exception) -> None:
    """Leave the trajectory without a reward, because of this error."""
    trajectory.exception, trajectory.reward, trajectory.reward_terms = _told(error), 0.0, {}


def _told(error: Exception) -> str:
    """Type and message on one line, without what shows credentials."""
    message = _message(error)
    return f"{type(error).__name__}: {message}" if isinstance(error, EmailRLError) else message


def _message(error: Exception) -> str:
    """As ``_told``, but without the type of an error of our own, whose message is complete."""
    if isinstance(error, EmailRLError):
        return f"{redacted(error.message, limit=LONGEST)} {error.hint}".rstrip()
    return f"{type(error).__name__}: {redacted(str(error), limit=LONGEST)}".rstrip()


TERM = "overlong"


@dataclass(frozen=True)
class OverlongScorer:
    """A scorer that adds the reward term ``overlong``, between ``-penalty`` and 0."""

    scorer: Scorer
    max_tokens: int  # Maximum tokens per completion.
    buffer: int  # Tokens before ``max_tokens`` over which the penalty rises.
    penalty: float

    def __post_init__(self) -> None:
        if not 0 < self.buffer <= self.max_tokens:
            hint = "Use a smaller buffer, or 0 for none."
            raise UsageError(f"OVERLONG_BUFFER={self.buffer} does not fit into MAX_TOKENS={self.max_tokens}.", hint)

    def score(self, trajectories: Sequence[Trajectory]) -> None:
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


@dataclass(frozen=True)
class MeasuringScorer:
    """A scorer where no reward is needed: no failure drops a rollout, and without a reference there is no verdict."""

    scorer: Scorer

    def score(self, trajectories: Sequence[Trajectory]) -> None:
        played = [trajectory for trajectory in trajectories if trajectory.exception is None]
        self.scorer.score([trajectory for trajectory in played if trajectory.scenario.answer])
        for trajectory in played:
            trajectory.exception = None
            if not trajectory.scenario.answer:
                trajectory.rubric["answer_correct"] = None


def build_scorer(
    rewards: RewardSettings,
    weights: RewardWeightSettings,
    agent: AgentSettings,
    *,
    reward: str | None = None,
    bill: Bill | None = None,
) -> Scorer:
    """The configured scorer; ``reward`` overrides the setting (mode simple: ``heuristic``). ``bill`` gets what the
    judge costs."""
    name, concurrency = reward or rewards.reward, agent.rollout_concurrency
    answers: AnswerCheck = OfflineMatcher()
    if uses_judge(rewards):
        answers = LLMJudge(rewards, concurrency=concurrency, bill=bill)
    chosen: Reward | BatchReward
    if name == "art_e":
        chosen = art_e_reward(weights, agent.max_turns)
    elif name == "simple":
        chosen = simple_reward
    elif name == "heuristic":
        chosen = heuristic_reward(agent.turn_tokens)
    elif name == "ruler":
        chosen = ruler_reward(rewards, concurrency=concurrency, bill=bill)
    elif name.lower().startswith(("http://", "https://")):
        chosen = http_reward(name, rewards, concurrency=concurrency)
    else:
        chosen = load_reward(name)
    return Scorer(answers, chosen)


def uses_judge(rewards: RewardSettings) -> bool:
    """Whether an LLM judges answers: if configured, or by default if a key for its endpoint is set."""
    return rewards.judge == "llm" or (rewards.judge == "auto" and bool(judge_key(rewards)))
