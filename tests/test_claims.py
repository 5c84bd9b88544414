"""Verdicts on made-up numbers whose answers are known beforehand."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import pytest
from scipy import stats as scipy_stats

from torchgdu import claims, stats
from torchgdu.claims import ADDING, ORDER, REBER, Claim, Judged, Table

NEVER, FAILED = math.inf, math.nan
Row = Mapping[str, Sequence[float]]


def find(words: str) -> Claim:
    (claim,) = (claim for claim in claims.CLAIMS if words in claim.statement)
    return claim


def judge(words: str, table: Table, variant: str = "") -> Judged:
    claim = find(words)
    return Judged(claim, variant, tuple(claim.checks(table, variant)))


def adding(models: Mapping[str, Callable[[int], Sequence[float]]]) -> Table:
    """A table of steps to solve, by the place of the length among the four."""
    return {
        ("adding", panel, model): {"solved": steps(i)}
        for i, panel in enumerate(ADDING)
        for model, steps in models.items()
    }


def around(middle: float, n: int = 5) -> list[float]:
    return [middle + 20 * (i - n // 2) for i in range(n)]


# --- The rules ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("p", "holds"), [(0.05, False), (0.0499, True)])
def test_faster_needs_p_below_one_in_twenty(
    monkeypatch: pytest.MonkeyPatch, p: float, holds: bool
) -> None:
    monkeypatch.setattr(stats, "mann_whitney", lambda a, b: p)
    assert claims.faster([1], [2]) is holds


def test_faster_is_the_exact_rank_test_with_unsolved_runs_last() -> None:
    a, b = [100, 120, 140, 160, 180], [130, 190, 200, 210, 220]
    theirs = scipy_stats.mannwhitneyu(a, b, alternative="less", method="exact").pvalue
    assert claims.faster(a, b) is bool(theirs < 0.05)
    assert claims.faster([1, 2, 3, 4, 5], [NEVER] * 5)
    assert not claims.faster([NEVER] * 5, [NEVER] * 5)
    # Two of five unsolved are no proof of being slower than one of five.
    assert not claims.faster([1, 1, 1, 1, NEVER], [1, 1, 1, NEVER, NEVER])


def test_no_slower_is_a_tenth_at_most_and_a_solved_median() -> None:
    assert claims.no_slower([110] * 5, [100] * 5)
    assert not claims.no_slower([110.1] * 5, [100] * 5)
    assert claims.no_slower([100, 100, 100, NEVER, NEVER], [NEVER] * 5)
    assert not claims.no_slower([100, 100, NEVER, NEVER, NEVER], [NEVER] * 5)


def test_fails_and_solves() -> None:
    assert claims.fails([NEVER] * 5)
    assert not claims.fails([NEVER] * 4 + [9990.0])
    assert claims.solves([1, 1, 1, NEVER, NEVER])
    assert not claims.solves([1, 1, NEVER, NEVER, NEVER])


def test_too_few_trials_decide_nothing() -> None:
    assert claims.decide(claims.fails, [[NEVER] * 4], 5) is None
    assert claims.decide(claims.fails, [[NEVER] * 5], 5) is True
    assert claims.decide(claims.faster, [[1.0] * 5, []], 5) is None


@pytest.mark.parametrize("rule", [claims.faster, claims.no_slower])
def test_a_failed_trial_counts_as_every_outcome_it_may_have_had(
    rule: Callable[..., bool],
) -> None:
    """Against trying far more outcomes than the best and the worst."""
    samples = [[100.0, 140, 180, 220, FAILED], [150.0, 230, 260, FAILED, 300]]
    for shift in range(-200, 400, 40):
        moved = [[v + shift for v in samples[0]], samples[1]]
        answers = {
            rule(
                [a if math.isnan(v) else v for v in moved[0]],
                [b if math.isnan(v) else v for v in moved[1]],
            )
            for a, b in itertools.product((0.0, 50, 120, 200, 280, 500, NEVER), repeat=2)
        }
        expected = answers.pop() if len(answers) == 1 else None
        assert claims.decide(rule, moved, 5) is expected


def test_summaries_tell_median_quartiles_and_successes() -> None:
    assert claims.summary([100, 300, 200, 400, 500]) == "300 (200 to 400), 5 of 5"
    assert claims.summary([100, 200, NEVER]) == "200 (150 to unsolved), 2 of 3"
    assert claims.summary([1000, NEVER, NEVER, NEVER, NEVER]) == "1,000 at best, 1 of 5"
    assert claims.summary([NEVER, FAILED]) == "never (0 of 2, 1 failed)"
    assert claims.summary([100, 200, 300, FAILED]) == "250 (175 to unsolved), 3 of 4, 1 failed"
    assert claims.summary([]) == "no runs"


# --- Verdicts ----------------------------------------------------------------------------------

GRU_BEATS = "GRU beats LSTM on the adding problem"


def test_reproduced_at_every_length_and_not_at_none() -> None:
    better = adding({"GRU(100)": lambda i: around(400), "LSTM(100)": lambda i: around(900)})
    assert judge(GRU_BEATS, better).verdict == "reproduced"
    worse = adding({"GRU(100)": lambda i: around(900), "LSTM(100)": lambda i: around(400)})
    found = judge(GRU_BEATS, worse)
    assert found.verdict == "not reproduced"
    assert [check.holds for check in found.checks] == [False] * 4


def test_mixed_when_lengths_disagree_even_if_one_is_missing() -> None:
    table = dict(
        adding(
            {
                "GRU(100)": lambda i: around(400),
                "LSTM(100)": lambda i: around(900 if i < 2 else 200),
            }
        )
    )
    assert judge(GRU_BEATS, table).verdict == "mixed"
    del table["adding", "L = 5000", "GRU(100)"]
    assert judge(GRU_BEATS, table).verdict == "mixed"


def test_one_length_with_too_few_trials_is_not_enough() -> None:
    table = adding(
        {"GRU(100)": lambda i: around(400, 5 if i < 3 else 4), "LSTM(100)": lambda i: around(900)}
    )
    found = judge(GRU_BEATS, table)
    assert [check.holds for check in found.checks] == [True, True, True, None]
    assert found.verdict == "not enough runs"
    assert judge(GRU_BEATS, {}).verdict == "not enough runs"


def test_claims_on_the_lstm_get_a_verdict_for_either_start() -> None:
    table = adding(
        {
            "GRU(100)": lambda i: around(400),
            "LSTM(100)": lambda i: around(300),
            "LSTM(100), author's start": lambda i: [NEVER] * 5,
        }
    )
    verdicts = {
        judged.variant: judged.verdict
        for judged in claims.judge(table)
        if GRU_BEATS in judged.claim.statement
    }
    assert verdicts == {"strongest start": "not reproduced", "author's start": "reproduced"}
    both = {c.statement for c in claims.CLAIMS if c.lstm}
    assert all(
        sum(judged.claim.statement == name for judged in claims.judge({})) == 1 + (name in both)
        for name in (c.statement for c in claims.CLAIMS)
    )


def test_the_authors_start_is_the_main_row_where_that_is_the_strongest() -> None:
    table = adding({"GRU(100)": lambda i: around(400), "LSTM(100)": lambda i: around(900)})
    assert judge(GRU_BEATS, table, claims.AUTHOR).verdict == "reproduced"


def test_gru_at_the_longest_length_in_about_1300_steps() -> None:
    words = "GRU solves even L = 10,000"
    table = adding({"GRU(100)": lambda i: around(1430 if i == 3 else 99_999)})
    assert judge(words, table).verdict == "reproduced"
    slower = adding({"GRU(100)": lambda i: around(1431)})
    assert judge(words, slower).verdict == "not reproduced"


@pytest.mark.parametrize(
    ("gru", "gdu", "verdict"),
    [
        ((400, 1200), (400, 600), "reproduced"),
        ((400, 1200), (200, 600), "not reproduced"),
        ((800, 1200), (400, 900), "not reproduced"),
        ((400, NEVER), (400, 600), "reproduced"),
        ((400, 1200), (400, NEVER), "not reproduced"),
    ],
)
def test_the_advantage_grows_from_the_shortest_to_the_longest(
    gru: tuple[float, float], gdu: tuple[float, float], verdict: str
) -> None:
    table: Table = {
        ("adding", panel, model): {"solved": [steps[end]] * 5}
        for end, panel in enumerate((ADDING[0], ADDING[-1]))
        for model, steps in (("GRU(100)", gru), ("GDU(10x10)", gdu))
    }
    assert judge("advantage over GRU grows", table).verdict == verdict


def test_gdu_starts_first_is_about_starting_not_solving() -> None:
    table: dict[tuple[str, str, str], Row] = {
        ("temporal-order", panel, model): {"start": around(start), "solved": around(9000 - start)}
        for panel in ORDER
        for model, start in (("LSTM(100)", 900), ("GRU(100)", 800), ("GDU(10x10)", 300))
    }
    words = "GDU starts to learn before"
    found = judge(words, table)
    assert found.verdict == "reproduced"
    assert len(found.checks) == 8
    # Before one of the two only: the claim fails at that length, and the lengths do not disagree.
    for panel in ORDER:
        table["temporal-order", panel, "LSTM(100)"] = {"start": around(300)}
        known = judge(words, table)
        assert known.verdict == ("not reproduced" if panel == ORDER[-1] else "mixed")
    # The other part may be missing where one fails, but not where one holds.
    fewer = {key: row for key, row in table.items() if key[2] != "GRU(100)"}
    assert judge(words, fewer).verdict == "not reproduced"
    del fewer["temporal-order", ORDER[0], "LSTM(100)"]
    assert judge(words, fewer).verdict == "not enough runs"


def reber(**steps: tuple[Sequence[float], Sequence[float]]) -> Table:
    names = {"lstm": "LSTM(100)", "gru": "GRU(100)", "gdu": "GDU(2x35+10x3)"}
    return {
        ("reber", panel, names[cell]): {"SC": sc, "LC": lc}
        for panel in REBER
        for cell, (sc, lc) in steps.items()
    }


def test_short_term_first_in_every_trial() -> None:
    words = "short-term criterion before"
    order = (around(100, 10), around(500, 10))
    good = reber(lstm=order, gru=order, gdu=order)
    assert judge(words, good).verdict == "reproduced"
    # One trial the other way round breaks it; the two that met both at once tell nothing.
    swapped = ([*order[0][:9], 900.0], order[1])
    assert judge(words, reber(lstm=order, gru=order, gdu=swapped)).verdict == "not reproduced"
    tied = ([*order[0][:8], 900, 900.0], [*order[1][:8], 900, 900.0])
    assert judge(words, reber(lstm=tied, gru=tied, gdu=tied)).verdict == "reproduced"
    both = (order[0], order[0])
    assert judge(words, reber(lstm=order, gru=order, gdu=both)).verdict == "not enough runs"
    # Nine trials decide nothing, not even against; nor do ten of which one failed, but against.
    nine = (swapped[0][1:], swapped[1][1:])
    assert judge(words, reber(lstm=nine, gru=nine, gdu=nine)).verdict == "not enough runs"
    lost = ([*order[0][:9], FAILED], [*order[1][:9], FAILED])
    assert judge(words, reber(lstm=order, gru=order, gdu=lost)).verdict == "not enough runs"
    worse = ([*lost[0][:8], 900, FAILED], lost[1])
    assert judge(words, reber(lstm=order, gru=order, gdu=worse)).verdict == "not reproduced"
    unmet = (order[0], [NEVER] * 10)
    assert judge(words, reber(lstm=unmet, gru=unmet, gdu=unmet)).verdict == "reproduced"


def test_mERG_needs_ten_trials_and_names_the_criterion() -> None:
    slow, quick = (around(900, 10), around(5000, 10)), (around(400, 10), around(3000, 10))
    found = judge("GRU beats LSTM on both", reber(lstm=slow, gru=quick))
    assert found.verdict == "reproduced"
    assert [check.panel for check in found.checks] == [
        "m = 10, SC", "m = 20, SC", "m = 10, LC", "m = 20, LC",
    ]  # fmt: skip
    nine = (quick[0][:9], quick[1][:9])
    assert judge("GRU beats LSTM on both", reber(lstm=slow, gru=nine)).verdict == "not enough runs"


def test_slower_on_short_term_means_the_others_are_faster_there() -> None:
    quick, slow = (around(400, 10), around(5000, 10)), (around(900, 10), around(1000, 10))
    table = reber(lstm=quick, gru=quick, gdu=slow)
    assert judge("slightly slower", table).verdict == "reproduced"
    assert judge("clearly faster", table).verdict == "reproduced"
    other = reber(lstm=slow, gru=slow, gdu=quick)
    assert judge("slightly slower", other).verdict == "not reproduced"
    assert judge("clearly faster", other).verdict == "not reproduced"


def pmnist(gdu: Sequence[float], other: Sequence[float]) -> Table:
    table = {}
    for units, size in ((128, "4x32"), (256, "4x64")):
        for model, values in (
            (f"LSTM({units})", other), (f"GRU({units})", other), (f"GDU({size})", gdu),
        ):  # fmt: skip
            table["pmnist", f"{units} units", model] = {"accuracy": values}
    return table


def test_accuracy_is_judged_by_the_interval_of_the_difference() -> None:
    words = "permuted MNIST"
    good, bad = [0.935, 0.934, 0.936], [0.906, 0.907, 0.905]
    assert judge(words, pmnist(good, bad)).verdict == "reproduced"
    assert judge(words, pmnist(bad, good)).verdict == "not reproduced"
    wide = [0.99, 0.88, 0.94]
    low = scipy_stats.ttest_ind(wide, bad, equal_var=False).confidence_interval(0.95).low
    assert low < 0
    assert judge(words, pmnist(wide, bad)).verdict == "not reproduced"
    assert judge(words, pmnist(good[:2], bad)).verdict == "not enough runs"
    # A run without an accuracy leaves the claim open, however good the others are.
    assert judge(words, pmnist([*good, FAILED], bad)).verdict == "not enough runs"


def norms(gdu: tuple[float, float], others: tuple[float, float], n: int = 3) -> Table:
    return {
        ("error-norms", "pMNIST", model): {
            epoch: [value] * n for epoch, value in zip(("5", "50"), values, strict=True)
        }
        for model, values in (("GDU(4x32)", gdu), ("LSTM(128)", others), ("GRU(128)", others))
    }


def test_error_norms_reach_further_early_and_the_gap_shrinks() -> None:
    early, shrinks = "Early in training", "gap has shrunk"
    table = norms((0.5, 0.6), (0.1, 0.5))
    assert judge(early, table).verdict == "reproduced"
    assert judge(shrinks, table).verdict == "reproduced"
    assert judge(shrinks, norms((0.5, 0.9), (0.1, 0.5))).verdict == "not reproduced"
    assert judge(early, norms((0.1, 0.6), (0.2, 0.5))).verdict == "not reproduced"
    # No gap that could shrink; one that closes and opens again the other way round.
    assert judge(shrinks, norms((0.4, 0.2), (0.5, 0.7))).verdict == "not reproduced"
    assert judge(shrinks, norms((0.5, 0.2), (0.4, 0.8))).verdict == "not reproduced"
    assert judge(shrinks, norms((0.5, 0.55), (0.2, 0.6))).verdict == "reproduced"
    assert judge(early, norms((0.5, 0.6), (0.1, 0.5), n=2)).verdict == "not enough runs"


def test_gates_stay_near_one_for_more_units() -> None:
    words = "Far more of GDU's gates"

    def table(gdu: Sequence[float], gru: Sequence[float]) -> Table:
        return {
            ("gates", "m = 10", "GDU(2x35+10x3)"): {"kept": gdu},
            ("gates", "m = 10", "GRU(100)"): {"kept": gru},
        }

    many, few = [0.3 + i / 100 for i in range(10)], [0.01 * i for i in range(10)]
    assert judge(words, table(many, few)).verdict == "reproduced"
    assert judge(words, table(few, many)).verdict == "not reproduced"
    assert judge(words, table(many[:9], few)).verdict == "not enough runs"


def test_every_claim_has_numbers_and_can_get_either_verdict() -> None:
    """None is decided by nothing, and none has a figure that is not drawn."""
    from torchgdu.paper import FIGURES

    for judged in claims.judge({}):
        assert judged.verdict == "not enough runs"
        assert len({check.panel for check in judged.checks}) == len(judged.checks)
        assert judged.checks
        assert judged.claim.figure in FIGURES
        assert all(check.evidence for check in judged.checks)
