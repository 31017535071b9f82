"""fastrg draws from the law of the block model, whatever way it takes, and refuses what is no model."""

import math

import pytest
import torch
from scipy import stats

from sparseattn.sbm import sampling as module
from sparseattn.sbm.sampling import bernoulli, fastrg, fastrg_cases

ALARM = 1e-4  # false-alarm rate of every statistical test; seeds are fixed


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def soft(n, m, k, seed=1):
    g = generator(seed)

    def draw(*shape):
        return torch.rand(*shape, generator=g, dtype=torch.float64)

    return draw(n, k), draw(k, k) / k**2, draw(m, k)


def rate_of(y, b, z):
    return y @ b @ z.mT


def repeated(model, repeats):
    return [x.expand(repeats, *x.shape) for x in model]


def counted(edges, n, m):
    _, i, j = edges
    return torch.zeros(n, m, dtype=torch.float64).index_put_((i, j), torch.tensor(1.0, dtype=torch.float64), True)


def p_value(found, mean, variance):
    return stats.chi2.sf(((found - mean).square() / variance).sum().item(), found.numel())


@pytest.mark.parametrize("factor", [0.3, 3, 40])
@pytest.mark.parametrize("shape", [(7, 7, 2), (5, 11, 3), (12, 4, 1), (1, 6, 2), (6, 1, 2)])
@pytest.mark.parametrize("simple", [False, True])
def test_law(shape, factor, simple):
    y, b, z = soft(*shape)
    b, repeats = b * factor, 1500
    rate = rate_of(y, b, z)
    found = counted(fastrg(*repeated((y, b, z), repeats), duplicates=not simple, generator=generator()), *shape[:2])
    if simple:
        chance = 1 - torch.exp(-rate)
        keep = (repeats * (1 - chance) > 5) & (repeats * chance > 5)  # where the chi-square law is a good approximation
        mean = (repeats * chance)[keep]
        assert keep.any() and p_value(found[keep], mean, mean * (1 - chance[keep])) > ALARM
    else:
        keep = repeats * rate > 5
        assert keep.any() and p_value(found[keep], (repeats * rate)[keep], (repeats * rate)[keep]) > ALARM


@pytest.mark.parametrize("way", ["search", "alias", "pairs"])
def test_the_ways_are_taken(way, monkeypatch):
    taken = []
    for name in ("_search", "_alias", "_pairs"):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, name=name, f=original, **k: (taken.append(name), f(*a, **k))[1])
    y, b, z = soft(30, 30, 2)
    factor = {"search": 0.01, "alias": 30, "pairs": 30}[way]
    fastrg(y, b * factor, z, duplicates=way == "alias", generator=generator())
    assert f"_{way}" in taken


