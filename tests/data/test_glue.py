"""sparseattn.data.glue: tables and their quirks, layouts, vocabularies, batches, masking, packing; and, where they
exist, the real files.

Statistical tests have fixed seeds; each would reject correct code once in 10^4 seeds.
"""

import copy
import gzip
import itertools
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from scipy import stats

from sparseattn.data import glue as G
from sparseattn.data.cache import have_data

try:
    import tokenizers  # noqa: F401
except ImportError:
    tokenizers = None
needs_tokenizers = pytest.mark.skipif(tokenizers is None, reason="needs the package tokenizers")
REAL = have_data("glue", "sst2_train.tsv.gz")
ALARM = 1e-4


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def write(path, header, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join("\t".join(row) for row in [header, *rows]) + "\n"
    if path.suffix == ".gz":
        with gzip.open(path, "wt", encoding="utf-8", newline="\n") as file:
            file.write(text)
    else:
        path.write_text(text, encoding="utf-8", newline="\n")


HEADERS = {
    "SST-2": (["sentence", "label"],) * 2,
    "QQP": (["id", "qid1", "qid2", "question1", "question2", "is_duplicate"],) * 2,
    "QNLI": (["index", "question", "sentence", "label"],) * 2,
    "MNLI": tuple(
        ["index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse", "sentence1_parse",
         "sentence2_parse", "sentence1", "sentence2", *[f"label{i}" for i in range(1, k + 1)], "gold_label"]
        for k in (1, 5)),
}
LABELS = {"SST-2": "01", "QQP": "01", "QNLI": ("entailment", "not_entailment"),
          "MNLI": ("entailment", "neutral", "contradiction")}
DEV = {"SST-2": "dev", "QQP": "dev", "QNLI": "dev", "MNLI": "dev_matched"}


def official_rows(folder, part, count):
    header = HEADERS[folder][part]
    for i in range(count):
        row = [f"{name} {i}" for name in header]
        row[-1] = LABELS[folder][i % len(LABELS[folder])]
        yield row


def official(root, end=".tsv", count=60):
    for folder in HEADERS:
        for part, stem in enumerate(("train", DEV[folder])):
            write(root / folder / f"{stem}{end}", HEADERS[folder][part], list(official_rows(folder, part, count)))


def compact(root):
    folder = root / "glue"
    for stem, count in (("sst2_train", 30), ("sst2_dev", 6), ("sst2_test_labelled", 8)):
        rows = [[f"a {stem} sentence {i}", str(i % 2)] for i in range(count)]
        write(folder / f"{stem}.tsv.gz", ["sentence", "label"], rows)
    for name, labels in (("qqp", "01"), ("mnli", LABELS["MNLI"]), ("qnli", LABELS["QNLI"])):
        rows = [["train" if i < 40 else "dev", f"{name} first {i}", f"second {i}", labels[i % len(labels)]]
                for i in range(50)]
        write(folder / f"{name}_10k.tsv.gz", ["part", "text_a", "text_b", "label"], rows)
    rows = [[str(i), f"question {i}", f"answer {i}", LABELS["QNLI"][i % 2]] for i in range(12)]
    write(folder / "qnli_dev.tsv.gz", HEADERS["QNLI"][0], rows)


@pytest.fixture(scope="module")
def vocabulary():
    pytest.importorskip("tokenizers")
    return G.train_vocabulary(G._toy(800).texts(), 150)


# tables


@pytest.mark.parametrize("end", [".tsv", ".tsv.gz"])
def test_quotes_are_literal_and_only_line_feeds_end_a_line(tmp_path, end):
    rows = [['"one', "1"], ["two\u2028 \x0b\x85 lines", "0"], ['th""ree"', "1"], ["d\u00e9j\u00e0 \u4f60", "0"]]
    write(tmp_path / f"t{end}", ["sentence", "label"], rows)
    assert G.read_table(tmp_path / f"t{end}", ("sentence", "label")) == ([tuple(r) for r in rows], 0)
    assert G.read_table(tmp_path / f"t{end}", ("label",))[0] == [("1",), ("0",), ("1",), ("0",)]


def test_broken_rows_are_counted(tmp_path):
    path = tmp_path / "t.tsv"
    text = "\ufeffid\ta\tb\tlabel\r\n1\tx\ty\t0\r\n2\tbroken\r\n\r\nin two\tz\t1\r\n"
    text += "3\t \tempty\t0\n4\tx\ty\t1\tmore\n5\tp\tq\t1"
    path.write_bytes(text.encode())
    assert G.read_table(path, ("a", "b", "label")) == ([("x", "y", "0"), ("p", "q", "1")], 4)


def test_wrong_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError):
        G.read_table(tmp_path / "none.tsv", ["a"])
    write(tmp_path / "t.tsv", ["a", "b"], [["1", "2"]])
    with pytest.raises(ValueError, match=r"t\.tsv.*'c'.*'a', 'b'"):
        G.read_table(tmp_path / "t.tsv", ["a", "c"])
    write(tmp_path / "many.tsv", ["a", "b"], [["1"]] * 11 + [["1", "2"]] * 50)
    with pytest.raises(ValueError, match="11 of 61 rows are broken"):
        G.read_table(tmp_path / "many.tsv", ["a"])
    (tmp_path / "latin.tsv").write_bytes("a\tb\ncaf\xe9\t1\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.tsv"):
        G.read_table(tmp_path / "latin.tsv", ["a"])
    (tmp_path / "empty.tsv").write_text("")
    with pytest.raises(ValueError, match="empty"):
        G.read_table(tmp_path / "empty.tsv", ["a"])
    write(tmp_path / "cut.tsv.gz", ["a"], [[str(i)] for i in range(1000)])
    whole = (tmp_path / "cut.tsv.gz").read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no gzip at all", whole[:60] + b"\xff" * 40 + whole[100:]):
        (tmp_path / "cut.tsv.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"cut\.tsv\.gz"):
            G.read_table(tmp_path / "cut.tsv.gz", ["a"])


# tasks


@pytest.mark.parametrize("parent, end", [((), ".tsv"), (("glue",), ".tsv.gz")])
@pytest.mark.parametrize("name", G.TASKS)
def test_official_layout(tmp_path, vocabulary, parent, end, name):
    official(tmp_path.joinpath(*parent), end)
    assert G.find_source(name, tmp_path) == "official"
    task = G.load_task(name, vocabulary=vocabulary, root=tmp_path)
    folder = G._TASKS[name].folder
    assert (len(task.train), len(task.val), len(task.test)) == (57, 3, 60) and task.vocabulary is vocabulary
    assert "57 rows of the training set's 60" in task.source and f"official {DEV[folder]} set of 60" in task.source
    assert task.train.first[0].endswith(" 1") and task.val.first[1].endswith(" 20")  # every 20th row is held out
    assert not set(task.train.texts()) & set(task.val.texts())
    assert task.test.labels.tolist() == [i % len(task.classes) for i in range(60)]
    assert (task.test.second is None) == (name == "sst2")
    columns = {"sst2": ("sentence",), "qqp": ("question1", "question2"), "qnli": ("question", "sentence"),
               "mnli": ("sentence1", "sentence2")}[name]
    assert [part[7] for part in (task.test.first, task.test.second) if part] == [f"{c} 7" for c in columns]


def test_broken_and_unlabelled_rows_are_left_out_and_named(tmp_path, vocabulary):
    official(tmp_path)
    rows = list(official_rows("MNLI", 1, 60))
    rows[4][-1], rows[9] = "-", rows[9][:5]
    write(tmp_path / "MNLI" / "dev_matched.tsv", HEADERS["MNLI"][1], rows)
    task = G.load_task("mnli", vocabulary=vocabulary, root=tmp_path)
    assert len(task.test) == 58 and "2 broken or unlabelled rows left out" in task.source
    rows = [[*row[:-1], "yes"] for row in rows if len(row) > 9]
    write(tmp_path / "MNLI" / "dev_matched.tsv", HEADERS["MNLI"][1], rows)
    with pytest.raises(ValueError, match="no row with a label"):
        G.load_task("mnli", vocabulary=vocabulary, root=tmp_path)


@pytest.mark.parametrize("name, sizes, words", [
    ("sst2", (30, 8, 6), ["30 phrases", "SST's 8 test", "official dev set of 6"]),
    ("qnli", (40, 10, 12), ["40 pairs of the training set", "official dev set of 12"]),
    ("qqp", (38, 2, 10), ["50 pairs of the training set", "not the official dev set"]),
    ("mnli", (38, 2, 10), ["50 pairs of the training set", "not the official dev set"]),
])
def test_compact_layout(tmp_path, vocabulary, name, sizes, words):
    compact(tmp_path)
    assert G.find_source(name, tmp_path) == "compact"
    task = G.load_task(name, vocabulary=vocabulary, root=tmp_path)
    assert (len(task.train), len(task.val), len(task.test)) == sizes
    assert all(word in task.source for word in words)
    assert task.train.labels.max() == len(task.classes) - 1
    official(tmp_path)
    assert "official files" in G.load_task(name, vocabulary=vocabulary, root=tmp_path).source
    assert G.load_task(name, vocabulary=vocabulary, root=tmp_path, source="compact").source == task.source


def test_missing_files_and_wrong_names(tmp_path, monkeypatch):
    monkeypatch.delenv("SPARSEATTN_DATA", raising=False)
    for name in G.TASKS:
        assert G.find_source(name) is None
        with pytest.raises(FileNotFoundError, match="SPARSEATTN_DATA"):
            G.load_task(name)
    compact(tmp_path)
    with pytest.raises(FileNotFoundError, match="QNLI/train.tsv"):
        G.load_task("qnli", source="official", root=tmp_path)
    with pytest.raises(ValueError, match="source"):
        G.load_task("qnli", source="toy", root=tmp_path)
    for call in (G.load_task, G.find_source):
        with pytest.raises(ValueError, match="name"):
            call("cola")
    with pytest.raises(ValueError, match="name"):
        G.Corpus(tasks=["cola"])
    with pytest.raises(FileNotFoundError, match="SPARSEATTN_DATA"):
        G.Corpus()


def test_toy_pairs_are_what_they_say():
    examples = G._toy(2000)
    assert len(set(examples.first)) == 2000
    active = {verb.split("/")[1]: verb.split("/")[0] for verb in G._VERBS}
    for first, second, label in zip(examples.first, examples.second, examples.labels.tolist(), strict=True):
        w = second.split()
        assert (w[0], w[3], w[5], w[6]) == ("the", "is", "by", "the")
        back = ["the", w[7], w[8], active[w[4]], "the", w[1], w[2], "."]
        differ = sum(a != b for a, b in zip(first.split(), back, strict=True))
        assert differ == 1 - label
    assert abs(examples.labels.double().mean() - 0.5) < 3.9 * 0.5 / 2000**0.5  # two-sided 1e-4
    again = G._toy(2000)
    assert again.first == examples.first and torch.equal(again.labels, examples.labels)
    assert G._toy(10, seed=1).first != G._toy(10).first


@needs_tokenizers
def test_toy_task():
    task = G.load_task("toy", vocabulary=150)
    assert task.source.startswith("toy") and len(task.vocabulary) == 150 and task.classes == ("different", "same")
    assert (len(task.train), len(task.val), len(task.test)) == (4000, 400, 400)
    pairs = [set(zip(part.first, part.second, strict=True)) for part in (task.train, task.val, task.test)]
    assert not any(a & b for a, b in itertools.combinations(pairs, 2))
    part = task.test.subset(torch.tensor([5, 2]))
    assert part.first == [task.test.first[5], task.test.first[2]] and len(part.texts()) == 4
    assert torch.equal(part.labels, task.test.labels[[5, 2]]) and len(task.test.subset([])) == 0
    same = task.test.subset(task.test.labels == 1)
    assert (same.labels == 1).all() and len(same) == len(same.first) == int(task.test.labels.sum())


# sub-words


def test_shares_as_bert_counts_them():
    for a, b, room in itertools.product(range(9), range(9), range(2, 16)):
        left, right = a, b
        while left + right > room:
            left, right = (left - 1, right) if left > right else (left, right - 1)
        assert G._shares(a, b, room) == (left, right)


def test_encoding_by_hand(vocabulary):
    tiny = G.Vocabulary([*G.SPECIAL, "un", "##believ", "##able", "a", "##b", "!"])
    assert tiny.encode("\u00c1b!unbelievable x") == ([2, 8, 9, 10, 5, 6, 7, 1, 3], [0] * 9)
    assert tiny.encode("a a a a a a", max_length=5) == ([2, 8, 8, 8, 3], [0] * 5)
    assert tiny.encode("a a a", "! !", max_length=6) == ([2, 8, 8, 3, 10, 3], [0, 0, 0, 0, 1, 1])
    tokens, segments = tiny.encode("a a a", "! ! ! !", max_length=7)
    assert tokens == [2, 8, 8, 3, 10, 10, 3] and segments == [0, 0, 0, 0, 1, 1, 1]
    assert tiny.encode("", "a") == ([2, 3, 8, 3], [0, 0, 1, 1])
    assert tiny.decode([2, 5, 6, 7, 3]) == "[CLS] unbelievable [SEP]"
    assert tiny.encode("[MASK]")[0].count(G.MASK) == 0  # text cannot forge special tokens
    for text in G._toy(50, seed=3).first:
        assert vocabulary.decode(vocabulary.pieces([text])[0]) == text
    for bad in (4, 7.0, None):
        with pytest.raises(ValueError, match="max_length"):
            tiny.encode("a", max_length=bad)


@needs_tokenizers
def test_vocabulary_is_a_list():
    with pytest.raises(ValueError, match="words"):
        G.Vocabulary(["a", "b"])
    with pytest.raises(ValueError, match="words"):
        G.Vocabulary([*G.SPECIAL, "a", "a"])
    words = G.Vocabulary([*G.SPECIAL, "a", "##b"])
    for other in (pickle.loads(pickle.dumps(words)), copy.deepcopy(words)):
        assert other.words == words.words and other.encode("ab") == words.encode("ab") and len(other) == 7


TEXTS = ["the cat sat on the mat", "a catalogue of cats; mats!", "un\u00e9 \u4f60\u597d", "zebra zebra quartz"] * 3


def test_training(vocabulary):
    found = G.train_vocabulary(TEXTS, 60)
    assert found.words[:5] == G.SPECIAL and len(found) <= 60 and "cat" in found.words
    assert all(G.UNKNOWN not in ids for ids in found.pieces(TEXTS))
    assert G.train_vocabulary(iter(TEXTS), 60).words == found.words
    assert G.train_vocabulary((text for text in TEXTS), 60).words == found.words
    inside = {w[2:] for w in found.words if w.startswith("##")}
    assert ";" not in inside and "\u4f60" not in inside  # these always stand alone
    few = G.train_vocabulary(TEXTS, 60, characters=5)
    assert sum(len(w) == 1 for w in few.words) == 5 and G.UNKNOWN in few.pieces(["zebra"])[0]
    huge = G.train_vocabulary(TEXTS, 10_000)
    assert len(huge) < 200 and all(len(ids) == 1 for ids in huge.pieces(["catalogue", "zebra"]))
    with pytest.raises(ValueError, match="size"):
        G.train_vocabulary(TEXTS, 20)
    for nothing in ([], [" "]):
        with pytest.raises(ValueError, match="texts"):
            G.train_vocabulary(nothing, 50)


@needs_tokenizers
def test_training_is_the_same_in_every_process():
    code = ("import json, sys; from sparseattn.data import glue as G; "
            "assert 'tokenizers' not in sys.modules; "  # imported where it is needed only
            "print(json.dumps(G.train_vocabulary(G._toy(600).texts(), 130).words))")
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                           env=os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}).stdout
            for threads in ("1", "3")]
    here = list(G.train_vocabulary(G._toy(600).texts(), 130).words)
    assert [json.loads(out) for out in runs] == [here, here]


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ImportError, match=r"pip install 'sparseattn\[notebooks\]'"):
        G.train_vocabulary(["a"], 50)
    with pytest.raises(ImportError, match="tokenizers"):
        G.Vocabulary([*G.SPECIAL, "a"])


