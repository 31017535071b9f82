"""What a reproduction will do, written once to build/<scale>/plan.json and read by the Snakefile and by its jobs.

Notebooks come from `graph`, units (one training each) from `python -m sparseattn.studies --units`, which needs torch;
a job that Snakemake starts on another node parses the plan instead, in a moment, and sees what the first process saw.
The order of value is the order of the units. Records that are there are used; the plan trains the others.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import graph
import publish

VARIABLES = (
    "SPARSEATTN_DATA",
    "SPARSEATTN_CACHE",
    "SPARSEATTN_DEVICE",
)  #: of the environment, handed on to jobs on other nodes
FIRST = 1_000_000  #: priority of the first unit; below are data notebooks, then the others


class Broken(Exception):
    """The studies cannot say what they would train."""


def path(root: Path, scale: str) -> Path:
    """Where the plan of a scale is."""
    return root / f"build/{scale}/plan.json"


def read(root: Path, scale: str) -> dict:
    """The plan; without one, that of a notebook executed by hand."""
    file = path(root, scale)
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"environment": {}}


def write(root: Path, scale: str, made: dict) -> None:
    """Keep the plan."""
    graph.write_text(path(root, scale), json.dumps(made, indent=1) + "\n")


def enter(made: dict) -> None:
    """Take over the variables of the process that made the plan, where this one has none."""
    for name, value in made["environment"].items():
        os.environ.setdefault(name, value)


# ---- units


def list_units(root: Path, scale: str, studies: Iterable[str]) -> list[dict]:
    """All units of some studies, in order of value; none at smoke scale, where notebooks train themselves.

    Raises:
        Broken: the command failed; the text holds its last lines.
    """
    names = sorted(set(studies))
    if scale == "smoke" or not names:
        return []
    file = root / f"build/{scale}/units.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    command = [sys.executable, "-m", graph.STUDIES, "--units", str(file), *names, "--scale", scale]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    if done.returncode or not file.exists():
        raise Broken(f"the studies cannot say what they would train:\n{(done.stderr or done.stdout)[-2000:]}")
    return json.loads(file.read_text(encoding="utf-8"))


def order_again(root: Path, scale: str, units: list[dict]) -> None:
    """Mark units that have a record to be trained anew; `train.py` removes a mark when the training begins."""
    for unit in units:
        if unit["made"] and not unit["why not"]:
            graph.write_text(again(root, scale, unit), "")


def again(root: Path, scale: str, unit: dict) -> Path:
    """The mark of a unit that is to be trained anew."""
    return root / f"build/{scale}/retrain/{unit['study']}/{unit['unit']}"


def to_train(root: Path, scale: str, units: list[dict], retrain: bool = False) -> list[dict]:
    """Units without a valid record, or trained anew (ordered before, or `retrain`), whose data are here."""
    anew = (u for u in units if not u["why not"])
    return [u for u in anew if not u["made"] or retrain or again(root, scale, u).exists()]


def tell(root: Path, scale: str, units: list[dict], retrain: bool = False, trains: bool = True) -> list[str]:
    """One line a study: which records are used, what is to be trained, what is left out and why."""
    lines = []
    for study in dict.fromkeys(unit["study"] for unit in units):
        own = [unit for unit in units if unit["study"] == study]
        missing = to_train(root, scale, own, retrain)
        days = sorted(unit["made"] for unit in own if unit["made"] and unit not in missing)
        out = [unit["why not"] for unit in own if unit["why not"] and not unit["made"]]
        parts = []
        if days:
            until = f" to {days[-1]}" if days[-1] != days[0] else ""
            parts.append(f"{len(days)} record{'s' * (len(days) > 1)} of {days[0]}{until} used")
        if missing:
            needed = duration(sum(unit["minutes"] for unit in missing))
            when = "" if trains else ", in another run"
            parts.append(f"{len(missing)} to train, about {needed} of one core or GPU{when}")
        parts += [f"{out.count(why)} left out: {why}" for why in dict.fromkeys(out)]
        lines.append(f"{study}: {', '.join(parts) or 'nothing to train'}")
    return lines


def duration(minutes: float) -> str:
    """Minutes for people."""
    return f"{minutes:.0f} min" if minutes < 100 else f"{minutes / 60:.1f} h"


# ---- the plan


def make(
    root: Path,
    scale: str,
    notebooks: dict[str, graph.Notebook],
    units: list[dict],
    *,
    only: str = "",
    cores: int = 1,
    budget: float | None = None,
    cluster: bool = False,
) -> dict:
    """The plan of a run.

    Args:
        notebooks: those to be executed. units: those to be trained, in order of value.
        only: the chapter, for publishing. cores: of this machine, or of a job that times.
        budget: minutes in which trainings may run, from the start of the first.
        cluster: jobs are submitted to other machines.

    Returns:
        What the Snakefile turns into rules: `units`, `notebooks`, and the files that end the run.
    """
    config, imports, now = publish.settings(), graph.Imports(root), time.time()
    jobs = [unit_job(scale, unit, number, config, cores) for number, unit in enumerate(units)]
    stamps = {job["record"]: job["stamp"] for job in jobs}
    for job in jobs:
        job["after"] = [stamps[record] for record in job["needs"] if record in stamps]
    made = dict(
        scale=scale,
        only=only,
        cores=cores,
        made=now,
        budget=budget,
        retries=2 if cluster else 0,
        environment={n: os.environ[n] for n in VARIABLES if n in os.environ},
        units=jobs,
        notebooks={},
    )
    made["environment"]["SPARSEATTN_CACHE"] = str(graph.cache_root())
    for key, notebook in notebooks.items():
        made["notebooks"][key] = notebook_job(root, scale, notebook, imports, config, cores)
    for key, job in made["notebooks"].items():
        job["inputs"], job["before"] = inputs(made, notebooks, key, config["ledger"], imports)
    if scale != "smoke":
        made["published"] = f"build/{scale}/published.json"
        if any(n.stem == config["ledger"] for n in notebooks.values()):
            made["readme"] = f"build/{scale}/readme.done"
    made["page"] = f"build/{scale}/index.html"
    return made


def unit_job(scale: str, unit: dict, number: int, config: dict, cores: int) -> dict:
    """A unit as a job: one thread on a CPU; several side by side on a GPU."""
    name = f"{unit['study']}/{unit['unit']}"
    return dict(
        unit,
        rule=f"train_{re.sub(r'[^A-Za-z0-9]+', '_', name)}_{number}",
        stamp=f"build/{scale}/units/{name}.json",
        log=f"build/{scale}/log/units/{name}.txt",
        threads=max(1, cores // config["units_per_gpu"]) if unit["gpu"] else 1,
        priority=FIRST - number,
        resources={"runtime": int(30 + 2 * unit["minutes"])} | ({"gpu": 1, "gpu_share": 1} if unit["gpu"] else {}),
    )


def notebook_job(
    root: Path, scale: str, notebook: graph.Notebook, imports: graph.Imports, config: dict, cores: int
) -> dict:
    """A notebook as a job. One that uses the run's device has the GPU to itself, since it may time something."""
    digest = graph.digest(graph.fingerprint(root, notebook, imports))
    whole = scale != "smoke" and notebook.stem in config["whole_machine"]
    gpu = scale in ("gpu", "paper") and notebook.uses_device
    return dict(
        key=notebook.key,
        rule=notebook.rule,
        digest=digest,
        products=notebook.products(scale, digest),
        log=notebook.log(scale),
        studies=imports.studies(notebook),
        threads=cores if whole else 1,
        priority=graph.priority(root, notebook),
        resources={"gpu": 1, "gpu_share": config["units_per_gpu"]} if gpu else {},
        timeout=config["cell_timeout"].get(scale),
    )


