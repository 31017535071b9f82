"""Sampling tokens with and without replacement: values, gradients, laws, limits, bad input."""

import itertools
import math

import pytest
import torch
from scipy import stats
from torch.utils.flop_counter import FlopCounterMode

from sparseattn.core.relaxation import gumbel, gumbel_softmax, plackett_luce
from sparseattn.samsa import sampling as module
from sparseattn.lab import measure
from sparseattn.samsa.sampling import (
    gumbel_top_k,
    sample_with_replacement,
    sample_without_replacement,
    sampling_cases,
    swap_flops,
)

ALARM = 1e-6  # a test with random draws fails for one seed in a million
BOTH = pytest.mark.parametrize("hard", [False, True])


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def case(b, n, c, seed=0, dtype=torch.float64):
    """Tokens, scores, noise."""
    draw = seeded(seed)
    x = torch.randn(b, n, c, generator=draw, dtype=torch.float64)
    scores = torch.randn(b, n, generator=draw, dtype=torch.float64)
    noise = gumbel((b, n), generator=draw, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), scores.to(dtype).requires_grad_(), noise.to(dtype)


def results(x, scores, k, seed=5, **options):
    """Output, and gradients by tokens and scores of a random linear function of it."""
    y = sample_without_replacement(x, scores, k, **options)
    weight = torch.randn(y.shape, generator=seeded(seed), dtype=torch.float64).to(y.dtype)
    return y.detach(), *torch.autograd.grad((y * weight).sum(), (x, scores))


def close(found, wanted, tolerance):
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1)


# ---- the two forms


@BOTH
@pytest.mark.parametrize("loops", [True, False])
@pytest.mark.parametrize("tau", [1e-3, 0.3, 1.0, 50.0])
@pytest.mark.parametrize("b, n, c, k", [(1, 2, 1, 1), (3, 20, 4, 7), (2, 14, 3, 7), (5, 9, 2, 2), (2, 64, 5, 32),
                                        (1, 150, 40, 70)])
def test_fast_is_the_reference(b, n, c, k, tau, hard, loops, monkeypatch):
    if not loops:
        monkeypatch.setattr(module, "c_kernels", lambda source, x: None)
    x, scores, noise = case(b, n, c, seed=n)
    found, wanted = (results(x, scores, k, noise=noise, tau=tau, hard=hard, impl=i) for i in ("fast", "reference"))
    close(found, wanted, 1e-12)


@BOTH
@pytest.mark.parametrize("pairs", [1, 7, 30, 49, 100, 1000])
def test_tiles_of_any_size(pairs, hard, monkeypatch):
    monkeypatch.setattr(module, "c_kernels", lambda source, x: None)
    x, scores, noise = case(5, 20, 3)
    whole = results(x, scores, 7, noise=noise, hard=hard)
    monkeypatch.setattr(module, "_PAIRS", pairs)
    close(results(x, scores, 7, noise=noise, hard=hard), whole, 1e-13)
    cells = [(b, a) for s, r in module._tiles(5, 7, x.device) for b in range(5)[s] for a in range(7)[r]]
    assert sorted(cells) == list(itertools.product(range(5), range(7)))


@pytest.mark.parametrize("tau", [0.2, 1.0, 5.0])
def test_gradients_are_those_of_finite_differences(tau):
    x, scores, noise = case(2, 9, 2, seed=3)
    assert torch.autograd.gradcheck(lambda x, s: sample_without_replacement(x, s, 3, tau=tau, noise=noise), (x, scores))


def test_hard_is_a_copy_with_the_gradient_of_the_soft_form():
    x, scores, noise = case(3, 20, 4)
    soft, hard = (results(x, scores, 6, noise=noise, tau=0.7, hard=h) for h in (False, True))
    index = (scores + noise).topk(6).indices
    assert hard[0].equal(x.gather(1, index[..., None].expand(-1, -1, 4)))
    assert hard[2].equal(soft[2])
    weight = torch.randn(3, 6, 4, generator=seeded(5), dtype=torch.float64)
    assert hard[1].equal(torch.zeros_like(x).scatter(1, index[..., None].expand(-1, -1, 4), weight))


