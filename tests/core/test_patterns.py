"""Patterns and edge lists: constructors against their definitions, conversions, reach, bad input."""

from __future__ import annotations

import doctest
import math

import pytest
import torch

from sparseattn.core import patterns
from sparseattn.core.attention import dense_attention
from sparseattn.core.patterns import (
    any_of,
    block_pattern,
    check_pattern,
    density,
    depth_to_connect,
    edges_to_pattern,
    global_pattern,
    nnz,
    pattern_to_edges,
    reach,
    window_pattern,
)


def by_loop(n, rule):
    """The pattern of a rule, pair by pair."""
    return torch.tensor([[bool(rule(u, v)) for v in range(n)] for u in range(n)])


def random_patterns(*shape, share=0.2, seed=0):
    """A random pattern."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share


def walked(pattern, depth):
    """Reach by walking the arrows from every point."""
    n = len(pattern)
    seen = [{u} for u in range(n)]
    for _ in range(depth):
        seen = [s | {v for w in s for v in range(n) if pattern[w, v]} for s in seen]
    return by_loop(n, lambda u, v: v in seen[u])


def test_examples():
    found = doctest.testmod(patterns, extraglobs={"torch": torch})
    assert found.attempted >= 11 and found.failed == 0


@pytest.mark.parametrize("n", [1, 2, 7, 16])
@pytest.mark.parametrize("width", [0, 1, 3, 100])
def test_window(n, width):
    pattern = window_pattern(n, width)
    assert pattern.dtype == torch.bool
    assert torch.equal(pattern, by_loop(n, lambda u, v: abs(u - v) <= width))


@pytest.mark.parametrize("shape", [(1,), (9,), (2, 5), (2, 3, 6)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_blocks(shape, dtype):
    labels = torch.randint(-1, 3, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    pattern = block_pattern(labels)
    assert pattern.shape == (*shape, shape[-1])
    rows, n = labels.view(-1, shape[-1]).tolist(), shape[-1]
    for row, found in zip(rows, pattern.view(-1, n, n), strict=True):
        assert torch.equal(found, by_loop(n, lambda u, v, row=row: row[u] == row[v] != -1))


def test_blocks_of_nobody_and_of_everybody():
    assert not block_pattern(torch.full((4,), -1)).any()
    assert block_pattern(torch.full((4,), 17)).all()


@pytest.mark.parametrize("relays", [[], [0], [5, 2], torch.tensor([1, 1, 3])])
def test_global(relays):
    chosen = {int(r) for r in relays}
    assert torch.equal(global_pattern(6, relays), by_loop(6, lambda u, v: u in chosen or v in chosen))


def test_union_broadcasts():
    a, b = random_patterns(2, 3, 5, 5), window_pattern(5, 1)
    assert torch.equal(any_of(a, b), a | b) and torch.equal(any_of(b, a), a | b)
    assert torch.equal(any_of(b), b)
    assert torch.equal(any_of(a, b, global_pattern(5, [4])), a | b | global_pattern(5, [4]))


@pytest.mark.parametrize("shape", [(1, 1), (4, 4), (3, 8), (2, 3, 5, 5), (2, 1, 3, 4, 6)])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.1])
def test_edges_there_and_back(shape, share):
    pattern = random_patterns(*shape, share=share)
    edges = pattern_to_edges(pattern)
    assert edges.dtype == torch.int64 and edges.shape == (3, pattern.sum()) and edges.is_contiguous()
    assert edges.T.tolist() == sorted(edges.T.tolist())
    flat = pattern.reshape(-1, *shape[-2:])
    assert all(flat[tuple(edge)] for edge in edges.T.tolist())
    order = torch.randperm(edges.shape[1], generator=torch.Generator().manual_seed(2))
    assert torch.equal(edges_to_pattern(edges[:, order].repeat(1, 2), shape), pattern)


def test_edges_of_an_expanded_pattern():
    edges = pattern_to_edges(window_pattern(4, 1).expand(2, 3, 4, 4))
    assert edges.shape == (3, 60) and edges[0].bincount().tolist() == [10] * 6


@pytest.mark.parametrize("kernel", ["softmax", "gaussian"])
def test_attention_over_edges_is_attention_with_the_pattern(kernel):
    """Outputs and gradients in float64, 1e-12; sums over edges by scatter, independent of the dense code."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 2, n, 3, generator=g, dtype=torch.float64, requires_grad=True) for n in (6, 8, 8))
    pattern = random_patterns(2, 2, 6, 8, share=0.4)
    pattern[0, 1, 2] = False
    edges = pattern_to_edges(pattern)
    qe, ke, ve = (x.flatten(0, 1)[edges[0], edges[end]] for x, end in ((q, 1), (k, 2), (v, 2)))
    logits = (qe * ke).sum(-1) / math.sqrt(3) if kernel == "softmax" else -(qe - ke).square().sum(-1) / 2
    row, weights = edges[0] * 6 + edges[1], logits.exp()
    total = torch.zeros(24, dtype=torch.float64).index_add(0, row, weights)
    parts = (weights / total[row])[:, None] * ve
    out = torch.zeros(24, 3, dtype=torch.float64).index_add(0, row, parts).view(2, 2, 6, 3)
    expected = dense_attention(q, k, v, pattern=pattern, kernel=kernel)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(x.square().sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_counts():
    pattern = random_patterns(2, 3, 5, 7)
    assert nnz(pattern).shape == (2, 3, 5) and torch.equal(nnz(pattern), pattern.long().sum(-1))
    assert density(pattern) == pytest.approx(pattern.double().mean().item(), abs=1e-15)
    assert density(torch.zeros(3, 3, dtype=torch.bool)) == 0 and density(torch.ones(3, 3, dtype=torch.bool)) == 1


@pytest.mark.parametrize("n", [1, 2, 9, 13])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 1.0])
def test_reach_is_walking(n, share):
    pattern = random_patterns(n, n, share=share, seed=n)
    for depth in (0, 1, 2, 3, 4, 7, 8, 100):
        assert torch.equal(reach(pattern, depth), walked(pattern, min(depth, n)))


