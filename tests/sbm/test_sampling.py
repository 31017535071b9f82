"""fastrg draws from the law of the block model, whatever way it takes, and refuses what is no model."""

import math

import pytest
import torch
from scipy import stats

from sparseattn.sbm import sampling as module
from sparseattn.core.native import c_kernels
from sparseattn.sbm.sampling import _off, bernoulli, draw_edges, fastrg, fastrg_cases

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


needs_compiler = pytest.mark.skipif(c_kernels(module._SOURCE, torch.zeros(1)) is None, reason="needs a C compiler")
FORMS = [pytest.param("fast", marks=needs_compiler), "composed"]


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("factor", [0.3, 3, 40])
@pytest.mark.parametrize("shape", [(7, 7, 2), (5, 11, 3), (12, 4, 1), (1, 6, 2), (6, 1, 2)])
@pytest.mark.parametrize("simple", [False, True])
def test_law(shape, factor, simple, impl):
    y, b, z = soft(*shape)
    b, repeats = b * factor, 1500
    rate = rate_of(y, b, z)
    edges = fastrg(*repeated((y, b, z), repeats), duplicates=not simple, generator=generator(), impl=impl)
    found = counted(edges, *shape[:2])
    if simple:
        chance = 1 - torch.exp(-rate)
        keep = (repeats * (1 - chance) > 5) & (repeats * chance > 5)  # where the chi-square law is a good approximation
        mean = (repeats * chance)[keep]
        assert keep.any() and p_value(found[keep], mean, mean * (1 - chance[keep])) > ALARM
    else:
        keep = repeats * rate > 5
        assert keep.any() and p_value(found[keep], (repeats * rate)[keep], (repeats * rate)[keep]) > ALARM


@pytest.mark.parametrize("way", ["search", "pairs"])
def test_the_composed_ways_are_taken(way, monkeypatch):
    taken = []
    for name in ("_search", "_pairs"):
        original = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, name=name, f=original, **k: (taken.append(name), f(*a, **k))[1])
    y, b, z = soft(30, 30, 2)
    edges = fastrg(y, b * {"search": 0.01, "pairs": 30}[way], z, generator=generator(), impl="composed")
    assert f"_{way}" in taken and edges.shape[1]


def wrapped(kernels, calls):
    def call(name, *given):
        calls.append((name, given))
        return kernels(name, *given)
    return call


@needs_compiler
@pytest.mark.parametrize("way", ["tries", "tables", "pairs"])
def test_the_fast_ways_are_taken(way, monkeypatch):
    calls, found = [], c_kernels(module._SOURCE, torch.zeros(1, dtype=torch.float64))
    monkeypatch.setattr(module, "c_kernels", lambda *_: wrapped(found, calls))
    y, b, z = soft(30, 30, 2)
    b = b * {"tries": 0.01, "tables": 30, "pairs": 300}[way]
    fastrg(y, b, z, duplicates=way == "tables", generator=generator())
    given = dict(calls)
    tables, factors = given["tables"][4], given["draw"][7]
    assert bool(tables) is (way == "tables") and bool((factors == 0).all()) is (way == "pairs")


