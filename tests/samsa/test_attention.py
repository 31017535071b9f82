"""Attention to sampled keys equals selection by matrices: outputs and gradients, any size, mask, layout and dtype."""

import copy
import itertools

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from sparseattn.core.attention import dense_attention
from sparseattn.core.native import c_kernels
from sparseattn.core.relaxation import gumbel
from sparseattn.core.transformer import DenseAttention, Encoder
from sparseattn.lab import measure
from sparseattn.samsa import attention
from sparseattn.samsa.attention import (Importance, SAMSAAttention, samsa_attention, samsa_cases, samsa_cases_backward,
                                        samsa_flops)


def _drawn(n, samples, supports=0, *, by_point=False, keys=None, width=None, batch=2, heads=3, d=4, seed=0):
    g, m = torch.Generator().manual_seed(seed), keys or n
    shapes = [(batch, heads, n, d), (batch, heads, m, d), (batch, heads, m, width or d), (batch, heads, m)]
    shapes += [(heads, supports, d), (heads, supports, width or d), (heads, supports)] if supports else []
    made = [torch.randn(shape, generator=g, dtype=torch.float64) for shape in shapes]
    made[:3] = [x.transpose(1, 2).contiguous().transpose(1, 2) if by_point else x for x in made[:3]]
    return [x.requires_grad_() for x in made]


def _results(tensors, samples, **options):
    q, k, v, scores, *supports = tensors
    out = samsa_attention(q, k, v, scores, samples=samples, supports=supports or None, **options)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(out.dtype)
    return [out, *torch.autograd.grad((out * weight).sum(), tensors)]


