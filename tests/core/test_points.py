"""Farthest points, neighbours, grouping and interpolation, against brute force and SciPy."""

import numpy as np
import pytest
import torch
from scipy.spatial import cKDTree

from sparseattn.core import points as module
from sparseattn.core.points import (
    farthest_point_sampling,
    gather_points,
    group,
    interpolate,
    knn,
    squared_distance,
)

DEVICES = ["cpu", pytest.param("cuda", marks=[
    pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])]


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def farthest_by_hand(cloud, m, start, real=None):
    """Plain Python on one cloud: all distances to all picks, every time."""
    cloud = cloud.numpy()
    left, picks = set(range(len(cloud))) if real is None else set(np.flatnonzero(real)), [start]
    while len(picks) < m:
        left.discard(picks[-1])
        order = sorted(left)
        gaps = np.zeros((len(order), len(picks)), cloud.dtype)
        for axis in range(cloud.shape[1]):
            with np.errstate(over="ignore"):
                gaps += (cloud[order, None, axis] - cloud[None, picks, axis]) ** 2
        picks.append(order[int(gaps.min(1).argmax())])
    return picks


@pytest.fixture
def rounds_everywhere(monkeypatch):
    """Send every cloud through the rounds, however small."""
    turns = module._in_turn

    def rounds(lib, x, far, picks, row):
        n, m = x.shape[2], picks.shape[1]
        if m <= module._FIRST or n % 8:
            return turns(lib, x, far, picks, row)
        monkeypatch.setattr(module, "_in_turn", turns)
        try:
            return module._out_of_turn(x, far, picks, row, 8)
        finally:
            monkeypatch.setattr(module, "_in_turn", rounds)
    monkeypatch.setattr(module, "_FIRST", 2)
    monkeypatch.setattr(module, "_in_turn", rounds)


def clouds():
    ints = torch.randint(0, 3, (2, 64, 3), generator=torch.Generator().manual_seed(1)).float()
    return {"normal": draw(2, 64, 3), "float64": draw(2, 64, 3, dtype=torch.float64), "lattice": ints,
            "one place": torch.ones(2, 64, 3), "line": draw(2, 64, 1), "plane": draw(2, 64, 2), "five": draw(2, 64, 5),
            "far away": draw(2, 64, 3) + 1e4, "tiny": draw(2, 64, 3) * 1e-22, "huge": draw(2, 64, 3) * 1e25,
            "outlier": torch.cat([draw(2, 63, 3) * 1e-3, torch.full((2, 1, 3), 1e6)], 1)}


@pytest.mark.parametrize("impl", ["fast", "reference"])
@pytest.mark.parametrize("name", clouds())
def test_farthest_points_by_hand(name, impl):
    cloud = clouds()[name]
    found = farthest_point_sampling(cloud, 40, start=torch.tensor([3, 5]), impl=impl)
    assert found.dtype == torch.int64
    assert found.tolist() == [farthest_by_hand(x, 40, s) for x, s in zip(cloud, (3, 5), strict=True)]


@pytest.mark.parametrize("m", [3, 20, 64])
@pytest.mark.parametrize("name", clouds())
def test_rounds_by_hand(name, m, rounds_everywhere):
    cloud = clouds()[name]
    found = farthest_point_sampling(cloud, m, start=torch.tensor([3, 5]))
    assert found.tolist() == [farthest_by_hand(x, m, s) for x, s in zip(cloud, (3, 5), strict=True)]


@pytest.mark.parametrize("seed", range(25))
def test_rounds_on_many_small_clouds(seed, rounds_everywhere):
    """Ties by rounding to a grid, of a coarseness that grows with the seed; masks that differ."""
    cloud = (draw(3, 96, 3, seed=seed) * 2 ** (seed % 9)).round() / 2 ** (seed % 9)
    real = torch.rand(3, 96, generator=torch.Generator().manual_seed(seed)) < 0.8
    real[:, 0] = True
    m = int(real.sum(1).min())
    found = farthest_point_sampling(cloud, m, mask=real)
    assert torch.equal(found, farthest_point_sampling(cloud, m, mask=real, impl="reference"))


