"""Dense attention against loops over pairs written out, its masks, its merging, and what it refuses."""

import math
import weakref
from functools import partial

import pytest
import torch

from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from sparseattn.core.attention import (
    attention_logits,
    check_dtype,
    check_mask,
    check_points,
    check_values,
    dense_attention,
    edge_attention,
    edge_products,
    fused_attention,
    masked_mean,
    masked_softmax,
    merge_attention,
    straight_through_presence,
)

KERNELS = ("softmax", "gaussian")


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def draw_qkv(b=2, h=2, n=5, m=7, d=3, e=4, seed=0, dtype=torch.float64):
    return [draw(b, h, *size, seed=seed + i, dtype=dtype) for i, size in enumerate(((n, d), (m, d), (m, e)))]


def weight(x, y, kernel, scale):
    """Unnormalised weight of one pair."""
    if kernel == "softmax":
        return ((x * y).sum() * (scale or 1 / math.sqrt(len(x)))).exp()
    return (-0.5 * (scale or 1.0) * (x - y).square().sum()).exp()


def literal(q, k, v, kernel="softmax", scale=None, attend=lambda b, h, i, j: True):
    """Weighted mean over the keys each query attends, one pair at a time."""
    rows = []
    for b, h, i in torch.cartesian_prod(*(torch.arange(s) for s in q.shape[:3])).tolist():
        keys = [j for j in range(k.shape[2]) if attend(b, h, i, j)]
        weights = [weight(q[b, h, i], k[b, h, j], kernel, scale) for j in keys]
        rows.append(
            sum((w * v[b, h, j] for w, j in zip(weights, keys, strict=True)), v.new_zeros(v.shape[-1]))
            / (sum(weights) or 1)
        )
    return torch.stack(rows).view(*q.shape[:3], -1)


def output_and_gradients(function, *leaves):
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out.square().sum() + out.sum(), leaves)


def assert_same(ours, theirs, tolerance=1e-12):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("n, m", [(1, 1), (2, 2), (5, 7), (1, 6), (6, 1)])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_equals_the_loop_with_gradients(kernel, n, m, scale):
    qkv = draw_qkv(n=n, m=m)
    assert_same(
        output_and_gradients(lambda *x: dense_attention(*x, kernel=kernel, scale=scale), *qkv),
        output_and_gradients(lambda *x: literal(*x, kernel, scale), *qkv),
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("per_head", [False, True])
def test_pattern_equals_the_loop_with_gradients(kernel, per_head):
    qkv = draw_qkv()
    pattern = draw(*((2, 2) if per_head else (1, 1)), 5, 7, seed=9) > 0
    pattern[0, 0, 3] = False  # a query that attends nothing
    whole = pattern.expand(2, 2, 5, 7)
    assert_same(
        output_and_gradients(lambda *x: dense_attention(*x, kernel=kernel, pattern=pattern), *qkv),
        output_and_gradients(lambda *x: literal(*x, kernel, attend=lambda *pair: bool(whole[pair])), *qkv),
    )


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("real", [[0, 2, 3], [4], []], ids=["some", "one", "none"])
def test_mask_equals_the_loop_with_gradients(kernel, real):
    q, k, v = draw_qkv(n=5, m=5)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1] = torch.tensor([i in real for i in range(5)])
    result = output_and_gradients(lambda *x: dense_attention(*x, kernel=kernel, mask=mask), q, k, v)

    def attend(b, h, i, j):
        return bool(mask[b, i] and mask[b, j])

    assert_same(result, output_and_gradients(lambda *x: literal(*x, kernel, attend=attend), q, k, v))
    assert not result[0][1][:, ~mask[1]].any()


@pytest.mark.parametrize("kernel", KERNELS)
def test_mask_with_fewer_queries_hides_keys_only(kernel):
    q, k, v = draw_qkv(n=3, m=5)
    mask = torch.tensor([[1, 0, 1, 1, 0], [0, 0, 0, 0, 1]]).bool()
    expected = literal(q, k, v, kernel, attend=lambda b, h, i, j: bool(mask[b, j]))
    assert_same([dense_attention(q, k, v, kernel=kernel, mask=mask)], [expected])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("garbage", [1e300, -7.0, math.inf, math.nan])
