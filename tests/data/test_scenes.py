"""sparseattn.data.scenes: kinds, areas, layouts, surfaces, the simulated scanner, official layouts, blocks.

Statistical tests have fixed seeds; each would reject correct code once in 10^4 seeds.
"""

import itertools

import numpy as np
import pytest
import torch
from scipy import stats

from sparseattn.data import scenes as S
from sparseattn.data.cache import data_path, have_data

ALARM = 1e-4
HERE = have_data("sweethome", "sweethome.npz")  # found before the tests get a cache of their own
ROOT = data_path("sweethome").parent if HERE else None


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARSEATTN_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def furniture():
    return S.load_furniture("fixture")


@pytest.fixture(scope="module")
def rooms():
    return S.load_rooms("fixture", rooms=1, density=150, progress=False)


def composed(furniture, area, density=150.0, scan=True):
    packed = S._packed_room(furniture, area, 0, density, scan, 0)
    return S._room(packed, area, S._composed(furniture.name, density, scan))


def plain_room(n=1000, size=(4.0, 3.0, 2.5), seed=0, area=1):
    rng = np.random.default_rng(seed)
    points = (rng.random((n, 3)) * size).astype(np.float32)
    points -= points.min(0)
    colours, labels = rng.integers(0, 256, (n, 3)).astype(np.uint8), rng.integers(0, 13, n).astype(np.uint8)
    return S.Room(f"Area_{area}_office_1", area, "made up", points, colours, labels)


# Kinds and areas

@pytest.mark.parametrize("title, group, category, kind", [
    ("Double French window", "opening", "Doors and windows", "window"),
    ("Glass door", "opening", "Doors and windows", "door"), ("Garage door", "opening", "Doors and windows", ""),
    ("Corner sofa", "sofa", "Living room", "sofa"), ("bed1", "couch", "", ""), ("sofa", "couch", "", "sofa"),
    ("Bookcase", "cabinet", "Living room", "bookcase"), ("Upper shelves cabinet", "cabinet", "Kitchen", ""),
    ("Filing cabinet", "cabinet", "Office", "cabinet"), ("Deck chair", "chair", "Exterior", ""),
    ("Table tennis", "table", "Miscellaneous", ""), ("Laptop", "", "Office", "small"), ("Car", "", "Vehicles", ""),
])
def test_kinds(title, group, category, kind):
    assert S.kind_of(title, group, category) == kind


def test_every_kind_has_a_label_and_a_size():
    for label, *_, least, most, usual in S._KINDS.values():
        assert label in S.LABELS and 0 < least <= usual <= most


@pytest.mark.parametrize("largest, kind, expected", [(95.0, "chair", 0.01), (0.95, "chair", 1.0),
                                                     (7.7, "sofa", 2.0 / 7.7)])
def test_units(largest, kind, expected):
    assert S._metres(largest, kind) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(4))
def test_areas_keep_families_together_and_are_even(seed):
    rng = np.random.default_rng(seed)
    kinds = rng.choice(["chair", "table"], 120)
    families = [f"f{k}" for k in rng.integers(0, 40, 120)]
    areas = S.assign_areas(kinds, families)
    assert set(areas.tolist()) == set(S.AREAS)
    for kind in ("chair", "table"):
        own = kinds == kind
        named = {}
        for family, area in zip(np.array(families)[own], areas[own], strict=True):
            named.setdefault(family, set()).add(int(area))
        assert all(len(found) == 1 for found in named.values())
        load = np.bincount(areas[own], minlength=7)[1:]
        largest = max(np.unique(np.array(families)[own], return_counts=True)[1])
        assert load.max() - load.min() <= largest                   # largest-first filling cannot be worse


def test_areas_depend_on_nothing_else():
    kinds, families = ["chair"] * 9 + ["sofa"] * 3, list("aabcdefgh") + list("xyz")
    assert np.array_equal(S.assign_areas(kinds, families), S.assign_areas(kinds, families))


