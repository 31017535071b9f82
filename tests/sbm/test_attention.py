"""The SBM layer: lists equal matrices, padding is exact, masks have their law, the module behaves as a module."""

import copy
import io

import pytest
import torch
from scipy import stats

from sparseattn import SBMAttention
from sparseattn.core.attention import PRESENCE_RULES, dense_attention, edge_attention
from sparseattn.core.transformer import Encoder
from sparseattn.lab.measure import contest
from sparseattn.sbm import attention as module
from sparseattn.sbm.attention import (
    _GRADIENTS,
    _SAMPLERS,
    cluster_rates,
    edge_cases,
    explore,
    _gather_scatter,
    memberships,
    sbm_attention,
    sbm_layer_cases,
)
from sparseattn.sbm.gradients import estimate
from sparseattn.sbm.sampling import bernoulli

ALARM = 1e-4  # false-alarm rate of every statistical test; seeds are fixed


def draw(batch=2, heads=3, n=13, width=4, count=5, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, batch, heads, n, width, generator=g, dtype=dtype)
    y, z = torch.rand(2, batch, heads, n, count, generator=g, dtype=dtype)
    return q, k, v, y, cluster_rates(torch.randn(heads, count, width, generator=g, dtype=dtype)), z


def edges_of(model, real, seed=1):
    y, s, z = model[3:]
    on = real[:, None, :, None]
    batch = len(y)
    return bernoulli((y * on).flatten(0, 1), s.repeat(batch, 1, 1), (z * on).flatten(0, 1),
                     generator=torch.Generator().manual_seed(seed))


def results(model, **options):
    leaves = [x.clone().requires_grad_() for x in model]
    out, info = sbm_attention(*leaves, return_info=True, **options)
    loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum() + 3 * info.density
    return out, info.density, *torch.autograd.grad(loss, leaves)


REAL = torch.arange(13)[None] < torch.tensor([[13], [8]])


