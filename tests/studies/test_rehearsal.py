"""Every study at every scale with two steps: no branch is met first on a GPU."""

import dataclasses
import json

import pytest
from rehearse import settings
from sparseattn import studies
from sparseattn.lab import study as S


def rehearsal(study, scale):
    """The study with the recipe of a scale, the data of smoke, and two steps."""
    return dataclasses.replace(study, settings={name: (value,) * 5 for name, value in settings(study, scale).items()})


@pytest.mark.parametrize("scale", S.SCALES)
@pytest.mark.parametrize("name", studies.names())
def test_two_steps_at_every_scale(name, scale, tmp_path, monkeypatch):
    """The first network with every rate that is tried; at the largest scale the others with one."""
    monkeypatch.delenv("SPARSEATTN_DATA", raising=False)
    study = rehearsal(studies.find(name), scale)
    once = dataclasses.replace(study, settings=study.settings | {"rates": (study.at(scale)["rates"][:1],) * 5})
    first, *others = [row for row, options in study.rows.items() if not options.get("floor")]
    for tried, rows in ((study, [first]), (once, others if scale == "paper" else [])):
        for unit in (unit for row in rows for unit in S.units(tried, scale, rows=[row], seeds=[0], root=tmp_path)):
            record = S.train(unit)
            assert record["steps"] == record["setting"]["steps"] and S.current(unit) == record


@pytest.mark.parametrize("name", studies.names())
def test_what_a_study_says_of_itself(name):
    study = studies.find(name)
    assert study.name == name and study.title and not study.title.endswith(".")
    assert any(options.get("floor") for options in study.rows.values()), "a study has floors"
    for scale in S.SCALES:
        json.dumps(study.at(scale))
        assert study.at(scale)["steps"] >= study.at(scale)["probe"] > 0
    for values in study.settings.values():
        assert len(values) == len(S.SCALES) + 1
    slow = [u.name for u in S.units(study, "cpu") if u.setting()["minutes"] > 45]
    assert not slow, "a unit takes at most 45 minutes"
    assert isinstance(study.missing(study.at("cpu")), str)


def test_names_are_found():
    with pytest.raises(ModuleNotFoundError):
        studies.find("nobody")
    assert all(isinstance(studies.find(name), S.Study) for name in studies.names())