def test_masked_points_change_nothing(kernel, garbage):
    qkv = draw_qkv(n=6, m=6)
    mask = torch.tensor([[1, 1, 0, 1, 0, 1], [0, 0, 1, 0, 0, 0]]).bool()
    changed = [x.masked_fill(~mask[:, None, :, None], garbage) for x in qkv]

    def function(*x):
        return dense_attention(*x, kernel=kernel, mask=mask)

    for a, b in zip(output_and_gradients(function, *qkv), output_and_gradients(function, *changed), strict=True):
        assert torch.equal(a, b)


def test_softmax_of_nothing_has_no_nan_on_the_way():
    logits = torch.randn(3, 4, requires_grad=True)
    allowed = torch.tensor([[True] * 4, [False] * 4, [True, False, True, False]])
    with torch.autograd.detect_anomaly(check_nan=True):
        weights = masked_softmax(logits, allowed)
        weights.square().sum().backward()
    assert torch.equal(weights.sum(1).round(), torch.tensor([1.0, 0.0, 1.0])) and not logits.grad[~allowed].any()


def test_float64_points_are_named_under_autocast_too():
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(TypeError, match="x must have the dtype of weight"):
        check_dtype(torch.zeros(2, dtype=torch.float64), torch.zeros(2, 2))


def test_softmax_equals_torch():
    q, k, v = draw_qkv()
    pattern = torch.ones(5, 7).tril(2).bool()
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=pattern)
    assert_same([dense_attention(q, k, v, pattern=pattern)], [theirs])


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradcheck(kernel):
    qkv = [x.requires_grad_() for x in draw_qkv(1, 1, 3, 3, 2, 2)]
    mask = torch.tensor([[True, False, True]])
    assert torch.autograd.gradcheck(lambda *x: dense_attention(*x, kernel=kernel, mask=mask), qkv)


@pytest.mark.parametrize("kernel", KERNELS)
def test_permuted_points_give_permuted_outputs(kernel):
    q, k, v = draw_qkv(n=7, m=7)
    p, mask = torch.randperm(7, generator=torch.Generator().manual_seed(1)), draw(2, 7, seed=5) > -0.5
    out = dense_attention(q, k, v, kernel=kernel, mask=mask)
    moved = dense_attention(q[:, :, p], k[:, :, p], v[:, :, p], kernel=kernel, mask=mask[:, p])
    assert_same([moved], [out[:, :, p]])


@pytest.mark.parametrize("kernel", KERNELS)
def test_strides_do_not_matter(kernel):
    qkv = draw_qkv()
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in qkv]
    assert not any(x.is_contiguous() for x in strided)
    assert_same([dense_attention(*strided, kernel=kernel)], [dense_attention(*qkv, kernel=kernel)])


@pytest.mark.parametrize("shift", [0.0, 1e3, 1e4])
def test_float32_far_from_the_origin(shift):
    """Differences are taken before squares, so a shift costs nothing but the rounding of the input."""
    q, k, v = (x.float() for x in draw_qkv(n=50, m=60, d=6))
    q, k = q + shift, k + shift
    exact = dense_attention(q.double(), k.double(), v.double(), kernel="gaussian")
    error = (dense_attention(q, k, v, kernel="gaussian").double() - exact).norm() / exact.norm()
    assert error <= 2e-6


def test_weights_that_underflow_are_normalised():
    q, k, v = draw_qkv(n=4, m=6)
    out = output_and_gradients(lambda *x: dense_attention(*x, kernel="gaussian"), q + 1e3, k, v)
    assert all(x.isfinite().all() for x in out)
    nearest = ((q + 1e3)[..., :, None, :] - k[..., None, :, :]).norm(dim=-1).argmin(-1)
    assert_same([out[0]], [v.gather(2, nearest[..., None].expand_as(out[0]))], 1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 2e-3), (torch.bfloat16, 2e-2), (torch.float32, 1e-5)])
def test_dtype_in_is_dtype_out(kernel, dtype, tolerance):
    qkv = [x.to(dtype) for x in draw_qkv()]
    out = dense_attention(*qkv, kernel=kernel)
    assert out.dtype == dtype
    exact = dense_attention(*(x.double() for x in qkv), kernel=kernel)
    torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_merged_parts_equal_the_whole(parts):
    q, k, v = draw_qkv()
    cuts = list(zip(k.tensor_split(parts, 2), v.tensor_split(parts, 2), strict=True))
    outputs = torch.stack([dense_attention(q, a, b) for a, b in cuts])
    log_weights = torch.stack([attention_logits(q, a).logsumexp(-1) for a, _ in cuts])
    assert_same([merge_attention(outputs, log_weights)], [dense_attention(q, k, v)])


