"""The cells that time and weigh are taken on a pretended GPU: what they make lies there, and their tables say so."""

import importlib
import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from pretend import pretend_gpu
from torch.utils._pytree import tree_leaves

from sparseattn.data.peptides import load_peptides
from sparseattn.lab import measure
from sparseattn.lab import run as lab_run

NBS = Path(__file__).parents[1] / "nbs"


def float_qkv(b, h, n, d, dtype):
    return torch.randn(3, b, h, n, d, dtype=dtype)


# notebook: module, cells in their order, names that other cells would have made
COSTS = {
    "hept/32_attention": ("hept.attention", "4ebc0d0c 5201f91f 8ed99f73 32real02 32real04 32real06 32real08 32real10 32real09 32e6d21c 32grow01", {}),
    "hept/34_tracking": ("studies.tracking", "fa9bec56 8c082d89 34cost02 34cost07 34cost04 63ee1c39 34cost06 6707174b 34cost08 21691e41",
                         {"STANDING": {"_inputs": (torch.zeros(15), torch.ones(15))}, "OTHERS": "not attempted"}),
    "atlas/90_side_by_side": ("core.transformer", "90import 90layer1 90count1 90time01 90time02 90mem001", {}),
    "hept/35_pileup": ("studies.pileup", "35pu0031 35pu0058 35pu0059", {}),
    "sbm/40_fastrg": ("sbm.sampling", "7cffa04a 21fc250e 40real01 40real02 40real03 40real04 40real05 f85bed05 40libs01 40libs02 cd1104b7 40grow01", {}),
    "sbm/41_attention": ("sbm.attention", "d017d338 2d364dd9 41real01 41real02 41real03 41real04 41real05 9f76c5b6 41layr02", {}),
    "sbm/42_models": ("sbm.models", "04ff7d53 341fddd1", {}),
    "sbm/45_lra": ("studies._arena", "5054adb1 3ce869b5 45pap002 274ee07f 45cos001 0be254a9 8be2e271 45cos002", {}),
    "sampled/50_cycles": ("sampled.cycles", "74989855 0070eb36 797caf85", {"random_qkv": float_qkv}),
    "sampled/51_attention": ("sampled.attention", "a997ccf9 2782f2dd 51real01 51real02 51real03 51real04 51real05 cc69bde1", {}),
    "sampled/54_shapes": ("studies.sampled_shapes", "bb2f8bf2 47200fc8 054f3e08 54budg01 77e01783 998ffa7b", {}),
    "sampled/56_sets": ("studies.sets", "f5a66417 3faa5422", {}),
    "sampled/57_autoencoder": ("sampled.autoencoder", "5efe457e 98a091e8", {}),
    "pat/60_layers": ("pat.layers", "5625ed8a 8e1e4f71 60real02 60real03 4402d203", {}),
    "pat/62_shapes": ("studies.pat_shapes", "aae908e5 b032c29a cdade614 0a654c3d d62bee7c", {"megabytes": id}),
    "pat/64_gestures": ("studies.gestures", "f8637258 799dac4b 4d9514ca 6409001e 89702f53 5111679a c4fccccc", {}),
    "samsa/70_sampling": ("samsa.sampling", "e35c0681 317b7f20 70real01 70real02 70real03 70real04 70real05 593ea976", {}),
    "samsa/71_attention": ("samsa.attention", "6126ca17 f36264cc b3c98ae6 71real01 71real02 71real03 71real04 71real05 71real06 e6b00f4a", {}),
    "samsa/73_lra": ("studies._arena", "61fb340f 6236bf53 73stu034 e6614f27 fc3ac365 33d45765", {}),
    "samsa/74_peptides": (
        "studies.peptides", "5537af6a faa377e2 b4a68f63 06b57263 a68887ef d5c115f5 a361a0ed",
        {"tested": load_peptides("toy_func", split="test"), "shape": {"dim": 16, "depth": 2, "heads": 2}},
    ),
    "samsa/75_shapes": (
        "studies.samsa_shapes", "44fa8f26 fc013f73 e0d728fe 6fa7e27a ddb051c3 e0ceabd5 a5aad5bb 8dae986d", {}
    ),
}

# contenders that are computed on a processor in practice, and here too
ENCODINGS = ("LapPE", "RWPE")


def on_the_gpu(function):
    found = [x for x in tree_leaves(function()) if isinstance(x, torch.Tensor)]
    assert found and all(x.is_cuda for x in found)


def compared(functions, *args, clock="wall", **options):
    """Each contender once; no time is taken."""
    assert clock == "wall"
    for name, function in functions.items():
        if not name.startswith(ENCODINGS):
            on_the_gpu(function)
    columns = ["median", "q25", "q75", "speedup", "speedup_q25", "speedup_q75", "repeats"]
    return pd.DataFrame(1.0, index=pd.Index(functions, name="name"), columns=columns)


def weighed(function, *, device="cpu"):
    assert torch.device(device).type == "cuda"
    on_the_gpu(function)
    return 2**20


def limits(threads=None, device="cpu"):
    assert torch.device(device).type == "cuda"
    return measure.Ceilings(1e9, 1e9, 1e9, 0, "cuda")


@pytest.mark.parametrize("notebook", COSTS)
def test_costs_are_those_of_the_device(notebook, monkeypatch):
    module, ids, names = COSTS[notebook]
    tables = []
    run = SimpleNamespace(scale="smoke", device=torch.device("cuda"), pick=partial(lab_run.pick, "smoke"), seed=0)
    run.folder, run.data = None, print
    run.table = lambda frame, name, **_: tables.append(frame) or frame
    monkeypatch.setattr(lab_run, "start", lambda *args, **options: run)
    for name, replaced in (("compare", compared), ("peak_memory", weighed), ("machine_ceilings", limits)):
        monkeypatch.setattr(measure, name, replaced)
    cells = json.loads((NBS / f"{notebook}.ipynb").read_text(encoding="utf-8"))["cells"]
    source = {cell["id"]: "".join(cell["source"]) for cell in cells}
    space = dict(vars(importlib.import_module(f"sparseattn.{module}")), scale="smoke", run=run, **names)
    with pretend_gpu():
        for cell in ids.split():
            exec(source[cell], space)
        made = [*tables, *(pd.DataFrame(space.get(name, [])) for name in ("rows", "times", "memories"))]
    timed = [frame.set_index("name") if "name" in frame else frame for frame in made if "device" in frame]
    timed = [frame[frame["status"] == ""] if "status" in frame else frame for frame in timed]  # rows nothing was run for
    assert timed
    for frame in timed:
        on_processor = frame.index.astype(str).str.startswith(ENCODINGS)
        assert (frame["device"] == np.where(on_processor, "cpu", "cuda")).all()
