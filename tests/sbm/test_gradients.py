"""Estimates of the gradient by an edge's probability have the means that the theory gives them."""

import pytest
import torch
from scipy import stats

from sparseattn.sbm.attention import explore
from sparseattn.sbm.gradients import (
    RULES,
    all_masks,
    attend,
    estimate,
    exact_gradient,
    expected,
    score_function,
)
from sparseattn.sbm.sampling import fastrg

EXACT = {"rtol": 0, "atol": 1e-11}  # float64 throughout


def problem(groups=6, n=3, m=4, d=4, seed=0):
    g = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    p = 0.05 + 0.9 * torch.rand(groups, n, m, generator=g, dtype=torch.float64)
    return draw(groups, n, d), draw(groups, m, d), draw(groups, m, d), draw(groups, n, d), p


def linear(direction):
    return lambda out: (out * direction).sum(-1)


def squared(direction):
    return lambda out: (out - direction).square().sum(-1)


def truth(loss, q, k, v, p):
    return exact_gradient(lambda masks: loss(attend(q, k, v, masks)), p, by_row=True)


def mean_of(rule, loss, q, k, v, p):
    return expected(lambda masks: estimate(loss, q, k, v, masks, rule, p=p), p, by_row=True)


def test_expected_knows_independent_edges():
    p = torch.tensor([[0.2, 0.0], [1.0, 0.7]], dtype=torch.float64)
    assert len(all_masks(4).unique(dim=0)) == 16
    torch.testing.assert_close(expected(lambda m: m.double(), p), p)
    torch.testing.assert_close(expected(lambda m: m.double(), p, by_row=True), p)
    torch.testing.assert_close(expected(lambda m: (m[:, 0, 0] & m[:, 1, 1]).double(), p), p[0, 0] * p[1, 1])


def test_exact_gradient_is_the_difference_of_two_expectations():
    q, k, v, c, p = problem(groups=1, n=2, m=3)

    def loss(masks):  # couples the rows
        return torch.tanh((attend(q, k, v, masks) * c).sum((-1, -2)))

    found = exact_gradient(loss, p)
    for i in range(2):
        for j in range(3):
            sides = []
            for value in (1.0, 0.0):
                at = p.clone()
                at[0, i, j] = value
                sides.append(expected(loss, at))
            torch.testing.assert_close(found[0, i, j], (sides[0] - sides[1])[0], **EXACT)


def test_rows_or_whole_masks():
    q, k, v, c, p = problem(groups=2, n=2, m=4)
    whole = exact_gradient(lambda masks: squared(c)(attend(q, k, v, masks)).sum(-1), p)
    torch.testing.assert_close(truth(squared(c), q, k, v, p), whole, **EXACT)


@pytest.mark.parametrize("rule", ["removal", "two-sided"])
def test_mean_is_p_times_the_gradient_of_a_linear_loss(rule):
    q, k, v, c, p = problem()
    torch.testing.assert_close(mean_of(rule, linear(c), q, k, v, p), p * truth(linear(c), q, k, v, p), **EXACT)


def test_two_sided_is_exact_for_quadratic_losses_and_removal_is_not():
    q, k, v, c, p = problem()
    wanted = p * truth(squared(c), q, k, v, p)
    torch.testing.assert_close(mean_of("two-sided", squared(c), q, k, v, p), wanted, **EXACT)
    excess = mean_of("removal", squared(c), q, k, v, p) - wanted
    assert excess.min() > -1e-11 and excess.mean() > 0.1 * wanted.abs().mean()  # convex: harm is overrated


def test_score_rule_is_the_weight_rule_times_the_score():
    q, k, v, c, p = problem()
    scores = q @ k.mT / 2
    by_score, by_weight = (mean_of(rule, squared(c), q, k, v, p) for rule in ("score", "weight"))
    torch.testing.assert_close(by_score, scores * by_weight, **EXACT)


