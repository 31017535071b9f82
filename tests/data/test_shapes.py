"""sparseattn.data.shapes: readers, sampling, splits, builders, official layouts, corruption, augmentation.

Statistical tests have fixed seeds; each would reject correct code once in 10^4 seeds.
"""

import copy
import importlib.resources
import itertools
import json
import pickle
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from scipy import stats

from sparseattn.data import shapes as S
from sparseattn.data.cache import data_path, have_data, load_arrays

ALARM = 1e-4


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def tetrahedron(height=1.0, material="PIN-01"):
    text = "coordIndex [0,2,1,-1,0,1,3,-1,0,3,2,-1,1,2,3,-1] coord Coordinate { point [0 0 0,1 0 0,0 1 0,0 0 %g] }"
    appearance = f"appearance Appearance {{ material USE {material} }}"
    return f"Shape {{ geometry IndexedFaceSet {{ {text % height} }} {appearance} }}\n"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path / "cache"))


# Meshes

def test_points_follow_area():
    big, small = [(0, 0, 0), (3, 0, 0), (0, 2, 0)], [(5, 0, 1), (6, 0, 1), (5, 1, 1)]
    mesh = S.Mesh(np.array(big + small, float), np.array([[0, 1, 2], [3, 4, 5]]), np.array([0, 1]))
    assert mesh.areas.tolist() == [3, 0.5]
    x, normals, material = S.sample_surface(mesh, 7000, np.random.default_rng(1))
    assert stats.chisquare(np.bincount(material), [6000, 1000]).pvalue > ALARM
    assert np.allclose(normals, [0, 0, 1]) and np.allclose(x[:, 2], material)
    u, v = x[material == 0, 0] / 3, x[material == 0, 1] / 2         # uniform on the triangle u, v >= 0, u + v <= 1
    assert (u >= 0).all() and (v >= 0).all() and (u + v <= 1 + 1e-12).all()
    for part in (u, v, 1 - u - v):
        assert stats.kstest(part, lambda t: 1 - (1 - t) ** 2).pvalue > ALARM / 3


def test_sampling_is_nested_and_skips_flat_triangles():
    vertices = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 0], [2, 0, 0]], float)
    mesh = S.Mesh(vertices, np.array([[0, 1, 3], [0, 1, 2], [0, 1, 3]]), np.array([7, 1, 7]))
    x, normals, material = S.sample_surface(mesh, 500, np.random.default_rng(0))
    assert (material == 1).all() and np.isfinite(normals).all()
    assert np.array_equal(S.sample_surface(mesh, 50, np.random.default_rng(0))[0], x[:50])


@pytest.mark.parametrize("points, faces", [(0, [[0, 1, 2]]), (5, [[0, 1, 1]]), (5, np.zeros((0, 3), int))])
def test_sampling_needs_points_and_area(points, faces):
    mesh = S.Mesh(np.eye(3), np.array(faces), np.zeros(len(faces), int))
    with pytest.raises(ValueError, match="points|area"):
        S.sample_surface(mesh, points, np.random.default_rng(0))


def test_packing_keeps_the_shape():
    rng = np.random.default_rng(0)
    corners = np.repeat(rng.normal(size=(30, 3)) * [1, 10, 0.1] + [100, 0, -5], 2, 0)       # all vertices doubled
    faces = rng.integers(0, 60, (50, 3))
    mesh = S.Mesh(corners, faces, np.arange(50))
    packed = S.pack_mesh(mesh)
    real = mesh.areas > 0
    again = packed["centre"] + packed["scale"] * packed["vertices"] / 32767
    assert packed["materials"].tolist() == np.flatnonzero(real).tolist() and len(packed["vertices"]) <= 30
    assert np.abs(again[packed["faces"]] - corners[faces[real]]).max() <= packed["scale"] / 32767
    assert np.abs(np.linalg.norm(packed["vertices"].astype(float), axis=1).max() - 32767) < 2


# Readers

def test_vrml_reads_what_cad_programs_write():
    text = "#VRML V2.0 utf8 # Shape {\n" + tetrahedron() + tetrahedron(2, "IC-BODY") + tetrahedron(3)
    mesh = S.read_vrml(text)
    assert mesh.names == ("PIN-01", "IC-BODY") and mesh.materials.tolist() == [0] * 4 + [1] * 4 + [0] * 4
    volume = (mesh.vertices[mesh.faces].mean(1) * mesh.crosses).sum() / 6
    assert np.isclose(volume, (1 + 2 + 3) / 6)                             # outward normals: positive volume


def test_vrml_polygons_and_materials_without_name():
    square = ("Shape { geometry IndexedFaceSet { coordIndex [0 1 2 3 -1 0 1 4] coord Coordinate { "
              "point [0 0 0 2 0 0 2 2 0 0 2 0 0 0 1] } } }")
    mesh = S.read_vrml(square)
    assert mesh.names == ("",) and mesh.faces.tolist() == [[0, 1, 2], [0, 2, 3], [0, 1, 4]]
    lines = "Shape { geometry IndexedLineSet { coordIndex [0,1,-1] coord Coordinate { point [0 0 0, 1 1 1] } } }"
    assert len(S.read_vrml(lines + square).faces) == 3


