"""Trainings as jobs: what the plan says, how a unit ends, records that are used, jobs that run on other machines."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import data
import graph
import page
import plan
import psutil
import publish
import reproduce
import yaml
from conftest import OWN_PACKAGE

from sparseattn.core.native import _cache
from sparseattn.data.cache import cache_root, load_arrays

ROOT = Path(__file__).parent.parent

#: a stand-in for kubectl: it starts the job's command in an empty environment, in the background, and keeps its end
KUBECTL = """#!{python}
import json, os, subprocess, sys
from pathlib import Path

jobs = Path({jobs!r})
verb = sys.argv[1]
if verb == "create":
    made = json.load(sys.stdin)
    name = made["metadata"]["generateName"] + str(len(list(jobs.glob("*.json"))))
    (jobs / f"{{name}}.json").write_text(json.dumps(made))
    job = made["spec"]["template"]["spec"]["containers"][0]
    (jobs / f"{{name}}.sh").write_text('"$@"; echo $? > ' + str(jobs / f"{{name}}.end"))
    with open(jobs / f"{{name}}.out", "w") as out:
        subprocess.Popen(["env", "-i", "bash", jobs / f"{{name}}.sh", *job["command"]], cwd=job["workingDir"], stdin=-3,
                         stdout=out, stderr=out, start_new_session=True)
    print(name, end="")
elif verb == "get":
    end = jobs / f"{{sys.argv[3]}}.end"
    status = end.read_text().strip() if end.exists() else ""
    print(sys.argv[3], "1" if status == "0" else "", "1" if status not in ("", "0") else "", sep="/", end="")
