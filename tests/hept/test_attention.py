"""Block attention against loops over blocks, and its forms against the reference."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sparseattn.core.attention import dense_attention
from sparseattn.hept import attention
from sparseattn.hept.attention import (backward_cases, block_of, forward_cases, gathered_attention, hept_attention,
                                       multiplicity)
from sparseattn.hept.layer import HEPTAttention
from sparseattn.lab.measure import contest

CASES = [  # n, block, batch, tables
    (1, 1, 1, 1),
    (1, 100, 2, 3),
    (2, 1, 1, 2),
    (2, 2, 2, 3),
    (7, 100, 1, 2),
    (12, 4, 2, 3),
    (13, 4, 2, 3),
    (9, 1, 1, 2),
]
MASKS = ["none", "random", "one empty", "one point", "all empty"]


@pytest.fixture(autouse=True, params=["loop", "log-sum-exp"])
def form(request, monkeypatch):
    """Every test with the loop in C, where it can be, and without: by log-sum-exp, unions by the gather form."""
    if request.param == "log-sum-exp":
        monkeypatch.setattr(attention, "_loops", lambda x: None)
    elif attention._loops(torch.zeros(1)) is None:
        pytest.skip("needs a C compiler and vectors of 32 bytes")


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def make(n=13, batch=2, tables=3, heads=2, d=3, e=4, seed=0, dtype=torch.float64):
    """q, k, v, and orders of queries and keys that differ."""
    g = source(seed)
    q, k, v = (torch.randn(batch, heads, n, width, generator=g, dtype=dtype) for width in (d, d, e))
    return q, k, v, *(torch.rand(tables, batch, heads, n, generator=g).argsort(-1) for _ in range(2))


def make_mask(kind, batch, n):
    if kind == "none":
        return None
    mask = torch.rand(batch, n, generator=source(n)) < 0.6
    mask[:, 0] = True
    if kind != "random":
        mask[-1] = False
    if kind == "one point":
        mask[-1, n // 2] = True
    return torch.zeros_like(mask) if kind == "all empty" else mask


def counts(order_q, order_k, block, mask=None):
    """Number of tables in which a query and a key share a block, from lists cut by hand."""
    tables, batch, heads, n = order_q.shape
    found = torch.zeros(batch, heads, n, n, dtype=torch.float64)
    for t, b, h in torch.cartesian_prod(*(torch.arange(s) for s in (tables, batch, heads))).tolist():
        lists = [[i for i in o[t, b, h].tolist() if mask is None or mask[b, i]] for o in (order_q, order_k)]
        for first in range(0, len(lists[0]), block):
            for i in lists[0][first : first + block]:
                for j in lists[1][first : first + block]:
                    found[b, h, i, j] += 1
    return found


def literal(q, k, v, count):
    """Weighted mean with weights count * exp(-|q-k|^2/2), scaled so that the largest is its count."""
    logits = -0.5 * (q[:, :, :, None] - k[:, :, None]).square().sum(-1)
    logits = logits.masked_fill(count == 0, -math.inf)
    largest = logits.detach().amax(-1, keepdim=True)
    weights = count * (logits - largest.masked_fill(largest == -math.inf, 0)).exp()
    total = weights.sum(-1, keepdim=True)
    return weights @ v / (total + (total == 0))


def output_and_gradients(function, *leaves):
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out = function(*leaves)
    weight = torch.linspace(-1, 1, out.numel()).view_as(out).to(out)
    return out.detach(), *torch.autograd.grad((out * weight).sum(), leaves)


def assert_same(ours, theirs, tolerance=1e-10):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def both(inputs, **options):
    """Output and gradients of the fast form and of the reference."""
    *qkv, order_q, order_k = inputs
    for impl in ("fast", "reference"):
        yield output_and_gradients(lambda *x, i=impl: hept_attention(*x, order_q, order_k, impl=i, **options), *qkv)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


# --- the functional form


@pytest.mark.parametrize("impl", ["fast", "composed", "reference"])
@pytest.mark.parametrize("combine", ["sum", "union"])
@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("n, block, batch, tables", CASES)
def test_equals_the_loop_with_gradients(n, block, batch, tables, masked, combine, impl):
    *qkv, order_q, order_k = make(n, batch, tables)
    mask = make_mask(masked, batch, n)
    count = counts(order_q, order_k, block, mask)
    count = count if combine == "sum" else count.clamp(max=1)
    options = dict(block_size=block, combine=combine, mask=mask, impl=impl)
    ours = output_and_gradients(lambda *x: hept_attention(*x, order_q, order_k, **options), *qkv)
    assert_same(ours, output_and_gradients(lambda *x: literal(*x, count), *qkv))
    if mask is not None:
        assert not ours[0].transpose(1, 2)[~mask].any()


def test_backward_under_a_counter_of_operations():
    """It turns kernels off that the forward pass had."""
    q, k, v, order_q, order_k = make(40)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    outs = [hept_attention(*leaves, order_q, order_k, block_size=8).square().sum() for _ in range(2)]
    with FlopCounterMode(display=False):
        counted = torch.autograd.grad(outs[0], leaves)
    for x, y in zip(counted, torch.autograd.grad(outs[1], leaves), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("combine", ["sum", "union"])
@pytest.mark.parametrize("wide", [1.0, 8.0], ids=["near", "wide"])
def test_several_chunks_of_blocks(combine, wide):
    """8 heads of 7 blocks are more than fit a buffer; a wide cloud centres every block on its own."""
    q, k, v, *orders = make(670, 1, 2, heads=8)
    assert_same(*both((q * wide, k * wide, v, *orders), combine=combine))


def test_one_head_of_many_blocks():
    *qkv, order_q, order_k = make(6000, 1, 2, heads=1)
    found = output_and_gradients(lambda *x: hept_attention(*x, order_q, order_k), *qkv)
    assert_same(found, output_and_gradients(lambda *x: gathered_attention(*x, order_q, order_k), *qkv))


@pytest.mark.parametrize("masked", [False, True])
def test_threads_do_not_change_the_result(masked):
    inputs, mask = make(50), make_mask("random", 2, 50) if masked else None
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append(next(both(inputs, block_size=8, mask=mask)))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert_same(*found, 1e-13)


@pytest.mark.parametrize("combine", ["sum", "union"])
def test_threads_change_no_bit_of_the_loop(combine):
    q, k, v, order_q, order_k = make(90)
    leaves, threads, found = [x.requires_grad_() for x in (q, k, v)], torch.get_num_threads(), []
    try:
        for count in (2, 3, 5):
            torch.set_num_threads(count)
            if attention._loops(q) is None:
                pytest.skip("needs the loop")
            out = hept_attention(*leaves, order_q, order_k, block_size=8, combine=combine)
            found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    finally:
        torch.set_num_threads(threads)
    assert all(x.equal(y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("combine", ["sum", "union"])
def test_duplicated_points(combine):
    *qkv, order_q, order_k = make(24)
    qkv = [x[:, :, torch.arange(24) % 3] for x in qkv]
    assert_same(*both((*qkv, order_q, order_k), block_size=5, combine=combine))
    same = torch.zeros(2, 2, 24, 3, dtype=torch.float64)
    out, *gradients = next(both((same, same, qkv[2], order_q, order_k), block_size=5, combine=combine))
    count = counts(order_q, order_k, 5).clamp(max=1 if combine == "union" else 9)
    torch.testing.assert_close(out, count @ qkv[2] / count.sum(-1, keepdim=True), rtol=1e-12, atol=1e-12)
    assert all(g.isfinite().all() for g in gradients)


@pytest.mark.parametrize("block", [13, 100])
def test_one_block_is_dense_attention(block):
    q, k, v, *orders = make()
    mask = make_mask("one empty", 2, 13)
    expected = dense_attention(q, k, v, mask=mask, kernel="gaussian")
    assert_same([hept_attention(q, k, v, *orders, block_size=block, mask=mask)], [expected])


@pytest.mark.parametrize("impl", ["fast", "reference"])
def test_union_of_one_table_is_the_sum(impl):
    inputs = make(tables=1)
    found = (hept_attention(*inputs, block_size=4, impl=impl, combine=c) for c in ("sum", "union"))
    assert torch.equal(*found)


@pytest.mark.parametrize("combine", ["sum", "union"])
def test_repeated_tables_change_nothing(combine):
    q, k, v, *orders = make(tables=1)
    thrice = [o.expand(3, -1, -1, -1) for o in orders]
    expected = hept_attention(q, k, v, *orders, block_size=4)
    assert_same([hept_attention(q, k, v, *thrice, block_size=4, combine=combine)], [expected])


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize("floor", [1e-3, 2.0])
def test_floor_adds_a_key_of_value_zero_to_every_table(impl, floor):
    *qkv, order_q, order_k = make()

    def expected(q, k, v):
        weights = counts(order_q, order_k, 4) * (-0.5 * (q[:, :, :, None] - k[:, :, None]).square().sum(-1)).exp()
        return weights @ v / (weights.sum(-1, keepdim=True) + 3 * floor)

    ours = output_and_gradients(
        lambda *x: hept_attention(*x, order_q, order_k, block_size=4, floor=floor, impl=impl), *qkv
    )
    assert_same(ours, output_and_gradients(expected, *qkv))


@pytest.mark.parametrize("masked", ["none", "random"])
@pytest.mark.parametrize("wide", [1.0, 20.0])
def test_gradcheck(masked, wide):
    *qkv, order_q, order_k = make(5, 1, 2, 1, 2, 2)
    qkv = [(x * wide).requires_grad_() for x in qkv]
    mask = make_mask(masked, 1, 5)

    def function(*x):
        return hept_attention(*x, order_q, order_k, block_size=2, mask=mask, combine="union")

    assert torch.autograd.gradcheck(function, qkv)


@pytest.mark.parametrize("combine", ["sum", "union"])
@pytest.mark.parametrize("floor", [0.0, 0.3])
@pytest.mark.parametrize("masked", ["none", "random", "one empty"])
def test_second_derivatives(masked, floor, combine):
    "Against autograd through the equation, written with differences that it can differentiate twice."
    q, k, v, *orders = make()
    mask, options = make_mask(masked, 2, 13), dict(block_size=4, combine=combine)
    count = counts(*orders, 4, mask).to(q.dtype)
    count = count if combine == "sum" else count.clamp(max=1)

    def equation(q, k, v):
        weights = count * (-0.5 * (q[..., :, None, :] - k[..., None, :, :]).square().sum(-1)).exp()
        whole = weights.sum(-1, keepdim=True) + 3 * floor
        return weights @ v / torch.where(weights.sum(-1, keepdim=True) > 0, whole, 1)

    found = []
    for attend in (lambda *x: hept_attention(*x, *orders, mask=mask, floor=floor, **options), equation):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        first = torch.autograd.grad(attend(*leaves).sin().sum(), leaves, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(x.sin().sum() for x in first), leaves)])
        found[-1] += torch.func.grad(lambda *x, f=attend: f(*x).sin().sum(), argnums=(0, 1, 2))(q, k, v)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize("combine", ["sum", "union"])
@pytest.mark.parametrize("garbage", [1e300, -3.0, math.inf, math.nan])
def test_masked_points_change_nothing(impl, combine, garbage):
    """Nor does their place in the orders, as long as the order of the others is kept."""
    *qkv, order_q, order_k = make()
    mask = make_mask("one point", 2, 13)
    hidden = ~mask[:, None].expand(2, 2, 13)
    changed = [x.masked_fill(hidden[..., None], garbage) for x in qkv]
    last = [
        o.gather(-1, hidden.expand_as(o).gather(-1, o).byte().argsort(dim=-1, stable=True)) for o in (order_q, order_k)
    ]

    def run(qkv, orders):
        return output_and_gradients(
            lambda *x: hept_attention(*x, *orders, block_size=4, mask=mask, combine=combine, impl=impl), *qkv
        )

    first, second = run(qkv, (order_q, order_k)), run(changed, last)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
        assert not a.transpose(1, 2)[~mask].any()


@pytest.mark.parametrize("combine", ["sum", "union"])
def test_padded_cloud_equals_the_cloud_alone(combine):
    q, k, v, *orders = make(20)
    mask = torch.arange(20) < torch.tensor([[20], [11]])
    out = hept_attention(q, k, v, *orders, block_size=4, mask=mask, combine=combine)
    alone = [torch.stack([row[row < 11] for row in o[:, 1].flatten(0, 1)]).view(3, 1, 2, 11) for o in orders]
    expected = hept_attention(*(x[1:, :, :11] for x in (q, k, v)), *alone, block_size=4, combine=combine)
    torch.testing.assert_close(out[1:, :, :11], expected, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("combine", ["sum", "union"])
def test_renumbered_points_give_renumbered_outputs(combine):
    q, k, v, *orders = make()
    mask, p = make_mask("random", 2, 13), torch.randperm(13, generator=source(3))
    expected = hept_attention(q, k, v, *orders, block_size=4, mask=mask, combine=combine)[:, :, p]
    moved = [p.argsort()[o] for o in orders]
    found = hept_attention(*(x[:, :, p] for x in (q, k, v)), *moved, block_size=4, mask=mask[:, p], combine=combine)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-13)


def test_strides_do_not_matter():
    *qkv, order_q, order_k = make()
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
    orders = [o.transpose(0, 3).contiguous().transpose(0, 3) for o in (order_q, order_k)]
    assert not any(x.is_contiguous() for x in (*strided, *orders))
    expected = next(both((*qkv, order_q, order_k), block_size=4))

    def run(*x):
        return hept_attention(*x, *orders, block_size=4)

    out = run(*(x.requires_grad_() for x in strided))
    weight = torch.linspace(-1, 1, out.numel()).view_as(out).to(out)
    assert_same((out, *torch.autograd.grad((out * weight).sum(), strided)), expected, 1e-13)


@pytest.mark.parametrize("shift", [0.0, 1e3, 1e4])
@pytest.mark.parametrize("combine", ["sum", "union"])
def test_float32_error_at_and_far_from_the_origin(shift, combine):
    q, k, v, *orders = make(300, d=6, dtype=torch.float32)
    q, k = q + shift, k + shift
    exact = hept_attention(*(x.double() for x in (q, k, v)), *orders, block_size=50, combine=combine, impl="reference")
    assert relative(hept_attention(q, k, v, *orders, block_size=50, combine=combine), exact) <= 2e-6


@pytest.mark.parametrize("place", [1e4, 1e6])
def test_one_far_point_spoils_no_other(place):
    """A block's centre is not near its points if one of them is far away."""
    q, k, v, *orders = make(300, 1, d=6, dtype=torch.float32)
    q[:, :, 0] = k[:, :, 0] = place
    exact = hept_attention(*(x.double() for x in (q, k, v)), *orders, block_size=50, impl="reference")
    found = hept_attention(q, k, v, *orders, block_size=50)
    assert relative(found[:, :, 1:], exact[:, :, 1:]) <= 1e-5


