"""Intervals with known answers, rates of false alarms by simulation, and a rule that noise cannot make surer.

A simulation asserts that a rate is what it should be within a bound that correct code passes for all but one in a
million choices of its seed; the seeds are fixed.
"""

import itertools
import math
import warnings

import numpy as np
import pytest
from scipy import stats

from sparseattn.lab.decide import (
    Experiment,
    Interval,
    between,
    clears,
    interval,
    mcnemar,
    paired,
    resolution,
    score,
    verdict,
)

ONE_IN_A_MILLION = 1e-6
DOWN = ["reproduced", "partly", "not reproduced", "undecided"]  # the order in which noise moves a verdict


def most(rate, runs):
    """A count that a rate of at most `rate` exceeds once in a million simulations."""
    return stats.binom.ppf(1 - ONE_IN_A_MILLION, runs, rate)


def least(rate, runs):
    return stats.binom.ppf(ONE_IN_A_MILLION, runs, rate)


def around(value, half, **facts):
    return Interval(value, value - half, value + half, half / 2, **facts)


# --- over seeds


def test_interval_is_students():
    x = [81.0, 84.0, 79.0, 80.5]
    for level in (0.5, 0.95, 0.99):
        expected = stats.ttest_1samp(x, 0).confidence_interval(level)
        found = interval(x, level)
        np.testing.assert_allclose([found.low, found.high], expected, rtol=1e-12)
        assert (found.value, found.seeds, found.level) == (np.mean(x), 4, level)
    assert found.sd == pytest.approx(np.std(x, ddof=1)) and found.se == pytest.approx(stats.sem(x))
    assert found.resolution == pytest.approx(found.high - found.value)


def test_one_seed_leaves_everything_open():
    found = interval([3.0])
    assert (found.low, found.value, found.high, found.se) == (-math.inf, 3.0, math.inf, math.inf)
    assert math.isnan(found.sd) and found.resolution == math.inf
    assert str(found) == "3 [-inf, inf] (95 % over 1 seed, sd missing)"
    assert str(interval([1, 3])) == "2 [-10.71, 14.71] (95 % over 2 seeds, sd 1.41)"


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf], [[1.0, 2.0]]])
def test_interval_refuses(values):
    with pytest.raises(ValueError, match="expected finite values and a level"):
        interval(values)


def test_limits_stand_in_order():
    for limits in ((1, 2, 3), (2, 1, 1.5), (math.nan, 0, 1)):
        with pytest.raises(ValueError, match="expected low <= value <= high"):
            Interval(limits[0], limits[1], limits[2], 1.0)
    for level in (0, 1, 95):
        with pytest.raises(ValueError, match="level"):
            interval([1, 2], level)


@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_interval_false_alarms(seeds):
    runs = 2000
    x = np.random.default_rng([seeds, 1]).normal(size=(runs, seeds))
    alarms = sum(not i.low <= 0 <= i.high for i in map(interval, x))
    assert least(0.05, runs) <= alarms <= most(0.05, runs)


# --- over seeds and items


def table(seeds, items, rng, *, gain=0.0, seed_sd=0.0, item_sd=0.0, noise=0.0, base=None):
    """Outcomes with known parts: {seed: base_i + gain + A_s + I_i + e_si}."""
    common = gain + rng.normal(0, item_sd, items) + (0 if base is None else base)
    return {s: common + rng.normal(0, seed_sd) + rng.normal(0, noise, items) for s in range(seeds)}


def test_paired_by_hand():
    """The seeds' half is Student's, of differences; the items' half is close to the normal one; they add in squares."""
    rng = np.random.default_rng(0)
    a, b = (table(4, 4000, rng, gain=g, seed_sd=0.02, item_sd=1.0) for g in (0.3, 0.0))
    found = paired(a, b, draws=4000)
    d = np.array([a[s] - b[s] for s in range(4)])
    seeds = stats.ttest_1samp(d.mean(1), 0).confidence_interval()
    half = (seeds.high - seeds.low) / 2
    items = stats.norm.ppf(0.975) * d.mean(0).std(ddof=1) / np.sqrt(4000)
    assert found.value == pytest.approx(d.mean(), rel=1e-12) and found.sd == pytest.approx(d.mean(1).std(ddof=1))
    assert found.high - found.value == pytest.approx(np.hypot(half, items), rel=0.03)
    assert found.value - found.low == pytest.approx(np.hypot(half, items), rel=0.03)
    assert found.se == pytest.approx(np.hypot(stats.sem(d.mean(1)), d.mean(0).std() / np.sqrt(4000)), rel=0.03)
    assert (found.seeds, found.items, found.over) == (4, 4000, "seeds and items")


