"""The study of gestures: who is in which part, what is kept of the answers, what rows change."""

import torch
from sparseattn.studies.gestures import ROWS, STUDY, drawn, judged, shuffled_and_moved

SETTING = STUDY.at("smoke")


def test_parts_hold_whole_people(data):
    clips = {part: len(data[part][1]) for part in ("train", "val", "test")}
    assert clips["train"] == 2 * clips["val"] == 2 * clips["test"] and clips["test"] == 11 * 3
    assert data["_stream"].bincount().tolist() == [3] * 11 and data["_window"].tolist() == [0, 1, 2] * 11
    assert torch.equal(data["_truth"][data["_stream"]], data["test"][1]) and set(data["_person"].tolist()) == {0}


def test_right_answers_are_right_in_every_way(data):
    labels = data["test"][1]
    found = judged("test", labels.numpy(), labels.numpy(), data)
    assert all(found[name].all() for name in ("vote", "clips", "vote 10", "early", "share"))
    assert found["early"].shape == (11, 3) and len(found["vote 10"]) == 10
    assert all(len(found[f"_{name}"]) == len(found[name]) for name in ("vote", "clips", "vote 10", "early", "share"))


def test_others_do_not_vote_in_ten_classes(data):
    said = data["test"][1].clone()
    said[:2], said[3:6] = 10, 10
    found = judged("test", said.numpy(), data["test"][1].numpy(), data)
    assert found["vote"].tolist() == [False] * 2 + [True] * 9
    assert found["vote 10"].tolist() == [True, False] + [True] * 8


def test_stirring_keeps_times_and_polarities(data):
    events = data["train"][0][:4]
    out = shuffled_and_moved(events, torch.Generator().manual_seed(0))
    for before, after in zip(events, out, strict=True):
        assert torch.equal(before[:, 2].sort().values, after[:, 2].sort().values)
        assert before[:, 3].sum() == after[:, 3].sum() and not torch.equal(before[:, 2], after[:, 2])
        assert (after[:, :2].abs() <= 1.2).all()


def test_rows_differ_where_they_say(data, built):
    sizes = {row: sum(p.numel() for p in built(row).parameters()) for row in ROWS if not ROWS[row].get("floor")}
    assert sizes["PAT (GSA only)"] == sizes["PAT (GSA only), few"] == sizes["PAT (FPS)"] < sizes["PAT (FPS + GSS)"]
    assert sizes["no attention"] < sizes["PAT (GSA only)"]
    events = data["test"][0][:2]
    assert built("PAT (GSA only), few")(events).shape == (2, SETTING["few"], 11)
    assert built("PointNet")(events).shape == (2, 1, 11)


def test_drawn_asks_with_other_numbers_of_points(data, built):
    model = built("PointNet")
    with torch.no_grad():
        before = model(data["test"][0])
        found = drawn("PointNet", model, SETTING, data)
        assert torch.equal(model(data["test"][0]), before), "the test comes after it"
    assert found["counts"] == SETTING["counts"] and found["right"].shape == (len(SETTING["counts"]),)
    assert drawn("PAT (FPS)", None, SETTING, data) == {}
