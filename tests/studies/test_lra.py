"""The study of the Long Range Arena: what rows change, what rules see, which expressions are for the test alone."""

import gzip

import torch
from sparseattn.data.sequences import listops_decode, listops_solve, load_task
from sparseattn.sbm.models import density
from sparseattn.studies import lra
from sparseattn.studies.lra import FEATURES, ROWS, STUDY

SETTING = STUDY.at("smoke")


def inputs_of(row, data):
    return data[ROWS[row]["task"]]["train"]


def test_random_masks_are_a_quarter_and_stay_so(data, built):
    model = built("listops: random masks")
    inputs, labels = inputs_of("listops: random masks", data)
    layer = model.network.body.encoder.layers[0].attention
    before = layer.clusters.clone()
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 1.0)
    lra.loss(model, {"inputs": inputs, "labels": labels}, None).backward()
    optimiser.step()
    assert torch.equal(layer.clusters, before) and layer.query.weight.grad is not None
    densities = torch.stack([density(model(**inputs, return_info=True)[1]) for _ in range(5)])
    assert (densities.mean() - 0.25).abs() < 0.02
    assert not torch.equal(built("listops: SBM").network.body.encoder.layers[0].attention.clusters, before)


def test_the_regulariser_pulls_densities_down(data, built):
    model = built("image: SBM, weight 0.1")
    inputs, labels = inputs_of("image: SBM, weight 0.1", data)
    found = {}
    for model.weight in (0.0, 0.1):
        torch.manual_seed(0)
        found[model.weight] = lra.loss(model, {"inputs": inputs, "labels": labels}, None)
    torch.manual_seed(0)
    dense = density(model(**inputs, return_info=True)[1])
    assert torch.isclose(found[0.1], found[0.0] + 0.1 * dense)
    clusters = model.network.body.encoder.layers[0].attention.clusters
    assert torch.autograd.grad(dense, clusters)[0].abs().sum() > 0


def test_each_row_learns_and_is_tested_on_its_own_task(data, built):
    for task in lra.TASKS:
        model = built(f"{task}: full")
        assert len(STUDY.test(model, SETTING, data)["test"]) == len(data[task]["test"][1])
        assert set(STUDY.validate(model, SETTING, data)) == {"accuracy", "cross-entropy", "density"}
        batch = next(iter(STUDY.batches(f"{task}: full", SETTING, data, 0, 0)))
        assert batch["inputs"]["tokens"].shape[1] == data[task]["_sizes"][2]


def test_padding_changes_no_answer(data, built):
    model = built("text: full")
    inputs, _ = inputs_of("text: full", data)
    tokens, lengths = inputs["tokens"][:2], torch.tensor([40, 60])
    other = tokens.clone()
    other[0, 40:] = 7
    assert torch.equal(model(tokens, lengths), model(other, lengths))


def test_what_rules_see():
    inputs = {"tokens": torch.tensor([[12, 3, 4, 0]], dtype=torch.uint8), "lengths": torch.tensor([3])}
    assert FEATURES["first"](inputs, SETTING).tolist() == [12]
    assert FEATURES["symbols"](inputs, SETTING)[0].nonzero()[0].tolist() == [3, 4, 12]
    assert FEATURES["pairs"](inputs, SETTING).getnnz() == 5 and FEATURES["three bytes"](inputs, SETTING).getnnz() == 6


def test_official_expressions_are_test_alone(tmp_path, monkeypatch):
    small = dict(source="generated", train=200, val=20, test=8, max_depth=4, max_args=3, min_length=3, max_length=9)
    task = load_task("listops", progress=False, **small)
    texts = [listops_decode(row) for row in task.train.tokens[:30].tolist()]
    (tmp_path / "listops_nyu").mkdir()
    with gzip.open(tmp_path / "listops_nyu/test_d20s.tsv.gz", "wt") as file:
        file.write("label\ttext\n9\t9\n")
        labels = task.train.labels[:30].tolist()
        file.writelines(f"{label}\t( {text} )\n" for label, text in zip(labels, texts, strict=True))
    monkeypatch.setenv("SPARSEATTN_DATA", str(tmp_path))
    made = lra._parts("listops", SETTING | {"listops": small, "official test": True})
    (test, labels), (train, _) = made["test"], made["train"]
    assert len(labels) == 30 and "30 official expressions" in made["sources"]
    found = zip(test["tokens"].numpy(), test["lengths"].tolist(), strict=True)
    assert [listops_solve(row[:n]) for row, n in found] == labels.tolist()
    rows = {row.tobytes() for row in test["tokens"].numpy()}
    assert 0 < len(train["tokens"]) <= 170 and not rows & {row.tobytes() for row in train["tokens"].numpy()}


def test_missing_files_are_named(monkeypatch):
    monkeypatch.setenv("SPARSEATTN_DATA", "nowhere")
    assert "listops_nyu" in STUDY.missing(STUDY.at("cpu")) and STUDY.missing(SETTING) == ""
