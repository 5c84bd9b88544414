"""The statistics by which the paper's claims are judged: exact where a count of cases can be.

Steps to a criterion are floats; a run that never met it is ``math.inf`` and so ranks last. A run
whose outcome is unknown, because its worker failed, is ``math.nan``: no function takes one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np


class Spread(NamedTuple):
    """Five numbers of a sample, as a box plot draws them."""

    low: float
    """The smallest value within 1.5 interquartile ranges of the box."""
    lower: float
    median: float
    upper: float
    high: float
    outliers: tuple[float, ...]
    """What lies beyond ``low`` and ``high``."""


def quantile(values: Sequence[float], q: float) -> float:
    """Return the q-quantile by linear interpolation; unsolved runs count as infinite.

    >>> quantile([3, 1, 2, math.inf], 0.5), quantile([1, math.inf], 0.5), quantile([1, 9], 0.25)
    (2.5, inf, 3.0)
    """
    _known(values)
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    below = math.floor(place)
    share = place - below
    if share == 0:
        return float(ordered[below])
    lower, upper = ordered[below], ordered[below + 1]
    return math.inf if math.isinf(upper) else lower + share * (upper - lower)


def spread(values: Sequence[float]) -> Spread:
    """Return the median, quartiles, whiskers and outliers of a sample.

    >>> spread([1, 2, 3, 4, 100])
    Spread(low=1.0, lower=2.0, median=3.0, upper=4.0, high=4.0, outliers=(100.0,))
    """
    lower, median, upper = (quantile(values, q) for q in (0.25, 0.5, 0.75))
    if math.isinf(upper):
        return Spread(float(min(values)), lower, median, upper, math.inf, ())
    reach = 1.5 * (upper - lower)
    inside = [float(v) for v in values if lower - reach <= v <= upper + reach]
    outside = tuple(sorted(float(v) for v in values if not lower - reach <= v <= upper + reach))
    return Spread(min(inside), lower, median, upper, max(inside), outside)


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the exact one-sided p-value for "values of A are smaller than those of B".

    The share, among all ways to deal the pooled values into samples of these sizes, of those whose
    rank sum of A is at most the observed one. Ties, and so all unsolved runs, share their mean
    rank, and the count is over the tied ranks themselves: no approximation.

    >>> mann_whitney([1, 2, 3], [4, 5, 6])  # 1 of the 20 ways
    0.05
    >>> mann_whitney([math.inf] * 5, [math.inf] * 5)
    1.0
    """
    _known(a)
    _known(b)
    pooled = sorted([*a, *b])
    ways = {(0, 0): 1}  # (how many of A so far, twice their rank sum) → number of ways
    twice_rank: dict[float, int] = {}
    below = 0
    for value, same in groupby(pooled):
        count = len(list(same))
        rank = twice_rank[value] = 2 * below + count + 1
        below += count
        dealt: dict[tuple[int, int], int] = {}
        for (taken, total), number in ways.items():
            for more in range(min(count, len(a) - taken) + 1):
                key = (taken + more, total + more * rank)
                dealt[key] = dealt.get(key, 0) + number * math.comb(count, more)
        ways = dealt
    observed = sum(twice_rank[value] for value in a)
    extreme = sum(n for (taken, total), n in ways.items() if taken == len(a) and total <= observed)
    return extreme / math.comb(len(pooled), len(a))


def mean_difference(
    a: Sequence[float], b: Sequence[float], level: float = 0.95
) -> tuple[float, float, float]:
    """Return mean(A) − mean(B) and its Welch interval (difference, low, high).

    >>> [round(value, 3) for value in mean_difference([93.5, 93.1, 93.3], [90.6, 90.2, 90.7])]
    [2.8, 2.252, 3.348]
    """
    _known(a)
    _known(b)
    if min(len(a), len(b)) < 2:
        raise ValueError(f"an interval needs 2 values of each, not {len(a)} and {len(b)}")
    difference = float(np.mean(a) - np.mean(b))
    errors = [float(np.var(x, ddof=1)) / len(x) for x in (a, b)]
    if sum(errors) == 0:
        return difference, difference, difference
    freedom = sum(errors) ** 2 / sum(
        e**2 / (len(x) - 1) for e, x in zip(errors, (a, b), strict=True)
    )
    reach = student_quantile((1 + level) / 2, freedom) * math.sqrt(sum(errors))
    return difference, difference - reach, difference + reach


def student_quantile(p: float, freedom: float) -> float:
    """Return the p-quantile, p ≥ 0.5, of Student's t distribution.

    With t = √ν·tan θ the density is cos^(ν−1) θ on (−π/2, π/2); bisected over its integral.

    >>> round(student_quantile(0.975, 4), 4)
    2.7764
    """
    nodes, weights = np.polynomial.legendre.leggauss(256)

    def integral(theta: float) -> float:
        return float(theta / 2 * weights @ np.cos(theta / 2 * (nodes + 1)) ** (freedom - 1))

    target = (2 * p - 1) * integral(math.pi / 2)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if integral(middle) < target else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _known(values: Sequence[float]) -> None:
    if not len(values):
        raise ValueError("no values")
    if any(math.isnan(value) for value in values):
        raise ValueError("a value is not a number: leave out what is unknown, or say how it ranks")
