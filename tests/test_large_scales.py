"""Every notebook that reads records, at the scale that takes all its branches: none is met first on a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import graph
import pytest

ROOT = Path(__file__).parent.parent
IMPORTS = graph.Imports(ROOT)
READERS = [key for key, n in graph.find_notebooks(ROOT).items() if n.has_parameters and IMPORTS.studies(n)]


@pytest.mark.parametrize("key", READERS)
def test_rehearsal_at_paper_scale(key, tmp_path):
    """Sizes of smoke scale, two steps a training; claims are decided as they would be."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARSEATTN")}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), environment.get("PYTHONPATH", "")])
    command = [sys.executable, ROOT / "tests/rehearse.py", key, "paper", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    made = json.loads((tmp_path / "figures" / key.split("/")[1] / "run.json").read_text())
    assert made["scale"] == "paper" and made["device"].startswith("cpu")