# batches


@pytest.mark.parametrize("length", [5, 12, 64])
def test_batches_hold_every_example_once(vocabulary, length):
    examples = G._toy(103)
    encoded = G.encode_examples(examples, vocabulary, length)
    assert len(encoded) == 103 and encoded.lengths().max() <= length
    for generator, window in ((None, 50), (seeded(), 2), (seeded(), 1)):
        rows = {}
        for batch in G.batches(encoded, 10, generator=generator, window=window):
            assert set(batch) == {"tokens", "mask", "segments", "labels"}
            assert [x.dtype for x in batch.values()] == [torch.int64, torch.bool, torch.int64, torch.int64]
            assert batch["mask"].any(0).all() and (batch["tokens"][~batch["mask"]] == G.PAD).all()
            for tokens, mask, segments, label in zip(*batch.values(), strict=True):
                rows.setdefault((*tokens[mask].tolist(), *segments[mask].tolist(), int(label)), []).append(len(rows))
        wanted = {}
        for first, second, label in zip(examples.first, examples.second, examples.labels.tolist(), strict=True):
            tokens, segments = vocabulary.encode(first, second, max_length=length)
            wanted.setdefault((*tokens, *segments, label), []).append(0)
        assert {k: len(v) for k, v in rows.items()} == {k: len(v) for k, v in wanted.items()}
    first = next(G.batches(encoded, 10))
    assert torch.equal(first["labels"], examples.labels[:10])


