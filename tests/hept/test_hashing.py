"""Codes, labels and orders against plain Python: sorted lists, loops, exact fractions."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from sparseattn.core.points import invert
from sparseattn.hept.hashing import (
    and_code,
    bucket_labels,
    combine_labels,
    draw_buckets,
    rank,
    raw_codes,
    sort_order,
)


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def sorted_places(*keys):
    """Indices in the order of their tuples of keys, ties by index."""
    return sorted(range(len(keys[0])), key=lambda i: (*(key[i] for key in keys), i))


def literal_labels(values, size):
    """Bucket of each value when the sorted list is cut into pieces of `size`."""
    labels = [0] * len(values)
    for place, i in enumerate(sorted_places(values)):
        labels[i] = place // size
    return labels


def test_raw_codes_are_inner_products():
    x, a = torch.randn(2, 3, 5, 4, generator=source()), torch.randn(2, 3, 4, generator=source(1))
    found = raw_codes(x, a)
    assert found.shape == (2, 2, 3, 5)
    for t, b, h, i in torch.cartesian_prod(*(torch.arange(s) for s in found.shape)).tolist():
        assert found[t, b, h, i].item() == pytest.approx(sum((x[b, h, i] * a[t, h]).tolist()), abs=1e-5)


@pytest.mark.parametrize("n", [1, 2, 7, 60])
@pytest.mark.parametrize("distinct", [3, 1000])
def test_rank_and_its_inverse(n, distinct):
    values = torch.randint(distinct, (n,), generator=source(n)).float()
    order = sorted_places(values.tolist())
    assert [order.index(i) for i in range(n)] == rank(values).tolist()
    assert invert(rank(values)).tolist() == order


@pytest.mark.parametrize("n", [1, 2, 9, 100, 101])
@pytest.mark.parametrize("buckets", [1.0, 2.0, 3.7, 12.25, 100.0, 500.0])
def test_labels_equal_the_cut_list(n, buckets):
    values = torch.randint(40, (n,), generator=source(n)).float()
    size = max(1, math.ceil(Fraction(n) / Fraction(buckets)))
    found = bucket_labels(values, torch.tensor(buckets))
    assert found.tolist() == literal_labels(values.tolist(), size)
    assert found.max() <= math.ceil(buckets) - 1


def test_labels_of_many_lists_with_their_own_buckets():
    values, buckets = torch.rand(3, 2, 4, 30, generator=source()), torch.tensor([[2.0], [5.0], [7.5]])
    found = bucket_labels(values, buckets[..., None])
    for t, b, h in torch.cartesian_prod(*(torch.arange(s) for s in (3, 2, 4))).tolist():
        assert torch.equal(found[t, b, h], bucket_labels(values[t, b, h], buckets[t, 0]))


@pytest.mark.parametrize("real", [None, 17])
def test_one_list_serves_many_buckets(real):
    """Coordinates are sorted once for all tables and heads."""
    values, buckets = torch.rand(1, 2, 1, 30, generator=source()), torch.rand(3, 1, 4, generator=source(1)) * 9 + 1
    mask = None if real is None else (torch.arange(30) < real).expand_as(values)
    every = values.expand(3, 2, 4, 30)
    expected = bucket_labels(every, buckets, mask=None if mask is None else mask.expand_as(every))
    assert torch.equal(bucket_labels(values, buckets, mask=mask), expected)


@pytest.mark.parametrize("real", [0, 1, 13, 20])
@pytest.mark.parametrize("garbage", [-1e30, math.nan])
def test_masked_values_are_not_counted(real, garbage):
    values, buckets = torch.rand(20, generator=source()), torch.tensor(3.5)
    mask = torch.zeros(20, dtype=torch.bool)
    mask[torch.randperm(20, generator=source(1))[:real]] = True
    found = bucket_labels(values.masked_fill(~mask, garbage), buckets, mask=mask)
    assert (found[~mask] == 4).all()
    if real:
        assert torch.equal(found[mask], bucket_labels(values[mask], buckets))


def test_released_labels_round_in_float32():
    """Size of a bucket is n times the rounded 1 / B, which is now and then one more than n / B rounded up."""
    differ = 0
    for buckets in range(1, 60):
        for n in (1, buckets, 3 * buckets, 7 * buckets - 1, 7 * buckets):
            size = int(np.ceil(np.float32(n) * (np.float32(1) / np.float32(buckets))))
            differ += size != -(-n // buckets)
            found = bucket_labels(torch.arange(n).float(), torch.tensor(float(buckets)), as_released=True)
            assert found.tolist() == [i // max(1, size) for i in range(n)]
    assert differ > 0


@pytest.mark.parametrize("bad", [0.99, 0.0, -3.0, math.nan, math.inf])
def test_refuses_bucket_counts(bad):
    with pytest.raises(ValueError, match="buckets must be finite and at least 1"):
        bucket_labels(torch.rand(5), torch.tensor([2.0, bad])[:, None].expand(2, 1)[:, 0])


def test_and_code_is_the_printed_sum():
    base, buckets = torch.randn(20, generator=source(), dtype=torch.float64), [3.0, 4.0, 5.0]
    labels = [torch.randint(int(b), (20,), generator=source(i)) for i, b in enumerate(buckets)]
    values, spread = base.tolist(), (base.max() - base.min()).item()
    expected = [v + spread * (int(a) + 3 * int(b) + 12 * int(c)) for v, a, b, c in zip(values, *labels, strict=True)]
    torch.testing.assert_close(and_code(base, labels, buckets), torch.tensor(expected, dtype=torch.float64))


def test_and_code_sorts_as_the_tuple_does():
    base, buckets = torch.randn(80, generator=source(), dtype=torch.float64).float().double(), [3.0, 4.0]
    labels = [torch.randint(int(b), (80,), generator=source(i)) for i, b in enumerate(buckets)]
    order = sort_order(base.view(1, 1, 1, -1), combine_labels(labels).view(1, 1, 1, -1)).flatten()
    assert order.tolist() == and_code(base, labels, buckets).argsort(stable=True).tolist()


@pytest.mark.parametrize("n", [1, 2, 33])
@pytest.mark.parametrize("labels", [1, 5, 2**30], ids=["one", "five", "many"])
def test_order_by_label_then_base_then_index(n, labels):
    shape = (2, 2, 3, n)
    base = torch.randn(shape, generator=source(), dtype=torch.float64).mul(2).round().div(2)  # with ties
    label = torch.randint(labels, shape, generator=source(1))
    found = sort_order(base, label)
    for row in torch.cartesian_prod(*(torch.arange(s) for s in shape[:3])).tolist():
        assert found[tuple(row)].tolist() == sorted_places(label[tuple(row)].tolist(), base[tuple(row)].tolist())


def test_order_of_special_numbers():
    base = torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-45, 3e38, -3e38, 1.0, -1.0])
    assert sort_order(base.view(1, 1, 1, -1)).flatten().tolist() == sorted_places(base.tolist())


@pytest.mark.parametrize("garbage", [-1e30, math.nan, math.inf])
@pytest.mark.parametrize("real", [0, 1, 12, 20])
def test_masked_points_come_last(garbage, real):
    mask = torch.zeros(1, 20, dtype=torch.bool)
    mask[0, torch.randperm(20, generator=source(1))[:real]] = True
    base, label = torch.randn(20, generator=source()), torch.randint(4, (20,), generator=source(2))
    order = sort_order(
        base.masked_fill(~mask[0], garbage).view(1, 1, 1, -1), label.view(1, 1, 1, -1), mask=mask
    ).flatten()
    alone = [i for i in sorted_places(label.tolist(), base.tolist()) if mask[0, i]]
    assert order[:real].tolist() == alone and sorted(order.tolist()) == list(range(20))


def test_combined_labels_compare_as_tuples_last_first():
    labels = [torch.randint(n, (50,), generator=source(n)) for n in (3, 1, 4)]
    code = combine_labels(labels).tolist()
    tuples = list(zip(*(label.tolist() for label in reversed(labels)), strict=True))
    for i in range(50):
        assert [code[i] < c for c in code] == [tuples[i] < t for t in tuples]


@pytest.mark.parametrize("total", [1.0, 1.5, 9.0, 150.0])
@pytest.mark.parametrize("functions", [1, 2, 3])
def test_drawn_buckets_have_the_product(total, functions):
    drawn = draw_buckets(50, 8, total, functions=functions, generator=source())
    assert drawn.shape == (50, 8, functions) and (drawn >= 1).all()
    torch.testing.assert_close(drawn.prod(-1), torch.full((50, 8), total), rtol=1e-5, atol=0)
    assert torch.equal(drawn, draw_buckets(50, 8, total, functions=functions, generator=source()))


def test_drawn_thirds():
    drawn = draw_buckets(50, 8, 150.0, thirds=True, generator=source())
    torch.testing.assert_close(drawn * 3, (drawn * 3).round(), rtol=0, atol=1e-4)
    assert ((drawn.prod(-1) / 150 - 1).abs() < 0.2).all()


@pytest.mark.parametrize("total", [0.5, -1.0, math.nan])
def test_refuses_a_total_below_one(total):
    with pytest.raises(ValueError, match="total must be a finite number >= 1"):
        draw_buckets(1, 1, total)


def test_labels_out_of_range_are_refused():
    base = torch.tensor([0.0, 1.0, 2.0]).view(1, 1, 1, 3)
    assert sort_order(base, torch.tensor([2**31 - 2, 0, 1]).view(1, 1, 1, 3)).flatten().tolist() == [1, 2, 0]
    for bad in (2**31 - 1, -1):
        with pytest.raises(ValueError, match="label must lie in"):
            sort_order(base, torch.tensor([bad, 0, 1]).view(1, 1, 1, 3))
