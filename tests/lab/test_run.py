"""One run of one notebook: what it checks at the start, what it collects, what it leaves behind."""

import hashlib
import json
import os
import random

import matplotlib
import numpy as np
import pytest
import torch

from sparseattn.lab import claims, run
from sparseattn.lab.decide import Experiment
from sparseattn.lab.report import panels
from sparseattn.lab.run import (
    code_hashes,
    notebook_hash,
    pick,
    record_hashes,
    repo_root,
    start,
    unknown_parameters,
    workflow_graph,
    write_json,
)

matplotlib.use("Agg")
pd = pytest.importorskip("pandas")
FACTS = dict(where="Thm 1", statement="something", kind="bound", expect="holds", stated=True)


def notebook(*cells, outputs=()):
    made = [
        dict(cell_type="code", source=[line + "\n" for line in c.split("\n")], outputs=list(outputs)) for c in cells
    ]
    return json.dumps(dict(cells=made, metadata={}, nbformat=4, nbformat_minor=5))


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A repository with one notebook and one module, and the working folder inside it."""
    (tmp_path / "settings.ini").write_text("[DEFAULT]\n")
    (tmp_path / "nbs/hept").mkdir(parents=True)
    (tmp_path / "nbs/hept/30_one.ipynb").write_text(notebook("scale = 'smoke'", "1 + 1"))
    (tmp_path / "sparseattn").mkdir()
    (tmp_path / "sparseattn/__init__.py").write_text("")
    monkeypatch.chdir(tmp_path / "nbs/hept")
    return tmp_path


# --- where and at what scale


def test_root_is_found_upwards(root, tmp_path_factory):
    assert repo_root() == root == repo_root(root / "nbs") == repo_root(root)
    with pytest.raises(FileNotFoundError, match="no settings.ini above"):
        repo_root(tmp_path_factory.mktemp("elsewhere"))


@pytest.mark.parametrize(
    "scale, settings, expected",
    [
        ("smoke", dict(smoke=1, cpu=2), 1),
        ("cpu", dict(smoke=1, cpu=2), 2),
        ("gpu", dict(smoke=1, cpu=2), 2),
        ("paper", dict(smoke=1, gpu=3), 3),
        ("paper", dict(smoke=1, cpu=2, gpu=3, paper=4), 4),
        ("cpu", dict(smoke=None), None),
    ],
)
def test_settings_are_inherited_from_smaller_scales(scale, settings, expected):
    assert pick(scale, **settings) == expected


def test_pick_refuses():
    with pytest.raises(ValueError, match="scale is 'huge'; it must be one of smoke, cpu, gpu, paper"):
        pick("huge", smoke=1)
    with pytest.raises(ValueError, match="scale is 'tiny'"):
        pick("smoke", tiny=1)
    for settings in (dict(), dict(gpu=1)):
        with pytest.raises(ValueError, match="name no scale at or below 'cpu'"):
            pick("cpu", **settings)


# --- parameters


@pytest.mark.parametrize(
    "cells, unknown",
    [
        ([], set()),
        (["scale = 'smoke'"], set()),
        (["scale = 'smoke'", "# Parameters\nscale = 'cpu'"], set()),
        (["scale = 'smoke'", "# Parameters\nsclae = 'cpu'\nseed = 1"], {"sclae", "seed"}),
        (["scale = 'smoke'  # comment\nseed = 0", "", "# Parameters\nseed = 1\nwidth = 2"], {"width"}),
        (["%matplotlib inline", "# Parameters\nwidth = 2"], {"width"}),
        (["width = 1", "scale = 'smoke'", "# Parameters\nwidth = 2"], {"width"}),
        (["scale = 'smoke'", "# Parameters of the model\nwidth = 2"], set()),
    ],
)
def test_unknown_parameters(cells, unknown):
    assert unknown_parameters(cells) == unknown


def test_start_refuses(root, monkeypatch):
    for scale in ("huge", "", None, "Smoke"):
        with pytest.raises(ValueError, match=f"scale is {scale!r}; it must be one of smoke, cpu, gpu, paper"):
            start("30_one", scale)
    with pytest.raises(ValueError, match="stem is '30_two'; there is no notebook of that name"):
        start("30_two")
    monkeypatch.setattr(run, "_executed_cells", lambda: ["scale = 'smoke'", "# Parameters\nsclae = 'cpu'"])
    with pytest.raises(ValueError, match="the notebook has no parameter sclae"):
        start("30_one")
    assert not (root / "build").exists()


@pytest.mark.parametrize("scale", ["gpu", "paper"])
def test_a_scale_that_needs_a_gpu_refuses_to_run_without(root, monkeypatch, scale):
    monkeypatch.delenv("SPARSEATTN_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"scale {scale} needs a CUDA device; .* SPARSEATTN_DEVICE=cpu"):
        start("30_one", scale)
    with pytest.raises(ValueError, match="device cuda needs a CUDA device"):
        start("30_one", "cpu", device="cuda")
    assert not (root / "build").exists()
    assert start("30_one", scale, device="cpu").device.type == "cpu"
    monkeypatch.setenv("SPARSEATTN_DEVICE", "cpu")
    rehearsal = start("30_one", scale)
    rehearsal.finish()
    found = json.loads((rehearsal.folder / "run.json").read_text())
    assert found["scale"] == scale and found["device"].startswith("cpu") and "device" not in found["parameters"]


def test_a_device_that_torch_does_not_know():
    with pytest.raises(ValueError, match="device is 'gpu'; expected cpu, cuda"):
        run.run_device("cpu", "gpu")


def test_a_scale_that_needs_a_gpu_gets_it(root, monkeypatch):
    monkeypatch.delenv("SPARSEATTN_DEVICE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert [run.run_device(scale).type for scale in run.SCALES] == ["cpu", "cpu", "cuda", "cuda"]
    assert not current
    assert run.run_device("cpu", "cuda:1") == torch.device("cuda", 1)
    assert current == [torch.device("cuda", 1)]  # whose clock and memory are looked at from now on


# --- a run


def test_start_seeds_every_generator(root, capsys):
    def numbers(seed):
        start("30_one", seed=seed)
        return random.random(), np.random.rand(), torch.rand(1).item()

    first = numbers(3)
    assert first == numbers(3) and not set(first) & set(numbers(4))
    assert capsys.readouterr().out.startswith("30_one: scale smoke, seed 3, cpu")


def test_start_empties_the_folder_of_its_scale_alone(root):
    for scale in ("smoke", "cpu"):
        start("30_one", scale)
        (root / f"build/{scale}/figures/30_one/old.csv").write_text("old")
    opened = start("30_one", "cpu")
    assert opened.folder == root / "build/cpu/figures/30_one" and not list(opened.folder.iterdir())
    assert (root / "build/smoke/figures/30_one/old.csv").exists()
    assert (opened.scale, opened.seed, opened.device.type) == ("cpu", 0, "cpu")


def test_run_writes_everything_down(root):
    opened = start("30_one", "cpu", seed=5, width=8)
    opened.data("events"), opened.data("more"), opened.data("events")
    assert opened.pick(smoke=1, cpu=2) == 2
    opened.table(pd.DataFrame({"a": [0.1]}), "table")
    opened.figure(panels()[0], "figure")
    opened.claim("X-1", **FACTS)
    opened.reproduce("X-2", where="", statement="", paper=1.0, ours=1.0, tolerance=0.1, expect="reproduced")
    opened.not_attempted("X-3", where="", statement="", kind="order", reason="later")
    made = Experiment({"a": [1.0, 2.0], "b": [0.0, 3.0]}, decided_by="statistics")
    opened.decide("X-4", where="", statement="", paper=0.5, tolerance=0.1, experiment=made, origin="stated")
    opened.conclude("X-5", ("partly", "p 0.03"), where="", statement="", decided="statistics", source="PAT")
    opened.finish()
    recorded = claims.read(opened.folder / "claims.csv")
    assert [c.verdict for c in recorded] == ["holds", "reproduced", "not attempted", "undecided", "partly"]
    assert [(c.origin, c.decided) for c in recorded][2:4] == [("", ""), ("stated", "statistics")]
    assert [c.paper for c in recorded] == ["HEPT"] * 4 + ["PAT"]
    found = json.loads((opened.folder / "run.json").read_text())
    names = {"claims.csv", "figure.png", "table.csv", "table.md"}
    assert set(found["files"]) == names == {p.name for p in opened.folder.iterdir()} - {"run.json"}
    for name, digest in found["files"].items():
        assert digest == hashlib.sha256((opened.folder / name).read_bytes()).hexdigest()
    assert found["data"] == ["events", "more"] and found["parameters"] == dict(width=8, scale="cpu")
    assert (found["notebook"], found["scale"], found["seed"]) == ("nbs/hept/30_one.ipynb", "cpu", 5)
    assert found["notebook_sha256"] == notebook_hash(root / "nbs/hept/30_one.ipynb")
    assert {"python", "torch", "numpy"} <= set(found["versions"]) and found["commit"] and found["describe"]
    assert found["kernels"].keys() == {"C compiler", "processor"}
    assert found["sources"] == {}  # the package in use is not the one in this folder


def test_the_folder_names_the_paper(root):
    page = root / "nbs/sbm/40_one.ipynb"
    page.parent.mkdir()
    page.write_text((root / "nbs/hept/30_one.ipynb").read_text())
    assert start("40_one").claim("X-1", **FACTS).paper == "SBM-Transformer"


def test_unchanged_results_give_unchanged_files(root):
    def results():
        opened = start("30_one")
        opened.table(pd.DataFrame({"a": torch.rand(3).tolist()}), "table")
        opened.figure(panels()[0], "figure")
        opened.claim("X-1", **FACTS)
        opened.finish()
        return json.loads((opened.folder / "run.json").read_text())["files"]

    assert results() == results()


def test_a_run_without_claims_writes_no_ledger(root):
    opened = start("30_one")
    opened.finish()
    assert [p.name for p in opened.folder.iterdir()] == ["run.json"]


def test_a_claim_is_recorded_once_and_only_if_its_check_agrees(root):
    opened = start("30_one")
    opened.claim("X-1", **FACTS)
    for again in (
        lambda: opened.claim("X-1", **FACTS),
        lambda: opened.not_attempted("X-1", where="", statement="", kind="order", reason=""),
    ):
        with pytest.raises(ValueError, match="claim 'X-1' is recorded twice in 30_one"):
            again()
    with pytest.raises(claims.ClaimMismatch, match="X-2"):
        opened.claim("X-2", **dict(FACTS, stated=False))
    assert [c.id for c in opened.claims] == ["X-1"]


def test_claims_know_the_scale_of_the_run(root):
    assert start("30_one", "smoke").claim("X-1", **FACTS, needs="cpu").verdict == "not attempted"
    assert start("30_one", "cpu").claim("X-1", **FACTS, needs="cpu").verdict == "holds"


# --- hashes and files


def test_code_hashes_are_those_of_the_workflow():
    root = repo_root(run.__file__)
    page = root / "nbs/hept/34_tracking.ipynb"
    hashes = code_hashes(root, page)
    assert {"nbs/hept/34_tracking.ipynb", "sparseattn/lab/run.py", "sparseattn/hept/attention.py"} <= hashes.keys()
    graph = workflow_graph(root)
    found = hashlib.sha256(graph._computes(root / "sparseattn/hept/attention.py")).hexdigest()
    assert hashes["sparseattn/hept/attention.py"] == found
    assert hashes == graph.sources(root, graph.read_notebook(root, page.relative_to(root)), graph.Imports(root))


def test_hashes_of_another_folders_files_are_not_taken(root):
    (root / "workflow").mkdir()
    (root / "workflow/graph.py").write_text("raise RuntimeError('not this one')")
    page = root / "nbs/hept/30_one.ipynb"
    assert workflow_graph(root) is None and code_hashes(root, page) == record_hashes(root, page, "cpu") == {}


def test_hashes_of_records_are_those_of_the_notebooks_studies(root):
    start("30_one").finish()
    assert json.loads((root / "build/smoke/figures/30_one/run.json").read_text())["records"] == {}
    here = repo_root(run.__file__)
    hashes = record_hashes(here, here / "nbs/hept/34_tracking.ipynb", "cpu")
    assert hashes and all(path.startswith("figures/tracking/runs/cpu/") for path in hashes)


def test_notebook_hash_sees_sources_alone(root):
    path = root / "nbs/hept/30_one.ipynb"
    before = notebook_hash(path)
    path.write_text(notebook("scale = 'smoke'", "1 + 1", outputs=[dict(output_type="stream", text="2")]))
    assert notebook_hash(path) == before
    path.write_text(notebook("scale = 'smoke'", "1 + 2"))
    assert notebook_hash(path) != before


def test_json_is_sorted_and_written_whole(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_json(path, {"b": [1.5, "≤"], "a": None})
    assert path.read_text(encoding="utf-8") == '{\n "a": null,\n "b": [\n  1.5,\n  "≤"\n ]\n}\n'
    before = path.read_bytes()
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="run.json is not written: disk full; what stood there before is whole"):
        write_json(path, {})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_a_claim_that_its_cell_does_not_show_is_shown_at_its_end(root, monkeypatch):
    display = pytest.importorskip("IPython.display")
    ends, shown = [], []
    shell = type(
        "Shell", (), {"user_ns": {}, "events": type("Events", (), {"register": lambda *args: ends.append(args)})()}
    )
    monkeypatch.setattr(run, "_shell", lambda: shell)
    monkeypatch.setattr(display, "display", lambda claim: shown.append((claim.id, repr(claim))))
    made = start("30_one")
    event, end_of_cell = ends[0][1:]
    assert event == "post_run_cell"
    made.claim("X-1", **FACTS), made.claim("X-2", **FACTS)._repr_markdown_(), repr([made.claim("X-3", **FACTS)])
    end_of_cell("what the cell returned")
    end_of_cell("nothing new")
    assert [id for id, _ in shown] == ["X-1"]