def test_shuffling_follows_the_generator(vocabulary):
    encoded = G.encode_examples(G._toy(200), vocabulary)
    one, two, other = ([b["tokens"] for b in G.batches(encoded, 16, generator=seeded(s))] for s in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(one, other, strict=True))
    padded = [sum(b["tokens"].numel() for b in G.batches(encoded, 16, generator=seeded(), window=w)) for w in (1, 50)]
    assert padded[1] < padded[0]
    for options in ({"batch_size": 0}, {"batch_size": 2.0}, {"batch_size": 2, "window": 0}):
        with pytest.raises(ValueError, match="batch_size|window"):
            G.batches(encoded, **options)
    single = G.encode_examples(G.Examples(["the fox", "a"], None, torch.tensor([1, 0])), vocabulary)
    assert (single.segments == 0).all() and single.labels.tolist() == [1, 0]
    empty = G.encode_examples(G.Examples([], None, torch.zeros(0, dtype=torch.long)), vocabulary)
    assert len(empty) == 0 and list(G.batches(empty, 4)) == list(G.batches(empty, 4, generator=seeded())) == []


# masking


def text_batch(size=105, shape=(1500, 400), seed=0):
    g = seeded(seed)
    return {"tokens": torch.randint(0, size, shape, generator=g), "mask": torch.rand(shape, generator=g) < 0.9}


