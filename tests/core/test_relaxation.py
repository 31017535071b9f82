"""Gumbel noise, draws with and without replacement, soft choices and their mean, straight-through."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch.utils.checkpoint import checkpoint

from sparseattn.core import relaxation as module
from sparseattn.core.attention import check_values
from sparseattn.core.relaxation import (
    check_noise,
    gumbel,
    gumbel_softmax,
    gumbel_top_k,
    mean_gumbel_softmax,
    plackett_luce,
    random_integers,
    same_draws,
    straight_through,
)

ALARM = 1e-6  # a test with random draws fails for one seed in a million


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=seeded(seed), dtype=dtype)


# ---- noise


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_noise_keeps_dtype_shape_and_stays_finite(dtype):
    noise = gumbel((1000, 20), generator=seeded(), dtype=dtype)
    assert noise.dtype == dtype and noise.shape == (1000, 20) and noise.isfinite().all()


@pytest.mark.parametrize("dtype, bits, digits", [(torch.int32, 31, 24), (torch.int64, 63, 53)])
def test_noise_at_the_ends_and_in_the_middle(dtype, bits, digits):
    last = 2**bits - 1
    k = torch.tensor([0, 1, 2 ** (bits - 1), last - 1, last], dtype=dtype)
    found = module._inverse_cdf(k).tolist()
    v = [math.ldexp(0.5, -bits), math.ldexp(1.5, -bits), 0.5]
    expected = [-math.log(-math.log1p(-x)) for x in v] + 2 * [-math.log(digits * math.log(2))]
    assert found == pytest.approx(expected, rel=1e-6) and found == sorted(found, reverse=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_law(dtype):
    noise = gumbel((100_000,), generator=seeded(1), dtype=dtype).double().numpy()
    assert stats.kstest(noise, stats.gumbel_r.cdf).pvalue > ALARM
    assert stats.kstest(noise + 0.05, stats.gumbel_r.cdf).pvalue < ALARM


def test_noise_tail_is_finer_than_float32_uniforms():
    """Of integers below 2^9 every one has its own value, beyond what -log(-log(rand)) can reach."""
    values = module._inverse_cdf(torch.arange(512, dtype=torch.int32))
    assert values.unique().numel() == 512 and (values[:64] > 16.7).all()


def test_noise_follows_the_generator():
    assert gumbel((7,), generator=seeded(3)).equal(gumbel((7,), generator=seeded(3)))
    assert not gumbel((7,), generator=seeded(3)).equal(gumbel((7,), generator=seeded(4)))
    assert gumbel((0, 3)).shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.int32, "float32", None])
def test_noise_refuses_other_dtypes(dtype):
    with pytest.raises(TypeError, match="dtype"):
        gumbel((2,), dtype=dtype)


# ---- soft choices


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("tau", [0.1, 1.0, 7.0])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_softmax_value_and_gradient(hard, tau, dim):
    logits, weight = draw(5, 4, 6).requires_grad_(), draw(5, 4, 6, seed=2)
    noise = gumbel((5, 4, 6), generator=seeded(1), dtype=torch.float64)
    found = gumbel_softmax(logits, tau=tau, hard=hard, noise=noise, dim=dim)
    soft = ((logits + noise) / tau).softmax(dim)
    if hard:
        winner = torch.zeros_like(soft).scatter_(dim, (logits + noise).argmax(dim, keepdim=True), 1)
        assert found.equal(winner)
    else:
        torch.testing.assert_close(found, soft, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad((y * weight).sum(), logits)[0] for y in (found, soft)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


def test_softmax_gradcheck():
    noise = gumbel((3, 4), generator=seeded(), dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: gumbel_softmax(x, tau=0.7, noise=noise), draw(3, 4).requires_grad_())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("tau", [1e-30, 1e-3, 1.0, 1e30])
def test_softmax_is_safe_at_any_temperature(dtype, tau):
    logits = (1e4 * draw(20, 6)).to(dtype).requires_grad_()
    y = gumbel_softmax(logits, tau=tau, generator=seeded())
    assert y.dtype == dtype and y.isfinite().all() and (y.float().sum(-1) - 1).abs().max() < 0.01
    assert torch.autograd.grad(y[:, 0].sum(), logits)[0].isfinite().all()


def test_softmax_excludes_minus_infinity():
    logits = draw(500, 5)
    logits[:, 2] = -torch.inf
    logits.requires_grad_()
    for hard in (False, True):
        y = gumbel_softmax(logits, hard=hard, generator=seeded())
        assert (y[:, 2] == 0).all() and torch.autograd.grad(y[:, 0].sum(), logits)[0].isfinite().all()


def test_softmax_noise_broadcasts():
    logits, noise = draw(4, 3), draw(3, seed=1)
    assert gumbel_softmax(logits, noise=noise).equal(gumbel_softmax(logits, noise=noise.expand(4, 3)))
    torch.testing.assert_close(gumbel_softmax(logits, noise=torch.zeros(())), logits.softmax(-1))


def test_hard_softmax_law():
    p = torch.tensor([0.05, 0.15, 0.3, 0.5])
    found = gumbel_softmax(p.log().expand(50_000, 4), hard=True, generator=seeded(5)).sum(0).numpy()
    assert stats.chisquare(found, 50_000 * p.double().numpy() / p.double().sum().item()).pvalue > ALARM


# ---- its mean


@pytest.mark.parametrize("gap", [0.3, 1.0, 5.0, 12.0])
def test_mean_of_two_items(gap):
    a = math.exp(gap)
    closed = a / (a - 1) - a * gap / (a - 1) ** 2
    found = mean_gumbel_softmax(torch.tensor([gap, 0.0], dtype=torch.float64))
    assert found.tolist() == pytest.approx([closed, 1 - closed], abs=1e-10)


@pytest.mark.parametrize("tau", [0.01, 0.3, 1.0, 4.0, 100.0])
def test_mean_sums_to_one_and_exchanges_the_two_noises(tau):
    logits = 3 * draw(6)
    mean = mean_gumbel_softmax(logits, tau=tau)
    assert abs(mean.sum().item() - 1) < 1e-10
    torch.testing.assert_close(mean, mean_gumbel_softmax(logits / tau, tau=1 / tau), rtol=0, atol=1e-10)
    torch.testing.assert_close(mean, mean_gumbel_softmax(logits + 100, tau=tau), rtol=0, atol=1e-10)


def test_mean_at_both_ends():
    logits = draw(5)
    torch.testing.assert_close(mean_gumbel_softmax(logits, tau=1e-9), logits.softmax(0), rtol=0, atol=1e-10)
    assert (mean_gumbel_softmax(logits, tau=1e6) - 0.2).abs().max() < 1e-5


@pytest.mark.parametrize("tau", [0.4, 1.0, 2.5])
def test_mean_is_that_of_draws_with_its_gradient(tau):
    logits = draw(4).requires_grad_()
    many = logits.detach().expand(40_000, 4).clone().requires_grad_()
    weight = torch.tensor([0.0, 1.0, -1.0, 2.0], dtype=torch.float64)
    soft = gumbel_softmax(many, tau=tau, generator=seeded(7))
    exact = mean_gumbel_softmax(logits, tau=tau)
    slopes = torch.autograd.grad((soft @ weight).sum(), many)[0], torch.autograd.grad(exact @ weight, logits)[0]
    bound = stats.norm.isf(ALARM / 2 / 8)
    for drawn, mean in ((soft.detach(), exact.detach()), slopes):
        assert ((drawn.mean(0) - mean) / (drawn.std(0) / 200)).abs().max() < bound


def test_mean_of_one_item_and_dtype():
    assert mean_gumbel_softmax(torch.tensor([3.0])).item() == pytest.approx(1)
    assert mean_gumbel_softmax(torch.zeros(3)).dtype == torch.float32


# ---- straight through


def test_straight_through_is_exact_and_passes_the_gradient():
    hard, soft, weight = draw(1000), draw(1000, seed=1).requires_grad_(), draw(1000, seed=2)
    out = straight_through(hard, soft)
    assert out.equal(hard)
    assert torch.autograd.grad((out * weight).sum(), soft)[0].equal(weight)
    leaf = hard.clone().requires_grad_()
    assert torch.autograd.grad(straight_through(leaf, soft).sum(), leaf, allow_unused=True)[0] is None


def test_straight_through_refuses_other_shapes():
    with pytest.raises(ValueError, match="one shape"):
        straight_through(torch.zeros(2), torch.zeros(3))


# ---- the k largest


@pytest.mark.parametrize("n, k", [(4, 1), (4, 2), (4, 4), (5, 3)])
def test_top_k_law(n, k):
    scores = draw(n, seed=n + k)
    orders = torch.tensor(list(itertools.permutations(range(n), k)))
    chances = plackett_luce(scores.expand(len(orders), n), orders).exp()
    assert chances.sum().item() == pytest.approx(1, abs=1e-12)
    drawn, base = gumbel_top_k(scores.expand(40_000, n), k, generator=seeded(9)), n ** torch.arange(k)
    counts = torch.bincount(drawn @ base, minlength=n**k)[orders @ base].numpy()
    assert counts.sum() == 40_000 and stats.chisquare(counts, 40_000 * chances.numpy()).pvalue > ALARM


def test_top_k_without_order_is_the_same_set():
    scores, noise = draw(30, 50), gumbel((30, 50), generator=seeded(), dtype=torch.float64)
    ordered, loose = (gumbel_top_k(scores, 9, noise=noise, ordered=o) for o in (True, False))
    assert ordered.sort(-1).values.equal(loose.sort(-1).values) and ordered.dtype == torch.int64
    assert (scores + noise).gather(-1, ordered).diff(dim=-1).le(0).all()


def test_top_k_never_takes_minus_infinity():
    scores = torch.zeros(200, 8)
    scores[:, ::2] = -torch.inf
    assert (gumbel_top_k(scores, 4, generator=seeded()) % 2 == 1).all()
    with pytest.raises(ValueError, match="at least 5 finite"):
        gumbel_top_k(scores, 5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_top_k_in_half_precision_is_that_of_float32(dtype):
    scores = draw(10, 100).to(dtype)
    assert gumbel_top_k(scores, 5, generator=seeded()).equal(gumbel_top_k(scores.float(), 5, generator=seeded()))


def test_an_item_that_is_never_drawn_leaves_finite_gradients():
    scores = torch.tensor([0.0, 1.0, -torch.inf, -torch.inf], dtype=torch.float64, requires_grad=True)
    value = plackett_luce(scores, torch.tensor([0, 1, 2]))
    (found,) = torch.autograd.grad(value, scores)
    assert value == -torch.inf and found.isfinite().all()
    first = torch.autograd.grad(plackett_luce(scores, torch.tensor([0])), scores)[0]
    torch.testing.assert_close(found[:2], first[:2], rtol=0, atol=1e-15)


def test_plackett_luce_by_hand_and_gradient():
    weights, order = np.array([1.0, 2.0, 3.0, 4.0]), [2, 0, 3]
    by_hand = 3 / 10 * 1 / 7 * 4 / 6
    scores = torch.tensor(np.log(weights)).requires_grad_()
    assert plackett_luce(scores, torch.tensor(order)).exp().item() == pytest.approx(by_hand, abs=1e-14)
    assert torch.autograd.gradcheck(lambda s: plackett_luce(s, torch.tensor(order)), scores)
    whole = plackett_luce(scores, torch.tensor([3, 2, 1, 0]))
    assert torch.autograd.grad(whole, scores)[0].isfinite().all()
    with pytest.raises(ValueError, match="at most once"):
        plackett_luce(scores, torch.tensor([1, 1]))


# ---- bad input


@pytest.mark.parametrize("call, error, message", [
    (lambda: gumbel_softmax(torch.zeros(3), tau=0.0), ValueError, "tau"),
    (lambda: gumbel_softmax(torch.zeros(3), tau=math.nan), ValueError, "tau"),
    (lambda: gumbel_softmax(torch.zeros(3), tau=math.inf), ValueError, "tau"),
    (lambda: gumbel_softmax(torch.zeros(3), tau=True), ValueError, "tau"),
    (lambda: gumbel_softmax(torch.tensor([0.0, math.nan])), ValueError, "NaN"),
    (lambda: gumbel_softmax(torch.tensor([0.0, math.inf])), ValueError, "inf"),
    (lambda: gumbel_softmax(torch.full((2, 3), -math.inf)), ValueError, "finite entries"),
    (lambda: gumbel_softmax(torch.tensor([1, 2])), TypeError, "floating"),
    (lambda: gumbel_softmax(torch.zeros(2, 0)), ValueError, "at least one entry"),
    (lambda: gumbel_softmax([0.0, 1.0]), TypeError, "floating"),
    (lambda: gumbel_softmax(torch.zeros(3), noise=torch.zeros(2)), ValueError, "broadcast"),
    (lambda: gumbel_softmax(torch.zeros(3), noise=torch.zeros(3, dtype=torch.int64)), TypeError, "noise"),
    (lambda: gumbel_top_k(torch.zeros(3), 4), ValueError, "at most 3"),
    (lambda: gumbel_top_k(torch.zeros(3), 0), ValueError, "k must be"),
    (lambda: gumbel_top_k(torch.zeros(3), 1.0), ValueError, "k must be"),
    (lambda: mean_gumbel_softmax(torch.zeros(2, 2)), ValueError, "one dimension"),
    (lambda: mean_gumbel_softmax(torch.tensor([0.0, -math.inf])), ValueError, "finite"),
    (lambda: check_noise(torch.zeros(2, 3), (3,)), ValueError, "broadcast"),
])
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_second_pass_of_a_checkpoint_draws_the_same():
    """With the source where it was afterwards; without the contexts the gradient is that of other draws."""
    def gradient(**how):
        g, x = torch.Generator().manual_seed(0), torch.zeros(5, requires_grad=True)
        contexts = {"context_fn": lambda: same_draws(g)} if how else {}
        out = checkpoint(lambda x: x.sin() * gumbel((5,), generator=g), x, use_reentrant=False, **contexts)
        after = g.get_state()
        slope, = torch.autograd.grad(out.sum(), x)
        assert not how or torch.equal(g.get_state(), after)
        return slope

    drawn = gumbel((5,), generator=torch.Generator().manual_seed(0))
    assert torch.equal(gradient(same=True), drawn) and not torch.equal(gradient(), drawn)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_integers_are_the_same_under_compilation(dtype):
    def draw(x):
        return random_integers((7,), dtype, generator=None) + x

    found = []
    for f in (draw, torch.compile(draw, backend="eager", fullgraph=True)):
        torch.manual_seed(0)
        found.append(f(torch.zeros(7, dtype=dtype)))
    assert torch.equal(*found)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu():
    source = torch.Generator("cuda").manual_seed(0)
    noise = gumbel((200_000,), generator=source)
    assert noise.is_cuda and noise.isfinite().all()
    assert stats.kstest(noise.double().cpu().numpy(), stats.gumbel_r.cdf).pvalue > ALARM
    logits = torch.zeros(4, 5, device="cuda")
    assert gumbel_softmax(logits, hard=True, generator=source).sum().item() == 4
    assert gumbel_top_k(logits, 5).sort(-1).values.tolist() == [[0, 1, 2, 3, 4]] * 4


def test_impossible_orders_have_no_chance_and_no_nan():
    scores = torch.tensor([0.0, 0.0, -math.inf], requires_grad=True)
    for order in ([0, 1, 2], [2, 0], [2, 1, 0]):
        assert plackett_luce(scores, torch.tensor(order)).item() == -math.inf
    found, = torch.autograd.grad(plackett_luce(scores, torch.tensor([0, 1])), scores)
    torch.testing.assert_close(found, torch.tensor([0.5, -0.5, 0.0]))


def test_scores_are_looked_at_where_values_are():
    with check_values(False):
        assert gumbel_softmax(torch.tensor([0.0, math.nan])).isnan().all()
    scores, order = draw(3, 4), torch.tensor([1, 0])
    found = torch.func.vmap(lambda s: plackett_luce(s, order))(scores)
    torch.testing.assert_close(found, plackett_luce(scores, order.expand(3, 2)))
    compiled = torch.compile(plackett_luce, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(scores, order.expand(3, 2)), found)


def test_repeated_draws_need_a_generator():
    with pytest.raises(TypeError, match="generator must be a torch.Generator"):
        same_draws(None)