@BOTH
def test_gradient_of_one_input_alone(hard):
    x, scores, noise = case(2, 12, 3)
    _, to_x, to_scores = results(x, scores, 4, noise=noise, hard=hard)
    weight = torch.randn(2, 4, 3, generator=seeded(5), dtype=torch.float64)
    y = sample_without_replacement(x, scores.detach(), 4, noise=noise, hard=hard)
    assert torch.autograd.grad((y * weight).sum(), x)[0].equal(to_x)
    y = sample_without_replacement(x.detach(), scores, 4, noise=noise, hard=hard)
    assert torch.autograd.grad((y * weight).sum(), scores)[0].equal(to_scores)
    assert not sample_without_replacement(x.detach(), scores.detach(), 4, noise=noise, hard=hard).requires_grad


@BOTH
def test_second_derivatives(hard):
    found = []
    for impl in ("fast", "reference"):
        x, scores, noise = case(1, 6, 2)
        y = sample_without_replacement(x, scores, 2, noise=noise, hard=hard, impl=impl)
        first = torch.autograd.grad(y.square().sum(), (x, scores), create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(part.sin().sum() for part in first), (x, scores))])
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-12)


@BOTH
def test_inputs_that_do_not_lie_in_one_piece(hard):
    x, scores, noise = case(2, 12, 3)
    wide = torch.randn(12, 3, 2, dtype=torch.float64)
    with torch.no_grad():
        wide.copy_(x.permute(1, 2, 0))
    turned = wide.permute(2, 0, 1).requires_grad_()
    columns = scores.detach().T.contiguous().T.requires_grad_()
    close(results(turned, columns, 4, noise=noise, hard=hard), results(x, scores, 4, noise=noise, hard=hard), 1e-14)


# ---- what the form implies


def test_rows_are_means_that_ignore_the_level_of_the_scores():
    x, scores, noise = case(3, 20, 4)
    y, _, to_scores = results(x, scores, 7, noise=noise, tau=0.5)
    assert (sample_without_replacement(torch.ones_like(x), scores, 7, noise=noise) - 1).abs().max() < 1e-14
    assert (sample_without_replacement(x, scores - 7, 7, noise=noise, tau=0.5) - y).abs().max() < 1e-13
    assert to_scores.sum(1).abs().max() < 1e-13 and ((to_scores != 0).sum(1) == 14).all()
    order = torch.randperm(20, generator=seeded())
    moved = sample_without_replacement(x[:, order], scores[:, order], 7, noise=noise[:, order], tau=0.5)
    assert (moved - y).abs().max() < 1e-14


@BOTH
def test_sets_of_a_batch_do_not_meet(hard):
    x, scores, noise = case(4, 12, 3)
    whole = results(x, scores, 4, noise=noise, hard=hard)[0]
    for i in range(4):
        one = sample_without_replacement(x[i : i + 1], scores[i : i + 1], 4, noise=noise[i : i + 1], hard=hard)
        assert (one - whole[i]).abs().max() < 1e-14


def test_limits_of_the_temperature():
    x, scores, noise = case(3, 20, 4)
    index = (scores + noise).topk(14).indices[..., None].expand(-1, -1, 4)
    own, other = x.gather(1, index).split(7, 1)
    cold, warm = (sample_without_replacement(x, scores, 7, noise=noise, tau=t) for t in (1e-9, 1e12))
    assert cold.equal(own) and (warm - own / 2 - other.mean(1, keepdim=True) / 2).abs().max() < 1e-10


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tau", [1e-30, 1e-6, 1e6, 1e30])
def test_any_temperature_is_safe(tau, dtype, hard):
    x, scores, noise = case(2, 30, 3, dtype=dtype)
    assert all(r.isfinite().all() for r in results(x, (100 * scores).detach().requires_grad_(), 9, noise=noise,
                                                   tau=tau, hard=hard))