def test_masking_keeps_everything_else():
    batch = text_batch(shape=(50, 60))
    before = {name: x.clone() for name, x in batch.items()}
    hidden = G.mask_words(batch | {"segments": torch.ones(1)}, 105, generator=seeded(1))
    assert all(torch.equal(batch[name], before[name]) for name in batch)
    chosen = hidden["labels"] != G.IGNORED
    assert torch.equal(hidden["mask"], batch["mask"]) and torch.equal(hidden["segments"], torch.ones(1))
    assert torch.equal(hidden["labels"][chosen], batch["tokens"][chosen])
    assert torch.equal(hidden["tokens"][~chosen], batch["tokens"][~chosen])
    assert not (chosen & ~(batch["mask"] & (batch["tokens"] >= 5))).any()
    assert hidden["tokens"][chosen].min() >= G.MASK and hidden["tokens"].max() < 105
    again = G.mask_words(batch, 105, generator=seeded(1))
    assert torch.equal(again["tokens"], hidden["tokens"])


@pytest.mark.parametrize("size, share", [(105, 0.15), (8, 0.5)])
def test_masking_law(size, share):
    batch = text_batch(size)
    hidden = G.mask_words(batch, size, generator=seeded(2), share=share)
    words = batch["mask"] & (batch["tokens"] >= 5)
    chosen = hidden["labels"] != G.IGNORED
    assert stats.binomtest(int(chosen.sum()), int(words.sum()), share).pvalue > ALARM
    new, old = hidden["tokens"][chosen], batch["tokens"][chosen]
    counts = torch.stack([(new == G.MASK).sum(), ((new != G.MASK) & (new != old)).sum(), (new == old).sum()])
    lucky = 0.1 / (size - 5)
    law = chosen.sum() * torch.tensor([0.8, 0.1 - lucky, 0.1 + lucky], dtype=torch.float64)
    assert stats.chisquare(counts, law).pvalue > ALARM
    distance = ((new - old) % (size - 5))[(new != G.MASK) & (new != old)]
    assert stats.chisquare(torch.bincount(distance, minlength=size - 5)[1:]).pvalue > ALARM
    columns = torch.stack([chosen.sum(0), (words & ~chosen).sum(0)])  # the place does not matter
    assert stats.chi2_contingency(columns).pvalue > ALARM


