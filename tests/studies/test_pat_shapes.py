"""The rows of PAT's study: what each of them changes, and what it leaves alone."""

import pytest
import torch
from sparseattn.baselines.graphs import PointNet
from sparseattn.pat.layers import GumbelSubsetSampling
from sparseattn.pat.models import class_scores
from sparseattn.studies.pat_shapes import ROWS, STUDY, Answers, RandomSubset

SETTING = STUDY.at("smoke")


def test_random_subset_has_distinct_points_of_the_cloud():
    x, layer = torch.randn(3, 20, 8), RandomSubset(8, 5)
    for out, cloud in zip(layer(x), x, strict=True):
        found = (out[:, None] == cloud).all(-1)
        assert (found.sum(1) == 1).all() and (found.sum(0) <= 1).all()
    assert not torch.equal(layer(x), layer(x))


def test_answers_see_the_first_points_and_average_probabilities(built):
    points = torch.randn(2, 48, 3)
    full, mean = built("full"), built("loss of the mean")
    assert torch.equal(full(points), full(points[:, : SETTING["few"]])) and full(points).shape == (2, SETTING["few"], 4)
    assert mean(points).shape == (2, 1, 4)
    torch.testing.assert_close(class_scores(full(points)), class_scores(mean(points)))
    torch.testing.assert_close(Answers(PointNet(4), 30).eval()(points).shape, torch.Size([2, 1, 4]))


def test_rows_differ_where_they_say(built):
    sizes = {row: sum(p.numel() for p in built(row).parameters()) for row in ROWS if not ROWS[row].get("floor")}
    for row in ("no shuffle", "loss of the mean", "largest", "LN", "PAT (FPS)", "PAT (GSA only)"):
        assert sizes[row] == sizes["full"]
    assert sizes["MHA SM"] == pytest.approx(sizes["full"], rel=0.2) and sizes["MHA LG"] > sizes["full"]
    assert sizes["1 group"] > sizes["4 groups"] > sizes["full"] > sizes["16 groups"] > sizes["32 groups"]
    assert sizes["no attention"] < sizes["full"]
    kinds = [type(layer).__name__ for layer in built("PAT (FPS + random)").network.subsets]
    assert kinds == ["Identity", "RandomSubset", "RandomSubset"]
    assert not any(
        layer.replace for layer in built("PAT (FPS + distinct)").modules() if isinstance(layer, GumbelSubsetSampling)
    )


def test_without_attention_points_do_not_meet_after_the_embedding(built):
    points, network = torch.randn(1, 32, 3), built("no attention").network
    x = network.embedding(points)
    assert not network.layers[0].attention(x).any() and built("full").network.layers[0].attention(x).any()


def test_parts_are_disjoint(data):
    train, val = ({tuple(cloud.flatten().tolist()) for cloud in data[part][0]} for part in ("train", "val"))
    assert len(val) == SETTING["validation"] and not train & val


def test_pointnet_pays_for_its_alignment_in_training_alone(data):
    torch.manual_seed(0)
    model, points = STUDY.network("PointNet", SETTING | {"alignments": True}, data), torch.randn(8, 48, 3)
    batch = {"inputs": points, "labels": torch.arange(8) % 4, "progress": 0.0}
    with torch.no_grad():
        model.network.align_features.matrix.bias.add_(0.1)
    logits, added = model(points)
    assert logits.shape == (8, 1, 4) and added > 0
    paid = STUDY.loss(model, batch, None)
    model.network.penalty = 0.0
    torch.testing.assert_close(paid - STUDY.loss(model, batch, None), added, rtol=1e-3, atol=0)
    assert model.eval()(points).shape == (8, 1, 4)