def test_fixture_models_have_the_size_of_their_kind(furniture):
    assert len({model.name for model in furniture.models}) == len(furniture.models) > 30
    for model in furniture.models:
        assert max(model.size) == pytest.approx(S._KINDS[model.kind][7]) and min(model.size) > 0


def test_surface_fits_the_model(furniture):
    rng = np.random.default_rng(0)
    for model in furniture.models[::5]:
        x, normals, colours = furniture.surface(model, 300, rng)
        assert len(x) >= 16 and len(x) == len(normals) == len(colours)
        slack = 0.15
        assert (np.abs(x[:, :2]) <= np.array(model.size[:2]) / 2 + slack).all()
        assert x[:, 2].min() > -slack and x[:, 2].max() < model.size[2] + slack
        assert np.allclose(np.linalg.norm(normals, axis=1), 1, atol=1e-3) and 0 <= colours.min() <= colours.max() <= 1


def test_more_points_than_stored_stay_on_the_surface(furniture):
    model = furniture.of("sofa", 1)[0]
    few, *_ = furniture.surface(model, 50, np.random.default_rng(0))
    many, *_ = furniture.surface(model, 2000, np.random.default_rng(0))
    assert len(many) > 1024 > len(few)
    from scipy.spatial import cKDTree
    stored = furniture.shapes.points[model.row].numpy().astype(float)
    stored = S._local(stored, stored.min(0), stored.max(0), model.size)
    spacing = np.sqrt(S.cloud_area(stored) / 1024)
    far = cKDTree(stored).query(many)[0]
    assert np.quantile(far, 0.99) < 2 * spacing and len(np.unique(many.round(9), axis=0)) == len(many)


def test_area_of_a_cloud():
    x = np.random.default_rng(3).random((5000, 3)) * [2, 3, 0]
    assert S.cloud_area(x) == pytest.approx(6, rel=0.08)        # d^2 exponential: standard error 1.4 %; the rim adds


# Drawn things and boxes

def test_box_points_follow_area():
    x, normals, face = S.box_points([1, 2, 3], [2, 4, 6], 200.0, np.random.default_rng(0))
    assert np.bincount(face).tolist() == [1200, 1200, 600, 600, 400, 400]
    assert (x >= [1, 2, 3]).all() and (x <= [2, 4, 6]).all()
    assert (((x - [1.5, 3, 4.5]) * normals).sum(1) > 0).all() and np.abs(normals).sum() == len(x)
    on = x[face == 5]
    assert (on[:, 2] == 6).all()
    assert stats.kstest(on[:, 0] - 1, "uniform").pvalue > ALARM / 2
    assert stats.kstest((on[:, 1] - 2) / 2, "uniform").pvalue > ALARM / 2


def test_box_points_round_at_random():
    rng = np.random.default_rng(1)
    counts = [len(S.box_points([0, 0, 0], [1, 1, 0], 0.75, rng)[0]) for _ in range(400)]
    assert set(counts) <= {0, 1, 2} and stats.binomtest(sum(counts), 800, 0.75).pvalue > ALARM


@pytest.mark.parametrize("kind", list(S._RECIPES))
def test_drawn_things(kind):
    rng, room = np.random.default_rng(0), (5.0, 4.0, 2.8)
    for _ in range(10):
        thing = S._drawn(kind, room, rng)
        low, high = thing.boxes[:, 0].min(0), thing.boxes[:, 1].max(0)
        assert np.allclose(low[:2], -high[:2]) and low[2] == 0 and np.allclose(high - low, thing.size)
        assert (thing.boxes[:, 0] < thing.boxes[:, 1]).all() and thing.size[2] <= room[2]
        x, normals, colours = thing.surface(200, rng)
        assert (x >= low - 1e-9).all() and (x <= high + 1e-9).all() and len(x) == len(colours) == len(normals)
        assert 0 <= colours.min() <= colours.max() <= 1


