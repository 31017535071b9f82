"""Units, records, digests: what a study promises."""

import dataclasses
import errno
import importlib.util
import itertools
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from sparseattn.lab import run as lab_run
from sparseattn.lab import study as S
from sparseattn.lab.train import Paused

spec = importlib.util.spec_from_file_location("toy_study", Path(__file__).parent / "studies/toy.py")
toy = importlib.util.module_from_spec(spec)
spec.loader.exec_module(toy)
TOY = toy.STUDY


def unit(tmp_path, name="linear-0", scale="smoke"):
    return next(u for u in S.units(TOY, scale, root=tmp_path) if u.name == name)


def ready(tmp_path, name="hidden-layer-0"):
    """A unit whose probes have records."""
    chosen = unit(tmp_path, name)
    for probe in chosen.probes():
        S.train(probe)
    return chosen


@pytest.mark.parametrize("values", [[True, False, True] * 7, [0.5, 0.25], np.arange(70_000, dtype=np.int32),
                                    np.zeros((3, 0)), np.ones((2, 3), np.float64)])
def test_pack_gives_back(values):
    values = np.asarray(values)
    back = S.unpack(json.loads(json.dumps(S.pack(values))))
    assert back.shape == values.shape and (back == values).all()


def test_pack_refuses_what_half_precision_cannot_hold():
    for values in ([1e6], [np.nan]):
        with pytest.raises(ValueError, match="finite"):
            S.pack(values)


def test_digest_sees_labels_and_structure_and_not_the_last_bits():
    x = torch.randn(50, 3, generator=torch.Generator().manual_seed(0))
    assert S.digest({"x": x, "y": [1]}) == S.digest({"y": [1], "x": x * (1 + 1e-7)})
    different = [{"x": x, "y": [1]}, {"x": x, "y": [2]}, {"x": x.T, "y": [1]}, {"x": x * 1.01, "y": [1]}, {"x": x},
                 [x, 1], {"x": x, "y": [True]}, {"x": x, "y": ["1"]}]
    assert len({S.digest(d) for d in different}) == len(different)
    with pytest.raises(TypeError, match="set"):
        S.digest({1})


def test_units_in_order_of_value(tmp_path):
    names = [u.name for u in S.units(TOY, "cpu")]
    assert names == ["majority-0", "linear-rate-0.1", "linear-rate-0.01", "linear-0", "hidden-layer-rate-0.1",
                     "hidden-layer-rate-0.01", "hidden-layer-0", "linear-1", "hidden-layer-1"]
    assert [u.name for u in S.units(TOY, "cpu", rows=["majority"])] == ["majority-0"]
    assert len(S.units(TOY, "cpu", rows=["hidden layer"])) == len(S.units(TOY, "cpu", rows=["hidden-layer"])) == 4
    assert [u.name for u in S.units(TOY, "cpu", rows=["linear"], seeds=[1])] == names[1:3] + ["linear-1"]


@pytest.mark.parametrize("wrong", [dict(scale="large"), dict(rows=["nobody"]), dict(seeds=[7])])
def test_unknown_names_are_named(wrong):
    with pytest.raises(ValueError, match="choose of"):
        S.units(TOY, **{"scale": "cpu"} | wrong)


def test_two_rows_of_one_file_name():
    study = dataclasses.replace(TOY, rows={"a b": {}, "a-b": {}})
    with pytest.raises(ValueError, match="same file name"):
        S.units(study, "cpu")


def test_records_lie_where_they_are_committed(tmp_path):
    assert unit(tmp_path, scale="cpu").place == "figures/toy/runs/cpu/linear-0.json"
    assert unit(tmp_path).place == "build/smoke/studies/toy/runs/smoke/linear-0.json"


def test_a_unit_needs_its_probes(tmp_path):
    with pytest.raises(ValueError, match="learning rate is not chosen yet"):
        S.train(unit(tmp_path))


def test_rate_is_the_best_of_the_probes(tmp_path):
    record = S.train(ready(tmp_path))
    probes = {r["rate"]: r["best score"] for r in map(S.current, unit(tmp_path, "hidden-layer-0").probes())}
    assert probes[record["rate"]] == max(probes.values())


