"""Statistics of accuracies: intervals clustered by question, and a paired test of two policies clustered by inbox."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

Z_95 = 1.959963984540054
"""The normal distribution's 97.5 % point."""
MIN_INBOXES = 6
"""Inboxes that a test by inbox needs: five have 32 sign patterns, so that its p could not fall below 2/32."""


def wilson_interval(successes: float, total: float, z: float = Z_95) -> tuple[float, float]:
    """The Wilson score interval of a proportion, 95 % by default; (0, 1) when nothing was observed.

    Source: Wilson, JASA 22 (1927); center (k + z²/2) / (n + z²), half-width z·√(k(n-k)/n + z²/4) / (n + z²).
    """
    if total == 0:
        return 0.0, 1.0
    center = (successes + z * z / 2) / (total + z * z)
    half = z * math.sqrt(max(0.0, successes * (total - successes)) / total + z * z / 4) / (total + z * z)
    return max(0.0, center - half), min(1.0, center + half)


def clustered_interval(shares: Sequence[Fraction], num_samples: int) -> tuple[float, float]:
    """The 95 % interval of the mean of ``shares``, each the share of correct samples of one question.

    Samples of one question are not independent, so the unit is the question: Wilson's interval with the effective
    sample size p(1 - p) / (s² / n), s² the variance of the n shares (divided by n), kept between n and the
    ``num_samples`` drawn. With one sample per question this is n, and the interval is Wilson's. (0, 1) if empty.
    Source: Korn and Graubard, Survey Methodology 24 (1998), for Wilson's interval in place of Clopper and Pearson's.
    """
    n = len(shares)
    if n == 0:
        return 0.0, 1.0
    mean = sum(shares, Fraction()) / n
    variance = sum(((share - mean) ** 2 for share in shares), Fraction()) / n
    # If all questions have the same share, the variance is uninformative: each counts as one observation.
    size = min(mean * (1 - mean) * n / variance, Fraction(num_samples)) if variance else Fraction(n)
    return wilson_interval(float(mean * size), float(size))


def majority(answers: Sequence[str]) -> int:
    """The index of the first sample with the most frequent answer; ties go to the earliest."""
    counts = Counter(answers)
    return max(range(len(answers)), key=lambda index: (counts[answers[index]], -index))


def paired_test(differences: Sequence[tuple[str, int]]) -> tuple[float, str]:
    """The p-value of two policies' difference, and the unit of the test: ``inbox`` or ``question``.

    ``differences`` has the inbox of each question, and how many more correct samples the first policy has. Questions
    about one inbox share its emails, and a policy that these happen to suit is better at many of them at once: the unit
    is the inbox, with the sum of its differences. With one question each, or fewer than ``MIN_INBOXES`` inboxes, it is
    the question.
    """
    by_inbox: Counter[str] = Counter()
    for inbox, difference in differences:
        by_inbox[inbox] += difference
    if MIN_INBOXES <= len(by_inbox) < len(differences):
        return sign_flip_p_value(list(by_inbox.values())), "inbox"
    return sign_flip_p_value([difference for _, difference in differences]), "question"


def sign_flip_p_value(differences: Sequence[int]) -> float:
    """Two-sided p-value of the exact sign-flip test on one difference per unit; 1 if all are 0.

    If the two policies were equally good, the sign of a unit's difference would be random: p is the share of all sign
    patterns whose sum is at least as far from 0 as the observed one. If every difference is -1, 0 or 1, this is the
    exact McNemar test. Source: Fisher's randomization test (1935).
    """
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
