"""The command that trains: plans, budgets, kills, two at once."""

import importlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from sparseattn.lab import command
from sparseattn.lab.command import main
from sparseattn.lab.measure import REUSE
from sparseattn.lab.study import train, units, without_clocks

HERE = Path(__file__).parent
ONE = dict(TOY_PROBES="no")     # one rate, and so no probes: a third of the processes


@pytest.fixture
def clone(tmp_path):
    (tmp_path / "settings.ini").touch()
    return tmp_path


def start(clone, *arguments, limit=lambda: None, **environment):
    env = os.environ | {"SPARSEATTN_STUDIES": str(HERE / "studies"), "OMP_NUM_THREADS": "1"} | environment
    env["PYTHONPATH"] = os.pathsep.join([str(HERE.parents[1]), env.get("PYTHONPATH", "")])

    def heard():
        signal.signal(signal.SIGINT, signal.SIG_DFL)                    # a shell's background jobs ignore Ctrl-C
        limit()

    return subprocess.Popen([sys.executable, "-m", "sparseattn.studies", *arguments], cwd=clone, env=env, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=heard)


def call(clone, *arguments, **environment):
    process = start(clone, *arguments, **environment)
    text = process.communicate(timeout=300)[0]
    return process.returncode, text


@pytest.fixture
def here(clone, monkeypatch, capsys):
    """The command in this process, for what starts no training: a process less, of seconds."""
    monkeypatch.syspath_prepend(HERE / "studies")
    monkeypatch.chdir(clone)

    def called(*arguments):
        try:
            status = main(["toy"], lambda name: importlib.import_module(name).STUDY, list(arguments))
        except SystemExit as ended:
            status = ended.code
        return status, "".join(capsys.readouterr())
    return called


def records(clone, scale="cpu"):
    found = sorted((clone / f"figures/toy/runs/{scale}").glob("*.json"))
    return {path.stem: json.loads(path.read_text()) for path in found}


@pytest.mark.parametrize("arguments, message", [
    (["nobody"], "there is no study 'nobody'; choose of:"),
    (["toy", "--scale", "huge"], "invalid choice: 'huge'"),
    (["toy", "--rows", "nobody"], "there is no 'nobody'"),
    (["toy", "--seeds", "one"], "whole numbers"),
    (["toy", "--seeds", "9"], "there is no 9"),
    (["toy", "--budget", "-1"], "positive number of minutes"),
    (["toy", "--unit", "nobody"], "toy: there is no unit 'nobody'"),
    (["--unit", "linear-0"], "--unit: expected one study before it"),
    (["toy", "--jobs", "0"], "expected a whole number from 1 on, got '0'"),
    (["toy", "--device", "gpu"], "device is 'gpu'; expected cpu, cuda"),
])
def test_wrong_arguments_are_named(here, arguments, message):
    status, text = here(*arguments)
    assert status == 2 and message in text


def test_the_exit_status_is_that_of_wrong_arguments(clone):
    status, text = call(clone, "nobody")
    assert status == 2 and "there is no study 'nobody'" in text and "Traceback" not in text


def test_a_gpu_scale_without_a_gpu_says_so(here):
    import torch
    if torch.cuda.is_available():
        pytest.skip("there is one")
    status, text = here("toy", "--scale", "gpu")
    assert status == 2 and "needs a CUDA device" in text


def test_the_plan(clone, here):
    status, text = here("toy", "--dry-run")
    assert status == 0 and "9 units, 9 to train" in text and not records(clone)
    status, text = here("toy", "--scale", "gpu", "--units", "build/plan.json")
    plan = {line["unit"]: line for line in json.loads((clone / "build/plan.json").read_text())}
    needs = [f"figures/toy/runs/gpu/linear-rate-{rate}.json" for rate in ("0.1", "0.01")]
    assert status == 0 and plan["linear-0"]["needs"] == needs
    assert plan["linear-0"]["gpu"] and not plan["majority-0"]["gpu"]
    assert plan["linear-0"]["record"] == "figures/toy/runs/gpu/linear-0.json" and not plan["linear-0"]["made"]
    assert plan["linear-0"]["environment"].keys() == REUSE.keys()


