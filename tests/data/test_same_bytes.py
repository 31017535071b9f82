"""Data are the same bytes on every machine: small builds of all generators against committed digests.

The digests are compared in this process, then in others that are told to use fewer vector instructions, another BLAS
kernel, another hash seed, more threads. Where a generator's output is meant to change, raise its version (a part of the
key of its cache) and run

    python tests/data/test_same_bytes.py        # writes digests.json
"""

import ast
import dataclasses
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from sparseattn.data import collisions, exact, gestures, glue, particles, peptides, scenes, sequences, shapes, toys

HERE = Path(__file__).parent
DIGESTS = HERE / "digests.json"


def dice(seed=0):
    return torch.Generator().manual_seed(seed)


def numbers():
    rng = np.random.default_rng(0)
    return rng.uniform(-20, 20, 20_000), rng.uniform(1e-6, 20, 20_000)


def functions():
    x, y = numbers()
    return {
        "waves": np.stack([exact.sin(x), exact.cos(x), exact.exp(x), exact.log(y), exact.arctan2(x, y)]),
        "single": np.stack([exact.exp(x.astype("f4")), exact.log(y.astype("f4"))]),
        "turned": exact.product(x[:300].reshape(-1, 3), y[:9].reshape(3, 3)),
        "rounded": np.array([exact.sine_cosine(angle) for angle in x[:50]]),
        "ways": np.array([exact.direction(a, b) for a in range(-3, 4) for b in range(-3, 4) if a or b]),
    }


def mesh():
    corners = np.random.default_rng(0).normal(size=(4, 3))
    return shapes.Mesh(corners, np.array([[0, 1, 2], [0, 1, 3], [0, 2, 3], [1, 2, 3]]), np.arange(4) % 2)


def surface():
    return dict(zip("xnm", shapes.sample_surface(mesh(), 500, np.random.default_rng(0)), strict=True))


def archive():
    """A library of two models of furniture, one of them turned."""
    folder = Path(tempfile.mkdtemp())
    text = "".join(f"v {x} {y} {z}\n" for x, y, z in mesh().vertices.round(6).tolist()) + "f 1 2 3\nf 1 2 4\nf 1 3 4\n"
    facts = "name#{0}=Chair {0}\ncategory#{0}=Office\nmodel#{0}=/c{0}.obj\nmodelRotation#{0}={1}\ncreator#{0}=x\n"
    turns = ("1 0 0 0 1 0 0 0 1", "0.8 -0.6 0 0.6 0.8 0 0 0 1")
    with zipfile.ZipFile(folder / "made.sh3f", "w") as file:
        file.writestr(
            "PluginFurnitureCatalog.properties", "".join(facts.format(k + 1, turn) for k, turn in enumerate(turns))
        )
        for k in (1, 2):
            file.writestr(f"c{k}.obj", text + f"v {k} 0 0\nf 1 2 5\n")
    return folder


def fixture(points=256):
    return shapes.load_shapes("fixture", split="all", points=points)


def room(area, number, scan=True):
    packed = scenes._packed_room(scenes.load_furniture("fixture"), area, number, 200, scan, 0)
    return scenes._room(packed, area, scenes._composed("fixture", 200, scan))


def person(number, seconds=0.3):
    draws = [np.random.default_rng([0, number, gesture]) for gesture in range(len(gestures.CLASSES))]
    one = gestures.draw_subject(number)
    streams = [gestures.simulate_stream(one, gesture, seconds, rng) for gesture, rng in enumerate(draws)]
    return gestures.Gestures("", tuple(streams))


def hits(count=2000):
    particles = collisions.toy_particles(count, np.random.default_rng(1))
    return collisions.simulate_hits(particles, np.random.default_rng(2))