def test_reach_over_a_batch_leaves_its_argument():
    batch = random_patterns(2, 3, 8, 8)
    before = batch.clone()
    found = reach(batch, 3)
    assert torch.equal(batch, before) and found.shape == batch.shape and found.dtype == torch.bool
    for b in range(2):
        for h in range(3):
            assert torch.equal(found[b, h], walked(batch[b, h], 3))


def test_reach_is_where_stacked_attention_depends():
    pattern = random_patterns(8, 8, share=0.15, seed=5)
    x = torch.randn(1, 1, 8, 2, generator=torch.Generator().manual_seed(6), dtype=torch.float64)

    def stack(x):
        for _ in range(3):
            x = x + dense_attention(x, x, x, pattern=pattern)
        return x

    jacobian = torch.autograd.functional.jacobian(stack, x).view(8, 2, 8, 2)
    expected = reach(pattern, 3)
    assert torch.equal((jacobian != 0).any(3).any(1), expected) and not expected.all()


@pytest.mark.parametrize("n, width", [(1, 1), (2, 1), (10, 3), (33, 4), (33, 32), (33, 100)])
def test_depth_of_windows(n, width):
    assert depth_to_connect(window_pattern(n, width)) == math.ceil((n - 1) / min(width, max(n - 1, 1)))


def test_depth_is_the_first_that_reaches_all():
    for seed in range(20):
        pattern = random_patterns(10, 10, share=0.2, seed=seed)
        reached = [bool(reach(pattern, depth).all()) for depth in range(10)]
        assert depth_to_connect(pattern) == (reached.index(True) if any(reached) else None)


