"""The collision law, kernels, error formulas, FLOP counts and the design search, against independent routes."""

import doctest

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from scipy.spatial import cKDTree

from sparseattn.hept import tradeoff as T


def naive_collision(z):
    def gap(t):
        return np.sqrt(2 / np.pi) / z * np.exp(-((t / z) ** 2) / 2) * (1 - t)

    return quad(gap, 0, min(1.0, 40 * z), epsabs=1e-13, epsrel=1e-12, limit=300)[0]


@pytest.mark.parametrize("z, p", [(0.5, 0.609548422215397), (1.0, 0.36874638037250723), (2.0, 0.19541710799949336)])
def test_collision_known_values(z, p):
    assert T.collision_probability(z, 1.0) == pytest.approx(p, rel=1e-12)
    assert T.collision_probability(3 * z, 3.0) == pytest.approx(p, rel=1e-12)


@pytest.mark.parametrize("z", [1e-3, 0.0199, 0.0201, 0.3, 7.0, 999.0, 1001.0, 1e5])
def test_collision_is_its_integral(z):
    assert T.collision_probability(z, 1.0) == pytest.approx(naive_collision(z), rel=1e-8)


def test_collision_stable_over_twelve_decades():
    t = np.geomspace(1e-6, 1e6, 100_001)
    p = T.collision_probability(t, 1.0)
    assert p[0] > 1 - 1e-6 and (np.diff(p) < 0).all()
    far = t > 1e4
    assert np.allclose(p[far] * t[far] * np.sqrt(2 * np.pi), 1, rtol=1e-8)
    assert T.collision_probability(0.0, 1.0) == 1.0
    assert T.collision_probability(1.0, 1e-12) == pytest.approx(1e-12 / np.sqrt(2 * np.pi), rel=1e-12)


@pytest.mark.parametrize("kind", [float, int, np.float32, np.float64, torch.float32, torch.float64])
def test_collision_kind_in_is_kind_out(kind):
    if isinstance(kind, torch.dtype):
        out = T.collision_probability(torch.tensor([0.5, 1.0], dtype=kind), 1.0)
        assert isinstance(out, torch.Tensor) and out.dtype == kind
        assert torch.allclose(out.double(), torch.tensor([0.60954842, 0.36874638], dtype=torch.float64), atol=1e-6)
    elif kind in (float, int):
        assert isinstance(T.collision_probability(kind(1), 1.0), float)
    else:
        out = T.collision_probability(np.array([0.5, 1.0], dtype=kind), 1.0)
        assert isinstance(out, np.ndarray) and out.dtype == kind


def test_collision_gradient_finite_everywhere():
    z = torch.tensor([0.0, 1e-6, 0.02, 0.5, 1.0, 999.0, 1e3, 1e6], dtype=torch.float64, requires_grad=True)
    T.collision_probability(z, 1.0).sum().backward()
    assert torch.isfinite(z.grad).all() and (z.grad < 0).all()
    assert z.grad[0].item() == pytest.approx(-np.sqrt(2 / np.pi))
    inner = torch.tensor([0.3, 0.9, 4.0], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda v: T.collision_probability(v, 1.0), inner)


@pytest.mark.parametrize(
    "z, r",
    [
        (-1.0, 1.0),
        (float("nan"), 1.0),
        (1.0, 0.0),
        (1.0, -2.0),
        (1.0, float("nan")),
        (np.array([1.0, -1e-9]), 1.0),
        (torch.tensor([float("nan")]), 1.0),
        (1.0, float("inf")),
    ],
)
def test_collision_rejects(z, r):
    with pytest.raises(ValueError, match="z|r"):
        T.collision_probability(z, r)


def test_collision_rejects_complex():
    with pytest.raises(TypeError):
        T.collision_probability(torch.tensor([1j]), 1.0)
    with pytest.raises(TypeError):
        T.collision_probability(np.array([1j]), 1.0)


