"""Peptides: the official metric, inference modes, where networks start."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from sparseattn.lab.study import pack, unpack
from sparseattn.samsa.models import EqualScores, sampling_layers
from sparseattn.studies import peptides as func
from sparseattn.studies import peptides_struct as struct

STUDY = func.STUDY
SETTING = STUDY.at("smoke")


@pytest.mark.parametrize("levels", [2, 9, 10_000])
def test_precision_is_the_official_one(levels):
    rng = np.random.default_rng(levels)
    truth = rng.random((300, 4)) < [0.3, 0.05, 0.0, 1.0]
    outcomes = np.stack([rng.integers(0, levels, truth.shape), truth], -1).astype(float)
    mixed = [average_precision_score(truth[:, k], outcomes[:, k, 0]) for k in (0, 1)]
    assert func.precision(outcomes) == pytest.approx(100 * np.mean(mixed))
    assert func.precision(outcomes[:, 2:]) == 0.0


@pytest.mark.parametrize("row", ["hard SAMSA", "soft SAMSA"])
def test_a_network_is_tested_as_it_was_trained(row, data):
    model = func.network(row, SETTING, data).eval()
    noisy, again = (func.predict(model, data["test"]) for _ in range(2))
    plain = func.predict(model, data["test"], mode="top-k")
    assert torch.equal(noisy, again) and not torch.allclose(noisy, plain)


def test_predictions_keep_the_order_of_the_peptides(data):
    model, few = func.network("GCN", SETTING, data).eval(), data["test"].subset([5, 2, 9])
    torch.testing.assert_close(func.predict(model, data["test"], batch=4)[[5, 2, 9]], func.predict(model, few, batch=2))


def test_a_random_choice_learns_no_scores(data):
    model = func.network("hard SAMSA, random choice", SETTING, data)
    for layer in sampling_layers(model):
        assert isinstance(layer.importance, EqualScores) and not layer.support_scores.requires_grad
    assert model.network.encoder.alpha == SETTING["multiplier"]
    assert func.network("hard SAMSA, multiplier from 0", SETTING, data).network.encoder.alpha == 0


def test_sizes_start_at_the_least_squares_rule():
    setting = struct.STUDY.at("smoke")
    data = struct.data(setting)
    model = struct.network("no attention", setting, data)
    with torch.no_grad():
        x = (struct.sizes(data["train"]) - model.mean) / model.spread
        left = data["train"].targets - model.linear(x)
        assert (x.T @ left).abs().max() < 1e-2 and left.mean(0).abs().max() < 1e-4
        batch, found = struct.molecules.pad(data["train"], range(4)), []
        for network in (model.eval(), model.network):
            torch.manual_seed(0)
            found.append(network(batch))
        torch.testing.assert_close(found[0], found[1] + model.linear(x[:4]))


def test_places_say_what_scores_do_and_survive_packing():
    rng = np.random.default_rng(0)
    truth = rng.random((2331, 3)) < 0.1
    scores = np.stack([-3 + 0.01 * (rng.normal(size=truth.shape) + truth), truth], -1)
    scores[:, 2, 0] = scores[:, 2, 0].round(2)
    places = func.ranked(scores)
    kept = unpack(pack(places))
    assert func.precision(kept) == pytest.approx(func.precision(scores), abs=1e-12)
    assert ((places[..., 0] > 0) == (scores[..., 0] > 0)).all()
    assert ((func.ranked(scores + [3.0, 0.0])[..., 0] > 0) == (scores[..., 0] > -3)).all()