@pytest.mark.parametrize("gap", [1e3, 1e4])
def test_two_far_clusters_in_one_block(gap):
    q, k, v, *orders = make(300, 1, d=6, dtype=torch.float32)
    second = gap * (torch.arange(300) % 2)[:, None]
    q, k = q + second, k + second
    reference = dict(block_size=50, impl="reference")
    exact = output_and_gradients(lambda *x: hept_attention(*x, *orders, **reference), *(x.double() for x in (q, k, v)))
    ours = output_and_gradients(lambda *x: hept_attention(*x, *orders, block_size=50), q, k, v)
    assert max(relative(a, b) for a, b in zip(ours, exact, strict=True)) <= 1e-5


@pytest.mark.parametrize("place", [1e5, 3.3e5])
def test_gradients_of_a_query_far_from_every_key(place):
    q, k, v, *orders = make(dtype=torch.float32)
    q[:, :, 2] += place
    exact = output_and_gradients(
        lambda *x: hept_attention(*x, *orders, block_size=4, impl="reference"), *(x.double() for x in (q, k, v))
    )
    ours = output_and_gradients(lambda *x: hept_attention(*x, *orders, block_size=4), q, k, v)
    assert max(relative(a, b) for a, b in zip(ours, exact, strict=True)) <= 1e-4


