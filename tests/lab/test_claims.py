"""Every branch of a verdict, and the ledger's files."""

import dataclasses
import itertools
import math
import os

import pytest

from sparseattn.lab import claims
from sparseattn.lab.claims import KINDS, SCALES, VERDICTS, Claim, ClaimMismatch

FACTS = dict(notebook="30_example", where="Thm 1", statement="something", kind="bound")
NUMBER = dict(FACTS, kind="number", scale="cpu", paper=90.0, ours=91.0, tolerance=0.5)
YES, NO = ("text", True), ("text", False)


def decided(stated, typo, condition, sharper):
    """The table of verdicts, written down once more."""
    if stated:
        return "loose" if sharper == YES else "holds"
    if typo == YES:
        return "typo"
    return "holds with a condition" if condition == YES else "false as stated"


@pytest.mark.parametrize("stated, typo, condition, sharper", itertools.product([True, False], *[[None, YES, NO]] * 3))
def test_verdicts(stated, typo, condition, sharper):
    findings = dict(stated=stated, typo=typo, condition=condition, sharper=sharper)
    verdict = decided(stated, typo, condition, sharper)
    for expect in (verdict, None):
        assert claims.claim("X-1", expect=expect, **FACTS, **findings).verdict == verdict
    for other in VERDICTS:
        if other != verdict:
            with pytest.raises(ClaimMismatch, match=f"X-1: the checks say '{verdict}', the notebook expects '{other}'"):
                claims.claim("X-1", expect=other, **FACTS, **findings)


@pytest.mark.parametrize("stated, expect", [(True, "holds"), (False, "false as stated"), (True, None), (False, None)])
def test_a_repair_that_fails_raises(stated, expect):
    with pytest.raises(ClaimMismatch, match="X-1: the repair 'other' failed its check"):
        claims.claim("X-1", expect=expect, **FACTS, stated=stated, repair=("other", False))


def test_evidence_names_what_decided():
    def make(expect, **findings):
        return claims.claim("X-1", expect=expect, evidence="0.5", **FACTS, **findings).evidence

    assert make("holds", stated=True) == "0.5"
    assert make("loose", stated=True, sharper=("half", True)) == "0.5; sharper: half"
    assert make("typo", stated=False, typo=("minus", True)) == "0.5; read: minus"
    assert make("holds with a condition", stated=False, condition=("n > 1", True)) == "0.5; condition: n > 1"
    assert make("false as stated", stated=False, repair=("other", True)) == "0.5; repair: other"
    assert make("false as stated", stated=False) == "0.5"


@pytest.mark.parametrize("scale, needs", itertools.product(SCALES, SCALES))
def test_claims_wait_for_their_scale(scale, needs):
    small = SCALES.index(scale) < SCALES.index(needs)
    for expect in ("holds", None):
        row = claims.claim("X-1", expect=expect, **FACTS, stated=not small, scale=scale, needs=needs, evidence="0.5")
        assert row.verdict == ("not attempted" if small else "holds")
        assert row.evidence == (f"needs scale {needs}; 0.5" if small else "0.5")


@pytest.mark.parametrize(
    "ours, partly, verdict",
    [
        (90.5, None, "reproduced"),
        (89.5, NO, "reproduced"),
        (90.51, None, "not reproduced"),
        (90.51, NO, "not reproduced"),
        (90.51, YES, "partly"),
        (90.5, YES, "reproduced"),
        (math.nan, None, "not reproduced"),
        (math.inf, None, "not reproduced"),
    ],
)
def test_reproductions(ours, partly, verdict):
    row = claims.reproduce("X-2", **dict(NUMBER, ours=ours, partly=partly, expect=verdict))
    assert row == claims.reproduce("X-2", **dict(NUMBER, ours=ours, partly=partly, expect=None))
    assert row.verdict == verdict and "paper 90" in row.evidence and "scale cpu" in row.evidence
    assert ("text" in row.evidence) == (verdict == "partly")
    for other in VERDICTS:
        if other != verdict:
            with pytest.raises(ClaimMismatch, match="X-2: the checks say"):
                claims.reproduce("X-2", **dict(NUMBER, ours=ours, partly=partly, expect=other))


def test_reproductions_wait_for_their_scale():
    row = claims.reproduce("X-2", **dict(NUMBER, scale="smoke", expect="reproduced"))
    assert row.verdict == "not attempted" and row.evidence.startswith("needs scale cpu; paper 90, ours 91")
    assert claims.reproduce("X-2", **dict(NUMBER, scale="smoke", needs="smoke", expect="not reproduced"))
    assert claims.reproduce("X-2", **dict(NUMBER, needs="gpu", expect="reproduced")).verdict == "not attempted"