def _same(first, second, tolerance=1e-12):
    for x, y in zip(first, second, strict=True):
        torch.testing.assert_close(x.to(y.dtype), y, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n, samples, supports", [(1, 1, 2), (2, 1, 0), (3, 4, 8), (9, 4, 0), (9, 4, 3), (40, 7, 14)])
@pytest.mark.parametrize("hard, noisy", list(itertools.product([False, True], [False, True])))
def test_equals_selection_by_matrices(n, samples, supports, hard, noisy):
    noise = gumbel((2, 3, n + supports), generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    mask = torch.arange(n) < torch.tensor([[n], [(n + 1) // 2]])
    for m, by_point in ((None, noisy), (mask if supports else None, not noisy)):
        if m is not None and (n + 1) // 2 + supports < 2 * samples:
            continue
        tensors, options = _drawn(n, samples, supports, by_point=by_point), dict(hard=hard, tau=0.4, mask=m)
        options["noise"] = noise if noisy else None
        _same(_results(tensors, samples, **options), _results(tensors, samples, impl="reference", **options))


@pytest.mark.parametrize("n, samples, supports", [(2, 1, 0), (3, 4, 8), (40, 7, 14)])
@pytest.mark.parametrize("hard, noisy", list(itertools.product([False, True], [False, True])))
def test_equals_selection_without_kernels(n, samples, supports, hard, noisy, monkeypatch):
    """What a GPU runs, and a machine without a compiler."""
    monkeypatch.setattr(attention, "c_kernels", lambda source, x: None)
    test_equals_selection_by_matrices(n, samples, supports, hard, noisy)


@pytest.mark.parametrize("layouts", itertools.product([False, True], repeat=3))
@pytest.mark.parametrize("kernels", [True, False])
def test_inference_in_every_layout(layouts, kernels, monkeypatch):
    """No gradient is asked for, so that only the rows wanted are looked for."""
    if not kernels:
        monkeypatch.setattr(attention, "c_kernels", lambda source, x: None)
    for n, samples, supports, keys in ((1, 1, 0, 0), (3, 4, 8, 0), (40, 7, 14, 0), (5, 30, 0, 30), (5, 4, 3, 12)):
        tensors = [x.detach() for x in _drawn(n, samples, supports, keys=keys, width=6)]
        tensors[:3] = [x.transpose(1, 2).contiguous().transpose(1, 2) if by_point else x
                       for x, by_point in zip(tensors[:3], layouts, strict=True)]
        q, k, v, scores, *table = tensors
        mask = None if keys else torch.arange(n) < torch.tensor([[n], [max(1, n - 2)]])
        if mask is not None and mask.sum(1).min() + supports < samples:
            mask = None
        fast, slow = (samsa_attention(q, k, v, scores, samples=samples, supports=table or None, mask=mask, impl=impl)
                      for impl in ("fast", "reference"))
        torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)


@pytest.mark.skipif(c_kernels(attention._SOURCE, torch.zeros(1)) is None, reason="needs a C compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n, samples", [(1, 1), (7, 3), (7, 7), (1000, 1), (1000, 128), (1000, 999), (5000, 64)])
def test_best_are_those_of_a_sort(dtype, n, samples):
    """Scores of every kind: of all sizes, equal ones, both zeros, the smallest there are, -inf."""
    g = torch.Generator().manual_seed(n + samples)
    plain = torch.randn(4, n, generator=g, dtype=dtype)
    kinds = [plain, plain * 10.0 ** torch.randint(-40, 30, (4, n), generator=g), plain.sign(), plain.round(),
             torch.where(plain < 1, plain, 0.0 * plain), plain * torch.finfo(dtype).smallest_normal / 1000,
             torch.where(torch.rand(4, n, generator=g).argsort(1) < samples, plain, -torch.inf)]
    one = torch.zeros(1, 4, n, 1, dtype=dtype)
    for scores in kinds:
        scores = scores[None].to(dtype)
        _, index = attention._select(one, one, None, None, scores, samples, False)
        assert index.equal(index.sort(-1).values) and (index.diff(dim=-1) > 0).all()
        assert scores.gather(-1, index).sort(-1).values.equal(scores.sort(-1).values[..., n - samples:])


def test_gradient_of_rows_alone():
    """Scores without a gradient: k rows are enough, and they get one."""
    q, k, v, scores = _drawn(5, 4)
    found = [samsa_attention(q, k, v, scores.detach(), samples=4, impl=impl) for impl in ("fast", "reference")]
    _same(*[[out, *torch.autograd.grad(out.square().sum(), (q, k, v))] for out in found])


def test_other_queries_than_keys_and_other_width_of_values():
    mask = torch.arange(12) < torch.tensor([[12], [9]])
    for hard in (False, True):
        tensors = _drawn(5, 4, 8, keys=12, width=6)
        options = dict(hard=hard, mask=mask, scale=0.3)
        _same(_results(tensors, 4, **options), _results(tensors, 4, impl="reference", **options))
        assert _results(tensors, 4, **options)[0].shape == (2, 3, 5, 6)


def test_backward_under_a_counter_of_operations():
    """It turns kernels off that the forward pass had."""
    leaves = _drawn(20, 4)
    outs = [samsa_attention(*leaves, samples=4, hard=False).square().sum() for _ in range(2)]
    with FlopCounterMode(display=False):
        counted = torch.autograd.grad(outs[0], leaves)
    for x, y in zip(counted, torch.autograd.grad(outs[1], leaves), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_gradcheck():
    tensors = _drawn(7, 3, batch=1, heads=2)
    assert torch.autograd.gradcheck(lambda *x: samsa_attention(*x, samples=3, hard=False, tau=0.8), tensors)
    q, k, v, scores = tensors
    assert torch.autograd.gradcheck(lambda *x: samsa_attention(*x, scores.detach(), samples=3), (q, k, v))


def test_all_keys_are_dense_attention():
    q, k, v, scores = _drawn(11, 11)
    out = samsa_attention(q, k, v, scores.detach(), samples=11)
    _same([out, *torch.autograd.grad(out.square().sum(), (q, k, v))],
          [(dense := dense_attention(q, k, v)), *torch.autograd.grad(dense.square().sum(), (q, k, v))])


def test_limits_of_temperature():
    q, k, v, scores = (x.detach() for x in _drawn(10, 5))
    hard = samsa_attention(q, k, v, scores, samples=5)
    torch.testing.assert_close(samsa_attention(q, k, v, scores, samples=5, hard=False, tau=1e-12), hard)
    assert (samsa_attention(q, k, v, scores, samples=5, hard=False) - hard).abs().max() > 1e-3
    shifted = samsa_attention(q, k, v, scores + 3, samples=5, hard=False)
    torch.testing.assert_close(shifted, samsa_attention(q, k, v, scores, samples=5, hard=False))


def test_no_gradient_needs_half_the_tokens():
    q, k, v, scores = _drawn(5, 4)
    with torch.no_grad():
        without = samsa_attention(q, k, v, scores, samples=4)
    torch.testing.assert_close(samsa_attention(q, k, v, scores.detach(), samples=4), without)
    for call in (lambda: samsa_attention(q, k, v, scores, samples=4),
                 lambda: samsa_attention(q, k, v, scores.detach(), samples=4, hard=False),
                 lambda: samsa_attention(q, k, v, scores, samples=4, impl="reference")):
        with pytest.raises(ValueError, match="found 5"):
            call()


def test_scores_that_matter():
    tensors = _drawn(30, 5)
    for hard in (False, True):
        to_scores = _results(tensors, 5, hard=hard)[4]
        assert ((to_scores != 0).sum(-1) == 10).all() and to_scores.sum(-1).abs().max() < 1e-12


@pytest.mark.parametrize("hard", [False, True])
def test_padding_may_hold_anything_and_gets_no_gradient(hard):
    clean, mask = _drawn(15, 4, 8), torch.arange(15) < torch.tensor([[9], [9]])
    noise = gumbel((2, 3, 23), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    dirty = [x.detach().masked_fill(~mask.view(2, 1, 15, *[1] * (x.dim() - 3)), torch.nan) for x in clean[:4]]
    dirty = [x.requires_grad_() for x in dirty] + clean[4:]
    short = [x.detach()[:, :, :9].requires_grad_() for x in clean[:4]] + clean[4:]

    def gradients(tensors, noise, **options):
        q, k, v, scores, *table = tensors
        out = samsa_attention(q, k, v, scores, samples=4, supports=table, noise=noise, hard=hard, **options)
        return [out, *torch.autograd.grad(out.square().sum(), tensors)]

    carried = torch.cat([noise[..., :9], noise[..., 15:]], -1)
    for x, y in zip(gradients(dirty, noise, mask=mask), gradients(short, carried), strict=True):
        if x.shape != y.shape:
            assert (x[:, :, 9:] == 0).all()
            x = x[:, :, :9]
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


def test_a_cloud_of_padding_alone():
    torch.manual_seed(0)
    layer, x = SAMSAAttention(16, 4, samples=6), torch.randn(2, 12, 16, requires_grad=True)
    mask = torch.tensor([[True] * 12, [False] * 12])
    out, info = layer(x, mask=mask, return_info=True)
    out.sum().backward()
    assert (out[1] == 0).all() and (x.grad[1] == 0).all() and x.grad.isfinite().all()
    assert (info.pattern[1] >= 12).all() and info.nnz == 4 * 6 * 12


def test_invariant_in_keys_equivariant_in_queries():
    q, k, v, scores = (x.detach() for x in _drawn(12, 4))
    moved = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    out = samsa_attention(q, k, v, scores, samples=4)
    keys = [x[:, :, moved] for x in (k, v, scores)]
    torch.testing.assert_close(samsa_attention(q, *keys, samples=4), out)
    torch.testing.assert_close(samsa_attention(q[:, :, moved], *keys, samples=4), out[:, :, moved])


@pytest.mark.parametrize("samples", [1, 2, 7, 31, 32, 33, 40, 63, 100])
def test_any_number_that_is_not_finite_is_seen(samples):
    clean = [x.detach().float() for x in _drawn(120, samples, batch=1, heads=2, d=5)]
    chosen = clean[3][0, 1].argmax()
    for which, row, channel, value in itertools.product(range(3), (0, chosen), (0, 3), (torch.nan, torch.inf)):
        spoiled = [x.clone() for x in clean]
        spoiled[which][0, 1, chosen if which else row, channel] = value
        with pytest.raises(ValueError, match="qkv"[which]):
            samsa_attention(*spoiled, samples=samples)


def test_heads_choose_for_themselves():
    torch.manual_seed(0)
    layer, x = SAMSAAttention(16, 4, samples=6).eval(), torch.randn(3, 50, 16)
    _, info = layer(x, return_info=True)
    for row in info.pattern.flatten(0, 1).tolist():
        assert len(set(row)) == 6
    assert len({tuple(sorted(row)) for row in info.pattern[0].tolist()}) > 1
    noisy = torch.cat([layer.importance(x).transpose(1, 2), layer.support_scores.expand(3, -1, -1)], -1)
    assert info.pattern.sort(-1).values.equal(noisy.topk(6).indices.sort(-1).values)
    assert info.extra["supports"] == pytest.approx((info.pattern >= 50).double().mean().item())
    assert info.flops == 3 * 4 * samsa_flops(50, 6, 4) and info.density == pytest.approx(6 / 50)


@pytest.mark.parametrize("n, supports", [(1, None), (3, 24), (11, None), (12, 12), (13, None), (30, 0)])
@pytest.mark.parametrize("hard", [False, True])
def test_any_number_of_tokens(n, supports, hard):
    torch.manual_seed(0)
    layer = SAMSAAttention(16, 4, samples=6, hard=hard, supports=supports)
    layer(torch.randn(2, n, 16)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    assert layer.eval()(torch.randn(2, n, 16)).shape == (2, n, 16)


def test_all_tokens_survive_exactly_if_few_supports_score_higher():
    g = torch.Generator().manual_seed(0)
    for n in (1, 3, 6):
        tokens, supports = torch.randn(1, 300, n, generator=g), torch.randn(300, 12, generator=g) - 1.5
        one = torch.eye(n).expand(1, 300, n, n)
        weights = samsa_attention(torch.zeros(1, 300, n, n), torch.zeros_like(one), one, tokens, samples=6,
                                  supports=(torch.zeros(300, 12, n), torch.zeros(300, 12, n), supports))
        kept = (weights[0, :, 0] > 0).sum(-1) == n
        assert kept.equal((supports > tokens[0].amin(1, keepdim=True)).sum(1) <= 6 - n) and 0 < kept.sum() < 300


@pytest.mark.parametrize("options", [{}, {"hard": False}, {"as_released": True, "tau": 0.1}, {"supports": 0},
                                     {"hard": False, "inference": "mixed"}, {"hard": False, "as_released": True}])
def test_module(options):
    torch.manual_seed(0)
    layer, x = SAMSAAttention(16, 4, samples=6, **options), torch.randn(2, 30, 16)
    noise = layer.draw(2, 30, torch.Generator().manual_seed(0))
    out = layer(x, noise=noise)
    assert layer(x, generator=torch.Generator().manual_seed(0)).equal(out)
    assert not layer(x).equal(out)
    other = SAMSAAttention(16, 4, samples=6, **options)
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(x, noise=noise), out)
    torch.testing.assert_close(copy.deepcopy(layer)(x, noise=noise), out)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x, noise=noise)
        low.float().sum().backward()
    assert low.dtype == torch.bfloat16 and low.isfinite().all()
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert layer.to(dtype)(x.to(dtype), noise=noise).dtype == dtype


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scores_are_normed_without_a_warning(dtype):
    """torch warns of another dtype than the weights' once a process, so what the norm reads is looked at too."""
    torch.manual_seed(0)
    layer, x, read = SAMSAAttention(16, 4, samples=6), torch.randn(2, 30, 16), []
    layer.importance.norm.register_forward_pre_hook(lambda norm, given: read.append(given[0].dtype))
    with torch.autocast("cpu", dtype):
        assert layer(x).dtype == dtype
    assert read == [torch.float32]


def test_compiled():
    torch.manual_seed(0)
    layer, x = SAMSAAttention(16, 4, samples=6, hard=False), torch.randn(2, 30, 16)
    noise, found = layer.draw(2, 30), []
    for module in (layer, torch.compile(layer, backend="eager")):
        layer.zero_grad()
        out = module(x, noise=noise)
        out.square().sum().backward()
        found.append([out.detach(), *(p.grad.clone() for p in layer.parameters())])
    _same(*found, 1e-5)


@pytest.mark.parametrize("dtype, tolerance", [(torch.float16, 5e-3), (torch.bfloat16, 4e-2), (torch.float32, 1e-5)])
def test_precision(dtype, tolerance):
    tensors = _drawn(33, 8)
    for hard in (False, True):
        exact = _results(tensors, 8, hard=hard)
        low = [x.detach().to(dtype).requires_grad_() for x in tensors[:3]]
        found = _results([*low, tensors[3]], 8, hard=hard)
        assert found[0].dtype == dtype
        _same([x.double() for x in found], exact, tolerance * 4)


def test_evaluation_is_deterministic_but_with_noise():
    torch.manual_seed(0)
    x = torch.randn(1, 100, 16)
    for hard, inference in ((True, "top-k"), (False, "top-k"), (False, "mixed")):
        layer = SAMSAAttention(16, 4, samples=8, hard=hard, inference=inference).eval()
        assert layer(x).equal(layer(x))
        plain = copy.deepcopy(layer)
        plain.hard = True
        assert torch.allclose(layer(x), plain(x), atol=1e-6) == (inference == "top-k")
        layer.inference = "noise"
        assert not layer(x).equal(layer(x))
        quiet = torch.zeros(())
        torch.testing.assert_close(layer(x, noise=quiet), layer.eval()(x, noise=quiet))


def test_cap_of_the_released_code():
    torch.manual_seed(0)
    x = torch.randn(3, 40, 16, dtype=torch.float64)
    for hard, tau in itertools.product((True, False), (0.05, 1.0, 3.0)):
        layer = SAMSAAttention(16, 4, samples=8, hard=hard, tau=tau).double()
        noise = layer.draw(3, 40, torch.Generator().manual_seed(1))
        gradients, outputs = [], []
        for layer.as_released in (False, True):
            q, k, v, scores = layer.heads_of(x)
            layer.zero_grad()
            outputs.append(layer(x, noise=noise))
            outputs[-1].square().sum().backward()
            gradients.append(layer.support_scores.grad.clone())
        torch.testing.assert_close(*outputs)
        noisy = (torch.cat([scores, layer.support_scores.expand(3, -1, -1)], -1) + noise).sort(-1, descending=True)[0]
        gap = noisy[..., :8, None] - noisy[..., None, 8:16]
        slope = ((gap / tau).sigmoid() * (-gap / tau).sigmoid() / tau).amax((0, 2, 3))
        factor = (0.25 / slope).clamp(max=1)[:, None]
        assert (factor == 1).all() if tau >= 1 else (factor < 1).all()
        torch.testing.assert_close(gradients[1], factor * gradients[0], rtol=1e-9, atol=1e-12)


def test_dense_weights_load():
    torch.manual_seed(0)
    dense, layer = DenseAttention(16, 4), SAMSAAttention(16, 4, samples=20, supports=0).eval()
    assert all(name.startswith("importance") for name in layer.load_state_dict(dense.state_dict(), strict=False)[0])
    x = torch.randn(2, 20, 16)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), dense(x), rtol=1e-5, atol=1e-6)


def test_in_the_encoder():
    torch.manual_seed(0)
    encoder, x = Encoder(16, 2, 4, attention="samsa", samples=8), torch.randn(2, 30, 16)
    _, infos = encoder(x, mask=torch.arange(30) < torch.tensor([[30], [20]]), return_info=True)
    assert [info.nnz for info in infos] == [4 * 8 * 50] * 2
    assert Importance(16, 3)(x).shape == (2, 30, 3)


def test_memory_grows_with_tokens_not_with_pairs():
    from sparseattn.lab.measure import peak_memory

    def one(n):
        x = torch.randn(3, 1, 2, n, 16, generator=torch.Generator().manual_seed(0))
        return peak_memory(lambda: samsa_attention(*x, x[0, ..., 0], samples=64))

    few, many = one(2**14), one(2**17)
    if few is not None:
        assert many < 16 * max(few, 2**20) and many < 2**28


def test_contenders_agree():
    for cases in (samsa_cases(64, 16), samsa_cases_backward(64, 16)):
        assert max(measure.contest("attention", cases).errors().values()) < 1e-5
    cases = samsa_cases(64, 16)
    torch.testing.assert_close(cases["rivals"]["given keys"](), cases["samsa"](), rtol=1e-5, atol=1e-5)


def test_bad_input():
    x, scores = torch.zeros(1, 2, 4, 3), torch.zeros(1, 2, 4)
    table = torch.zeros(2, 5, 3), torch.zeros(2, 5, 3), torch.zeros(2, 5)
    cases = [(lambda: samsa_attention(x, x, x, scores[..., :3], samples=1), "scores must have shape"),
             (lambda: samsa_attention(x, x, x, scores + torch.nan, samples=1), "scores and noise must be finite"),
             (lambda: samsa_attention(x, x, x, scores + torch.inf, samples=1), "scores and noise must be finite"),
             (lambda: samsa_attention(x, x, x, scores, samples=1, noise=scores + torch.nan), "noise must be finite"),
             (lambda: samsa_attention(x, x, x, scores, samples=5), "found 4"),
             (lambda: samsa_attention(x, x, x, scores - torch.inf, samples=1), "found 0"),
             (lambda: samsa_attention(x, x, x, scores, samples=4, mask=torch.ones(1, 4).bool().tril(2)), "found 3"),
             (lambda: samsa_attention(x, x, x, scores, samples=0), "samples"),
             (lambda: samsa_attention(x, x, x, scores, samples=2, tau=0.0), "tau"),
             (lambda: samsa_attention(x, x, x, scores, samples=2, impl="quick"), "impl"),
             (lambda: samsa_attention(x, x, x, scores, samples=2, noise=torch.zeros(3)), "noise must broadcast"),
             (lambda: samsa_attention(x + torch.nan, x, x, scores, samples=2), "q"),
             (lambda: samsa_attention(x, x + torch.inf, x, scores, samples=2), "k"),
             (lambda: samsa_attention(x, x, x + torch.nan, scores, samples=2), "v"),
             (lambda: samsa_attention(x, x, x, scores, samples=2, supports=table[:2]), "supports must be"),
             (lambda: samsa_attention(x, x, x, scores, samples=2, supports=table[::-1]), "supports must be"),
             (lambda: SAMSAAttention(8, 3), "heads"), (lambda: SAMSAAttention(8, 2, samples=0), "samples"),
             (lambda: SAMSAAttention(8, 2, supports=-1), "supports"), (lambda: SAMSAAttention(8, 2, tau=-1), "tau"),
             (lambda: SAMSAAttention(8, 2, inference="soft"), "inference"),
             (lambda: SAMSAAttention(8, 2, samples=9, supports=0)(torch.zeros(1, 12, 8)), "found 12")]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="scores must be a floating"):
        samsa_attention(x, x, x, scores.long(), samples=1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu():
    tensors = _drawn(300, 40, 80)
    on_gpu = [x.detach().cuda().requires_grad_() for x in tensors]
    for hard in (False, True):
        _same([x.cpu() for x in _results(on_gpu, 40, hard=hard)], _results(tensors, 40, hard=hard), 1e-10)
    layer = SAMSAAttention(16, 4, samples=8).cuda()
    layer(torch.randn(2, 5, 16, device="cuda")).sum().backward()


def test_whole_numbers_of_numpy_compile():
    layer, x = SAMSAAttention(16, 4, samples=np.int64(4)), torch.randn(1, 8, 16)
    compiled = torch.compile(layer.eval(), backend="aot_eager")
    torch.testing.assert_close(compiled(x), layer(x))


def test_supports_are_looked_at():
    q, scores = torch.randn(1, 2, 10, 4), torch.randn(1, 2, 10)
    supports = torch.full((2, 3, 4), torch.nan), torch.zeros(2, 3, 4), torch.full((2, 3), 9.0)
    with pytest.raises(ValueError, match="supports' keys"):
        samsa_attention(q, q, q, scores, samples=4, supports=supports)
    with pytest.raises(TypeError, match="supports' keys"):
        samsa_attention(q, q, q, scores, samples=4, supports=[1, 2, 3])
