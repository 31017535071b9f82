"""The rows of the Sampled Transformer's study: what each changes, and which of them let points meet."""

import pytest
import torch
from sparseattn.sampled.models import HierarchicalClassifier, ShapeClassifier
from sparseattn.studies.sampled_shapes import ROWS, STUDY, drawn

SETTING = STUDY.at("smoke")
TRAINED = [row for row in ROWS if not ROWS[row].get("floor")]
ONE_LAYER = [row for row in TRAINED if "level" not in row]


def size(model):
    return sum(p.numel() for p in model.parameters())


def test_rows_differ_in_their_attention_only(built):
    sizes = {row: size(built(row)) for row in ONE_LAYER}
    assert sizes["dense"] == sizes["sampled"] == sizes["sparse"] == sizes["kNN"]
    assert sizes["kNN"] > sizes["feed-forward"] > sizes["MLP + FC"]
    assert all(isinstance(built(row), ShapeClassifier) for row in ONE_LAYER)
    for levels in ("1 level", "5 levels"):
        same = [built(f"{name}, {levels}") for name in ("sampled", "kNN")]
        assert size(same[0]) == size(same[1]) > size(built(f"no attention, {levels}"))
        assert isinstance(same[0], HierarchicalClassifier) and len(same[0].levels) == int(levels[0])


@pytest.mark.parametrize("row", ["MLP + FC", "feed-forward"])
def test_floors_do_not_let_points_meet(row, built):
    points, model = torch.randn(1, 20, 3), built(row)
    x = model.embedding(points)
    x = x if model.layer is None else model.layer(x, points)
    alone = model.embedding(points[:, :1])
    alone = alone if model.layer is None else model.layer(alone, points[:, :1])
    torch.testing.assert_close(x[:, :1], alone)


def test_a_cycle_is_drawn_anew_or_never(built):
    points = torch.randn(2, 20, 3)
    assert torch.equal(*(built("sparse")(points) for _ in range(2)))
    sampled = built("sampled")
    assert not torch.equal(sampled(points), sampled(points))


def test_every_level_of_the_small_hierarchy_has_points_to_attend_to():
    setting = STUDY.at("cpu")
    left = setting["points"]
    for stride in setting["level strides"]:
        left = -(-left // stride)
        assert left >= 4


def test_drawn_holds_answers_of_eight_cycles(data, built):
    found = drawn("sampled", built("sampled"), SETTING, data)
    items = len(data["test"][1])
    assert found["single"].shape == (8, items) and found["mean"].shape == (items,)
    assert drawn("sparse", None, SETTING, data) == {}