@BOTH
@pytest.mark.parametrize("impl", ["fast", "reference"])
def test_ties(impl, hard):
    x, _, _ = case(2, 10, 3)
    level = torch.zeros(2, 10, dtype=torch.float64, requires_grad=True)
    y, to_x, to_scores = results(x, level, 5, noise=torch.zeros(()), tau=1.0, hard=hard, impl=impl)
    index = level.topk(10).indices[..., None].expand(-1, -1, 3)
    own, other = x.detach().gather(1, index).split(5, 1)
    torch.testing.assert_close(y, own if hard else own / 2 + other.mean(1, keepdim=True) / 2)
    assert to_scores.abs().max() > 0 and to_scores.sum(1).abs().max() < 1e-14 and to_x.isfinite().all()


# ---- dtypes


@BOTH
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.03), (torch.float16, 0.005)])
def test_dtype_in_is_dtype_out(dtype, tolerance, hard):
    x, scores, noise = case(2, 24, 5, dtype=dtype)
    found = results(x, scores, 8, noise=noise.float(), hard=hard)
    assert all(r.dtype == dtype for r in found)
    wanted = results(*(v.detach().double().requires_grad_() for v in (x, scores)), 8, noise=noise.double(), hard=hard)
    close([r.double() for r in found], wanted, tolerance)
    other = results(x, scores, 8, noise=noise.float(), hard=hard, impl="reference")
    close([r.double() for r in found], [r.double() for r in other], tolerance)


@BOTH
def test_scores_of_another_dtype(hard):
    x, scores, noise = case(2, 24, 5)
    wanted = results(x, scores, 8, noise=noise, hard=hard)
    narrow = x.detach().bfloat16().requires_grad_()
    y, to_x, to_scores = results(narrow, scores, 8, noise=noise, hard=hard)
    assert y.dtype == to_x.dtype == torch.bfloat16 and to_scores.dtype == torch.float64
    close([y.double()], wanted[:1], 0.03)
    y, _, to_scores = results(x, scores.detach().float().requires_grad_(), 8, noise=noise.float(), hard=hard)
    assert y.dtype == torch.float64 and to_scores.dtype == torch.float32
    close([y], wanted[:1], 1e-5)


# ---- noise and law


@BOTH
def test_noise_given_or_drawn(hard):
    x, scores, _ = case(3, 16, 2)
    noise = gumbel((3, 16), generator=seeded(4), dtype=torch.float64)
    drawn = sample_without_replacement(x, scores, 5, hard=hard, generator=seeded(4))
    assert drawn.equal(sample_without_replacement(x, scores, 5, hard=hard, noise=noise))
    assert not drawn.equal(sample_without_replacement(x, scores, 5, hard=hard, generator=seeded(5)))
    shared = sample_without_replacement(x, scores, 5, hard=hard, noise=noise[:1])
    assert shared.equal(sample_without_replacement(x, scores, 5, hard=hard, noise=noise[:1].expand(3, -1)))
    index = gumbel_top_k(scores, 5, generator=seeded(4))
    own = sample_without_replacement(x, scores, 5, hard=True, generator=seeded(4))
    assert own.equal(x.gather(1, index[..., None].expand(-1, -1, 2)))


def test_without_noise_it_is_the_plain_top_k():
    x, scores, _ = case(3, 16, 2)
    y = sample_without_replacement(x, scores, 5, hard=True, noise=torch.zeros(()))
    assert y.equal(x.gather(1, scores.topk(5).indices[..., None].expand(-1, -1, 2)))