def test_bounds_sandwich_and_meet_the_law_at_the_ends():
    t = np.geomspace(1e-4, 1e4, 20_001)
    low, high = T.collision_bounds(t, 1.0)
    p = T.collision_probability(t, 1.0)
    assert (low <= p + 1e-15).all() and (p <= high + 1e-15).all()
    assert low[0] == pytest.approx(p[0]) and high[-1] == pytest.approx(p[-1], rel=1e-7)


def test_codes_follow_the_law():
    """Three comparisons at 4.5 standard errors: a false alarm in 50,000 (seed fixed)."""
    rng, draws = np.random.default_rng(1), 200_000
    codes = T.e2lsh_codes(np.array([[0, 0], [0.6, 0.8], [3.0, 4.0], [0.06, 0.08]]) * 0.7, 0.9, draws, rng)
    p = T.collision_probability(np.array([1.0, 5.0, 0.1]) * 0.7, 0.9)
    share = (codes[1:] == codes[0]).mean(1)
    assert (np.abs(share - p) < 4.5 * np.sqrt(p * (1 - p) / draws)).all()


@pytest.mark.parametrize(
    "bad", [dict(r=0.0), dict(r=-1.0), dict(functions=0), dict(x=np.zeros(3)), dict(x=np.array([[np.nan]]))]
)
def test_codes_reject(bad):
    arguments = dict(x=np.zeros((3, 2)), r=1.0, functions=2, rng=np.random.default_rng(0)) | bad
    with pytest.raises(ValueError):
        T.e2lsh_codes(**arguments)


def test_keys_are_row_equality():
    rng = np.random.default_rng(2)
    codes = rng.integers(-3, 3, (200, 3))
    keys = T.bucket_keys(codes)
    same = (codes[:, None] == codes).all(-1)
    assert ((keys[:, None] == keys) == same).all() and set(keys) == set(range(keys.max() + 1))


def test_keys_survive_huge_codes():
    codes = np.array([[2**40, -(2**40), 5], [2**40, -(2**40), 6], [-(2**40), 2**40, 5], [2**40, -(2**40), 5]])
    assert T.bucket_keys(codes)[0] == T.bucket_keys(codes)[3] and len(set(T.bucket_keys(codes).tolist())) == 3


def test_keys_of_one_point():
    assert T.bucket_keys(np.array([[7, -1]])).tolist() == [0]


def test_amplified_limits():
    p = np.array([0.0, 1e-9, 0.3, 1.0])
    assert np.allclose(T.amplified_probability(p, 2, 3), 1 - (1 - p**2) ** 3, atol=1e-15)
    assert T.amplified_probability(1e-9, 2, 4) == pytest.approx(4e-18, rel=1e-9)
    for bad in (dict(p=1.2), dict(p=-0.1), dict(functions=0), dict(tables=0), dict(p=float("nan"))):
        with pytest.raises(ValueError):
            T.amplified_probability(**(dict(p=0.5, functions=1, tables=1) | bad))


@pytest.mark.parametrize("d", [1, 2, 3, 5, 8])
def test_pair_density_is_the_derivative_of_the_law(d):
    z = np.linspace(0.05, 1.95, 20)
    assert np.allclose(
        (T.pair_cdf(z + 1e-6, d) - T.pair_cdf(z - 1e-6, d)) / 2e-6, T.pair_density(z, d), rtol=1e-5, atol=1e-8
    )
    assert T.pair_cdf(0.0, d) == 0 and T.pair_cdf(2.0, d) == pytest.approx(1)
    assert T.ball_expectation(lambda v: 1 + 0 * v, d) == pytest.approx(1, abs=1e-10)
    assert np.allclose(T.pair_density(z, d), d * z ** (d - 1) * T.euclid_hat(z, 2.0, d))


def test_uniform_ball_obeys_the_law():
    rng = np.random.default_rng(3)
    x, y = T.uniform_ball(30_000, 3, rng), T.uniform_ball(30_000, 3, rng)
    assert np.linalg.norm(x, axis=1).max() <= 1
    for z in (0.4, 1.0, 1.6):
        p = T.pair_cdf(z, 3)
        assert abs((np.linalg.norm(x - y, axis=1) < z).mean() - p) < 4.5 * np.sqrt(p * (1 - p) / 30_000)


