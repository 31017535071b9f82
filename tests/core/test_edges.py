"""Attention on a list of edges against attention with the pattern of the list."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from sparseattn.core import attention as module
from sparseattn.core.attention import (
    PRESENCE_RULES,
    dense_attention,
    edge_attention,
    edge_products,
    pattern_attention,
    straight_through_presence,
)


def draw(n, m, density, batch=2, heads=3, width=8, size=1.0, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(batch, heads, s, width, generator=g, dtype=dtype) for s in (n, m, m))
    pattern = torch.rand(batch * heads, n, m, generator=g) < density
    return q * size, k * size, v, pattern


def results(function, *leaves):
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = function(*leaves)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out, *torch.autograd.grad((out * weight).sum(), leaves)


SHAPES = [(1, 1), (1, 9), (9, 1), (17, 30), (40, 40)]


@pytest.mark.parametrize("all_pairs", [0.0, 2.0], ids=["pairs", "list"])
@pytest.mark.parametrize("density", [0.0, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("size", [1.0, 30.0])
def test_equals_the_pattern(shape, density, all_pairs, size, monkeypatch):
    for name in ("_ALL_PAIRS", "_ALL_PAIRS_WITH_PRESENCE"):
        monkeypatch.setattr(module, name, all_pairs)
    q, k, v, pattern = draw(*shape, density, size=size)
    edges = pattern.nonzero().T
    literal = results(lambda *x: dense_attention(*x, pattern=pattern.view(2, 3, *shape)), q, k, v)
    for impl in ("fast", "reference"):
        for a, b in zip(results(lambda *x, i=impl: edge_attention(*x, edges, impl=i), q, k, v), literal, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_order_of_the_list_does_not_matter():
    q, k, v, pattern = draw(20, 20, 0.1)
    edges = pattern.nonzero().T
    shuffled = edges[:, torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(1))]
    assert torch.equal(edge_attention(q, k, v, edges), edge_attention(q, k, v, shuffled))


def test_all_pairs_is_torchs_attention():
    q, k, v, _ = draw(12, 15, 0.0)
    edges = torch.ones(6, 12, 15).nonzero().T
    dense = F.scaled_dot_product_attention(q, k, v, scale=0.3)
    torch.testing.assert_close(edge_attention(q, k, v, edges, scale=0.3), dense)


def test_queries_without_edges_return_zero():
    q, k, v, _ = draw(5, 5, 0.0)
    out, *grads = results(lambda *x: edge_attention(*x, torch.tensor([[1], [2], [3]])), q, k, v)
    torch.testing.assert_close(out[0, 1, 2], v[0, 1, 3])
    out[0, 1, 2] = 0
    assert not out.any() and all(g.isfinite().all() for g in grads)


def test_scores_that_would_overflow(monkeypatch):
    monkeypatch.setattr(module, "_ALL_PAIRS", 2.0)
    q, k, v, pattern = draw(30, 30, 0.1, size=40.0, dtype=torch.float32)
    edges = pattern.nonzero().T
    out = edge_attention(q, k, v, edges)
    exact = edge_attention(q.double(), k.double(), v.double(), edges, impl="reference")
    assert out.isfinite().all() and (out - exact).norm() < 1e-3 * exact.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_dtype_is_kept(dtype):
    q, k, v, pattern = draw(10, 10, 0.1)
    edges = pattern.nonzero().T
    out = edge_attention(q.to(dtype), k.to(dtype), v.to(dtype), edges)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), edge_attention(q, k, v, edges), rtol=0.05, atol=0.05)


BAD = {
    "floats": (torch.zeros(3, 1), TypeError, "^edges must be an int64 tensor"),
    "two rows": (torch.zeros(2, 1, dtype=torch.long), ValueError, "^edges must have shape"),
    "head": (torch.tensor([[6], [0], [0]]), ValueError, "the head must lie in 0..5"),
    "query": (torch.tensor([[0], [4], [0]]), ValueError, "the query must lie in 0..3"),
    "key": (torch.tensor([[0], [0], [-1]]), ValueError, "the key must lie in 0..4"),
    "twice": (torch.tensor([[1, 0, 1], [2, 0, 2], [3, 0, 3]]), ValueError, "found one twice"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_edges(case):
    q, k, v, _ = draw(4, 5, 0.0)
    edges, error, message = BAD[case]
    with pytest.raises(error, match=message):
        edge_attention(q, k, v, edges)


@pytest.mark.parametrize("all_pairs", [0.0, 1.0])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("which", range(3))
def test_any_number_of_an_edge_that_is_not_finite_is_seen(which, value, all_pairs, monkeypatch):
    for name in ("_ALL_PAIRS", "_ALL_PAIRS_WITH_PRESENCE"):
        monkeypatch.setattr(module, name, all_pairs)
    for row, channel, sign in itertools.product(range(3), range(4), (1, -1)):
        x = torch.ones(3, 1, 1, 3, 4)
        x[0] *= sign  # with ones on the other side, a key of -inf has a score of -inf, and so no weight
        x[which, 0, 0, row, channel] = value
        for edges in ([[0, 0, 0], [0, 1, 2], [0, 1, 2]], [[0] * 9, [0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 2] * 3]):
            with pytest.raises(ValueError, match=f"^{'qkv'[which]} holds NaN or infinite"):
                edge_attention(*x, torch.tensor(edges))


def test_bad_impl():
    q, k, v, _ = draw(4, 5, 0.0)
    with pytest.raises(ValueError, match="^impl must be"):
        edge_attention(q, k, v, torch.zeros(3, 0, dtype=torch.long), impl="slow")


def loss(q, k, v, edges, **options):
    out = edge_attention(q, k, v, edges, **options)
    return (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum()


@pytest.mark.parametrize("all_pairs", [0.0, 2.0], ids=["pairs", "list"])
@pytest.mark.parametrize("rule", PRESENCE_RULES)
@pytest.mark.parametrize("shape", [(1, 1), (9, 1), (17, 30)], ids=str)
def test_presence_gradients(shape, rule, all_pairs, monkeypatch):
    for name in ("_ALL_PAIRS", "_ALL_PAIRS_WITH_PRESENCE"):
        monkeypatch.setattr(module, name, all_pairs)
    q, k, v, pattern = draw(*shape, 0.3)
    edges = pattern.nonzero().T
    edges = edges[:, torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(2))]
    presence = torch.ones(edges.shape[1], dtype=q.dtype, requires_grad=True)
    assert torch.equal(loss(q, k, v, edges, presence=presence, rule=rule), loss(q, k, v, edges, presence=presence))
    (found,) = torch.autograd.grad(loss(q, k, v, edges, presence=presence, rule=rule), presence)
    torch.testing.assert_close(found, by_hand(rule, q, k, v, pattern, edges), rtol=1e-9, atol=1e-9)


def by_hand(rule, q, k, v, pattern, edges):
    "The three rules from their words: scores or weights times presence, and one loss for each edge left out."
    if rule == "removal":
        whole, others = loss(q, k, v, edges), range(edges.shape[1])
        return torch.stack([whole - loss(q, k, v, edges[:, torch.arange(edges.shape[1]) != e]) for e in others])
    presence = torch.ones_like(pattern, dtype=q.dtype).requires_grad_()
    scores = (q @ k.mT * q.shape[-1] ** -0.5).flatten(0, 1)
    weights = (scores * presence if rule == "score" else scores).exp() * pattern
    weights = weights * presence if rule == "weight" else weights
    out = weights / weights.sum(-1, keepdim=True).masked_fill(~pattern.any(-1, keepdim=True), 1) @ v.flatten(0, 1)
    out = out.view(*q.shape[:3], -1)
    (gradient,) = torch.autograd.grad((out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)).sum(),
                                      presence)
    return gradient[tuple(edges)]


def test_straight_through_presence_feeds_the_inner_products():
    g = torch.Generator().manual_seed(0)
    a, b = (torch.rand(2, 3, n, 4, generator=g, dtype=torch.float64).requires_grad_() for n in (6, 9))
    edges = (torch.rand(6, 6, 9, generator=g) < 0.3).nonzero().T
    edges = edges[:, torch.randperm(edges.shape[1], generator=g)]
    weight = torch.randn(edges.shape[1], generator=g, dtype=torch.float64)
    ones = straight_through_presence(a, b, edges)
    assert torch.equal(ones, torch.ones_like(ones))
    literal, products = (a @ b.mT).flatten(0, 1)[tuple(edges)], edge_products(a, b, edges)
    torch.testing.assert_close(products, literal, rtol=1e-12, atol=1e-12)
    gradients = [torch.autograd.grad((x * weight).sum(), (a, b)) for x in (ones, products, literal)]
    for ones, products, literal in zip(*gradients, strict=True):
        torch.testing.assert_close(ones, literal, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(products, literal, rtol=1e-12, atol=1e-12)


def test_bad_presence():
    q, k, v, pattern = draw(4, 5, 0.5)
    edges = pattern.nonzero().T
    with pytest.raises(ValueError, match="^presence must have shape"):
        edge_attention(q, k, v, edges, presence=torch.ones(1))
    with pytest.raises(ValueError, match="^rule must be one of 'score', 'weight', 'removal', got 'exact'"):
        edge_attention(q, k, v, edges, rule="exact")
    with pytest.raises(ValueError, match="^pattern must broadcast"):
        pattern_attention(q, k, v, torch.ones(2, 3, 4, 4) > 0, presence=torch.ones(2, 3, 4, 5))


@pytest.mark.parametrize("impl", ["fast", "reference"])
def test_a_weight_that_rounds_to_one_is_not_alone(impl):
    q, k = torch.tensor([[[[30.0]]]]), torch.tensor([[[[1.0], [0.0]]]])
    v, presence = torch.tensor([[[[3.0], [1.0]]]]), torch.ones(2, requires_grad=True)
    edges = torch.tensor([[0, 0], [0, 0], [0, 1]])
    out = edge_attention(q, k, v, edges, scale=1.0, presence=presence, rule="removal", impl=impl)
    (found,) = torch.autograd.grad(out.sum(), presence)
    assert found.isfinite().all() and found.abs().max() < 2.5  # the edge's value, 3, would be that of an only one


def test_attention_on_a_list_in_a_compiled_function():
    q = torch.randn(3, 1, 2, 40, 4, generator=torch.Generator().manual_seed(0))
    edges = (torch.rand(2, 40, 40, generator=torch.Generator().manual_seed(1)) < 0.05).nonzero().T
    compiled = torch.compile(lambda e: edge_attention(*q, e), backend="eager")
    torch.testing.assert_close(compiled(edges), edge_attention(*q, edges), rtol=0, atol=0)


@pytest.mark.parametrize("key", [5, 1000, 50_000_000])
def test_a_compiled_list_is_looked_at(key):
    """A kernel would follow the key out of its memory."""
    q, edges = torch.randn(1, 1, 5, 4), torch.tensor([[0, 0], [0, 1], [1, key]])
    with pytest.raises(ValueError, match=r"edges: the key must lie in 0\.\.4"):
        torch.compile(lambda e: edge_attention(q, q, q, e), backend="eager", fullgraph=True)(edges)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("function", [edge_products, straight_through_presence])
def test_products_on_a_list_compile(function, backend):
    a, b = torch.randn(2, 1, 2, 30, 4, generator=torch.Generator().manual_seed(0))
    edges = (torch.rand(2, 30, 30, generator=torch.Generator().manual_seed(1)) < 0.1).nonzero().T
    compiled = torch.compile(lambda a, b: function(a, b, edges), backend=backend)
    weigh = torch.arange(edges.shape[1], dtype=a.dtype).sin()
    found, wanted = (results_by(lambda a, b, f=f: (f(a, b) * weigh), a, b) for f in
                     (compiled, lambda a, b: function(a, b, edges)))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", ["fast", "reference"])
def test_a_candidate_named_twice_is_refused(impl):
    q = torch.randn(1, 1, 3, 4)
    edges, candidates = torch.tensor([[0], [0], [1]]), torch.tensor([[0, 0, 0], [0, 0, 0], [1, 2, 2]])
    with pytest.raises(ValueError, match="candidates: each"):
        edge_attention(q, q, q, edges, rule="removal", presence=torch.ones(1), candidates=candidates,
                       absence=torch.ones(3), impl=impl)


def second(function, *leaves):
    "Gradients that can be differentiated again, and theirs."
    leaves = [x.clone().requires_grad_() for x in leaves]
    first = torch.autograd.grad(function(*leaves).sin().sum(), leaves, create_graph=True)
    return *first, *torch.autograd.grad(sum(x.sin().sum() for x in first), leaves)


@pytest.mark.parametrize("rule", PRESENCE_RULES)
@pytest.mark.parametrize("density", [0.1, 0.5])
def test_second_derivatives_on_the_list_are_those_on_all_pairs(rule, density, monkeypatch):
    q, k, v, pattern = draw(9, 11, density)
    edges = pattern.nonzero().T
    found = []
    for all_pairs in (0.0, 2.0):
        for name in ("_ALL_PAIRS", "_ALL_PAIRS_WITH_PRESENCE"):
            monkeypatch.setattr(module, name, all_pairs)
        def attend(q, k, v, p):
            return edge_attention(q, k, v, edges, presence=p, rule=rule)
        leaves = q, k, v, q.new_ones(edges.shape[1])
        found.append(second(attend, *leaves))
        torch.testing.assert_close(list(found[-1][:4]), list(results_by(attend, *leaves)), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)


def results_by(function, *leaves):
    leaves = [x.clone().requires_grad_() for x in leaves]
    return torch.autograd.grad(function(*leaves).sin().sum(), leaves)


def test_second_derivatives_without_presence_and_of_products():
    q, k, v, pattern = draw(9, 11, 0.3)
    edges = pattern.nonzero().T
    pairs = pattern.view(2, 3, 9, 11)
    ours = second(lambda *x: edge_attention(*x, edges), q, k, v)
    certain = second(lambda *x: dense_attention(*x, pattern=pairs), q, k, v)
    torch.testing.assert_close(ours, certain, rtol=1e-9, atol=1e-10)
    ours = second(lambda a, b: edge_products(a, b, edges), q, k)
    certain = second(lambda a, b: (a @ b.mT)[pairs], q, k)
    torch.testing.assert_close(ours, certain, rtol=1e-9, atol=1e-10)


def test_functional_transforms_take_the_composed_form():
    q, k, v, pattern = draw(9, 11, 0.1)
    edges = pattern.nonzero().T
    found = torch.func.grad(lambda q: edge_attention(q, k, v, edges).sin().sum())(q)
    expected, = results_by(lambda q: edge_attention(q, k, v, edges), q)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


def test_products_refuse_factors_of_other_clouds_or_heads():
    """The list numbers rows of all heads, which would lie past the end of the smaller factor."""
    a, edges = torch.ones(2, 3, 4, 5), torch.tensor([[5], [3], [3]])
    for b in (a[:1], a[:, :2], a[..., :4], a.double()):
        with pytest.raises(ValueError, match="a and b must have one batch"):
            edge_products(a, b, edges)


def _asked(q, k, v, pattern, seed=3):
    "Edges, and some pairs that are none."
    candidates = (torch.rand(pattern.shape, generator=torch.Generator().manual_seed(seed)) < 0.3) & ~pattern
    return pattern.nonzero().T, candidates.nonzero().T


@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize("impl", ["list", "pairs", "reference"])
def test_absence_is_what_adding_an_edge_changes(impl, size, monkeypatch):
    "For a loss that is linear in the output, each candidate by itself; a query without an edge is among them."
    monkeypatch.setattr(module, "_ALL_PAIRS_WITH_PRESENCE", 0.0 if impl == "pairs" else 2.0)
    q, k, v, pattern = draw(7, 9, 0.3, batch=1, heads=2, size=size)
    pattern[1, 3] = False
    edges, candidates = _asked(q, k, v, pattern)
    order = torch.randperm(candidates.shape[1], generator=torch.Generator().manual_seed(0))
    candidates, aim = candidates[:, order], torch.linspace(-1, 1, 112, dtype=q.dtype).view(1, 2, 7, 8)
    absence = torch.zeros(candidates.shape[1], dtype=q.dtype, requires_grad=True)
    option = "reference" if impl == "reference" else "fast"

    def loss(edges, **options):
        return (edge_attention(q, k, v, edges, impl=option, **options) * aim).sum()

    found, = torch.autograd.grad(loss(edges, candidates=candidates, absence=absence), absence)
    by_hand = [loss(torch.cat([edges, candidates[:, [e]]], 1)) - loss(edges) for e in range(len(absence))]
    torch.testing.assert_close(found, torch.stack(by_hand), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rule", PRESENCE_RULES)
def test_forms_agree_with_candidates_and_in_second_derivatives(rule):
    q, k, v, pattern = draw(9, 11, 0.3)
    pattern[:, :, 0] = True
    edges, candidates = _asked(q, k, v, pattern)

    def second(impl):
        ones, zeros = q.new_ones(edges.shape[1]), q.new_zeros(candidates.shape[1])
        leaves = [x.clone().requires_grad_() for x in (q, k, v, ones, zeros)]
        options = dict(presence=leaves[3], rule=rule, candidates=candidates, absence=leaves[4], impl=impl)
        out = edge_attention(*leaves[:3], edges, **options)
        first = torch.autograd.grad(out.sin().sum(), leaves, create_graph=True)
        return *first, *torch.autograd.grad(sum(x.sin().sum() for x in first), leaves)

    for ours, literal in zip(second("fast"), second("reference"), strict=True):
        torch.testing.assert_close(ours, literal, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("low", [False, True], ids=["float64", "bfloat16"])
def test_the_operator(low):
    "In one graph, with every gradient, and as the operator's own checks want it."
    q, k, v, pattern = draw(9, 11, 0.3)
    edges, candidates = _asked(q, k, v, pattern)
    edges = edges[:, torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(1))]
    ones, zeros = q.new_ones(edges.shape[1]), q.new_zeros(candidates.shape[1])
    dtype = torch.bfloat16 if low else q.dtype

    def function(q, k, v, ones, zeros, edges, candidates):
        return edge_attention(q, k, v, edges, presence=ones, rule="removal", candidates=candidates, absence=zeros)

    def found(f):
        leaves = [x.clone().requires_grad_() for x in (*(x.to(dtype) for x in (q, k, v)), ones, zeros)]
        out = f(*leaves, edges, candidates)
        return out, *torch.autograd.grad(out.sin().sum(), leaves)

    torch.compiler.reset()
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for a, b in zip(found(compiled), found(function), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2 if low else 1e-10, atol=2e-2 if low else 1e-12)
    if not low:
        rows = [x.flatten(0, 2).clone().requires_grad_() for x in (q, k, v)]
        collectors = (x.clone().requires_grad_() for x in (ones, zeros))
        torch.library.opcheck(module._operator, (*rows, *collectors, edges, candidates, 9, 11, 0.3, "score"))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_list_without_presence_is_differentiated(backend):
    q, k, v, pattern = draw(9, 11, 0.3)
    edges, _ = _asked(q, k, v, pattern)
    torch.compiler.reset()
    compiled = torch.compile(lambda *rows: edge_attention(*rows, edges), backend=backend, fullgraph=True)
    found = results_by(compiled, q, k, v)
    torch.testing.assert_close(found, results_by(lambda *rows: edge_attention(*rows, edges), q, k, v))


def test_the_operator_is_exported():
    q, k, v, pattern = draw(9, 11, 0.3)

    class Layer(torch.nn.Module):
        def forward(self, q, edges):
            return edge_attention(q, k, v, edges)

    edges = pattern.nonzero().T
    shapes = {"q": None, "edges": {1: torch.export.Dim("count", min=2)}}
    exported = torch.export.export(Layer(), (q, edges), dynamic_shapes=shapes)
    for count in (edges.shape[1], 5):
        torch.testing.assert_close(exported.module()(q, edges[:, :count]), edge_attention(q, k, v, edges[:, :count]))


def test_candidates_are_checked():
    q, k, v, pattern = draw(5, 5, 0.3)
    edges = pattern.nonzero().T
    with pytest.raises(ValueError, match="^candidates and absence come together"):
        edge_attention(q, k, v, edges, candidates=edges)
    with pytest.raises(ValueError, match="^absence must have shape"):
        edge_attention(q, k, v, edges, candidates=edges, absence=torch.zeros(1))
    with pytest.raises(ValueError, match="^candidates: the key must lie in 0..4, found 9 to 9"):
        edge_attention(q, k, v, edges, candidates=torch.tensor([[0], [0], [9]]), absence=torch.zeros(1))