def test_merging_with_parts_without_keys():
    outputs, log_weights = draw(2, 3, 4), torch.tensor([[0.0, -math.inf, -math.inf], [-math.inf, 5.0, -math.inf]])
    merged = merge_attention(outputs, log_weights.double())
    assert torch.equal(merged, torch.stack([outputs[0, 0], outputs[1, 1], torch.zeros(4)]))


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_refuses_entries_that_are_not_finite(name, bad):
    qkv = dict(zip("qkv", draw_qkv(), strict=True))
    qkv[name][1, 0, 2, 1] = bad
    with pytest.raises(ValueError, match=f"{name} holds NaN or infinite"):
        dense_attention(*qkv.values())


def test_large_finite_entries_are_not_refused():
    """Their sum overflows, the entries do not."""
    check_points("q", torch.full((1, 1, 4, 4), 3e38), 4)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_refuses_empty_sets_and_integers(name):
    qkv = dict(zip("qkv", draw_qkv(), strict=True))
    with pytest.raises(ValueError, match=f"{name} has no points"):
        dense_attention(**{**qkv, name: qkv[name][:, :, :0]})
    with pytest.raises(ValueError, match=f"{name} must have 4 dimensions"):
        dense_attention(**{**qkv, name: qkv[name][0]})
    with pytest.raises(TypeError, match=f"{name} must be a floating-point tensor, got torch.int64"):
        dense_attention(**{**qkv, name: qkv[name].long()})
    with pytest.raises(TypeError, match=f"{name} must be a floating-point tensor, got list"):
        dense_attention(**{**qkv, name: [1.0]})


def test_refuses_tensors_that_do_not_fit():
    q, k, v = draw_qkv()
    for other in ((q[:1], k, v), (q[:, :1], k, v), (q[..., :2], k, v), (q, k[:, :, :3], v)):
        with pytest.raises(ValueError, match="q, k, v do not fit"):
            dense_attention(*other)
    with pytest.raises(TypeError, match="q, k, v must share a dtype"):
        dense_attention(q, k.float(), v)


@pytest.mark.parametrize("mask", [torch.ones(2, 6), [True] * 6, "all"], ids=["float", "list", "text"])
def test_refuses_a_mask_that_is_not_boolean(mask):
    q, k, v = draw_qkv(n=6, m=6)
    with pytest.raises(TypeError, match="mask must be a boolean tensor"):
        dense_attention(q, k, v, mask=mask)


@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 5), (2, 6, 1)])
def test_refuses_a_mask_of_the_wrong_shape(shape):
    q, k, v = draw_qkv(n=6, m=6)
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 6\)"):
        dense_attention(q, k, v, mask=torch.ones(shape, dtype=torch.bool))
    with pytest.raises(ValueError, match="mask must have shape"):
        check_mask(torch.ones(shape, dtype=torch.bool), 2, 6)


def test_refuses_a_pattern_that_is_not_boolean():
    with pytest.raises(TypeError, match="pattern"):
        dense_attention(*draw_qkv(), pattern=torch.ones(5, 7))


def test_refuses_an_unknown_kernel():
    with pytest.raises(ValueError, match="kernel is 'cosine'"):
        dense_attention(*draw_qkv(), kernel="cosine")