@pytest.mark.parametrize("text", ["", "Shape { }", "Transform { children [ " + tetrahedron() + " ] }",
                                  tetrahedron().replace("1,2,3,-1", "1,2,9,-1"),
                                  tetrahedron().replace("1 0 0", "nan 0 0")])
def test_vrml_refuses(text):
    with pytest.raises(ValueError, match="text"):
        S.read_vrml(text)


def test_obj_faces_count_both_ways():
    text = "\n".join(["v 0 0 0", "v 1 0 0 0.5", "v 1 1 0", "vn 0 0 1", "f 1//1 2//1 3//1", "v 0 1 0", "usemtl old oak ",
                      "f -4 -3 -2 -1", "l 1 2"])
    mesh = S.read_obj(text, "newmtl a\nKd 0 0 0\nnewmtl old oak\n  Ka 1 1 1\n  Kd 0.1 0.2 0.3\n")
    assert mesh.names == ("", "old oak") and mesh.faces.tolist() == [[0, 1, 2], [0, 1, 2], [0, 2, 3]]
    assert mesh.materials.tolist() == [0, 1, 1] and mesh.colours.tolist() == [[0.8] * 3, [0.1, 0.2, 0.3]]
    for wrong in ("v 0 0 0\nf 1 2 3", "v 0 0 0"):
        with pytest.raises(ValueError, match="text"):
            S.read_obj(wrong)


# Families and splits

def test_families_forget_numbers():
    same = ["PinHeader_1x07_P2.54mm_Vertical", "PinHeader_2x40_P1.00mm_Vertical"]
    assert len({S._name_family(name) for name in same}) == 1
    assert S._name_family("PinHeader_1x07_P2.54mm_Horizontal") != S._name_family(same[0])


@pytest.mark.parametrize("seed", range(3))
def test_splits_keep_their_promise(seed):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 5, 300)
    families = [f"f{k}" for k in rng.integers(0, 30, 300)]
    test = S.held_out(labels, families, seed=seed)
    assert np.array_equal(test, S.held_out(labels, families, seed=seed))
    for label in range(5):
        own = labels == label
        names = np.array(families)
        assert not set(names[own & test]) & set(names[own & ~test])
        assert abs(test[own].mean() - 0.2) < 0.05
    torn = S.held_out(labels, families, by="shape", seed=seed)
    assert all(abs(torn[labels == k].sum() - 0.2 * (labels == k).sum()) <= 0.5 for k in range(5))


def test_splits_at_the_edge():
    assert not S.held_out([0, 0, 0], ["a", "a", "a"]).any()                         # one family: nothing to hold out
    assert S.held_out([0, 0], ["a", "b"]).sum() == 1
    assert S.held_out([], []).tolist() == []
    for wrong in ({"by": "name"}, {"share": 0}, {"share": 1.0}):
        with pytest.raises(ValueError, match="by, share"):
            S.held_out([0], ["a"], **wrong)


# Builders

def kicad_folder(root):
    for folder, count in (("Package_DIP", 4), ("Connector_JST", 3), ("Resistor_THT", 40)):
        for k in range(count):
            path = root / "usr" / f"{folder}.3dshapes" / f"{'ab'[k % 2]}_{k}.wrl"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(tetrahedron(1 + k + 0.1 * len(folder)) + tetrahedron(0.5, "IC-BODY-EPOXY-04"))
    dip = root / "usr" / "Package_DIP.3dshapes"
    (dip / "c.wrl").write_text("Transform { }")                                       # refused
    (dip / "d.wrl").write_text((dip / "a_0.wrl").read_text())                         # a copy
    return root


def test_kicad_builds_once_and_goes_on(tmp_path, monkeypatch):
    folder, path = kicad_folder(tmp_path), tmp_path / "data" / "kicad" / "kicad.npz"
    arrays = S.build_kicad(folder, path, cap=30, progress=False)
    names, ids = arrays["class_names"][arrays["label"]].tolist(), arrays["shape_id"].tolist()
    assert names.count("dip") == 4 and names.count("jst") == 3 and len(arrays["class_names"]) == 40
    assert "Package_DIP/a_0" in ids and "Package_DIP/c" not in ids and "Package_DIP/d" not in ids
    assert sum(one.startswith("Resistor") for one in ids) == 30
    assert sum(one.startswith("Resistor_THT/a") for one in ids) == 15                 # families in turn
    stored = load_arrays(path)
    assert stored.keys() == arrays.keys() and all(np.array_equal(stored[k], arrays[k]) for k in stored)

    def never(*_):
        raise AssertionError("parsed again")
    monkeypatch.setattr(S, "_parse", never)
    again = S.build_kicad(folder, cap=30, progress=False)
    assert all(np.array_equal(again[k], arrays[k]) for k in again)


def test_processes_change_nothing(tmp_path):
    folder = kicad_folder(tmp_path)
    one, two = (S.build_kicad(folder, workers=w, progress=False, root=tmp_path / str(w)) for w in (1, 2))
    assert all(np.array_equal(one[k], two[k]) for k in one)