@pytest.mark.parametrize("n, k", [(4, 1), (4, 2), (6, 3)])
def test_law_of_the_draw(n, k):
    scores = torch.randn(n, generator=seeded(n), dtype=torch.float64)
    orders = torch.tensor(list(itertools.permutations(range(n), k)))
    chances = plackett_luce(scores.expand(len(orders), n), orders).exp().numpy()
    numbers = torch.arange(n, dtype=torch.float64)[None, :, None].expand(40_000, n, 1)
    drawn = sample_without_replacement(numbers, scores.expand(40_000, n), k, hard=True, generator=seeded(7))
    base = n ** torch.arange(k)
    counts = torch.bincount(drawn[..., 0].long() @ base, minlength=n**k)[orders @ base].numpy()
    assert counts.sum() == 40_000 and stats.chisquare(counts, 40_000 * chances).pvalue > ALARM


@BOTH
def test_mean_gradient_at_a_small_temperature_is_the_exact_one_divided_by_k(hard):
    """A linear loss; see the notebook for the theorem. The bias left at tau = 0.005 is below the error of the mean."""
    n, k, m = 6, 2, 60_000
    scores, values = torch.randn(2, n, generator=seeded(1), dtype=torch.float64)
    orders = torch.tensor(list(itertools.permutations(range(n), k)))
    leaf = scores.clone().requires_grad_()
    mean = (plackett_luce(leaf.expand(len(orders), n), orders).exp() * values[orders].sum(1)).sum()
    exact = torch.autograd.grad(mean, leaf)[0]
    many = scores.expand(m, n).clone().requires_grad_()
    x = values[None, :, None].expand(m, n, 1)
    y = sample_without_replacement(x, many, k, tau=0.005, hard=hard, generator=seeded(2))
    each = torch.autograd.grad(y.sum(), many)[0]
    z = (each.mean(0) - exact / k) / (each.std(0) / math.sqrt(m))
    assert z.abs().max() < stats.norm.isf(ALARM / 2 / n)
    assert ((each.mean(0) - exact) / (each.std(0) / math.sqrt(m))).abs().max() > 6  # that the test has teeth


@BOTH
@pytest.mark.parametrize("impl", ["fast", "reference"])
def test_excluded_tokens_may_hold_anything(impl, hard):
    x, scores, noise = case(2, 16, 3)
    out = torch.zeros(16, dtype=torch.bool)
    out[[1, 5, 6, 11]] = True
    left = results(x[:, ~out], scores[:, ~out], 6, noise=noise[:, ~out], hard=hard)
    dirty = x.detach().masked_fill(out[None, :, None], torch.nan).requires_grad_()
    hidden = scores.detach().masked_fill(out, -torch.inf).requires_grad_()
    y, to_x, to_scores = results(dirty, hidden, 6, noise=noise, hard=hard, impl=impl)
    assert (y - left[0]).abs().max() < 1e-13
    assert (to_x[:, out] == 0).all() and (to_scores[:, out] == 0).all()
    weight = torch.randn(2, 6, 3, generator=seeded(5), dtype=torch.float64)
    kept = sample_without_replacement(x, hidden, 6, noise=noise, hard=hard)
    close((to_x, to_scores), torch.autograd.grad((kept * weight).sum(), (x, hidden)), 1e-12)


# ---- with replacement


@BOTH
def test_with_replacement_is_a_softmax_a_row(hard):
    x, scores, _ = case(2, 7, 3)
    noise = gumbel((2, 4, 7), generator=seeded(3), dtype=torch.float64)
    weights = gumbel_softmax(scores[:, None].expand(-1, 4, -1), tau=0.6, hard=hard, noise=noise)
    y = sample_with_replacement(x, scores, 4, tau=0.6, hard=hard, noise=noise)
    wanted = weights @ x
    close([y], [wanted], 1e-14)
    for a, b in zip(torch.autograd.grad(y.square().sum(), (x, scores)),
                    torch.autograd.grad(wanted.square().sum(), (x, scores)), strict=True):
        close([a], [b], 1e-13)


