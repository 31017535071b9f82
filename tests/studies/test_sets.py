"""Clustering and shapes with two random keys a row: what rules know, and rows that differ in their attention."""

import numpy as np
import torch
from sparseattn.data import shapes
from sparseattn.lab.classify import on_clouds
from sparseattn.studies import set_shapes, sets

STUDY = sets.STUDY
SETTING = STUDY.at("smoke")


def test_moments_of_known_clusters():
    points = np.array([[0.0, 0.0], [2.0, 2.0], [5.0, 5.0]])
    log_shares, means, scales = sets._moments(points, np.array([0, 0, 1]), 2)
    assert np.allclose(np.exp(log_shares), [2 / 3, 1 / 3]) and np.allclose(means, [[1, 1], [5, 5]])
    assert np.allclose(scales, [[1, 1], [0.03, 0.03]])


def test_rules_order_as_what_they_know(data):
    score = {row: sets.floor(row, SETTING, data, 0)["LL0"].mean() for row in sets.ROWS if sets.ROWS[row].get("floor")}
    assert score["one Gaussian for all"] < score["one Gaussian a set"] < score["k-means"]
    assert all(len(y) == SETTING["sets"] for y in sets.floor("k-means", SETTING, data, 0).values())


def test_a_step_of_em_does_no_harm(data):
    found = sets.floor("k-means", SETTING, data, 0)
    assert (found["LL1"] > found["LL0"] - 1e-6).all()


def test_rows_differ_in_their_attention_only(data, built):
    sizes = {row: sum(p.numel() for p in built(row).parameters()) for row in sets.KEYS}
    assert len(set(sizes.values())) == 1
    test, told = data["test"], {}
    for row in sets.KEYS:
        told[row] = [sets.said(built(row), test, seed)[1] for seed in (0, 0, 1)]
        assert torch.equal(told[row][0], told[row][1])
        assert torch.equal(told[row][0], told[row][2]) == (row != "two random keys")
    assert not torch.equal(told["all keys"][0], told["no attention in the encoder"][0])


def test_every_row_gets_the_same_sets_and_they_are_fresh(data):
    setting = SETTING | {"epoch": 2}
    first, again = (list(sets.batches(row, setting, data, 0, 0)) for row in ("all keys", "mean over points"))
    assert all(torch.equal(a["points"], b["points"]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0]["means"], first[1]["means"])


def test_shapes_have_variance_one_and_fill_the_grid_of_the_counts():
    parts = set_shapes.STUDY.data(set_shapes.STUDY.at("smoke"))
    points = parts["test"][0]
    assert torch.allclose(points.flatten(1).std(1), torch.ones(len(points)))
    counts = on_clouds(shapes, box=2.5)["features"]["counts"](points, {})
    assert ((counts > 0).sum(1) > 10).all() and points.abs().max() < 4


def test_draws_of_shapes_are_recorded_for_random_keys_alone():
    setting = set_shapes.STUDY.at("smoke")
    parts = set_shapes.STUDY.data(setting)
    torch.manual_seed(0)
    model = set_shapes.network("two random keys", setting, parts).eval()
    assert set_shapes.drawn("two random keys", model, setting, parts)["draws"].shape == (5, len(parts["test"][1]))
    assert set_shapes.drawn("all keys", model, setting, parts) == {}