def test_builders_say_what_is_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="3dshapes"):
        S.build_kicad(tmp_path)
    with pytest.raises(FileNotFoundError, match="sh3f"):
        S.build_sweethome(tmp_path)
    with pytest.raises(ValueError, match="cap"):
        S.build_kicad(tmp_path, cap=0)
    with pytest.raises(ValueError, match="workers"):
        S.build_kicad(kicad_folder(tmp_path), workers=0)


def home_library(root, name="BlendSwap-CC-0"):
    obj = "v 0 0 0\nv 1 0 0\nv 0 5 0\nv 0 0 2\nusemtl seat\nf 1 2 3\nf 1 3 4\nusemtl leg\nf 1 2 4"
    entries = [("Chair", "Living room", "a/chair.obj", "Ann", ""),
               ("Bed", "Bedroom", "b/bed2.obj", "Bob", "0 0 1 0 1 0 -1 0 0"),
               ("Hammer", "Miscellaneous", "c/hammer.obj", "Cyd", "")]
    text = "name=x\n"
    with zipfile.ZipFile(root / f"{name}.sh3f", "w") as archive:
        for k, (title, category, model, creator, turn) in enumerate(entries, 1):
            text += f"name#{k}={title}\ncategory#{k}={category}\nmodel#{k}=/{model}\ncreator#{k}={creator}\n"
            text += f"modelRotation#{k}={turn}\n" if turn else ""
            archive.writestr(model, obj.replace("5", str(4 + k)))
        archive.writestr("a/chair.mtl", "newmtl seat\nKd 1 0 0\n")
        archive.writestr("PluginFurnitureCatalog.properties", text)
    return root


def test_sweethome_turns_models_upright(tmp_path):
    meshes = S.MeshSet(S.build_sweethome(home_library(tmp_path), progress=False))
    a = meshes.arrays
    assert a["class_names"][a["label"][:2]].tolist() == ["chair", "bed"] and a["label"][2] == -1
    assert a["family"].tolist() == ["BlendSwap-CC-0/Ann", "BlendSwap-CC-0/Bob", "BlendSwap-CC-0/Cyd"]
    real = [a["centre"][i] + a["scale"][i] * meshes[i].vertices for i in range(2)]
    assert np.allclose(np.ptp(real[0], axis=0), [1, 2, 5], atol=1e-3)              # y up became z up
    assert np.allclose(np.ptp(real[1], axis=0), [2, 1, 6], atol=1e-3)              # and the catalogue's rotation
    names, colours = meshes.materials
    assert colours[names.index("seat")].tolist() == [1, 0, 0]
    with pytest.raises(IndexError, match="i:"):
        meshes[3]
    other = S.build_sweethome(home_library(tmp_path, "Scopia"), progress=False)
    assert len(other["label"]) == 3                                                # exact copies of the first library


@pytest.mark.parametrize("name, category, wanted", [
    ("Bedside table", "Bedroom", "cabinet"), ("Street lamp", "Lights", "lamp"), ("Corner sofa", "Living room", "sofa"),
    ("Glass table", "Living room", "table"), ("Sitting male", "Characters", "person"), ("Cat", "Characters", None),
    ("Palm tree", "Exterior", "plant"), ("Wheelchair", "Miscellaneous", None), ("Baby bed", "Bedroom", "bed"),
    ("Table fan", "Miscellaneous", None), ("Wine bottle", "Kitchen", "vessel"),
    ("Garage door", "Doors and windows", "opening")])
def test_furniture_classes(name, category, wanted):
    number = S._furniture_class(name, category)
    assert (S._FURNITURE[number][0] if number >= 0 else None) == wanted


# Our sets through the door

@pytest.fixture
def kicad_root(tmp_path):
    S.build_kicad(kicad_folder(tmp_path / "deb"), tmp_path / "data" / "kicad" / "kicad.npz", progress=False)
    return tmp_path / "data"


def test_built_sets_load(kicad_root):
    whole, train, test = (S.load_shapes("kicad", root=kicad_root, points=700, split=split)
                          for split in ("all", "train", "test"))
    assert sorted(whole.ids) == sorted(train.ids + test.ids) and not set(train.ids) & set(test.ids)
    assert whole.points.shape == (len(whole), 700, 3) and whole.points.dtype == torch.float32
    assert torch.allclose(whole.points.norm(dim=-1).amax(1), torch.ones(len(whole)), atol=1e-6)
    assert whole.points.mean(1).abs().max() < 1e-5 and torch.allclose(whole.normals.norm(dim=-1), torch.ones(()))
    assert {whole.part_names[k] for k in whole.parts.unique()} == {"pin", "epoxy"}
    few = S.load_shapes("kicad", root=kicad_root, points=200, split="all")
    assert torch.allclose(few.points, S.first_points(whole, 200).points, atol=1e-5)
    assert torch.equal(S.load_shapes("kicad", root=kicad_root, points=200, split="all").points, few.points)
    assert not torch.equal(S.load_shapes("kicad", root=kicad_root, points=200, split="all", seed=1).points, few.points)
    assert "leaks" in S.load_shapes("kicad", root=kicad_root, points=9, split_by="shape").source
    assert "kicad" in S.shape_sets(kicad_root) and "sweethome" not in S.shape_sets(kicad_root)


