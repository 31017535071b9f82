"""Fixtures for the tests of the collection: a small one in a folder of its own, and this one, executed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded
import torch

ROOT = Path(__file__).parent.parent
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything loads Triton, which torch alone does not
sys.path.insert(0, str(ROOT / "workflow"))

# The longest first, so that two processes end together.
LONGEST = ["test_collection.py", "test_command.py", "test_workflow.py", "test_rehearsal.py", "test_large_scales.py",
           "test_costs_device.py", "test_package.py", "test_layer.py", "test_measure.py", "test_native.py"]


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONGEST.index(item.path.name) if item.path.name in LONGEST else len(LONGEST))


HELPERS = """#| export
import csv, json
from pathlib import Path


def finish(stem, scale, value):
    "A table, a claim and run.json, as sparseattn.lab.run leaves them."
    folder = Path("build") / scale / "figures" / stem
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "table.csv").write_text(f"value,scale\\n{value},{scale}\\n")
    (folder / "claims.csv").write_text(f"id,statement,verdict,notebook\\nX-{stem},value is {value},holds,{stem}\\n")
    (folder / "run.json").write_text(json.dumps(dict(scale=scale, device="cpu")))"""

COLLECTION = {
    "core/00_tools": ["#| default_exp core.tools", HELPERS],
    "data/10_numbers": ["#| default_exp data.numbers", "#| export\ndef number():\n    return 3"],
    "hept/30_one": [
        ("parameters", 'scale = "smoke"'),
        "from sparseattn.core.tools import finish",
        "print('one')\n1 + 1",
        "finish('30_one', scale, 1)",
    ],
    "hept/31_two": [
        ("parameters", 'scale = "smoke"'),
        "from sparseattn.core.tools import finish\nfrom sparseattn.data.numbers import number",
        "number()",
        "finish('31_two', scale, number())",
    ],
    "atlas/92_claims": [
        ("parameters", 'scale = "smoke"'),
        "from pathlib import Path\nfrom sparseattn.core.tools import finish",
        "finish('92_claims', scale, 0)\nhere = Path('build') / scale / 'figures'\n"
        "rows = [p.read_text().splitlines()[1] for p in sorted(here.glob('3*/claims.csv'))]\n"
        "(here / '92_claims/claims.csv').unlink()\n"
        "(here / '92_claims/ledger.csv').write_text('\\n'.join(['id,statement,verdict,notebook', *rows, '']))\n"
        "(here / '92_claims/readme.md').write_text(f'{len(rows)} claims\\n')",
    ],
}


#: an environment in which the small collection finds its own package and no other
OWN_PACKAGE = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

#: the command line of the studies, with trainings that count to ten
STUDIES = """import argparse, importlib, json, os, sys, time
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("names", nargs="*")
for option in ("--scale", "--units", "--unit", "--device"):
    parser.add_argument(option)
parser.add_argument("--budget", type=float, default=9e9)
parser.add_argument("--retrain", action="store_true")
args = parser.parse_args()


def record(study, unit):
    return Path(f"figures/{study}/runs/{args.scale}/{unit}.json")


def made_on(path):
    return json.loads(path.read_text())["finished"][:10] if path.exists() else ""


def listed(study):
    "A unit: what it does, records it needs, minutes, and why it cannot be trained."
    for unit, (_, needs, minutes, why) in importlib.import_module(f"sparseattn.studies.{study}").STUDY.items():
        needs = [record(study, name).as_posix() for name in needs]
        yield {"study": study, "unit": unit, "record": record(study, unit).as_posix(), "needs": needs,
               "minutes": minutes, "gpu": args.scale == "gpu", "why not": why, "environment": {"MALLOC_TOP_PAD_": "9"},
               "made": made_on(record(study, unit))}


if args.units:
    Path(args.units).write_text(json.dumps([unit for name in args.names for unit in listed(name)]))
    sys.exit()
study, began = args.names[0], time.time()
what = importlib.import_module(f"sparseattn.studies.{study}").STUDY[args.unit][0]
kept = Path(f"build/{args.scale}/studies/{study}/{args.unit}.step")
kept.parent.mkdir(parents=True, exist_ok=True)
if args.retrain:
    kept.unlink(missing_ok=True)
first = step = int(kept.read_text()) if kept.exists() else 0
while step < 10:
    if time.time() - began > 60 * args.budget:
        sys.exit(75)
    if what == "fails" and step == 3:
        raise ArithmeticError("the loss is not finite")
    if what == "killed" and step == 3:
        os.kill(os.getpid(), 9)
    while step > first and Path("hold").exists():  # a test looks at it in the middle
        time.sleep(0.1)
    time.sleep(1.0 if what == "slow" else 0.01)
    step += 1
    kept.write_text(str(step))
    print("step", step, flush=True)
