"""The study of pile-up: score, rules by hand, rows, the released size, and what is missing."""

import numpy as np
import pytest
import torch
from sparseattn.data import particles
from sparseattn.lab.metrics import average_precision
from sparseattn.studies import pileup
from sparseattn.studies.pileup import ROWS, SMALLER, STUDY, PileupNetwork, leading_tracks, squeezed
from sparseattn.studies.tracking import RIVALS

SETTING = STUDY.at("smoke")


def cloud(momenta, pdg, collision, vertex):
    return particles.make_particles([(*p, 50.0) for p in momenta], pdg, collision, vertex)


def test_parts_share_no_event(data):
    events = [{c.event for c in data[part]} for part in ("train", "val", "test")]
    assert [len(e) for e in events] == SETTING["crossings"] and not set.intersection(*events)
    assert len(set.union(*events)) == sum(SETTING["crossings"])


def test_area_and_curve_of_an_event():
    rng = np.random.default_rng(0)
    scores, label = rng.permutation(200) / 200, rng.random(200) < 0.2
    found = pileup._precisions(scores, label)
    order = label[np.argsort(-scores)]
    for recall, precision in zip(pileup.RECALLS, found, strict=True):
        first = next(k for k in range(1, 201) if order[:k].sum() >= recall * label.sum() - 1e-9)
        assert precision == pytest.approx(order[:first].mean())


def test_perfect_and_reversed_orders(data):
    labels = [c.label[c.scored].numpy() for c in data["test"]]
    best, worst = (pileup._judged([sign * y for y in labels], data["test"]) for sign in (1.0, -1.0))
    assert (best["test"] == 1).all() and (best["_curve"] == 1).all() and (worst["test"] < 0.35).all()


def test_scores_see_neutral_particles_above_the_cut_only(data, built):
    one, model = data["test"][0], built("HEPT")
    logits = pileup._logits(model, one)
    assert len(logits) == int(one.scored.sum())
    assert (one.kind[one.scored] > 0).all() and (one.x[one.scored, 4] > 0.9).all()
    expected = average_precision(torch.from_numpy(logits), one.label[one.scored])
    assert STUDY.test(model, SETTING, data)["test"][0] == pytest.approx(expected)


def test_cones_are_sums_over_all_pairs(data):
    one = data["train"][0]
    charged = (one.kind == 0).numpy()
    found = pileup._cones(one, [charged, ~charged])
    eta, phi = one.x[:, :2].double().numpy().T
    turn = np.abs(phi[:, None] - phi)
    far = np.hypot(eta[:, None] - eta, np.minimum(turn, 2 * np.pi - turn))
    np.fill_diagonal(far, np.inf)
    pt, columns = one.x[:, 4].double().numpy(), []
    for keep in (charged, ~charged):
        for radius in pileup.RADII:
            near = (far < radius) & keep
            columns += [near.sum(1), near @ pt]
    np.testing.assert_allclose(found, np.stack(columns, -1)[one.scored.numpy()], atol=1e-6)


def test_vertices_are_chosen_by_their_tracks():
    made = cloud([(1, 0, 0), (0, 3, 0), (0, -2, 0), (2, 0.1, 0)], [22, 211, 211, 130], [1, 0, 1, 0], [4.0, -4.0])
    first, other = leading_tracks(made)
    assert first.tolist() == [False, True, False, False] and other.tolist() == [False, False, True, False]
    near = cloud([(0.1, 2, 0), (0.1, -2, 0), (0, 3, 0), (0, -2, 0)], [22, 22, 211, 211], [0, 1, 0, 1], [4.0, -4.0])
    scores = pileup.RULES["nearest vertex"](near)
    assert scores[0] > 0.9 and scores[1] < 0.1


def test_rules_need_no_label_of_the_test_events(data):
    blind = [particles.ParticleCloud(**(vars(c) | {"label": ~c.label})) for c in data["test"]]
    for see in (*pileup.RULES.values(), *pileup.TREES.values()):
        assert all(np.array_equal(see(a), see(b)) for a, b in zip(data["test"], blind, strict=True))


def test_the_released_size():
    model = PileupNetwork((torch.zeros(7), torch.ones(7)), decay="summed")
    assert sum(p.numel() for p in model.parameters()) == 311_207  # with the biases of decays, which nothing reads


def without(options, *names):
    return {name: value for name, value in options.items() if name not in names}


@pytest.mark.parametrize("row", RIVALS)
def test_rivals_are_there_as_released_whatever_form_is_trained(row, data):
    """The page times these; a row that is trained in a smaller form has other options."""
    model, cloud = PileupNetwork(data["_inputs"], **without(RIVALS[row], "rehash")).eval(), data["test"][0]
    with torch.no_grad():
        out = model(cloud.x[None], cloud.kind[None], cloud.coords[None])
    assert out.shape == (1, len(cloud)) and out.isfinite().all()
    assert without(ROWS[row], "seeds") == (RIVALS | SMALLER)[row]
    assert row not in SMALLER or SMALLER[row] != RIVALS[row]


def test_a_row_that_hashes_anew_draws_other_directions_in_every_step(data):
    """The one released row of Table 1 that is not smaller and hashes: SMYRF-k."""
    network = STUDY.network("SMYRF-k", SETTING, data)
    batch = next(STUDY.batches("SMYRF-k", SETTING, data, seed=0, epoch=0))
    g, seen = torch.Generator().manual_seed(0), []
    for _ in range(2):
        STUDY.loss(network, batch, g)
        seen.append(torch.cat([b.flatten().float() for b in network.buffers()]))
    assert batch["rehash"] and not torch.equal(*seen)


def test_squeezed_inputs_keep_signs_and_order():
    x = torch.randn(50, 7) * 30
    made = squeezed(x)
    assert torch.equal(made[:, [0, 1, 6]], x[:, [0, 1, 6]]) and torch.equal(made[:, 2:6].sign(), x[:, 2:6].sign())
    assert torch.equal(made[:, 4].argsort(), x[:, 4].argsort()) and made[:, 2:6].abs().max() < 6


@pytest.mark.parametrize("row", [row for row, options in ROWS.items() if not options.get("floor")])
def test_loss_reaches_scored_particles_and_every_part(row, data, built):
    model = built(row)
    batch = next(STUDY.batches(row, SETTING, data, seed=0, epoch=0))
    batch["inputs"]["x"] = batch["inputs"]["x"].clone().requires_grad_()
    STUDY.loss(model, batch, None).backward()
    lacking = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert all("bias" in name and "rpe" in name for name in lacking), lacking
    grad = batch["inputs"]["x"].grad[0].abs().sum(-1)
    assert (grad[batch["scored"]] > 0).all()
    assert (grad[~batch["scored"]] > 0).any() == (row != "no attention")
    model.zero_grad()


def test_missing_generator_says_so(monkeypatch):
    monkeypatch.setattr(pileup, "have_pythia", lambda: False)
    assert "extra hep" in STUDY.missing(STUDY.at("cpu")) and STUDY.missing(SETTING) == ""
