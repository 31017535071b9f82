"""The efficient transformers: each equals its equations, meets its limits, and ignores padding."""

import copy
import math
from itertools import pairwise

import pytest
import torch

from sparseattn.baselines.transformers import (
    attention_flops,
    iterative_inverse,
    linear_attention,
    linformer_attention,
    lsh_buckets,
    lsh_pattern,
    nystrom_attention,
    orthogonal_features,
    performer_attention,
    reformer_attention,
    segment_means,
    sliding_window_attention,
)
from sparseattn.core.attention import dense_attention
from sparseattn.core.patterns import window_pattern
from sparseattn.core.transformer import Encoder, make_attention

OPTIONS = {
    "linear": {},
    "performer": dict(features=12),
    "linformer": dict(max_length=30, rank=5),
    "nystrom": dict(landmarks=6, conv=5),
    "reformer": dict(chunk=4),
    "window": dict(width=3),
}
each = pytest.mark.parametrize("name", OPTIONS)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def inputs(b=2, h=2, n=30, d=6, e=6, dtype=torch.float64, seed=0):
    g = generator(seed)
    return [torch.randn(b, h, n, w, generator=g, dtype=torch.float64).to(dtype) for w in (d, d, e)]


def functions(n=30, h=2, d=6):
    """The functional forms with all their draws fixed: (q, k, v, mask) -> out."""
    g = generator(1)
    features, project = orthogonal_features(10, d, heads=h, generator=g), torch.randn(h, 5, n, generator=g)
    rotations, conv = torch.randn(h, 3, d, 4, generator=g), torch.randn(h, 5, generator=g)
    return {
        "linear": linear_attention,
        "performer": lambda *x, mask=None: performer_attention(*x, features=features, mask=mask),
        "linformer": lambda *x, mask=None: linformer_attention(*x, project_k=project, mask=mask),
        "nystrom": lambda *x, mask=None: nystrom_attention(*x, landmarks=6, mask=mask),
        "nystrom-conv": lambda *x, mask=None: nystrom_attention(*x, landmarks=6, conv=conv, mask=mask),
        "reformer": lambda q, k, v, mask=None: reformer_attention(q, v, rotations=rotations, chunk=4, mask=mask),
        "window": lambda *x, mask=None: sliding_window_attention(*x, width=3, mask=mask),
    }


each_function = pytest.mark.parametrize("name", functions())


def with_gradients(function, tensors):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    weight = torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)
    return out, *torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)