def test_refuses_an_empty_batch_and_patterns_that_do_not_fit():
    x = torch.randn(2, 1, 5, 3)
    with pytest.raises(ValueError, match="q"):
        dense_attention(x[:0], x[:0], x[:0])
    with pytest.raises((TypeError, ValueError), match="pattern"):
        dense_attention(x, x, x, pattern=torch.ones(4, 5, dtype=torch.bool))
    with pytest.raises((TypeError, ValueError), match="pattern"):
        dense_attention(x, x, x, pattern=torch.ones(5, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_a_query_without_edges_gets_zero_where_all_pairs_are_cheaper(dtype, grad, kernel):
    q, k, v = (torch.randn(1, 1, 6, 8, dtype=dtype, requires_grad=grad) for _ in range(3))
    full = torch.ones(1, 6, 6, dtype=torch.bool)
    full[:, 3] = False
    with sdpa_kernel([kernel, SDPBackend.MATH]):
        out = edge_attention(q, k, v, full.nonzero().T)
    assert out[0, 0, 3].eq(0).all() and out[0, 0, [0, 1, 2, 4, 5]].ne(0).all()
    if grad:
        out.square().sum().backward()
        assert q.grad[0, 0, 3].eq(0).all() and all(x.grad.isfinite().all() for x in (q, k, v))


def derivatives(attend, *x):
    "Gradients of a number made of the output, those that can be differentiated again, and second ones."
    leaves = [part.clone().requires_grad_() for part in x]
    plain = torch.autograd.grad(attend(*leaves).sin().sum(), leaves)
    first = torch.autograd.grad(attend(*leaves).sin().sum(), leaves, create_graph=True)
    return *plain, *first, *torch.autograd.grad(sum(part.sin().sum() for part in first), leaves)


@pytest.mark.parametrize("allowed", [None, torch.tensor([[True, False, True, True, False, True, True]])])
def test_fused_attention_has_derivatives_of_any_order(allowed):
    q, k, v = draw_qkv()
    ours = derivatives(lambda *x: fused_attention(*x, allowed, scale=0.3), q, k, v)
    certain = derivatives(lambda *x: dense_attention(*x, pattern=allowed, scale=0.3), q, k, v)
    torch.testing.assert_close(ours, certain, rtol=1e-11, atol=1e-12)
    one = draw_qkv(n=7, e=3)[1]
    ours, certain = (derivatives(lambda x, f=f: f(x, x, x), one) for f in (fused_attention, dense_attention))
    torch.testing.assert_close(ours, certain, rtol=1e-11, atol=1e-12)


def test_fused_attention_knows_what_needs_no_gradient_and_is_backpropagated_twice():
    q, k, v = draw_qkv()
    leaf = q.clone().requires_grad_()
    out = fused_attention(leaf, k, v).square().sum()
    once, twice = (torch.autograd.grad(out, leaf, retain_graph=True) for _ in range(2))
    torch.testing.assert_close(once, twice, rtol=0, atol=0)


def test_fused_attention_under_functional_transforms():
    q, k, v = draw_qkv()
    found = torch.func.grad(lambda q: fused_attention(q, k, v).square().sum())(q)
    expected, = torch.autograd.grad(dense_attention(q.requires_grad_(), k, v).square().sum(), q)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    each = torch.func.vmap(fused_attention)(q.detach()[None], k[None], v[None])[0]
    torch.testing.assert_close(each, fused_attention(q.detach(), k, v), rtol=1e-12, atol=1e-12)


def test_values_are_looked_at_where_wanted():
    bad = torch.full((1, 1, 2, 2), torch.nan)
    with pytest.raises(ValueError, match="q holds NaN"):
        dense_attention(bad, bad, bad)
    with check_values(False):
        assert dense_attention(bad, bad, bad).isnan().all()
        with check_values(True), pytest.raises(ValueError, match="q holds NaN"):
            dense_attention(bad, bad, bad)
        assert dense_attention(bad, bad, bad).isnan().all()
    with pytest.raises(ValueError, match="q holds NaN"):
        dense_attention(bad, bad, bad)
    check_values(False)
    assert dense_attention(bad, bad, bad).isnan().all()
    check_values(None)


def test_indices_that_leave_memory_are_refused_in_any_case():
    x = torch.zeros(1, 1, 3, 2)
    with check_values(False), pytest.raises(ValueError, match="the key must lie in 0..2"):
        edge_attention(x, x, x, torch.tensor([[0], [0], [3]]))


def test_no_values_no_look():
    x = torch.full((1, 1, 2, 2), torch.nan)
    assert dense_attention(*x.to("meta").expand(3, *x.shape)).is_meta
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert dense_attention(fake, fake, fake).shape == x.shape
    assert torch.func.grad(lambda q: dense_attention(q, q, q).sum())(x).isnan().any()
    assert torch.compile(dense_attention, fullgraph=True, backend="eager")(x, x, x).isnan().all()


def test_parts_that_do_not_fit_are_not_merged():
    with pytest.raises(ValueError, match="log_weights must have shape"):
        merge_attention(torch.rand(1, 1, 3, 2), torch.rand(2, 1, 3))


def test_squared_distances_have_a_second_derivative():
    q, k = (torch.randn(1, 1, n, 3, dtype=torch.float64, requires_grad=True) for n in (4, 5))
    logits = lambda q, k: attention_logits(q, k, kernel="gaussian")  # noqa: E731
    assert torch.autograd.gradcheck(logits, (q, k)) and torch.autograd.gradgradcheck(logits, (q, k))


def test_backward_frees_what_fused_attention_kept():
    class Kept:
        def __init__(self, x):
            self.x = x

    alive = weakref.WeakSet()

    def pack(x):
        kept = Kept(x)
        alive.add(kept)
        return kept

    q, k, v = (x.requires_grad_() for x in draw_qkv())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.x):
        out = fused_attention(q, k, v)
        loss = out.sin().sum()
    before = len(alive)
    loss.backward()
    assert before >= 4 and not alive and loss.grad_fn is not None


@pytest.mark.parametrize("op", ["mm", "_scaled_dot_product_flash_attention_for_cpu"])
def test_fused_attention_under_selective_checkpointing(op):
    wanted = getattr(torch.ops.aten, op).default

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op == wanted else CheckpointPolicy.PREFER_RECOMPUTE

    q, k, v = draw_qkv(dtype=torch.float32)
    found = []
    for again in (False, True):
        leaf = q.clone().requires_grad_()

        def run(x):
            return fused_attention(x.flatten(0, 2).mm(torch.eye(x.shape[-1])).view_as(x), k, v)

        options = dict(use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))
        out = checkpoint(run, leaf, **options) if again else run(leaf)
        found += torch.autograd.grad(out.sin().sum(), leaf)
    torch.testing.assert_close(*found)


