"""The collection: every notebook executes, derived files are in sync, the commands do what they say."""

from __future__ import annotations

import ast
import csv
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import time
import tomllib
import zipfile
from configparser import ConfigParser
from importlib import metadata
from pathlib import Path

import compare
import graph
import publish
import pytest
import torch
import yaml
from conftest import COLLECTION, OWN_PACKAGE
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from sparseattn.lab.run import notebook_hash

ROOT = Path(__file__).parent.parent
NOTEBOOKS = graph.find_notebooks(ROOT)
IMPORTS = graph.Imports(ROOT)
BIN = Path(sys.executable).parent
PAPERS = {"hept", "sbm", "sampled", "pat", "samsa", "baselines"}
each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS.values(), ids=list(NOTEBOOKS))


def stored(notebook: graph.Notebook) -> dict:
    """The notebook's JSON."""
    return json.loads((ROOT / notebook.path).read_text(encoding="utf-8"))


def settings() -> dict[str, str]:
    """settings.ini."""
    config = ConfigParser(delimiters=["="])
    config.read(ROOT / "settings.ini", encoding="utf-8")
    return dict(config["DEFAULT"])


def tree(*folders: Path) -> dict[str, bytes]:
    """Every file below the folders."""
    skip = ("__pycache__", ".ipynb_checkpoints")
    return {
        p.as_posix(): p.read_bytes()
        for f in folders
        for p in sorted(f.rglob("*"))
        if p.is_file() and not set(skip) & set(p.parts)
    }


# ---- the notebooks


@each_notebook
def test_executes(notebook, executed):
    log = ROOT / notebook.log("smoke")
    digest = graph.digest(graph.fingerprint(ROOT, notebook, IMPORTS))
    if not all((ROOT / product).exists() for product in notebook.products("smoke", digest)):
        pytest.fail(
            log.read_text(encoding="utf-8")
            if log.exists()
            else f"not run; the reproduction said:\n{executed.stdout[-3000:]}",
            pytrace=False,
        )
    assert json.loads(log.with_suffix(".json").read_text(encoding="utf-8"))["status"] == "done"


def test_compiled_loops_are_shown_without_a_compiler(tmp_path):
    script = "import plain; from pathlib import Path; plain.execute(*map(Path, {0}), {{}}, Path())".format(
        ("nbs/core/06_native.ipynb", str(tmp_path / "executed.ipynb")))
    environment = os.environ | {"CC": "", "PYTHONPATH": os.pathsep.join([str(ROOT / "workflow"), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "no C compiler here" in (tmp_path / "executed.ipynb").read_text(encoding="utf-8")


def test_a_run_without_jupyter_shows_claims_too(tmp_path):
    """At the end of every cell from the one on that starts the run."""
    source = ["class Run:\n    def show_claims(self):\n        print('H-3.4-UB1')", "run = Run()", "1 + 1"]
    cells = [dict(cell_type="code", id=f"c{i}", metadata={}, source=s, outputs=[]) for i, s in enumerate(source)]
    (tmp_path / "page.ipynb").write_text(json.dumps(dict(cells=cells, metadata={}, nbformat=4, nbformat_minor=5)))
    script = "import plain; from pathlib import Path; plain.execute(*map(Path, {0}), {{}}, Path())".format(
        (str(tmp_path / "page.ipynb"), str(tmp_path / "executed.ipynb")))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "workflow"), str(ROOT)])}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    cells = json.loads((tmp_path / "executed.ipynb").read_text(encoding="utf-8"))["cells"]
    assert ["H-3.4-UB1" in json.dumps(cell["outputs"]) for cell in cells] == [False, True, True]


def test_reproduction_ends_well_with_a_page(executed):
    assert executed.returncode == 0, executed.stdout[-3000:] + executed.stderr[-1000:]
    page = (ROOT / "build/smoke/index.html").read_text(encoding="utf-8")
    for notebook in NOTEBOOKS.values():
        assert f'href="html/{notebook.key}.html"' in page and (ROOT / f"build/smoke/html/{notebook.key}.html").exists()
    for link in re.findall(r'(?:href|src)="([^"#:]+)"', page):
        assert (ROOT / "build/smoke" / link).exists(), link


COMPARED = compare.compared(
    list(NOTEBOOKS.values()), publish.settings()["whole_machine"], publish.settings()["ledger"]
)


@pytest.mark.parametrize("notebook", COMPARED, ids=[n.key for n in COMPARED])
def test_smoke_run_agrees_with_the_committed_results(notebook, executed):
    """What neither a training nor a clock nor a setting of the scale decides comes out as it was committed."""
    folders = ROOT / "build/smoke/figures" / notebook.stem, ROOT / "figures" / notebook.stem
    assert not compare.unknown_settings(notebook)
    wrong = [f"{t.name}: {t.wrong}" for t in compare.compare(notebook, *folders) if t.wrong]
    assert not wrong, f"{wrong}; changed since: {graph.stale(ROOT, ROOT / 'figures').get(notebook.stem)}"


@each_notebook
def test_kernel_and_cell_ids(notebook):
    content = stored(notebook)
    assert content["metadata"]["kernelspec"]["name"] == "python3"
    ids = [cell["id"] for cell in content["cells"]]
    assert len(set(ids)) == len(ids)
    tags = [tag for _, tags, _ in notebook.cells for tag in tags.split()]
    assert "injected-parameters" not in tags


@each_notebook
def test_parameters_cell(notebook):
    """One cell of literals, with the scale, in every notebook that starts a run; lab/ only shows how that works."""
    source = "\n".join(s for kind, _, s in notebook.cells if kind == "code")
    starts = notebook.chapter != "lab" and re.search(r"(?<![.\w])start\(", source)
    cells = [s for _, tags, s in notebook.cells if "parameters" in tags.split()]
    assert len(cells) == bool(starts)
    for cell in cells:
        body = ast.parse(cell).body
        values = {node.targets[0].id: ast.literal_eval(node.value) for node in body}  # raises for anything but literals
        assert values["scale"] == "smoke"
        assert "run.finish()" in source and re.search(rf"start\(\s*[\"']{notebook.stem}[\"']", source)


