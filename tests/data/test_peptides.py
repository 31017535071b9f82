"""sparseattn.data.peptides: graphs, batches, shapes, the noise floor, encodings, official layouts, the shipped file.

Statistical tests have fixed seeds and stated tolerances.
"""

import csv
import gzip
import itertools
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from sparseattn.data import peptides as P
from sparseattn.data.cache import have_data

needs_rdkit = pytest.mark.skipif(not P.have_rdkit(), reason="needs RDKit")


def graph(atoms, bonds):
    features = np.arange(atoms * 9, dtype=np.uint8).reshape(atoms, 9)
    bonds = np.array(bonds, np.int16).reshape(-1, 2)
    return {"atoms": features, "bonds": bonds, "kinds": np.arange(3 * len(bonds), dtype=np.uint8).reshape(-1, 3)}


def made(graphs, targets=None):
    arrays = P.join_graphs(graphs)
    targets = np.arange(len(graphs))[:, None] if targets is None else targets
    return P._set("made", "by hand", arrays, targets, ["x"], [str(i) for i in range(len(graphs))])


GRAPHS = [graph(3, [(0, 1), (1, 2)]), graph(1, []), graph(4, [(0, 1), (1, 2), (2, 3), (3, 0)]), graph(2, [(0, 1)])]


# ---- molecules ------------------------------------------------------------------------------------------------------

@needs_rdkit
def test_features_against_ogb_by_hand():
    """Benzoate with a charge, a ring, an aromatic bond: values that the Open Graph Benchmark's lists give."""
    found = P.graph_of(P.molecule("[O-]C(=O)c1ccccc1"))
    assert found["atoms"][0].tolist() == [7, 0, 1, 4, 0, 0, 1, 0, 0]        # O-: charge -1 is place 4, sp2, conjugated
    assert found["atoms"][3].tolist() == [5, 0, 3, 5, 0, 0, 1, 1, 1]        # aromatic carbon without hydrogen
    assert found["kinds"][0].tolist() == [0, 0, 1] and found["kinds"][1].tolist() == [1, 0, 1]
    assert (found["kinds"][3:, 0] == 3).all() and found["bonds"].dtype == np.int16


@needs_rdkit
def test_something_else_has_the_last_place():
    assert P._place(3, range(3)) == 3 and P._place("SP", P._HYBRIDS) == 0
    found = P.graph_of(P.molecule("[Na+].[Cl-]"))
    assert found["atoms"][:, 0].tolist() == [10, 16] and found["atoms"][:, 3].tolist() == [6, 4]
    assert found["bonds"].shape == (0, 2) and found["kinds"].shape == (0, 3)


@needs_rdkit
def test_features_stay_below_their_sizes():
    for text in ("N[C@@H](C)C(=O)O", "C/C=C/C", "C#N", "[NH4+]", "S(=O)(=O)(O)O", "C1CC1", "[He]", "F[P](F)(F)(F)F"):
        found = P.graph_of(P.molecule(text))
        assert (found["atoms"] < np.array(P.ATOM_SIZES)).all() and (found["kinds"] < np.array(P.BOND_SIZES)).all()


@needs_rdkit
def test_handedness_is_seen():
    left, right = (P.graph_of(P.molecule(x))["atoms"][:, 1] for x in ("N[C@@H](C)C(=O)O", "N[C@H](C)C(=O)O"))
    assert sorted(left) == [0] * 5 + [2] or sorted(left) == [0] * 5 + [1]
    assert not np.array_equal(left, right)


@needs_rdkit
@pytest.mark.parametrize("text, sequence", [("", False), ("C(", False), ("c1cc", False), ("ZZ1", True)])
def test_unreadable_texts(text, sequence):
    with pytest.raises(ValueError, match="text"):
        P.molecule(text, sequence=sequence)


def test_without_rdkit(monkeypatch):
    monkeypatch.setitem(sys.modules, "rdkit", None)
    with pytest.raises(ImportError, match=r"sparseattn\[mol\]"):
        P.molecule("C")


