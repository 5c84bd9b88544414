"""The statistics against scipy, brute force and numpy."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from torchgdu import stats

scipy_stats = pytest.importorskip("scipy.stats")


def brute_force(a: list[float], b: list[float]) -> float:
    """Count wins (a tie is half a win) over every way to deal the pooled values."""
    pooled = a + b

    def losses(chosen: tuple[int, ...]) -> float:
        others = [pooled[i] for i in range(len(pooled)) if i not in chosen]
        return sum((pooled[i] > y) + 0.5 * (pooled[i] == y) for i in chosen for y in others)

    observed = losses(tuple(range(len(a))))
    deals = list(itertools.combinations(range(len(pooled)), len(a)))
    return sum(losses(deal) <= observed for deal in deals) / len(deals)


@pytest.mark.parametrize("seed", range(40))
def test_mann_whitney_counts_every_deal_ties_and_unsolved_included(seed: int) -> None:
    rng = random.Random(seed)
    values = [1.0, 2.0, 3.0, 4.0, 5.0, math.inf]
    a = [rng.choice(values) for _ in range(rng.randint(1, 6))]
    b = [rng.choice(values) for _ in range(rng.randint(1, 6))]
    assert stats.mann_whitney(a, b) == pytest.approx(brute_force(a, b), abs=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_mann_whitney_equals_scipy_without_ties(seed: int) -> None:
    values = np.random.default_rng(seed).permutation(20).astype(float)
    a, b = values[:10].tolist(), values[10:].tolist()
    expected = scipy_stats.mannwhitneyu(a, b, alternative="less", method="exact").pvalue
    assert stats.mann_whitney(a, b) == pytest.approx(float(expected), abs=1e-12)


def test_five_trials_each_can_just_decide() -> None:
    assert stats.mann_whitney([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == 1 / 252
    assert stats.mann_whitney([1, 2, 3, 4, 5], [math.inf] * 5) == 1 / 252
    # 4 of 5 solved against none: of C(10, 5) deals, those in which A holds all four solved runs.
    assert stats.mann_whitney([1, 2, 3, 4, math.inf], [math.inf] * 5) == 6 / 252


def test_quantiles_equal_numpy_and_know_infinity() -> None:
    values = np.random.default_rng(0).normal(size=11).tolist()
    for q in (0.0, 0.1, 0.25, 0.5, 0.75, 1.0):
        assert stats.quantile(values, q) == pytest.approx(float(np.quantile(values, q)))
    assert stats.quantile([5, math.inf, 7], 0.5) == 7
    assert stats.quantile([5, math.inf, math.inf], 0.5) == math.inf
    assert stats.quantile([math.inf, math.inf], 0.25) == math.inf


def test_spread_is_the_one_that_matplotlib_draws() -> None:
    cbook = pytest.importorskip("matplotlib.cbook")
    values = [*np.random.default_rng(1).normal(size=20).tolist(), 9.0, -8.0]
    (theirs,) = cbook.boxplot_stats(values)
    ours = stats.spread(values)
    expected = [theirs[key] for key in ("whislo", "q1", "med", "q3", "whishi")]
    assert list(ours[:5]) == pytest.approx(expected)
    assert ours.outliers == pytest.approx(sorted(theirs["fliers"]))


@pytest.mark.parametrize("freedom", [1.0, 1.7, 2.0, 4.0, 9.5, 60.0])
@pytest.mark.parametrize("p", [0.6, 0.9, 0.975, 0.995])
def test_student_quantile_equals_scipy(freedom: float, p: float) -> None:
    assert stats.student_quantile(p, freedom) == pytest.approx(
        float(scipy_stats.t.ppf(p, freedom)), rel=1e-6
    )


def test_mean_difference_equals_scipys_welch_interval() -> None:
    a, b = [93.5, 93.1, 93.9, 92.8], [90.6, 91.9, 90.2]
    interval = scipy_stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
    assert stats.mean_difference(a, b)[1:] == pytest.approx((interval.low, interval.high), rel=1e-7)
    assert stats.mean_difference([2.0, 2.0], [1.0, 1.0]) == (1.0, 1.0, 1.0)


@pytest.mark.parametrize("values", [[], [1.0, math.nan]])
def test_what_is_unknown_is_refused(values: list[float]) -> None:
    with pytest.raises(ValueError, match=r"no values|not a number"):
        stats.mann_whitney(values, [1.0])
    with pytest.raises(ValueError, match=r"no values|not a number"):
        stats.quantile(values, 0.5)
    with pytest.raises(ValueError, match="an interval needs 2"):
        stats.mean_difference([1.0], [1.0, 2.0])