@pytest.mark.parametrize("dtype, far, tolerance", [(torch.float64, 80.0, 1e-9), (torch.float32, 30.0, 1e-4)])
@pytest.mark.parametrize("combine", ["sum", "union"])
def test_weights_that_underflow_are_normalised(dtype, far, tolerance, combine):
    """Some queries are so far from every key that all weights are 0 in `dtype`; float64 with a shift is the judge."""
    q, k, v, order_q, order_k = make(40, dtype=dtype)
    q[:, 1, ::3, 0] += far
    mask = make_mask("random", 2, 40)
    logits = -0.5 * (q[:, :, :, None] - k[:, :, None]).double().square().sum(-1)
    assert (logits.to(dtype).exp()[:, 1, ::3] == 0).all()
    count = counts(order_q, order_k, 8, mask)
    count = count if combine == "sum" else count.clamp(max=1)
    expected = output_and_gradients(lambda *x: literal(*x, count), *(x.double() for x in (q, k, v)))
    options = dict(block_size=8, mask=mask, combine=combine)
    ours = output_and_gradients(lambda *x: hept_attention(*x, order_q, order_k, **options), q, k, v)
    assert ours[0].dtype == dtype
    for a, b in zip(ours, expected, strict=True):
        assert relative(a, b) < tolerance


