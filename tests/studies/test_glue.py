"""The study of SST-2: what its rows change, and that padding says nothing."""

import pytest
import torch
from sparseattn.studies import glue
from sparseattn.studies.glue import FEATURES, ROWS, STUDY

SETTING = STUDY.at("smoke")


def test_sentences_are_padded_behind_their_end(data):
    inputs, labels = data["test"]
    real = torch.arange(SETTING["length"]) < inputs["lengths"][:, None]
    assert (inputs["tokens"][~real] == 0).all() and (inputs["tokens"][real] > 0).all() and len(labels) == len(real)
    few, pairs = FEATURES["words"](inputs, SETTING), FEATURES["pairs"](inputs, SETTING)
    assert few.shape[0] == len(labels) and pairs.getnnz() > few.getnnz()


@pytest.mark.parametrize("row", ["full", "no attention"])
def test_padding_changes_no_answer(row, data, built):
    model, inputs = built(row), {name: x[:2].clone() for name, x in data["test"][0].items()}
    before = model(**inputs)
    inputs["tokens"][0, inputs["lengths"][0] :] = 7
    assert torch.equal(model(**inputs), before)


def test_rows_differ_where_they_say(data, built):
    found = {row: glue.drawn(row, built(row), SETTING, data) for row, o in ROWS.items() if "attention" in o}
    dense = {row: values["density"][0] for row, values in found.items() if values}
    assert set(dense) == {"SBM", "SBM, no window", "random masks", "window alone"}
    assert dense["SBM"] > dense["SBM, no window"] + 0.05 and abs(dense["random masks"] - 0.25) < 0.01
    n = data["test"][0]["lengths"].tolist()
    near = sum(abs(i - j) <= SETTING["window"] // 2 for m in n for i in range(m) for j in range(m))
    assert dense["window alone"] == pytest.approx(near / sum(m * m for m in n))
    layer = built("random masks").network.body.encoder.layers[0].attention
    assert not layer.clusters.requires_grad and not any(p.requires_grad for p in layer.network.parameters())


def test_missing_files_are_named(monkeypatch):
    monkeypatch.setenv("SPARSEATTN_DATA", "nowhere")
    assert "SST-2" in STUDY.missing(STUDY.at("cpu")) and STUDY.missing(SETTING) == ""