@each_notebook
def test_stored_outputs(notebook):
    """No traceback, no path of anybody's machine."""
    for number, cell in enumerate(stored(notebook)["cells"], 1):
        publish.check_outputs(f"cell {number}", cell.get("outputs", []))
        assert cell.get("execution_count") is None


@each_notebook
def test_starts_with_a_title_and_a_sentence(notebook):
    kind, _, source = notebook.cells[0]
    assert kind == "markdown" and re.match(r"# .+\n\n> .+[.?!]", source), source[:80]


# ---- what is derived from the notebooks


def test_export_and_clean_change_nothing(tmp_path):
    for name in ("nbs", "sparseattn"):
        shutil.copytree(
            ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints")
        )
    for name in ("pyproject.toml", "settings.ini"):
        shutil.copy(ROOT / name, tmp_path / name)
    before = tree(tmp_path / "nbs", tmp_path / "sparseattn")
    for command in ("nbdev-export", "nbdev-clean"):
        subprocess.run([BIN / command], cwd=tmp_path, check=True, capture_output=True)
    after = tree(tmp_path / "nbs", tmp_path / "sparseattn")
    changed = [
        Path(p).relative_to(tmp_path).as_posix()
        for p in sorted(before.keys() | after.keys())
        if before.get(p) != after.get(p)
    ]
    assert not changed


def test_no_stale_module():
    exported = {f"{n.module}" for n in NOTEBOOKS.values() if n.module}
    generated = {
        ".".join(p.relative_to(ROOT).with_suffix("").parts)
        for p in (ROOT / "sparseattn").rglob("*.py")
        if "AUTOGENERATED!" in p.read_text(encoding="utf-8")[:300] and p.name != "_modidx.py"
    }
    assert exported == generated


def _floor(module: str) -> str:
    return module.split(".")[1] if module.count(".") else ""


@pytest.mark.parametrize("module", sorted(n.module for n in NOTEBOOKS.values() if n.module))
def test_floors(module):
    """core imports nothing of ours, the papers and testing core only, data and lab neither papers nor each other.

    A study is a roof: it puts a paper's network, data and lab together, and no other study.
    """
    name = IMPORTS.file(module)
    source = (ROOT / name).read_text(encoding="utf-8")
    tree_ = graph.Notebook(name, "", "", "", "", None, False, (("code", "", _absolute(source, module)),))
    floor, used = _floor(module), {_floor(m) for m in IMPORTS.imported(tree_)} - {""}
    allowed = {floor} | ({"core"} if floor in PAPERS | {"data", "lab", "studies", "testing"} else set())
    if floor == "studies":
        allowed |= PAPERS | {"data", "lab"}
    assert used <= allowed, f"{module} imports {sorted(used - allowed)}"


def _absolute(source: str, module: str) -> str:
    """Relative imports written out."""
    parent = module.split(".")[:-1]

    def full(match: re.Match) -> str:
        up = parent[: len(parent) - len(match[2]) + 1]
        return f"{match[1]}from {'.'.join(up + [match[3]] if match[3] else up)} import"

    return re.sub(r"^( *)from (\.+)([\w.]*) import", full, source, flags=re.M)  # inside functions too


def test_metadata_agree():
    ini, nbdev = settings(), tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["nbdev"]
    for key in ("lib_path", "nbs_path", "tst_flags"):
        assert nbdev[key] == ini[key]
    assert nbdev["allowed_cell_metadata_keys"] == ini["allowed_cell_metadata_keys"].split()
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "sparseattn/__init__.py").read_text(encoding="utf-8"), re.M)[
        1
    ]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert ini["version"] == version == citation["version"]
    assert len(citation["references"]) == 5


def test_constraints_pin_everything():
    """Every requirement of the extras, and all that those bring, has one exact version that the requirement admits."""
    lines = [
        line
        for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
        if line and not line.startswith("#")
    ]
    pins = dict(line.split("==") for line in lines)
    pins = {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pins.items()}
    todo = [
        Requirement(text) for key, value in settings().items() if key.endswith("requirements") for text in value.split()
    ]
    seen = set()
    while todo:
        requirement = todo.pop()
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert name in pins, f"{requirement} is not pinned"
        assert requirement.specifier.contains(Version(pins[name]), prereleases=True), (
            f"{requirement} excludes {pins[name]}"
        )
        if (name, *sorted(requirement.extras)) in seen or name == "torch":
            continue
        seen.add((name, *sorted(requirement.extras)))
        try:
            below = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            assert name == "pythia8mc"  # the extra that a machine may lack
            continue
        for text in below:
            inner = Requirement(text)
            if inner.marker is None or any(inner.marker.evaluate({"extra": e}) for e in {"", *requirement.extras}):
                todo.append(inner)


def test_oldest_python():
    """scripts, metadata, README, ruff and CI name one oldest Python: the one that the pinned versions need."""
    setup = (ROOT / "scripts/setup.sh").read_text(encoding="utf-8")
    oldest = re.search(r"sys\.version_info < \((\d+), (\d+), (\d+)\)", setup).groups()
    minor, exact, older = ".".join(oldest[:2]), ".".join(oldest), ".".join([*oldest[:2], str(int(oldest[2]) - 1)])
    for text in (setup, (ROOT / "README.md").read_text(encoding="utf-8")):
        assert f"Python {exact} or newer" in text
    assert settings()["min_python"] == minor
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert tools["ruff"]["target-version"] == f"py{minor.replace('.', '')}"
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    tested = [job["python"] for job in jobs["test"]["strategy"]["matrix"]["include"]]
    assert min(tested, key=Version) == minor
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    there = {found.name.lower(): found for found in metadata.distributions()}
    needs = [there[name.lower()].metadata["Requires-Python"] for name in pins if name.lower() in there]
    needs = [SpecifierSet(need) for need in needs if need]
    assert len(needs) > 50 and all(need.contains(exact) for need in needs)
    assert not all(need.contains(older) for need in needs)