def test_the_plan_knows_records_and_names_damaged_ones(clone, here):
    assert call(clone, "toy", "--rows", "majority")[0] == 0
    assert here("toy", "--units", "plan.json")[0] == 0
    made = {line["unit"]: line["made"] for line in json.loads((clone / "plan.json").read_text())}
    assert made["majority-0"] == records(clone)["majority-0"]["finished"][:10] and not made["linear-0"]
    record = clone / "figures/toy/runs/cpu/majority-0.json"
    record.write_text(record.read_text()[:-20])
    status, text = here("toy", "--units", "plan.json")
    assert status == 2 and "toy: majority-0.json: not a whole record" in text and "Traceback" not in text
    assert call(clone, "toy", "--rows", "majority", "--retrain")[0] == 0 and "majority-0" in records(clone)


def test_several_studies_take_turns(clone, monkeypatch):
    monkeypatch.syspath_prepend(HERE / "studies")
    monkeypatch.chdir(clone)
    toy = importlib.import_module("toy").STUDY
    assert main(["a", "b"], lambda name: replace(toy, name=name), ["all", "--units", "plan.json"]) == 0
    plan = json.loads((clone / "plan.json").read_text())
    assert [unit["study"] for unit in plan] == ["a", "b"] * (len(plan) // 2)
    assert [unit["unit"] for unit in plan[::2]] == [unit["unit"] for unit in plan[1::2]]


def test_everything_then_nothing(clone, here):
    rows = ("toy", "--rows", "majority,linear")
    status, text = call(clone, *rows, "--jobs", "2")
    assert status == 0 and len(records(clone)) == 5, text
    before = {p: p.stat().st_mtime_ns for p in (clone / "figures/toy/runs/cpu").iterdir()}
    assert here(*rows)[0] == 0
    assert before == {p: p.stat().st_mtime_ns for p in (clone / "figures/toy/runs/cpu").iterdir()}


def test_training_anew_waits_for_new_probes(clone, monkeypatch):
    """An old record of a probe chooses no rate, however many places are free."""
    rows, folder = ("toy", "--rows", "linear", "--seeds", "0"), clone / "figures/toy/runs/cpu"
    monkeypatch.syspath_prepend(HERE / "studies")
    for unit in units(importlib.import_module("toy").STUDY, "cpu", rows=["linear"], seeds=[0], root=clone):
        train(unit)
    old = max(path.stat().st_mtime_ns for path in folder.iterdir())
    status, text = call(clone, *rows, "--jobs", "3", "--retrain")
    new = {path.stem: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert status == 0 and old < min(new.values()) and max(new, key=new.get) == "linear-0", text
    status, text = call(clone, *rows, "--retrain", "--jobs", "1", "--budget", "0.01")
    assert status == 75, text
    assert "not trained anew, their records stand: linear-rate-0.01, linear-0" in text, text


def test_missing_data_leave_units_out_with_one_line(clone, here, monkeypatch):
    monkeypatch.setenv("TOY_MISSING", "the toy box is empty")
    status, text = here("toy")
    assert status == 0 and text.count("the toy box is empty") == 1 and not records(clone)


def test_a_unit_that_fails_is_told_and_the_others_go_on(clone):
    status, text = call(clone, "toy", "--rows", "majority,linear", "--seeds", "0", TOY_FAILS="1", **ONE)
    assert status == 1 and "the toy was told to fail" in text and "failed:" in text
    assert list(records(clone)) == ["majority-0"]


def test_a_budget_stops_and_the_next_call_goes_on(clone):
    rows = ("toy", "--rows", "linear", "--seeds", "0")
    status, text = call(clone, *rows, "--jobs", "1", "--budget", "0.2", TOY_SECONDS="0.3", **ONE)
    assert status == 75 and "run it again to go on" in text, text
    assert call(clone, *rows, **ONE)[0] == 0
    assert "linear-0" in records(clone)


def test_two_commands_train_every_unit_once(clone):
    both = [start(clone, "toy", "--rows", "linear", TOY_SECONDS="0.02", **ONE) for _ in range(2)]
    text = [process.communicate(timeout=300)[0] for process in both]
    assert {process.returncode for process in both} <= {0, 75}, text
    assert list(records(clone)) == ["linear-0", "linear-1"], text
    logs = [p.read_text() for p in clone.rglob("log.txt")]
    assert not any("Traceback" in log for log in logs)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves(clone, number):
    process = start(clone, "toy", "--rows", "linear", "--seeds", "0", "--jobs", "1", TOY_SECONDS="0.2", **ONE)
    while not list(clone.rglob("checkpoint.pt")) and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(number)
    text = process.communicate(timeout=60)[0]
    assert process.returncode == 75 and "run it again to go on" in text and "Traceback" not in text, text


def small_files(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


def test_a_plan_without_room_is_one_sentence(clone):
    status, text = call(clone, "toy", "--units", "build/plan.json", limit=partial(small_files, 100))
    assert status == 1 and "plan.json is not written: File too large" in text and "Traceback" not in text
    assert not list((clone / "build").iterdir())


def test_a_unit_that_could_not_say_why_it_failed(clone, monkeypatch):
    monkeypatch.syspath_prepend(HERE / "studies")
    unit = units(importlib.import_module("toy").STUDY, "cpu", root=clone)[0]
    unit.folder.mkdir(parents=True)
    (unit.folder / "log.txt").write_text("words of an earlier run\n")
    ended = command._ended(unit, SimpleNamespace(failed=[unit], said={unit: 24}))
    assert "is the disk full?" in ended and "earlier" not in ended
    assert "settings changed" in command._ended(unit, SimpleNamespace(failed=[]))


def test_kills_and_a_full_disk_give_the_same_record(clone, tmp_path):
    """Five kills of the training process, at moments drawn with a fixed seed; then no room for a checkpoint."""
    whole = tmp_path / "whole"
    whole.mkdir()
    (whole / "settings.ini").touch()
    assert call(whole, "toy", "--unit", "linear-0", **ONE)[0] == 0
    moments = random.Random(0)
    for number in range(5):
        for old in clone.rglob("progress.json"):
            old.unlink()
        process = start(clone, "toy", "--unit", "linear-0", TOY_SECONDS="0.1", **ONE)
        while not list(clone.rglob("progress.json" if number else "checkpoint.pt")):
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(moments.uniform(0, 1.9))             # an epoch takes two seconds, and ends with a checkpoint
        process.kill()
        assert process.wait() == -signal.SIGKILL
    kept = next(clone.rglob("checkpoint.pt"))
    before = kept.read_bytes()
    status, text = call(clone, "toy", "--unit", "linear-0", limit=partial(small_files, len(before) // 2), **ONE)
    assert status == 1 and "File too large" in text and "Traceback" not in text, text
    assert kept.read_bytes() == before and not list(kept.parent.glob(".checkpoint*"))
    assert call(clone, "toy", "--unit", "linear-0", **ONE)[0] == 0
    assert without_clocks(records(clone)["linear-0"]) == without_clocks(records(whole)["linear-0"])


def test_it_works_without_jupyter(clone):
    """A machine with a GPU may have torch, numpy, scipy, pandas and tqdm only."""
    blocked = clone / "blocked"
    absent = ("matplotlib", "seaborn", "IPython", "nbdev", "papermill", "sklearn", "joblib", "tabulate", "snakemake",
              "jaxtyping")
    for name in absent:
        (blocked / name).mkdir(parents=True)
        (blocked / name / "__init__.py").write_text(f"raise ImportError('{name} is not there')")
    status, text = call(clone, "toy", "--rows", "linear", "--seeds", "0", PYTHONPATH=str(blocked), **ONE)
    assert status == 0 and list(records(clone)) == ["linear-0"], text