def test_a_record_tells_what_it_was_made_from(tmp_path):
    record = S.train(ready(tmp_path))
    assert record["setting"]["steps"] == record["steps"] == 12 and record["parameters"] == 34
    assert record["data"]["sources"] == ["points on a line"] and len(record["code"]["sparseattn.lab.study"]) == 16
    assert "torch" in record["versions"] and record["outcomes"]["test"]["shape"] == [100]
    assert record["means"]["test"] == pytest.approx(S.unpack(record["outcomes"]["test"]).mean())
    assert not (unit(tmp_path, "hidden-layer-0").folder / "checkpoint.pt").exists()


@pytest.mark.parametrize("stops", [[0], [3], [4], [5], [1, 1, 1, 1]])
def test_interruptions_change_nothing(tmp_path, stops):
    whole = S.train(ready(tmp_path / "a"))
    chosen = ready(tmp_path / "b")
    for count in stops:
        seen = iter(range(100))
        with pytest.raises(Paused):
            S.train(chosen, stop=lambda seen=seen, count=count: next(seen) >= count)
    assert S.without_clocks(S.train(chosen)) == S.without_clocks(whole)


def test_a_row_may_take_longer(tmp_path):
    longer = dataclasses.replace(TOY, rows=TOY.rows | {"longer": dict(hidden=2, longer=3, seeds=1)})
    found = {u.name: u.setting()["steps"] for u in S.units(longer, "smoke", root=tmp_path)}
    assert found["longer-0"] == 3 * found["linear-0"] == 36 and found["longer-rate-0.1"] == found["linear-rate-0.1"]
    facts = [S.Unit(study, "smoke", "linear").facts() for study in (TOY, longer)]
    assert facts[0] == facts[1]


def test_a_record_is_used_and_not_made_again(tmp_path):
    first = S.train(unit(tmp_path, "majority-0"))
    assert S.train(unit(tmp_path, "majority-0")) == first
    made_again = S.train(unit(tmp_path, "majority-0"), retrain=True)
    assert S.without_clocks(made_again) == S.without_clocks(first)


def test_a_record_is_kept_where_there_are_no_data_to_retrain_on(tmp_path):
    first = S.train(chosen := unit(tmp_path, "majority-0"))
    poor = dataclasses.replace(chosen, study=dataclasses.replace(TOY, missing=lambda setting: "no files"))
    with pytest.raises(ValueError, match="no files"):
        S.train(poor, retrain=True)
    assert S.current(chosen) == first


def test_other_settings_void_a_record_and_another_row_does_not(tmp_path):
    S.train(unit(tmp_path, "majority-0"))
    def at(study):
        return S.current(S.units(study, "smoke", root=tmp_path)[0])
    assert at(dataclasses.replace(TOY, rows=TOY.rows | {"new": dict(hidden=2)}))
    assert at(dataclasses.replace(TOY, settings=TOY.settings | {"seeds": (5,) * 5})) is not None
    assert at(dataclasses.replace(TOY, settings=TOY.settings | {"clip": (2.0,) * 5})) is None
    assert at(dataclasses.replace(TOY, rows={"majority": dict(floor=True, other=1)})) is None