def test_oldest_torch():
    """The requirement, what setup.sh takes over, and the oldest that is tested are one version."""
    requirement = next(r for r in map(Requirement, settings()["requirements"].split()) if r.name == "torch")
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    tested = [Version(job["torch"]) for job in jobs["test"]["strategy"]["matrix"]["include"]]
    setup = (ROOT / "scripts/setup.sh").read_text(encoding="utf-8")
    major, minor = re.search(r"torch\.__version__.*>= \((\d+), (\d+)\)", setup).groups()
    assert str(requirement.specifier) == f">={major}.{minor}" and min(tested) == Version(f"{major}.{minor}.0")


def test_workflow_settings_name_notebooks():
    stems = {n.stem for n in NOTEBOOKS.values()}
    assert set(publish.settings()["whole_machine"]) <= stems


def test_nothing_names_a_private_path():
    """No file of the repository names the place of a checkout, of an environment or of somebody's home."""
    private = [str(ROOT) + "/", str(Path.home()) + "/", "/".join(["", "work", "shared"]), "/".join(["", "work", "tmp"])]
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    names = (
        listed.stdout.split("\n")[:-1]
        if listed.returncode == 0
        else [p for p in tree(ROOT) if not {".venv", "build", ".snakemake", ".git"} & set(Path(p).parts)]
    )
    for name in names:
        path = ROOT / name
        if path.is_file() and path.suffix not in (".png", ".npz", ".gz"):
            text = path.read_text(encoding="utf-8")
            assert not [p for p in private if p in text], name


def test_lint():
    done = subprocess.run([sys.executable, "-m", "ruff", "check", "sparseattn", "tests", "workflow"], cwd=ROOT,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:]


# ---- README and the committed results


def test_readme_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for command in ("bash scripts/reproduce.sh", "bash scripts/test.sh"):
        assert command in text and (ROOT / command.split()[1]).exists()
    assert "bash scripts/test.sh" in (ROOT / ".ci/run").read_text(encoding="utf-8")
    for path in re.findall(r"\]\(([^)#:]+)\)|src=\"([^\":]+)\"", text):
        assert (ROOT / (path[0] or path[1])).exists(), path


needs_results = pytest.mark.skipif(
    not (ROOT / "figures/MANIFEST.json").exists(), reason="no results have been committed yet"
)


@needs_results
def test_readme_block():
    config = publish.settings()
    block = (ROOT / "figures" / config["ledger"] / config["ledger_readme"]).read_text(encoding="utf-8")
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert publish.with_block(text, block) == text


@needs_results
def test_manifest():
    assert (ROOT / "figures/MANIFEST.json").read_text(encoding="utf-8") == publish.manifest(ROOT / "figures")


@needs_results
def test_results_older_than_their_code_are_listed():
    """Stale results are allowed, unmarked ones are not: figures/stale.csv names each with what changed since."""
    listed = (ROOT / "figures/stale.csv").read_text(encoding="utf-8")
    assert listed == graph.stale_text(ROOT), "run: python workflow/publish.py lists"


@needs_results
def test_ledger():
    """figures/claims.csv holds the claims of all notebooks, each once."""
    ledger = list(csv.DictReader((ROOT / "figures/claims.csv").open(newline="", encoding="utf-8")))
    parts = [
        row
        for p in (ROOT / "figures").glob("*/claims.csv")
        for row in csv.DictReader(p.open(newline="", encoding="utf-8"))
    ]
    ids = [row["id"] for row in ledger]
    assert len(set(ids)) == len(ids)
    assert {r["id"]: r["verdict"] for r in ledger} == {r["id"]: r["verdict"] for r in parts}


@needs_results
@pytest.mark.parametrize(
    "notebook",
    [n for n in NOTEBOOKS.values() if n.has_parameters],
    ids=[k for k, n in NOTEBOOKS.items() if n.has_parameters],
)
def test_committed_results(notebook):
    """Made at a scale worth committing, from the notebook as it is, and complete."""
    folder = ROOT / "figures" / notebook.stem
    run = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert run["scale"] in graph.SCALES[1:]
    assert run["notebook_sha256"] == notebook_hash(ROOT / notebook.path)
    assert {notebook.path.as_posix(), "sparseattn/lab/run.py"} <= run["sources"].keys()
    files = [p for p in folder.iterdir() if p.is_file() and p.name != "run.json"]
    files = {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in files}
    assert files == run["files"]
    for cell in stored(notebook)["cells"]:
        pictures = set(re.findall(r'run\.figure\(\w+, "(\w+)"\)', "".join(cell["source"])))
        if {f"{name}.png" for name in pictures} & files.keys():
            assert any("image/png" in o.get("data", {}) for o in cell["outputs"]), f"{pictures}: written, not shown"
    publish.check_folder(folder)


@needs_results
@pytest.mark.parametrize("key", [key for key, notebook in NOTEBOOKS.items() if not notebook.has_parameters])
def test_outputs_of_pages_without_results(key):
    """They come from the code that stands above them."""
    made = json.loads((ROOT / "figures" / publish.EXECUTED).read_text(encoding="utf-8"))
    assert made.get(key) == graph.code_hash(NOTEBOOKS[key]), "edited since: execute and publish it"


# ---- the command


