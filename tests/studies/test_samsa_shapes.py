"""The rows of SAMSA's study on shapes: what each of them changes, and in which modes a trained network is tested."""

import torch
from sparseattn.baselines.graphs import PointNet
from sparseattn.samsa.models import EqualScores, inference_modes, set_inference
from sparseattn.studies.samsa_shapes import ROWS, STUDY, drawn

SETTING = STUDY.at("smoke")


def test_rows_differ_where_they_say(built):
    share = SETTING["points"] / 1024
    for row, options in ROWS.items():
        if "samples" in options:
            layer = built(row).encoder.layers[0].attention
            assert layer.samples == max(2, round(options["samples"] * share))
            assert layer.hard == options.get("hard", True)
    starts = {"hard 256": SETTING["multiplier"], "no attention": SETTING["multiplier"], "hard 256, from 0": 0.0}
    assert {row: built(row).encoder.alpha.item() for row in starts} == starts
    rows = ("hard 256", "soft 256", "random 256", "full", "PointNet")
    names = {row: inference_modes(built(row)) for row in rows}
    assert names.pop("hard 256") == ["top-k", "noise"] and names.pop("soft 256") == ["mixed", "top-k", "noise"]
    assert not any(names.values())


def test_random_rows_draw_all_keys_equally_often_and_learn_no_scores(built):
    layer = built("random 256").encoder.layers[0].attention
    x, count = torch.randn(1, 48, SETTING["dim"]), torch.zeros(48 + layer.support_scores.shape[1])
    torch.manual_seed(0)
    for _ in range(500):
        count += torch.bincount(layer(x, return_info=True)[1].pattern.flatten(), minlength=len(count))
    share = layer.samples / len(count)
    drawn_often = count / (500 * layer.heads)
    assert (drawn_often - share).abs().max() < 5 * (share * (1 - share) / (500 * layer.heads)) ** 0.5
    assert isinstance(layer.importance, EqualScores) and not layer.support_scores.requires_grad


def test_soft_rows_are_tested_as_mixtures_and_other_modes_are_beside(data, built):
    model = built("soft 256")
    found = STUDY.test(model, SETTING, data)
    assert list(found) == ["test", "top-k", "noise"] and all(len(y) == len(data["test"][1]) for y in found.values())
    points = data["test"][0][:2]
    mixed, best = set_inference(model, "mixed")(points), set_inference(model, "top-k")(points)
    assert not torch.equal(mixed, best) and torch.equal(set_inference(model, "mixed")(points), mixed)
    assert not torch.equal(set_inference(model, "noise")(points), model(points))


def test_drawn_holds_what_the_page_reads(data, built):
    with torch.no_grad():
        found = drawn("hard 256", built("hard 256"), SETTING, data)
    assert set(found) == {"multiplier", "supports, noise", "supports, top-k", "cloud", "read"}
    assert found["read"].shape == (SETTING["heads"], 12)
    assert drawn("PointNet", built("PointNet"), SETTING, data) == {}


def test_rivals_have_no_dropout_where_samsa_has_none(data):
    for row in ("PointNet", "PointNet++ (levels)", "DGCNN", "Set Transformer"):
        for share in (0.0, 0.1):
            model = STUDY.network(row, SETTING | {"dropout": share}, data)
            drops = [part.p for part in model.modules() if isinstance(part, torch.nn.Dropout)]
            assert drops and any(drops) == (share > 0)


def test_radii_grow_with_the_distance_between_points(data):
    """Of points on a surface, a fourth as many are twice as far apart."""
    model = STUDY.network("PointNet++ (levels)", SETTING, data)
    radii = [level.radius for level in model.levels]
    released = [level[1] for level in SETTING["levels"]]
    wanted = [radius * (whole / part) ** 0.5 for radius, whole, part in
              zip(released, (1024, 512), (SETTING["points"], SETTING["levels"][0][0]), strict=True)]
    assert radii == wanted and radii[0] > released[0]
    whole = STUDY.network("PointNet++ (levels)", SETTING | {"levels": None, "points": 1024}, data)
    assert [level.radius for level in whole.levels] == [0.2, 0.4]


def test_dgcnn_has_as_many_layers_as_released(data):
    made, whole = (STUDY.network("DGCNN", SETTING | more, data) for more in ({}, {"edges": None}))
    assert len(made.edges) == len(whole.edges) == 4


def test_pointnet_pays_for_an_alignment_that_is_not_orthogonal_in_training_alone(data):
    torch.manual_seed(0)
    model, points = STUDY.network("PointNet", SETTING | {"alignments": True}, data), torch.randn(8, 48, 3)
    labels = torch.arange(8) % 4
    with torch.no_grad():
        model.align_features.matrix.bias.add_(0.1 * torch.randn_like(model.align_features.matrix.bias))
    torch.manual_seed(1)
    found = STUDY.loss(model, {"inputs": points, "labels": labels, "progress": 0.0}, None)
    torch.manual_seed(1)
    logits, info = PointNet.forward(model, points, return_info=True)
    matrix, eye = info["features"], torch.eye(info["features"].shape[-1])
    added = sum((eye - a @ a.T).square().sum() for a in matrix) / len(matrix)
    assert added > 1
    torch.testing.assert_close(found, torch.nn.functional.cross_entropy(logits, labels) + 0.001 * added)
    assert torch.is_tensor(model.eval()(points))