@needs_compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_alias_tables_hold_the_weights(dtype):
    g, kernels = generator(), c_kernels(module._SOURCE, torch.zeros(1, dtype=dtype))
    for rows, m in ((1, 1), (3, 2), (4, 100), (2, 5), (2, 5000)):
        weights = torch.rand(rows, m, generator=g, dtype=dtype) ** 6
        weights[:, m // 2 :] *= torch.rand(rows, m - m // 2, generator=g) < 0.7
        weights[:, 0] += 1e-3
        cells, where = torch.empty(rows, m, dtype=torch.int64), torch.arange(rows)
        kernels("tables", weights, where, weights.double().sum(1), cells, rows, m, 1)
        share, other = (cells >> 32 & 2**32 - 1).double() / 2**32, cells & 2**32 - 1
        held = share.clone().scatter_add_(1, other, 1 - share) / m
        torch.testing.assert_close(held, weights.double() / weights.double().sum(1, keepdim=True), rtol=0, atol=2e-9)
        assert not held[weights == 0].any()


@needs_compiler
def test_space_that_does_not_suffice_is_enlarged(monkeypatch):
    y, b, z = soft(40, 70, 3)
    right = draw_edges(y @ b * 5, z, "counts", generator=generator())
    plan = module._plan
    monkeypatch.setattr(module, "_plan", lambda *a: (f := plan(*a), (f[0], f[1] * 0, f[2]))[1])
    assert right.shape[1] > 16 * 40 and torch.equal(right, draw_edges(y @ b * 5, z, "counts", generator=generator()))


@needs_compiler
def test_a_seed_gives_one_graph_with_any_number_of_threads():
    model = soft(300, 200, 5)
    before, found = torch.get_num_threads(), []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append([f(*model, generator=generator()) for f in (fastrg, bernoulli)])
    torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@needs_compiler
@pytest.mark.parametrize("density", [0.03, 0.3])
@pytest.mark.parametrize("law", module._LAWS)
def test_law_at_the_papers_size(law, density):
    "400 points, 128 clusters, 64 graphs; pairs in groups of rows and columns modulo 20."
    g, (graphs, n, k) = generator(7), (64, 400, 128)
    y, z = (torch.rand(graphs, n, k, generator=g) for _ in range(2))
    a = y @ (torch.rand(k, k, generator=g) * density / (k * k / 8))
    graph, i, j = draw_edges(a, z, law, generator=g)
    rate, group = (a @ z.mT).double(), torch.arange(n) % 20
    chance = rate if law != "simple" else -torch.expm1(-rate)
    noise = chance if law == "counts" else chance * (1 - chance)
    mean, noise = (x.sum(0).view(20, 20, 20, 20).sum((0, 2)).flatten() for x in (chance, noise))
    assert p_value(torch.bincount(group[i] * 20 + group[j], minlength=400).double(), mean, noise) > ALARM
    per_graph = chance.sum((1, 2)), (chance if law == "counts" else chance * (1 - chance)).sum((1, 2))
    assert p_value(torch.bincount(graph, minlength=64).double(), *per_graph) > ALARM
    if law != "counts":
        assert ((graph * n + i) * n + j).diff().min() > 0


@needs_compiler
def test_many_points():
    "More points than the bits of one index word, and blocks of few rows."
    y, b, z = soft(50, 9000, 3)
    for law in ("simple", "bernoulli"):
        i, j = draw_edges(y @ b * 0.2, z, law, generator=generator())
        rate = rate_of(y, b, z) * 0.2
        chance = rate if law == "bernoulli" else -torch.expm1(-rate)
        assert p_value(torch.bincount(i, minlength=50).double(), chance.sum(1), (chance * (1 - chance)).sum(1)) > ALARM
        found, chance, j = (torch.bincount(j // 100, minlength=90).double(), chance.view(50, 90, 100).sum((0, 2)), j)
        assert p_value(found, chance, chance) > ALARM and j.max() > 8900


def test_hard_clusters_with_certain_edges():
    "Blocks of ones: bounds of rows reach 1, and the other pairs must stay away."
    y = torch.eye(4).repeat_interleave(30, 0)
    for impl in ("fast", "composed", "reference"):
        i, j = bernoulli(y, torch.eye(4), y, impl=impl)
        assert len(i) == 4 * 30 * 30 and (i // 30 == j // 30).all()


@pytest.mark.parametrize("impl", FORMS)
@pytest.mark.parametrize("draw", [fastrg, bernoulli])
def test_memberships_that_learn_are_drawn_from(draw, impl):
    y, b, z = (x.requires_grad_() for x in soft(7, 7, 2))
    first = draw(y, b / 4, z, generator=generator(), impl=impl)
    assert torch.equal(first, draw(*(x.detach() for x in (y, b / 4, z)), generator=generator(), impl=impl))


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


@pytest.mark.parametrize("impl", ["fast", "composed", "reference"])
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
    drawn = {name: case for name, case in (cases | cases["rivals"]).items() if name not in ("rivals", "error", "floor")}
    sizes = {name: sum(case().shape[1] for _ in range(5)) / 5 for name, case in drawn.items()}
    expected = 300**2 * 0.05  # of the rates; simple graphs lose a little, "bernoulli" nothing
    noise = stats.norm.isf(ALARM) * math.sqrt(expected / 5)
    assert all(0.9 * expected < size < expected + noise for size in sizes.values())
    assert max(sizes[name] for name in ("straightforward", "fastrg", "one draw a pair")) < expected


@pytest.mark.parametrize("law", ["counts", "simple", "bernoulli"])
def test_a_wrong_law_is_found(law):
    """Of another density, of half of the targets, and with a pair twice."""
    y, b, z = (x[None].float() for x in soft(90, 700, 3))
    b = 0.2 * b / (y @ b @ z.mT).mean()
    edges = draw_edges(y @ b, z, law)
    assert _off(edges, y @ b, z, law) == 0
    assert _off(draw_edges(1.4 * y @ b, z, law), y @ b, z, law) > 0
    assert _off(edges[:, edges[2] % 16 < 8], y @ b, z, law) > 0.1
    assert (_off(torch.cat([edges, edges[:, :1]], 1), y @ b, z, law) == math.inf) == (law != "counts")


BERNOULLI = {
    "sparse": lambda y, b, z: (y * 0.05, b, z),
    "all sizes": lambda y, b, z: (y * torch.linspace(0.001, 1, len(y), dtype=y.dtype)[:, None], b * 9, z),
    "above 1": lambda y, b, z: (y * 2, b * 9, z),
    "no edges": lambda y, b, z: (y, b * 0, z),
}


@pytest.mark.parametrize("impl", ["fast", "composed", "reference"])
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


@pytest.mark.parametrize("impl", ["fast", "composed", "reference"])
def test_rates_keep_their_digits_under_autocast(impl):
    "Alarm: 1e-6, five standard errors of a binomial number."
    y, rate = torch.ones(1000, 1), torch.tensor([[0.002]])
    with torch.autocast("cpu", torch.bfloat16):
        found = bernoulli(y, rate, y, impl=impl, generator=torch.Generator().manual_seed(0)).shape[1]
    assert abs(found - 2000) < 5 * 2000**0.5


def test_models_at_which_a_draw_would_not_end():
    small = torch.full((50, 1), 1e-40)
    assert fastrg(torch.ones(50, 1), torch.tensor([[1e38]]), small).shape == (2, 0)
    for y, b, z in ((torch.ones(50, 1) * 1e30, torch.tensor([[1e30]]), torch.eye(50)[:, :1]),
                    (torch.ones(5, 1) * 1e-38, torch.tensor([[1e-3]]), torch.ones(50, 1) * 1e38)):
        with pytest.raises(ValueError, match="must be finite numbers"):
            fastrg(y, b, z, duplicates=True)