def test_part_set_numbers_parts_through_classes(kicad_root):
    train, test = (S.load_shapes("kicadpart", root=kicad_root, points=100, split=split) for split in ("train", "test"))
    assert set(train.ids) <= set(S.load_shapes("kicad", root=kicad_root, points=1).ids)        # the same split
    assert [k for own in train.part_sets for k in own] == list(range(len(train.part_names)))
    for parts, label in zip(train.parts, train.labels, strict=True):
        assert set(parts.tolist()) <= set(train.part_sets[label])
    assert {train.classes[k] for k in train.labels} == {"dip", "jst", "resistor"} and len(test) > 0


def test_damage_is_noticed(kicad_root):
    path = kicad_root / "kicad" / "kicad.npz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ValueError, match="kicad.npz"):
        S.load_shapes("kicad", root=kicad_root)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="build_kicad"):
        S.load_shapes("kicad", root=kicad_root)
    with pytest.raises(ValueError, match="name"):
        S.load_meshes("modelnet10")


# The fixture

def test_fixture_is_small_free_and_whole():
    files = importlib.resources.files("sparseattn.data") / "files"
    assert len((files / "shapes.npz").read_bytes()) + len((files / "shapes_license.txt").read_bytes()) <= 400_000
    assert "CC0" in (files / "shapes_license.txt").read_text(encoding="utf8")
    whole = S.load_shapes("fixture", split="all")
    assert len(whole.classes) == 4 and len(whole) == 55 and whole.points.shape[1] == 1024
    assert all(one.startswith("BlendSwap-CC-0/") and "winchester" not in one for one in whole.ids)
    assert torch.allclose(whole.normals.norm(dim=-1), torch.ones(()), atol=1e-5)
    for label in range(4):
        used = whole.parts[whole.labels == label].unique().tolist()
        assert used == list(whole.part_sets[label])                     # every part occurs, and no other
    train, test = (S.load_shapes("fixture", split=split) for split in ("train", "test"))
    assert sorted(train.ids + test.ids) == sorted(whole.ids) and train.labels.bincount().min() >= 6
    assert test.labels.bincount(minlength=4).min() >= 2
    torn = S.load_shapes("fixture", split_by="shape")
    assert set(torn.families) & set(S.load_shapes("fixture", split="test", split_by="shape").families)


HERE = have_data("sweethome", "sweethome.npz")  # found before the tests get a cache of their own
ROOT = data_path("sweethome").parent if HERE else None


@pytest.mark.skipif(not HERE, reason="needs the built set of furniture")
def test_fixture_can_be_made_again():
    made = S.fixture_arrays(S.load_meshes("sweethome", root=ROOT))
    path = importlib.resources.files("sparseattn.data") / "files" / "shapes.npz"
    shipped = load_arrays(path)
    assert made.keys() == shipped.keys()
    for name in made:
        assert np.array_equal(made[name], shipped[name]), name


def test_shapes_behave_like_a_value():
    shapes = S.load_shapes("fixture", points=32)
    few = shapes.subset(torch.tensor([4, 0]))
    assert few.ids == (shapes.ids[4], shapes.ids[0]) and torch.equal(few.parts[1], shapes.parts[0])
    assert few.features.shape == (2, 32, 6) and len(copy.deepcopy(few)) == len(pickle.loads(pickle.dumps(few))) == 2
    assert few.to("cpu").classes == shapes.classes
    for n in (0, 33):
        with pytest.raises(ValueError, match="n:"):
            S.first_points(shapes, n)
    mask = shapes.labels == 1
    some = shapes.subset(mask)
    assert (some.labels == 1).all() and some.ids == tuple(name for name, on in zip(shapes.ids, mask, strict=True) if on)
    bare = S.Shapes("x", "y", shapes.points, None, shapes.labels, shapes.classes).subset([2, 1])
    assert bare.ids == () and torch.equal(bare.points, shapes.points[[2, 1]])


@pytest.mark.parametrize("arguments, word", [
    ({"name": "shapenet"}, "name"), ({"name": "fixture", "split": "val"}, "split"),
    ({"name": "fixture", "points": 0}, "points"), ({"name": "fixture", "points": 1025}, "points"),
    ({"name": "fixture", "points": 2.0}, "points"),
    ({"name": "fixture", "split_by": "name"}, "split_by"), ({"name": "modelnet10", "split_by": "family"}, "split_by"),
    ({"name": "modelnet10", "split": "all"}, "split"), ({"name": "scanobjectnn", "variant": "PB"}, "variant")])
def test_the_door_refuses(arguments, word):
    with pytest.raises(ValueError, match=word):
        S.load_shapes(**arguments)


@pytest.mark.parametrize("name", [name for name in S.SETS if name != "fixture"])
def test_missing_files_are_named(name, tmp_path):
    with pytest.raises(FileNotFoundError, match="npz|txt|h5"):
        S.load_shapes(name, root=tmp_path)
    assert S.shape_sets(tmp_path) == ["fixture"]