@pytest.mark.parametrize("masked", ["none", "random"])
@pytest.mark.parametrize("combine", ["sum", "union"])
@pytest.mark.parametrize("far", [20.0, 300.0, 1e5])
def test_queries_far_from_all_keys_keep_their_digits(far, combine, masked):
    """An exponent is a difference of two squares of distances, which float32 holds to far^2 / 2^24 only."""
    q, k, v, *orders = make(60, dtype=torch.float32)
    q[:, :, ::3, 0] += far
    options = dict(block_size=16, combine=combine, mask=make_mask(masked, 2, 60))
    exact = output_and_gradients(
        lambda *x: hept_attention(*x, *orders, impl="reference", **options), *(x.double() for x in (q, k, v))
    )
    ours = output_and_gradients(lambda *x: hept_attention(*x, *orders, **options), q, k, v)
    assert relative(ours[0], exact[0]) < 1e-5 and relative(ours[3], exact[3]) < 1e-5
    for a, b in zip(ours[1:3], exact[1:3], strict=True):       # each a sum of terms as long as the distance
        assert (a - b).abs().max() < 5e-6 * far * exact[3].abs().max()


def test_a_constant_value_stays():
    q, k, _, *orders = make(dtype=torch.float32)
    v = torch.full((2, 2, 13, 1), 2.5)
    out = hept_attention(q * 50, k * 50, v, *orders, block_size=4)
    torch.testing.assert_close(out, v, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("impl", ["fast", "reference"])
def test_low_precision(dtype, tolerance, impl):
    q, k, v, *orders = make()
    low = [x.to(dtype) for x in (q, k, v)]
    out = hept_attention(*low, *orders, block_size=4, impl=impl)
    assert out.dtype == dtype
    exact = hept_attention(*(x.double() for x in low), *orders, block_size=4)
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("masked", ["none", "random"])
@pytest.mark.parametrize(
    "dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-4), (torch.float16, 5e-3), (torch.bfloat16, 5e-2)]
)
def test_on_a_gpu(dtype, tolerance, masked):
    q, k, v, *orders = make(700, heads=8)
    mask = make_mask(masked, 2, 700)
    low = [x.to(dtype) for x in (q, k, v)]
    expected = output_and_gradients(lambda *x: hept_attention(*x, *orders, mask=mask), *(x.double() for x in low))
    on_gpu = [o.cuda() for o in orders]

    def run(*x):
        return hept_attention(*x, *on_gpu, mask=None if mask is None else mask.cuda())

    for a, b in zip(output_and_gradients(run, *(x.cuda() for x in low)), expected, strict=True):
        assert a.is_cuda and a.dtype == dtype
        assert relative(a.cpu(), b) < tolerance


@pytest.mark.parametrize("masked", MASKS)
def test_multiplicity_and_blocks(masked):
    *_, order_q, order_k = make()
    mask = make_mask(masked, 2, 13)
    assert torch.equal(multiplicity(order_q, order_k, 4, mask).double(), counts(order_q, order_k, 4, mask))
    blocks = block_of(order_q, 4, mask)
    for t, b, h in torch.cartesian_prod(torch.arange(3), torch.arange(2), torch.arange(2)).tolist():
        real = [i for i in order_q[t, b, h].tolist() if mask is None or mask[b, i]]
        expected = [real.index(i) // 4 if i in real else -1 for i in range(13)]
        assert blocks[t, b, h].tolist() == expected


@pytest.mark.parametrize("floor", [0.0, 1e-20])
def test_straightforward_form(floor):
    *qkv, order_q, order_k = make(12)
    expected = output_and_gradients(lambda *x: hept_attention(*x, order_q, order_k, block_size=4, floor=floor), *qkv)
    found = output_and_gradients(lambda *x: gathered_attention(*x, order_q, order_k, block_size=4, floor=floor), *qkv)
    assert_same(found, expected)


@pytest.mark.parametrize("masked", MASKS)
@pytest.mark.parametrize("block", [4, 100])
def test_info_counts_what_was_computed(masked, block):
    inputs = make()
    mask = make_mask(masked, 2, 13)
    out, info = hept_attention(*inputs, block_size=block, mask=mask, return_info=True)
    assert torch.equal(out, hept_attention(*inputs, block_size=block, mask=mask))
    pairs = counts(*inputs[3:], block, mask).sum().item()
    points = torch.full((2,), 13) if mask is None else mask.sum(1)
    assert info.nnz == pairs and info.flops == pairs * 2 * (3 + 2 + 4 + 1)
    assert info.density == pytest.approx(pairs / max(1, 2 * points.square().sum().item()))
    assert (info.pattern < 13).sum() == 2 * 3 * 2 * points.sum()


# --- what the functional form refuses


def changed(**changes):
    names = ("q", "k", "v", "order_q", "order_k")
    return hept_attention(**{**dict(zip(names, make(), strict=True)), **changes})


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_refuses_entries_that_are_not_finite(name, bad):
    tensor = dict(zip("qkv", make()[:3], strict=True))[name]
    tensor[1, 1, 5, 0] = bad
    with pytest.raises(ValueError, match=f"{name} holds NaN or infinite"):
        changed(**{name: tensor})


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_refuses_empty_sets_and_integers(name):
    tensor = dict(zip("qkv", make()[:3], strict=True))[name]
    with pytest.raises(ValueError, match=f"{name} has no points"):
        changed(**{name: tensor[:, :, :0]})
    with pytest.raises(TypeError, match=f"{name} must be a floating-point tensor, got torch.int64"):
        changed(**{name: tensor.long()})
    with pytest.raises(TypeError, match="q, k, v must share a dtype"):
        changed(**{name: tensor.float()})


@pytest.mark.parametrize("name", ["order_q", "order_k"])
def test_refuses_orders(name):
    order = dict(zip(("order_q", "order_k"), make()[3:], strict=True))[name]
    for bad in (order.clamp(min=1), order + 1, order - 1, torch.zeros_like(order)):
        with pytest.raises(ValueError, match=f"{name} must hold permutations of 0..12"):
            changed(**{name: bad})
    for bad in (order[..., :12], order[0], order[:, :1], order[:0]):
        with pytest.raises(ValueError, match=rf"{name} must have shape \(tables, 2, 2, 13\)"):
            changed(**{name: bad})
    for bad in (order.int(), order.double(), order.tolist()):
        with pytest.raises(TypeError, match=f"{name} must be an int64 tensor"):
            changed(**{name: bad})


def test_refuses_different_numbers_of_tables_and_of_points():
    q, k, v, order_q, order_k = make()
    with pytest.raises(ValueError, match="order_q and order_k must have one shape"):
        hept_attention(q, k, v, order_q[:2], order_k)
    with pytest.raises(ValueError, match="q and k must have one shape"):
        hept_attention(q[:, :, :5], k, v, order_q, order_k)
    with pytest.raises(ValueError, match="q, k, v do not fit"):
        hept_attention(q, k, v[:, :, :5], order_q, order_k)


@pytest.mark.parametrize("bad", [0, -1, 2.5, True, "4", None])
def test_refuses_block_sizes(bad):
    with pytest.raises(ValueError, match="block_size must be an integer >= 1"):
        changed(block_size=bad)
    with pytest.raises(ValueError, match="block_size must be an integer >= 1"):
        HEPTAttention(8, 2, coord_dims=2, block_size=bad)


@pytest.mark.parametrize("option, value", [("combine", "mean"), ("combine", None), ("impl", "slow"), ("floor", -1e-3)])
def test_refuses_options(option, value):
    with pytest.raises(ValueError, match=f"{option} must be"):
        changed(**{option: value})


def test_refuses_masks():
    for shape in ((13,), (1, 13), (2, 12), (2, 2, 13)):
        with pytest.raises(ValueError, match=r"mask must have shape \(2, 13\)"):
            changed(mask=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(TypeError, match="mask must be a boolean tensor, got torch.float32"):
        changed(mask=torch.ones(2, 13))


# --- the operator


def operands(masked):
    q, k, v, *orders = make(dtype=torch.float32)
    rows = [x.flatten(0, 1).requires_grad_() for x in (q, k, v)]
    real = torch.rand(len(rows[0]), q.shape[2], generator=source(3)) < 0.7 if masked else None
    return *rows, *(order.flatten(1, 2) for order in orders), real, 0.0, False, False, 4


@pytest.mark.parametrize("masked", [False, True])
def test_the_operator_is_one_for_torch(masked):
    """Schema, shapes without values, gradient, and tracing with sizes that change, by torch's own check."""
    torch.library.opcheck(attention._operator, operands(masked))


def test_the_operator_refuses_what_is_no_permutation():
    q, k, v, order, _, real, *options = operands(False)
    with pytest.raises(ValueError, match="permutations"):
        attention._operator(q, k, v, order, order + 1, real, 0.0, True, *options[2:])


@pytest.mark.parametrize("cases", [forward_cases, backward_cases])
def test_forms_of_the_speed_table_agree(cases):
    assert max(contest("blocks", cases(300)).errors().values()) < 1e-5