def test_switch_of_values_is_set_again_and_takes_three_values():
    off = check_values(False)
    for _ in range(2):
        with off:
            assert check_values.on is False
        assert check_values.on is None
    for wrong in ("off", 0, 1.0, []):
        with pytest.raises(ValueError, match="on must be True, False or None"):
            check_values(wrong)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dense_attention_keeps_its_digits_under_autocast(dtype):
    q = 60 * draw_qkv(dtype=torch.float32)[0]
    with torch.autocast("cpu", dtype):
        found = dense_attention(q, q, q)
    torch.testing.assert_close(found, dense_attention(q, q, q), rtol=0, atol=0)


def test_edge_products_inside_transforms():
    a, b = (torch.randn(1, 2, 5, 3, dtype=torch.float64) for _ in range(2))
    edges = torch.tensor([[0, 1, 1], [0, 2, 4], [1, 3, 3]])
    weight = torch.arange(1.0, 4, dtype=torch.float64)
    for products in (edge_products, straight_through_presence):
        leaf = a.clone().requires_grad_()
        expected, = torch.autograd.grad((products(leaf, b, edges) * weight).sum(), leaf)
        found = torch.func.grad(lambda a, f=products: (f(a, b, edges) * weight).sum())(a)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_merging_leaves_out_what_an_empty_part_returns():
    outputs, weights = torch.ones(2, 5, 3), torch.zeros(2, 5)
    outputs[0, 2], weights[0, 2] = torch.nan, -torch.inf
    assert torch.equal(merge_attention(outputs, weights), torch.ones(5, 3))


def test_means_over_real_points():
    x, mask = draw(2, 5, 3), torch.tensor([[True, False, True, True, False], [False] * 5])
    expected = torch.stack([x[0, [0, 2, 3]].mean(0), torch.zeros(3, dtype=x.dtype)])
    torch.testing.assert_close(masked_mean(x.masked_fill(~mask[..., None], torch.nan), mask), expected)
    assert torch.equal(masked_mean(x, None), x.mean(1))
    assert masked_mean(torch.full((1, 4096, 1), 20.0).half(), torch.ones(1, 4096, dtype=torch.bool)).item() == 20


def test_a_query_without_keys_in_any_part_has_no_gradient():
    log_weights = torch.tensor([[-torch.inf, 0.0], [-torch.inf, 1.0]], requires_grad=True)
    out = merge_attention(torch.ones(2, 2, 3), log_weights)
    out.square().sum().backward()
    assert (out[0] == 0).all() and (log_weights.grad[:, 0] == 0).all() and log_weights.grad.isfinite().all()