def test_boxes_meet_against_a_grid():
    rng = np.random.default_rng(0)
    low = rng.integers(0, 4, (30, 3))
    high = low + rng.integers(1, 3, (30, 3))
    cells = [set(itertools.product(*(range(lo[k], hi[k]) for k in range(3)))) for lo, hi in zip(low, high, strict=True)]
    boxes = np.stack([low, high], 1).astype(float)
    for i in range(30):
        found = S.boxes_meet(boxes[i, 0], boxes[i, 1], boxes)
        assert found.tolist() == [bool(cells[i] & cells[j]) for j in range(30)]


# Layouts

@pytest.mark.parametrize("area, number", [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4), (6, 7)])
def test_nothing_overlaps_and_everything_is_inside(furniture, area, number):
    layout = S.furnish(furniture, area, number)
    boxes = np.stack([item.keep for item in layout.items])
    for k, box in enumerate(boxes):
        assert np.flatnonzero(S.boxes_meet(*box, boxes)).tolist() == [k]
        assert (box[0] >= -1e-6).all() and (box[1] <= layout.size + 1e-6).all()
    kinds = [item.kind for item in layout.items]
    assert "door" in kinds
    for item in layout.items:
        if isinstance(item.body, S.Model):
            assert item.body.area == area and item.body.kind == item.kind
        assert S.LABELS[item.label] == (S._KINDS[item.kind][0] if item.kind in S._KINDS else item.kind)


def test_styles_mean_what_they_say(furniture):
    seats = tops = 0
    for area, number in itertools.product((1, 4, 5), range(5)):
        layout = S.furnish(furniture, area, number)
        tables = [item for item in layout.items if item.kind == "table"]
        for item in layout.items:
            if item.kind in ("door", "window"):
                axis = int(abs(np.cos(item.turn)) > 0.5)
                assert min(item.place[axis], layout.size[axis] - item.place[axis]) == pytest.approx(0, abs=1e-9)
            if item.kind == "small":
                tops += 1
                assert any(item.place[2] == table.high[2] for table in tables)
            if item.kind == "column":
                assert item.low[2] == 0 and item.high[2] == pytest.approx(layout.size[2])
            if item.kind == "beam":
                assert item.high[2] == pytest.approx(layout.size[2])
            if item.kind == "chair" and tables:                    # of those at a table, the front (-y) points to it
                facing = np.array([np.sin(item.turn), -np.cos(item.turn)])
                for table in tables:
                    gap = np.maximum(table.low[:2] - item.place[:2], 0) - np.maximum(item.place[:2] - table.high[:2], 0)
                    if 0 < np.linalg.norm(gap) < S._half(item.body.size, item.turn).max() + 0.1 and (gap == 0).any():
                        seats += facing @ gap > 0
    assert tops >= 5 and seats >= 8


def test_bookcases_have_their_backs_to_the_wall(furniture):
    found = 0
    for area, number in itertools.product(S.AREAS, range(5)):
        layout = S.furnish(furniture, area, number)
        for item in layout.items:
            if item.kind == "bookcase":
                behind = np.array([-np.sin(item.turn), np.cos(item.turn)])
                back = item.place[:2] + behind * (item.body.size[1] / 2 + 0.06)
                found += 1
                assert (back < 0).any() or (back > layout.size[:2]).any()
    assert found > 5


def test_layouts_repeat_and_differ(furniture):
    a, b, c = (S.furnish(furniture, 2, 1, seed=seed) for seed in (0, 0, 1))
    assert np.array_equal(a.size, b.size)
    assert all(np.array_equal(x.low, y.low) for x, y in zip(a.items, b.items, strict=True))
    assert not np.array_equal(a.size, c.size)
    for wrong in ((0, 0), (7, 0), (1, -1)):
        with pytest.raises(ValueError, match="area"):
            S.furnish(furniture, *wrong)