def test_import_needs_no_rdkit():
    code = ("import sys; sys.modules['rdkit'] = None; import sparseattn.data.peptides as P; "
            "print(len(P.load_peptides('toy_func')))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == 112


# ---- sets and batches -----------------------------------------------------------------------------------------------

def test_sizes_and_subset():
    peptides = made(GRAPHS)
    assert peptides.sizes.tolist() == [3, 1, 4, 2] and peptides.bond_counts.tolist() == [2, 0, 4, 1]
    some = peptides.subset([2, 0, 2])
    assert some.sizes.tolist() == [4, 3, 4] and some.ids == ("2", "0", "2") and some.targets[:, 0].tolist() == [2, 0, 2]
    assert torch.equal(some.atoms[:4], torch.from_numpy(GRAPHS[2]["atoms"]))
    assert torch.equal(some.atoms[:4], some.atoms[-4:])
    assert torch.equal(some.subset([1]).kinds, torch.from_numpy(GRAPHS[0]["kinds"]))
    assert len(peptides.subset([])) == 0
    assert peptides.subset(peptides.sizes >= 3).ids == ("0", "2")


@pytest.mark.parametrize("index", [[0], [1], [3, 1], [2, 0, 1, 3], None])
def test_pad_holds_each_graph(index):
    peptides = made(GRAPHS)
    batch = P.pad(peptides, index)
    for row, i in enumerate(range(4) if index is None else index):
        n, m = len(GRAPHS[i]["atoms"]), len(GRAPHS[i]["bonds"])
        assert batch["node_mask"][row].sum() == n and batch["edge_mask"][row].sum() == 2 * m
        assert np.array_equal(batch["nodes"][row, :n], GRAPHS[i]["atoms"]) and not batch["nodes"][row, n:].any()
        edges = batch["edges"][row, :2 * m]
        assert np.array_equal(edges[::2], GRAPHS[i]["bonds"]) and torch.equal(edges[1::2], edges[::2].flip(1))
        assert np.array_equal(batch["edge_features"][row, :2 * m:2], GRAPHS[i]["kinds"])
        assert torch.equal(batch["edge_features"][row, 1:2 * m:2], batch["edge_features"][row, :2 * m:2])
    assert batch["nodes"].dtype == batch["edges"].dtype == torch.int64


def test_joined_is_the_same_graph():
    peptides = made(GRAPHS)
    one = P.joined(P.pad(peptides, [2, 1, 0]))
    assert one["graph"].tolist() == [0] * 4 + [1] + [2] * 3
    assert torch.equal(one["nodes"], peptides.subset([2, 1, 0]).atoms.long())
    start = torch.tensor([0, 4, 5])[one["graph"]]
    inner = one["edge_index"] - start[one["edge_index"]]
    assert inner.T[:8:2].tolist() == GRAPHS[2]["bonds"].tolist()
    assert inner.T[8::2].tolist() == GRAPHS[0]["bonds"].tolist()
    assert (one["graph"][one["edge_index"][0]] == one["graph"][one["edge_index"][1]]).all()


@pytest.mark.parametrize("alike", [1, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_batches_are_a_partition(alike, shuffle):
    peptides = made([graph(1 + i % 7, []) for i in range(50)])

    def draw():
        g = torch.Generator().manual_seed(1)
        return [b["targets"][:, 0].tolist() for b in P.batches(peptides, 8, shuffle=shuffle, alike=alike, generator=g)]

    found = draw()
    assert sorted(itertools.chain(*found)) == list(range(50)) and found == draw()
    assert shuffle or alike > 1 or found[0] == list(range(8))


def test_sorted_batches_waste_less():
    peptides = made([graph(1 + i % 9, []) for i in range(90)])
    g = torch.Generator().manual_seed(0)
    real = [sum(b["node_mask"].numel() for b in P.batches(peptides, 9, generator=g, alike=a)) for a in (1, 5)]
    assert real[1] < 0.8 * real[0]


def test_bad_batches():
    peptides = made(GRAPHS)
    for options in ({"batch_size": 0}, {"batch_size": 2, "alike": 0, "shuffle": False}, {"batch_size": 2}):
        with pytest.raises(ValueError, match="generator|batch_size"):
            next(P.batches(peptides, **options))
    with pytest.raises(ValueError, match="graphs"):
        P.join_graphs([])


# ---- many molecules, cache ------------------------------------------------------------------------------------------

@needs_rdkit
def test_build_graphs_across_chunks(tmp_path, monkeypatch):
    texts = ["G" * (1 + i % 4) for i in range(12)]
    whole = P.build_graphs(texts, sequence=True, root=tmp_path, progress=False)
    single = P.join_graphs([P.graph_of(P.molecule(text, sequence=True)) for text in texts])
    assert all(np.array_equal(whole[name], single[name]) for name in single)
    chunks = P._chunks
    monkeypatch.setattr(P, "_chunks", lambda function, texts, size, *rest: chunks(function, texts, 5, *rest))
    again = P.build_graphs(texts, sequence=True, root=tmp_path / "other", progress=False)
    assert all(np.array_equal(whole[name], again[name]) for name in single)


@needs_rdkit
def test_cache_is_used_and_checked(tmp_path, monkeypatch):
    P.build_graphs(["G", "A"], sequence=True, root=tmp_path, progress=False)
    monkeypatch.setattr(P, "graph_of", None)                               # must not be called again
    P.build_graphs(["G", "A"], sequence=True, root=tmp_path, progress=False)
    entry = next((tmp_path / "peptide-graphs").glob("*.npz"))
    entry.write_bytes(b"broken")
    with pytest.warns(UserWarning, match="broken"), pytest.raises(TypeError):
        P.build_graphs(["G", "A"], sequence=True, root=tmp_path, progress=False)


@needs_rdkit
def test_bad_builds(tmp_path):
    with pytest.raises(ValueError, match="texts"):
        P.build_graphs([], root=tmp_path)
    with pytest.raises(ValueError, match="workers"):
        P.build_graphs(["C"], workers=0, root=tmp_path)


# ---- shapes ---------------------------------------------------------------------------------------------------------

def test_moments_of_bodies():
    rng = np.random.default_rng(0)
    weights = rng.random(30) + 0.1
    x = rng.normal(size=(30, 3)) * [3, 2, 1]
    centre = weights @ x / weights.sum()
    tensor = sum(w * (d @ d * np.eye(3) - np.outer(d, d)) for w, d in zip(weights, x - centre, strict=True))
    assert np.allclose(P.inertia_moments(x, weights), np.linalg.eigvalsh(tensor)[::-1])
    assert np.allclose(P.inertia_moments(x, 2 * weights), 2 * P.inertia_moments(x, weights))        # a sum, no mean
    turn = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    assert np.allclose(P.inertia_moments(x @ turn + 5, weights), P.inertia_moments(x, weights))
    assert np.allclose(P.axis_lengths(x @ turn + 5), P.axis_lengths(x))
    moments = P.inertia_moments(x, weights)
    assert moments[0] <= moments[1] + moments[2] + 1e-9                     # the triangle inequality of moments


def test_single_atom_and_bad_shapes():
    assert P.inertia_moments(np.zeros((1, 3)), np.ones(1)).tolist() == [0, 0, 0]
    assert P.axis_lengths(np.ones((1, 3))).tolist() == [0, 0, 0]
    for x, w in ((np.zeros((2, 2)), np.ones(2)), (np.zeros((2, 3)), np.ones(3)), (np.zeros((2, 3)), np.zeros(2)),
                 (np.zeros((2, 3)), np.array([1, -1.0]))):
        with pytest.raises(ValueError, match="weights"):
            P.inertia_moments(x, w)
    with pytest.raises(ValueError, match="x"):
        P.axis_lengths(np.zeros((0, 3)))


@needs_rdkit
def test_conformers_have_bonds_of_the_right_length():
    one = P.molecule("GAK", sequence=True)
    shape = P.conformer(one, 3)
    x = shape.GetConformer().GetPositions()
    ends = P.graph_of(one)["bonds"].astype(int)
    length = np.linalg.norm(x[ends[:, 0]] - x[ends[:, 1]], axis=1)
    assert shape.GetNumAtoms() == one.GetNumAtoms() and (1.1 < length).all() and (length < 1.7).all()
    again = P.conformer(one, 3).GetConformer().GetPositions()
    other = P.conformer(one, 4).GetConformer().GetPositions()
    assert np.array_equal(x, again) and not np.allclose(x, other)
    with pytest.raises(ValueError, match="seed"):
        P.conformer(one, 0)


@needs_rdkit
def test_shape_numbers_and_cache(tmp_path):
    numbers = P.build_shapes(["GA", "AG"], sequence=True, root=tmp_path, progress=False)
    assert numbers.shape == (2, 2, 11) and np.isfinite(numbers).all()
    assert (np.diff(numbers[..., :3]) <= 1e-9).all() and (np.diff(numbers[..., 3:6]) <= 1e-9).all()
    assert (numbers[..., 6] < 1.5).all() and (numbers[..., 6] > 0.4).all()                 # nanometres
    assert np.array_equal(numbers, P.build_shapes(["GA", "AG"], sequence=True, root=tmp_path, progress=False))
    longer = P.build_shapes(["GA"], (0, 1, 2), sequence=True, root=tmp_path, progress=False)
    assert np.array_equal(longer[0, :2], numbers[0])                       # a conformer depends on text and seed only


# ---- noise floor ----------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["normal", "coin", "exponential"])
def test_floor_bounds_the_best_error(kind):
    """The best constant's error lies between the bounds; 100,000 draws, tolerance 0.02."""
    g = torch.Generator().manual_seed(0)
    size = (100_000, 3)
    y = {"normal": torch.randn(size, generator=g), "coin": torch.randint(0, 2, size, generator=g) * 2.0 - 1,
         "exponential": -torch.rand(size, generator=g).clamp(min=1e-9).log()}[kind]
    floor = {name: x.item() for name, x in P.noise_floor(y[..., None]).items()}
    best = (y - y.median()).abs().mean().item()
    assert floor["low"] - 0.02 <= best <= floor["high"] + 0.02
    assert floor["high"] == pytest.approx(2 * floor["low"])
    assert floor["normal"] == pytest.approx(floor["high"] / math.sqrt(2))
    assert kind != "normal" or abs(best - floor["normal"]) < 0.02


def test_floor_needs_two():
    for bad in (torch.zeros(3, 1, 2), torch.zeros(3, 2)):
        with pytest.raises(ValueError, match="repeats"):
            P.noise_floor(bad)


# ---- encodings ------------------------------------------------------------------------------------------------------

def ring(n):
    return np.array([(i, (i + 1) % n) for i in range(n)])


def random_tree(n, seed):
    rng = np.random.default_rng(seed)
    return np.array([(rng.integers(i), i) for i in range(1, n)])


@pytest.mark.parametrize("bonds, n", [(ring(9), 9), (random_tree(30, 0), 30), (np.array([[0, 1], [2, 3]]), 5)])
def test_laplacian_columns_are_eigenvectors(bonds, n):
    values, waves = P._spectrum(bonds, n)
    assert np.allclose(waves.T @ waves, np.eye(n)) and (values > -1e-9).all() and (values < 2 + 1e-9).all()
    found = P.laplacian_encoding(bonds, n, 4).astype(float)
    laplacian = waves * values @ waves.T
    own = (found * (laplacian @ found)).sum(0)
    assert np.abs(laplacian @ found - found * own).max() < 1e-5 and np.allclose(own, values[1:5], atol=1e-5)
    top = np.abs(found.round(5)).max(0)
    assert np.allclose(found.max(0), top, atol=1e-4)                        # the largest entry is positive


def test_encodings_of_tiny_graphs():
    assert not P.laplacian_encoding(np.zeros((0, 2), int), 1, 3).any()
    assert P.laplacian_encoding(np.array([[0, 1]]), 2, 3).shape == (2, 3)
    assert not P.walk_encoding(np.zeros((0, 2), int), 1, 3).any()
    for function in (P.laplacian_encoding, P.walk_encoding):
        for bonds, n, size in ((np.array([[0, 2]]), 2, 1), (np.array([[0, 1]]), 2, 0), (np.zeros(3, int), 2, 1)):
            with pytest.raises(ValueError, match="bonds|size"):
                function(bonds, n, size)


@pytest.mark.parametrize("bonds, n", [(ring(7), 7), (random_tree(25, 1), 25)])
def test_walks_are_powers_and_a_sum_over_waves(bonds, n):
    step = np.zeros((n, n))
    step[bonds[:, 0], bonds[:, 1]] = step[bonds[:, 1], bonds[:, 0]] = 1
    step /= step.sum(1, keepdims=True)
    exact = np.stack([np.diag(np.linalg.matrix_power(step, t)) for t in range(1, 13)], 1)
    found = P.walk_encoding(bonds, n, 12)
    assert np.abs(found - exact).max() < 1e-6
    values, waves = P._spectrum(bonds, n)
    assert np.abs(found - waves**2 @ ((1 - values) ** np.arange(1, 13)[:, None]).T).max() < 1e-6


def test_encodings_ride_along(tmp_path):
    peptides = made(GRAPHS)
    encoded = P.with_encodings(peptides, "walk", 2, root=tmp_path)
    assert encoded.encodings.shape == (10, 2) and encoded.encodings[3].tolist() == [0, 0]
    batch = P.pad(encoded, [2, 0])
    assert batch["encodings"][0, :, 1].tolist() == [0.5] * 4 and batch["encodings"][1, :3, 1].tolist() == [0.5, 1, 0.5]
    assert torch.equal(P.joined(batch)["encodings"], encoded.subset([2, 0]).encodings)
    assert len(list((tmp_path / "peptide-encodings").iterdir())) == 1
    with pytest.raises(ValueError, match="kind"):
        P.with_encodings(peptides, "sinus", 2)


# ---- toys -----------------------------------------------------------------------------------------------------------

def test_made_up_functions():
    names = dict(zip(P._TOY_FUNCTIONS, range(10), strict=True))

    def asks(name, text):
        return bool(P.made_up_functions(text)[names[name]])

    assert asks("cationic", "KAA") and not asks("cationic", "KDA") and asks("anionic", "DDK")
    assert asks("kinked", "APA") and not asks("kinked", "PAA") and not asks("kinked", "AAP")
    assert asks("aromatic", "FAW") and not asks("aromatic", "FAA") and asks("sulphur", "AAM")
    assert asks("greasy", "LLLK") and not asks("greasy", "KKKL")
    assert asks("salt bridge", "EAAAK") and not asks("salt bridge", "KAAAK") and not asks("salt bridge", "KE")
    assert asks("ends alike", "LAV") and not asks("ends alike", "LAK")
    assert asks("amphipathic", "LKKLLKKLLKKL") and not asks("amphipathic", "GGGGGGGGG")
    for bad in ("", "AB1", "ak"):
        with pytest.raises(ValueError, match="sequence"):
            P.made_up_functions(bad)


def test_random_sequences():
    def draw(seed):
        return P.random_sequences(300, shortest=3, longest=9, rng=np.random.default_rng(seed))

    found = draw(0)
    assert found == draw(0) != draw(1) and {len(text) for text in found} == set(range(3, 10))
    assert set("".join(found)) == set(P._RESIDUES)
    for options in ({"count": 0}, {"count": 1, "shortest": 0}, {"count": 1, "shortest": 5, "longest": 4}):
        with pytest.raises(ValueError, match="shortest"):
            P.random_sequences(**options, rng=np.random.default_rng(0))


def test_toy_sets():
    func, struct = (P.load_peptides(f"toy_{task}", split="all") for task in ("func", "struct"))
    assert len(func) == 160 and func.targets.shape == (160, 10) and struct.repeats.shape == (160, 2, 11)
    assert np.array_equal(func.targets, [P.made_up_functions(text) for text in func.ids])
    assert torch.allclose(struct.targets.std(0), torch.ones(11), atol=1e-5)
    assert torch.equal(struct.repeats[:, 0], struct.targets)
    pieces = [P.load_peptides("toy_func", split=split).ids for split in ("train", "val", "test")]
    assert tuple(itertools.chain(*pieces)) == func.ids and [len(x) for x in pieces] == [112, 24, 24]
    floor, guess = P.noise_floor(struct.repeats), struct.targets.abs().mean(0)
    assert (floor["low"] > 0).all() and (floor["low"] < guess).all()


@needs_rdkit
def test_toys_can_be_made_again(tmp_path):
    func = P.load_peptides("toy_func", split="all")
    assert list(func.ids) == P.random_sequences(160, rng=np.random.default_rng(18))
    few = func.subset(range(0, 160, 20))
    again = P.build_graphs(few.ids, sequence=True, root=tmp_path, progress=False)
    assert np.array_equal(again["atoms"], few.atoms) and np.array_equal(again["kinds"], few.kinds)


# ---- official layouts -----------------------------------------------------------------------------------------------

def official(root, count=20, struct=True):
    texts = ["N[C@@H](C)C(=O)NCC(=O)O", "NCC(=O)O", "N[C@@H](CS)C(=O)O", "OC(=O)[C@@H]1CCCN1"]
    rng = np.random.default_rng(0)
    for folder, name, columns in ((*P._TABLES["func"], []), (*P._TABLES["struct"], P._COLUMNS))[:1 + struct]:
        (root / folder).mkdir(exist_ok=True)
        with gzip.open(root / folder / name, "wt", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["", "smiles", *columns])
            for i in range(count):
                writer.writerow([i, texts[i % 4], *(f"{x:.4f}" for x in rng.normal(size=len(columns)) * 5 + 2)])
    order = rng.permutation(count)
    parts = {"idx_train": order[:12], "idx_val": order[12:16], "idx_test": order[16:]}
    labels = rng.integers(0, 2, (count, 10)).astype(np.uint8)
    np.savez(root / P._SPLIT[0] / P._SPLIT[1], labels=labels, **parts)
    return texts, labels, parts


@needs_rdkit
def test_official_tables(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path / "cache"))
    texts, labels, parts = official(tmp_path)
    assert P.peptide_sets(tmp_path) == ["toy_func", "toy_struct", "func", "struct"]
    test = P.load_peptides("func", split="test", root=tmp_path, progress=False)
    assert np.array_equal(test.targets, labels[parts["idx_test"]]) and test.target_names == P.FUNCTIONS
    assert list(test.ids) == [texts[i % 4] for i in parts["idx_test"]]
    assert test.sizes.tolist() == [P.molecule(text).GetNumAtoms() for text in test.ids]
    whole = P.load_peptides("struct", split="all", root=tmp_path, progress=False)
    assert torch.allclose(whole.targets.mean(0), torch.zeros(11), atol=1e-5)
    assert torch.allclose(whole.targets.std(0), torch.ones(11), atol=1e-5) and whole.repeats is None


@needs_rdkit
def test_conformers_keep_the_official_split(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path / "cache"))
    texts, _, parts = official(tmp_path, struct=False)
    path = tmp_path / "peptides_struct" / "conformers.npz"
    arrays = P.build_conformers(path, counts=(4, 2, 2), atoms=8, root=tmp_path, progress=False)
    assert "conformers" in P.peptide_sets(tmp_path)
    pieces = {part: P.load_peptides("conformers", split=part, root=tmp_path, progress=False)
              for part in ("train", "val", "test")}
    assert [len(x) for x in pieces.values()] == [4, 2, 2] and len(arrays["rows"]) == 8
    assert all(x.sizes.max() <= 8 for x in pieces.values())
    assert {texts[i % 4] for i in parts["idx_train"]} >= set(pieces["train"].ids)
    assert "our own conformers" in pieces["test"].source and pieces["test"].repeats.shape == (2, 2, 11)


def test_ready_made_files(tmp_path):
    few = P.load_peptides("toy_func", split="val")
    (tmp_path / "peptides_func").mkdir()
    for part, rows in (("train", range(10)), ("val", range(10, 12)), ("test", range(12, 20))):
        singles = [P.joined(P.pad(few, [i])) for i in rows]
        torch.save([(x["nodes"], x["edge_features"], x["edge_index"], x["targets"]) for x in singles],
                   tmp_path / "peptides_func" / f"{part}.pt")
    test = P.load_peptides("func", split="test", root=tmp_path)
    assert torch.equal(test.atoms, few.subset(range(12, 20)).atoms) and torch.equal(test.targets, few.targets[12:20])
    assert len(P.load_peptides("func", split="all", root=tmp_path)) == 20


def test_ready_made_files_are_not_unpickled(tmp_path):
    import pickle

    class Bad:
        def __reduce__(self):
            return (open, (str(tmp_path / "touched"), "w"))

    (tmp_path / "peptides_func").mkdir()
    for part in ("train", "val", "test"):
        torch.save([Bad()], tmp_path / "peptides_func" / f"{part}.pt")
    with pytest.raises(pickle.UnpicklingError):
        P.load_peptides("func", root=tmp_path)
    assert not (tmp_path / "touched").exists()


def test_missing_and_wrong_files(tmp_path):
    with pytest.raises(FileNotFoundError, match="peptides_func"):
        P.load_peptides("func", root=tmp_path)
    for name, split in (("none", "train"), ("func", "dev")):
        with pytest.raises(ValueError, match="expected one of"):
            P.load_peptides(name, split=split)
    official(tmp_path, struct=False)
    broken = {"idx_train": [0, 1], "idx_val": [1], "idx_test": [3]}
    np.savez(tmp_path / P._SPLIT[0] / P._SPLIT[1], labels=np.zeros((4, 10)), **broken)
    with pytest.raises(ValueError, match="partition"):
        P.load_peptides("func", root=tmp_path)


@pytest.mark.skipif(not (have_data(*P._TABLES["func"]) and have_data(*P._SPLIT)), reason="needs the official files")
def test_the_official_split():
    parts = P._split_rows(None)
    assert [len(parts[part]) for part in ("train", "val", "test")] == [10873, 2331, 2331]
    assert parts["labels"].shape == (15535, 10) and parts["labels"].sum(0).tolist()[4] == 9745