@pytest.mark.parametrize("n, m, b", [(4096, 600, 1), (5003, 700, 3), (8192, 300, 9)])
@pytest.mark.parametrize("form", ["sphere", "cube", "quarters"])
def test_large_clouds(n, m, b, form):
    cloud = draw(b, n, 3)
    cloud = {"sphere": torch.nn.functional.normalize(cloud, dim=-1), "cube": torch.rand_like(cloud),
             "quarters": (cloud * 4).round() / 4}[form]
    mask = torch.rand(b, n, generator=torch.Generator().manual_seed(2)) < 0.7
    mask[:, 0] = True
    for keep in (None, mask):
        fast, literal = (farthest_point_sampling(cloud[:2], m, mask=None if keep is None else keep[:2], impl=impl)
                         for impl in ("fast", "reference"))
        assert torch.equal(fast, literal)
    assert torch.equal(farthest_point_sampling(cloud, m)[:2], farthest_point_sampling(cloud[:2], m))


def test_all_points_in_order_of_distance():
    assert farthest_point_sampling(draw(1, 9, 3), 9).sort().values.tolist() == [list(range(9))]
    assert farthest_point_sampling(torch.zeros(1, 4, 2), 4, start=2).tolist() == [[2, 0, 1, 3]]
    assert farthest_point_sampling(draw(2, 1, 3), 1).tolist() == [[0], [0]]


def test_masked_points_are_never_picked_and_may_hold_anything():
    cloud, mask = draw(2, 50, 3), torch.rand(2, 50, generator=torch.Generator().manual_seed(0)) < 0.5
    start = mask.int().argmax(1)
    dirty = cloud.masked_fill(~mask[..., None], torch.nan)
    m = int(mask.sum(1).min())
    found = farthest_point_sampling(dirty, m, mask=mask, start=start)
    assert mask.gather(1, found).all()
    assert found.tolist() == [farthest_by_hand(x, m, int(s), keep)
                              for x, s, keep in zip(cloud, start, mask.numpy(), strict=True)]