def reproduce(*options: str) -> subprocess.CompletedProcess:
    """scripts/reproduce.sh as a user calls it, with arguments that stop it before anything is installed or run."""
    return subprocess.run(
        ["bash", "scripts/reproduce.sh", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=dict(os.environ, PYTHON=sys.executable),
    )


@pytest.mark.parametrize(
    "options, message",
    [
        (["--scale", "huge"], "'huge' (choose from"),
        (["--only", "nix"], "unknown chapter 'nix'; choose one of: "),
        (["--frobnicate"], "unrecognized arguments: --frobnicate"),
        (["--sca", "cpu"], "unrecognized arguments: --sca"),
        (["--cores", "0"], "argument --cores"),
        (["--cores", "two"], "argument --cores"),
        (["cpu"], "unrecognized arguments: cpu"),
        (["--scale", "cpu", "--budget", "soon"], "argument --budget: expected minutes, a number from 0 on, got 'soon'"),
        (["--scale", "cpu", "--budget", "-1"], "argument --budget: expected minutes, a number from 0 on, got '-1'"),
        (["--budget", "0"], "argument --budget: at smoke scale"),
        (["--retrain"], "argument --retrain: at smoke scale"),
        (["--profile", "nix"], "argument --profile: there is no folder 'nix'"),
        (["--packages", "nix"], "argument --packages: there is no folder 'nix'"),
    ],
)
def test_wrong_arguments(options, message):
    done = reproduce(*options)
    assert done.returncode == 2 and message in done.stderr.replace("choose from smoke", "choose from 'smoke")
    if "--only" in options:
        assert all(c in done.stderr for c in graph.chapters(NOTEBOOKS))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("scale", ["gpu", "paper"])
def test_scale_without_its_device(scale, monkeypatch):
    import reproduce as driver

    monkeypatch.delenv("SPARSEATTN_DEVICE", raising=False)
    done = reproduce("--scale", scale)
    assert done.returncode == 2 and f"scale {scale} needs a CUDA device" in done.stderr
    assert driver.main(["--scale", scale]) == 2 and driver.main(["--scale", scale, "--check", "--dry-run"]) == 0
    monkeypatch.setenv("SPARSEATTN_DEVICE", "cpu")
    assert driver.main(["--scale", scale, "--check"]) == 0


def test_rehearsals_are_not_published(tmp_path):
    (tmp_path / "run.json").write_text('{"scale": "gpu", "device": "cpu, 2 cores"}')
    with pytest.raises(publish.Refused, match="made on a CPU: a rehearsal"):
        publish.check_folder(tmp_path)
    (tmp_path / "run.json").write_text('{"scale": "gpu", "device": "NVIDIA H100"}')
    publish.check_folder(tmp_path)


def test_help_names_scales():
    done = reproduce("--help")
    assert done.returncode == 0 and all(s in done.stdout for s in graph.SCALES)


def test_dry_run_shows_the_plan_and_runs_nothing(collection):
    done = collection.run("--dry-run")
    assert done.returncode == 0
    for key in graph.find_notebooks(collection.root):
        assert key in done.stdout
    assert not collection.times()
    done = collection.run("--dry-run", "--only", "hept", "--scale", "cpu")
    assert "hept/30_one" in done.stdout and "atlas/92_claims" in done.stdout and "core/00_tools" not in done.stdout
    assert not (collection.root / "figures").exists()


def test_smoke_run_shows_progress_and_leaves_the_tree_alone(finished):
    assert finished.first.returncode == 0, finished.first.stdout
    assert re.search(r"hept/31_two done in \d+ s  \(\d of 6\)", finished.first.stdout)
    assert finished.times().keys() == COLLECTION.keys()
    assert not (finished.root / "figures").exists()
    assert "old" in (finished.root / "README.md").read_text()
    assert '"outputs": []' in (finished.root / "nbs/hept/30_one.ipynb").read_text()
    page = (finished.root / "build/smoke/index.html").read_text()
    assert "Ledger: 2 claims" in page and 'id="failed"' not in page
    assert "Changed since the committed results" not in page  # there are none


def test_second_run_does_nothing(finished):
    before = finished.times()
    assert finished.run().returncode == 0
    assert finished.times() == before


def test_data_notebook_runs_before_its_users(finished):
    times = finished.times()
    assert times["data/10_numbers"] < times["hept/31_two"] < times["atlas/92_claims"]


def test_fingerprints_follow_imports(collection):
    """A notebook depends on the modules it imports, through others and re-exports too, and on nothing else."""
    package = collection.root / "sparseattn"
    for name, text in {
        "core/__init__.py": "",
        "core/base.py": "x = 1",
        "core/other.py": "y = 2",
        "hept/__init__.py": "from .attention import layer",
        "hept/attention.py": "from ..core.base import x\nlayer = x",
        "hept/files/small.npz": "data",
        "hept/reader.py": "name = 'small.npz'",
        "__init__.py": "from .hept.attention import layer\nfrom .core import other",
    }.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(text)

    def used(source: str) -> set[str]:
        collection.write("hept/39_x", ["%matplotlib inline\n" + source])
        notebook = graph.read_notebook(collection.root, Path("nbs/hept/39_x.ipynb"))
        found = graph.sources(collection.root, notebook, graph.Imports(collection.root))
        return {p.removeprefix("sparseattn/") for p in found} - {"nbs/hept/39_x.ipynb"}

    assert used("import math") == set()
    assert used("from sparseattn.core.base import x") == {"core/base.py"}
    assert used("from sparseattn.core import base") == {"core/base.py"}
    assert used("from sparseattn.hept import layer") == {"hept/attention.py", "core/base.py"}
    assert used("from sparseattn import layer") == {"hept/attention.py", "core/base.py"}
    assert used("from sparseattn.hept.reader import name") == {"hept/reader.py", "hept/files/small.npz"}
    assert used("import sparseattn") >= {"hept/attention.py", "core/other.py", "core/base.py"}
    assert used("from sparseattn.core.base import x\nthis is not python") == {"core/base.py"}


def test_fingerprints_know_sources_in_c(collection):
    """What names a file of csrc/ in a string depends on it and on all headers: a module, or a notebook by hand."""
    package = collection.root / "sparseattn"
    (package / "csrc").mkdir()
    for name, text in {"csrc/a.c": "", "csrc/b.c": "", "csrc/all.h": "", "native.py": "load('a.c')"}.items():
        (package / name).write_text(text)
    found = graph.module_sources(collection.root, graph.Imports(collection.root), ["sparseattn.native"])
    assert {p.removeprefix("sparseattn/") for p in found} == {"native.py", "csrc/a.c", "csrc/all.h"}
    collection.write("hept/39_x", ['compile("b.c")', "# a word: a"])
    notebook = graph.read_notebook(collection.root, Path("nbs/hept/39_x.ipynb"))
    found = graph.sources(collection.root, notebook, graph.Imports(collection.root))
    assert {Path(p).name for p in found} == {"39_x.ipynb", "b.c", "all.h"}


def test_fingerprints_leave_docstrings_out(tmp_path):
    """Docstrings, empty lines and marks of cells are in no hash; strings that are values, and comments in C, are."""
    path = tmp_path / "a.py"

    def hashed(text: str) -> bytes:
        path.write_text(text)
        return graph._computes(path)

    plain = hashed('def f(x):\n    return x\n')
    module = '"""Module."""\n\n# %% a.ipynb #1\ndef f(x):\n    r"""One,\n\n    two.\n    """\n    return x\n'
    assert hashed(module) == plain
    assert hashed('class A:\n    """Text."""\n    a = 1\n') == hashed("class A:\n    a = 1\n")
    assert hashed('def f(x):\n    return y\n') != plain and hashed('x = """a"""\n') != hashed('x = """b"""\n')
    assert hashed('def f(x): "one"\n') != hashed('def g(x): "one"\n')
    other = tmp_path / "a.c"
    other.write_text("/* a */")
    assert graph._computes(other) == b"/* a */"


def test_a_page_that_prints_docstrings_depends_on_them(collection):
    root, key = collection.root, "sparseattn/data/numbers.py"
    (root / "sparseattn/data").mkdir()

    def hashed(docstring: str) -> str:
        (root / key).write_text(docstring + "def number():\n    return 3\n")
        imports = graph.Imports(root)
        return graph.sources(root, graph.find_notebooks(root)["hept/31_two"], imports)[key]

    assert hashed("") == hashed('"""Three."""\n')
    collection.edit("hept/31_two", "number()", "print(inspect.getdoc(number))")
    assert hashed("") != hashed('"""Three."""\n')


def test_fingerprints_follow_libraries_and_compiler(collection, monkeypatch):
    """Another torch, other pins, a compiler that comes or goes: all notebooks run again."""
    root = collection.root
    notebook = graph.read_notebook(root, Path("nbs/hept/30_one.ipynb"))

    def digest() -> str:
        graph.compiler.cache_clear()
        return graph.digest(graph.fingerprint(root, notebook, graph.Imports(root)))

    seen = [digest()]
    assert digest() == seen[0]
    (root / "constraints.txt").write_text("torch==2.13.0\n")
    seen.append(digest())
    monkeypatch.setattr(graph.metadata, "version", lambda name: "0.0.1")
    seen.append(digest())
    monkeypatch.setenv("CC", "")
    seen.append(digest())
    assert "C compiler" in graph.fingerprint(root, notebook, graph.Imports(root)) and graph.compiler() == "none"
    monkeypatch.setenv("CC", "no-such-compiler")
    assert digest() == seen[-1]
    assert len(set(seen)) == len(seen)
    monkeypatch.undo()
    graph.compiler.cache_clear()


def test_stale_results_name_what_changed(collection):
    """The notebook, a module, a library; results without hashes are unknown; unchanged ones are not listed."""
    root = collection.root
    notebooks = {n.stem: n for n in graph.find_notebooks(root).values()}
    (root / "sparseattn/data").mkdir()
    (root / "sparseattn/data/numbers.py").write_text("a = 1\n")
    for stem in ("30_one", "31_two"):
        made = graph.sources(root, notebooks[stem], graph.Imports(root))
        (root / "figures" / stem).mkdir(parents=True)
        run = dict(scale="cpu", sources=made, versions=dict(torch="2.13.0+cpu", numpy="2.4.6"))
        (root / "figures" / stem / "run.json").write_text(json.dumps(run))
    (root / "constraints.txt").write_text("# pins\ntorch==2.13.0\nnumpy==2.4.6\n")
    assert graph.stale(root, root / "figures") == {}
    assert graph.stale_text(root) == 'notebook,changed since,"changed since, bookkeeping"\n'
    (root / "sparseattn/data/numbers.py").write_text("a = 2\n")
    assert graph.stale(root, root / "figures") == {"31_two": ["sparseattn/data/numbers.py"]}
    collection.edit("hept/30_one", "1 + 1", "1 + 2")
    (root / "constraints.txt").write_text("torch==2.14.0\nnumpy==2.4.6\n")
    assert graph.stale(root, root / "figures") == {
        "30_one": ["nbs/hept/30_one.ipynb", "torch 2.13.0"],
        "31_two": ["sparseattn/data/numbers.py", "torch 2.13.0"],
    }
    (root / "figures/31_two/run.json").write_text('{"scale": "cpu"}')
    rows = list(csv.DictReader(graph.stale_text(root).splitlines()))
    assert [row["notebook"] for row in rows] == ["30_one", "31_two"]
    assert rows[0]["changed since"] == "nbs/hept/30_one.ipynb, torch 2.13.0" and "unknown" in rows[1]["changed since"]


def test_results_older_than_records_are_stale(collection):
    """A record that came, changed or went since the notebook read them; those of another scale do not count."""
    root = collection.root
    collection.write_study(one=("ok", [], 1, ""))
    page, imports = graph.find_notebooks(root)["hept/33_trained"], graph.Imports(root)
    kept = root / "figures/toy/runs/cpu"
    kept.mkdir(parents=True)
    (kept / "one.json").write_text("1")
    made = graph.records(root, imports.studies(page), "cpu")
    run = dict(scale="cpu", sources=graph.sources(root, page, imports), records=made)
    (root / "figures/toy/runs/gpu").mkdir()
    (root / "figures/toy/runs/gpu/one.json").write_text("7")
    assert list(made) == ["figures/toy/runs/cpu/one.json"] and graph.changes(root, page, imports, run) == []
    (kept / "two.json").write_text("2")
    assert graph.changes(root, page, imports, run) == ["figures/toy/runs/cpu (1 record)"]
    (kept / "one.json").unlink()
    assert graph.changes(root, page, imports, run) == ["figures/toy/runs/cpu (2 records)"]


def test_code_of_a_study_is_no_record(collection):
    """A page depends on records of the studies it writes or imports where it exports nothing, not on their helpers'."""
    root = collection.root
    collection.write_study(one=("ok", [], 1, ""))
    for name in ("helping", "read"):
        (root / f"sparseattn/studies/{name}.py").write_text(f'HELP = "{name}"\n')
    collection.write("hept/35_helped", [
        "#| default_exp studies.helped", "#| export\nfrom sparseattn.studies.helping import HELP",
        "from sparseattn.studies import read"])
    (root / "sparseattn/studies/helped.py").write_text("from .helping import HELP\n")
    page, imports = graph.find_notebooks(root)["hept/35_helped"], graph.Imports(root)
    assert imports.studies(page) == ["helped", "read"]
    assert "sparseattn.studies.helping" in imports.of(page)
    assert "read" in imports.words(page) and "helping" not in imports.words(page)


def test_fingerprints_follow_names_of_attentions(collection):
    """Who finds attentions by name depends on the modules that register the names it writes."""
    package = collection.root / "sparseattn"
    register = 'from ..core.transformer import register_attention\n\n@register_attention("{}")\nclass A: pass'
    for name, text in {
        "core/transformer.py": "registered = 'far'",
        "hept/attention.py": register.format("near") + "\nchoice = 'far'",
        "sbm/attention.py": register.format("far") + "\nfrom ..core.base import x",
        "core/base.py": "x = 1",
        "hept/models.py": "from ..core.transformer import Encoder\ndefault = 'near'",
    }.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(text)

    def used(source: str) -> set[str]:
        collection.write("hept/39_x", [source])
        notebook = graph.read_notebook(collection.root, Path("nbs/hept/39_x.ipynb"))
        found = graph.Imports(collection.root).of(notebook)
        return {m.removeprefix("sparseattn.") for m in found} - {"core.transformer"}

    use = "from sparseattn.core.transformer import Encoder\n"
    assert used("name = 'near'") == used(use) == set()
    assert used(use + "Encoder('near')") == {"hept.attention"}
    assert used(use + "Encoder('far')") == {"sbm.attention", "core.base"}
    assert used("from sparseattn.hept.models import default") == {"hept.models", "hept.attention"}


def test_change_runs_only_what_depends_on_it(finished, tmp_path):
    small = finished.copy(tmp_path / "copy")
    before = small.times()
    small.edit("data/10_numbers", "return 3", "return 4")
    assert small.run().returncode == 0
    changed = {name for name, when in small.times().items() if when != before[name]}
    assert changed == {"data/10_numbers", "hept/31_two", "atlas/92_claims"}
    assert "4,smoke" in (small.root / "build/smoke/figures/31_two/table.csv").read_text()


def test_plan_says_why(finished, tmp_path):
    """Prose of a data notebook concerns nobody else; a lost result is made again; touching a file is no change."""
    small = finished.copy(tmp_path / "copy")
    for path in small.root.rglob("*.ipynb"):
        path.touch()
    assert "0 of 6 steps" in small.run("--dry-run").stdout
    small.edit("data/10_numbers", "A page.", "Another page.")
    (small.root / "build/smoke/figures/30_one/run.json").unlink()
    plan = small.run("--dry-run").stdout
    assert re.search(r"data/10_numbers +changed: nbs/data/10_numbers.ipynb\n", plan) and "hept/30_one" in plan
    assert "hept/31_two" not in plan and "core/00_tools" not in plan


def test_failing_notebooks(collection):
    """They leave an executed copy and a short error, the rest goes on, the page says so, the status is not zero."""
    parameters = ("parameters", 'scale = "smoke"')
    collection.write(
        "hept/32_bad", [parameters, "def f(a):\n    return 1 / a", "print('before')\nf(0)\nprint('after')"]
    )
    collection.write("hept/33_dies", ["import os", "os.kill(os.getpid(), 9)"])
    collection.write("hept/34_noscale", [("parameters", "size = 3")])
    collection.write("hept/35_nofinish", [parameters])
    done = collection.run("--only", "hept")
    assert done.returncode == 1
    assert (
        "nbs/hept/32_bad.ipynb, cell 4" in done.stdout
        and ">   2 | f(0)" in done.stdout
        and "ZeroDivisionError: division by zero" in done.stdout
    )
    assert "nbs/hept/33_dies.ipynb, cell 3" in done.stdout and "DeadKernelError" in done.stdout
    assert "34_noscale.ipynb does not declare `scale`" in done.stdout and "run.finish()" in done.stdout
    assert "Traceback" not in done.stdout and len(done.stdout.splitlines()) < 60
    build = collection.root / "build/smoke"
    assert "before" in (build / "executed/hept/32_bad.ipynb").read_text()
    assert "ZeroDivisionError" in (build / "log/hept/32_bad.txt").read_text()
    assert collection.times().keys() == {"hept/30_one", "hept/31_two", "atlas/92_claims"}  # gathers what is there
    page = (build / "index.html").read_text()
    assert "4 failed" in page and "division by zero" in page
    for bad in ("32_bad", "33_dies", "34_noscale", "35_nofinish"):
        (collection.root / f"nbs/hept/{bad}.ipynb").unlink()
    before = collection.times()
    done = collection.run("--only", "hept")
    assert done.returncode == 0 and "failed" not in (build / "index.html").read_text().split("<main>")[1]
    assert before.items() <= collection.times().items()


def test_kill_and_go_on(collection):
    """After a kill nothing is left running, and a second run does only what is missing."""
    collection.write(
        "hept/32_slow",
        [
            ("parameters", 'scale = "smoke"'),
            "import os, time\nfrom pathlib import Path\nPath('pid').write_text(str(os.getpid()))",
            "if not Path('fast').exists(): time.sleep(120)",
            "from sparseattn.core.tools import finish\nfinish('32_slow', scale, 2)",
        ],
    )
    process = subprocess.Popen(
        collection.command("--only", "hept"),
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=OWN_PACKAGE,
    )
    kernel, log = collection.root / "pid", collection.root / "build/smoke/log/snakemake.log"
    _wait(lambda: kernel.exists() and re.search(r"2 of \d steps", log.read_text()), 120)  # the two quick ones are done
    second = collection.run("--only", "hept")
    assert second.returncode == 1 and "another reproduction is running" in second.stderr
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    _wait(lambda: not Path(f"/proc/{kernel.read_text()}").exists(), 30)
    before = collection.times()
    (collection.root / "fast").touch()
    done = collection.run("--only", "hept")
    assert done.returncode == 0, done.stdout
    assert before.keys() == {"hept/30_one", "hept/31_two"} and before.items() <= collection.times().items()
    assert "hept/32_slow done" in done.stdout


def _wait(condition, seconds: float) -> None:
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "it did not happen in time"
        time.sleep(0.2)


def test_lock_is_free_after_its_holder(tmp_path):
    import reproduce as driver

    held = driver.lock(tmp_path)
    assert driver.lock(tmp_path) is None
    fcntl.flock(held, fcntl.LOCK_UN)
    os.close(held)
    assert driver.lock(tmp_path) is not None


# ---- committing results


def test_publish(collection):
    """cpu results go to figures/, nbs/, README.md; larger scales are kept; lost files are put back; clean is idle."""
    root = collection.root
    ids = [cell["id"] for cell in json.loads((root / "nbs/hept/30_one.ipynb").read_text())["cells"]]
    (root / "figures/31_two").mkdir(parents=True)
    (root / "figures/31_two/run.json").write_text('{"scale": "gpu"}')
    (root / "figures/29_gone").mkdir()
    records = [root / "figures" / name / "runs/cpu/unit.json" for name in ("study", "30_one")]
    for record in records:
        record.parent.mkdir(parents=True)
        record.write_text("{}")
    done = collection.run("--scale", "cpu")
    assert done.returncode == 0, done.stdout
    assert "kept figures/31_two, made at gpu" in done.stdout and not (root / "figures/29_gone").exists()
    assert (root / "figures/31_two/run.json").read_text() == '{"scale": "gpu"}'
    assert (root / "figures/30_one/table.csv").read_text() == "value,scale\n1,cpu\n"
    assert "<!-- ledger:begin -->\n2 claims\n<!-- ledger:end -->\nend" in (root / "README.md").read_text()
    assert len((root / "figures/claims.csv").read_text().splitlines()) == 3
    assert (root / "figures/MANIFEST.json").read_text() == publish.manifest(root / "figures")
    assert all(record.read_text() == "{}" for record in records) and "runs" not in publish.manifest(root / "figures")
    assert (root / "figures/stale.csv").read_text() == graph.stale_text(root)
    pages = {key: graph.code_hash(one) for key, one in graph.find_notebooks(root).items() if not one.has_parameters}
    assert json.loads((root / "figures" / publish.EXECUTED).read_text()) == pages

    content = json.loads((root / "nbs/hept/30_one.ipynb").read_text())
    assert [cell["id"] for cell in content["cells"]] == ids
    assert content["cells"][1]["metadata"] == {"tags": ["parameters"]} and content["metadata"].keys() == {"kernelspec"}
    assert [o["output_type"] for o in content["cells"][3]["outputs"]] == ["stream", "execute_result"]
    before = tree(root / "nbs")
    subprocess.run([BIN / "nbdev-clean"], cwd=root, check=True)
    assert tree(root / "nbs") == before

    (root / "figures/30_one/table.csv").unlink()
    times = collection.times("cpu")
    assert collection.run("--scale", "cpu").returncode == 0
    assert (root / "figures/30_one/table.csv").exists() and collection.times("cpu") == times


def test_publish_keeps_back_what_failed(collection):
    """What failed, and what must not be committed, stays as it is committed, and is named; the rest is published."""
    few = ("core/00_tools", "data/10_numbers", "hept/31_two")
    path, parameters = "'/home/' + 'somebody/data'", ("parameters", 'scale = "smoke"')
    collection.write(
        "hept/32_path",
        [parameters, f"print({path})", "from sparseattn.core.tools import finish\nfinish('32_path', scale, 1)"],
    )
    collection.write("hept/33_bad", [parameters, "1 / 0"])
    for name in ("32_path", "33_bad"):
        (collection.root / f"figures/{name}").mkdir(parents=True)
        (collection.root / f"figures/{name}/table.csv").write_text("committed")
    assert collection.run("--only", "core").returncode == 0  # exports the tools
    for key in few:
        (collection.root / f"nbs/{key}.ipynb").unlink()
    before = tree(collection.root / "nbs")
    done = collection.run("--scale", "cpu", "--no-export")
    assert done.returncode == 1 and "NOT everything succeeded" in done.stdout
    assert "not published: nbs/hept/32_path.ipynb, cell 3: the output names a path of this machine" in done.stdout
    assert "not published: nbs/hept/33_bad.ipynb did not succeed" in done.stdout and "1 failed" in page_of(collection)
    changed = {Path(p).stem for p, text in tree(collection.root / "nbs").items() if before[p] != text}
    assert changed == {"30_one", "92_claims"}
    for name in ("32_path", "33_bad"):
        assert (collection.root / f"figures/{name}/table.csv").read_text() == "committed"
    assert (
        "1 claims" in (collection.root / "README.md").read_text()
        or "2 claims" in (collection.root / "README.md").read_text()
    )
    second = collection.run("--scale", "cpu", "--no-export")
    assert second.returncode == 1 and "hept/33_bad FAILED" in second.stdout and "hept/30_one" not in second.stdout


def page_of(collection, scale: str = "cpu") -> str:
    """The page of a run."""
    return (collection.root / f"build/{scale}/index.html").read_text()


def test_outputs_with_tracebacks_are_refused():
    trace = "Traceback (most recent call last):\n  ..."
    for output in (
        dict(output_type="error", traceback=[]),
        dict(output_type="stream", text=[trace]),
        dict(output_type="display_data", data={"text/html": [trace]}),
    ):
        with pytest.raises(publish.Refused, match="cell 7: the output holds a traceback"):
            publish.check_outputs("cell 7", [output])
    publish.check_outputs("cell 7", [dict(output_type="display_data", data={"image/png": "/home/me/"})])


def test_outputs_are_matched_by_cell_id():
    cell = dict(cell_type="code", id="a", source=["1"], metadata={}, outputs=[], execution_count=None)
    ran = dict(
        cell,
        outputs=[dict(output_type="execute_result", data={"text/plain": ["1"]}, metadata={"x": 1}, execution_count=3)],
        execution_count=3,
    )
    extra = dict(cell, id="b", source=["injected"])
    new = publish.with_outputs(dict(cells=[dict(cell)]), dict(cells=[extra, ran]), "nb")
    assert (
        new["cells"][0]["outputs"][0]["data"] == {"text/plain": ["1"]}
        and new["cells"][0]["outputs"][0]["metadata"] == {}
    )
    with pytest.raises(publish.Refused, match="nb, cell 1: edited since"):
        publish.with_outputs(dict(cells=[dict(cell, source=["2"])]), dict(cells=[ran]), "nb")


def test_absolute_paths():
    assert (
        publish.absolute_paths("saved to /home/me/x.png")
        and publish.absolute_paths(r"C:\Users")
        and publish.absolute_paths('File "/usr/lib/x.py"')
    )
    for fine in ("build/work/x", "https://example.org/home/me", "a/b", "1/2", "n/work", "</work>", "$/$"):
        assert not publish.absolute_paths(fine), fine


def test_readme_needs_its_markers():
    with pytest.raises(publish.Refused, match="once each"):
        publish.with_block("no markers", "text")


# ---- the package


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> Path:
    """A wheel, made from the source distribution, made from a copy of the tree."""
    place = tmp_path_factory.mktemp("dist")
    keep = shutil.ignore_patterns(
        ".venv", ".git", "build", "dist", "nbs", "figures", ".snakemake", "*.egg-info", "__pycache__"
    )
    shutil.copytree(ROOT, place / "tree", ignore=keep)
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", place / "out", place / "tree"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return place / "out"


def test_source_distribution(distributions):
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "settings.ini",
        "setup.py",
        "pyproject.toml",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "CITATION.cff",
        "constraints.txt",
        "sparseattn/csrc/tiles.h",
        "sparseattn/py.typed",
        "sparseattn/csrc/few_keys.c",
    } <= names