@pytest.mark.parametrize("window", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("rule", _GRADIENTS)
def test_lists_equal_matrices(rule, window):
    model = draw()
    options = dict(edges=edges_of(model, REAL), mask=REAL, gradient=rule, window=window)
    options |= dict(candidates=edges_of(model, REAL, seed=9)) if rule == "two-sided" else {}
    for fast, literal in zip(results(model, **options), results(model, impl="reference", **options), strict=True):
        torch.testing.assert_close(fast, literal, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("window", [0, 3])
@pytest.mark.parametrize("rule", PRESENCE_RULES)
def test_the_drawn_matrix_equals_its_list(rule, window):
    model = draw()
    out, info = sbm_attention(*model, window=window, gradient=rule, impl="reference", return_info=True,
                              generator=torch.Generator().manual_seed(3), mask=REAL)
    assert info.pattern is None and info.nnz == info.extra["matrix"].sum()
    matrix = results(model, window=window, gradient=rule, impl="reference", mask=REAL,
                     generator=torch.Generator().manual_seed(3))
    listed = results(model, window=window, gradient=rule, mask=REAL,
                     edges=info.extra["matrix"].flatten(0, 1).nonzero().T)
    for a, b in zip(matrix, listed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize("sampler", _SAMPLERS)
def test_two_sided_is_the_rule_defined_in_47(sampler, impl):
    """What each probability hears is what `estimate` gives for that mask and those candidates."""
    model, every = draw(), torch.ones(2, 13, dtype=torch.bool)
    first, second = (edges_of(model, every, seed=seed) for seed in (1, 2))
    first = first[:, (first[0] != 2) | (first[1] != 4)]                      # a query without an edge
    aim = torch.randn(2, 3, 13, 4, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in model]
    out = sbm_attention(*leaves, edges=first, candidates=second, gradient="two-sided", sampler=sampler, impl=impl)
    found = torch.autograd.grad((out * aim).sum(), leaves)
    q, k, v, *factors = (x.clone().requires_grad_() for x in model)
    y, s, z = factors
    p = (y @ s @ z.mT).flatten(0, 1)
    masks = [torch.zeros(6, 13, 13, dtype=torch.bool).index_put(tuple(e), torch.tensor(True)) for e in (first, second)]
    chance = p.detach() if sampler == "bernoulli" else -torch.expm1(-p.detach())
    rows = [x.flatten(0, 1) for x in (q, k, v)]
    heard = estimate(lambda o: (o * aim.flatten(0, 1)).sum((2, 3)), *rows, masks[0][None], "two-sided", p=chance,
                     candidates=masks[1][None])[0]
    p.backward(heard)
    for ours, literal in zip(found[3:], factors, strict=True):
        torch.testing.assert_close(ours, literal.grad, rtol=1e-10, atol=1e-12)
    plain = [x.clone().requires_grad_() for x in model]
    rest = torch.autograd.grad((sbm_attention(*plain, edges=first, impl=impl) * aim).sum(), plain[:3])
    for ours, other in zip(found[:3], rest, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dense", [0.0, 1.0], ids=["matrix", "list"])
def test_two_sided_draws_its_candidates(dense, monkeypatch):
    monkeypatch.setattr(module, "_DENSE", dense)
    m, x = layer(gradient="two-sided", window=3), cloud()
    mask = torch.arange(11)[None] < torch.tensor([[11], [6]])
    first, second = (m(x, mask=mask, generator=torch.Generator().manual_seed(2)) for _ in range(2))
    assert torch.equal(first, second)
    first.square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in m.parameters())


def test_memberships_are_not_negative():
    q, k, v, y, s, z = draw()
    with pytest.raises(ValueError, match="^y must hold finite numbers >= 0, found -"):
        sbm_attention(q, k, v, -y, s, z)


def test_window_is_what_it_says():
    model = draw(batch=1, heads=1)
    none = torch.zeros(3, 0, dtype=torch.long)
    place = torch.arange(13)
    for window in (1, 2, 3, 6):
        near = (place[:, None] - place).abs() <= window // 2
        out, info = sbm_attention(*model, edges=none, window=window, return_info=True)
        assert info.nnz == near.sum()
        torch.testing.assert_close(out, dense_attention(*model[:3], pattern=near))


def test_padding_is_exact():
    model = draw()
    edges = edges_of(model, REAL)
    own = edges[:, edges[0] >= 3] - torch.tensor([[3], [0], [0]])
    bad = [x.masked_fill(~REAL[:, None, :, None], float("nan")) if x.dim() == 4 else x for x in model]
    bad[3:] = [x.nan_to_num(7.0) for x in bad[3:]]
    padded = sbm_attention(*bad, mask=REAL, edges=edges)
    alone = sbm_attention(*(x[1:, :, :8] if x.dim() == 4 else x for x in model), edges=own)
    torch.testing.assert_close(padded[1:, :, :8], alone, rtol=1e-12, atol=1e-12)
    assert not padded[1, :, 8:].any()


@pytest.mark.parametrize("dense", [0.0, 1.0], ids=["matrix", "list"])
@pytest.mark.parametrize("sampler", _SAMPLERS)
def test_law(sampler, dense, monkeypatch):
    monkeypatch.setattr(module, "_DENSE", dense)
    q, k, v, y, s, z = draw(batch=1, heads=1, n=10)
    repeats = 2000
    many = [x.expand(repeats, -1, -1, -1) for x in (q, k, v, y)]
    _, info = sbm_attention(*many, s, z.expand(repeats, -1, -1, -1), sampler=sampler, exploration=0.03,
                            generator=torch.Generator().manual_seed(5), return_info=True)
    assert (info.pattern is None) == (dense == 0)
    kept = info.extra["matrix"].flatten(0, 1).nonzero().T if info.pattern is None else info.pattern
    one = torch.ones(1, dtype=torch.float64)
    found = torch.zeros(10, 10, dtype=torch.float64).index_put_(tuple(kept[1:]), one, accumulate=True)
    p = (y @ s @ z.mT)[0, 0] + 0.03
    p = p if sampler == "bernoulli" else -torch.expm1(-p)
    score = ((found - repeats * p).square() / (repeats * p * (1 - p))).sum().item()
    assert stats.chi2.sf(score, found.numel()) > ALARM


def test_full_attention():
    q, k, v, y, s, z = draw()
    ones = torch.ones_like(y)
    torch.testing.assert_close(sbm_attention(q, k, v, ones, s, ones), dense_attention(q, k, v), rtol=1e-10, atol=1e-10)


def test_rates_and_memberships():
    s = cluster_rates(torch.randn(3, 6, 4, dtype=torch.float64))
    torch.testing.assert_close(s.sum((1, 2)), torch.ones(3, dtype=torch.float64))
    torch.testing.assert_close(s, s.mT)
    x, c = torch.randn(1, 3, 7, 4), torch.randn(3, 6, 4)
    torch.testing.assert_close(memberships(x, c)[0, 1, 2, 3], torch.sigmoid(x[0, 1, 2] @ c[1, 3]))


def test_rows_are_chances():
    """Blocks of ones are within reach: memberships that pick one cluster, and rows that stay in it."""
    s = cluster_rates(torch.randn(3, 6, 4, dtype=torch.float64), "rows")
    torch.testing.assert_close(s.sum(2), torch.ones(3, 6, dtype=torch.float64))
    x, c = torch.randn(1, 3, 7, 4), torch.randn(3, 6, 4)
    torch.testing.assert_close(memberships(x, c, total=True), (x @ c.mT).softmax(-1))
    m, blocks = layer(rates="rows").double(), torch.arange(12) % 3
    m.clusters.data[:] = 9 * torch.eye(4).repeat(2, 1)[:6]
    m.network.forward = lambda x: 9 * (2 * torch.eye(4, dtype=x.dtype)[blocks] - 0.5).expand(1, 2, -1, -1)
    y, s, z = m.block_model(*torch.zeros(2, 1, 2, 12, 4, dtype=torch.float64))
    torch.testing.assert_close((y @ s @ z.mT)[0, 0], (blocks[:, None] == blocks).double(), rtol=0, atol=1e-6)


def test_exploration_is_one_more_cluster():
    y, s, z = draw()[3:]
    more = explore(y, s, z, 0.07, REAL)
    real = (REAL[:, :, None] & REAL[:, None])[:, None]
    wanted = y @ s @ z.mT + 0.07 * real.double()
    torch.testing.assert_close(more[0] @ more[1] @ more[2].mT, wanted, rtol=1e-12, atol=1e-12)


def test_gather_scatter_is_edge_attention():
    q, k, v, *_ = draw()
    edges = (torch.rand(6, 13, 13, generator=torch.Generator().manual_seed(0)) < 0.2).nonzero().T
    torch.testing.assert_close(_gather_scatter(q, k, v, edges), edge_attention(q, k, v, edges))


@pytest.mark.parametrize("backward", [False, True])
def test_forms_of_the_speed_table_agree(backward):
    assert max(contest("edges", edge_cases(30, 0.1, heads=2, backward=backward)).errors().values()) < 1e-5


def test_a_layer_whose_density_is_off_is_found():
    cases = sbm_layer_cases(64, width=16)
    density, *gradients = cases["sbm"]()
    assert cases["error"]((density, *gradients)) == 0 < cases["error"]((3 * density, *gradients))


def layer(**options):
    torch.manual_seed(0)
    return SBMAttention(8, 2, clusters=6, **options)


def cloud(n=11):
    return torch.randn(2, n, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("options", [{}, {"sampler": "fastrg"}, {"self_loops": True}, {"window": 4},
                                     {"gradient": "score"}, {"head_dim": 5}, {"rates": "rows"}], ids=str)
def test_module(options):
    m, x = layer(**options), cloud()
    mask = torch.arange(11)[None] < torch.tensor([[11], [6]])
    out, info = m(x, mask=mask, return_info=True)
    assert out.shape == x.shape and not out[1, 6:].any() and info.flops > 0
    (out.square().sum() + info.density).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in m.parameters())
    twin = copy.deepcopy(m)
    twin.load_state_dict(m.state_dict())
    a, b = (f(x, generator=torch.Generator().manual_seed(2)) for f in (m, twin))
    assert torch.equal(a, b)


def test_module_starts_at_a_quarter_and_explores_in_training_only():
    m = SBMAttention(64, 2)
    x = torch.randn(4, 256, 64)
    assert abs(m(x, return_info=True)[1].density.item() - 0.26) < 0.01
    assert abs(m.eval()(x, return_info=True)[1].density.item() - 0.25) < 0.01


def test_self_loops_are_there():
    _, info = layer(self_loops=True).eval()(cloud(), return_info=True)
    assert info.extra["matrix"].diagonal(dim1=2, dim2=3).all()


def test_in_an_encoder():
    encoder = Encoder(8, 2, 2, attention="sbm", clusters=6)
    out, infos = encoder(cloud(), return_info=True)
    (out.sum() + sum(info.density for info in infos)).backward()
    assert all(p.grad is not None for p in encoder.parameters())


def test_compiled():
    m, x = layer().eval(), cloud()
    torch.manual_seed(3)
    plain = m(x)
    torch.manual_seed(3)
    torch.testing.assert_close(torch.compile(m, backend="eager")(x), plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_dtype_is_kept(dtype):
    model = draw()
    edges = edges_of(model, torch.ones(2, 13, dtype=torch.bool))
    low = sbm_attention(*(x.to(dtype) for x in model), edges=edges)
    assert low.dtype == dtype
    torch.testing.assert_close(low.double(), sbm_attention(*model, edges=edges), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dense", [0.0, 1.0], ids=["matrix", "list"])
def test_autocast(dense, monkeypatch):
    monkeypatch.setattr(module, "_DENSE", dense)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer()(cloud()).isfinite().all()


BAD = {
    "clusters": ({"clusters": 0}, "^clusters must be"),
    "sampler": ({"sampler": "dense"}, "^sampler must be one of 'bernoulli', 'fastrg', got 'dense'"),
    "gradient": ({"gradient": "exact"}, "^gradient must be one of"),
    "exploration": ({"exploration": -0.1}, "^exploration must lie between 0 and 1"),
    "rates": ({"rates": "columns"}, "^rates must be one of 'joint', 'rows'"),
    "window": ({"window": -1}, "^window must be an integer >= 0"),
    "heads": ({"head_dim": 0}, "^head_dim must be"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_options(case):
    options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        SBMAttention(8, 2, **options)


def test_bad_tensors():
    q, k, v, y, s, z = draw()
    with pytest.raises(ValueError, match="^s must have shape"):
        sbm_attention(q, k, v, y, s[:, :4], z)
    with pytest.raises(ValueError, match="^z must have shape"):
        sbm_attention(q, k, v, y, s, z[:, :, :5])
    with pytest.raises(ValueError, match="y holds NaN"):
        sbm_attention(q, k, v, y * float("nan"), s, z)
    with pytest.raises(ValueError, match="must hold finite numbers >= 0"):
        sbm_attention(q, k, v, y - 0.5, s, z * 0.01)
    with pytest.raises(ValueError, match="^x must have 8 channels"):
        layer()(torch.zeros(1, 3, 7))


@pytest.mark.parametrize("impl", ["fast", "reference"])
def test_a_given_list_may_name_masked_points(impl):
    """They change nothing and return 0, whatever pairs the list has."""
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(1, 1, 6, 4, generator=g), torch.rand(1, 1, 6, 3, generator=g)
    every, s = torch.ones(1, 6, 6).nonzero().T, torch.full((1, 3, 3), 0.1)
    out = sbm_attention(x, x, x, y, s, y, mask=torch.arange(6)[None] < 4, edges=every, impl=impl)
    few = torch.ones(1, 4, 4).nonzero().T
    same = sbm_attention(*[part[:, :, :4] for part in (x, x, x, y)], s, y[:, :, :4], edges=few, impl=impl)
    torch.testing.assert_close(out[:, :, :4], same)
    assert not out[:, :, 4:].any()


def test_coins_of_two_draws_differ_in_one_graph():
    "A compiler that takes equal operations for one must not take two draws for one."
    q, k, v = torch.randn(3, 1, 1, 8, 4)
    y, s, z = torch.full((1, 1, 8, 1), 0.6, requires_grad=True), torch.ones(1, 1, 1), torch.full((1, 1, 8, 1), 0.7)

    def loss(y):
        return sbm_attention(q, k, v, y, s, z, gradient="two-sided").square().sum()

    def gradient(f):
        torch.manual_seed(5)
        return torch.autograd.grad(f(y), y)[0]

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradient(compiled), gradient(loss))


def test_compiles_with_numbers_that_change():
    layer, x = SBMAttention(16, 2, clusters=4, exploration=0.1), torch.randn(2, 12, 16)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True, dynamic=True)
    for length in (12, 9):
        assert compiled(x[:, :length]).shape == (2, length, 16)


def test_candidates_need_edges_and_two_sides():
    x, y, s = torch.randn(1, 2, 20, 8), torch.rand(1, 2, 20, 4), torch.full((2, 4, 4), 1 / 16)
    edges, outside = torch.tensor([[0], [1], [2]]), torch.tensor([[7], [1], [2]])
    for given in (dict(), dict(gradient="two-sided"), dict(edges=edges)):
        with pytest.raises(ValueError, match="candidates need edges"):
            sbm_attention(x, x, x, y, s, y, candidates=edges, **given)
    with pytest.raises(ValueError, match="candidates"):
        sbm_attention(x, x, x, y, s, y, candidates=outside, edges=edges, gradient="two-sided")


def test_a_list_of_edges_inside_transforms():
    x, y, s = torch.randn(1, 2, 20, 8), torch.rand(1, 2, 20, 4, requires_grad=True), torch.full((2, 4, 4), 1 / 16)
    edges = torch.tensor([[0, 0, 1], [1, 1, 3], [2, 5, 3]])

    def loss(y):
        return sbm_attention(x, x, x, y, s, y, edges=edges).square().sum()

    expected, = torch.autograd.grad(loss(y), y)
    torch.testing.assert_close(torch.func.grad(loss)(y.detach()), expected)


def test_rates_by_a_wrong_name_are_refused():
    with pytest.raises(ValueError, match="rates"):
        cluster_rates(torch.zeros(1, 2, 3), "row")


def test_masks_drawn_under_vmap_and_after_loading():
    torch.manual_seed(0)
    layer, x = SBMAttention(16, 4, clusters=4).eval(), torch.randn(1, 20, 16)
    alike = x[None].expand(4, 1, 20, 16)                                       # one cloud four times: only masks differ
    out = torch.func.vmap(layer, randomness="different")(alike)
    assert out.shape == alike.shape
    assert all((one - other).abs().max() > 1e-3 for one, other in zip(out, out[1:], strict=False))
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,)), file)
    file.seek(0)
    program = torch.export.load(file).module()
    assert program(x).shape == x.shape and (program(x) - program(x)).abs().max() > 1e-3