def test_start_from_the_centroid_does_not_depend_on_numbering():
    cloud, order = draw(2, 200, 3), torch.randperm(200, generator=torch.Generator().manual_seed(0))
    here = farthest_point_sampling(cloud, 30, start="farthest-from-centroid")
    there = farthest_point_sampling(cloud[:, order], 30, start="farthest-from-centroid")
    assert torch.equal(order[there], here)
    away = (cloud - cloud.mean(1, keepdim=True)).square().sum(2)
    assert torch.equal(here[:, 0], away.argmax(1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_computed_in_float32(dtype):
    cloud = draw(1, 300, 3).to(dtype)
    assert torch.equal(farthest_point_sampling(cloud, 50), farthest_point_sampling(cloud.float(), 50))
    assert torch.equal(knn(cloud, 5), knn(cloud.float(), 5))


@pytest.mark.parametrize("device", DEVICES)
def test_devices_agree(device):
    cloud = draw(2, 2500, 3)
    assert torch.equal(farthest_point_sampling(cloud.to(device), 300).cpu(), farthest_point_sampling(cloud, 300))
    assert torch.equal(knn(cloud.to(device), 9).cpu(), knn(cloud, 9))


def test_accelerator_loop_is_the_same_loop():
    cloud, picks = draw(2, 100, 3), torch.zeros(2, 20, dtype=torch.long)
    module._in_turn(torch, cloud.mT.contiguous(), torch.full((2, 100), torch.inf), picks, torch.arange(2))
    assert torch.equal(picks, farthest_point_sampling(cloud, 20))


@pytest.mark.parametrize("tree", [True, False])
@pytest.mark.parametrize("n, k", [(1, 1), (7, 7), (300, 1), (300, 20), (700, 33)])
@pytest.mark.parametrize("form", ["normal", "lattice", "doubled", "far away"])
def test_neighbours_are_those_of_sorting(form, n, k, tree, monkeypatch):
    cloud = draw(2, n, 3, dtype=torch.float64)
    cloud = {"normal": cloud, "lattice": cloud.round(), "doubled": torch.cat([cloud[:, :n // 2 + 1]] * 2, 1)[:, :n],
             "far away": cloud + 1e3}[form]
    name = "_by_product" if tree else "_by_tree"
    monkeypatch.setattr(module, name, module._by_tree if tree else module._by_product)
    assert torch.equal(knn(cloud, k), knn(cloud, k, impl="reference"))


@pytest.mark.parametrize("c", [1, 2, 3, 6])
def test_neighbours_as_scipy_finds_them(c):
    cloud, queries = draw(1, 2000, c), draw(1, 100, c, seed=1)
    away, found = cKDTree(cloud[0].double()).query(queries[0].double(), k=10)
    assert np.array_equal(knn(cloud, 10, queries=queries)[0], found)
    ours = squared_distance(queries[0].double()[:, None], cloud[0].double()[found]).sqrt()
    np.testing.assert_allclose(ours, away, rtol=1e-12)


def test_ties_go_to_the_lower_number():
    cloud = torch.tensor([[[0.0], [1.0], [-1.0], [0.0], [2.0]]])
    assert knn(cloud, 4)[0, 0].tolist() == [0, 3, 1, 2]
    assert knn(cloud, 1).flatten().tolist() == [0, 1, 2, 0, 4]


@pytest.mark.parametrize("n", [60, 900])
def test_masked_points_are_nobodys_neighbours(n):
    cloud, mask = draw(2, n, 3), torch.rand(2, n, generator=torch.Generator().manual_seed(0)) < 0.6
    found = knn(cloud.masked_fill(~mask[..., None], torch.nan), 8, mask=mask)
    for x, keep, rows in zip(cloud, mask, found, strict=True):
        number = keep.nonzero().squeeze(1)
        assert torch.equal(number[knn(x[None, keep], 8)[0]], rows[keep])


def test_many_points_in_little_memory():
    cloud = torch.rand(1, 60_000, 3, generator=torch.Generator().manual_seed(0))
    found = knn(cloud, 4, queries=cloud[:, ::20])
    assert torch.equal(found[0, :, 0], torch.arange(0, 60_000, 20))


def test_gather_points_reads_rows_and_sends_gradients_back():
    x, index = draw(2, 5, 3, dtype=torch.float64).requires_grad_(), torch.tensor([[[0, 4], [4, 4]], [[1, 2], [3, 0]]])
    found = gather_points(x, index)
    assert found.shape == (2, 2, 2, 3)
    assert torch.equal(found[1, 1, 0], x[1, 3]) and torch.equal(found[0, 1, 1], x[0, 4])
    assert torch.autograd.gradcheck(lambda x: gather_points(x, index), x)
    assert gather_points(x, index[:, 0, 0][:, None]).shape == (2, 1, 3)


def test_groups_hold_the_nearest_points_relative_to_the_centre():
    cloud = draw(2, 40, 3)
    centres = farthest_point_sampling(cloud, 6)
    relative, index = group(cloud, centres, 7)
    for b in range(2):
        for c, centre in enumerate(centres[b]):
            away = (cloud[b] - cloud[b, centre]).square().sum(1)
            assert set(index[b, c].tolist()) == set(away.argsort()[:7].tolist())
            assert torch.equal(relative[b, c], cloud[b, index[b, c]] - cloud[b, centre])
    assert torch.equal(relative[:, :, 0], torch.zeros(2, 6, 3)) and torch.equal(index[:, :, 0], centres)


def test_interpolation_by_hand():
    points, queries, x = draw(1, 20, 3), draw(1, 9, 3, seed=1), draw(1, 20, 4, seed=2)
    found = interpolate(x, points, queries)
    for q in range(9):
        away = (points[0] - queries[0, q]).square().sum(1)
        near = away.argsort()[:3]
        expected = (x[0, near] / away[near, None]).sum(0) / (1 / away[near]).sum()
        torch.testing.assert_close(found[0, q], expected, rtol=1e-5, atol=1e-6)


def test_interpolation_is_exact_at_the_points_and_keeps_constants():
    points, x = draw(2, 20, 3), draw(2, 20, 4, seed=2)
    assert torch.equal(interpolate(x, points, points), x)
    one = interpolate(torch.ones(2, 20, 1), points, draw(2, 9, 3, seed=1))
    torch.testing.assert_close(one, torch.ones(2, 9, 1), rtol=0, atol=1e-6)
    twice = torch.cat([points, points], 1)
    both = interpolate(torch.cat([x, -x], 1), twice, points, k=2)
    torch.testing.assert_close(both, torch.zeros_like(x), rtol=0, atol=1e-6)
    assert interpolate(x.half(), points.half(), points).dtype == torch.float16


def test_interpolation_sends_gradients_to_features_and_ignores_masked_points():
    points, queries, x = draw(1, 12, 2), draw(1, 5, 2, seed=1), draw(1, 12, 3, seed=2, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda x: interpolate(x, points, queries), x.requires_grad_())
    mask = torch.arange(12)[None] < 8
    dirty = [t.detach().masked_fill(~mask[..., None], torch.nan) for t in (x, points)]
    torch.testing.assert_close(interpolate(*dirty, queries, mask=mask), interpolate(x[:, :8], points[:, :8], queries))


@pytest.mark.parametrize("call, error, message", [
    (lambda: farthest_point_sampling(draw(1, 5, 3), 6), ValueError, "m must be at most the number of real points"),
    (lambda: farthest_point_sampling(draw(1, 5, 3), 3, mask=torch.arange(5)[None] < 2), ValueError, "2, got 3"),
    (lambda: farthest_point_sampling(draw(1, 5, 3), 0), ValueError, "m must be"),
    (lambda: farthest_point_sampling(draw(1, 5, 3), 2, start=5), ValueError, "start"),
    (lambda: farthest_point_sampling(draw(1, 5, 3), 2, start=-1), ValueError, "start"),
    (lambda: farthest_point_sampling(draw(1, 5, 3), 2, mask=torch.arange(5)[None] > 0), ValueError, "start"),
    (lambda: farthest_point_sampling(draw(2, 5, 3), 2, start=torch.tensor([0])), ValueError, "start"),
    (lambda: farthest_point_sampling(draw(1, 5, 3), 2, start=0.5), TypeError, "start"),
    (lambda: farthest_point_sampling(draw(1, 5, 3), 2, start="centre"), ValueError, "start"),
    (lambda: farthest_point_sampling(draw(1, 5, 3), 2, impl="slow"), ValueError, "impl"),
    (lambda: farthest_point_sampling(draw(1, 5, 3) / 0, 2), ValueError, "points holds NaN or infinite"),
    (lambda: farthest_point_sampling(draw(5, 3), 2), ValueError, "points must have 3 dimensions"),
    (lambda: farthest_point_sampling(torch.ones(1, 5, 3, dtype=torch.long), 2), TypeError, "points"),
    (lambda: farthest_point_sampling(np.ones((1, 5, 3)), 2), TypeError, "points"),
    (lambda: farthest_point_sampling(torch.ones(1, 0, 3), 1), ValueError, "no points"),
    (lambda: knn(draw(1, 5, 3), 6), ValueError, "k must be at most the number of real points of every cloud, 5, got 6"),
    (lambda: knn(draw(1, 5, 3), 3, mask=torch.arange(5)[None] < 2), ValueError, "k must be"),
    (lambda: knn(draw(1, 5, 3) * torch.nan, 3), ValueError, "NaN"),
    (lambda: knn(draw(1, 5, 3), 3, queries=draw(1, 2, 3) * torch.nan), ValueError, "queries holds NaN"),
    (lambda: knn(draw(1, 5, 3), 3, queries=draw(1, 2, 2)), ValueError, "queries"),
    (lambda: knn(draw(1, 5, 3), 3, queries=draw(2, 2, 3)), ValueError, "queries"),
    (lambda: knn(draw(1, 5, 3), 3, mask=torch.ones(1, 5)), TypeError, "mask"),
    (lambda: gather_points(draw(1, 5, 3), torch.zeros(2, 1, dtype=torch.long)), ValueError, "batch"),
    (lambda: interpolate(draw(1, 4, 3), draw(1, 5, 3), draw(1, 2, 3)), ValueError, "x must have a row"),
    (lambda: interpolate(draw(1, 2, 3), draw(1, 2, 3), draw(1, 2, 3)), ValueError, "k must be"),
])
def test_bad_input_is_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_compiled_callers_keep_the_picks():
    cloud = draw(1, 64, 3)

    def caller(x):
        return farthest_point_sampling(x, 8), knn(x, 4)
    for here, there in zip(torch.compile(caller, backend="eager")(cloud), caller(cloud), strict=True):
        assert torch.equal(here, there)


def test_neighbours_whose_squares_float32_cannot_hold():
    x = torch.randn(2, 40, 3, generator=torch.Generator().manual_seed(0)) * 1e30
    assert knn(x, 5).equal(knn(x, 5, impl="reference"))


def by_program(cloud, m, mask, start):
    """The program for GPUs, in Triton's interpreter where there is none (see conftest.py)."""
    pytest.importorskip("triton")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    far = torch.full(mask.shape, torch.inf, dtype=cloud.dtype).masked_fill_(~mask, -1).to(device)
    picks = start[:, None].repeat(1, m).to(device)
    module._by_program(cloud.mT.contiguous().to(device), far, picks)
    return picks.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n, m, axes", [(1, 1, 3), (2, 2, 1), (9, 9, 2), (130, 20, 3), (8200, 4, 3)])
def test_program_for_a_gpu_makes_the_picks_of_the_definition(n, m, axes, dtype):
    for cloud in (draw(2, n, axes, dtype=dtype), draw(2, n, axes, dtype=dtype).round()):      # the second full of ties
        mask = torch.rand(2, n, generator=torch.Generator().manual_seed(n)) < (0.7 if n > 9 else 2)
        mask[:, 0] = True
        for start in (torch.zeros(2, dtype=torch.long), mask.long().flip(1).argmax(1).sub(n - 1).neg()):
            found = farthest_point_sampling(cloud, m, start=start, mask=mask, impl="reference")
            assert by_program(cloud, m, mask, start).equal(found)


@pytest.mark.parametrize("n, k, axes", [(1, 1, 3), (7, 7, 1), (60, 9, 3), (300, 40, 8)])
def test_neighbours_in_blocks_are_those_of_the_definition(n, k, axes):
    for cloud in (draw(2, n, axes), draw(2, n, axes).round()):
        mask = torch.rand(2, n, generator=torch.Generator().manual_seed(n)) < (0.7 if n > 7 else 2)
        points, real = module._cloud("points", cloud, mask)
        expected = knn(cloud, k, mask=mask, queries=cloud[:, : n // 2 + 1], impl="reference")
        assert module._nearest_in_blocks(points, cloud[:, : n // 2 + 1], real, k).equal(expected)


def test_neighbours_compile_in_one_piece():
    compiled = torch.compile(lambda x: knn(x, 4), backend="eager", fullgraph=True)
    for n in (20, 13, 31):
        cloud = draw(2, n, 3).round()
        assert compiled(cloud).equal(knn(cloud, 4))


def test_interpolation_keeps_its_digits_under_autocast():
    points, x = torch.rand(1, 50, 3), 100 * torch.rand(1, 50, 4)
    with torch.autocast("cpu", torch.bfloat16):
        found = interpolate(x, points, points)
    torch.testing.assert_close(found, x)


def test_farthest_points_under_vmap():
    points = torch.rand(2, 10, 3)
    found = torch.vmap(lambda cloud: farthest_point_sampling(cloud[None], 3)[0])(points)
    assert torch.equal(found, farthest_point_sampling(points, 3))


@pytest.mark.parametrize("found, variable, expected", [
    ({"gcc"}, None, True), ({"clang"}, None, True), (set(), None, False), ({"gcc"}, "", False),
    ({"clang-19", "gcc"}, "clang-19", True), ({"ccache", "gcc"}, "ccache gcc", False), ({"gcc"}, "nowhere", False)])
def test_triton_needs_a_compiler(found, variable, expected, monkeypatch):
    "It compiles what launches a kernel, by CC, taken for one word, or else gcc or clang; an empty CC means none."
    pytest.importorskip("triton")
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 1, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    monkeypatch.setattr(module.shutil, "which", lambda name: name if name in found else None)
    monkeypatch.delenv("CC", raising=False)
    if variable is not None:
        monkeypatch.setenv("CC", variable)
    assert module._compiles_for.__wrapped__(0) is expected