# Surfaces and the scanner

def test_shell_lies_on_the_box_and_openings_are_holes(furniture):
    layout = S.furnish(furniture, 1, 0)
    surface = S.sample_layout(furniture, layout, 200)
    x, labels = surface.points, surface.labels
    assert (x[labels == 1, 2] == 0).all() and (x[labels == 0, 2] == layout.size[2]).all()
    walls = x[labels == 2]
    assert np.minimum(np.abs(walls), np.abs(walls - layout.size))[:, :2].min(1).max() == 0
    for item in layout.items:
        if item.kind in S._STRUCTURE:
            shell = x[(labels < 3)]
            assert not ((shell > item.low) & (shell < item.high)).all(1).any()
    assert surface.names[:6] == ("wall",) * 4 + ("floor", "ceiling") and len(surface.names) == 6 + len(layout.items)
    assert set(np.unique(surface.objects)) <= set(range(len(surface.names)))


def test_density_does_not_move_things(furniture):
    layout = S.furnish(furniture, 4, 1)
    few, many = (S.sample_layout(furniture, layout, density) for density in (50, 400))
    assert 6 < len(many.points) / len(few.points) < 9
    for number in range(6, len(few.names)):
        a, b = (s.points[s.objects == number] for s in (few, many))
        if len(a) > 30:
            assert np.abs(a.mean(0) - b.mean(0)).max() < 0.25
    with pytest.raises(ValueError, match="density"):
        S.sample_layout(furniture, layout, 0)


def test_visible_is_exact_for_plates():
    rng = np.random.default_rng(0)
    near = np.stack([np.full(4000, 1.5), rng.uniform(-0.5, 0.5, 4000), rng.uniform(-1, 1, 4000)], -1)
    far = np.stack([np.full(6000, 3.0), rng.uniform(-2, 2, 6000), rng.uniform(-1, 1, 6000)], -1)
    points, normals = np.concatenate([near, far]), np.tile([1.0, 0, 0], (10000, 1))
    for sign in (1, -1):                                                       # the sign of normals does not matter
        seen = S.visible(points, sign * normals, [0, 0, 0])
        assert seen[:4000].all()
        shadow = np.abs(far[:, 1]) < 1.0
        edge = np.abs(np.abs(far[:, 1]) - 1.0) < 0.25
        assert not seen[4000:][shadow & ~edge].any() and seen[4000:][~shadow & ~edge].all()


def test_a_lone_sloping_floor_is_all_seen():
    rng = np.random.default_rng(1)
    floor = np.append(rng.uniform(-4, 4, (20000, 2)), np.zeros((20000, 1)), 1)
    assert S.visible(floor, np.tile([0, 0, 1.0], (20000, 1)), [0, 0, 1.5]).mean() > 0.995


def test_scan_drops_hidden_bottoms_and_adds_noise(furniture):
    layout = S.furnish(furniture, 4, 1)
    surface = S.sample_layout(furniture, layout, 200)
    scan = S.scan_layout(surface, layout)
    assert 0.3 * len(surface.points) < len(scan.points) < len(surface.points)
    floor = scan.points[scan.labels == 1, 2]
    assert abs(floor.mean()) < 5 * 0.004 / np.sqrt(len(floor)) and floor.std() == pytest.approx(0.004, rel=0.1)
    still = S.scan_layout(surface, layout, jitter=0.0)
    furnished = (still.labels != 1) & (still.labels != 2)
    assert still.points[furnished, 2].min() > 0.01
    assert np.isfinite(scan.colours).all()


# Rooms

def test_rooms_repeat_and_come_from_the_cache(rooms, monkeypatch):
    monkeypatch.setattr(S, "_packed_room", None)                                       # would fail if it were called
    again = S.load_rooms("fixture", rooms=1, density=150, progress=False)
    for a, b in zip(rooms, again, strict=True):
        assert a.name == b.name and np.array_equal(a.points, b.points) and np.array_equal(a.colours, b.colours)
        assert np.array_equal(a.labels, b.labels) and np.array_equal(a.objects, b.objects) and a.names == b.names