def test_batches_cover_each_shape_once():
    shapes = S.load_shapes("fixture", points=16)
    seen = torch.cat([b["points"] for b in S.batches(shapes, 7, generator=seeded())])
    assert torch.equal(seen.flatten(1).sum(1).sort()[0], shapes.points.flatten(1).sum(1).sort()[0])
    sizes = [len(b["labels"]) for b in S.batches(shapes, 7, shuffle=False, drop_last=True)]
    assert sizes == [7] * (len(shapes) // 7)
    for wrong in ({"batch_size": 0}, {"batch_size": 3, "generator": None}):
        with pytest.raises(ValueError, match="batch_size|generator"):
            next(S.batches(shapes, **wrong))


# Official layouts

def clouds(count, points, seed=0):
    return np.random.default_rng(seed).normal(size=(count, points, 3)).astype(np.float32)


def unit(x):
    x = x - x.mean(-2, keepdims=True)
    return x / np.linalg.norm(x, axis=-1).max(-1)[..., None, None]


def upright(x):
    return np.stack([x[..., 0], -x[..., 2], x[..., 1]], -1)


def exchanged(x):
    """Files that are reflections come back as the meshes were."""
    return np.stack([x[..., 0], x[..., 2], x[..., 1]], -1)


def test_modelnet40_h5(tmp_path):
    h5py = pytest.importorskip("h5py")
    folder = tmp_path / "modelnet40_ply_hdf5_2048"
    folder.mkdir()
    (folder / "shape_names.txt").write_text("airplane\nbathtub\n")
    x, normals = clouds(5, 32), clouds(5, 32, 1)
    for k, rows in enumerate((slice(0, 3), slice(3, 5))):
        with h5py.File(folder / f"ply_data_train{k}.h5", "w") as file:
            file["data"], file["normal"] = x[rows], normals[rows]
            file["label"] = np.array([[0], [1], [1], [0], [1]], np.uint8)[rows]
    (folder / "ply_data_train_0_id2file.json").write_text("[]")
    names = [f"data/modelnet40_ply_hdf5_2048/ply_data_train{k}.h5" for k in (0, 1)]
    (folder / "train_files.txt").write_text("\n".join(names))
    for root in (tmp_path, folder):
        shapes = S.load_shapes("modelnet40", root=root, points=20)
        assert shapes.labels.tolist() == [0, 1, 1, 0, 1] and shapes.classes == ("airplane", "bathtub")
        assert np.allclose(shapes.points, unit(upright(x[:, :20])), atol=1e-6)
        assert np.allclose(shapes.normals, upright(normals[:, :20]))
    assert "official" in shapes.source and S.shape_sets(tmp_path) == ["fixture", "modelnet40"]
    with pytest.raises(ValueError, match="points"):
        S.load_shapes("modelnet40", root=tmp_path, points=33)


def test_h5_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(ImportError, match="pip install h5py"):
        S.read_h5(tmp_path / "x.h5", ["data"])


def test_h5_errors(tmp_path):
    h5py = pytest.importorskip("h5py")
    with pytest.raises(FileNotFoundError, match="x.h5"):
        S.read_h5(tmp_path / "x.h5", ["data"])
    (tmp_path / "x.h5").write_text("no")
    with pytest.raises(ValueError, match="not an HDF5 file"):
        S.read_h5(tmp_path / "x.h5", ["data"])
    with h5py.File(tmp_path / "y.h5", "w") as file:
        file["label"] = [1]
    with pytest.raises(ValueError, match="'data'"):
        S.read_h5(tmp_path / "y.h5", ["data", "label"])


@pytest.mark.parametrize("count", [10, 40])
def test_modelnet_text(tmp_path, count):
    folder = tmp_path / "modelnet40_normal_resampled"
    (folder / "night_stand").mkdir(parents=True)
    rows = np.concatenate([clouds(2, 30), clouds(2, 30, 1)], -1)
    rows[..., 3:] /= np.linalg.norm(rows[..., 3:], axis=-1, keepdims=True)
    for k in range(2):
        np.savetxt(folder / "night_stand" / f"night_stand_000{k}.txt", rows[k], delimiter=",", fmt="%.6f")
    (folder / f"modelnet{count}_shape_names.txt").write_text("chair\nnight_stand\n")
    (folder / f"modelnet{count}_train.txt").write_text("night_stand_0001\nnight_stand_0000\n")
    for _ in range(2):                                                             # read, then from the cache
        shapes = S.load_shapes(f"modelnet{count}", root=tmp_path, points=25, progress=False)
        assert shapes.ids == ("night_stand_0001", "night_stand_0000") and shapes.labels.tolist() == [1, 1]
        assert np.allclose(shapes.points, unit(exchanged(rows[[1, 0], :25, :3])), atol=1e-4)
        assert np.allclose(shapes.normals, exchanged(rows[[1, 0], :25, 3:]), atol=0.01)
    with pytest.raises(ValueError, match="points"):
        S.load_shapes(f"modelnet{count}", root=tmp_path, points=31, progress=False)


def test_shapenetpart(tmp_path):
    folder = tmp_path / "shapenetcore_partanno_segmentation_benchmark_v0_normal"
    (folder / "02691156").mkdir(parents=True)
    (folder / "03797390").mkdir()
    (folder / "train_test_split").mkdir()
    (folder / "synsetoffset2category.txt").write_text("Airplane\t02691156\nMug\t03797390\n")
    lists, rows = {"train": ["02691156/a"], "val": ["03797390/b"], "test": ["03797390/c"]}, {}
    for k, (part, own) in enumerate(lists.items()):
        rows[part] = np.concatenate([clouds(1, 12 + 8 * k)[0], clouds(1, 12 + 8 * k, 1)[0]], -1)
        labels = np.resize([0, 3] if part == "train" else [36, 37], len(rows[part]))
        np.savetxt(folder / f"{own[0]}.txt", np.column_stack([rows[part], labels]), fmt="%.6f")
        names = json.dumps([f"shape_data/{one}" for one in own])
        (folder / "train_test_split" / f"shuffled_{part}_file_list.json").write_text(names)
    train, val, test = (S.load_shapes("shapenetpart", root=tmp_path, points=16, split=split, progress=False)
                        for split in ("train", "val", "test"))
    assert len(train) == 2 and len(val) == len(test) == 1 and len(train.classes) == 16
    assert [train.classes[k] for k in train.labels] == ["Airplane", "Mug"] and len(train.part_names) == 50
    assert train.part_sets[0] == (0, 1, 2, 3) and test.part_sets[11] == (36, 37)
    assert set(train.parts[0].tolist()) == {0, 3} and set(test.parts[0].tolist()) == {36, 37}
    assert len(test.points[0].unique(dim=0)) == 16 and len(train.points[0].unique(dim=0)) == 12     # thinned; repeated


def test_scanobjectnn(tmp_path):
    h5py = pytest.importorskip("h5py")
    folder = tmp_path / "h5_files" / "main_split"
    folder.mkdir(parents=True)
    x, mask = clouds(3, 20), np.where(np.random.default_rng(0).random((3, 20)) < 0.4, -1, 4)
    with h5py.File(folder / "test_objectdataset_augmentedrot_scale75.h5", "w") as file:
        file["data"], file["label"], file["mask"] = x, np.array([0, 14, 3]), mask
    shapes = S.load_shapes("scanobjectnn", root=tmp_path, points=10, split="test")
    assert [shapes.classes[k] for k in shapes.labels] == ["bag", "toilet", "cabinet"] and shapes.normals is None
    assert np.array_equal(shapes.parts.numpy(), mask[:, :10] != -1) and shapes.part_names == ("background", "object")
    assert np.allclose(shapes.points, unit(upright(x[:, :10])), atol=1e-6)
    with pytest.raises(FileNotFoundError, match="h5"):
        S.load_shapes("scanobjectnn", root=tmp_path, variant="OBJ_ONLY", split="test")
    assert "scanobjectnn" in S.shape_sets(tmp_path)


def test_compact_layouts(tmp_path):
    x = np.rint(unit(clouds(4, 8)) * 32767).astype(np.int16)
    (tmp_path / "modelnet10").mkdir()
    np.savez(tmp_path / "modelnet10" / "modelnet10_1024.npz", points_i16=x, label=np.array([0, 1, 0, 1], np.uint8),
             is_test=np.array([False, False, True, False]), class_names=np.array(["bathtub", "bed"]),
             shape_id=np.array(list("abcd")))
    train, test = (S.load_shapes("modelnet10", root=tmp_path, points=8, split=split) for split in ("train", "test"))
    assert train.ids == ("a", "b", "d") and test.ids == ("c",) and train.normals is None
    assert np.allclose(test.points, x[2:3] / 32767, atol=1e-3) and "third party" in train.source
    (tmp_path / "modelnet40_subset").mkdir()
    names = np.array(["airplane", "car", "person"])
    np.savez(tmp_path / "modelnet40_subset" / "modelnet40_normal_subset_1024.npz", class_names=names,
             xyz_normal_i16=np.concatenate([x, x], -1), label=np.array([0, 1, 2, 2], np.uint8),
             shape_id=np.array(list("abcd")), split=np.array(["train", "train", "train", "test"]))
    four = S.load_shapes("modelnet40_subset", root=tmp_path, points=8)
    assert four.ids == ("a", "c") and [four.classes[k] for k in four.labels] == ["airplane", "person"]
    assert np.allclose(four.points, exchanged(x[[0, 2]] / 32767), atol=1e-3) and "not the 40-class task" in four.source
    np.savez(tmp_path / "modelnet10" / "modelnet10_1024.npz", label=x)
    with pytest.raises(ValueError, match="points_i16"):
        S.load_shapes("modelnet10", root=tmp_path)


@pytest.mark.skipif(not have_data("modelnet10", "modelnet10_1024.npz"), reason="needs the compact ModelNet10")
def test_real_modelnet10_has_the_official_counts():
    train, test = (S.load_shapes("modelnet10", points=64, split=split) for split in ("train", "test"))
    assert train.labels.bincount().tolist() == [106, 515, 889, 200, 200, 465, 200, 680, 392, 344]
    assert test.labels.bincount().tolist() == [50, 100, 100, 86, 86, 100, 86, 100, 100, 100]


def test_compact_modelnet40(tmp_path):
    rng = np.random.default_rng(0)
    q = rng.integers(0, 256, (4, 3, 16))                                           # 0 and 255: differences wrap around
    q[:, 0, :2] = [0, 255]
    (tmp_path / "modelnet40").mkdir()
    facts = dict(label=np.array([0, 1, 1, 0]), is_test=np.array([False, False, True, False]), number=np.arange(4),
                 class_names=np.array(["airplane", "night_stand"]))
    path = tmp_path / "modelnet40" / "modelnet40_1024_u8.npz"
    np.savez(path, delta=np.diff(q, axis=2, prepend=0).astype(np.uint8), **facts)
    train, test = (S.load_shapes("modelnet40", root=tmp_path, points=16, split=split) for split in ("train", "test"))
    assert train.ids == ("airplane_0000", "night_stand_0001", "airplane_0003") and test.ids == ("night_stand_0002",)
    assert "8 bits" in train.source and "modelnet40" in S.shape_sets(tmp_path)
    x = unit(q.swapaxes(1, 2) / 127.5 - 1)
    for found, wanted in zip(torch.cat([train.points, test.points]), x[[0, 1, 3, 2]], strict=True):
        assert np.allclose(*(np.array(sorted(cloud.tolist())) for cloud in (found, wanted)), atol=1e-5)
        assert not np.allclose(found, wanted, atol=1e-3)                                         # another order
    again = S.load_shapes("modelnet40", root=tmp_path, points=5)
    assert torch.allclose(S.first_points(train, 5).points, again.points, atol=1e-6)  # of the same order
    with pytest.raises(ValueError, match="points"):
        S.load_shapes("modelnet40", root=tmp_path, points=17)
    np.savez(path, **facts)
    with pytest.raises(ValueError, match="delta"):
        S.load_shapes("modelnet40", root=tmp_path)


@pytest.mark.skipif(not have_data("modelnet40", "modelnet40_1024_u8.npz"), reason="needs the compact ModelNet40")
def test_real_modelnet40_has_the_official_counts():
    train, test = (S.load_shapes("modelnet40", points=64, split=split) for split in ("train", "test"))
    assert len(train) == 9843 and len(test) == 2468 and len(train.classes) == 40
    named = {name: k for k, name in enumerate(train.classes)}
    for name, counts in {"airplane": (626, 100), "chair": (889, 100), "xbox": (103, 20)}.items():
        assert tuple(int((part.labels == named[name]).sum()) for part in (train, test)) == counts
    assert all(one.rsplit("_", 1)[0] == train.classes[k] for one, k in zip(train.ids, train.labels, strict=True))
    spread = train.points.std(1).mean(0)
    assert (spread > 0.2).all()                     # the first 64 points of a space-filling curve are one corner


# Descriptions, corruption

def test_descriptions_know_no_order():
    x = torch.randn(3, 50, 3, generator=seeded())
    assert np.allclose(S.describe(x), S.describe(x[:, torch.randperm(50, generator=seeded(1))]))
    turned = x @ torch.tensor([[0.0, 1, 0], [-1, 0, 0], [0, 0, 1]])
    assert not np.allclose(S.describe(x), S.describe(turned))


def test_one_sees_the_near_half():
    grid = np.array(list(itertools.product(np.linspace(-1, 1, 15), repeat=2)))
    front, back = (np.column_stack([grid, np.full(len(grid), z)]) for z in (0.5, -0.5))
    front, back = (one + 1e-3 * np.random.default_rng(k).normal(size=one.shape) for k, one in enumerate((front, back)))
    seen = S.visible_points(np.vstack([back, front]), np.array([0, 0, 5.0]))
    hidden_part = (seen < len(back)).sum() / len(back)
    assert (seen >= len(back)).sum() == len(front) and hidden_part < 0.3


@pytest.mark.parametrize("variant", S._SCANS)
def test_corruption(variant):
    clean = S.load_shapes("fixture", points=128).subset(range(0, 40, 5))
    spoiled = S.corrupt(clean, variant, points=100)
    assert torch.equal(S.corrupt(clean, variant, points=100).points, spoiled.points)
    assert not torch.equal(S.corrupt(clean, variant, points=100, seed=1).points, spoiled.points)
    assert spoiled.points.shape == (8, 100, 3) and torch.isfinite(spoiled.points).all()
    assert torch.allclose(spoiled.points.norm(dim=-1).amax(1), torch.ones(8), atol=1e-5)
    assert torch.equal(spoiled.labels, clean.labels) and spoiled.ids == clean.ids
    assert spoiled.source.startswith(f"simulated {variant}") and "not scans" in spoiled.source
    share = spoiled.parts.double().mean(1)
    assert (share == 1).all() if variant == "OBJ_ONLY" else (share >= 0.05).all() and (share < 1).any()


def test_corruption_without_normals_and_errors():
    clean = S.load_shapes("fixture", points=128).subset([1])
    bare = S.corrupt(S.Shapes("x", "y", clean.points, None, clean.labels, clean.classes))
    assert bare.normals is None and bare.points.shape == clean.points.shape
    for wrong in ({"variant": "PB"}, {"points": 0}):
        with pytest.raises(ValueError, match="variant|points"):
            S.corrupt(clean, **wrong)


# Augmentation

def test_rotation_is_a_rotation_about_z():
    x, m = torch.randn(6, 20, 3, generator=seeded()), torch.randn(6, 20, 3, generator=seeded(1))
    y, turned = S.rotate_up(x, m, generator=seeded(2))
    assert torch.allclose(y[..., 2], x[..., 2]) and torch.allclose((y * turned).sum(-1), (x * m).sum(-1), atol=1e-4)
    angle = torch.atan2(y[..., 1], y[..., 0]) - torch.atan2(x[..., 1], x[..., 0])
    assert torch.allclose(torch.exp(1j * angle), torch.exp(1j * angle[:, :1]).expand(-1, 20), atol=1e-3)
    assert len(angle[:, 0].unique()) == 6 and y.dtype == x.dtype
    assert S.rotate_up(x.double(), generator=seeded())[0].dtype == torch.float64


def test_other_augmentations_stay_in_bounds():
    x = torch.ones(500, 4, 3)
    scaled, none = S.rescale(x, low=0.5, high=2.0, generator=seeded())
    assert none is None and scaled.min() >= 0.5 and scaled.max() <= 2 and (scaled == scaled[:, :1]).all()
    assert stats.kstest((scaled[:, 0].flatten().numpy() - 0.5) / 1.5, "uniform").pvalue > ALARM
    moved = S.shift(x, most=0.2, generator=seeded()) - x
    assert moved.abs().max() <= 0.2 + 1e-6 and torch.allclose(moved, moved[:, :1].expand(-1, 4, -1))
    noise = S.jitter(torch.zeros(500, 4, 3), sd=0.02, clip=0.03, generator=seeded())
    assert noise.abs().max() <= 0.03 + 1e-7
    assert 0.1 < (noise.abs() > 0.0299).double().mean() < 0.17                                    # 0.134 expected


def test_augment_leaves_the_rest_alone():
    batch = next(S.batches(S.load_shapes("fixture", points=16), 4, shuffle=False))
    before = {name: value.clone() for name, value in batch.items()}
    same = S.augment(batch, rotate=False, scale=(1, 1), most=0, sd=0, generator=seeded())
    assert all(torch.allclose(same[name].float(), before[name].float(), atol=1e-6) for name in batch)
    changed = S.augment(batch, generator=seeded())
    assert all(torch.equal(batch[name], before[name]) for name in batch)
    assert torch.equal(changed["parts"], batch["parts"]) and not torch.equal(changed["points"], batch["points"])
    del batch["normals"]
    assert "normals" not in S.augment(batch, generator=seeded())


def test_parts_to_learn_from_are_disjoint_and_whole():
    parts = S.learning_parts("fixture", validation=6, points=32)
    clouds = {name: {tuple(cloud.flatten().tolist()) for cloud in parts[name][0]} for name in ("train", "val", "test")}
    assert [len(clouds[name]) for name in clouds] == [37, 6, 12] and len(set.union(*clouds.values())) == 55
    labels = torch.cat([parts["train"][1], parts["val"][1]])
    assert torch.equal(labels.sort().values, S.load_shapes("fixture", points=32).labels.sort().values)
    again, other = (S.learning_parts("fixture", validation=6, points=32, seed=seed) for seed in (62, 63))
    assert torch.equal(again["val"][0], parts["val"][0]) and not torch.equal(other["val"][0], parts["val"][0])
    assert "train part" not in parts["sources"][0] and "split of our split" not in parts["sources"][0]
    with pytest.raises(ValueError, match="validation: expected 0 to 42, got 43"):
        S.learning_parts("fixture", validation=43, points=32)


def test_missing_shapes_says_why(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSEATTN_DATA", str(tmp_path))
    assert S.missing_shapes("fixture") == "" and "modelnet40 needs" in S.missing_shapes("modelnet40")
    for name, build in (("kicad", "kicad"), ("kicadpart", "kicad"), ("sweethome", "sweethome")):
        assert S.missing_shapes(name) == f"{name} is not built; build_{build} makes it from a Debian package"


def test_scaled_and_shifted_moves_whole_clouds():
    x = torch.randn(50, 4, 3, generator=seeded())
    y = S.scaled_and_shifted(x, seeded(1))
    factors = (y[:, 1:] - y[:, :1]) / (x[:, 1:] - x[:, :1])
    assert factors.min() > 0.799 and factors.max() < 1.251
    assert (y[:, 0] - factors[:, 0] * x[:, 0]).abs().max() <= 0.101
    assert torch.equal(y, S.scaled_and_shifted(x, seeded(1)))


def test_pictures():
    pytest.importorskip("matplotlib").use("Agg")
    shapes = S.load_shapes("fixture", points=32)
    for colour in ("depth", "part", "light"):
        figure = S.plot_shapes(shapes, range(5), colour=colour, columns=3)
        assert len(figure.axes) == 6
    for wrong in ("red", "part"):
        bare = S.Shapes("x", "y", shapes.points, None, shapes.labels, shapes.classes)
        with pytest.raises(ValueError, match="colour"):
            S.plot_shapes(bare, [0], colour=wrong)


def test_import_is_light():
    code = ("import sys, sparseattn.data.shapes; print([m for m in ('matplotlib', 'h5py', 'pandas') "
            "if m in sys.modules])")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
