"""Orders and windows are what the formulas say; estimators of dense attention equal their references and converge."""

import doctest
import functools
import itertools
import math

import pytest
import torch
from scipy import stats

from sparseattn.core.attention import attention_logits, dense_attention, masked_softmax
from sparseattn.core.patterns import depth_to_connect, reach
from sparseattn.sampled import cycles as module
from sparseattn.sampled.cycles import (
    admissible_sizes,
    average_attention_limit,
    check_order,
    cycle_pattern,
    cycle_successor,
    dense_limit_attention,
    expected_coverage,
    expected_cycles,
    path_pattern,
    sample_cycle,
    sample_cycle_cases,
    shift_attention,
    windows,
    windows_pattern,
)

ALARM = 1e-4  # false-alarm rate of every statistical test; seeds are fixed
EVERY = {n: torch.tensor(list(itertools.permutations(range(n)))) for n in range(1, 7)}


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def draw(b, h, n, d, e=None, dtype=torch.float64, seed=0):
    g = generator(seed)
    return [torch.randn(b, h, n, size, generator=g, dtype=dtype) for size in (d, d, e or d)]


def lengths(n):
    "A mask for three sets of n points: all, some, one."
    return torch.arange(n) < torch.tensor([[n], [max(1, n // 2)], [1]])


def results(function, leaves, *args, **options):
    leaves = [x.clone().requires_grad_() for x in leaves]
    out = function(*leaves, *args, **options)
    weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    return out, *torch.autograd.grad((out * weight).sum(), leaves)


def assert_same(found, expected, tolerance):
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_examples():
    found = doctest.testmod(module)
    assert found.attempted > 15 and found.failed == 0


# ---- orders


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)])
@pytest.mark.parametrize("n", [1, 2, 3, 64, 513, 2000])
def test_orders_are_permutations(n, batch):
    order = sample_cycle(n, batch=batch, generator=generator())
    assert order.shape == (*batch, n) and order.dtype == torch.int64
    assert torch.equal(order.sort(-1).values, torch.arange(n).expand(*batch, n))
    assert torch.equal(order, sample_cycle(n, batch=batch, generator=generator()))
    if n > 3 and batch:
        assert not torch.equal(order[0], order[1])


def test_batch_may_be_a_list_or_a_size():
    expected = sample_cycle(5, batch=(2, 3), generator=generator())
    for batch in ([2, 3], torch.Size([2, 3])):
        assert torch.equal(expected, sample_cycle(5, batch=batch, generator=generator()))


@pytest.mark.parametrize("way", ["single", "sorted", "one by one"])
def test_every_order_is_equally_likely(way, monkeypatch):
    monkeypatch.setattr(module, "_PACKED", 0 if way == "one by one" else 512)
    g = generator()
    if way == "single":
        orders = torch.stack([sample_cycle(4, generator=g) for _ in range(12_000)])
    else:
        orders = sample_cycle(4, batch=(12_000,), generator=g)
    found = orders.unique(dim=0, return_counts=True)[1].double().numpy()
    assert len(found) == 24 and stats.chisquare(found).pvalue > ALARM


def test_points_and_places_are_independent():
    """Places beyond the first few, where a sort could be biased."""
    n, repeats = 40, 8000
    orders = sample_cycle(n, batch=(repeats,), generator=generator(1))
    found = torch.bincount((torch.arange(n) * n + orders).flatten(), minlength=n * n).double()
    score = ((found - repeats / n).square() / (repeats / n)).sum().item()
    assert stats.chi2.sf(score, (n - 1) ** 2) > ALARM


def test_sort_without_numpy_gives_the_same_orders(monkeypatch):
    expected = sample_cycle(37, batch=(5,), generator=generator())
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert torch.equal(expected, sample_cycle(37, batch=(5,), generator=generator()))


@pytest.mark.parametrize("n", [0, -1, 2.0, "3", None, True])
def test_number_of_points_is_refused(n):
    with pytest.raises(ValueError, match="n must be an integer >= 1"):
        sample_cycle(n)


def test_batch_is_refused():
    with pytest.raises(TypeError, match="batch must be a tuple of ints, got int"):
        sample_cycle(4, batch=3)
    for batch in ((0,), (2, -1), (1.5,)):
        with pytest.raises(ValueError, match="batch must be an integer >= 1"):
            sample_cycle(4, batch=batch)


@pytest.mark.parametrize("order", [[0, 0, 1], [1, 2, 3], [-1, 0, 1], [[0, 1, 2], [0, 2, 2]]])
def test_what_is_no_permutation_is_refused(order):
    for function in (cycle_successor, cycle_pattern, lambda o: windows(o, 2), lambda o: windows_pattern(o, 2)):
        with pytest.raises(ValueError, match="order must hold each point from 0 to 2 once"):
            function(torch.tensor(order))


def test_orders_of_another_kind_are_refused():
    with pytest.raises(TypeError, match="order must be an int64 tensor, got torch.int32"):
        check_order("order", torch.arange(3, dtype=torch.int32))
    with pytest.raises(TypeError, match="got list"):
        check_order("order", [0, 1])
    with pytest.raises(ValueError, match=r"shape \(..., 4\), not empty, got \(3,\)"):
        check_order("order", torch.arange(3), 4)
    for empty in (torch.zeros(0, dtype=torch.long), torch.zeros(0, 3, dtype=torch.long), torch.tensor(0)):
        with pytest.raises(ValueError, match="not empty"):
            check_order("order", empty)


def test_successor_follows_the_order():
    order = sample_cycle(11, batch=(2, 3), generator=generator())
    successor = cycle_successor(order)
    assert torch.equal(successor.gather(-1, order), order.roll(-1, -1))
    assert cycle_successor(torch.tensor([0])).tolist() == [0]
    assert cycle_successor(torch.tensor([1, 0])).tolist() == [1, 0]


def test_successor_skips_masked_points():
    g = generator()
    order = sample_cycle(9, batch=(50,), generator=g)
    mask = torch.rand(50, 9, generator=g) < 0.6
    for row, real, successor in zip(order, mask, cycle_successor(order, mask), strict=True):
        kept = row[real[row]]
        assert torch.equal(successor[kept], kept.roll(-1))
        assert torch.equal(successor[~real], torch.arange(9)[~real])
    assert torch.equal(cycle_successor(order, mask[0]), cycle_successor(order, mask[0].expand(50, 9)))
    with pytest.raises(TypeError, match="mask must be a boolean tensor"):
        cycle_successor(order, mask.int())
    with pytest.raises(ValueError, match="mask must broadcast"):
        cycle_successor(order, mask[:, :8])


# ---- windows


@pytest.mark.parametrize("n", range(1, 31))
def test_windows_join_to_one_cycle(n):
    orders = EVERY[n] if n <= 5 else sample_cycle(n, batch=(3,), generator=generator(n))
    for size in [*admissible_sizes(n), n + 1]:
        w = windows(orders, size)
        assert w.shape == (len(orders), n // (size - 1), size)
        assert torch.equal(w[:, :, :-1].flatten(1), orders) and torch.equal(w[..., -1], w[..., 0].roll(-1, -1))
        assert torch.equal(windows_pattern(orders, size), cycle_pattern(orders))
        dense = windows_pattern(orders, size, inside="dense")
        for pattern, row in zip(dense, w, strict=True):
            expected = torch.zeros(n, n, dtype=torch.bool)
            for window in row:
                expected[window[:, None], window] = True
            assert torch.equal(pattern, expected)
    assert depth_to_connect(cycle_pattern(orders[0])) == n - 1


def test_sizes():
    assert [admissible_sizes(n) for n in (1, 2, 3, 61)] == [[], [2], [2], [2]]
    for n in range(1, 50):
        assert admissible_sizes(n) == [s for s in range(2, n + 1) if n % (s - 1) == 0]
    for size in (1, 6, 14, 0, 2.0):
        with pytest.raises(ValueError, match="size"):
            windows(torch.arange(12), size)
    with pytest.raises(ValueError, match="possible: 2, 3, 4, 5, 7, 13"):
        windows(torch.arange(12), 8)
    with pytest.raises(ValueError, match="inside must be one of 'path', 'dense'"):
        windows_pattern(torch.arange(6), 3, inside="ring")


@pytest.mark.parametrize("size", range(1, 12))
def test_path(size):
    pattern = path_pattern(size)
    assert pattern.sum() == 2 * size - 1
    assert torch.equal(pattern, torch.eye(size, dtype=torch.bool) | torch.eye(size, dtype=torch.bool).roll(1, 1).triu())
    assert torch.equal(reach(pattern, size), torch.ones(size, size, dtype=torch.bool).triu())


# ---- statistics of edges


@pytest.mark.parametrize("n", range(2, 7))
def test_every_edge_is_equally_likely(n):
    count = cycle_pattern(EVERY[n]).sum(0)
    eye = torch.eye(n, dtype=torch.long)
    assert torch.equal(count, math.factorial(n) * eye + math.factorial(n) // (n - 1) * (1 - eye))


def test_coverage():
    for n, cycles in ((4, 1), (4, 2), (5, 2)):  # over all tuples of orders
        successors = cycle_successor(EVERY[n])
        seen = torch.zeros(len(successors) ** cycles, n, n, dtype=torch.bool)
        for t, chosen in enumerate(itertools.product(range(len(successors)), repeat=cycles)):
            for c in chosen:
                seen[t, torch.arange(n), successors[c]] = True
        share = seen.double().mean(0)[0, 1:].mean().item()
        assert share == pytest.approx(expected_coverage(n, cycles), abs=1e-12)
    assert expected_coverage(1, 5) == expected_coverage(2, 1) == 1.0
    assert expected_cycles(1) == 0 and expected_cycles(2) == 1 and expected_cycles(3) == pytest.approx(3)


@pytest.mark.parametrize(
    "function", [expected_cycles, admissible_sizes, path_pattern, lambda n: expected_coverage(5, n)]
)
@pytest.mark.parametrize("bad", [0, 1.5, "2"])
def test_counts_are_refused(function, bad):
    with pytest.raises(ValueError, match="must be an integer >= 1"):
        function(bad)


# ---- the limit of averages


@pytest.mark.parametrize("n", range(1, 7))
def test_limit_is_the_average_over_all_orders(n):
    logits = 3 * torch.randn(2, n, n, generator=generator(n), dtype=torch.float64)
    average = masked_softmax(logits[:, None], cycle_pattern(EVERY[n])).mean(1)
    limit = average_attention_limit(logits)
    torch.testing.assert_close(limit, average, rtol=0, atol=1e-14)
    torch.testing.assert_close(limit.sum(-1), torch.ones(2, n, dtype=torch.float64))
    assert torch.allclose(limit, logits.softmax(-1), rtol=0, atol=1e-14) == (n <= 2)


def test_limit_survives_large_scores():
    logits = torch.tensor([[0.0, 1e4, -1e4], [1e4, 0, 0], [0, 0, 1e4]])
    limit = average_attention_limit(logits)
    torch.testing.assert_close(limit[0], torch.tensor([0.5, 0.5, 0.0]))
    torch.testing.assert_close(limit[2], torch.tensor([0.0, 0.0, 1.0]))


@pytest.mark.parametrize("bad", [torch.zeros(2, 3), torch.zeros(3), torch.full((2, 2), torch.nan)])
def test_limit_refuses(bad):
    with pytest.raises(ValueError, match="logits"):
        average_attention_limit(bad)


# ---- estimators


def estimators(n, shape, seed=0):
    "Both estimators with orders for one set, for each set, or for each head."
    g = generator(seed)
    for draws in (1, 5):
        yield dense_limit_attention, (sample_cycle(n, batch=(draws, *shape), generator=g),)
    for shifts in sorted({1, max(1, n // 3), max(1, n - 1)}):
        yield shift_attention, (sample_cycle(n, batch=shape, generator=g), shifts)


NAMES = ["1 cycle", "5 cycles", "1 shift", "some shifts", "all shifts"]


@pytest.mark.parametrize("n", [1, 2, 3, 7, 40, 70])
@pytest.mark.parametrize("shape", [(), (3,), (3, 2)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_equal_to_the_reference(n, shape, masked):
    mask = lengths(n) if masked else None
    leaves = draw(3, 2, n, 4, 3, seed=n)
    for function, args in estimators(n, shape):
        fast, slow = (results(function, leaves, *args, mask=mask, impl=impl) for impl in ("fast", "reference"))
        assert_same(fast, slow, 1e-11)


@pytest.mark.parametrize("portion", [1, 10**9])
def test_portions_make_no_difference(portion, monkeypatch):
    leaves, orders = draw(2, 2, 9, 4), sample_cycle(9, batch=(7, 2), generator=generator())
    expected = results(dense_limit_attention, leaves, orders)
    monkeypatch.setattr(module, "_PORTION", portion)
    assert_same(results(dense_limit_attention, leaves, orders), expected, 1e-12)


@pytest.mark.parametrize("n", [1, 2, 3, 16, 33])
def test_dense_after_all_shifts(n):
    leaves = draw(2, 2, n, 4)
    order = sample_cycle(n, batch=(2,), generator=generator())
    expected = results(dense_attention, leaves)
    assert_same(results(shift_attention, leaves, order, max(1, n - 1)), expected, 1e-11)
    mask = torch.arange(n) < torch.tensor([[n], [max(1, n - 2)]])
    assert_same(results(shift_attention, leaves, order, max(1, n - 1), mask=mask),
                results(dense_attention, leaves, mask=mask), 1e-11)
    if n <= 2:
        assert_same(results(dense_limit_attention, leaves, order[None]), expected, 1e-12)


def test_one_shift_is_one_cycle():
    leaves, order = draw(2, 2, 12, 4), sample_cycle(12, batch=(2, 2), generator=generator())
    once = results(dense_limit_attention, leaves, order[None], scale=0.7)
    assert_same(results(shift_attention, leaves, order, 1, scale=0.7), once, 1e-12)


def test_all_cycles_together_are_dense():
    """With every order once, every edge comes equally often."""
    leaves = draw(1, 2, 5, 4)
    expected = results(dense_attention, leaves)
    assert_same(results(dense_limit_attention, leaves, EVERY[5]), expected, 1e-12)


@pytest.mark.parametrize("function,args", list(estimators(7, (2,))), ids=NAMES)
def test_gradients(function, args):
    leaves = [x.requires_grad_() for x in draw(2, 1, 7, 3, 2)]
    assert torch.autograd.gradcheck(lambda *x: function(*x, *args), leaves)


def test_slope_of_minus_one_half():
    """Error against the number of cycles; independent repeats, so the tolerance is wide."""
    q, k, v = draw(1, 1, 24, 8)
    exact, ladder, errors = dense_attention(q, k, v), (64, 256, 1024), []
    for draws in ladder:
        out = dense_limit_attention(*(x.expand(40, -1, -1, -1) for x in (q, k, v)),
                                    sample_cycle(24, batch=(draws, 40), generator=generator(draws)))
        errors.append((out - exact).square().mean().sqrt().item())
    slope = math.log(errors[-1] / errors[0]) / math.log(ladder[-1] / ladder[0])
    assert -0.6 < slope < -0.4


def test_shifts_draw_without_replacement():
    """Over all orders, each set of T other points comes equally often for each point."""
    for shifts in (1, 2, 3):
        eye = torch.eye(5, dtype=torch.float64).expand(120, 1, 5, 5)
        zero = torch.zeros(120, 1, 5, 1, dtype=torch.float64)
        weights = shift_attention(zero, zero, eye, EVERY[5], shifts)[:, 0]  # equal scores
        chosen = (weights > 0).flatten(1).view(120, 5, 5)
        assert (chosen.sum(-1) == shifts + 1).all()
        for point in range(5):
            times = chosen[:, point].unique(dim=0, return_counts=True)[1]
            assert len(times) == math.comb(4, shifts) and len(times.unique()) == 1


@pytest.mark.parametrize("function,args", list(estimators(20, (), 1)), ids=NAMES)
def test_large_scores(function, args):
    leaves = [x * y for x, y in zip(draw(1, 2, 20, 8, dtype=torch.float32), (1000, 1000, 1), strict=True)]
    found = results(function, leaves, *args)
    assert all(x.isfinite().all() for x in found)
    torch.testing.assert_close(found[0], function(*(x.double() for x in leaves), *args).float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 1e-5), (torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
def test_dtypes(dtype, tolerance):
    q, k, v = draw(2, 2, 30, 8, dtype=torch.float32)
    for function, args in estimators(30, ()):
        out = function(q.to(dtype), k.to(dtype), v.to(dtype), *args)
        assert out.dtype == dtype
        exact = function(q.to(dtype).double(), k.to(dtype).double(), v.to(dtype).double(), *args)
        torch.testing.assert_close(out.double(), exact, rtol=tolerance, atol=tolerance)


def test_padding_changes_nothing():
    """A padded set gives what the set alone gives, whatever stands in the padding, and padding returns 0."""
    n, real = 12, 7
    q, k, v = draw(1, 2, n, 4)
    mask = (torch.arange(n) < real)[None]
    for function, args in estimators(n, ()):
        order = args[0]
        kept = torch.stack([o[o < real] for o in order.view(-1, n)]).view(*order.shape[:-1], real)
        rest = (kept, *(min(a, real - 1) for a in args[1:]))
        alone = function(q[:, :, :real], k[:, :, :real], v[:, :, :real], *rest)
        for filling in (0.0, 1e30, torch.nan, torch.inf):
            dirty = [x.clone() for x in (q, k, v)]
            for x in dirty:
                x[:, :, real:] = filling
            out, *gradients = results(function, dirty, *args, mask=mask)
            torch.testing.assert_close(out[:, :, :real], alone, rtol=0, atol=1e-12)
            assert (out[:, :, real:] == 0).all()
            assert all((x[:, :, real:] == 0).all() and x.isfinite().all() for x in gradients)
    nobody = torch.zeros(1, n, dtype=torch.bool)
    for function, args in estimators(n, ()):
        assert (function(q, k, v, *args, mask=nobody) == 0).all()


def test_the_order_carries_the_equivariance():
    q, k, v = draw(2, 2, 15, 4)
    p = sample_cycle(15, generator=generator(5))
    for function, args in estimators(15, ()):
        carried = p.argsort()[args[0]]
        moved = function(q[:, :, p], k[:, :, p], v[:, :, p], carried, *args[1:])
        torch.testing.assert_close(moved, function(q, k, v, *args)[:, :, p], rtol=0, atol=1e-12)


def test_a_ratio_is_a_softmax_with_corrected_logits():
    q, k, v = draw(1, 1, 6, 4)
    orders = sample_cycle(6, batch=(2,), generator=generator())
    logits, expected = attention_logits(q, k)[0, 0], torch.zeros(6, 4, dtype=torch.float64)
    for i, (a, b) in enumerate(zip(*cycle_successor(orders).tolist(), strict=True)):
        w = torch.stack([logits[i, i], logits[i, a] + math.log(2.5), logits[i, b] + math.log(2.5)]).softmax(0)
        expected[i] = w @ v[0, 0, [i, a, b]]
    torch.testing.assert_close(dense_limit_attention(q, k, v, orders)[0, 0], expected, rtol=0, atol=1e-12)


def test_bad_input_is_refused():
    q, k, v = draw(2, 3, 8, 4)
    order = sample_cycle(8, batch=(5, 2), generator=generator())
    for bad in (order[:, :1, :7], order[:, :, None].expand(5, 2, 2, 8), order[0, 0], order[:, :1].expand(5, 4, 8)):
        with pytest.raises(ValueError, match="orders"):
            dense_limit_attention(q, k, v, bad)
    with pytest.raises(ValueError, match=r"orders must have shape \(T, 8\) or \(T, 2, 8\) or \(T, 2, 3, 8\)"):
        dense_limit_attention(q, k, v, order[0, 0])
    with pytest.raises(TypeError, match="orders must be an int64 tensor"):
        dense_limit_attention(q, k, v, order.int())
    with pytest.raises(ValueError, match="same points"):
        dense_limit_attention(q[:, :, :5], k, v, order)
    with pytest.raises(ValueError, match="impl must be one of"):
        dense_limit_attention(q, k, v, order, impl="slow")
    for shifts in (0, 8, 1.5):
        with pytest.raises(ValueError, match="shifts must be"):
            shift_attention(q, k, v, order[0], shifts)
    with pytest.raises(ValueError, match="order must have shape"):
        shift_attention(q, k, v, order[:, :1, None, None], 2)
    with pytest.raises(ValueError, match="q holds NaN"):
        shift_attention(q * torch.nan, k, v, order[0], 2)
    with pytest.raises(ValueError, match="mask must have shape"):
        shift_attention(q, k, v, order[0], 2, mask=torch.ones(2, 7, dtype=torch.bool))


def test_cases_draw_the_same_shapes():
    cases = sample_cycle_cases(8, 3)
    error = cases.pop("error")
    shapes = {name: case().shape for name, case in cases.items()}
    assert shapes == dict.fromkeys(("sample_cycle", "argsort", "randperm"), (3, 8))
    assert error(cases["randperm"]()) == 0 < error(torch.zeros(3, 8, dtype=torch.long))


def test_estimates_of_dense_attention_have_second_derivatives():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(3, 1, 2, 7, 3, generator=g, dtype=torch.float64)
    orders, found = sample_cycle(7, batch=(4,), generator=g), []
    for impl in ("fast", "reference"):
        for attend in (functools.partial(dense_limit_attention, orders=orders, impl=impl),
                       functools.partial(shift_attention, order=orders[0], shifts=3, impl=impl)):
            leaves = [part.clone().requires_grad_() for part in x]
            first = torch.autograd.grad(attend(*leaves).sin().sum(), leaves, create_graph=True)
            found.append([*first, *torch.autograd.grad(sum(part.sin().sum() for part in first), leaves)])
    torch.testing.assert_close(found[:2], found[2:], rtol=1e-10, atol=1e-11)


def test_orders_that_change_before_the_backward_pass_are_noticed():
    orders = torch.stack([torch.randperm(20) for _ in range(3)])
    q = torch.randn(1, 2, 20, 4, requires_grad=True)
    loss = dense_limit_attention(q, q, q, orders).square().sum()
    orders.copy_(orders.flip(0))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