def test_rooms_are_what_they_should_be(rooms, furniture):
    assert [room.area for room in rooms] == list(S.AREAS) and len({room.name for room in rooms}) == 6
    for room in rooms:
        assert room.points.dtype == np.float32 and (room.points.min(0) == 0).all() and room.points.max() < 12
        assert room.colours.dtype == np.uint8 and room.labels.max() < 13 and "not S3DIS" in room.source
        assert {room.names[k] for k in np.unique(room.objects)} <= set(room.names)
    one = composed(furniture, 3)
    assert np.array_equal(one.points, rooms[2].points) and one.source == rooms[2].source
    part = one.subset(one.labels == 2)
    assert (part.labels == 2).all() and len(part) == len(part.objects) == (one.labels == 2).sum()


def test_workers_make_the_same_rooms(rooms, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path))
    again = S.load_rooms("fixture", areas=[1, 2], rooms=1, density=150, workers=2, progress=False)
    assert all(np.array_equal(a.points, b.points) and a.name == b.name for a, b in zip(rooms[:2], again, strict=True))
    assert len(list(tmp_path.rglob("*.npz"))) == 2


def test_without_a_scanner_there_is_more(furniture):
    scanned, everything = (composed(furniture, 6, 100, scan) for scan in (True, False))
    assert len(scanned) < len(everything) and "all surfaces" in everything.source


def test_splitting_by_area(rooms):
    train, test = S.split_rooms(rooms, 5)
    assert [room.area for room in test] == [5] and sorted(room.area for room in train) == [1, 2, 3, 4, 6]
    with pytest.raises(ValueError, match="test_area"):
        S.split_rooms(rooms, 7)


def test_counts(rooms):
    counts = S.label_counts(rooms)
    assert counts.sum() == sum(map(len, rooms)) and counts[2] == sum((room.labels == 2).sum() for room in rooms)
    assert counts[2] > counts[1] > counts[8]                                       # walls, floor, chairs
    assert S.label_counts([]).tolist() == [0] * 13


@pytest.mark.parametrize("wrong", [{"name": "kicad"}, {"areas": [0]}, {"areas": []}, {"workers": 0}, {"rooms": 0}])
def test_loading_refuses(wrong):
    with pytest.raises(ValueError, match="name|areas|workers"):
        S.load_rooms(**{"name": "fixture", "progress": False} | wrong)


def test_missing_files(tmp_path):
    for name in ("s3dis", "sweethome"):
        with pytest.raises(FileNotFoundError):
            S.load_rooms(name, root=tmp_path, progress=False)
    with pytest.raises(FileNotFoundError):
        S.load_blocks(root=tmp_path)
    with pytest.raises(ValueError, match="name"):
        S.load_furniture("ikea")


@pytest.mark.skipif(not HERE, reason="the set sweethome is not here")
def test_sweethome_areas_share_no_model():
    furniture = S.load_furniture("sweethome", root=ROOT)
    owners = {}
    for model in furniture.models:
        owners.setdefault((model.kind, model.family), set()).add(model.area)
        least, most, usual = S._KINDS[model.kind][5:]
        assert least - 1e-6 <= max(model.size) <= most + 1e-6
    assert all(len(areas) == 1 for areas in owners.values())
    for kind in ("chair", "table", "sofa", "bookcase", "door", "window", "cabinet", "small"):
        assert all(furniture.of(kind, area) for area in S.AREAS), kind
    room = composed(furniture, 5)
    assert {"floor", "wall", "door", "chair"} <= {S.LABELS[k] for k in np.unique(room.labels)}


# Official files