def crossing():
    rng = np.random.default_rng(3)
    px, py, pz = rng.normal(size=(3, 500))
    momenta = np.stack([px, py, pz, np.sqrt(px * px + py * py + pz * pz + 0.02)], 1)
    pdg = rng.choice([22, 211, 130, 14], 500)
    return particles.make_particles(momenta, pdg, np.arange(500) // 100, np.arange(5), rng=rng)


def task(name):
    made = sequences.load_task(name, source="toy", train=24, val=8, test=8, cache=tempfile.mkdtemp(), progress=False)
    return {part: getattr(made, part).tokens for part in ("train", "val", "test")}


def ring_of_pages():
    """Parts of pages whose links form a ring, and pairs of them."""
    size = 60
    pages = [{"package": "p", "section": "1"} for _ in range(size)]
    links = np.array([(k, k + 1) for k in range(size - 1)] + [(0, size - 1)])
    part = sequences._page_parts(pages, links)
    arrays = {"links": links, "part": part, "package": np.full(size, "p"), "section": np.full(size, "1")}
    return {"part": part, "pairs": np.concatenate([sequences.manpage_pairs(arrays, k)[0] for k in range(3)])}


def sentences():
    made = glue.load_task("toy", vocabulary=200)
    encoded = glue.encode_examples(made.train.subset(range(200)), made.vocabulary)
    masked = glue.mask_words(encoded.batch(torch.arange(16)), len(made.vocabulary), generator=dice())
    return {"tokens": encoded.tokens, "hidden": masked["tokens"], "words": np.array(made.vocabulary.words)}


def texts(count):
    return peptides.random_sequences(count, rng=np.random.default_rng(0))


def encoded(kind):
    whole = peptides.load_peptides("toy_func", split="test")
    return {"x": peptides.with_encodings(whole, kind, 8, root=tempfile.mkdtemp()).encodings}


SMALL = {
    "exact: functions": functions,
    "toys: tokens": lambda: toys.repeated_tokens(8, 64, generator=dice()),
    "toys: associations": lambda: toys.associations(8, 64, queries=16, generator=dice()),
    "toys: mixtures": lambda: toys.mixtures(8, sizes=(50, 90), per_set=True, generator=dice()),
    "shapes: fixture": fixture,
    "shapes: first points": lambda: shapes.first_points(fixture(), 100),
    "shapes: scans": lambda: shapes.corrupt(fixture().subset(range(4))),
    "shapes: surface": surface,
    "shapes: meshes": lambda: shapes.build_sweethome(archive(), progress=False, root=tempfile.mkdtemp()),
    "shapes: description": lambda: {"x": shapes.describe(fixture().points)},
    "scenes: scanned room": lambda: room(1, 0),
    "scenes: whole room": lambda: room(5, 2, scan=False),
    "scenes: blocks": lambda: scenes.sample_blocks([room(1, 1)], 128, rng=np.random.default_rng(0)),
    "gestures: person": lambda: gestures._pack(person(3)),
    "gestures: points": lambda: {"x": gestures.sample_points(gestures.cut_clips(person(4), window=100), range(5), 64)},
    "collisions: hits": hits,
    "collisions: cloud": lambda: collisions.cloud_of_hits(hits()),
    "collisions: sector": lambda: collisions.sectors(collisions.cloud_of_hits(hits()))[3],
    "collisions: fixture": lambda: collisions.example_clouds()[0],
    "particles: cloud": crossing,
    "particles: toy": lambda: particles.toy_crossings(1)[0],
    "sequences: listops": lambda: sequences.listops_expressions(4, np.random.default_rng(0)),
    "sequences: pathfinder": lambda: sequences.pathfinder_pictures(6, np.random.default_rng(0)),
    "sequences: toy listops": lambda: task("listops"),
    "sequences: toy text": lambda: task("text"),
    "sequences: toy image": lambda: task("image"),
    "sequences: toy retrieval": lambda: task("retrieval"),
    "sequences: manual pages": ring_of_pages,
    "sequences: grey": lambda: {"x": sequences._grey(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))},
    "glue: sentences": sentences,
    "peptides: fixture": lambda: peptides.load_peptides("toy_struct", split="all"),
    "peptides: functions": lambda: {"x": np.array([peptides.made_up_functions(one) for one in texts(100)])},
    "peptides: eigenvectors": lambda: encoded("laplacian"),
    "peptides: walks": lambda: encoded("walk"),
    "peptides: graphs": lambda: peptides.build_graphs(texts(9), sequence=True, progress=False, root=tempfile.mkdtemp()),
}
#: made by libraries in C++ whose sines and sums are their own: exact to some digits; slow, so not in every process
OUTSIDE = {
    "peptides: conformers": lambda: {
        "x": peptides.build_shapes(texts(3), (0,), sequence=True, progress=False, root=tempfile.mkdtemp())
    },
    "collisions: Pythia": lambda: collisions._generate_particles(0, pileup=1),
    "particles: Pythia": lambda: particles._crossing(0, 0, 1),
}
#: decimals that are compared: the last bits of these libraries are nobody's promise
DECIMALS = {"peptides: conformers": 3, "collisions: Pythia": 4, "particles: Pythia": 3}
NEEDS = {
    "glue: sentences": "tokenizers",
    "peptides: graphs": "rdkit",
    "peptides: conformers": "rdkit",
    "collisions: Pythia": "pythia8mc",
    "particles: Pythia": "pythia8mc",
}


def digest(made, decimals=None):
    """Of all arrays and tensors of a dict or dataclass, in the order of their names."""
    if dataclasses.is_dataclass(made):
        made = {field.name: getattr(made, field.name) for field in dataclasses.fields(made)}
    total = hashlib.sha256()
    for name, value in sorted(made.items()):
        if isinstance(value, (np.ndarray, torch.Tensor)):
            value = np.ascontiguousarray(value)
            if decimals is not None and value.dtype.kind == "f":
                value = np.rint(value.astype(float) * 10**decimals).astype(np.int64)
            total.update(f"{name}|{value.dtype.str}|{value.shape}|".encode() + value.tobytes())
    return total.hexdigest()[:32]


def digests(names):
    """Of the builds whose packages are there."""
    builds = SMALL | OUTSIDE
    names = [name for name in names if importlib.util.find_spec(NEEDS.get(name, "numpy"))]
    return {name: digest(builds[name](), DECIMALS.get(name)) for name in names}