def test_one_word_is_always_asked():
    batch = {"tokens": torch.tensor([[2, 7, 3, 0]]), "mask": torch.tensor([[True, True, True, False]])}
    for seed in range(30):
        hidden = G.mask_words(batch, 100, generator=seeded(seed))
        assert hidden["labels"].tolist() == [[G.IGNORED, 7, G.IGNORED, G.IGNORED]]
    nothing = {"tokens": torch.tensor([[2, 3]]), "mask": torch.ones(1, 2, dtype=torch.bool)}
    assert (G.mask_words(nothing, 100)["labels"] == G.IGNORED).all()
    everything = G.mask_words(text_batch(shape=(4, 9)), 105, share=1.0)
    assert ((everything["labels"] != G.IGNORED) == (text_batch(shape=(4, 9))["mask"]
                                                    & (text_batch(shape=(4, 9))["tokens"] >= 5))).all()
    for share in (0, 1.5, float("nan")):
        with pytest.raises(ValueError, match="share"):
            G.mask_words(batch, 100, share=share)
    with pytest.raises(ValueError, match="size"):
        G.mask_words(batch, 5)


# text


@pytest.mark.parametrize("length", [5, 8, 33, 512])
@pytest.mark.parametrize("count", [0, 1, 7, 1200])
def test_packing_loses_nothing(vocabulary, length, count):
    texts = (G._toy(600, seed=2).texts())[:count]
    rows = list(G._pack(iter(texts), vocabulary, length))
    wanted = [i for ids in vocabulary.pieces(texts) for i in [*ids, G.END]]
    assert all(row.shape == (length,) and row[0] == G.START for row in rows)
    flat = [i for row in rows for i in row[1:].tolist()]
    assert flat[: len(wanted)] == wanted and not any(flat[len(wanted):]) and len(flat) - len(wanted) < length - 1