def write_annotations(root, area="Area_5", room="hallway_2"):
    folder = root / "Stanford3dDataset_v1.2_Aligned_Version" / area / room / "Annotations"
    folder.mkdir(parents=True)
    (folder / "chair_1.txt").write_text("11.5 2 3 10 20 30\n12 2.5 3 103.0\x100000 20 30\n")
    (folder / "stairs_1.txt").write_text("11 2.25 4.25 255 0 0\n")
    (folder / "wall_3.txt").write_text("11 2 -1\x0e5 1 185\x00187\n")
    return folder


def test_annotations(tmp_path):
    write_annotations(tmp_path)
    for root in (tmp_path, tmp_path / "Stanford3dDataset_v1.2_Aligned_Version"):
        room, = S.load_rooms("s3dis", root=root, progress=False)
        assert room.name == "Area_5_hallway_2" and room.area == 5 and room.names == ("chair_1", "stairs_1", "wall_3")
        assert [S.LABELS[k] for k in room.labels] == ["chair", "chair", "clutter", "wall"]
        assert room.points.tolist() == [[0.5, 0, 4.5], [1, 0.5, 4.5], [0, 0.25, 5.75], [0, 0, 0]]
        assert room.colours.tolist() == [[10, 20, 30], [103, 20, 30], [255, 0, 0], [1, 185, 187]]
    with pytest.raises(FileNotFoundError, match="no rooms of area 1 among 1 of other areas"):
        S.load_rooms("s3dis", root=tmp_path, areas=[1], progress=False)


def test_damaged_annotations(tmp_path):
    folder = write_annotations(tmp_path)
    (folder / "chair_1.txt").write_text("1 2 3 4 5\n")
    with pytest.raises(ValueError, match="chair_1.txt: expected six"):
        S.read_annotations(folder)
    (folder / "chair_1.txt").write_text("1 2 3 4 5 green\n")
    with pytest.raises(ValueError, match="chair_1.txt"):
        S.read_annotations(folder)
    with pytest.raises(FileNotFoundError):
        S.read_annotations(tmp_path)


def test_collected_rooms(tmp_path):
    (tmp_path / "stanford_indoor3d").mkdir()
    rows = np.random.default_rng(0).random((50, 7)) * [5, 4, 3, 255, 255, 255, 12.99] + [3, 0, 0, 0, 0, 0, 0]
    rows[:, 3:] = np.floor(rows[:, 3:])
    for name in ("Area_1_office_1", "Area_6_lounge_1"):
        np.save(tmp_path / "stanford_indoor3d" / f"{name}.npy", rows)
    rooms = S.load_rooms("s3dis", root=tmp_path, progress=False)
    assert [room.name for room in rooms] == ["Area_1_office_1", "Area_6_lounge_1"]
    assert np.allclose(rooms[0].points, rows[:, :3] - rows[:, :3].min(0), atol=1e-6)
    assert np.array_equal(rooms[0].labels, rows[:, 6]) and np.array_equal(rooms[0].colours, rows[:, 3:6])
    np.save(tmp_path / "stanford_indoor3d" / "Area_2_office_1.npy", rows[:, :6])
    with pytest.raises(ValueError, match="Area_2_office_1"):
        S.load_rooms("s3dis", root=tmp_path, progress=False)