done = record(study, args.unit)
done.parent.mkdir(parents=True, exist_ok=True)
done.write_text(json.dumps(dict(finished="2026-11-22T10:00:00Z", first=first, environment=dict(os.environ))))
"""

#: a notebook that shows what a study has trained
TRAINED = [
    "#| default_exp studies.toy",
    ("parameters", 'scale = "smoke"'),
    "import json\nfrom pathlib import Path\nfrom sparseattn.core.tools import finish",
    "#| export\nSTUDY = {units}",
    "records = sorted(Path(f'figures/toy/runs/{scale}').glob('*.json'))\nprint([p.stem for p in records])",
    "finish('33_trained', scale, ' '.join(p.stem for p in records))",
]


class Collection:
    """A copy of the workflow with a few notebooks that run in seconds."""

    def __init__(self, root: Path):
        self.root = root
        shutil.copytree(ROOT / "workflow", root / "workflow", ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "settings.ini"):
            shutil.copy(ROOT / name, root / name)
        (root / "README.md").write_text("# Small\n\n<!-- ledger:begin -->\nold\n<!-- ledger:end -->\nend\n")
        (root / "sparseattn/lab").mkdir(parents=True)
        shutil.copy(ROOT / "sparseattn/lab/__init__.py", root / "sparseattn/lab")  # the scales
        (root / "sparseattn/__init__.py").write_text('__version__ = "0"\n')
        for key, cells in COLLECTION.items():
            self.write(key, cells)

    def write(self, key: str, cells: list) -> None:
        """Write a notebook; a cell is its source, or (tag, source)."""
        made = [dict(cell_type="markdown", id="title000", metadata={}, source=[f"# {key}\n", "\n", "> A page."])]
        for number, cell in enumerate(cells):
            tag, source = cell if isinstance(cell, tuple) else ("", cell)
            made.append(
                dict(
                    cell_type="code",
                    id=hashlib.sha1(f"{number}".encode()).hexdigest()[:8],
                    execution_count=None,
                    outputs=[],
                    metadata={"tags": [tag]} if tag else {},
                    source=source.splitlines(keepends=True),
                )
            )
        kernel = dict(display_name="python3", language="python", name="python3")
        path = self.root / f"nbs/{key}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        notebook = dict(cells=made, metadata=dict(kernelspec=kernel), nbformat=4, nbformat_minor=5)
        path.write_text(json.dumps(notebook, indent=1, sort_keys=True) + "\n")

    def write_study(self, key: str = "hept/33_trained", **units: tuple) -> None:
        """Write a study and its notebook; a unit is what it does, records it needs, minutes, and why it cannot."""
        self.write(key, [cell.replace("{units}", repr(units)) if isinstance(cell, str) else cell for cell in TRAINED])
        (self.root / "sparseattn/studies").mkdir(exist_ok=True)
        (self.root / "sparseattn/studies/__init__.py").touch()
        (self.root / "sparseattn/studies/__main__.py").write_text(STUDIES)

    def copy(self, root: Path) -> Collection:
        """The same in another folder, file times kept."""
        shutil.copytree(self.root, root)
        other = Collection.__new__(Collection)
        other.root = root
        return other

    def edit(self, key: str, old: str, new: str) -> None:
        """Replace a text in a notebook."""
        path = self.root / f"nbs/{key}.ipynb"
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def command(self, *options: str) -> list[str]:
        """The command line of a reproduction."""
        return [sys.executable, str(self.root / "workflow/reproduce.py"), "--cores", "2", *options]

    def run(self, *options: str) -> subprocess.CompletedProcess:
        """Reproduce."""
        return subprocess.run(self.command(*options), capture_output=True, text=True, timeout=300, env=OWN_PACKAGE)

    def times(self, scale: str = "smoke") -> dict[str, int]:
        """When each notebook succeeded."""
        build = self.root / "build" / scale / "executed"
        return {p.relative_to(build).as_posix().split(".")[0]: p.stat().st_mtime_ns for p in build.rglob("*.done")}


@pytest.fixture
def collection(tmp_path) -> Collection:
    """A small collection in an empty folder."""
    return Collection(tmp_path)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Collection:
    """A small collection that has been run at smoke scale; leave it as it is."""
    small = Collection(tmp_path_factory.mktemp("finished"))
    small.first = small.run()
    return small


@pytest.fixture(scope="session")
def executed() -> subprocess.CompletedProcess:
    """Every notebook of this collection, executed at smoke scale as the command does it; what is up to date stays."""
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    return subprocess.run(
        [sys.executable, str(ROOT / "workflow/reproduce.py"), "--no-export"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )


COMPILER = r"""
import re, subprocess, tempfile
from pathlib import Path

import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


def compiled(kernel, processor, types, constants, code="ptx", **options):
    "A kernel for NVIDIA, in assembly or binary; an argument without a type is a row of float32."
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    names = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names}
    places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature=names, constexprs=places)
    return triton.compile(source, target=GPUTarget("cuda", processor, 32), options=options).asm[code]


def stack(kernel, *args, **options):
    "Bytes a thread keeps in memory since its registers hold no more."
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled(kernel, *args, code="cubin", **options))
        reader = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        said = subprocess.run([reader, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:([0-9]+)", said)[1])


"""


@pytest.fixture
def compile_without_gpu(tmp_path, monkeypatch):
    """A function that runs a script without Triton's interpreter; `compiled` in it compiles a kernel."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def compiles(script):
        command = [sys.executable, "-c", f"{COMPILER}{script}\nprint('compiled')"]
        run = subprocess.run(command, capture_output=True, text=True)
        if "ptxas" in run.stderr and "not found" in run.stderr.lower():
            pytest.skip("Triton came without NVIDIA's assembler")
        assert run.stdout == "compiled\n", run.stderr[-3000:]

    return compiles