DAMAGES = [lambda t: t.replace('"seed": 0', '"seed": 1'), lambda t: t[:-40], lambda t: "", lambda t: "[]"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_refused(tmp_path, damage):
    S.train(unit(tmp_path, "majority-0"))
    path = unit(tmp_path, "majority-0").record
    path.write_text(damage(path.read_text()))
    with pytest.raises(ValueError, match="majority-0.json.*(delete it, or restore it)"):
        S.current(unit(tmp_path, "majority-0"))


def test_two_processes_do_not_train_one_unit(tmp_path):
    chosen = unit(tmp_path, "majority-0")
    with S._lock(chosen), pytest.raises(S.Busy, match="another process"):
        S.train(chosen)
    assert S.train(chosen)["row"] == "majority"


def test_a_full_disk_leaves_no_half_record(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lab_run.os, "replace", full)
    with pytest.raises(OSError, match="space"):
        S.train(unit(tmp_path, "majority-0"))
    monkeypatch.undo()
    assert S.current(unit(tmp_path, "majority-0")) is None
    assert S.train(unit(tmp_path, "majority-0"))["row"] == "majority"


def test_missing_data_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TOY_MISSING", "the toy box is empty")
    with pytest.raises(ValueError, match="majority-0: the toy box is empty"):
        S.train(unit(tmp_path, "majority-0"))


def test_outcomes_must_be_finite_and_some(tmp_path):
    for bad in ([], [np.nan]):
        study = dataclasses.replace(TOY, floor=lambda *_, bad=bad: {"test": np.array(bad, float)})
        with pytest.raises(ValueError, match="outcomes of 'test'"):
            S.train(S.units(study, "smoke", root=tmp_path)[0])


def test_the_number_of_a_part_is_the_mean_or_the_study_s_own(tmp_path):
    for statistic, number in ((None, 2.0), (np.max, 3.0)):
        study = dataclasses.replace(TOY, floor=lambda *_: {"test": np.array([1.0, 3.0])}, statistic=statistic)
        record = S.train(S.units(study, "smoke", root=tmp_path)[0], retrain=True)
        assert record["means"] == {"test": number} and S.unpack(record["outcomes"]["test"]).tolist() == [1.0, 3.0]


def test_reading_at_larger_scales_trains_nothing(tmp_path):
    found = S.records(TOY, "cpu", root=tmp_path)
    assert not found.found and len(found.missing) == 9 and S.summary(found).columns[0] == "row"
    assert S.told(found) == "toy at cpu: no records yet; python -m sparseattn.studies toy --scale cpu"
    S.train(unit(tmp_path, "majority-0", "cpu"))
    found = S.records(TOY, "cpu", root=tmp_path)
    assert found.rows() == found.floors() == ["majority"] and "1 records of" in S.told(found)
    assert "without a record: 'linear'" in S.told(found) and "studies toy --scale cpu" in S.told(found)
    assert found.parts() == ["test"]


def test_rows_without_a_record_are_all_named_once_and_those_with_too_few_apart(tmp_path):
    rows = {"majority": dict(floor=True)} | {f"wide, {i}": dict(hidden=0) for i in range(12)}
    study = dataclasses.replace(TOY, rows=rows, network=lambda *_: torch.nn.Linear(1, 2))
    for some in S.units(study, "cpu", rows=["majority", "wide, 0"], seeds=[0], root=tmp_path):
        S.train(some)
    said = S.told(S.records(study, "cpu", root=tmp_path))
    assert all(said.count(repr(row)) == 1 for row in rows if row != "majority") and "majority" not in said
    assert said.index("fewer trainings than planned") < said.index("'wide, 0'") and "-rate-" not in said


def test_trainings_wait_for_a_floor_of_their_task(tmp_path):
    rows = {"majority": dict(floor=True, task="a"), "linear": dict(hidden=0, task="a"), "other": dict(task="b")}
    study = dataclasses.replace(TOY, rows=rows, network=lambda *_: torch.nn.Linear(1, 2))
    names = {u.name: u for u in S.units(study, "cpu", seeds=[0], root=tmp_path)}
    for name in [name for name in names if name.startswith(("linear", "other"))]:
        S.train(names[name])
    found = S.records(study, "cpu", root=tmp_path)
    assert found.rows() == ["other"] and found.waiting == ["linear-0"]
    assert "until a floor has a record: linear-0" in S.told(found)
    S.train(names["majority-0"])
    found = S.records(study, "cpu", root=tmp_path)
    assert found.rows() == ["majority", "linear", "other"] and not found.waiting


def test_smoke_makes_all_records_now(tmp_path):
    found = S.records(TOY, "smoke", root=tmp_path)
    assert found.rows() == ["majority", "linear", "hidden layer"] and not found.missing and len(found.tried) == 4
    assert list(found.outcomes("linear", "test")) == [0] and found.means("linear", "test")[0] <= 1
    table = S.summary(found)
    assert list(table["row"]) == found.rows() and (table["modules changed since"] == 0).all()


def test_records_of_different_data_do_not_stand_in_one_table(tmp_path):
    S.train(unit(tmp_path, "majority-0", "cpu"))
    other = dataclasses.replace(TOY, data=lambda setting: toy.data(setting) | {"more": 1})
    probe = S.units(other, "cpu", rows=["linear"], root=tmp_path)[0]
    with pytest.raises(ValueError, match="made with other data; here: .*; there: .*SPARSEATTN_DATA"):
        S.train(probe)
    assert not probe.record.exists()
    S.train(probe, retrain=True)
    with pytest.raises(ValueError, match="different data"):
        S.records(TOY, "cpu", root=tmp_path)


def test_settings_table_has_the_papers_column():
    table = S.settings_table(TOY).set_index("setting")
    assert table.loc["steps", "cpu"] == 60 and list(table.columns) == [*S.SCALES, "as printed"]


def test_packing_must_not_change_what_is_measured(tmp_path):
    "Half precision makes equal what was different, which an order would see."
    scores = 1 + np.arange(100) / 1e5
    study = dataclasses.replace(TOY, floor=lambda *_: {"test": scores}, statistic=lambda x: len(np.unique(x)))
    with pytest.raises(ValueError, match="packed they say"):
        S.train(S.units(study, "smoke", root=tmp_path)[0])


def rates(tmp_path, *tried):
    setting = TOY.settings | {"rates": (list(tried),) * 4 + ("-",)}

    def loss(model, batch, generator):
        far = max(p.abs().max().item() for p in model.parameters()) > 1e3
        return toy.loss(model, batch, generator) * (np.nan if far else 1)

    study = dataclasses.replace(TOY, settings=setting, loss=loss)
    return {u.name: u for u in S.units(study, "smoke", root=tmp_path, rows=["linear"])}


def test_a_rate_that_is_too_large_loses(tmp_path):
    made = rates(tmp_path, 0.1, 1e30)
    found = {name: S.train(u) for name, u in made.items()}
    assert found["linear-rate-1e+30"]["best score"] is None and found["linear-0"]["rate"] == 0.1
    alone = rates(tmp_path / "alone", 1e36, 1e30)
    probes = [u for u in alone.values() if u.kind == "probe"]
    assert all(S.train(u)["best score"] is None for u in probes)
    with pytest.raises(ValueError, match="none of the probes came to a number"):
        S.train(alone["linear-0"])


def test_other_probes_void_the_record_of_their_row(tmp_path):
    made = rates(tmp_path, 0.1, 0.01)
    record = {name: S.train(u) for name, u in made.items()}["linear-0"]
    assert S.current(made["linear-0"]) == record
    for u in made.values():
        if u.kind == "probe":
            S.write_record(u.record, S.read_record(u.record) | {"best score": float(u.rate != record["rate"])})
    assert S.current(made["linear-0"]) is None


def test_small_outcomes_keep_their_digits():
    for values in (np.full(50, 2.9e-8), np.linspace(1e-6, 2e-6, 50), np.array([0.0, 1e-9, 3.0])):
        np.testing.assert_allclose(S.unpack(S.pack(values)), values, rtol=1e-6)


def test_a_paused_training_does_not_go_on_with_other_data(tmp_path):
    chosen, calls = rates(tmp_path, 0.1)["linear-0"], itertools.count()    # one rate: no probe stands beside it
    with pytest.raises(Paused):
        S.train(chosen, stop=lambda: next(calls) > 6)
    flipped = dataclasses.replace(chosen.study, data=lambda _: (found := toy.data(_)) | {"y": 1 - found["y"]})
    with pytest.raises(ValueError, match="begun with other data"):
        S.train(dataclasses.replace(chosen, study=flipped))
    assert S.train(chosen)["steps"] == 12
    assert S.train(dataclasses.replace(chosen, study=flipped), retrain=True)["steps"] == 12


def test_a_note_of_the_data_that_was_not_written_whole_stops_no_training(tmp_path):
    """A kill between opening and writing leaves an empty file beside a good checkpoint."""
    chosen, calls = rates(tmp_path, 0.1)["linear-0"], itertools.count()
    with pytest.raises(Paused):
        S.train(chosen, stop=lambda: next(calls) > 6)
    (chosen.folder / "data").write_text("")
    assert S.train(chosen)["steps"] == 12


def test_progress_that_cannot_be_noted_ends_no_training(tmp_path, monkeypatch):
    written = S.write_json

    def full(path, content):
        if path.name == "progress.json":
            raise OSError(28, "No space left on device")
        return written(path, content)

    monkeypatch.setattr(S, "write_json", full)
    assert S.train(rates(tmp_path, 0.1)["linear-0"])["steps"] == 12
