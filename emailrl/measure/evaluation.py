"""One policy on one set of questions: accuracy with its interval, rewards, rubric means, cost in time and tokens."""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from emailrl.base.errors import UsageError
from emailrl.records import Entry
from emailrl.records.trajectory import StopReason, Trajectory

Z_95 = 1.959963984540054  # The normal distribution's 97.5% point.
MIN_INBOXES = 6
"""Inboxes that a test by inbox needs: five have 32 sign patterns, so that its p could not fall below 2/32."""


def wilson_interval(successes: float, total: float, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a proportion, 95% by default; (0, 1) when nothing was observed. Source: Wilson,
    JASA 22 (1927); center (k + z²/2) / (n + z²), half-width z·√(k(n-k)/n + z²/4) / (n + z²)."""
    if total == 0:
        return 0.0, 1.0
    center = (successes + z * z / 2) / (total + z * z)
    half = z * math.sqrt(max(0.0, successes * (total - successes)) / total + z * z / 4) / (total + z * z)
    return max(0.0, center - half), min(1.0, center + half)


def clustered_interval(shares: Sequence[Fraction], num_samples: int) -> tuple[float, float]:
    """The 95% interval of the mean of ``shares``, each the share of correct samples of one question. Samples of one
    question are not independent, so the unit is the question: Wilson's interval with the effective sample size p(1 - p)
    / (s² / n), s² the variance of the n shares (divided by n), kept between n and the ``num_samples`` drawn. With one
    sample per question this is n, and the interval is Wilson's. (0, 1) if empty. Source: Korn and Graubard, Survey
    Methodology 24 (1998), for Wilson's interval in place of Clopper and Pearson's."""
    n = len(shares)
    if n == 0:
        return 0.0, 1.0
    mean = sum(shares, Fraction()) / n
    variance = sum(((share - mean) ** 2 for share in shares), Fraction()) / n
    # If all questions have the same share, the variance is uninformative: each counts as one observation.
    size = min(mean * (1 - mean) * n / variance, Fraction(num_samples)) if variance else Fraction(n)
    return wilson_interval(float(mean * size), float(size))


def paired_test(differences: Sequence[tuple[str, int]], num_samples: int) -> dict[str, Any]:
    """How two policies differ: the second's accuracy minus the first's (``difference``) with its 95% interval, and the
    ``p_value``. ``differences`` has the inbox of each question, and how many more of its samples, ``num_samples`` in
    all, the second answered correctly. Questions about one inbox share its emails, and a policy that these happen to
    suit is better at many of them at once: the ``unit`` is the inbox, with the sum of its differences. With one
    question each, or fewer than ``MIN_INBOXES`` inboxes, it is the question. The interval is Student's t on the units'
    deviations from the mean (cluster-robust); None for fewer than ``MIN_INBOXES`` units, or ones that agree exactly."""
    by_inbox: defaultdict[str, list[int]] = defaultdict(list)
    for inbox, difference in differences:
        by_inbox[inbox].append(difference)
    unit, units = "inbox", list(by_inbox.values())
    if not MIN_INBOXES <= len(units) < len(differences):
        unit, units = "question", [[difference] for _, difference in differences]
    sums, n = list(map(sum, units)), len(units)
    middle = sum(sums) / max(len(differences), 1)
    spread = sum((total - middle * len(each)) ** 2 for total, each in zip(sums, units, strict=True))
    low = high = None
    if n >= MIN_INBOXES and spread:
        half = _t_975(n - 1) * math.sqrt(spread * n / (n - 1))
        low, high = (max(-1.0, min(1.0, (sum(sums) + side) / num_samples)) for side in (-half, half))
    found = {"p_value": sign_flip_p_value(sums), "unit": unit, "num_units": n}
    return found | {"difference": sum(sums) / max(num_samples, 1), "difference_low": low, "difference_high": high}


def _t_975(freedom: int) -> float:
    """Student's 97.5% point, to 0.003 from five degrees of freedom on. Source: Fisher and Cornish (1960)."""
    z = Z_95
    terms = (z, (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96, (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384)
    return sum(term / freedom**power for power, term in enumerate(terms))


def sign_flip_p_value(differences: Sequence[int]) -> float:
    """Two-sided p-value of the exact sign-flip test on one difference per unit; 1 if all are 0. If the two policies
    were equally good, the sign of a unit's difference would be random: p is the share of all sign patterns whose sum is
    at least as far from 0 as the observed one. If every difference is -1, 0 or 1, this is the exact McNemar test.
    Source: Fisher's randomization test (1935)."""
    ways = {0: 1}
    for step, count in Counter(abs(difference) for difference in differences if difference).items():
        binomials = [1]  # number of patterns by count of minus signs
        for minus in range(count):
            binomials.append(binomials[-1] * (count - minus) // (minus + 1))
        flipped: Counter[int] = Counter()
        for total, number in ways.items():
            for minus, patterns in enumerate(binomials):
                flipped[total + step * (count - 2 * minus)] += number * patterns
        ways = flipped
    extreme = sum(number for total, number in ways.items() if abs(total) >= abs(sum(differences)))
    return float(Fraction(extreme, sum(ways.values())))


MAX_UNJUDGED = 0.05  # Maximum share of answers without a verdict for a valid measurement.
Ended = Trajectory | Entry  # What a verdict is read of.


class Evaluation:
    """A policy's results on a set of questions, each played once or several times. ``accuracy`` and its interval
    (Wilson's, clustered by question) are over judged answers: a rollout that raised is wrong, an answer without a
    verdict is left out (``unjudged``). With several samples per question it is the mean over questions of the correct
    share (avg@k); with none judged, 0 with interval (0, 1)."""

    def __init__(self, trajectories: Sequence[Trajectory], step: int = 0) -> None:
        """``trajectories`` are scored."""
        self.trajectories, self.step = trajectories, step
        self.completed = [each for each in trajectories if each.exception is None]  # with a verdict and a reward
        self.exceptions = len(trajectories) - len(self.completed)
        self.by_question: dict[str, list[Trajectory]] = {}
        for trajectory in trajectories:
            self.by_question.setdefault(trajectory.scenario.id, []).append(trajectory)
        self.num_questions = len(self.by_question)  # judged or not
        self.num_correct, self.num_judged = (sum(map(check, trajectories)) for check in (is_correct, is_judged))
        self.unjudged = len(trajectories) - self.num_judged
        self.is_void = self.unjudged > MAX_UNJUDGED * len(trajectories)
        judged = {name: list(filter(is_judged, samples)) for name, samples in self.by_question.items()}
        self.shares = {name: Fraction(sum(map(is_correct, each)), len(each)) for name, each in judged.items() if each}
        self.accuracy = float(sum(self.shares.values(), Fraction()) / len(self.shares)) if self.shares else 0.0
        self.interval = clustered_interval(list(self.shares.values()), self.num_judged)
        self.reward = mean([each.reward for each in self.completed])
        self.tokens = mean([each.num_tokens for each in self.completed])  # each counted once
        self.rubric = rubric_means(self.completed)

    def metrics(self) -> dict[str, Any]:
        """The numbers under the names of ``benchmark --json``, with each rubric field's mean; no times of rollouts that
        raised. With several samples per question also, over fully judged questions, the shares with any correct sample
        (pass@k) and with a correct majority, each with Wilson's 95% interval."""
        low, high = self.interval
        found: dict[str, Any] = {"accuracy": self.accuracy, "accuracy_low": low, "accuracy_high": high}
        if (num_samples := max(map(len, self.by_question.values()), default=1)) > 1:
            found["num_samples"] = num_samples
            judged = [samples for samples in self.by_question.values() if all(map(is_judged, samples))]
            passed = sum(any(map(is_correct, samples)) for samples in judged)
            agreed = sum(is_correct(_most_frequent(samples)) for samples in judged)
            for name, right in (("pass_at_k", passed), ("majority", agreed)):
                low, high = wilson_interval(right, len(judged))
                found |= {name: right / len(judged) if judged else 0.0, f"{name}_low": low, f"{name}_high": high}
        found |= {
            "latency_seconds": mean([each.seconds for each in self.completed]),
            "tokens": self.tokens,
            "reward": self.reward,
            "num_questions": self.num_questions,
            "unjudged": self.unjudged,
            "exceptions": self.exceptions,
        }
        return found | disagreement(self.trajectories) | self.rubric


def compared(first: Evaluation, second: Evaluation) -> dict[str, Any]:
    """Compare two evaluations over the questions that both played equally often with a verdict for every sample:
    ``num_questions``, on how many each is better (``better_first``, ``better_second``), and ``paired_test``."""
    one, other = (
        {name: samples for name, samples in each.by_question.items() if all(map(is_judged, samples))}
        for each in (first, second)
    )
    asked = {name: samples for name, samples in one.items() if len(samples) == len(other.get(name, ()))}
    differences = [
        (samples[0].scenario.inbox_address, sum(map(is_correct, other[name])) - sum(map(is_correct, samples)))
        for name, samples in asked.items()
    ]
    better = [sum(sign * difference > 0 for _, difference in differences) for sign in (-1, 1)]
    found = {"num_questions": len(differences), "better_first": better[0], "better_second": better[1]}
    return found | paired_test(differences, sum(map(len, asked.values())))


def check_samples(num_samples: int, temperature: float) -> None:
    """Raise UsageError if several samples of a question would be identical."""
    if num_samples > 1 and temperature == 0:
        hint = "Set EVAL_TEMPERATURE above 0, e.g. 0.7."
        raise UsageError(f"{num_samples} greedy samples of a question would be identical.", hint)


def _most_frequent(samples: Sequence[Trajectory]) -> Trajectory:
    """The first sample with the most frequent answer, ignoring case, spaces and periods."""
    answered = [each for each in samples if each.final_answer is not None] or list(samples)
    said = [" ".join(str(each.final_answer).casefold().split()).rstrip(".") for each in answered]
    return answered[said.index(Counter(said).most_common(1)[0][0])]


def has_crashed(trajectory: Ended) -> bool:
    """Whether the rollout itself raised; False if only its verdict or reward failed."""
    return trajectory.exception is not None and trajectory.stop_reason == StopReason.EXCEPTION


def is_judged(trajectory: Ended) -> bool:
    """Whether it is known to be correct or wrong; a crash counts as wrong."""
    return has_crashed(trajectory) or trajectory.rubric.get("answer_correct") is not None


def is_correct(trajectory: Ended) -> bool:
    """Whether the answer was judged correct, with or without a reward; a rollout that raised is wrong."""
    return not has_crashed(trajectory) and bool(trajectory.rubric.get("answer_correct"))


def verdict(trajectory: Ended) -> str:
    """The verdict in words; ART-E's reward, too, tells "did not know" from "wrong", which costs more."""
    rubric = trajectory.rubric
    if has_crashed(trajectory):
        return "crashed"
    if rubric.get("answer_correct") is None:
        return "not judged"
    if rubric["answer_correct"]:
        return "correct"
    if rubric.get("returned_i_dont_know"):
        return "did not know"
    return "wrong" if rubric.get("attempted_answer", True) else "no answer"


def total_cost(trajectories: Sequence[Trajectory]) -> float | None:
    """US dollars for all completions, including trajectories that raised; None if nothing has a price."""
    costs = [turn.cost for trajectory in trajectories for turn in trajectory.turns if turn.cost is not None]
    return math.fsum(costs) if costs else None


def disagreement(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    """How many judged answers the offline check also graded, and on how many only one of them accepted."""
    rubrics = [each.rubric for each in trajectories if each.exception is None]
    pairs = [(it["answer_correct"], it["offline_correct"]) for it in rubrics if it.get("offline_correct") is not None]
    only_judge, only_offline = pairs.count((True, False)), pairs.count((False, True))
    return {"judge_compared": len(pairs), "only_judge_right": only_judge, "only_offline_right": only_offline}


def rubric_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of every numeric or boolean rubric field over the trajectories that have it."""
    values: defaultdict[str, list[float]] = defaultdict(list)
    for name, value in (item for trajectory in trajectories for item in trajectory.rubric.items()):
        if isinstance(value, int | float):
            values[name].append(value)
    return {name: math.fsum(items) / len(items) for name, items in values.items()}


def mean(values: Sequence[float]) -> float | None:
    return math.fsum(values) / len(values) if values else None


def reason(exception: str | None) -> str:
    """Why a rollout raised: ``Trajectory.exception`` without leading class names."""
    return re.sub(r"^(?:\w+: )*\w*(?:Error|Exception): ", "", str(exception))