def assert_same(f, g, tensors, tolerance=1e-10):
    for a, b in zip(with_gradients(f, tensors), with_gradients(g, tensors), strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---- each against its equations or a limit


@pytest.mark.parametrize("n", [1, 2, 30])
@pytest.mark.parametrize("e", [1, 6])
def test_linear_equals_its_quadratic_form(n, e):
    def quadratic(q, k, v):
        a, b = (torch.nn.functional.elu(x) + 1 for x in (q, k))
        weights = torch.einsum("bhid,bhjd->bhij", a, b)
        return weights / weights.sum(-1, keepdim=True) @ v

    assert_same(linear_attention, quadratic, inputs(n=n, e=e))


def test_linear_with_very_negative_scores():
    q, k, v = inputs(dtype=torch.float32)
    far = linear_attention(q - 40, k, v)
    exact = linear_attention((q - 40).double(), k.double(), v.double())
    torch.testing.assert_close(far, exact.float(), rtol=1e-4, atol=1e-5)
    assert not linear_attention(q - 400, k, v).any()  # below what float32 can say: 0 and not NaN


def test_features_are_orthogonal_in_groups_and_gaussian():
    w = orthogonal_features(20, 8, heads=2000, generator=generator())
    assert w.shape == (2000, 20, 8) and w.dtype == torch.float32
    gram = w @ w.transpose(-1, -2)
    for rows in (slice(0, 8), slice(8, 16), slice(16, 20)):
        part = gram[:, rows, rows]
        assert (part - torch.diag_embed(part.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-3
    # mean 0, covariance I of each row: 5 standard errors of 40,000 or 2000 values; false alarm < 1e-4 in all
    assert w.mean((0, 1)).abs().max() < 5 * 40_000**-0.5
    assert (w[:, 0].T @ w[:, 0] / 2000 - torch.eye(8)).abs().max() < 5 * (2 / 2000) ** 0.5
    squares = w.square().sum(-1).mean(0)
    assert ((squares - 8).abs() < 5 * (16 / 2000) ** 0.5).all()


def test_performer_equals_its_features_written_out():
    q, k, v = inputs()
    w = orthogonal_features(10, 6, heads=2, generator=generator()).double()

    def plain(q, k, v):
        q, k = q * 6**-0.25, k * 6**-0.25
        a, b = ((x @ w.transpose(-1, -2) - x.square().sum(-1, keepdim=True) / 2).exp() for x in (q, k))
        weights = a @ b.transpose(-1, -2)
        return weights / weights.sum(-1, keepdim=True) @ v

    assert_same(lambda *x: performer_attention(*x, features=w), plain, (q, k, v))


def test_performer_is_unbiased_for_the_kernel():
    """5 standard errors of 20,000 draws; false alarm 6e-7."""
    pair = torch.randn(2, 4, generator=generator(), dtype=torch.float64) / 3
    w = orthogonal_features(4, 4, heads=20_000, generator=generator(1)).double()
    found = (w @ pair.T - pair.square().sum(1) / 2).exp().prod(-1).mean(-1)
    assert abs(found.mean() - (pair[0] @ pair[1]).exp()) < 5 * found.std() / 20_000**0.5


@pytest.mark.parametrize("factor", [1, 10, 1000])
def test_performer_neither_overflows_nor_vanishes(factor):
    q, k, v = inputs(dtype=torch.float32)
    w = orthogonal_features(10, 6, generator=generator())
    found = with_gradients(lambda *x: performer_attention(*x, features=w), (factor * q, factor * k, v))
    assert all(x.isfinite().all() for x in found)
    out = performer_attention(factor * q, factor * k, torch.ones_like(v), features=w)
    torch.testing.assert_close(out, torch.ones_like(v), rtol=1e-5, atol=1e-5)


def test_linformer_with_identity_is_softmax():
    eye = torch.eye(30, dtype=torch.float64)[None]
    assert_same(lambda *x: linformer_attention(*x, project_k=eye), dense_attention, inputs())


def test_linformer_equals_its_equations():
    q, k, v = inputs()
    e, f = torch.randn(2, 2, 5, 40, generator=generator(2), dtype=torch.float64)

    def plain(q, k, v):
        keys, values = (torch.einsum("hmn,bhnd->bhmd", p[..., :30], x) for p, x in ((e, k), (f, v)))
        return dense_attention(q, keys, values)

    assert_same(lambda *x: linformer_attention(*x, project_k=e, project_v=f), plain, (q, k, v))


def test_nystrom_with_all_landmarks_is_softmax():
    q, k, v = (2 * x for x in inputs(n=20))
    assert_same(lambda *x: nystrom_attention(*x, landmarks=20, steps=40), dense_attention, (q, k, v), 1e-6)


def test_nystrom_equals_its_equations():
    q, k, v = inputs(n=30)
    filters = torch.randn(2, 5, generator=generator(), dtype=torch.float64)

    def plain(q, k, v):
        to, of = (x.unflatten(2, (6, 5)).mean(3) for x in (q, k))
        f, a, b = ((x @ y.transpose(-1, -2) * 6**-0.5).softmax(-1) for x, y in ((q, of), (to, of), (to, k)))
        z = a.transpose(-1, -2) / (a.sum(-2).amax(-1) * a.sum(-1).amax(-1))[..., None, None]
        eye = torch.eye(6, dtype=torch.float64)
        for _ in range(6):
            z = z @ (13 * eye - a @ z @ (15 * eye - a @ z @ (7 * eye - a @ z))) / 4
        padded = torch.nn.functional.pad(v, (0, 0, 2, 2))
        conv = sum(filters[None, :, i, None, None] * padded[:, :, i : i + 30] for i in range(5))
        return f @ z @ b @ v + conv

    assert_same(lambda *x: nystrom_attention(*x, landmarks=6, conv=filters), plain, (q, k, v))
    alone = nystrom_attention(q, k, v, landmarks=6, conv=filters) - nystrom_attention(q, k, v, landmarks=6)
    torch.testing.assert_close(nystrom_attention(q, k, v, landmarks=0, conv=filters), alone)


@pytest.mark.parametrize("n, count", [(7, 3), (3, 7), (1, 1), (12, 4)])
def test_segment_means(n, count):
    x = torch.randn(1, 1, n, 2, generator=generator(), dtype=torch.float64)
    means, filled = segment_means(x, count)
    used = min(n, count)
    assert filled.tolist() == [[i < used for i in range(count)]]
    bounds = [-(-i * n // used) for i in range(used + 1)]
    lengths = [b - a for a, b in pairwise(bounds)]
    assert max(lengths) - min(lengths) <= 1
    for i in range(used):
        torch.testing.assert_close(means[0, 0, i], x[0, 0, bounds[i] : bounds[i + 1]].mean(0))
    assert not means[0, 0, used:].any()


def test_inverse_has_a_residual_of_third_order():
    a = (torch.randn(3, 9, 9, generator=generator(), dtype=torch.float64) + 3 * torch.eye(9)).softmax(-1)
    residual = [torch.eye(9) - a @ iterative_inverse(a, steps) for steps in range(8)]
    for old, new in pairwise(residual):
        torch.testing.assert_close(new, (3 * old @ old @ old + old @ old @ old @ old) / 4, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(iterative_inverse(a, 25), torch.linalg.inv(a), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("n, rounds, chunk, buckets", [(30, 1, 4, 6), (30, 3, 4, None), (31, 2, 7, 4), (5, 2, 9, 2),
                                                       (1, 2, 4, None), (16, 4, 4, 8), (30, 2, 30, 1)])
def test_reformer_fast_equals_reference(n, rounds, chunk, buckets, masked, across):
    q, _, v = inputs(n=n, e=3)
    mask = torch.rand(2, n, generator=generator(5)) < 0.7 if masked else None
    rotations = torch.randn(2, rounds, 6, 4, generator=generator(1))
    options = dict(rotations=rotations, chunk=chunk, buckets=buckets, mask=mask, across_buckets=across)
    assert_same(
        lambda *x: reformer_attention(*x, **options), lambda *x: reformer_attention(*x, **options, impl="reference"),
        (q, v))


@pytest.mark.parametrize("across", [False, True])
def test_reformer_pattern_by_brute_force(across):
    q, _, _ = inputs(b=1, h=1, n=25)
    rotations, chunk, buckets = torch.randn(1, 2, 6, 2, generator=generator(1)), 4, 4
    label = lsh_buckets(q, rotations, buckets)[0, 0]
    expected = torch.zeros(25, 25, dtype=torch.bool)
    for r in range(2):
        order = sorted(range(25), key=lambda i: (int(label[r, i]), i))
        chunk_of = {i: place // chunk for place, i in enumerate(order)}
        for i in range(25):
            for j in range(25):
                if i != j and (across or label[r, i] == label[r, j]) and chunk_of[i] - chunk_of[j] in (0, 1):
                    expected[i, j] = True
    alone = ~expected.any(1)
    expected[alone, alone.nonzero().flatten()] = True
    found = lsh_pattern(q, rotations=rotations, chunk=chunk, buckets=buckets, across_buckets=across)[0, 0]
    assert torch.equal(found, expected)


def test_reformer_with_one_bucket_is_softmax_without_self():
    q, _, v = inputs()
    keys = torch.nn.functional.normalize(q, dim=-1) * 6**0.5
    others = ~torch.eye(30, dtype=torch.bool)
    found = reformer_attention(q, v, rotations=torch.randn(1, 2, 6, 1), chunk=30, buckets=1)
    torch.testing.assert_close(found, dense_attention(q, keys, v, pattern=others), rtol=1e-10, atol=1e-10)


def test_reformer_attends_itself_only_when_alone():
    x = torch.eye(2, dtype=torch.float64)[None, None]
    rotations = torch.eye(2)[None, None]  # the two points in buckets of their own
    v = torch.randn(1, 1, 2, 3, generator=generator(), dtype=torch.float64)
    torch.testing.assert_close(reformer_attention(x, v, rotations=rotations, chunk=2, buckets=4), v, rtol=0, atol=1e-12)
    together = reformer_attention(x, v, rotations=rotations, chunk=2, buckets=1)
    torch.testing.assert_close(together, v.flip(2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1.0, 1e3, 3e5])
def test_reformer_never_counts_itself_among_others_at_any_size(size):
    q, _, v = inputs(n=40)
    q = size * torch.nn.functional.normalize(q, dim=-1)
    rotations = torch.randn(1, 2, 6, 4, generator=generator(1))
    options = dict(rotations=rotations, chunk=8)
    found, expected = (reformer_attention(q, v, impl=impl, **options) for impl in ("fast", "reference"))
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def test_two_buckets_collide_by_the_law_of_the_angle():
    """5 standard errors of 20,000 hashes at four angles; false alarm < 3e-6."""
    angles = torch.tensor([0.2, 1.0, 1.7, 2.8])
    first, second = torch.zeros(2, 4, 5)
    first[:, 0], second[:, 0], second[:, 1] = 1, angles.cos(), angles.sin()
    rotations = torch.randn(1, 20_000, 5, 1, generator=generator())
    a, b = (lsh_buckets(x[None, None], rotations, 2) for x in (first, second))
    share, law = (a == b)[0, 0].float().mean(0), 1 - angles / math.pi
    assert ((share - law).abs() < 5 * (law * (1 - law) / 20_000).sqrt()).all()


def test_buckets_are_the_largest_signed_component():
    x = torch.randn(2, 1, 40, 6, generator=generator())
    rotations = torch.randn(1, 3, 6, 4, generator=generator(1))
    along = torch.einsum("bhnd,hrdw->bhrnw", x, rotations)
    assert torch.equal(lsh_buckets(x, rotations, 8), torch.cat([along, -along], -1).argmax(-1))
    found = lsh_buckets(x, rotations, torch.tensor([1, 4]))
    assert not found[0].any()
    fewer = torch.cat([along, -along], -1)[1, ..., [0, 1, 4, 5]].argmax(-1)
    assert torch.equal(found[1], torch.tensor([0, 1, 4, 5])[fewer])


@pytest.mark.parametrize("n, width", [(30, 3), (31, 8), (30, 15), (30, 100), (5, 1), (1, 2)])
@pytest.mark.parametrize("masked", [False, True])
def test_window_equals_its_pattern(n, width, masked):
    mask = torch.rand(2, n, generator=generator(5)) < 0.7 if masked else None
    pattern = window_pattern(n, width)
    assert_same(lambda *x: sliding_window_attention(*x, width=width, mask=mask),
                lambda *x: dense_attention(*x, mask=mask, pattern=pattern), inputs(n=n))


# ---- padding


@each_function
@pytest.mark.parametrize("garbage", [1e30, math.nan], ids=["huge", "nan"])
def test_masked_points_change_nothing(name, garbage):
    tensors, function = inputs(), functions()[name]
    mask = torch.rand(2, 30, generator=generator(2)) < 0.6
    other = [x.masked_fill(~mask[:, None, :, None], garbage) for x in tensors]
    expected = with_gradients(lambda *x: function(*x, mask=mask), tensors)
    found = with_gradients(lambda *x: function(*x, mask=mask), other)
    assert not expected[0][~mask[:, None].expand(2, 2, 30)].any()
    for a, b in zip(expected, found, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@each_function
def test_padding_at_the_end_is_neutral(name):
    tensors, function = inputs(), functions()[name]
    mask = torch.arange(30) < torch.tensor([[30], [17]])
    alone = function(*(x[1:, :, :17] for x in tensors))
    torch.testing.assert_close(function(*tensors, mask=mask)[1:, :, :17], alone, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ["linear", "performer", "nystrom", "reformer"])
def test_padding_anywhere_is_neutral_without_places(name):
    tensors, function = inputs(b=1), functions()[name]
    mask = torch.rand(1, 30, generator=generator(2)) < 0.6
    alone = function(*(x[:, :, mask[0]] for x in tensors))
    torch.testing.assert_close(function(*tensors, mask=mask)[:, :, mask[0]], alone, rtol=1e-10, atol=1e-10)


@each_function
def test_a_set_without_real_points_returns_zero(name):
    mask = torch.arange(30) < torch.tensor([[30], [0]])
    found = with_gradients(lambda *x: functions()[name](*x, mask=mask), inputs())
    assert not found[0][1].any() and all(x is None or x.isfinite().all() for x in found)


@each_function
def test_one_point_gets_its_own_value(name):
    q, k, v = inputs(n=1)
    out = functions()[name](q, k, v)
    if name in ("linear", "performer", "nystrom", "reformer", "window"):
        torch.testing.assert_close(out, v, rtol=1e-10, atol=1e-10)
    assert out.isfinite().all()


# ---- modules


@each
def test_module_equals_its_function(name):
    torch.manual_seed(0)
    module = make_attention(name, 12, 2, **OPTIONS[name]).double()
    x = torch.randn(2, 30, 12, dtype=torch.float64)
    q, v = (f(x).view(2, 30, 2, 6).transpose(1, 2) for f in (module.query, module.value))
    k = q if module.key is None else module.key(x).view(2, 30, 2, 6).transpose(1, 2)
    heads = {
        "linear": lambda: linear_attention(q, k, v),
        "performer": lambda: performer_attention(q, k, v, features=module.features),
        "linformer": lambda: linformer_attention(q, k, v, project_k=module.project_k),
        "nystrom": lambda: nystrom_attention(q, k, v, landmarks=6, conv=module.conv),
        "reformer": lambda: reformer_attention(q, v, rotations=module.rotations, chunk=4),
        "window": lambda: sliding_window_attention(q, k, v, width=3),
    }[name]()
    expected = module.out(heads.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(x), expected, rtol=1e-12, atol=1e-12)


@each
def test_encoder_ignores_masked_points(name):
    torch.manual_seed(0)
    x, mask = torch.randn(2, 20, 8), torch.arange(20) < torch.tensor([[20], [13]])
    encoder = Encoder(8, 2, 2, attention=name, **OPTIONS[name])
    out = encoder(x, mask=mask)
    assert torch.equal(out, encoder(x.masked_fill(~mask[..., None], math.nan), mask=mask))
    assert not out[~mask].any()
    torch.testing.assert_close(out[1:, :13], encoder(x[1:, :13]), rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())


@each
def test_info(name):
    x, mask = torch.randn(2, 20, 8), torch.arange(20) < torch.tensor([[20], [13]])
    module = make_attention(name, 8, 2, head_dim=5, **OPTIONS[name])
    out, info = module(x, mask=mask, return_info=True)
    assert torch.equal(out, module(x, mask=mask)) and info.pattern is None
    assert info.flops == 2 * sum(attention_flops(name, n, 5, **module._size()) for n in (20, 13))
    if name == "window":
        pairs = window_pattern(20, 3) & mask[:, :, None] & mask[:, None]
        assert info.nnz == 2 * pairs.sum() and info.density == pytest.approx(info.nnz / (2 * (400 + 169)))
    elif name == "reformer":
        assert 0 < info.nnz <= 2 * 2 * (400 + 169)
    else:
        assert info.nnz == info.density == 0


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_in_is_dtype_out(name, dtype):
    out = Encoder(8, 1, 2, attention=name, **OPTIONS[name]).to(dtype)(torch.randn(2, 20, 8, dtype=dtype))
    assert out.dtype == dtype and out.isfinite().all()


@each
def test_autocast(name):
    torch.manual_seed(0)
    module, x = make_attention(name, 8, 2, **OPTIONS[name]), torch.randn(2, 20, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    if name != "reformer":  # a rounded point may change its bucket
        torch.testing.assert_close(out.float(), module(x), rtol=0.1, atol=0.1)


@each_function
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_functions_widen_under_autocast_too(name, dtype):
    function, tensors = functions()[name], inputs(dtype=torch.float32)
    with torch.autocast("cpu", dtype):
        out = function(*tensors)
    assert out.equal(function(*tensors))


def test_gradient_of_linear_attention_at_zero():
    """elu + 1 has the slope 1 at 0, where rows of zeros lie."""
    tensors = [x.index_fill(2, torch.tensor([3]), 0.0).requires_grad_() for x in inputs(n=7)]
    assert torch.autograd.gradcheck(linear_attention, tensors)


@each
def test_state_dict_and_deepcopy(name):
    x = torch.randn(2, 20, 8)
    first, second = (Encoder(8, 2, 2, attention=name, **OPTIONS[name]) for _ in range(2))
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(x), first(x)) and torch.equal(copy.deepcopy(first)(x), first(x))


@each
def test_compiles(name):
    torch.manual_seed(0)
    module, x = make_attention(name, 8, 2, **OPTIONS[name]), torch.randn(2, 20, 8)
    mask = torch.arange(20) < torch.tensor([[20], [13]])
    compiled = torch.compile(module, backend="eager")
    torch.testing.assert_close(compiled(x, mask=mask), module(x, mask=mask), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu(name, dtype):
    torch.manual_seed(0)
    module, x = make_attention(name, 8, 2, **OPTIONS[name]).to(dtype), torch.randn(2, 20, 8, dtype=dtype)
    mask = torch.arange(20) < torch.tensor([[20], [13]])
    expected = module(x, mask=mask)
    out, info = module.cuda()(x.cuda(), mask=mask.cuda(), return_info=True)
    assert out.dtype == dtype and out.is_cuda and info.flops
    out.sum().backward()
    if name != "reformer" or dtype == torch.float32:
        tolerance = 1e-4 if dtype == torch.float32 else 0.1
        torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["performer", "reformer"])
def test_draws_come_from_the_generator(name):
    first, second = (make_attention(name, 8, 2, generator=generator(7), **OPTIONS[name]) for _ in range(2))
    drawn = "features" if name == "performer" else "rotations"
    before = getattr(first, drawn).clone()
    assert torch.equal(before, getattr(second, drawn))
    first.redraw(generator(8))
    assert not torch.equal(before, getattr(first, drawn)) and getattr(first, drawn).shape == before.shape


# ---- flops


@pytest.mark.parametrize("name", ["dense", *OPTIONS])
@pytest.mark.parametrize("n, d", [(100, 16), (37, 4)])
def test_flops_agree_with_the_counter(name, n, d):
    from torch.utils.flop_counter import FlopCounterMode

    q, k, v = inputs(b=1, h=1, n=n, d=d, e=d, dtype=torch.float32)
    call = {
        "dense": lambda: dense_attention(q, k, v),
        "linear": lambda: linear_attention(q, k, v),
        "performer": lambda: performer_attention(q, k, v, features=torch.randn(1, 9, d)),
        "linformer": lambda: linformer_attention(q, k, v, project_k=torch.randn(1, 9, n)),
        "nystrom": lambda: nystrom_attention(q, k, v, landmarks=9, steps=3),
        "reformer": lambda: reformer_attention(q, v, rotations=torch.randn(1, 3, d, 4), chunk=7),
        "window": lambda: sliding_window_attention(q, k, v, width=5),
    }[name]
    with FlopCounterMode(display=False) as counter:
        call()
    expected = attention_flops(name, n, d, rank=9, steps=3, rounds=3, chunk=7, directions=4, width=5)
    assert counter.get_total_flops() == expected


# ---- bad input


def test_refuses_what_does_not_fit():
    q, k, v = inputs()
    rotations = torch.randn(1, 2, 6, 4)
    with pytest.raises(ValueError, match="q and k must have the same points, got 30 and 29"):
        linear_attention(q, k[:, :, 1:], v[:, :, 1:])
    with pytest.raises(ValueError, match="NaN"):
        linear_attention(q / 0, k, v)
    with pytest.raises(ValueError, match=r"features must have shape .* got \(3, 4, 6\)"):
        performer_attention(q, k, v, features=torch.randn(3, 4, 6))
    with pytest.raises(ValueError, match="project_k .* at least 30 columns"):
        linformer_attention(q, k, v, project_k=torch.randn(1, 5, 29))
    with pytest.raises(ValueError, match="landmarks must be an integer >= 1, got 0"):
        nystrom_attention(q, k, v, landmarks=0)
    with pytest.raises(ValueError, match="conv must have shape .* odd width"):
        nystrom_attention(q, k, v, landmarks=3, conv=torch.randn(2, 4))
    for buckets in (3, 10, 0, -2):
        with pytest.raises(ValueError, match="buckets must be"):
            reformer_attention(q, v, rotations=rotations, buckets=buckets)
    with pytest.raises(ValueError, match="rotations must have shape"):
        reformer_attention(q, v, rotations=rotations[..., :5, :])
    with pytest.raises(ValueError, match="impl must be"):
        reformer_attention(q, v, rotations=rotations, impl="quick")
    with pytest.raises(ValueError, match="width must be an integer >= 1"):
        sliding_window_attention(q, k, v, width=0)
    with pytest.raises(ValueError, match="name is 'sparkling'"):
        attention_flops("sparkling", 3, 3)


@pytest.mark.parametrize("name, options, message", [
    ("linformer", dict(max_length=0), "max_length"), ("linformer", dict(max_length=9, rank=0), "rank"),
    ("linformer", dict(max_length=9, share="all"), "share"), ("nystrom", dict(conv=4), "conv"),
    ("nystrom", dict(landmarks=0), "landmarks"), ("performer", dict(features=0), "features"),
    ("reformer", dict(rounds=0), "rounds"), ("reformer", dict(chunk=0), "chunk"), ("window", dict(width=0), "width"),
    ("linear", dict(head_dim=0), "head_dim"),
])
def test_modules_refuse_options_out_of_range(name, options, message):
    with pytest.raises(ValueError, match=message):
        make_attention(name, 8, 2, **options)


def test_linformer_refuses_longer_sets():
    with pytest.raises(ValueError, match="at most max_length = 30 points, got 31"):
        make_attention("linformer", 8, 2, **OPTIONS["linformer"])(torch.randn(1, 31, 8))


def test_reformer_counts_buckets_in_pairs():
    for bad in (dict(max_buckets=3), dict(buckets=5)):
        with pytest.raises(ValueError, match="must be 1 or even"):
            make_attention("reformer", 16, 4, **bad)
    x = torch.randn(1, 64, 16)
    assert make_attention("reformer", 16, 4, chunk=4, max_buckets=1)(x).shape == x.shape
    assert make_attention("reformer", 16, 4, chunk=4, max_buckets=1).buckets == 1
    assert make_attention("reformer", 16, 4, buckets=8, max_buckets=1).buckets == 8  # the bound is of None alone


@pytest.mark.parametrize("name", ["flt", "performer", "performer_k", "scatterbrain"])
def test_features_are_drawn_under_a_half_default(name):
    options = dict(coord_dims=2) if name in ("flt", "performer_k") else {}
    try:
        torch.set_default_dtype(torch.bfloat16)
        layer = make_attention(name, 16, 4, **options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.query.weight.dtype == torch.bfloat16