def test_support():
    for n, d in ((100, 1), (10_000, 2), (1000, 8)):
        assert (n - 1) * T.pair_cdf(T.support_for_neighbours(n, d, 5), d) == pytest.approx(5, rel=1e-9)
    for bad in (0, -1, 99, 1e9):
        with pytest.raises(ValueError, match="neighbours"):
            T.support_for_neighbours(100, 2, bad)


@pytest.mark.parametrize(
    "kernel, dims",
    [(T.truncated_power, (1, 2, 3)), (T.wendland, (1, 2, 3)), (lambda z, s: T.euclid_hat(z, s, 4), (1, 2, 4))],
)
def test_kernels_are_local_and_positive_definite(kernel, dims):
    z = np.linspace(0, 2, 200)
    k = kernel(z, 0.8)
    assert k[0] == 1 and (k[z >= 0.8] == 0).all() and ((k >= 0) & (k <= 1)).all()
    for d in dims:
        x = np.random.default_rng(4).uniform(size=(150, d)) * 2
        gram = kernel(np.linalg.norm(x[:, None] - x, axis=-1), 0.8)
        assert np.linalg.eigvalsh(gram).min() > -1e-10


def test_product_triangular_gram_and_support():
    x = np.random.default_rng(5).uniform(size=(150, 3)) * 2
    delta = x[:, None] - x
    gram = T.product_triangular(delta, 0.5)
    assert np.linalg.eigvalsh(gram).min() > -1e-10
    assert (gram[np.linalg.norm(delta, axis=-1) > 0.5 * 3**0.5] == 0).all()


def test_fejer_frequencies_reproduce_the_kernel():
    """Six means at 4.5 standard errors (seed fixed): a false alarm in 25,000."""
    w = T.fejer_frequencies(100_000, 2, 0.7, np.random.default_rng(6))
    delta = np.array([[0.1, 0.0], [0.2, 0.3], [0.69, 0.1], [0.8, 0.0], [0.3, 0.9], [1.4, 1.4]])
    value = np.cos(w @ delta.T)
    assert (np.abs(value.mean(0) - T.product_triangular(delta, 0.7)) < 4.5 * value.std(0) / 100_000**0.5).all()