def test_other_seeds_are_not_paired():
    rng = np.random.default_rng(1)
    a, b = (table(3, 50, rng, seed_sd=1.0) for _ in range(2))
    other = {s + 10: y for s, y in b.items()}
    halves = [interval([y.mean() for y in row.values()]).resolution for row in (a, b)]
    assert paired(a, other).resolution == pytest.approx(np.hypot(*halves), rel=1e-9)  # the items add nothing here
    fewer = {10: b[0], 11: b[1]}
    assert paired(a, fewer).seeds == 2 and paired(a, b).resolution != paired(a, other).resolution
    shuffled = {2: b[2], 0: b[0], 1: b[1]}
    assert paired(a, b) == paired(a, shuffled)


def test_a_single_training_is_taken_to_scatter_as_the_others_do():
    """se^2 = sd^2 / 3 + sd^2 where the items leave no spread."""
    item, shifts = np.random.default_rng(2).normal(0, 10, 100), (0.0, 1.0, 5.0)
    found = paired({s: item + x for s, x in enumerate(shifts)}, {0: item})
    assert found.se == pytest.approx(np.std(shifts, ddof=1) * math.sqrt(4 / 3)) and found.trainings == (3, 1)
    assert "one row trained once and taken to scatter as the other" in str(found) and "seeds" not in str(found)
    two = paired({s: item + x for s, x in enumerate(shifts)}, {0: item, 1: item + 1})
    assert (two.seeds, two.trainings) == (2, (3, 2)) and "over 3 and 2 seeds" in str(two)


def test_items_are_resampled_together():
    """A difference that is the same on every item leaves no spread over items, however much items differ."""
    hard = np.random.default_rng(2).normal(0, 10, 100)
    found = paired({0: hard + 0.5, 1: hard + 0.5}, {0: hard, 1: hard})
    assert (found.value, found.resolution) == (pytest.approx(0.5), pytest.approx(0, abs=1e-12))
    assert paired({0: hard + 0.5, 1: hard + 0.5}, {0: hard, 1: hard[::-1]}).resolution > 1


def test_a_row_trained_once():
    rng = np.random.default_rng(3)
    many, other = (table(3, 40, rng, noise=1.0) for _ in range(2))
    rule = rng.normal(size=40)
    for a, b in (({0: many[0]}, {0: other[0]}), (many, {0: other[0]}), ({0: many[0]}, rule)):
        found = paired(a, b)
        assert found.over == "items only" and found.resolution == math.inf and found.seeds == 1
        assert math.isfinite(found.high) and math.isfinite(found.se)
    assert score({0: many[0]}).over == "items only" and score({0: many[0]}).seeds == 1
    for found in (paired(many, rule), score(many)):
        assert (found.over, found.seeds) == ("seeds and items", 3)
    assert paired(rule, many[0]).over == score(rule).over == "items" and score(rule).seeds == 0
    assert math.isfinite(score(rule).resolution)


def test_score_is_the_difference_to_nothing():
    row = table(3, 60, np.random.default_rng(4), gain=2.0, seed_sd=0.1, item_sd=1.0)
    a, b = score(row), paired(row, np.zeros(60))
    assert a == b


