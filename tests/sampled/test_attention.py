"""Attention along a cycle equals dense attention on its pattern: outputs and gradients, any order, mask and dtype."""

import copy
import functools
import itertools
import math

import pytest
import torch

from sparseattn.core.attention import dense_attention
from sparseattn.core.transformer import DenseAttention, Encoder
from sparseattn.lab import measure
from sparseattn.sampled import attention as module
from sparseattn.sampled.attention import (SampledAttention, composed_windows, cycle_attention, opening_pattern,
                                          random_keys_attention, sample_two_keys, window_attention)
from sparseattn.sampled.cycles import sample_cycle, windows_pattern


def _inputs(batch, heads, n, d, dtype=torch.float64, seed=0):
    g = torch.Generator().manual_seed(seed)
    return [x.to(dtype).requires_grad_() for x in torch.randn(3, batch, heads, n, d, generator=g, dtype=torch.float64)]


def _both(function, tensors):
    out = function(*tensors)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad((out * weight).sum(), tensors)]


def _same(first, second, tensors, tolerance):
    for x, y in zip(_both(first, tensors), _both(second, tensors), strict=True):
        torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_dense_on_its_pattern(n, lead, masked):
    tensors, order = _inputs(2, 3, n, 5), sample_cycle(n, batch=lead, generator=torch.Generator().manual_seed(n))
    mask = torch.arange(n) < torch.tensor([[n], [max(1, n // 2)]]) if masked else None
    _same(lambda *x: cycle_attention(*x, order, mask=mask),
          lambda *x: cycle_attention(*x, order, mask=mask, impl="reference"), tensors, 1e-12)


@pytest.mark.parametrize("n", [1, 2, 7, 64])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_dense_without_kernels(n, masked, monkeypatch):
    """What a GPU runs, and a machine without a compiler."""
    monkeypatch.setattr(module, "_kernels", lambda x: None)
    test_equals_dense_on_its_pattern(n, (2, 3), masked)


needs_kernels = pytest.mark.skipif(module._kernels(torch.zeros(1)) is None, reason="needs a C compiler")


@needs_kernels
@pytest.mark.parametrize("n", [2047, 2048, 2049, 5000])
@pytest.mark.parametrize("by_point, masked", itertools.product([False, True], repeat=2))
def test_kernels_equal_torch_beyond_one_piece(n, by_point, masked, monkeypatch):
    order = sample_cycle(n, batch=(2, 3), generator=torch.Generator().manual_seed(n))
    mask = torch.arange(n) < torch.tensor([[n], [n // 2]]) if masked else None
    tensors = _inputs(2, 3, n, 5)
    if by_point:
        tensors = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors]
    found = _both(lambda *x: cycle_attention(*x, order, mask=mask), tensors)
    monkeypatch.setattr(module, "_kernels", lambda x: None)
    expected = _both(lambda *x: cycle_attention(*x, order, mask=mask), tensors)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@needs_kernels
def test_threads_change_nothing():
    order, tensors = sample_cycle(5000, generator=torch.Generator().manual_seed(0)), _inputs(1, 2, 5000, 16)
    found, before = [], torch.get_num_threads()
    torch.set_num_threads(2)
    for threads in (1, 2, 3) if module._kernels(tensors[0]) else (2, 3):  # without threads a kernel serves one only
        torch.set_num_threads(threads)
        found.append(_both(lambda *x: cycle_attention(*x, order), tensors))
    torch.set_num_threads(before)
    assert all(x.equal(y) for other in found[1:] for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("kernels", [True, False])
def test_large_finite_input_is_not_refused(kernels, monkeypatch):
    if not kernels:
        monkeypatch.setattr(module, "_kernels", lambda x: None)
    x = torch.full((1, 1, 3, 2), 1e30)
    assert cycle_attention(x, x, x, torch.arange(3)).equal(x)


@pytest.mark.parametrize("by_point, masked", [(False, False), (True, True)])
def test_compiled(by_point, masked):
    """One graph, whatever the size, equal in outputs and gradients."""
    compiled = torch.compile(cycle_attention, backend="aot_eager", fullgraph=True, dynamic=True)
    for n in (20, 33):
        order = sample_cycle(n, batch=(2, 3), generator=torch.Generator().manual_seed(n))
        mask = torch.arange(n) < torch.tensor([[n], [n // 2]]) if masked else None
        tensors = _inputs(2, 3, n, 5)
        if by_point:
            tensors = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in tensors]
        _same(lambda *x, o=order, m=mask: compiled(*x, o, mask=m),
              lambda *x, o=order, m=mask: cycle_attention(*x, o, mask=m, impl="reference"), tensors, 1e-12)


@pytest.mark.parametrize("n, d", [(1000, 64), (9000, 64), (5000, 3), (2049, 16)])
def test_float32_beyond_one_chunk(n, d):
    tensors, order = _inputs(1, 2, n, d), sample_cycle(n, generator=torch.Generator().manual_seed(0))
    exact = _both(lambda *x: cycle_attention(*x, order), tensors)
    low = _both(lambda *x: cycle_attention(*x, order), [x.detach().float().requires_grad_() for x in tensors])
    for x, y in zip(low, exact, strict=True):
        assert x.dtype == torch.float32
        torch.testing.assert_close(x.double(), y, rtol=2e-5, atol=2e-5)


def test_gradcheck():
    order = sample_cycle(6, generator=torch.Generator().manual_seed(0))
    assert torch.autograd.gradcheck(lambda *x: cycle_attention(*x, order), _inputs(1, 2, 6, 3))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
def test_half_precision(dtype, tolerance):
    order = sample_cycle(33, generator=torch.Generator().manual_seed(0))
    tensors = _inputs(2, 2, 33, 8)
    exact = cycle_attention(*tensors, order)
    low = cycle_attention(*(x.detach().to(dtype) for x in tensors), order)
    assert low.dtype == dtype
    torch.testing.assert_close(low.double(), exact, rtol=tolerance, atol=tolerance)


def test_inputs_that_are_not_contiguous_and_values_of_another_width():
    q, k, v = (x.detach().transpose(1, 2).contiguous().transpose(1, 2) for x in _inputs(2, 3, 50, 8))
    order = sample_cycle(50, batch=(2,), generator=torch.Generator().manual_seed(0))
    values = torch.cat([v, v], -1).requires_grad_()
    tensors = [q.requires_grad_(), k.requires_grad_(), values]
    fast, slow = (lambda *x, i=i: cycle_attention(*x, order, impl=i) for i in ("fast", "reference"))
    _same(fast, slow, tensors, 1e-12)


def test_scale_and_large_scores():
    q, k, v = _inputs(1, 1, 20, 4)
    order = sample_cycle(20, generator=torch.Generator().manual_seed(0))
    for scale in (0.0, 2.0, 1e6):
        fast, slow = (cycle_attention(q, k, v, order, scale=scale, impl=i) for i in ("fast", "reference"))
        torch.testing.assert_close(fast, slow, rtol=1e-9, atol=1e-9)


def test_padding_may_hold_anything_and_gets_no_gradient():
    q, k, v = _inputs(2, 2, 9, 4)
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    dirty = [torch.where(mask[:, None, :, None], x.detach(), torch.nan).requires_grad_() for x in (q, k, v)]
    order = sample_cycle(9, generator=torch.Generator().manual_seed(0))
    for function in (lambda *x: cycle_attention(*x, order, mask=mask),
                     lambda *x: window_attention(*x, order, 4, mask=mask)):
        clean, found = _both(function, [q, k, v]), _both(function, dirty)
        for x, y in zip(found, clean, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)
            assert (x.transpose(1, 2)[~mask] == 0).all()


def test_a_cloud_of_padding_alone():
    tensors = _inputs(2, 2, 6, 4)
    mask = torch.tensor([[True] * 6, [False] * 6])
    order = sample_cycle(6, generator=torch.Generator().manual_seed(0))
    for function in (lambda *x: cycle_attention(*x, order, mask=mask),
                     lambda *x: window_attention(*x, order, 3, mask=mask)):
        found = _both(function, tensors)
        assert all(x.isfinite().all() and (x[1] == 0).all() for x in found)


@pytest.mark.parametrize("n, window", [(12, 2), (12, 3), (12, 5), (12, 12), (12, 13), (12, 40), (11, 4), (1, 2), (1, 3),
                                       (2, 2), (2, 3)])
@pytest.mark.parametrize("lead, masked", itertools.product([(), (2, 3)], [False, True]))
def test_windows(n, window, lead, masked):
    tensors, order = _inputs(2, 3, n, 4), sample_cycle(n, batch=lead, generator=torch.Generator().manual_seed(n))
    mask = torch.arange(n) < torch.tensor([[n], [max(1, n // 2)]]) if masked else None
    fast, slow = (lambda *x, i=i: window_attention(*x, order, window, mask=mask, impl=i) for i in ("fast", "reference"))
    _same(fast, slow, tensors, 1e-12)
    if window == 2:
        _same(fast, lambda *x: cycle_attention(*x, order, mask=mask), tensors, 1e-12)
    if window > n:
        _same(fast, lambda *x: dense_attention(*x, mask=mask), tensors, 1e-12)


def test_composition_of_windows_is_not_the_cycle():
    torch.manual_seed(0)
    layer, x = SampledAttention(8, 2).double(), torch.randn(1, 12, 8, dtype=torch.float64)
    order = sample_cycle(12)
    cycle = x + layer(x, order=order)
    for window in (2, 4, 13):
        parallel = composed_windows(layer, x, order, window, parallel=True, close=False)
        torch.testing.assert_close(parallel, cycle, rtol=1e-12, atol=1e-12)
        assert (composed_windows(layer, x, order, window) - cycle).abs().max() > 1e-4
    with pytest.raises(ValueError, match="must divide"):
        composed_windows(layer, x, order, 6)


def test_windows_are_made_where_the_points_are():
    with torch.device("meta"):
        layer, x, order = SampledAttention(8, 2), torch.randn(1, 6, 8), torch.arange(6)
    assert composed_windows(layer, x, order, 3).shape == (1, 6, 8)


def test_a_fixed_cycle_says_its_seed():
    """No part of the state, so that two layers of one state may differ: their text tells them apart."""
    one, other = (SampledAttention(8, 2, resample="fixed", seed=seed) for seed in (1, 2))
    assert str(one) != str(other) and "seed" not in str(SampledAttention(8, 2))


@pytest.mark.parametrize("order, window, message", [
    (torch.tensor([0, 0, 1, 2, 3, 4]), 3, "order must hold each point from 0 to 5 once"),
    (torch.arange(5), 3, "order must have shape"),
    (torch.arange(6).expand(2, 6), 3, "one for all clouds"), (torch.arange(6), 2.5, "window must be an integer >= 2"),
    (torch.arange(6), 1, "window must be an integer >= 2"), (torch.arange(6), 6, "must divide")])
def test_composition_refuses_what_does_not_fit(order, window, message):
    with pytest.raises(ValueError, match=message):
        composed_windows(SampledAttention(8, 2), torch.zeros(1, 6, 8), order, window)


@pytest.mark.parametrize("window", [1, 0, -2, 2.5, True])
def test_a_pattern_has_windows_of_two_points_at_least(window):
    with pytest.raises(ValueError, match="window must be an integer >= 2"):
        opening_pattern(torch.arange(6), window)


def test_patterns_of_a_window_share_their_queries_or_not():
    for n, size in ((6, 4), (6, 3), (12, 4)):
        figure, layer = windows_pattern(torch.arange(n), size, inside="dense"), opening_pattern(torch.arange(n), size)
        closing = torch.arange(0, n, size - 1)
        opens = torch.ones(n, dtype=torch.bool).index_fill(0, closing, False)
        assert torch.equal(figure[opens], layer[opens]) and (layer <= figure).all()
        assert (figure[closing].sum(1) - layer[closing].sum(1) == min(size - 1, n - size)).all()


def test_two_keys_differ_unless_there_is_one():
    mask = torch.arange(5) < torch.tensor([[5], [1], [0]])
    keys = sample_two_keys(200, 5, batch=(3, 2), mask=mask, generator=torch.Generator().manual_seed(0))
    assert (keys[0, ..., 0] != keys[0, ..., 1]).all() and keys[0].unique().tolist() == [0, 1, 2, 3, 4]
    assert (keys[1:] == 0).all()
    q, (k, v) = torch.randn(3, 2, 200, 4), torch.randn(2, 3, 2, 5, 4)
    assert (random_keys_attention(q, k, v, keys, mask=mask)[2] == 0).all()


@pytest.mark.parametrize("options", [{}, {"cycles": 3}, {"window": 4}, {"resample": "fixed"}, {"cycle_for": "cloud"},
                                     {"cycle_for": "head", "cycles": 3}, {"cycle_for": "head", "window": 4}])
def test_module(options):
    torch.manual_seed(0)
    layer, x = SampledAttention(16, 4, **options), torch.randn(2, 12, 16)
    order = layer.draw(2, 12)
    out, info = layer(x, order=order, return_info=True)
    torch.testing.assert_close(copy.deepcopy(layer)(x, order=order), out)
    other = SampledAttention(16, 4, **options)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x, order=order), out)
    torch.testing.assert_close(torch.compile(layer, backend="eager")(x, order=order), out)
    assert 0 < info.density < 1 and info.nnz == round(info.density * 4 * 2 * 144)
    assert layer.bfloat16()(x.bfloat16(), order=order).dtype == torch.bfloat16


def test_a_cycle_for_each_head_or_cloud():
    x = torch.randn(2, 12, 16)
    for resample in ("layer", "fixed"):
        for cycle_for, shape in (("batch", (12,)), ("cloud", (2, 12)), ("head", (2, 4, 12))):
            layer = SampledAttention(16, 4, resample=resample, cycle_for=cycle_for)
            out, info = layer(x, generator=torch.Generator().manual_seed(1), return_info=True)
            assert info.pattern.shape == shape and len(info.pattern.reshape(-1, 12).unique(dim=0)) == (
                math.prod(shape[:-1]) if resample == "layer" else 4 if cycle_for == "head" else 1)
            q, k, v = layer.heads_of(x)
            full = info.pattern.reshape(*shape[:-1], *[1] * (3 - len(shape)), 12).expand(2, 4, 12)
            heads = cycle_attention(q, k, v, full, impl="reference").transpose(1, 2).flatten(2)
            torch.testing.assert_close(out, layer.out(heads))


def test_pairs_counted_are_the_pattern():
    torch.manual_seed(0)
    mask = torch.arange(13) < torch.tensor([[13], [8], [1]])
    for window in (2, 3, 4, 5, 13, 14, 30):
        layer, order = SampledAttention(8, 2, window=window), sample_cycle(13)
        _, info = layer(torch.randn(3, 13, 8), mask=mask, order=order, return_info=True)
        one = torch.eye(13, dtype=torch.float64)[None, None].expand(3, 2, -1, -1)
        weights = window_attention(torch.zeros_like(one), torch.zeros_like(one), one, order, window, mask=mask)
        assert info.nnz == (weights > 0).sum().item()


def test_policies():
    x = torch.randn(1, 30, 16)
    encoder, order = Encoder(16, 3, 4, attention="sampled"), sample_cycle(30)
    shared = [info.pattern for info in encoder(x, return_info=True, order=order)[1]]
    assert all(pattern.equal(order) for pattern in shared)
    drawn = [info.pattern for info in encoder(x, return_info=True)[1]]
    assert not drawn[0].equal(drawn[1]) and not drawn[1].equal(drawn[2])
    fixed = SampledAttention(16, 4, resample="fixed").eval()
    torch.testing.assert_close(fixed(x), fixed(x), rtol=0, atol=0)
    drawn = SampledAttention(16, 4)
    same = [drawn(x, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    torch.testing.assert_close(*same, rtol=0, atol=0)


def test_cycles_converge_to_dense():
    torch.manual_seed(0)
    dense, sampled = DenseAttention(16, 4), SampledAttention(16, 4, cycles=31)
    sampled.load_state_dict(dense.state_dict(), strict=False)
    x = 3 * torch.randn(4, 32, 16)
    with torch.no_grad():
        torch.testing.assert_close(sampled(x), dense(x), rtol=1e-4, atol=1e-5)
        sampled.cycles = 24
        assert 0.01 < (sampled(x) - dense(x)).norm() / dense(x).norm() < 0.7


def test_bad_input():
    x = torch.zeros(1, 2, 4, 3)
    once = "order must hold each point from 0 to 3 once"
    cases = [(lambda: cycle_attention(x, x, x, torch.tensor([0, 1, 1, 2])), once),
             (lambda: cycle_attention(x, x, x, torch.tensor([0, 1, 2, 4])), once),
             (lambda: cycle_attention(x, x, x, torch.tensor([0, 1, 2, -1])), once),
             (lambda: cycle_attention(x, x, x, torch.tensor([0, 1, 1, 2]), mask=torch.ones(1, 4) > 0), once),
             (lambda: cycle_attention(x, x, x, torch.tensor([0, 1, 1, 2]), impl="reference"), once),
             (lambda: window_attention(x, x, x, torch.tensor([0, 1, 1, 2]), 3), once),
             (lambda: cycle_attention(x, x, x, torch.arange(5)), "order must have shape"),
             (lambda: cycle_attention(x, x, x, torch.arange(4), impl="quick"), "impl"),
             (lambda: cycle_attention(x, x[:, :, :3], x[:, :, :3], torch.arange(4)), "as many queries as keys"),
             (lambda: cycle_attention(x + torch.nan, x, x, torch.arange(4)), "q"),
             (lambda: cycle_attention(x, x + torch.inf, x, torch.arange(4)), "k"),
             (lambda: cycle_attention(x, x, x + torch.nan, torch.arange(4)), "v"),
             (lambda: window_attention(x, x, x, torch.arange(4), 1), "window"),
             (lambda: SampledAttention(8, 3), "heads"), (lambda: SampledAttention(8, 2, cycles=0), "cycles"),
             (lambda: SampledAttention(8, 2, cycles=2, window=3), "cycles above 1"),
             (lambda: SampledAttention(8, 2, resample="always"), "resample"),
             (lambda: SampledAttention(8, 2, cycle_for="layer"), "cycle_for must be one of 'batch', 'cloud', 'head'"),
             (lambda: random_keys_attention(x, x, x, torch.zeros(1, 2, 4, 3, dtype=torch.int64)), "keys"),
             (lambda: random_keys_attention(x, x, x, torch.full((1, 2, 4, 2), 4)), "keys must lie"),
             (lambda: sample_two_keys(3, 0), "points")]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="order must be an int64"):
        cycle_attention(x, x, x, torch.zeros(4))


@pytest.mark.parametrize("options", [{}, {"window": 3}, {"cycles": 2}])
@pytest.mark.parametrize("mask", [None, torch.ones(2, 4, dtype=torch.bool)])
@pytest.mark.parametrize("order, message", [(torch.tensor([0, 1, 1, 2]), "once"), (torch.tensor([0, 1, 2, 4]), "once"),
                                            (torch.arange(5), "shape"), (torch.arange(4).expand(3, 4), "shape")])
def test_layer_refuses_a_bad_order(options, mask, order, message):
    with pytest.raises(ValueError, match=f"order must .*{message}"):
        SampledAttention(8, 2, **options)(torch.zeros(2, 4, 8), mask=mask, order=order)


@pytest.mark.parametrize("backward", [False, True])
def test_contenders_agree(backward):
    inputs = *torch.randn(3, 2, 3, 33, 4), sample_cycle(33)
    told = dict(backward=backward)
    for cases in (module.cycle_cases(40, 2, 8, **told), module.cycle_cases(0, inputs=inputs, **told)):
        errors = measure.contest("cycle", cases).errors()
        assert list(errors) == ["cycle", "gather", "indexed"] and max(errors.values()) < 1e-5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu():
    tensors, order = _inputs(2, 3, 300, 8), sample_cycle(300, generator=torch.Generator().manual_seed(0))
    on_gpu = [x.detach().cuda().requires_grad_() for x in tensors]
    found = [_both(lambda *x, o=o: cycle_attention(*x, o), y) for o, y in ((order, tensors), (order.cuda(), on_gpu))]
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y.cpu(), rtol=1e-10, atol=1e-10)


def derivatives(attend, *x):
    "Gradients, those that can be differentiated again, and second ones."
    leaves = [part.clone().requires_grad_() for part in x]
    plain = torch.autograd.grad(attend(*leaves).sin().sum(), leaves)
    first = torch.autograd.grad(attend(*leaves).sin().sum(), leaves, create_graph=True)
    return *plain, *first, *torch.autograd.grad(sum(part.sin().sum() for part in first), leaves)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("window", [2, 3])
def test_derivatives_of_any_order(kernels, masked, window, monkeypatch):
    if not kernels:
        monkeypatch.setenv("CC", "")
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 3, 9, 4, generator=g, dtype=torch.float64)
    order, mask = sample_cycle(9, generator=g), torch.arange(9) < torch.tensor([[9], [5]]) if masked else None
    attend = cycle_attention if window == 2 else functools.partial(window_attention, window=window)
    found = [derivatives(functools.partial(attend, order=order, mask=mask, impl=impl), q, k, v)
             for impl in ("fast", "reference")]
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-11)
    transformed = torch.func.grad(lambda k: attend(q, k, v, order, mask=mask).sin().sum())(k)
    torch.testing.assert_close(transformed, found[0][1], rtol=1e-10, atol=1e-11)


def test_a_window_is_bounded_by_its_points():
    x, order = torch.randn(1, 2, 10, 4), torch.randperm(10)
    dense = window_attention(x, x, x, order, 11)
    assert torch.equal(window_attention(x, x, x, order, 10**9), dense)
    assert torch.allclose(dense, dense_attention(x, x, x), atol=1e-5)


def test_one_graph_for_all_lengths_and_batches():
    layer = SampledAttention(16, 4)
    for sizes in ([(2, n) for n in range(20, 34)], [(b, 20) for b in range(2, 16)]):
        torch.compiler.reset()
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        for b, n in sizes:
            assert compiled(torch.randn(b, n, 16), torch.rand(b, n, 3)).shape == (b, n, 16)


@pytest.mark.parametrize("strict", [True, False])
def test_exports_with_a_length_that_varies(strict):
    length = torch.export.Dim("n", min=2, max=1000)
    given = torch.randn(2, 20, 16), torch.rand(2, 20, 3)
    program = torch.export.export(SampledAttention(16, 4).eval(), given, strict=strict,
                                  dynamic_shapes={"x": {1: length}, "coords": {1: length}})
    assert program.module()(torch.randn(2, 31, 16), torch.rand(2, 31, 3)).shape == (2, 31, 16)


def test_output_of_cycles_can_be_changed():
    q, k, v = torch.randn(3, 1, 2, 6, 4, requires_grad=True)
    order = torch.arange(6)
    out = cycle_attention(q, k, v, order)
    out *= 2
    found = torch.autograd.grad(out.sum(), v)[0]
    torch.testing.assert_close(found, 2 * torch.autograd.grad(cycle_attention(q, k, v, order).sum(), v)[0])