def test_prepared_blocks(tmp_path):
    h5py = pytest.importorskip("h5py")
    folder = tmp_path / "indoor3d_sem_seg_hdf5_data"
    folder.mkdir()
    rng = np.random.default_rng(0)
    data, labels = rng.random((5, 4096, 9)).astype(np.float32), rng.integers(0, 13, (5, 4096))
    for k, rows in enumerate((slice(0, 2), slice(2, 5))):
        with h5py.File(folder / f"ply_data_all_{k}.h5", "w") as file:
            file["data"], file["label"] = data[rows], labels[rows].astype(np.uint8)
    names = ["Area_1_office_1", "Area_5_office_1", "Area_5_office_1", "Area_2_office_1", "Area_5_office_2"]
    (folder / "all_files.txt").write_text("".join(f"indoor3d_sem_seg_hdf5_data/ply_data_all_{k}.h5\n" for k in (0, 1)))
    (folder / "room_filelist.txt").write_text("\n".join(names) + "\n")
    blocks = S.load_blocks(areas=[5], points=512, root=tmp_path)
    assert blocks.names == ("Area_5_office_1", "Area_5_office_2") and blocks.room.tolist() == [0, 0, 1]
    assert np.allclose(torch.cat([blocks.points, blocks.features], -1), data[[1, 2, 4], :512])
    assert np.array_equal(blocks.labels, labels[[1, 2, 4], :512])
    with pytest.raises(ValueError, match="exactly once"):
        S.to_rooms(blocks, blocks.labels)
    (folder / "room_filelist.txt").write_text("\n".join(names[:4]) + "\n")
    with pytest.raises(ValueError, match="room_filelist"):
        S.load_blocks(root=tmp_path)


# Blocks

@pytest.mark.parametrize("size, least", [(1.5, 1), (1.5, 100), (0.7, 60), (50.0, 1), (1.5, 10**6)])
def test_cells(size, least):
    room = plain_room(900)
    cells = S.room_cells(room, size, least)
    counts = np.bincount(cells)
    assert counts.sum() == 900 and counts.min() > 0 and (counts.min() >= least or len(counts) == 1)
    if least == 1:
        square = np.floor(room.points[:, :2] / size)
        same = (square[:, None] == square[None]).all(-1)
        assert np.array_equal(same, cells[:, None] == cells[None])


def test_small_squares_join_a_neighbour():
    room = plain_room(4000, size=(3.05, 3.0, 2.5))                # a strip of 5 cm is left over in x
    cells = S.room_cells(room, 1.5, 150)
    assert cells.max() + 1 == 4
    strip = room.points[:, 0] >= 3.0
    right = (room.points[:, 0] >= 1.5) & ~strip
    assert strip.any()
    for upper in (False, True):
        half = (room.points[:, 1] >= 1.5) == upper
        assert len(np.unique(cells[(strip | right) & half])) == 1
    with pytest.raises(ValueError, match="size"):
        S.room_cells(room, 0)


@pytest.mark.parametrize("points", [1, 64, 500, 5000, None])
def test_whole_blocks_hold_every_point_once(points):
    rooms = [plain_room(n, seed=n, area=a) for n, a in ((700, 1), (1301, 5), (3, 2))]
    blocks = S.whole_blocks(rooms, points, size=1.5)
    assert blocks.mask.sum() == 2004 and blocks.names == tuple(room.name for room in rooms)
    for number, room in enumerate(rooms):
        own = blocks.mask & (blocks.room == number)[:, None]
        assert sorted(blocks.index[own].tolist()) == list(range(len(room)))
        assert set(blocks.areas[blocks.room == number].tolist()) == {room.area}
    for back, room in zip(S.to_rooms(blocks, blocks.labels), rooms, strict=True):
        assert np.array_equal(back, room.labels)
    height = S.to_rooms(blocks, blocks.points[..., 2])
    assert all(np.array_equal(z, room.points[:, 2]) for z, room in zip(height, rooms, strict=True))


def test_training_blocks():
    rooms = [plain_room(900), plain_room(2000, seed=1, area=3)]
    blocks = S.sample_blocks(rooms, 128, rng=np.random.default_rng(0))
    cells = [S.room_cells(room, 1.5, 12) for room in rooms]
    assert len(blocks) == sum(c.max() + 1 for c in cells)
    for b in range(len(blocks)):
        room, which = rooms[int(blocks.room[b])], cells[int(blocks.room[b])]
        index = blocks.index[b].numpy()
        assert len(set(which[index].tolist())) == 1                                  # from one block only
        inside = room.points[which == which[index[0]]]
        middle = (inside[:, :2].min(0) + inside[:, :2].max(0)) / 2
        assert np.allclose(blocks.points[b, :, :2], room.points[index, :2] - middle, atol=1e-5)
        assert np.allclose(blocks.features[b], room.colours[index] / 255)
        real = index[blocks.mask[b].numpy()]
        assert len(set(real.tolist())) == len(real) == min(128, len(inside))
    assert set(blocks.index[~blocks.mask].tolist()) <= set(range(2000))