def test_clusters():
    """Items doubled within their cluster teach nothing; taken as independent they would."""
    rng = np.random.default_rng(5)
    a, b = (table(3, 80, rng, item_sd=1.0) for _ in range(2))
    once = paired(a, b)
    doubled = [{s: np.repeat(y, 2) for s, y in row.items()} for row in (a, b)]
    found = paired(*doubled, clusters=np.repeat(np.arange(80), 2))
    np.testing.assert_allclose([found.low, found.high], [once.low, once.high], rtol=1e-9)
    assert found.items == 80 and paired(*doubled).resolution < 0.9 * once.resolution
    named = np.array(list("abcd"))[np.arange(80) % 4]
    assert paired(a, b, clusters=named).items == 4
    assert paired(a, b, clusters=np.zeros(80)).high == math.inf  # one cluster
    sizes = np.repeat(np.arange(5), [40, 10, 10, 10, 10])
    assert paired(a, b, clusters=sizes).value == pytest.approx(once.value)
    with pytest.raises(ValueError, match="clusters: expected one a item, 80, got 3"):
        paired(a, b, clusters=[1, 2, 3])


@pytest.mark.parametrize("clusters", [None, np.arange(90) // 3])
def test_another_statistic_is_resampled_like_a_mean(clusters):
    rng = np.random.default_rng(6)
    a, b = (table(3, 90, rng, seed_sd=0.1, item_sd=1.0) for _ in range(2))
    mean = paired(a, b, clusters=clusters, draws=1000)
    own = paired(a, b, clusters=clusters, draws=1000, statistic=lambda y: y.sum() / len(y))
    assert own.value == pytest.approx(mean.value)
    np.testing.assert_allclose([own.low, own.high], [mean.low, mean.high], atol=0.02)
    largest = score(a, statistic=np.max, draws=200)
    assert largest.value == pytest.approx(np.mean([y.max() for y in a.values()]))
    assert largest.low <= largest.value <= largest.high


def test_few_items_have_students_tails():
    x = np.array([1.0, 4.0, 2.0, 2.5, 3.5])
    limits = stats.ttest_1samp(x, 0).confidence_interval()
    found = score(x, draws=4000)
    assert found.resolution == pytest.approx((limits.high - limits.low) / 2, rel=0.15)
    assert found.se == pytest.approx(stats.sem(x), rel=0.05)


def test_average_precision_as_statistic():
    from sklearn.metrics import average_precision_score

    rng = np.random.default_rng(7)
    truth = rng.random(150) < 0.3
    row = {s: np.stack([truth + rng.normal(0, 1, 150), truth], -1) for s in range(3)}
    found = score(row, statistic=lambda y: average_precision_score(y[:, 1], y[:, 0]), draws=200)
    assert 0.3 < found.low < found.value < found.high < 1


def test_a_statistic_that_is_not_defined_on_some_items():
    def ratio(y):
        return y[:, 0].sum() / y[:, 1].sum()

    rare = np.column_stack([np.ones(10), np.arange(10) == 0])
    with pytest.raises(ValueError, match="statistic: not finite on some"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        score(rare, statistic=ratio)


def test_rule_of_three():
    """Without an item that tells the rows apart: the limits at which 95 % of all test sets would have shown one."""
    same = {s: np.arange(50) % 2 == 0 for s in range(3)}
    found = paired(same, same)
    rate = found.high  # of items that only a has right: such a test set has none with probability 2.5 %
    assert found.value == 0 and (1 - rate) ** 50 == pytest.approx(0.025, rel=0.2)
    assert found.low == -found.high
    percent = paired({s: 100 * y for s, y in same.items()}, {s: 100 * y for s, y in same.items()})
    assert percent.high == pytest.approx(100 * found.high)
    perfect = score(np.arange(20) < 20).resolution
    assert perfect > 0 and score(np.full(20, 100)).resolution == pytest.approx(100 * perfect)
    assert paired(np.arange(20.0), np.arange(20.0)).resolution == 0  # many values have no step


def test_equal_arguments_give_equal_intervals_without_warnings():
    row = table(3, 30, np.random.default_rng(8), item_sd=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert score(row) == score(row) != score(row, seed=1)


@pytest.mark.parametrize("bad", [{}, {0: []}, {0: [1.0, math.nan]}, 3.0])
def test_paired_refuses(bad):
    with pytest.raises(ValueError, match="b: expected finite outcomes of at least one item for at least one seed"):
        paired({0: [1.0, 2.0]}, bad)


def test_rows_answer_the_same_items():
    for a, b in (({0: [1, 2]}, {0: [1, 2, 3]}), ({0: [1, 2], 1: [1]}, {0: [1, 2]})):
        with pytest.raises(ValueError, match="expected outcomes of the same items in all rows and seeds, got"):
            paired(a, b)


SETTINGS = {
    "seeds": dict(seed_sd=1.0),
    "items": dict(item_sd=1.0),
    "noise": dict(noise=1.0),
    "all": dict(seed_sd=0.1, item_sd=1.0, noise=1.0),
}


@pytest.mark.parametrize("name, seeds", itertools.product(SETTINGS, (2, 3)))
def test_paired_false_alarms(name, seeds):
    """No more than 5 %; as many where seeds alone vary, since there the interval is exact."""
    runs, alarms = 300, 0
    for run in range(runs):
        rng = np.random.default_rng([run, seeds, *name.encode()])
        hard = rng.normal(0, 3, 60)
        d = paired(*(table(seeds, 60, rng, base=hard, **SETTINGS[name]) for _ in range(2)), draws=200)
        alarms += not d.low <= 0 <= d.high
    assert alarms <= most(0.05, runs)
    if name == "seeds":
        assert alarms >= least(0.05, runs)


def test_paired_false_alarms_with_few_clusters():
    runs, alarms = 300, 0
    for run in range(runs):
        rng = np.random.default_rng([run, 9])
        cloud = np.repeat(np.arange(5), 20)
        shifts = rng.normal(0, 1, 5)[cloud] + rng.normal(0, 1, 100)
        d = paired(shifts, np.zeros(100), clusters=cloud, draws=200)
        alarms += not d.low <= 0 <= d.high
    assert alarms <= most(0.06, runs)  # percentiles of five clusters are not exact


@pytest.mark.parametrize("seeds, items", [(3, 400), (5, 60), (8, 200)])
def test_paired_finds_what_resolution_says(seeds, items):
    """Power of about 80 % at the difference that `resolution` names."""
    seed_sd, item_sd, runs = 0.2, 1.0, 300
    gain = resolution(seed_sd * math.sqrt(2), seeds, item_sd, items)
    found = 0
    for run in range(runs):
        rng = np.random.default_rng([run, seeds, items])
        a = table(seeds, items, rng, gain=gain, seed_sd=seed_sd, item_sd=item_sd)
        found += paired(a, table(seeds, items, rng, seed_sd=seed_sd), draws=200).low > 0
    assert least(0.75, runs) <= found <= most(0.9, runs)


@pytest.mark.parametrize("part", ["seeds", "items"])
def test_more_noise_widens(part):
    rng = np.random.default_rng(10)
    seeds, items = rng.normal(0, 1, 3), rng.normal(0, 5, 200)
    seeds, items = seeds - seeds.mean(), items - items.mean()
    widths = []
    for grow in (0.0, 0.5, 1.0, 2.0, 8.0):
        g, h = (grow, 1.0) if part == "seeds" else (1.0, grow)
        found = score({s: 3 + g * x + h * items for s, x in enumerate(seeds)})
        assert found.value == pytest.approx(3)
        widths.append((found.high - found.low, found.se))
    assert (np.diff(widths, axis=0) > 0).all()


# --- one training each


def test_mcnemar_by_summing():
    for only_a, only_b in ((0, 0), (1, 0), (6, 0), (10, 1), (7, 7), (2, 12)):
        a = np.array([1] * only_a + [0] * only_b + [1, 1, 0], bool)
        b = np.array([0] * only_a + [1] * only_b + [1, 1, 0], bool)
        n = only_a + only_b
        tail = sum(math.comb(n, k) for k in range(min(only_a, only_b) + 1)) / 2**n
        assert mcnemar(a, b) == (only_a, only_b, pytest.approx(min(1, 2 * tail)))
    for a, b in (([1, 0], [1, 0, 1]), ([0.5, 1], [0, 1]), ([[1, 0]], [[1, 0]])):
        with pytest.raises(ValueError, match="expected right or wrong for the same items"):
            mcnemar(a, b)


@pytest.mark.parametrize("share", [0.5, 0.7])
def test_mcnemar_false_alarms_and_power(share):
    """At half and half the rate is at most 5 %; else it is the power, summed over all numbers of disagreements."""
    runs, items, disagree = 1000, 120, 0.3
    rng = np.random.default_rng([3, int(10 * share)])
    differ = rng.random((runs, items)) < disagree
    a = rng.random((runs, items)) < share
    alarms = sum(mcnemar(x & d, ~x & d).p < 0.05 for x, d in zip(a, differ, strict=True))
    exact = 0.0
    for n in range(items + 1):
        k = np.arange(n + 1)
        extreme = 2 * stats.binom.cdf(np.minimum(k, n - k), n, 0.5) < 0.05
        exact += stats.binom.pmf(n, items, disagree) * stats.binom.pmf(k, n, share)[extreme].sum()
    assert least(exact, runs) <= alarms <= most(exact, runs)
    assert (exact <= 0.05) == (share == 0.5)


# --- what can be seen


def test_resolution_of_seeds_alone():
    for seeds, level, power in ((2, 0.95, 0.8), (3, 0.95, 0.8), (6, 0.99, 0.5)):
        found = resolution(2.0, seeds, level=level, power=power)
        shift = found / 2.0 * math.sqrt(seeds)
        cut = stats.t.ppf((1 + level) / 2, seeds - 1)
        assert 1 - stats.nct.cdf(cut, seeds - 1, shift) == pytest.approx(power, abs=1e-6)


def test_resolution_of_items_alone_and_limits():
    assert resolution(0.0, 3, 0.5, 400) == pytest.approx((1.959964 + 0.841621) * 0.5 / 20, rel=1e-5)
    assert resolution(1.0, 1, 0.5, 400) == math.inf
    falling = [resolution(1.0, s, 1.0, n) for s, n in ((2, 50), (3, 50), (3, 500), (10, 500))]
    assert falling == sorted(falling, reverse=True)
    for wrong in (dict(seeds=0), dict(seed_sd=-1), dict(items=-1), dict(level=1), dict(power=0)):
        with pytest.raises(ValueError, match="expected seeds >= 1, nothing negative"):
            resolution(**(dict(seed_sd=1.0, seeds=3) | wrong))


# --- floors


def test_clears_by_two_standard_errors():
    """Spread over seeds chosen so that the difference is just more, or just less, than two standard errors."""
    items = np.tile([0.0, 1.0, 2.0], 10)
    for margin, expected in ((2.01, True), (1.99, False)):
        shifts = np.array([-1.0, 0.0, 1.0]) / stats.sem([-1, 0, 1]) + margin  # standard error 1
        row = {s: items + x for s, x in enumerate(shifts)}
        assert clears(row, {"floor": items, "low": items - 100}) == {"floor": expected, "low": True}
    assert clears({0: items, 1: items}, {"itself": items}) == {"itself": False}
    once = np.arange(30) < 20
    assert clears({0: once}, {"low": np.arange(30) < 3, "near": np.arange(30) < 19}) == {"low": True, "near": False}


# --- the rule


def decided(paper, low, high, tolerance, difference=True):
    """The rule, written down once more, for one of the paper's directions."""
    if difference and paper < 0:
        return decided(-paper, -high, -low, tolerance)
    if paper - tolerance <= low and high <= paper + tolerance:
        return "reproduced"
    if difference and paper > 0 and low > 0:
        return "partly"
    return "not reproduced" if high < paper - tolerance or low > paper + tolerance else "undecided"


@pytest.mark.parametrize("paper, difference", [(3.0, True), (-3.0, True), (0.0, True), (3.0, False), (-3.0, False)])
def test_verdicts(paper, difference):
    edges = np.arange(-6, 6.25, 0.25)
    for low, high in itertools.combinations_with_replacement(edges, 2):
        found = verdict(paper, Interval((low + high) / 2, low, high, 1.0), tolerance=0.5, difference=difference)
        assert found.verdict == decided(paper, low, high, 0.5, difference), (low, high)
    assert {verdict(paper, around(x, 0.1), tolerance=0.5, difference=difference).verdict for x in edges} >= {
        "reproduced",
        "not reproduced",
    }


def test_the_edge_of_the_tolerance_counts_as_within():
    """All numbers are exact in binary; a factor of 1.01 or 0.99 on the tolerance changes a verdict."""
    for paper, side in itertools.product((8.0, -8.0), (1, -1)):
        edge = paper + side * 0.5
        beyond = edge + side * 2**-9  # 0.4 % of the tolerance
        for limit, word in ((edge, "reproduced"), (beyond, "partly")):
            low, high = sorted((paper, limit))
            found = verdict(paper, Interval(paper, low, high, 0.1), tolerance=0.5)
            assert found.verdict == word
        touching = Interval(edge, *sorted((edge, edge + side * 4)), 0.1)
        apart = Interval(beyond, *sorted((beyond, beyond + side * 4)), 0.1)
        assert verdict(paper, touching, tolerance=0.5, difference=False).verdict == "undecided"
        assert verdict(paper, apart, tolerance=0.5, difference=False).verdict == "not reproduced"


def test_zero_is_not_on_the_papers_side():
    assert verdict(3.0, Interval(1.0, 0.0, 2.0, 0.1), tolerance=0.5).verdict == "not reproduced"
    assert verdict(3.0, Interval(1.0, 2**-30, 2.0, 0.1), tolerance=0.5).verdict == "partly"
    assert verdict(3.0, Interval(1.0, 0.0, 2.5, 0.1), tolerance=0.5).verdict == "undecided"


@pytest.mark.parametrize("sign", [1, -1])
def test_a_direction_without_a_number(sign):
    def word(low, high, tolerance=0.0):
        low, high = sorted((sign * low, sign * high))
        return verdict(None, Interval((low + high) / 2, low, high, 1.0), tolerance=tolerance, sign=sign).verdict

    assert word(0.1, 9) == "reproduced" and word(0, 1) == "undecided" and word(-1, 1) == "undecided"
    assert word(-1, 0) == "not reproduced" and word(-2, -1) == "not reproduced"
    assert word(1, 2, tolerance=1) == "reproduced" and word(0.5, 2, tolerance=1) == "partly"
    assert word(-0.5, 0.5, tolerance=1) == "not reproduced" and word(-0.5, 1.0, tolerance=1) == "undecided"


def test_text_holds_the_numbers():
    found = verdict(3.0, around(1.5, 2.2, seeds=3, sd=0.4), tolerance=0.5)
    assert found.verdict == "undecided" and found.why == (
        "paper 3, ours 1.5 [-0.7, 3.7] (95 % over 3 seeds, sd 0.4), tolerance 0.5; "
        "the interval holds values that agree and others; a difference found below 2.2 is within chance"
    )
    below = verdict(3.0, around(3, 0.1), {"PAT": ["1-NN", "linear"]}, tolerance=1)
    assert "; PAT is not two standard errors above 1-NN, linear; a difference found below 0.1" in below.why
    once = verdict(3.0, around(3, 0.1, over="items only"), tolerance=1)
    assert once.verdict == "undecided" and "trained once), tolerance 1; " in once.why
    assert once.why.endswith("a row was trained once: differences under 0.1 are hidden already, and three trainings of "
                             "each row would find, in four of five runs, 3.3 times the sd of their differences, test "
                             "items apart")
    less = verdict(None, around(3, 0.1), tolerance=0, sign=-1)
    assert less.why.startswith("expected below 0, ours 3 [") and less.why.endswith("leaves out what was expected")
    ours = verdict(3.0, around(1, 0.1), tolerance=0.5, printed=False)
    assert ours.why.startswith("expected 3, ours 1 [") and "paper" not in ours.why
    assert verdict(3.0, around(3, math.inf, seeds=0), tolerance=0.5).why.endswith("; nothing tells how it scatters")
    small = verdict(None, around(0.1, 0.2), tolerance=1, sign=1)
    assert small.verdict == "not reproduced" and small.why.endswith("leaves out a difference of 1 and more")
    near = verdict(None, around(0.5, 0.1), tolerance=1, sign=1)
    assert near.verdict == "partly"
    assert near.why.endswith("; on the expected side; a difference within the tolerance of 0 is not left out")


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(tolerance=-1), "tolerance is -1; it must be finite and not negative"),
        (dict(tolerance=math.inf), "tolerance is inf"),
        (dict(tolerance=math.nan), "tolerance is nan"),
        (dict(tolerance=3.0), "tolerance 3.0 reaches zero from 3.0"),
        (dict(paper=None), "without the paper's value: expected a difference and sign 1 or -1, got 0"),
        (dict(paper=None, sign=1, difference=False), "without the paper's value"),
        (dict(paper=math.nan), "paper is nan"),
        (dict(sign=-1), "paper is 3.0 with sign -1"),
    ],
)
def test_verdict_refuses(wrong, message):
    with pytest.raises(ValueError, match=message):
        verdict(**(dict(paper=3.0, ours=around(3, 1), tolerance=0.5) | wrong))
    assert verdict(0.5, around(0.5, 0.1), tolerance=3.0, difference=False).verdict == "reproduced"


def test_a_noisier_run_is_never_surer():
    """Every interval is widened, to one side or both: verdicts move down only, and end undecided."""
    rng = np.random.default_rng(0)
    for _ in range(3000):
        paper = rng.choice([rng.normal(0, 3), 0.0])
        difference, sign = bool(rng.integers(2)), 0
        tolerance = rng.random() * abs(paper) if difference and paper else rng.random()
        if rng.random() < 0.2:
            paper, difference, sign = None, True, int(rng.choice([1, -1]))
        low, value, high = np.sort(rng.normal(0, 3, 3))
        steps = np.cumsum(rng.random((6, 2)) * rng.integers(0, 2, (6, 2)), axis=0)
        steps = [(0, 0), *steps, (math.inf, math.inf)]
        words = [
            verdict(
                paper, Interval(value, low - x, high + y, 1.0), tolerance=tolerance, sign=sign, difference=difference
            ).verdict
            for x, y in steps
        ]
        places = [DOWN.index(word) for word in words]
        assert places == sorted(places) and words[-1] == "undecided"


@pytest.mark.parametrize("paper", [3.0, None])
def test_below_a_floor_or_trained_once_is_undecided(paper):
    for value in np.linspace(-5, 8, 27):
        for ours, below in ((around(value, 0.01), {"row": ["floor"]}), (around(value, 0.01, over="items only"), {})):
            sign = 1 if paper is None else 0
            assert verdict(paper, ours, below, tolerance=0.5, sign=sign).verdict == "undecided"


# --- experiments


def rows(gain=10.0, seeds=3, noise=1.0, items=300):
    """Two rows in percent, and a floor half way down."""
    rng = np.random.default_rng(11)
    shifts = np.array([-1.0, 0.2, 0.8, 0.1, -0.1])[:seeds]
    item = rng.normal(60, 20, items)
    a, b = ({s: item + g + noise * k * x for s, x in enumerate(shifts)} for g, k in ((gain, 1.0), (0.0, -1.0)))
    return {"a": a, "b": b}, {"floor": item - 30.0}


def test_experiment():
    both, floors = rows()
    made = Experiment(both, floors)
    assert made.interval == paired(both["a"], both["b"]) and made.below == {}
    assert made.verdict(10, tolerance=8).verdict == "reproduced" and made.decided_by == "training"
    alone = Experiment({"a": both["a"]}, floors)
    assert alone.interval == score(both["a"]) and alone.verdict(70, tolerance=10).verdict == "reproduced"
    grouped = Experiment(both, floors, clusters=np.arange(300) // 10, level=0.9, statistic=np.median)
    options = dict(clusters=np.arange(300) // 10, level=0.9, statistic=np.median)
    assert grouped.interval == paired(both["a"], both["b"], **options)


def test_nothing_below_its_floors_is_decided():
    both, floors = rows()
    high = {"b is below": both["b"][0] + 5.0}
    made = Experiment(both, floors | high)
    assert made.below == {"b": ("b is below",)}
    assert made.verdict(10, tolerance=8).verdict == "undecided"
    assert "; b is not two standard errors above b is below; " in made.verdict(10, tolerance=8).why
    exempt = Experiment(both, {"b": both["b"]} | high)  # b is itself a floor here: it has none to clear
    assert exempt.below == {} and exempt.verdict(10, tolerance=8).verdict == "reproduced"
    low = {"a": {s: y - 60 for s, y in both["a"].items()}, "b": both["b"]}
    assert Experiment(low, floors).below == {"a": ("floor",)}


def test_a_floor_without_outcomes_is_cleared_by_nobody():
    both, floors = rows()
    made = Experiment(both, floors, missing=("no attention",))
    assert made.short == {"a": (), "b": ()}
    assert made.below == {"a": ("no attention (no record)",), "b": ("no attention (no record)",)}
    decided = made.verdict(10, tolerance=8)
    assert decided.verdict == "undecided"
    assert "; undecided without a record of no attention; " in decided.why and "above no attention" not in decided.why
    exempt = Experiment({"b": both["b"]}, floors | {"b": both["b"]}, missing=("no attention",))
    assert exempt.below == {} == Experiment(both, floors).below
    spared = Experiment(both, floors, missing=("no attention",), spared={"b": ("no attention",)})
    assert spared.below == {"a": ("no attention (no record)",)}


def test_a_row_is_spared_a_floor_of_the_other():
    both, floors = rows()
    high = {"its own, without attention": both["a"], **floors}
    assert Experiment(both, high).below.keys() == {"a", "b"}
    spared = Experiment(both, high, spared={"b": ("its own, without attention",)})
    assert spared.below == {"a": ("its own, without attention",)}
    assert "a is not two standard errors above 'its own, without attention'; " in spared.verdict(10, tolerance=8).why


def test_one_seed_decides_nothing():
    both, floors = rows()
    made = Experiment({"a": both["a"], "b": {0: both["b"][0]}}, floors)
    assert made.verdict(10, tolerance=8).verdict == "undecided"


def test_experiments_refuse():
    both, floors = rows()
    for wrong in ({}, both | {"c": both["a"]}):
        with pytest.raises(ValueError, match="rows: expected one or two"):
            Experiment(wrong, floors)
    for none in ({}, {"b": both["b"]}):
        with pytest.raises(ValueError, match="floors: a training is judged beside what needs no attention"):
            Experiment(both, none)
    assert Experiment(both, decided_by="clock").below == {}


@pytest.mark.parametrize("gain, paper", itertools.product((10.0, 4.0, 0.0, -6.0), (10.0, -5.0, None)))
def test_noise_in_the_trainings_moves_a_verdict_down_only(gain, paper):
    """The same means with trainings ever more apart."""
    found = []
    for noise in (0.01, 0.3, 1.0, 2.0, 5.0, 20.0, 100.0):
        both, floors = rows(gain, noise=noise)
        made = Experiment(both, floors)
        assert made.interval.value == pytest.approx(gain)
        found.append(made.verdict(paper, tolerance=2.0, sign=1 if paper is None else 0).verdict)
    places = [DOWN.index(word) for word in found]
    assert places == sorted(places) and found[0] != "undecided" and found[-1] == "undecided"


def test_items_between_printed_percentages():
    """By rounding every count."""
    items, printed = 137, [round(100 * k / 137, 1) for k in range(138)]
    for better, worse in ((printed[130], printed[129]), (printed[90], printed[100]), (printed[137], printed[0])):
        counts = [[k for k in range(items + 1) if printed[k] == percent] for percent in (better, worse)]
        gaps = [a - b for a in counts[0] for b in counts[1]]
        assert between(better, worse, items) == (min(gaps), max(gaps))
    assert between(91.4, 91.3, 2468) == (1, 3) and between(90, 89, 100, decimals=0) == (1, 1)
    with pytest.raises(ValueError, match="50.3 % is no share of 10 items"):
        between(50.3, 50.0, 10)
    with pytest.raises(ValueError, match="items"):
        between(50, 40, 0)


def test_fewer_trainings_than_planned_decide_nothing():
    right = {s: np.arange(1000) % 10 < 9 for s in range(3)}
    chance = np.arange(1000) % 2 == 0
    for planned, found in ((3, "reproduced"), (4, "undecided")):
        made = Experiment({"a": right}, {"chance": chance}, planned={"a": planned, "b": 9})
        assert made.verdict(0.9, tolerance=0.1).verdict == found
    assert "a has 3 of 4 planned trainings" in made.verdict(0.9, tolerance=0.1).why
