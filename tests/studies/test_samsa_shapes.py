"""The rows of SAMSA's study on shapes: what each of them changes, and in which modes a trained network is tested."""

import torch
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