def test_training_draws_anew_and_repeats_with_the_seed():
    rooms = [plain_room(2000)]
    a, b, c = (S.sample_blocks(rooms, 64, rng=np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert torch.equal(a.index, b.index) and not torch.equal(a.index, c.index)
    rng = np.random.default_rng(0)
    one, two = (S.sample_blocks(rooms, 64, rng=rng, shift=True) for _ in range(2))
    assert one.points.shape != two.points.shape or not torch.equal(one.points, two.points)


def test_each_point_of_a_block_is_drawn_equally_often():
    room = plain_room(60, size=(1, 1, 1))
    rng, seen = np.random.default_rng(5), np.zeros(60)
    for _ in range(300):
        seen += np.bincount(S.sample_blocks([room], 20, rng=rng).index[0].numpy(), minlength=60)
    variance = 300 * (1 / 3) * (2 / 3) * 60 / 59                               # without repetition: 20 of 60 each time
    assert stats.chi2.sf(((seen - 100) ** 2).sum() / variance, 59) > ALARM


def test_place_in_the_room():
    room = plain_room(300)
    blocks = S.whole_blocks([room], 300, size=10.0, room_place=True)
    assert blocks.features.shape == (1, 300, 6) and blocks.features.dtype == torch.float32
    far = room.points.max(0)
    assert np.allclose(blocks.features[0, :, 3:] * torch.tensor(far), room.points[blocks.index[0]], atol=1e-5)


def test_batches():
    blocks = S.whole_blocks([plain_room(900)], 100)
    seeded = [torch.Generator().manual_seed(0) for _ in range(2)]
    a, b = ([batch["points"] for batch in S.block_batches(blocks, 4, generator=g)] for g in seeded)
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True)) and sum(map(len, a)) == len(blocks)
    plain = torch.cat([batch["labels"] for batch in S.block_batches(blocks, 4, shuffle=False)])
    assert torch.equal(plain, blocks.labels)
    sizes = {len(batch["mask"]) for batch in S.block_batches(blocks, 4, shuffle=False, drop_last=True)}
    assert sizes == {4}
    with pytest.raises(ValueError, match="generator"):
        next(S.block_batches(blocks, 4))
    with pytest.raises(ValueError, match="batch_size"):
        next(S.block_batches(blocks, 0, shuffle=False))


def test_subsets_and_refusals():
    blocks = S.whole_blocks([plain_room(900)], 100)
    part = blocks.subset([2, 0])
    assert torch.equal(part.labels, blocks.labels[[2, 0]]) and len(part.to("cpu")) == 2
    with pytest.raises(ValueError, match="exactly once"):
        S.to_rooms(part, part.labels)
    with pytest.raises(ValueError, match="values"):
        S.to_rooms(blocks, blocks.labels[:, :5])
    for wrong in (0, 2.5, True):
        with pytest.raises(ValueError, match="points"):
            S.whole_blocks([plain_room(50)], wrong)
    with pytest.raises(ValueError, match="rooms"):
        S.whole_blocks([], 100)


def test_drawing():
    plt = pytest.importorskip("matplotlib.pyplot")
    figure, axes = plt.subplots(1, 2)
    room = plain_room(200)
    for ax, view in zip(axes, ("above", "corner"), strict=True):
        S.draw_room(ax, room, room.labels, view=view)
        assert 0 < len(ax.collections[0].get_offsets()) < 200
    with pytest.raises(ValueError, match="view"):
        S.draw_room(axes[0], room, view="below")
    plt.close(figure)
