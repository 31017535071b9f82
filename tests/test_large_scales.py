"""Notebooks that read records, at large scales: no branch, and no missing record, is met first on a GPU.

By default three notebooks stand for the fifteen, in about a minute: one with tables of its own, one with those of
`lab.classify`, and one of few rows. `REHEARSE=all pytest tests/test_large_scales.py` rehearses all, in half an hour.
"""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import graph
import pytest

ROOT = Path(__file__).parent.parent
ALL = os.environ.get("REHEARSE") == "all"


def readers():
    """Keys of the notebooks that read records."""
    imports = graph.Imports(ROOT)
    return [key for key, n in graph.find_notebooks(ROOT).items() if n.has_parameters and imports.studies(n)]


CHOSEN = readers() if ALL else ["sampled/56_sets", "pat/63_scenes", "samsa/76_conformers"]


def rehearse(key, scale, there, folder):
    """What the notebook printed, and its folder of results."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARSEATTN")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, ROOT / "tests/rehearse.py", key, scale, folder, there]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    results = folder / "figures" / key.split("/")[1]
    made = json.loads((results / "run.json").read_text())
    assert made["scale"] == scale and made["device"].startswith("cpu")
    return done.stdout, results


@pytest.mark.parametrize("key", CHOSEN)
def test_rehearsal_at_paper_scale(key, tmp_path):
    """Sizes of smoke scale, two steps a training; claims are decided as they would be."""
    rehearse(key, "paper", "all", tmp_path)


@pytest.mark.parametrize("there", ["none", "floors", "some", "second"] if ALL else ["none"])
@pytest.mark.parametrize("key", CHOSEN)
def test_a_page_is_whole_where_records_are_missing(key, there, tmp_path):
    """Tables have their columns, a line says how to train, and no training decides a claim where there is none."""
    printed, results = rehearse(key, "gpu", there, tmp_path)
    assert there == "second" or "python -m sparseattn.studies" in printed
    for table in results.glob("*.csv"):
        assert table.read_text().splitlines()[0].strip(), table.name
    claims = list(csv.DictReader((results / "claims.csv").open()))
    assert there in ("some", "second") or "training" not in {claim["decided"] for claim in claims}


def test_a_floor_without_a_record_is_cleared_by_no_row(tmp_path):
    """A page with an experiment of its own, its rules, and one row: what is trained without attention is missing."""
    _, results = rehearse("sampled/56_sets", "gpu", "some", tmp_path)
    lines = {line["row"]: line for line in csv.DictReader((results / "table8.csv").open())}
    assert "no attention in the encoder (no record)" in lines["two random keys"]["clears"]
    assert not lines["two random keys"]["LL0"] and lines["two random keys"]["withheld"]
