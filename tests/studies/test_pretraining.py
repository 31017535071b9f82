"""Pretraining: who sees which batches, what is learned without attention, how frozen features are judged."""

import numpy as np
import pytest
import torch
from sparseattn.lab.floors import rule
from sparseattn.studies import pretraining as P

STUDY = P.STUDY
SETTING = STUDY.at("smoke")


def test_rows_share_their_batches_and_differ_in_what_they_do_with_them(data):
    setting = SETTING | {"steps": 6, "epoch": 6}
    rows = ("draw: dense", "draw, then name: dense", "name: sampled")
    of = [list(P.batches(row, setting, data, 0, 0)) for row in rows]
    drawing = [[batch["drawing"] for batch in each] for each in of]
    assert drawing == [[True] * 6, [True] * 3 + [False] * 3, [False] * 6]
    for batches in zip(*of, strict=True):
        assert all(torch.equal(batch["patches"].points, batches[0]["patches"].points) for batch in batches)


@pytest.mark.parametrize(
    "row, learns", [("draw: no attention", False), ("draw: dense", True), ("draw: sampled, dense decoder", True)])
def test_without_attention_an_encoder_learns_nothing_by_drawing(row, learns, data, built):
    model = built(row)
    P.loss(model, next(P.batches(row, SETTING, data, 0, 0)), torch.Generator().manual_seed(0)).backward()
    moved = [p.grad is not None and bool(p.grad.any()) for p in model.autoencoder.encoder.parameters()]
    assert any(moved) == learns
    assert all(p.grad is None for p in model.named.head.parameters())


def test_the_best_drawing_has_no_error_and_a_network_answers_twice_alike(data, built):
    patches, model = P.groups(data, "test", SETTING), built("draw: sampled")
    assert P._misfits(patches.points, patches.points).abs().max() == 0
    once, again = (P.errors(model, patches, SETTING) for _ in range(2))
    assert torch.equal(once, again) and once.shape == (len(data["test"][1]),)


def test_an_experiment_learns_and_tests_on_the_same_classes(data):
    known, unseen = (data[part][1].numpy() for part in ("train", "test"))
    found = list(P.experiments(3, 2, SETTING, known, unseen))
    assert len(found) == SETTING["few-shot runs"]
    for own, tested in found:
        assert set(known[own]) == set(unseen[tested]) and len(set(known[own])) == 3
        assert np.bincount(known[own]).max() == 2


def test_a_rule_that_knows_the_answer_is_judged_right(data):
    parts = [data[part] for part in ("train", "test")]
    known = {tuple(x[0].tolist()): int(y) for points, labels in parts for x, y in zip(points, labels, strict=True)}

    def see(points):
        return np.array([[known.get(tuple(x), -1)] for x in points[:, 0].tolist()], float)

    found = P.judged(rule("neighbour"), see, SETTING, data)
    assert found["all examples"].all() and found["3-way, 3-shot"].tolist() == [1.0] * SETTING["few-shot runs"]
    assert set(found) > set(P.VARIANTS)


@pytest.mark.parametrize("row, draws", [("draw: sampled", P.DRAWS), ("draw: dense", 1)])
def test_features_of_a_sampled_encoder_are_judged_from_one_draw_and_from_the_mean_of_several(row, draws, data, built):
    model, points = built(row), data["test"][0]
    one, mean = (P.features(model, SETTING, points, draws=count) for count in (1, P.DRAWS))
    assert model.draws == draws and np.allclose(one, mean, atol=1e-6) == (draws == 1)
    found = P.frozen(model, SETTING, data)
    again = P.judged(rule("linear"), lambda x: P.features(model, SETTING, x, draws=1), SETTING, data)
    assert all(np.array_equal(found[part], again[part]) for part in again)
    assert set(found) - set(again) == ({P.averaged(part) for part in again} if draws > 1 else set())