def test_streams_are_mixed_not_changed(vocabulary):
    texts = G._toy(300).texts()
    plain = [tuple(row.tolist()) for row in G._pack(texts, vocabulary, 17)]
    for buffer in (1, 7, 10_000):
        found = list(G.text_batches(texts, vocabulary, 16, 17, generator=seeded(), buffer=buffer))
        rows = [tuple(row) for b in found for row in b["tokens"].tolist()]
        assert sorted(rows) == sorted(plain) and (rows == plain) == (buffer == 1)
        assert all(torch.equal(b["mask"], b["tokens"] != G.PAD) and not b["segments"].any() for b in found)
    assert [tuple(r) for b in G.text_batches(texts, vocabulary, 16, 17) for r in b["tokens"].tolist()] == plain

    def endless():
        yield from itertools.cycle(texts)

    assert next(G.text_batches(endless(), vocabulary, 4, 16, generator=seeded(), buffer=50))["tokens"].shape == (4, 16)
    for options in ({"batch_size": 0}, {"batch_size": 1, "buffer": 0}, {"batch_size": 1, "length": 4}):
        with pytest.raises(ValueError, match="batch_size|buffer|length"):
            G.text_batches(texts, vocabulary, **options)


def test_corpus_mixes_its_sources_and_leaves_out_test_sentences(tmp_path, vocabulary):
    compact(tmp_path)
    rows = [["1", "7", str(i), f'a "review"<br /><br />number {i}'] for i in range(11)]
    write(tmp_path / "imdb" / "aclImdb_test.tsv.gz", ["label", "rating", "id", "text"], rows)
    corpus = G.Corpus(root=tmp_path)
    texts = list(corpus)
    assert texts == list(corpus) and len(texts) == len(corpus) == 30 + 2 * 38 + 2 * 38 + 2 * 40 + 11
    assert 'a "review"  number 3' in texts and "11 IMDB reviews (test half)" in corpus.source
    for name in G.TASKS:
        task = G.load_task(name, vocabulary=vocabulary, root=tmp_path)
        if name in ("sst2", "qnli"):
            assert not set(texts) & set(task.test.texts())
        assert not set(texts) & {t for t in task.val.texts() if "first" in t}
        assert set(task.train.texts()) <= set(texts) and f"sentences of {name}" in corpus.source
    places = [i for i, text in enumerate(texts) if "review" in text]
    gaps = [b - a for a, b in itertools.pairwise(places)]
    assert max(gaps) - min(gaps) <= 5  # one every 25 texts or so
    assert len(G.Corpus(root=tmp_path, tasks=("sst2",), reviews=False)) == 30
    assert len(G.Corpus(root=tmp_path, tasks=())) == 11
    write(tmp_path / "imdb" / "aclImdb_test.tsv.gz", ["label", "review"], [["1", "x"]])
    with pytest.raises(ValueError, match="text"):
        G.Corpus(root=tmp_path)


# the real files, where they are


@pytest.mark.skipif(not REAL or tokenizers is None, reason="SPARSEATTN_DATA has no GLUE files")
@pytest.mark.parametrize("name, sizes", [("sst2", (67349, 1821, 872)), ("qnli", (8999, 1000, 5463)),
                                         ("qqp", (8549, 450, 1000)), ("mnli", (8549, 450, 1000))])
def test_real_compact_files(vocabulary, name, sizes):
    task = G.load_task(name, vocabulary=vocabulary, source="compact")
    assert (len(task.train), len(task.val), len(task.test)) == sizes
    assert {"sst2": 444, "qnli": 2702}.get(name) in (None, int((task.test.labels == (name == "sst2")).sum()))
    pairs = [set(zip(*filter(None, (p.first, p.second)), strict=True)) for p in (task.train, task.test)]
    assert not pairs[0] & pairs[1]