def committed():
    return json.loads(DIGESTS.read_text(encoding="utf-8"))


def test_every_build_has_a_digest():
    assert list(committed()) == [*SMALL, *OUTSIDE]


@pytest.mark.parametrize("name", [*SMALL, *OUTSIDE])
def test_committed_digests(name):
    if not (found := digests([name])):
        pytest.skip(f"needs {NEEDS[name]}")
    assert found[name] == committed()[name]


THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS")


def _plain_processor():
    """Variables that make numpy, OpenBLAS, torch, MKL and glibc forget the vector instructions of this processor."""
    from numpy._core._multiarray_umath import __cpu_dispatch__, __cpu_features__

    return {
        "NPY_DISABLE_CPU_FEATURES": " ".join(name for name in __cpu_dispatch__ if __cpu_features__.get(name)),
        "OPENBLAS_CORETYPE": "Prescott",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_CBWR": "COMPATIBLE",
        "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-AVX512F",
    }


@pytest.mark.parametrize(
    "change",
    [
        _plain_processor(),
        {"OPENBLAS_CORETYPE": "Sandybridge", "PYTHONHASHSEED": "77", "LC_ALL": "C", **dict.fromkeys(THREADS, "2")},
    ],
    ids=["plain processor", "another BLAS, hashes, threads, locale"],
)
def test_same_bytes_elsewhere(change):
    """In a process that is told it runs on another machine."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), **change)
    command = [sys.executable, __file__, "--print"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout.splitlines()[-1])
    assert len(found) > 25 and {name: committed()[name] for name in found} == found


def test_decimals_are_far_from_the_noise():
    """Rounding hides last bits, not values: a change in the last compared decimal is seen."""
    x = np.linspace(0, 1, 7)
    assert digest({"x": x}, 4) == digest({"x": x + 1e-12}, 4) != digest({"x": x + 2e-4}, 4)


# what generators may not call


#: functions whose last bit is the library's or the processor's own choice
LOOSE = set(
    "sin cos tan exp exp2 expm1 log log2 log10 log1p arctan arctan2 arcsin arccos arcsinh arccosh arctanh sinh cosh "
    "tanh sinc hypot cbrt power angle atan atan2 asin acos einsum dot matmul inner vdot tensordot eigh eigvalsh eig "
    "svd qr lstsq solve inv randn normal_ exponential_ multinomial softmax log_softmax logsumexp".split()
)
#: (module, function) -> why it may
ALLOWED = {
    ("exact", "direction"): "mended by a step with 60 digits",
    ("toys", "mixture_log_density"): "a score of a model, not data",
    ("shapes", "_view"): "drawing",
    ("shapes", "_tint"): "drawing",
    ("shapes", "plot_shapes"): "drawing",
    ("shapes", "rotate_up"): "of a batch in training, on its device",
    ("shapes", "jitter"): "of a batch in training, on its device",
    ("scenes", "draw_room"): "drawing",
    ("collisions", "plot_event"): "drawing",
    ("collisions", "_circle"): "drawing",
    ("sequences", "_kernel"): "a product of whole numbers",
    ("peptides", "inertia_moments"): "targets from conformers, compared by decimals",
    ("peptides", "axis_lengths"): "targets from conformers, compared by decimals",
    ("peptides", "_spectrum"): "eigenvectors, settled afterwards and rounded to six decimals",
    ("peptides", "walk_encoding"): "products of sparse matrices, summed in the order of their entries",
}


def loose_calls(module):
    """(function, what) for every call whose last bits, or whose order of ties, a processor decides."""
    tree = ast.parse((Path(exact.__file__).parent / f"{module}.py").read_text(encoding="utf-8"))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    own = {alias.name for node in imports if node.module == "exact" for alias in node.names}
    for top in tree.body:
        for node in ast.walk(top):
            name = getattr(top, "name", "")
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                yield name, "@"
            if isinstance(node, ast.Call):
                called = getattr(node.func, "attr", getattr(node.func, "id", ""))
                plain = isinstance(node.func, ast.Name) and (called in own or module == "exact")
                if called in LOOSE and not plain:
                    yield name, called
                if called == "argsort" and not {"kind", "stable"} & {word.arg for word in node.keywords}:
                    yield name, "argsort without an order of ties"


MODULES = "cache collisions exact gestures glue particles peptides scenes sequences shapes toys"


@pytest.mark.parametrize("module", MODULES.split())
def test_generators_use_exact_functions(module):
    inexact = [(name, what) for name, what in loose_calls(module) if (module, name) not in ALLOWED]
    assert not inexact


def test_allowances_are_needed():
    assert {(module, name) for module, name in ALLOWED if name not in {n for n, _ in loose_calls(module)}} == set()


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print(json.dumps(digests(SMALL)))
    else:
        DIGESTS.write_text(json.dumps(digests([*SMALL, *OUTSIDE]), indent=1) + "\n", encoding="utf-8")
