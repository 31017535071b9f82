"""Particles of a crossing: kinematics and classes by hand, cuts, shuffles, Pythia, and the workshop's file."""

import importlib.util
import math

import numpy as np
import pytest
import torch

from sparseattn.data import particles as P
from sparseattn.data.cache import have_data

needs_pythia = pytest.mark.skipif(importlib.util.find_spec("pythia8mc") is None, reason="needs the extra hep")
needs_file = pytest.mark.skipif(not have_data("pileup_workshop2014", "pileup_samples.npz"), reason="no official events")


def momenta(n=200, seed=0):
    rng = np.random.default_rng(seed)
    p = rng.normal(0, 1.0, (n, 3))
    return np.concatenate([p, np.sqrt((p**2).sum(1, keepdims=True) + 0.02)], 1)


def test_kinematics_are_their_formulas():
    p = momenta()
    cloud = P.make_particles(p, [211] * 200, [0] * 200, [3.0])
    kept = p[(np.hypot(p[:, 0], p[:, 1]) > 0.15) & (np.abs(np.arcsinh(p[:, 2] / np.hypot(p[:, 0], p[:, 1]))) < 5)]
    pt = np.hypot(kept[:, 0], kept[:, 1])
    rapidity = np.arctanh(kept[:, 2] / kept[:, 3])
    expected = np.stack([np.arcsinh(kept[:, 2] / pt), np.arctan2(kept[:, 1], kept[:, 0]), kept[:, 0], kept[:, 1], pt,
                         kept[:, 3], rapidity], 1)
    np.testing.assert_allclose(cloud.x.numpy(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(cloud.coords, cloud.x[:, [0, 1, 0, 1]]) and (cloud.vertex == 3).all()


@pytest.mark.parametrize("pdg, kind", [(22, 1), (130, 2), (310, 3), (-2112, 4), (3122, 5), (-3322, 6), (11, 0),
                                       (-211, 0), (2212, 0), (3312, 0)])
def test_classes(pdg, kind):
    cloud = P.make_particles([[1.0, 0.0, 0.0, 1.5]], [pdg], [0], [7.0])
    assert cloud.kind.tolist() == [kind] and cloud.vertex.tolist() == [7.0 if kind == 0 else 0.0]
    assert cloud.scored.tolist() == [kind > 0]


@pytest.mark.parametrize("row, pdg", [([0.1, 0.1, 0.0, 1.0], 22), ([0.2, 0.0, 16.0, 17.0], 22), ([3.0, 0, 0, 3.0], 12)])
def test_cuts(row, pdg):
    assert not len(P.make_particles([row], [pdg], [0], [0.0]))


def test_shuffles_keep_rows_together():
    p, pdg, number = momenta(), np.where(np.arange(200) % 3, 211, 22), np.arange(200) // 50
    plain = P.make_particles(p, pdg, number, range(4))
    mixed = P.make_particles(p, pdg, number, range(4), rng=np.random.default_rng(0))
    order = (mixed.x[:, None] == plain.x[None]).all(-1).int().argmax(1)
    assert not torch.equal(mixed.x, plain.x) and torch.equal(order.sort().values, torch.arange(len(plain)))
    for name in ("x", "kind", "label", "scored", "vertex"):
        assert torch.equal(getattr(mixed, name), getattr(plain, name)[order])


def test_made_up_crossings():
    a, b, c = P.toy_crossings(2), P.toy_crossings(1), P.toy_crossings(1, seed=1)
    assert torch.equal(a[0].x, b[0].x) and not torch.equal(a[0].x[:50], c[0].x[:50]) and a[1].event == 1
    for cloud in a:
        assert 500 < len(cloud) <= 600 and 30 < cloud.label.sum() <= 48 and cloud.x.isfinite().all()
        assert cloud.label[cloud.scored].any() and not cloud.label[cloud.scored].all()
        assert len(cloud.vertex[cloud.label & (cloud.kind == 0)].unique()) == 1


@needs_pythia
def test_events_are_fixed_by_number_and_seed(tmp_path):
    a, b = (P.simulate_crossings(2, pileup=2, progress=False, root=tmp_path / name) for name in "ab")
    for one, two in zip(a, b, strict=True):
        assert torch.equal(one.x, two.x) and torch.equal(one.label, two.label)
    assert len(a[0]) != len(a[1]) and a[1].event == 1
    again = P.simulate_crossings(1, pileup=2, progress=False, root=tmp_path / "a", first=1)[0]
    assert torch.equal(again.x, a[1].x)
    alone = P.simulate_crossings(1, pileup=0, progress=False, root=tmp_path)[0]
    assert alone.label.all() and alone.x.isfinite().all()


@needs_file
def test_workshop_events():
    clouds = P.load_workshop(3)
    again = P.load_workshop(2)
    assert len(clouds) == 3 and all(torch.equal(a.x, b.x) for a, b in zip(clouds, again, strict=False))
    for cloud in clouds:
        assert 6000 < len(cloud) < 15_000 and 0.01 < cloud.label.double().mean() < 0.08 and cloud.x.isfinite().all()
        assert (cloud.x[:, 5] + 1e-3 >= cloud.x[:, 4]).all()


def test_a_turned_event_keeps_its_invariants():
    p = momenta()
    turned, _ = P._turned(p, None, np.random.default_rng(1))
    np.testing.assert_allclose(np.hypot(turned[:, 0], turned[:, 1]), np.hypot(p[:, 0], p[:, 1]))
    np.testing.assert_allclose(np.abs(turned[:, 2]), np.abs(p[:, 2]))
    np.testing.assert_allclose(turned[:, 3], p[:, 3])


@pytest.mark.parametrize("call, error, message", [
    (lambda: P.make_particles([[1.0, 0, 0, 1]], [22, 22], [0], [0.0]), ValueError, "one length, got 1, 2 and 1"),
    (lambda: P.make_particles([[math.nan, 0, 0, 1]], [22], [0], [0.0]), ValueError, "finite momenta"),
    (lambda: P.toy_crossings(1, wanted=0), ValueError, "wanted: expected an integer of at least 1"),
    (lambda: P.simulate_crossings(-1), ValueError, "count: expected an integer of at least 0"),
    (lambda: P.simulate_crossings(1, pileup=math.nan), ValueError, "pileup: expected a number"),
    (lambda: P.load_workshop(path="nowhere.npz"), FileNotFoundError, "nowhere.npz: no such file"),
])
def test_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call()