def test_rff_features_and_mse():
    rng, D, draws = np.random.default_rng(7), 8, 4000
    x, y = np.array([0.1, 0.2]), np.array([0.4, 0.1])
    error = [
        (T.rff_features(x, w) @ T.rff_features(y, w) - T.product_triangular(x - y, 1.0)) ** 2
        for w in T.fejer_frequencies(draws * D // 2, 2, 1.0, rng).reshape(draws, D // 2, 2)
    ]
    expected = T.rff_mse(T.product_triangular(x - y, 1.0), T.product_triangular(2 * (x - y), 1.0), D)
    assert abs(np.mean(error) - expected) < 4.5 * np.std(error) / draws**0.5
    assert T.rff_features(x, np.ones((4, 2))) @ T.rff_features(x, np.ones((4, 2))) == pytest.approx(1)
    for bad in (0, 3, -2):
        with pytest.raises(ValueError, match="features"):
            T.rff_mse(0.0, 0.0, bad)
    with pytest.raises(ValueError, match="dimension"):
        T.rff_features(np.zeros((2, 3)), np.zeros((4, 2)))


def test_match_counts_against_dense():
    keys = np.random.default_rng(8).integers(0, 5, (4, 30))
    dense = (keys[:, :, None] == keys[:, None, :]).sum(0)
    assert (T.match_counts(keys).toarray() == dense).all()
    assert T.match_counts(np.zeros((200, 3), int)).toarray().max() == 200


def test_lemma_flops_counts_buckets():
    """The proof's count on explicit buckets: projections, kernels, bucket products, m1 - 1 additions."""
    n, d, m, tables, sizes = 6, 2, 3, 4, np.array([3, 2, 1])
    collisions = (sizes * (sizes - 1) // 2).sum()
    by_hand = (
        tables * (n * m * (2 * d - 1) + collisions * (3 * d + 4) + (d * sizes * (2 * sizes - 1)).sum())
        + (tables - 1) * n * d
    )
    assert T.lemma_flops(n, d, m, tables, collisions / (n * (n - 1) / 2)) == pytest.approx(by_hand)


def test_rff_flops_count_matrix_products():
    n, d, D = 7, 3, 10

    def product(a, b, c):
        return a * c * (2 * b - 1)

    assert T.rff_flops(n, d, D) == product(n, d, D // 2) + 2 * n * D + product(D, n, d) + product(n, D, d)
    assert T.rff_flops_paper(n, d, D) == product(n, d, D) + n * d + product(D, n, d) + product(n, D, d)


def test_exact_and_grid_flops():
    system = T.ball_system(20_000, 2)
    x = T.uniform_ball(20_000, 2, np.random.default_rng(9))
    cell = np.floor(x / system.support).astype(int)
    boxes, counts = np.unique(cell, axis=0, return_counts=True)
    look = {tuple(b): c for b, c in zip(boxes, counts, strict=True)}
    seen = sum(c * (look.get((i + a, j + b), 0)) for (i, j), c in look.items() for a in (-1, 0, 1) for b in (-1, 0, 1))
    candidates = (seen - 20_000) / 2
    near = len(cKDTree(x).query_pairs(system.support, output_type="ndarray"))
    counted = 20_000 * (3 * 2 + 9) + candidates * 6 + near * 13 + 20_000 * 2
    assert 0.97 < T.grid_flops(system) / counted < 1.1
    assert T.exact_flops(3, 1) == 3 * 11 + 3
    assert T.grid_flops(system) < 0.01 * T.exact_flops(20_000, 2)


@pytest.mark.parametrize("d", [2, 3])
def test_system_moments(d):
    system = T.ball_system(500, d)
    assert system.zero_error == pytest.approx(
        T.ball_expectation(lambda z: T.truncated_power(z, system.support) ** 2, d, 0, system.support), rel=1e-8
    )
    assert system.doubled == pytest.approx(
        T.ball_expectation(lambda z: T.truncated_power(2 * z, system.support), d, 0, system.support / 2), rel=1e-6
    )
    assert system.every_weight.sum() == pytest.approx(1, abs=1e-10) and system.pairs == 500 * 499 / 2


def test_errors_are_the_expectations_over_tables():
    system = T.ball_system(1000, 2)
    r, m, t = 1.5 * system.support, 2, 5
    q = T.collision_probability(system.near, r) ** m
    rng = np.random.default_rng(10)
    count = rng.binomial(t, q, size=(40_000, len(q)))
    weight = system.near_weight * system.kernel**2
    for function, loss in ((T.union_error, count == 0), (T.sum_error, (count - 1.0) ** 2)):
        sample = (loss * weight).sum(1)
        assert abs(sample.mean() - function(system, r, m, t)) < 4.5 * sample.std() / 200
    assert T.union_error(system, r, m, 0) == pytest.approx(system.zero_error)
    assert T.sum_error(system, r, m, 1) == pytest.approx(T.union_error(system, r, m, 1))


def test_errors_broadcast():
    system = T.ball_system(1000, 2)
    r, t = system.support * np.array([[0.5], [1.0], [2.0]]), np.array([[1, 4]])
    grid = T.union_error(system, r, 2, t)
    assert grid.shape == (3, 2) == T.sum_error(system, r, 2, t).shape == T.union_flops(system, r, 2, t).shape
    assert grid[1, 1] == pytest.approx(float(T.union_error(system, system.support, 2, 4)))


def test_union_work_limits():
    system = T.ball_system(1000, 2)
    distinct, lookups = T.union_work(system, 0.1, 1, 1)
    assert distinct == pytest.approx(
        (system.every_weight * T.collision_probability(system.every, 0.1)).sum()
    ) and lookups == pytest.approx(0, abs=1e-12)
    distinct, lookups = T.union_work(system, 1e6, 1, 5)
    assert distinct == pytest.approx(1, abs=1e-5) and lookups == pytest.approx(4, abs=1e-4)
    tiny = T.union_work(system, 1e-7, 4, 5)
    assert all(np.isfinite(tiny)) and min(tiny) >= 0


@pytest.mark.parametrize("functions", [(1,), (2, 3, 4)])
def test_cheapest_is_a_brute_force_minimum(functions):
    system = T.ball_system(2000, 2)
    widths, target = np.array([0.5, 1.0, 1.5, 2.0]), 0.2 * system.zero_error
    best = T.cheapest(system, target, functions, widths)
    r, t = system.support * widths[:, None], np.arange(1, 200)
    prices = [
        np.where(T.union_error(system, r, m, t) <= target, T.union_flops(system, r, m, t), np.inf).min()
        for m in functions
    ]
    assert best.flops == pytest.approx(min(prices)) and best.error <= target
    assert best.error == pytest.approx(float(T.union_error(system, best.width, best.functions, best.tables)))


def test_cheapest_rejects_impossible_targets():
    system = T.ball_system(100, 2)
    for target in (0, -1, system.zero_error, 1.0):
        with pytest.raises(ValueError, match="target"):
            T.cheapest(system, target)


def test_frontier_is_a_frontier():
    system = T.ball_system(1000, 3)
    widths, tables = np.array([0.5, 1.0, 2.0]), [1, 3, 9]
    flops, error = T.frontier(system, [1, 3], tables, widths)
    assert (np.diff(flops) > 0).all() and (np.diff(error) < 0).all()
    for m in (1, 3):
        for u in widths:
            for t in tables:
                f, e = T.union_flops(system, u * system.support, m, t), T.union_error(system, u * system.support, m, t)
                assert ((flops <= f * (1 + 1e-12)) & (error <= e * (1 + 1e-12))).any()


def test_three_exponents():
    """FLOPs for a tenth of eps0: n^2, n^(2-1/d), n^1 (Theorems 3.3 to 3.5)."""
    n = np.array([1000, 10_000, 100_000])

    def slope(cost):
        return np.polyfit(np.log(n), np.log(cost), 1)[0]

    def price(systems, functions):
        return [T.cheapest(s, 0.1 * s.zero_error, functions).flops for s in systems]

    for d in (2, 3):
        systems = [T.ball_system(int(v), d) for v in n]
        assert slope(price(systems, (1,))) == pytest.approx(2 - 1 / d, abs=0.05)
        assert slope(price(systems, (3, 4, 5))) == pytest.approx(1, abs=0.05)
        assert slope([T.rff_flops(s.n, d, 10 * s.rff_constant / s.zero_error) for s in systems]) == pytest.approx(
            2, abs=0.02
        )


@pytest.mark.parametrize(
    "call",
    [
        lambda: T.truncated_power(0.1, 0.0),
        lambda: T.wendland(0.1, -1.0),
        lambda: T.euclid_hat(0.1, float("nan"), 2),
        lambda: T.product_triangular(np.zeros(2), 0.0),
        lambda: T.fejer_frequencies(0, 2, 1.0, np.random.default_rng(0)),
        lambda: T.union_error(T.ball_system(100, 2), 0.1, 0, 1),
        lambda: T.union_error(T.ball_system(100, 2), -0.1, 1, 1),
    ],
)
def test_parameters_must_be_positive(call):
    with pytest.raises(ValueError):
        call()


def test_examples_in_docstrings():
    result = doctest.testmod(T)
    assert result.attempted > 25 and result.failed == 0


def test_keys_of_narrow_codes():
    codes = np.random.default_rng(0).integers(-128, 128, (300, 3)).astype(np.int8)
    codes[:50] = codes[50:100]
    assert np.array_equal(T.bucket_keys(codes), T.bucket_keys(codes.astype(np.int64)))


def test_many_functions_need_more_tables_than_floats_count():
    system = T.ball_system(1000, 2)
    found = T.cheapest(system, 0.1 * system.zero_error, functions=(20,), widths=np.array([0.01, 0.6]))
    assert found.error <= 0.1 * system.zero_error
