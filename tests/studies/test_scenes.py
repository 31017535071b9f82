"""The study of rooms: parts, what is kept of the answers, rules on points, rows."""

import numpy as np
import pytest
import torch
from sparseattn.data.scenes import missing_rooms
from sparseattn.lab.segmentation import confusion_matrix, segmentation_scores
from sparseattn.studies.scenes import FEATURES, ROWS, STUDY, drawn, judged, load, miou, network, office, rooms_of

SETTING = STUDY.at("smoke")


def test_area_five_is_for_testing_and_every_point_has_one_label():
    rooms, found = rooms_of(SETTING), load(SETTING)
    assert {room.area for room in rooms["test"]} == {5} and 5 not in {r.area for r in rooms["train"] + rooms["val"]}
    assert [len(rooms[part]) for part in ("train", "val", "test")] == [5, 5, 2]
    for part in ("train", "val", "test"):
        assert int((found[part][1] >= 0).sum()) == sum(map(len, rooms[part]))
    assert int((found["whole"][1] >= 0).sum()) == len(found["_place"]["test"]) == sum(map(len, rooms["test"]))


def test_matrices_are_those_of_rooms(data):
    labels = data["test"][1][data["test"][1] >= 0].numpy()
    said = np.random.default_rng(0).integers(0, 13, len(labels))
    counts = judged("test", said, labels, data)["test"]
    for number, counted in enumerate(counts):
        own = data["_place"]["test"] == number
        expected = confusion_matrix(*(torch.from_numpy(x[own]) for x in (said, labels)), 13)
        assert (expected.numpy() == counted).all()
    whole = segmentation_scores(torch.from_numpy(counts.sum(0, dtype=int)))
    assert miou(counts) == pytest.approx(100 * whole.mean_iou)


def test_surroundings_of_a_flat_sheet_stand_upright():
    g = torch.Generator().manual_seed(0)
    points = torch.rand(1, 60, 3, generator=g) * torch.tensor([1.0, 1.0, 0.0])
    seen = FEATURES["surroundings"]({"points": points, "features": torch.zeros(1, 60, 3)}, SETTING)
    assert seen.shape == (1, 60, 12) and np.allclose(seen[..., 6], 0, atol=1e-3) and np.allclose(seen[..., 9], 1)
    assert FEATURES["height"]({"points": points + 0.25}, SETTING).tolist() == [[2] * 60]


def test_rows_and_pictures(data):
    sizes = {row: sum(p.numel() for p in network(row, SETTING, data).parameters()) for row in ("PAT", "no attention")}
    assert sizes["no attention"] < sizes["PAT"] and {"PointNet", "DGCNN"} <= set(ROWS)
    with torch.no_grad():
        found = drawn("PAT", network("PAT", SETTING, data).eval(), SETTING, data)
    assert found["office"].shape == (len(office(rooms_of(SETTING))),)


def test_missing_sets_say_so(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSEATTN_DATA", str(tmp_path))
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path))
    assert missing_rooms("fixture") == "" and "Stanford3d" in missing_rooms("s3dis")
    assert "workflow/data.py sweethome" in missing_rooms("sweethome")