def test_rules_against_literal_forms():
    q, k, v, c, _ = problem(groups=1)
    g = torch.Generator().manual_seed(3)
    mask = torch.rand(1, 1, 3, 4, generator=g) < 0.6
    mask[..., 0] = True
    scores = (q @ k.mT / 2).masked_fill(~mask, -torch.inf)
    m = mask.double().requires_grad_()
    mass = scores.exp() * m
    forms = {"score": torch.where(mask, m * scores, -torch.inf).softmax(-1),
             "weight": mass / mass.sum(-1, keepdim=True)}
    for rule, weights in forms.items():
        by_hand, = torch.autograd.grad(squared(c)(weights @ v).sum(), m)
        found = estimate(squared(c), q, k, v, mask, rule)
        torch.testing.assert_close(found, by_hand.nan_to_num().masked_fill(~mask, 0), **EXACT)


def test_score_function_is_unbiased_whatever_the_baseline():
    q, k, v, c, p = problem(groups=2, n=2, m=4)

    def loss(masks):
        return squared(c)(attend(q, k, v, masks)).sum(-1)

    for baseline in (0.0, torch.tensor([2.0, -5.0], dtype=torch.float64)):
        mean = expected(lambda m, b=baseline: score_function(loss(m), m, p, b), p)
        torch.testing.assert_close(mean, exact_gradient(loss, p), rtol=0, atol=1e-10)


def test_candidates_replace_the_probability_of_pairs_without_an_edge():
    q, k, v, c, p = problem()
    masks = torch.rand(20, *p.shape, generator=torch.Generator().manual_seed(1)) < p
    full = estimate(squared(c), q, k, v, masks, "two-sided", p=p)
    every = estimate(squared(c), q, k, v, masks, "two-sided", p=p, candidates=torch.ones_like(masks))
    none = estimate(squared(c), q, k, v, masks, "two-sided", p=p, candidates=torch.zeros_like(masks))
    torch.testing.assert_close(torch.where(masks, every, every * p), full, **EXACT)
    assert (none[~masks] == 0).all() and (every[~masks] != 0).any()
    torch.testing.assert_close(none[masks], estimate(squared(c), q, k, v, masks, "removal")[masks] / 2, **EXACT)


@pytest.mark.parametrize("rule", RULES)
def test_rows_without_edges_are_finite(rule):
    q, k, v, c, p = problem()
    masks = torch.zeros(1, *p.shape, dtype=torch.bool)
    found = estimate(squared(c), q, k, v, masks, rule, p=p)
    assert found.isfinite().all()
    assert (found == 0).all() == (rule != "two-sided")


@pytest.mark.parametrize("batched", [False, True])
def test_explore_adds_delta_to_every_rate(batched):
    g = torch.Generator().manual_seed(0)
    shape = (2,) if batched else ()
    y, b, z = (torch.rand(*shape, *s, generator=g, dtype=torch.float64) for s in ((5, 3), (3, 3), (7, 3)))
    larger = explore(y, b, z, 0.25)
    torch.testing.assert_close(larger[0] @ larger[1] @ larger[2].mT, y @ b @ z.mT + 0.25)


def test_explored_graphs_have_their_law():
    y, b = torch.eye(2, dtype=torch.float64), torch.tensor([[0.0, 0.3], [0.1, 0.0]], dtype=torch.float64)
    model = [x.expand(5000, *x.shape) for x in explore(y, b, y, 0.05)]
    _, i, j = fastrg(*model, duplicates=True, generator=torch.Generator().manual_seed(0))
    mean = 5000 * (b + 0.05).flatten()
    square = ((torch.bincount(2 * i + j, minlength=4) - mean).square() / mean).sum().item()
    assert stats.chi2.sf(square, 4) > 1e-4  # false-alarm rate, fixed seed


def test_bad_input_is_named():
    q, k, v, c, p = problem(groups=1)
    masks = torch.ones(1, *p.shape, dtype=torch.bool)
    with pytest.raises(ValueError, match="rule must be one of"):
        estimate(linear(c), q, k, v, masks, "straight")
    with pytest.raises(ValueError, match="needs p"):
        estimate(linear(c), q, k, v, masks, "two-sided")
    with pytest.raises(ValueError, match="p must hold probabilities"):
        expected(lambda m: m.sum((1, 2)), torch.full((2, 2), 1.5))
    with pytest.raises(ValueError, match="pairs must lie in"):
        exact_gradient(lambda m: m.sum((1, 2)), torch.full((5, 5), 0.5))
    with pytest.raises(ValueError, match="delta must be"):
        explore(torch.ones(2, 1), torch.ones(1, 1), torch.ones(2, 1), -0.1)