def test_alias_tables_hold_the_weights():
    g = generator()
    for rows, m in ((1, 1), (3, 2), (4, 100), (2, 5)):
        weights = torch.rand(rows, m, generator=g, dtype=torch.float64) ** 6
        weights[:, m // 2 :] *= (torch.rand(rows, m - m // 2, generator=g) < 0.7)
        weights[:, 0] += 1e-3
        share, other = module._alias_tables(weights)
        held = share.clone().index_add_(0, other, 1 - share).view(rows, m) / m
        torch.testing.assert_close(held, weights / weights.sum(1, keepdim=True), rtol=0, atol=1e-12)


def test_zero_rates_never_draw():
    y = torch.eye(2).repeat_interleave(20, 0)
    for factor in (0.01, 0.5, 30.0):
        i, j = fastrg(y, factor * torch.tensor([[0.0, 1.0], [0.0, 0.0]]), y, duplicates=True, generator=generator())
        assert len(i) and (i < 20).all() and (j >= 20).all()
    for empty in (torch.zeros(2, 2), torch.tensor([[0.0, 0.0], [0.0, 0.0]])):
        assert fastrg(y, empty, y, generator=generator()).shape == (2, 0)


def test_zero_columns_and_points():
    y, b, z = soft(8, 9, 3)
    y[:, 1] = 0
    z[:, 0] = 0
    y[3], z[5] = 0, 0
    for factor in (1, 100):
        i, j = fastrg(y, b * factor, z, duplicates=True, generator=generator())
        assert len(i) and 3 not in i and 5 not in j


def test_simple_graphs_are_sorted_and_unique():
    y, b, z = soft(50, 40, 4)
    for factor in (0.05, 1, 20):
        i, j = fastrg(y, b * factor, z, generator=generator())
        assert ((i * 40 + j).diff() > 0).all()


def test_a_batch_has_the_law_of_each_graph():
    first, second = soft(6, 6, 2, seed=1), soft(6, 6, 2, seed=2)
    model = [torch.stack([a, b]).repeat_interleave(1000, 0) for a, b in zip(first, second, strict=True)]
    graph, i, j = fastrg(*model, duplicates=True, generator=generator())
    for half, one in ((graph < 1000, first), (graph >= 1000, second)):
        mean = 1000 * rate_of(*one)
        assert p_value(counted((graph[half], i[half], j[half]), 6, 6), mean, mean) > ALARM
    assert graph.min() >= 0 and graph.max() < 2000 and (graph.diff() >= 0).all()


def test_generator_fixes_the_draw():
    model = soft(20, 20, 3)
    assert torch.equal(fastrg(*model, generator=generator(3)), fastrg(*model, generator=generator(3)))
    assert not torch.equal(fastrg(*model, generator=generator(3)), fastrg(*model, generator=generator(4)))


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_output_form(impl, dtype):
    y, b, z = (x.to(dtype) for x in soft(10, 12, 3))
    edges = fastrg(y, b, z, generator=generator(), impl=impl)
    assert edges.dtype == torch.int64 and len(edges) == 2
    assert fastrg(y[None], b[None], z[None], generator=generator(), impl=impl).shape[0] == 3


def test_undirected_and_loops():
    y, b, _ = soft(15, 15, 2)
    b = (b + b.T) * 2
    for duplicates in (False, True):
        i, j = fastrg(y, b, y, duplicates=duplicates, undirected=True, generator=generator())
        a = torch.zeros(15, 15).index_put_((i, j), torch.tensor(1.0), True)
        assert torch.equal(a, a.T)
    i, j = fastrg(y, b, y, self_loops=True, generator=generator())
    assert sorted(i[i == j].tolist()) == list(range(15))
    i, j = fastrg(y, b, y, self_loops=False, generator=generator())
    assert len(i) and not (i == j).any()
    graph, i, j = fastrg(*repeated((y, b, y), 3), undirected=True, self_loops=True, generator=generator())
    assert all((i == j)[graph == h].sum() == 15 for h in range(3))


def test_undirected_law():
    y, b, _ = soft(6, 6, 2)
    b, repeats = (b + b.T), 4000
    rate = rate_of(y, b, y)
    edges = fastrg(*repeated((y, b, y), repeats), duplicates=True, undirected=True, generator=generator())
    found = counted(edges, 6, 6)
    upper = torch.ones(6, 6).triu(1).bool()
    assert p_value(found[upper], repeats * rate[upper], repeats * rate[upper]) > ALARM
    loops = repeats * rate.diagonal() / 2
    assert p_value(found.diagonal(), loops, loops) > ALARM


def test_ceiling():
    ones = torch.ones(300, 1)
    share = fastrg(ones, torch.ones(1, 1), ones, generator=generator()).shape[1] / 300**2
    chance = 1 - math.exp(-1)
    assert abs(share - chance) < stats.norm.isf(ALARM / 2) * math.sqrt(chance * (1 - chance)) / 300


BAD = {
    "negative": (lambda y, b, z: (y, -b, z), ValueError, "^b must hold finite numbers >= 0"),
    "nan": (lambda y, b, z: (y * float("nan"), b, z), ValueError, "^y must hold"),
    "infinite": (lambda y, b, z: (y, b, z / 0), ValueError, "^z must hold"),
    "k of b": (lambda y, b, z: (y, b[:2, :2], z), ValueError, "must have shapes"),
    "k of z": (lambda y, b, z: (y, b, z[:, :2]), ValueError, "must have shapes"),
    "batch": (lambda y, b, z: (y[None], b[None].repeat(2, 1, 1), z[None]), ValueError, "one batch"),
    "dimensions": (lambda y, b, z: (y[None], b, z), ValueError, "dimensions"),
    "integers": (lambda y, b, z: (y.long(), b, z), TypeError, "^y must be a floating-point tensor"),
    "empty": (lambda y, b, z: (y[:0], b, z), ValueError, "^y has no entries"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input(case):
    change, error, message = BAD[case]
    with pytest.raises(error, match=message):
        fastrg(*change(*soft(5, 5, 3)))


def test_bad_options():
    y, b, z = soft(5, 6, 2)
    with pytest.raises(ValueError, match="^impl must be"):
        fastrg(y, b, z, impl="slow")
    for options in ({"undirected": True}, {"self_loops": False}):
        with pytest.raises(ValueError, match="one list of points"):
            fastrg(y, b, z, **options)


def test_cases_draw_the_same_model():
    cases = fastrg_cases(300, 0.05, clusters=8)
    sizes = {name: sum(case().shape[1] for _ in range(5)) / 5 for name, case in cases.items()}
    expected = 300**2 * 0.05  # of the rates; simple graphs lose a little
    assert all(0.9 * expected < size < expected for size in sizes.values())


BERNOULLI = {
    "sparse": lambda y, b, z: (y * 0.05, b, z),
    "all sizes": lambda y, b, z: (y * torch.linspace(0.001, 1, len(y), dtype=y.dtype)[:, None], b * 9, z),
    "above 1": lambda y, b, z: (y * 2, b * 9, z),
    "no edges": lambda y, b, z: (y, b * 0, z),
}


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize("case", BERNOULLI)
def test_bernoulli_law(case, impl):
    model, repeats = BERNOULLI[case](*soft(40, 60, 3)), 1500
    edges = bernoulli(*repeated(model, repeats), generator=generator(), impl=impl)
    assert edges.unique(dim=1).equal(edges)
    chance, found = rate_of(*model).clamp(max=1), counted(edges, 40, 60)
    assert (found[chance == 0] == 0).all() and (found[chance == 1] == repeats).all()
    free = (chance > 0) & (chance < 1)
    score = ((found - repeats * chance).square() / (repeats * chance * (1 - chance)))[free]
    assert stats.chi2.sf(score.sum().item(), max(1, len(score))) > ALARM


def test_bernoulli_reaches_every_pair():
    ones = torch.ones(30, 1)
    assert bernoulli(ones, torch.ones(1, 1), ones).shape == (2, 900)
    assert fastrg(ones, torch.ones(1, 1), ones, generator=generator()).shape[1] < 700


def test_bernoulli_loops_and_errors():
    y, b, z = soft(6, 6, 2)
    i, j = bernoulli(y * 0.1, b, z, self_loops=True, generator=generator())
    assert (i == j).sum() == 6
    i, j = bernoulli(y, b, z, self_loops=False, generator=generator())
    assert not (i == j).any()
    with pytest.raises(ValueError, match="^b must hold finite numbers >= 0"):
        bernoulli(y, -b, z)
    with pytest.raises(ValueError, match="^impl must be"):
        bernoulli(y, b, z, impl="slow")
    with pytest.raises(ValueError, match="need one list of points"):
        bernoulli(y, b, soft(6, 7, 2)[2], self_loops=True)