def test_depth_where_nothing_connects():
    assert depth_to_connect(torch.zeros(2, 2, dtype=torch.bool)) is None
    assert depth_to_connect(torch.ones(5, 5, dtype=torch.bool).tril()) is None
    assert depth_to_connect(block_pattern(torch.tensor([0, 0, 1, 1]))) is None
    assert depth_to_connect(any_of(block_pattern(torch.tensor([0, 0, 1, 1])), global_pattern(4, [0]))) == 2


def test_depth_of_a_batch_is_that_of_its_slowest():
    assert depth_to_connect(torch.stack([window_pattern(9, 1), window_pattern(9, 4)])) == 8
    assert depth_to_connect(torch.stack([window_pattern(9, 1), torch.eye(9, dtype=torch.bool)])) is None


square = torch.ones(3, 3, dtype=torch.bool)
tall = torch.ones(3, 2, dtype=torch.bool)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: check_pattern("pattern", square.int()), TypeError, "boolean tensor, got torch.int32"),
        (lambda: check_pattern("pattern", [[True]]), TypeError, "got list"),
        (lambda: check_pattern("pattern", square[0]), ValueError, "(3,)"),
        (lambda: check_pattern("pattern", square[:0]), ValueError, "none of them empty"),
        (lambda: reach(tall, 1), ValueError, "as many queries as keys"),
        (lambda: reach(square, -1), ValueError, "depth must be an integer >= 0, got -1"),
        (lambda: reach(square, 1.5), ValueError, "depth must be an integer >= 0, got 1.5"),
        (lambda: depth_to_connect(tall), ValueError, "as many queries as keys"),
        (lambda: window_pattern(0, 1), ValueError, "n must be an integer >= 1, got 0"),
        (lambda: window_pattern(3, -1), ValueError, "width must be an integer >= 0, got -1"),
        (lambda: window_pattern(3, True), ValueError, "width must be an integer >= 0, got True"),
        (lambda: block_pattern(torch.zeros(3)), TypeError, "labels must be an integer tensor, got torch.float32"),
        (lambda: block_pattern(torch.ones(3, dtype=torch.bool)), TypeError, "torch.bool"),
        (lambda: block_pattern(torch.tensor([0, -2])), ValueError, "at least -1, got -2"),
        (lambda: block_pattern(torch.zeros(2, 0, dtype=torch.int64)), ValueError, "(2, 0)"),
        (lambda: block_pattern(torch.tensor(3)), ValueError, "got ()"),
        (lambda: global_pattern(3, [3]), ValueError, "relays must be below n = 3, got 3"),
        (lambda: global_pattern(3, [-1]), ValueError, "relays must be an integer >= 0, got -1"),
        (lambda: global_pattern(3, [0.5]), ValueError, "relays must be an integer >= 0, got 0.5"),
        (lambda: any_of(), ValueError, "at least one"),
        (lambda: any_of(square, tall), ValueError, "share queries and keys"),
        (lambda: any_of(square, square.int()), TypeError, "patterns must be a boolean"),
        (lambda: nnz(square.float()), TypeError, "boolean"),
        (lambda: pattern_to_edges(square.long()), TypeError, "boolean"),
        (lambda: edges_to_pattern(torch.zeros(3, 1), (2, 2)), TypeError, "int64 tensor, got torch.float32"),
        (lambda: edges_to_pattern(torch.zeros(2, 1, dtype=torch.int64), (2, 2)), ValueError, "(2, 1)"),
        (lambda: edges_to_pattern(torch.tensor([[0], [0], [2]]), (2, 2)), ValueError, "outside shape (2, 2)"),
        (lambda: edges_to_pattern(torch.tensor([[0], [-1], [0]]), (2, 2)), ValueError, "outside shape"),
        (lambda: edges_to_pattern(torch.zeros(3, 0, dtype=torch.int64), (2,)), ValueError, "shape must be"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert message in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.uint16])
def test_labels_of_any_whole_dtype(dtype):
    labels = torch.tensor([0, 1, 0])
    assert torch.equal(block_pattern(labels.to(dtype)), block_pattern(labels))
