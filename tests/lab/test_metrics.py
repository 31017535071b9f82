"""Metrics: AP@k against a literal count, average precision against the sum of steps written out."""

import numpy as np
import pytest
import torch

from sparseattn.lab import metrics
from sparseattn.lab.metrics import average_precision, retrieval_precision


def literal(points, particle, valid, k_max=19):
    """Sort float64 distances of each valid hit, cut after k, count; assumes no ties."""
    points, scores = points.double(), []
    for u in range(len(points)):
        others = int((particle == particle[u]).sum()) - 1
        if not valid[u] or particle[u] <= 0 or others == 0:
            continue
        order = ((points - points[u]) ** 2).sum(1).argsort().tolist()
        order.remove(u)
        k = min(others, k_max)
        scores.append(float((particle[order[:k]] == particle[u]).double().mean()))
    return torch.tensor(scores, dtype=torch.float64)


@pytest.mark.parametrize("n, d, shift", [(2, 1, 0.0), (40, 3, 0.0), (300, 12, 0.0), (300, 12, 300.0), (700, 2, 0.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equals_the_literal_count(n, d, shift, dtype):
    g = torch.Generator().manual_seed(n + d)
    particle = torch.randint(-1, max(2, n // 6), (n,), generator=g) if n > 2 else torch.tensor([1, 1])
    valid = torch.rand(n, generator=g) < 0.7 if n > 2 else torch.ones(2, dtype=torch.bool)
    points = (torch.randn(n, d, generator=g) + 0.7 * torch.randn(n, d, generator=g)[particle.clamp(min=0)] + shift).to(
        dtype
    )
    result = retrieval_precision(points, particle, valid, chunk=64)
    torch.testing.assert_close(result.precision, literal(points, particle, valid), rtol=0, atol=1e-12)
    assert (particle[result.index] > 0).all() and valid[result.index].all()


def test_cap_on_the_number_of_neighbours():
    g = torch.Generator().manual_seed(1)
    particle, points = torch.arange(1, 5).repeat_interleave(30), torch.randn(120, 3, generator=g)
    for k_max in (1, 19, 100):
        result = retrieval_precision(points, particle, k_max=k_max)
        assert (result.k == min(k_max, 29)).all()
        torch.testing.assert_close(result.precision, literal(points, particle, particle > 0, k_max), rtol=0, atol=1e-12)


def test_doubtful_hits_are_compared_with_all(monkeypatch):
    """Two clusters 1e4 apart with spread 1e-3: float32 products cannot tell, so the slow way must run and be right."""
    g = torch.Generator().manual_seed(2)
    particle = torch.arange(1, 41).repeat_interleave(5)
    points = 1e-3 * torch.randn(200, 4, generator=g, dtype=torch.float64) + 1e4 * (torch.arange(200) % 2)[:, None]
    calls, original = [], metrics._compare_with_all
    monkeypatch.setattr(metrics, "_compare_with_all", lambda *a: calls.append(1) or original(*a))
    result = retrieval_precision(points, particle)
    assert calls
    torch.testing.assert_close(result.precision, literal(points, particle, particle > 0), rtol=0, atol=1e-12)


def test_limits_perfect_random_collapsed():
    particle = torch.arange(1, 61).repeat_interleave(10)
    g = torch.Generator().manual_seed(3)
    centre = torch.randn(60, 5, generator=g)[particle - 1]
    assert retrieval_precision(centre, particle).mean == 1.0  # all partners coincide
    assert retrieval_precision(torch.zeros(600, 5), particle).mean == pytest.approx(9 / 599, abs=1e-12)
    scores = [retrieval_precision(torch.randn(600, 5, generator=g), particle) for _ in range(10)]
    error = np.std([s.mean for s in scores], ddof=1) / np.sqrt(10)
    assert scores[0].chance == pytest.approx(9 / 599)
    assert abs(np.mean([s.mean for s in scores]) - 9 / 599) < 5 * error  # t, 9 degrees: false alarm 7e-4; seed fixed


def test_order_of_hits_and_motion_do_not_matter():
    g = torch.Generator().manual_seed(4)
    points, particle = (
        torch.randint(0, 4, (200, 2), generator=g).double(),
        torch.randint(0, 30, (200,), generator=g),
    )  # many ties
    order = torch.randperm(200, generator=g)
    a, b = retrieval_precision(points, particle), retrieval_precision(points[order], particle[order])
    assert a.mean == pytest.approx(b.mean, abs=1e-12)
    back = torch.empty(200, dtype=torch.float64).index_put((order[b.index],), b.precision)
    torch.testing.assert_close(a.precision, back[a.index], rtol=0, atol=1e-12)
    assert retrieval_precision(points.flip(1) + 8, particle).mean == pytest.approx(a.mean, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_embeddings(dtype):
    g = torch.Generator().manual_seed(5)
    particle = torch.arange(1, 21).repeat_interleave(4)
    points = torch.randn(80, 6, generator=g).to(dtype)
    assert retrieval_precision(points, particle).mean == retrieval_precision(points.double(), particle).mean


@pytest.mark.parametrize(
    "change, name",
    [
        (dict(embeddings=torch.zeros(4)), "embeddings"),
        (dict(embeddings=torch.zeros(4, 2, dtype=torch.long)), "embeddings"),
        (dict(embeddings=torch.full((4, 2), torch.nan)), "embeddings"),
        (dict(particle=torch.ones(3, dtype=torch.long)), "particle"),
        (dict(particle=torch.ones(4)), "particle"),
        (dict(valid=torch.ones(4)), "valid"),
        (dict(valid=torch.zeros(4, dtype=torch.bool)), "valid"),
        (dict(particle=torch.arange(4)), "valid"),
        (dict(k_max=0), "k_max"),
        (dict(chunk=0), "chunk"),
    ],
)
def test_bad_input_names_the_argument(change, name):
    good = dict(
        embeddings=torch.zeros(4, 2), particle=torch.ones(4, dtype=torch.long), valid=torch.ones(4, dtype=torch.bool)
    )
    with pytest.raises(ValueError, match=name):
        retrieval_precision(**{**good, **change})


def steps(scores, labels):
    """Sum of (recall step) x precision over distinct thresholds."""
    area, recall = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        chosen = scores >= threshold
        found = float(labels[chosen].sum())
        area, recall = (
            area + (found / float(labels.sum()) - recall) * found / float(chosen.sum()),
            found / float(labels.sum()),
        )
    return area


@pytest.mark.parametrize("seed", range(4))
def test_average_precision_is_the_sum_of_steps(seed):
    g = torch.Generator().manual_seed(seed)
    scores, labels = torch.randint(0, 30, (200,), generator=g) / 30, torch.rand(200, generator=g) < 0.2
    assert average_precision(scores, labels) == pytest.approx(steps(scores, labels), abs=1e-12)
    keep = torch.rand(200, generator=g) < 0.5
    assert average_precision(scores, labels.int(), keep) == pytest.approx(steps(scores[keep], labels[keep]), abs=1e-12)


@pytest.mark.parametrize(
    "scores, labels, name",
    [
        ([0.1, 0.2], [1], "scores and labels"),
        ([0.1, float("nan")], [1, 0], "scores"),
        ([0.1, 0.2], [1, 2], "labels"),
        ([0.1, 0.2], [0, 0], "labels"),
    ],
)
def test_average_precision_bad_input(scores, labels, name):
    with pytest.raises(ValueError, match=name):
        average_precision(torch.tensor(scores), torch.tensor(labels))
    with pytest.raises(ValueError, match="mask"):
        average_precision(torch.tensor([0.1, 0.2]), torch.tensor([1, 0]), torch.tensor([1, 0]))


def test_what_does_not_count_may_be_anything():
    scores, labels = torch.tensor([0.9, 0.1, torch.nan]), torch.tensor([0, 1, -1])
    mask = torch.tensor([True, True, False])
    assert average_precision(scores, labels, mask) == 0.5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_same_on_a_gpu():
    g = torch.Generator().manual_seed(6)
    points, particle = torch.randn(3000, 12, generator=g), torch.randint(0, 400, (3000,), generator=g)
    here, there = retrieval_precision(points, particle), retrieval_precision(points.cuda(), particle.cuda())
    assert there.precision.is_cuda and torch.equal(here.index, there.index.cpu())
    torch.testing.assert_close(here.precision, there.precision.cpu(), rtol=0, atol=1e-12)