def inputs(made: dict, notebooks: dict, key: str, ledger: str, imports: graph.Imports) -> tuple[list[str], list[str]]:
    """Files that a notebook waits for, and files that it needs in this order only.

    All chapters come before the index, the rest before the ledger, the units of its studies and the notebooks of its
    data before any other.
    """
    notebook, jobs = notebooks[key], made["notebooks"]
    others = [n for n in notebooks.values() if not n.is_index and (notebook.is_index or n.stem != ledger)]
    if notebook.is_index or notebook.stem == ledger:
        return [file for n in others for file in jobs[n.key]["products"]], []
    trained = [unit["stamp"] for unit in made["units"] if unit["study"] in jobs[key]["studies"]]
    data = graph.data_notebooks(notebooks, notebook, imports)
    return trained, [n.done(made["scale"]) for n in data]  # only an order: their modules count in the digest


def without(made: dict, rules: Iterable[str]) -> dict:
    """The plan without the jobs of some rules that failed: nothing waits for them any more."""
    rules = set(rules)
    made = dict(made, without=sorted(rules))
    gone = {u["stamp"] for u in made["units"] if u["rule"] in rules}
    gone |= {f for n in made["notebooks"].values() if n["rule"] in rules for f in n["products"]}
    left = dict(
        made,
        units=[
            dict(u, after=[f for f in u["after"] if f not in gone]) for u in made["units"] if u["rule"] not in rules
        ],
    )
    left["notebooks"] = {
        key: dict(job, **{part: [f for f in job[part] if f not in gone] for part in ("inputs", "before")})
        for key, job in made["notebooks"].items()
        if job["rule"] not in rules
    }
    failed_ends = {"publish": ("published", "readme"), "readme": ("readme",)}
    for rule in rules & failed_ends.keys():
        for name in failed_ends[rule]:
            left.pop(name, None)
    return left


def forget(root: Path, scale: str, made: dict) -> None:
    """Drop what a new plan leaves behind: how units ended, notebooks whose records changed since, a publication that
    somebody undid, and the page and publication of a run that failed or had other notebooks."""
    shutil.rmtree(root / f"build/{scale}/units", ignore_errors=True)
    last = read(root, scale)
    if last.get("without") or last.get("notebooks", {}).keys() != made["notebooks"].keys():
        for name in {"page", "published"} & made.keys():
            (root / made[name]).unlink(missing_ok=True)
    if scale != "smoke":
        publish.forget_if_touched(root, scale)
    for notebook in outdated(root, scale):
        (root / notebook.done(scale)).unlink()


def outdated(root: Path, scale: str) -> list[graph.Notebook]:
    """Executed notebooks whose records changed since."""
    imports, found = graph.Imports(root), []
    for notebook in graph.find_notebooks(root).values():
        done = root / notebook.done(scale)
        if done.exists() and imports.studies(notebook):
            then = json.loads(done.read_text(encoding="utf-8")).get("records", {})
            if then != graph.records(root, imports.studies(notebook), scale):
                found.append(notebook)
    return found