def test_not_attempted():
    row = claims.not_attempted("X-3", **FACTS, reason="no GPU")
    assert (row.verdict, row.evidence, row.paper) == ("not attempted", "no GPU", "HEPT")


MAKERS = {
    "claim": lambda **o: claims.claim(**{**FACTS, "id": "X", "expect": "holds", "stated": True, **o}),
    "reproduce": lambda **o: claims.reproduce(**{**NUMBER, "id": "X", "expect": "not reproduced", **o}),
    "not_attempted": lambda **o: claims.not_attempted(**{**FACTS, "id": "X", "reason": "none", **o}),
}
each_maker = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


@each_maker
def test_refuses_kinds_and_ids(make):
    for kind in KINDS:
        assert make(kind=kind).kind == kind
    for kind in ("theorem", "", None, "Bound"):
        with pytest.raises(ValueError, match=f"kind is {kind!r}; it must be one of identity, bound"):
            make(kind=kind)
    for id in ("", "H 1", "H_1", "H-1\n", "H/1", "H-1,"):
        with pytest.raises(ValueError, match="id is .*; letters, digits, dots and hyphens only"):
            make(id=id)


@pytest.mark.parametrize("make", [MAKERS["claim"], MAKERS["reproduce"]], ids=["claim", "reproduce"])
def test_refuses_verdicts_and_scales(make):
    with pytest.raises(ValueError, match="verdict is 'true'; it must be one of holds"):
        make(expect="true")
    for name in ("scale", "needs"):
        with pytest.raises(ValueError, match=f"{name} is 'huge'; it must be one of smoke, cpu, gpu, paper"):
            make(**{name: "huge"})


def test_an_expectation_is_named_or_none_but_not_left_out():
    with pytest.raises(TypeError, match="expect"):
        claims.claim("X-1", **FACTS, stated=True)
    with pytest.raises(TypeError, match="expect"):
        claims.reproduce("X-2", **NUMBER)


def test_shown_as_one_line():
    row = Claim("X-1", "HEPT", "Thm 1", "a <= b", "bound", "holds", "gap 0.1", "30_example")
    assert repr(row) == "X-1 (Thm 1): a <= b -- holds. gap 0.1"
    assert "**X-1**" in row._repr_markdown_() and "**holds**" in row._repr_markdown_()


# --- files


def row(id="X-1", **changes):
    made = Claim(id, "HEPT", "Sec 3, Eq 2", 'a, "b"\nand ≤ c', "bound", "holds", "1e-3; ok", "30_example")
    return dataclasses.replace(made, **changes)


def test_csv_round_trip(tmp_path):
    rows = [row(), row("X-2", statement="", evidence="é\r\n—"), row("X-3")]
    claims.write(rows, tmp_path / "claims.csv")
    assert claims.read(tmp_path / "claims.csv") == rows
    first = (tmp_path / "claims.csv").read_bytes()
    claims.write(rows, tmp_path / "claims.csv")
    assert (tmp_path / "claims.csv").read_bytes() == first
    assert [p.name for p in tmp_path.iterdir()] == ["claims.csv"]


def test_an_empty_ledger(tmp_path):
    claims.write([], tmp_path / "claims.csv")
    assert claims.read(tmp_path / "claims.csv") == []


@pytest.mark.parametrize("failing", ["rows", "rename"])
def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch, failing):
    path = tmp_path / "claims.csv"
    claims.write([row()], path)

    def fail(*args, **options):
        raise OSError("disk full")

    if failing == "rename":
        monkeypatch.setattr(os, "replace", fail)
    else:
        monkeypatch.setattr(claims, "asdict", fail)
    with pytest.raises(OSError, match="disk full"):
        claims.write([row("X-2")], path)
    assert claims.read(path) == [row()]


def test_collects_in_the_order_of_the_notebooks(tmp_path):
    for stem, ids in (("31_b", ["B-1"]), ("30_a", ["A-2", "A-1"]), ("32_c", [])):
        (tmp_path / stem).mkdir()
        claims.write([row(i, notebook=stem) for i in ids], tmp_path / stem / "claims.csv")
    assert [r.id for r in claims.collect(tmp_path)] == ["A-2", "A-1", "B-1"]
    claims.write([row("A-1", notebook="32_c")], tmp_path / "32_c/claims.csv")
    with pytest.raises(ValueError, match="claim A-1 is recorded by 30_a and by 32_c"):
        claims.collect(tmp_path)
    assert claims.collect(tmp_path / "nothing") == []