def test_with_replacement_law_and_duplicates():
    scores = torch.tensor([0.0, 1.0, 2.0, -1.0], dtype=torch.float64)
    numbers = torch.arange(4, dtype=torch.float64)[None, :, None]
    drawn = sample_with_replacement(numbers, scores[None], 20_000, hard=True, generator=seeded()).flatten().long()
    counts = torch.bincount(drawn, minlength=4).numpy()
    assert stats.chisquare(counts, 20_000 * scores.softmax(0).numpy()).pvalue > ALARM


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_with_replacement_dtype_more_draws_than_tokens_and_excluded(dtype):
    x, scores = torch.randn(2, 5, 3, generator=seeded()).to(dtype), torch.zeros(2, 5, dtype=dtype)
    x[:, 2], scores[:, 2] = torch.nan, -torch.inf
    for hard in (False, True):
        y = sample_with_replacement(x, scores, 50, hard=hard, generator=seeded())
        assert y.dtype == dtype and y.shape == (2, 50, 3) and y.isfinite().all()


# ---- at work with the rest of torch


@BOTH
def test_compiles(hard):
    x, scores, noise = case(2, 12, 3)
    plain = results(x, scores, 4, noise=noise, hard=hard)
    torch._dynamo.reset()
    compiled = torch.compile(sample_without_replacement, backend="eager")
    y = compiled(x, scores, 4, hard=hard, noise=noise)
    weight = torch.randn(y.shape, generator=seeded(5), dtype=torch.float64)
    close((y.detach(), *torch.autograd.grad((y * weight).sum(), (x, scores))), plain, 1e-13)


@BOTH
@pytest.mark.parametrize("impl", ["fast", "reference"])
def test_autocast_changes_nothing(impl, hard):
    x, scores, noise = case(2, 12, 3, dtype=torch.float32)
    plain = results(x, scores, 4, noise=noise, hard=hard, impl=impl)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = results(x, scores, 4, noise=noise, hard=hard, impl=impl)
        y = sample_with_replacement(x, scores, 4, generator=seeded())
    assert y.dtype == torch.float32 and y.equal(sample_with_replacement(x, scores, 4, generator=seeded()))
    close(inside[:1], plain[:1], 0)
    close(inside, plain, 0 if impl == "fast" else 0.03)


def test_inference_mode():
    x, scores, noise = case(2, 12, 3)
    wanted = sample_without_replacement(x, scores, 4, hard=True, noise=noise).detach()
    with torch.inference_mode():
        assert sample_without_replacement(x, scores, 4, hard=True, noise=noise).equal(wanted)


def test_forms_of_the_speed_table_agree():
    for hard in (False, True):
        errors = measure.contest("swap", sampling_cases(60, 10, 5, 3, hard)).errors()
        assert list(errors) == ["fast", "gathered", "selection matrices"] and max(errors.values()) < 1e-5


@BOTH
@pytest.mark.parametrize("b, n, c, k", [(1, 4, 1, 2), (3, 40, 5, 8)])
def test_flops_are_counted(b, n, c, k, hard):
    x, scores, noise = case(b, n, c)
    with FlopCounterMode(display=False) as forward:
        y = sample_without_replacement(x, scores, k, hard=hard, noise=noise)
    with FlopCounterMode(display=False) as backward:
        y.sum().backward()
    assert forward.get_total_flops() == swap_flops(k, c, batch=b, hard=hard)
    assert backward.get_total_flops() == swap_flops(k, c, batch=b, hard=hard, backward=True)


def test_backward_keeps_no_matrix_of_comparisons():
    x, scores, noise = case(2, 200, 3, dtype=torch.float32)
    kept, given = [], (x.data_ptr(), scores.data_ptr())

    def keep(t):
        kept.append(t.numel() * (t.data_ptr() not in given))
        return t
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        sample_without_replacement(x, scores, 64, noise=noise)
    assert 0 < sum(kept) <= 2 * 128 * (3 + 2)


# ---- bad input

X, S = torch.zeros(1, 5, 2), torch.zeros(1, 5)