"""


def few(collection) -> None:
    """Leave one notebook without trainings."""
    for key in ("hept/31_two", "atlas/92_claims", "data/10_numbers"):
        (collection.root / f"nbs/{key}.ipynb").unlink()


def records(collection, scale: str = "cpu") -> dict[str, dict]:
    """The records of the study `toy`."""
    found = (collection.root / f"figures/toy/runs/{scale}").glob("*.json")
    return {p.stem: json.loads(p.read_text()) for p in found}


def kubernetes(folder: Path) -> tuple[Path, dict[str, str]]:
    """The profile for Kubernetes, asking more often, and an environment whose kubectl starts processes here."""
    (folder / "bin").mkdir(parents=True)
    (folder / "jobs").mkdir()
    kubectl = folder / "bin/kubectl"
    kubectl.write_text(KUBECTL.format(python=sys.executable, jobs=str(folder / "jobs")))
    kubectl.chmod(0o755)
    profile = yaml.safe_load((ROOT / "workflow/profiles/kubernetes/config.yaml").read_text())
    profile |= {"latency-wait": 20, "seconds-between-status-checks": 1}
    (folder / "config.yaml").write_text(yaml.safe_dump(profile))
    return folder, dict(OWN_PACKAGE, PATH=f"{folder / 'bin'}:{os.environ['PATH']}", SPARSEATTN_DATA="somewhere")


def test_units_and_notebooks_run_as_submitted_jobs(collection, tmp_path_factory):
    """Each in a clean environment, as on another node; the jobs that need a GPU ask for one, and no others."""
    few(collection)
    collection.write_study(one=("ok", [], 3, ""), two=("ok", ["one"], 3, ""), bad=("fails", [], 3, ""))
    collection.edit(
        "hept/33_trained",
        "import json",
        "run = type('Run', (), dict(device='cpu'))\\n\",\n    \"run.device\\n\",\n    \"import json",
    )
    folder, environment = kubernetes(tmp_path_factory.mktemp("cluster") / "profile")
    command = collection.command("--scale", "gpu", "--only", "hept", "--profile", str(folder))
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 1 and "trainings: 2 done, 1 failed" in done.stdout, done.stdout + done.stderr
    assert re.search(r"toy/bad FAILED after \d+ s: exit status 1", done.stdout)
    assert "ArithmeticError: the loss is not finite" in done.stdout and "hept/33_trained done in" in done.stdout
    made = records(collection, "gpu")
    assert made.keys() == {"one", "two"}
    there = [r["environment"] for r in made.values()]
    assert all(e["SPARSEATTN_DATA"] == "somewhere" and "HOME" not in e and e["MALLOC_TOP_PAD_"] == "9" for e in there)
    assert "one two,gpu" in (collection.root / "build/gpu/figures/33_trained/table.csv").read_text()
    jobs = {p.stem.rpartition("-")[0]: json.loads(p.read_text()) for p in (folder / "jobs").glob("*.json")}
    requested = {n: j["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] for n, j in jobs.items()}
    gpu = {name for name, limits in requested.items() if limits.get("nvidia.com/gpu") == "1"}
    assert gpu == {"train-toy-one-0", "train-toy-two-1", "train-toy-bad-2", "hept-33-trained"}
    assert requested.keys() - gpu == {"hept-30-one"} and "activeDeadlineSeconds" in jobs["hept-33-trained"]["spec"]


def test_records_are_used_and_the_rest_is_trained(collection):
    """What failed, was cut off or lacks its data leaves its row out, and is tried again; the notebook runs."""
    few(collection)
    kicad = "kicad/kicad.npz is not here"
    units = dict(good=("ok", [], 1, ""), also=("ok", ["good"], 2, ""), never=("ok", [], 1, kicad))
    collection.write_study(**units, bad=("fails", [], 1, ""), waits=("ok", ["bad"], 1, ""), dead=("killed", [], 1, ""))
    first = collection.run("--scale", "cpu", "--only", "hept")
    assert (
        first.returncode == 1
        and "toy: 5 to train, about 6 min of one core or GPU, 1 left out: " + kicad in first.stdout
    )
    assert "toy/waits left after 0 s: figures/toy/runs/cpu/bad.json is not there" in first.stdout
    assert "trainings: 2 done, 1 left, 1 failed, 1 cut off" in first.stdout
    assert (
        records(collection).keys() == {"also", "good"}
        and records(collection)["good"]["environment"]["OMP_NUM_THREADS"] == "1"
    )
    table = collection.root / "figures/33_trained/table.csv"
    assert table.read_text() == "value,scale\nalso good,cpu\n"
    shown = (collection.root / "build/cpu/index.html").read_text()
    assert "4 trainings in this run, 2 did not end" in shown and "the loss is not finite" in shown

    collection.write_study(**units, bad=("ok", [], 1, ""), waits=("ok", ["bad"], 1, ""), dead=("ok", [], 1, ""))
    second = collection.run("--scale", "cpu", "--only", "hept")
    assert second.returncode == 0 and "toy: 2 records of 2026-11-22 used, 3 to train" in second.stdout, second.stdout
    assert "trainings: 3 done" in second.stdout and "hept/30_one" not in second.stdout
    assert table.read_text() == "value,scale\nalso bad dead good waits,cpu\n"
    assert (
        "toy: 5 records of 2026-11-22 used, 1 left out"
        in (plan := collection.run(*"--scale cpu --dry-run".split())).stdout
    )
    assert "hept/33_trained" not in plan.stdout and "toy/" not in plan.stdout

    other = json.dumps(dict(finished="2026-11-23T10:00:00Z"))
    (collection.root / "figures/toy/runs/cpu/bad.json").write_text(other)  # as after git pull
    assert re.search(r"hept/33_trained +records changed", collection.run(*"--scale cpu --dry-run".split()).stdout)
    third = collection.run("--scale", "cpu", "--only", "hept")
    assert third.returncode == 0 and "hept/33_trained done" in third.stdout and "to train" not in third.stdout
    assert "toy: 5 records of 2026-11-22 to 2026-11-23 used" in third.stdout


def test_a_budget_a_signal_and_training_anew(collection):
    """A unit goes on where it was stopped by time or by a signal; an old record goes when its training begins."""
    few(collection)
    collection.write_study(one=("slow", [], 1, ""), two=("slow", [], 1, ""), three=("slow", [], 1, ""))
    command = ["--scale", "cpu", "--only", "hept"]
    step = collection.root / "build/cpu/studies/toy/one.step"

    def stopped_at(*options: str) -> int:
        done = collection.run(*command, *options)
        assert done.returncode == 0 and "stopped after" in done.stdout and "toy/three left after 0 s" in done.stdout
        assert "it goes on in the next run" in done.stdout and "no time is left of --budget" in done.stdout
        assert "hept/33_trained done" in done.stdout and not records(collection)
        return int(step.read_text())

    first = stopped_at("--budget", "0.05")
    assert 0 < first < 10
    hold = collection.root / "hold"
    hold.touch()
    process = subprocess.Popen(collection.command(*command), stdout=subprocess.PIPE, text=True, env=OWN_PACKAGE)
    until(lambda: int(step.read_text() or 0) > first)
    process.terminate()
    said, _ = process.communicate(timeout=30)
    hold.unlink()
    assert process.returncode == 130 and "interrupted; the same command goes on from here" in said
    assert not subprocess.run(["pgrep", "-f", f"{collection.root}/workflow"], capture_output=True).stdout
    assert collection.run(*command).returncode == 0
    made = records(collection)
    assert made.keys() == {"one", "two", "three"} and made["one"]["first"] > first and made["three"]["first"] == 0

    assert "toy: 3 to train" in collection.run(*command, "--retrain", "--dry-run").stdout
    assert not (collection.root / "build/cpu/retrain").exists()
    done = collection.run(*command, "--retrain", "--budget", "0")
    assert "toy: 3 to train" in done.stdout and records(collection) == made
    assert collection.run(*command).returncode == 0  # the order stands
    assert records(collection)["one"]["first"] == 0
    assert (collection.root / "build/cpu/replaced/figures/toy/runs/cpu/one.json").exists()
    assert "3 records" in collection.run(*command, "--dry-run").stdout


def until(condition, seconds: float = 60) -> None:
    """Wait for something."""
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, "it did not happen in time"
        time.sleep(0.1)


def test_studies_that_cannot_plan_say_so(collection):
    few(collection)
    collection.write_study(one=("ok", [], 1, ""))
    (collection.root / "sparseattn/studies/__main__.py").write_text("raise RuntimeError('no such study')")
    done = collection.run("--scale", "cpu", "--only", "hept")
    assert done.returncode == 1 and "RuntimeError: no such study" in done.stderr


def test_slurm_profile(collection):
    """Snakemake accepts it; its executor is a plugin, so only the jobs are looked at. Rules say who needs a GPU."""
    few(collection)
    collection.write_study(one=("ok", [], 7, ""))
    profile = yaml.safe_load((ROOT / "workflow/profiles/slurm/config.yaml").read_text())
    assert profile.pop("executor") == "slurm"
    folder = collection.root / "profile"
    folder.mkdir()
    (folder / "config.yaml").write_text(yaml.safe_dump(profile))
    subprocess.run([Path(sys.executable).with_name("nbdev-export")], cwd=collection.root, check=True)
    assert collection.run("--scale", "gpu", "--dry-run").returncode == 0
    command = [sys.executable, "-m", "snakemake", "-s", "workflow/Snakefile", "--profile", "profile", "--dry-run"]
    done = subprocess.run([*command, "--config", "scale=gpu"], cwd=collection.root, capture_output=True, text=True)
    said = done.stdout + done.stderr
    jobs = {name: text for name, text in re.findall(r"^rule (\w+):\n(.*?)\n(?=\[|\n)", said, re.M | re.S)}
    assert done.returncode == 0, said
    assert re.search(r"resources: .*mem_mb=16000.*runtime=44.*gpu=1", jobs["train_toy_one_0"])
    assert "gpu=" not in jobs["hept_30_one"] and "runtime=240" in jobs["hept_30_one"]


def test_pages_are_rendered_again_only_when_they_show_something_else(tmp_path):
    notebook = graph.read_notebook(ROOT, Path("nbs/data/10_cache.ipynb"))
    content = json.loads((ROOT / notebook.path).read_text())
    executed, html = tmp_path / notebook.executed("smoke"), page.html_path(tmp_path, notebook, "smoke")
    executed.parent.mkdir(parents=True)

    def rendered(change) -> bool:
        change(content)
        executed.write_text(json.dumps(content))
        before = html.stat().st_mtime_ns if html.exists() else 0
        page.render_notebooks(tmp_path, [notebook], "smoke")
        return html.stat().st_mtime_ns != before

    assert rendered(lambda c: None) and "A cache that can be trusted" in html.read_text()
    assert not rendered(lambda c: c["cells"][2].update(execution_count=7, metadata={"papermill": {"duration": 3}}))
    assert rendered(lambda c: c["cells"][0].update(source="# Another title"))
    assert rendered(lambda c: c["cells"][2].update(outputs=[dict(output_type="stream", name="stdout", text="new")]))
    executed.write_text(executed.read_text()[:100])  # cut off: what was rendered stays
    page.render_notebooks(tmp_path, [notebook], "smoke")
    assert ">new" in html.read_text()


# ---- data sets that are built


def manual(folder: Path, name: str, other: str) -> None:
    """A manual page that cites another, where a package has it."""
    file = folder / f"usr/share/man/man3/{name}.3.gz"
    file.parent.mkdir(parents=True, exist_ok=True)
    text = f".TH {name} 3\n.SH NAME\n{name} \\- how {name} works\n.SH DESCRIPTION\n" + f"About {name}.\n" * 20
    file.write_bytes(gzip.compress(f'{text}.SH "SEE ALSO"\n.BR {other} (3)\n'.encode()))


def build_set(name: str, *options: str, **environment: str) -> subprocess.CompletedProcess:
    """The command that builds a set."""
    command = [sys.executable, str(ROOT / "workflow/data.py"), name, "--users", "45_lra", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=dict(os.environ, **environment))


def test_sets_are_built_from_packages_that_the_user_gives(tmp_path):
    """Unpacked, or as .deb files; what is missing is one line."""
    packages, cache = tmp_path / "packages", str(tmp_path / "cache")
    for package in data.SETS["manpages"].packages:
        for name, other in (("alpha", "beta"), ("beta", "gamma"), ("gamma", "alpha")):
            manual(packages / package, f"{package}-{name}", f"{package}-{other}")
    if shutil.which("dpkg-deb"):
        shutil.move(packages / "git-man", tmp_path / "deb")
        (tmp_path / "deb/DEBIAN").mkdir()
        control = "Package: git-man\nVersion: 1\nArchitecture: all\nMaintainer: none\nDescription: none\n"
        (tmp_path / "deb/DEBIAN/control").write_text(control)
        pack = ["dpkg-deb", "--build", tmp_path / "deb", packages / "git-man_1_all.deb"]
        subprocess.run(pack, check=True, capture_output=True)
    done = build_set("manpages", "--packages", str(packages), SPARSEATTN_CACHE=cache)
    assert done.returncode == 0 and "data set manpages built in" in done.stdout, done.stdout + done.stderr
    assert len(load_arrays(tmp_path / "cache/built/manpages/pages.npz")["part"]) == 24
    assert not list((tmp_path / "cache/packages").iterdir())

    none = build_set("conformers", SPARSEATTN_CACHE=cache, SPARSEATTN_DATA="")
    assert none.returncode == 1 and "Traceback" not in none.stderr
    assert re.search(r"data set conformers is not here: peptides_func/\S+, .* left out of 45_lra\n", none.stdout)


def test_arrays_kernels_and_workflow_have_one_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path / "own"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert graph.cache_root() == cache_root() == _cache().parent == tmp_path / "own"
    monkeypatch.delenv("SPARSEATTN_CACHE")
    assert graph.cache_root() == cache_root() == _cache().parent == tmp_path / "xdg" / "sparseattn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert graph.cache_root() == cache_root() == Path.home() / ".cache" / "sparseattn"


def test_notebooks_say_which_sets_they_use(monkeypatch, tmp_path):
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SPARSEATTN_DATA", raising=False)
    imports, notebooks = graph.Imports(ROOT), graph.find_notebooks(ROOT).values()
    wanted = data.to_build(notebooks, imports)
    assert "63_scenes" in wanted["sweethome"] and "12_shapes" not in wanted["sweethome"]
    assert "76_conformers" in wanted["conformers"] and "kicad" not in wanted
    file = tmp_path / "cache/built/sweethome/sweethome.npz"
    file.parent.mkdir(parents=True)
    file.write_text("built")
    assert "sweethome" not in data.to_build(notebooks, imports) and "sweethome/sweethome.npz 5" in graph.data_listing()


def test_a_set_that_cannot_be_had_leaves_rows_out_and_the_run_goes_on(collection, tmp_path_factory):
    """Where apt knows no such package: one line says what is missing, how to get it, and who does without."""
    few(collection)
    collection.edit("hept/30_one", "print('one')", "print('one', 'kicad')")
    folder = tmp_path_factory.mktemp("bin")
    (folder / "apt-get").write_text("#!/bin/sh\necho 'E: Unable to locate package' $3 >&2\nexit 100\n")
    (folder / "apt-get").chmod(0o755)
    environment = dict(OWN_PACKAGE, PATH=f"{folder}:{os.environ['PATH']}", SPARSEATTN_CACHE=str(folder / "cache"))
    command = collection.command("--scale", "cpu", "--only", "hept")
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"SPARSEATTN_DATA": ""})
    assert done.returncode == 0 and "everything is up to date" in done.stdout, done.stdout + done.stderr
    said = [line for line in done.stdout.splitlines() if "data set kicad is not here" in line]
    assert len(said) == 1 and "apt-get cannot fetch kicad-packages3d (Unable to locate package" in said[0]
    assert "--packages FOLDER; its rows are left out of 30_one" in said[0]


# ---- the command of the studies, as it is


def test_a_job_trains_a_unit_of_the_real_command(tmp_path):
    """It ends in a record; out of time or told to end it keeps its work, and the next job goes on from there."""
    (tmp_path / "settings.ini").touch()
    env = OWN_PACKAGE | {"SPARSEATTN_STUDIES": str(ROOT / "tests/lab/studies"), "PYTHONPATH": str(ROOT)}
    env |= {"TOY_SECONDS": "0.1"}
    command = [sys.executable, "-m", "sparseattn.studies", "toy", "--units", "units.json"]
    subprocess.run(command, cwd=tmp_path, env=env, check=True)
    units = json.loads((tmp_path / "units.json").read_text())
    jobs = {u["unit"]: plan.unit_job("cpu", u, n, publish.settings(), 2) for n, u in enumerate(units)}

    def start(unit: str, budget: float | None = None) -> subprocess.Popen:
        plan.write(tmp_path, "cpu", dict(units=list(jobs.values()), budget=budget, environment={}))
        (tmp_path / "build/cpu/units/began").unlink(missing_ok=True)
        job = [sys.executable, str(ROOT / "workflow/train.py"), "toy", unit, "--scale", "cpu"]
        return subprocess.Popen(job, cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True)

    def said(unit: str, budget: float | None = None) -> str:
        return start(unit, budget).communicate(timeout=120)[0]

    def step() -> int:
        found = list((tmp_path / "build/cpu/studies/toy").glob("linear-0-*/progress.json"))
        return json.loads(found[0].read_text())["step"] if found else 0

    record = tmp_path / "figures/toy/runs/cpu/linear-0.json"
    assert "toy/majority-0 done in" in said("majority-0")
    assert "toy/linear-0 left after 0 s: figures/toy/runs/cpu/linear-rate-0.1.json" in said("linear-0")
    assert all(f"toy/linear-rate-{rate} done in" in said(f"linear-rate-{rate}") for rate in ("0.1", "0.01"))
    assert "toy/linear-0 stopped after" in said("linear-0", budget=0.03)
    for number in (signal.SIGINT, signal.SIGTERM):
        job, before = start("linear-0"), step()
        until(lambda n=before: step() > n)
        job.send_signal(number)
        out, _ = job.communicate(timeout=60)
        assert job.returncode == 130 and " done in" not in out and not record.exists()
    assert "toy/linear-0 done in" in said("linear-0")
    assert json.loads(record.read_text())["steps"] == 60 and step() == 0


def test_a_signal_reaches_a_run_that_has_a_zombie(tmp_path):
    """A child that ended and was not waited for has no command line to look at."""
    watched = object.__new__(reproduce.Watched)
    code = "import signal, subprocess, time; signal.signal(signal.SIGINT, signal.SIG_DFL)  # behind `&` it is ignored\n"
    code += "subprocess.Popen(['true']); time.sleep(60)"
    watched.process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)
    until(lambda: [c.status() for c in psutil.Process(watched.process.pid).children()] == ["zombie"])
    watched.end()
    assert watched.process.wait(timeout=20) != 0 and watched.interrupted


def test_a_notebook_runs_without_jupyter(tmp_path):
    """Parameters, values shown, IPython's display and a cell that fails; nothing of Jupyter is imported."""
    (tmp_path / "nbs/hept").mkdir(parents=True)
    shows = "from IPython.display import Markdown, display\nimport matplotlib.pyplot as plt\nimport pandas as pd\n"
    shows += "display(Markdown('*a*'))\nprint(scale)\npd.Series([1.5])"
    cells = {"params00": 'scale = "smoke"', "shows000": shows, "fails000": "1 / 0"}
    made = [dict(cell_type="markdown", id="title000", metadata={}, source="# T\n\n> A page.")]
    made += [dict(cell_type="code", id=name, metadata={"tags": ["parameters"] * (name == "params00")}, outputs=[],
                  execution_count=None, source=source) for name, source in cells.items()]
    page = tmp_path / "nbs/hept/30_a.ipynb"
    page.write_text(json.dumps(dict(cells=made, metadata={}, nbformat=4, nbformat_minor=5)))
    run = [sys.executable, "-X", "importtime", str(ROOT / "workflow/execute.py"), "hept/30_a", "--plain"]
    done = subprocess.run([*run, "--scale", "gpu", "--root", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1 and "cell 4 (fails000)" in done.stdout and "ZeroDivisionError" in done.stdout
    assert not re.search(r"\| +(papermill|nbformat|IPython|ipykernel)\b", done.stderr)
    found = json.loads((tmp_path / "build/gpu/executed/hept/30_a.ipynb").read_text())["cells"]
    text, first, last = found[2]["outputs"]
    assert text["text"] == "gpu\n" and first["data"]["text/markdown"] == "*a*" and "1.5" in last["data"]["text/plain"]
    assert found[3]["metadata"]["papermill"]["status"] == "failed"


def test_the_first_half_hour_on_a_gpu_measures_on_it():
    """Every notebook of scripts/gpu.sh takes its costs on the run's device; a paper each, at least."""
    parts = re.findall(r"\) tables (.+?) ;;", (ROOT / "scripts/gpu.sh").read_text())
    notebooks, named = graph.find_notebooks(ROOT), " ".join(parts).split()
    assert len(parts) == 4 and all(notebooks[key].uses_device for key in named)
    assert {key.split("/")[0] for key in named} == {"hept", "sbm", "sampled", "pat", "samsa"}