def test_wheel(distributions):
    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as archive:
        names = set(archive.namelist())
        description = archive.read(next(n for n in names if n.endswith("METADATA"))).decode()
    modules = {
        p.relative_to(ROOT).as_posix()
        for p in (ROOT / "sparseattn").rglob("*")
        if p.is_file() and p.suffix in (".py", ".npz", ".c", ".h")
    }
    assert modules <= names
    assert all(n.startswith("sparseattn") for n in names)
    required = [
        Requirement(line.partition(": ")[2])
        for line in description.splitlines()
        if line.startswith("Requires-Dist") and "extra ==" not in line
    ]
    assert {r.name for r in required} == {"torch", "numpy", "scipy", "jaxtyping"}
    assert f"Version: {settings()['version']}" in description


def test_wheel_imports_and_runs(distributions, tmp_path):
    """Installed alone in an empty folder, the package works and imports nothing of the extras."""
    wheel = next(distributions.glob("*.whl"))
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path, wheel], check=True
    )
    code = """
import sys
import jaxtyping, numpy, scipy, torch
before = set(sys.modules)
import sparseattn
assert sparseattn.__file__.startswith(sys.argv[1]), sparseattn.__file__
assert not {"matplotlib", "pandas", "sklearn", "nbdev", "seaborn", "tqdm", "IPython"} & (set(sys.modules) - before)
layer = sparseattn.HEPTAttention(16, 2, coord_dims=2)
out = layer(torch.randn(1, 257, 16), torch.randn(1, 257, 2))
assert out.shape == (1, 257, 16) and torch.isfinite(out).all()
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