@pytest.mark.parametrize("change, error, message", [
    ({"k": 3}, ValueError, "at least 6 tokens, got 5"),
    ({"k": 0}, ValueError, "k must be"),
    ({"k": 1.0}, ValueError, "k must be"),
    ({"tau": 0.0}, ValueError, "tau"),
    ({"tau": -1.0}, ValueError, "tau"),
    ({"tau": math.nan}, ValueError, "tau"),
    ({"scores": S * math.nan}, ValueError, "scores must be finite or -inf"),
    ({"scores": S + math.inf}, ValueError, "scores must be finite or -inf"),
    ({"scores": torch.tensor([[0.0, 0.0, 0.0, -math.inf, -math.inf]])}, ValueError, "at least 4 finite"),
    ({"scores": S[:, :4]}, ValueError, "scores must have shape"),
    ({"scores": S[0]}, ValueError, "scores must have shape"),
    ({"scores": S.long()}, TypeError, "scores must be a floating"),
    ({"scores": None}, TypeError, "scores must be a floating"),
    ({"x": X[0]}, ValueError, "x must have shape"),
    ({"x": X[:, :0]}, ValueError, "not empty"),
    ({"x": X.long()}, TypeError, "x must be a floating"),
    ({"x": X * math.nan}, ValueError, "x .*NaN"),
    ({"x": X + math.inf}, ValueError, "x .*infinite"),
    ({"noise": torch.zeros(2)}, ValueError, "noise must broadcast"),
    ({"noise": torch.zeros(5, dtype=torch.int64)}, TypeError, "noise"),
    ({"noise": S + math.nan}, ValueError, "noise"),
    ({"impl": "quick"}, ValueError, "impl"),
])
def test_bad_input(change, error, message):
    with pytest.raises(error, match=message):
        sample_without_replacement(**({"x": X, "scores": S, "k": 2} | change))


@pytest.mark.parametrize("change, error", [
    ({"k": 0}, ValueError), ({"tau": 0.0}, ValueError), ({"scores": S * math.nan}, ValueError),
    ({"scores": S - math.inf}, ValueError), ({"scores": S[:, :4]}, ValueError), ({"x": X * math.nan}, ValueError),
    ({"x": X.long()}, TypeError), ({"noise": torch.zeros(3, 5)}, ValueError),
])
def test_bad_input_with_replacement(change, error):
    with pytest.raises(error):
        sample_with_replacement(**({"x": X, "scores": S, "k": 2} | change))


@pytest.mark.parametrize("counts", [(0, 3, 1), (3, 2.0, 1), (3, 2, 0)])
def test_bad_counts(counts):
    with pytest.raises(ValueError, match="must be an integer"):
        swap_flops(*counts[:2], batch=counts[2])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@BOTH
@pytest.mark.parametrize("dtype, tolerance", [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.05),
                                              (torch.float16, 0.01)])
def test_on_a_gpu(dtype, tolerance, hard):
    x, scores, noise = (v.detach().cuda() for v in case(4, 300, 8, dtype=dtype))
    x, scores = x.requires_grad_(), scores.requires_grad_()
    found, wanted = (results_gpu(x, scores, 60, noise=noise.float() if dtype != torch.float64 else noise, hard=hard,
                                 impl=i) for i in ("fast", "reference"))
    close([r.double() for r in found], [r.double() for r in wanted], tolerance)
    drawn = sample_without_replacement(x, scores, 60, hard=hard, generator=torch.Generator("cuda").manual_seed(0))
    assert drawn.is_cuda and drawn.dtype == dtype


def results_gpu(x, scores, k, **options):
    """As `results`, with a weight drawn on the CPU."""
    y = sample_without_replacement(x, scores, k, **options)
    weight = torch.randn(y.shape, generator=seeded(5), dtype=torch.float64).to(y)
    return y.detach(), *torch.autograd.grad((y * weight).sum(), (x, scores))
