"""HEPT's loop in C against the gather form, row by row, and its calls."""

import pytest
import torch

from sparseattn.core.native import c_kernels, c_source
from sparseattn.hept.attention import hept_attention
from sparseattn.hept.loop import attend_in_loop, differentiate_in_loop, loops, permutes

pytestmark = pytest.mark.skipif(loops(torch.zeros(1)) is None, reason="needs a C compiler and vectors of 32 bytes")


def drawn(n, rows=3, width=5, dtype=torch.float64, scale=1.0):
    g = torch.Generator().manual_seed(n)
    q, k, v, grad = (torch.randn(rows, n, width, generator=g, dtype=dtype) for _ in range(4))
    return scale * q, scale * k, v, grad, *(torch.rand(2, rows, n, generator=g).argsort(-1) for _ in range(2))


def by_gathering(q, k, v, grad, *orders, **options):
    "Output and gradients of one cloud whose heads are the rows."
    leaves = [x[None].clone().requires_grad_() for x in (q, k, v)]
    out = hept_attention(*leaves, *(o[:, None] for o in orders), impl="composed", **options)
    return [x[0] for x in (out.detach(), *torch.autograd.grad(out, leaves, grad[None]))]


@pytest.mark.parametrize("union", [False, True])
@pytest.mark.parametrize("n, block", [(1, 4), (5, 8), (40, 10), (41, 10), (130, 33)])
def test_both_passes(n, block, union):
    q, k, v, grad, *orders = drawn(n)
    kernels, options = loops(q), dict(block_size=block, union=union)
    *results, finite = attend_in_loop(kernels, q, k, v, *orders, **options)
    found = [results[0], *differentiate_in_loop(kernels, grad, q, k, v, *orders, None, *results, **options)]
    expected = by_gathering(q, k, v, grad, *orders, block_size=block, combine="union" if union else "sum")
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
    assert finite


def test_denominators_are_by_point():
    """D exp(-N/2) is the sum of a query's weights, whatever the order of the first table."""
    q, k, v, _, order_q, order_k = drawn(30)
    _, denominator, nearest, _ = attend_in_loop(loops(q), q, k, v, order_q, order_k, block_size=7)
    weights = (-torch.cdist(q, k).square() / 2).exp()
    block_q, block_k = (order.argsort(-1) // 7 for order in (order_q, order_k))
    count = (block_q[..., :, None] == block_k[..., None, :]).sum(0)
    torch.testing.assert_close(denominator * (-nearest / 2).exp(), (count * weights).sum(-1), rtol=1e-11, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_no_result_is_subnormal(dtype):
    """Where most weights underflow, numbers are 0 or normal."""
    q, k, v, grad, *orders = drawn(300, width=30, dtype=dtype, scale=2.5)
    kernels = loops(q)
    *results, _ = attend_in_loop(kernels, q, k, v, *orders)
    for x in (results[0], *differentiate_in_loop(kernels, 1e-6 * grad, q, k, v, *orders, None, *results)):
        assert not ((x != 0) & (x.abs() < 1e3 * torch.finfo(dtype).tiny)).any()


def test_what_is_not_finite_or_no_permutation_is_seen():
    q, k, v, _, *orders = drawn(20)
    kernels = loops(q)
    assert attend_in_loop(kernels, q, k, v, *orders)[-1] and all(permutes(kernels, order) for order in orders)
    v[1, 3, 2] = torch.nan
    assert not attend_in_loop(kernels, q, k, v, *orders)[-1]
    for bad in (orders[0] + 1, orders[0].clamp(min=1), -orders[0]):
        assert not permutes(kernels, bad)


@pytest.mark.parametrize("found, instead", [("HEIGHT = 8", "HEIGHT = 4"), ("TILE = 32", "TILE = 16"),
                                            ("#if defined __AVX512F__", "#if 0")])
def test_sizes_of_tiles_change_nothing(found, instead):
    q, k, v, grad, *orders = drawn(70)
    source = c_source("block_attention.c")
    assert found in source
    outs = []
    for kernels in (loops(q), c_kernels(source.replace(found, instead), q)):
        *results, _ = attend_in_loop(kernels, q, k, v, *orders, block_size=20)
        gradients = differentiate_in_loop(kernels, grad, q, k, v, *orders, None, *results, block_size=20)
        outs.append([results[0], *gradients])
    torch.testing.assert_close(*outs, rtol=1e-12, atol=1e-12)
