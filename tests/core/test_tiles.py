"""Attention to few keys, and the loops in C below it, are what torch's operations say."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from sparseattn.core import tiles
from sparseattn.core.attention import dense_attention
from sparseattn.core.native import c_kernels, c_source
from sparseattn.core.tiles import TILES, few_keys_attention, as_contiguous

needs_loop = pytest.mark.skipif(c_kernels(tiles._SOURCE, torch.zeros(1)) is None, reason="needs a C compiler")
SIZES = [(1, 1, 1, 1, 1, 1), (1, 1, 1, 7, 5, 2), (2, 3, 50, 37, 7, 5), (1, 2, 33, 16, 16, 32), (3, 1, 64, 128, 64, 64),
         (1, 1, 31, 300, 3, 40), (1, 1, 1100, 20, 8, 8)]


def _drawn(b, h, n, m, d, e, by_point=False, dtype=torch.float64, grad_by_point=False):
    g = torch.Generator().manual_seed(n + m)
    q, rows = torch.randn(b, h, n, d, generator=g, dtype=dtype), torch.randn(b, h, m, d + e, generator=g, dtype=dtype)
    weight = torch.randn(b, h, n, e, generator=g, dtype=dtype)
    q, weight = _turned(q) if by_point else q, _turned(weight) if grad_by_point else weight
    return q.requires_grad_(), rows.requires_grad_(), weight


def _turned(x):
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def _torch(q, rows, scale):
    return F.scaled_dot_product_attention(q, rows[..., : q.shape[3]], rows[..., q.shape[3]:], scale=scale)


def _results(out, weight, *tensors):
    return [out, *torch.autograd.grad(out, tensors, weight)]


def _same(found, expected, tolerance):
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@needs_loop
@pytest.mark.parametrize("sizes", SIZES)
def test_the_loop_is_torchs_kernel(sizes):
    for by_point, grad_by_point in itertools.product((False, True), repeat=2):
        q, rows, weight = _drawn(*sizes, by_point, grad_by_point=grad_by_point)
        found = tiles._FewKeys.apply(q, rows, 0.7, None)
        assert found.transpose(1, 2).is_contiguous() if by_point else found.is_contiguous()
        _same(_results(found, weight, q, rows), _results(_torch(q, rows, 0.7), weight, q, rows), 1e-12)


@needs_loop
@pytest.mark.parametrize("sizes", SIZES)
def test_in_float32_it_is_as_exact_as_torchs_kernel(sizes):
    q, rows, weight = _drawn(*sizes)
    exact = _results(_torch(q, rows, 0.7), weight, q, rows)
    q, rows, weight = (x.detach().float().requires_grad_() for x in (q, rows, weight))
    forms = tiles._FewKeys.apply(q, rows, 0.7, None), _torch(q, rows, 0.7)
    for ours, theirs, true in zip(*(_results(out, weight.detach(), q, rows) for out in forms), exact, strict=True):
        assert (ours - true).abs().max() <= 2 * (theirs - true).abs().max() + 1e-6 * true.abs().max()


@needs_loop
@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("sizes", [(1, 1, 1025, 20, 8, 8), (1, 3, 600, 20, 8, 8), (2, 4, 40, 20, 8, 8)])
def test_threads_and_pieces_change_nothing(threads, sizes):
    q, rows, weight = _drawn(*sizes)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    if c_kernels(tiles._SOURCE, q) is None:
        torch.set_num_threads(before)
        pytest.skip("needs threads")
    try:
        pieces = tiles._pieces(sizes[0] * sizes[1], sizes[2])
        found = _results(tiles._FewKeys.apply(q, rows, 0.7, None), weight, q, rows)
    finally:
        torch.set_num_threads(before)
    assert pieces == (1 if sizes[2] < 512 or sizes[0] * sizes[1] >= 2 * threads else min(sizes[2] // 256, 2 * threads))
    _same(found, _results(_torch(q, rows, 0.7), weight, q, rows), 1e-12)


@needs_loop
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_logits_of_any_size(dtype, tolerance):
    """Weights of one key alone, and logits so far apart that exponentials vanish."""
    for size in (1e-30, 1.0, 50.0, 1e4):
        q, rows, weight = _drawn(1, 2, 40, 30, 8, 4, dtype=dtype)
        with torch.no_grad():
            q.mul_(size)
        found, expected = tiles._FewKeys.apply(q, rows, 1.0, None), _torch(q.double(), rows.double(), 1.0)
        grads = [torch.autograd.grad(out, rows, weight.to(out.dtype))[0] for out in (found, expected)]
        scale = grads[1].abs().max().clamp(min=1)
        assert (found - expected).abs().max() < tolerance * max(1, size / 50)
        assert (grads[0] - grads[1]).abs().max() < tolerance * scale * max(1, size / 50)


@needs_loop
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_exponential(dtype):
    source = c_source("tiles_alone.c")
    low = -87 if dtype == torch.float32 else -708
    double = {"dtype": torch.float64}
    x = torch.cat([torch.linspace(low, 0, 4096, **double), -torch.logspace(-20, 1, 4096, **double)])
    x = torch.cat([x.to(dtype), torch.tensor([-torch.inf, low - 1, torch.nan, 0.0] * 4, dtype=dtype)])
    y, exact = torch.empty_like(x), x.double().exp()
    c_kernels(source, x)("exponentials", x, y, len(x))
    assert ((y - exact) / exact)[:-16].abs().max() < 3 * torch.finfo(dtype).eps
    assert (y[-16::4] < 1e-37).all() and (y[-15::4] < 1e-37).all()
    assert y[-14::4].isnan().all() and (y[-13::4] == 1).all()


@needs_loop
@pytest.mark.parametrize("n, m, width", [(1, 1, 1), (8, 3, 16), (9, 64, 33), (40, 100, 128)])
def test_products_from_rows_and_columns(n, m, width):
    source = TILES + r"""
    int multiply(const REAL *a, const REAL *b, REAL *c, const int64_t *s) {
        int64_t n = padded(s[0]), m = s[1], width = padded(s[2]), turned = s[3];
        REAL *left = malloc((n * m + m * width + n * width) * sizeof(REAL));
        REAL *right = left + n * m, *out = right + m * width;
        if (turned) place_columns(a, m, s[0], m, left, n);
        else place(a, m, s[0], m, 1, left, n, m);
        place(b, s[2], m, s[2], 2, right, m, width);
        product(left, turned ? 1 : m, turned ? n : 1, right, width, out, width, n, width, m, 0);
        product(left, turned ? 1 : m, turned ? n : 1, right, width, out, width, n, width, m, 1);
        place(out, width, s[0], s[2], 1, c, s[0], s[2]);
        free(left);
        return 0;
    }
    """
    g = torch.Generator().manual_seed(n)
    a, b = torch.randn(n, m, generator=g).double(), torch.randn(m, width, generator=g).double()
    for turned in (False, True):
        found = torch.empty(n, width, dtype=a.dtype)
        c_kernels(source, a)("multiply", a, b, found, (n, m, width, turned))
        torch.testing.assert_close(found, 4 * a @ b, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("kernels", [True, False])
def test_public_function(kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(tiles, "c_kernels", lambda source, x: None)
    for scale in (None, 0.3):
        q, rows, weight = _drawn(2, 3, 50, 37, 7, 5)
        found = _results(few_keys_attention(q, rows, scale=scale), weight, q, rows)
        _same(found, _results(_torch(q, rows, scale), weight, q, rows), 1e-12)
    wide = rows.detach().repeat(1, 1, 1, 2)[..., ::2]
    torch.testing.assert_close(few_keys_attention(q, wide), _torch(q, wide, None), rtol=1e-12, atol=1e-12)
    assert few_keys_attention(q[:0], rows[:0]).shape == (0, 3, 50, 5)
    assert few_keys_attention(q[:, :, :0], rows).shape == (2, 3, 0, 5)


@pytest.mark.parametrize("kernels", [True, False])
def test_what_is_not_finite_is_seen(kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(tiles, "c_kernels", lambda source, x: None)
    seen = []
    for which, value, channel in itertools.product((0, 1), (torch.nan, torch.inf, -torch.inf), (0, 3)):
        q, rows, _ = (x.detach() for x in _drawn(1, 2, 40, 9, 4, 3, dtype=torch.float32))
        few_keys_attention(q, rows, diagnose=lambda: seen.append("none"))
        (q, rows)[which][0, 1, 5, channel] = value
        few_keys_attention(q, rows, diagnose=lambda: seen.append("some"))
    assert seen == ["some"] * 12


@needs_loop
def test_backward_where_the_loop_is_not_to_be_had_any_more():
    """A counter of operations that starts between forward and backward turns kernels off."""
    q, rows, weight = _drawn(1, 2, 40, 9, 4, 3)
    found = tiles._FewKeys.apply(q, rows, 0.5, None)
    with FlopCounterMode(display=False):
        grads = torch.autograd.grad(found, (q, rows), weight)
    _same(grads, torch.autograd.grad(_torch(q, rows, 0.5), (q, rows), weight), 1e-12)


def test_gradcheck():
    q, rows, _ = _drawn(1, 2, 5, 4, 3, 2)
    assert torch.autograd.gradcheck(lambda *x: few_keys_attention(*x, scale=0.9), (q, rows))


def test_other_dtypes_autocast_and_compile():
    q, rows, _ = (x.detach() for x in _drawn(1, 2, 40, 9, 4, 3, dtype=torch.float32))
    expected = few_keys_attention(q, rows)
    half = few_keys_attention(q.bfloat16(), rows.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        cast = few_keys_attention(q, rows)
    assert half.dtype == cast.dtype == torch.bfloat16
    for found in (half, cast, torch.compile(few_keys_attention, backend="eager")(q, rows)):
        torch.testing.assert_close(found.float(), expected, rtol=0.05, atol=0.05)


def test_as_contiguous():
    x = torch.randn(2, 3, 4, 5)
    same, by_point = as_contiguous(x)
    assert same is x and not by_point
    turned, by_point = as_contiguous(x.transpose(1, 2))
    assert by_point and turned.equal(x)
    copied, by_point = as_contiguous(x[..., ::2])
    assert not by_point and copied.is_contiguous() and copied.equal(x[..., ::2])


@pytest.mark.parametrize("q, rows, message", [
    ((2, 3, 4), (1, 2, 3, 8), "must be"), ((1, 2, 3, 4), (1, 1, 3, 8), "must be"),
    ((1, 2, 3, 4), (1, 2, 0, 8), "m > 0"), ((1, 2, 3, 4), (1, 2, 3, 4), "wider than"),
    ((1, 2, 3, 0), (1, 2, 3, 4), "wider than")])
def test_bad_input(q, rows, message):
    with pytest.raises(ValueError, match=message):
        few_keys_attention(torch.zeros(q), torch.zeros(rows))
    with pytest.raises(ValueError, match="one dtype"):
        few_keys_attention(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 8).double())


@pytest.mark.parametrize("kernels", [True, False])
def test_second_derivatives(kernels, monkeypatch):
    if not kernels:
        monkeypatch.setenv("CC", "")
    g = torch.Generator().manual_seed(0)
    q = torch.randn(2, 3, 7, 4, generator=g, dtype=torch.float64)
    rows = torch.randn(2, 3, 5, 9, generator=g, dtype=torch.float64)
    found = []
    for attend in (few_keys_attention, lambda q, rows: dense_attention(q, rows[..., :4], rows[..., 4:])):
        leaves = [x.clone().requires_grad_() for x in (q, rows)]
        first = torch.autograd.grad(attend(*leaves).sin().sum(), leaves, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(x.sin().sum() for x in first), leaves)])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-11)
    torch.testing.assert_close(torch.func.grad(lambda q: few_keys_attention(q, rows).sin().sum())(q), found[0][0],
                               rtol=1e-10, atol=1e-11)
