"""Every branch of a verdict, and the ledger's files."""

import dataclasses
import itertools
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from sparseattn.lab import SCALES, claims
from sparseattn.lab.claims import DECIDED, KINDS, VERDICTS, Claim, ClaimMismatch
from sparseattn.lab.decide import Experiment

ROOT = Path(__file__).parents[2]
FACTS = dict(notebook="30_example", where="Thm 1", statement="something", kind="bound")
NUMBER = dict(FACTS, kind="number", scale="cpu", paper=90.0, ours=91.0, tolerance=0.5)
YES, NO = ("text", True), ("text", False)
BEYOND = 90.5 + 2**-9  # 0.4 % of the tolerance beyond its edge; all of these numbers are exact in binary
MARKS = dict(origin="stated", phrase="better with more tables", decided="exact", uses="X-9 H-3.4-UB1")


OURS, THEIRS = ("text", True), ("text", True, "Sec 2")  # a condition that we add, one that the paper states
READINGS = dict(
    stated=[True, False, None],
    second=[None, YES, NO],
    argument=[None, YES, NO],
    condition=[None, OURS, NO, THEIRS, ("text", False, "Sec 2")],
    typo=[None, YES, NO],
    sharper=[None, YES, NO],
)


def decided(stated, second, argument, condition, typo, sharper):
    """The table of verdicts, written down once more: by what passed, case by case."""
    if stated is None:                                              # an open statement
        return "does not follow" if argument == NO else "undecided"
    true_as_printed = stated or condition == THEIRS
    if (second == NO and true_as_printed) or (second == YES and not true_as_printed):
        return "ambiguous"
    if not true_as_printed:
        return {(YES, OURS): "typo", (YES, None): "typo", (None, OURS): "holds with a condition"}.get(
            (typo if typo == YES else None, condition if condition == OURS else None), "false as stated"
        )
    if argument == NO:
        return "does not follow"
    return "loose" if sharper == YES else "holds"


def test_truth_table():
    """Every combination of what checks can find has the verdict of the rule, and every verdict of statements occurs."""
    found = []
    for facts in itertools.product(*READINGS.values()):
        findings = dict(zip(READINGS, facts, strict=True))
        given = {name for name in READINGS if name != "stated" and findings[name] is not None}
        if findings["stated"] is None and given != {"argument"}:
            with pytest.raises(ValueError, match="X-1: stated is None, an open statement; it takes"):
                claims.claim("X-1", expect=None, **FACTS, **findings)
            continue
        verdict = decided(**findings)
        assert claims.claim("X-1", expect=None, **FACTS, **findings).verdict == verdict, findings
        found.append(verdict)
    assert set(found) == {"undecided", *VERDICTS[: VERDICTS.index("reproduced")]} and len(found) == 2 * 405 + 2


@pytest.mark.parametrize("verdict", VERDICTS)
def test_an_unexpected_verdict_stops(verdict):
    if verdict == "does not follow":
        assert claims.claim("X-1", expect=verdict, **FACTS, stated=True, argument=NO).verdict == verdict
        return
    with pytest.raises(ClaimMismatch, match=f"X-1: the checks say 'does not follow', the notebook expects '{verdict}'"):
        claims.claim("X-1", expect=verdict, **FACTS, stated=True, argument=NO)


def test_a_finding_of_ours_has_one_reading():
    facts = dict(FACTS, origin="ours", expect=None, stated=True)
    assert claims.claim("X-1", **facts, sharper=YES, repair=YES).verdict == "loose"
    for name in ("second", "argument", "condition", "typo"):
        with pytest.raises(ValueError, match=f"X-1: a finding of ours is put as it is meant; it takes no {name}"):
            claims.claim("X-1", **facts, **{name: YES})


@pytest.mark.parametrize("wrong", ["yes", 0.3, math.nan, None])
def test_a_truth_is_what_a_check_returned(wrong):
    for name in claims.FINDINGS:
        with pytest.raises(ValueError, match=f"X-1: {name} is .*; expected the truth that a check returned"):
            claims.claim("X-1", expect=None, **FACTS, stated=True, **{name: ("text", wrong)})
        for finding in ("text", ("text",), ("text", True, "place", 1), True, ("", True), (True, "text")):
            with pytest.raises(ValueError, match=f"X-1: {name} is .*; expected"):
                claims.claim("X-1", expect=None, **FACTS, stated=True, **{name: finding})
    if wrong is not None:
        with pytest.raises(ValueError, match="X-1: stated is"):
            claims.claim("X-1", expect=None, **FACTS, stated=wrong)
    with pytest.raises(ValueError, match="X-2: partly is .*; expected"):
        claims.reproduce("X-2", **dict(NUMBER, partly=("text", wrong), expect=None))


@pytest.mark.parametrize("true", [True, np.bool_(True), np.array(3) > 2, torch.tensor(3) > 2])
def test_truths_of_numpy_and_torch(true):
    assert claims.claim("X-1", expect="loose", **FACTS, stated=true, sharper=("text", true)).verdict == "loose"


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
    assert make("does not follow", stated=None, argument=("step 2", False)) == "0.5; argument: step 2"
    assert make("holds", stated=False, condition=("n > 1", True, "Eq 1")) == "0.5; under the paper's own n > 1 (Eq 1)"
    both = make("ambiguous", stated=True, second=("every n", False))
    assert both == "0.5; readings: as put here it passed, as 'every n' it failed"
    both = make("ambiguous", stated=False, second=("some n", True))
    assert both == "0.5; readings: as put here it failed, as 'some n' it passed"


@pytest.mark.parametrize("scale, needs", itertools.product(SCALES, SCALES))
def test_claims_wait_for_their_scale(scale, needs):
    small = SCALES.index(scale) < SCALES.index(needs)
    for expect in ("holds", None):
        row = claims.claim("X-1", expect=expect, **FACTS, stated=not small, scale=scale, needs=needs, evidence="0.5")
        early = "not attempted" if scale == "smoke" else "undecided"
        assert row.verdict == (early if small else "holds")
        at = " and ".join(SCALES[SCALES.index(needs) :])
        told = f"needs scale {needs}" if scale == "smoke" else f"0.5; run at scale {scale}, decided at {at}"
        assert row.evidence == (told if small else "0.5")


@pytest.mark.parametrize(
    "ours, partly, verdict",
    [
        (90.5, None, "reproduced"),
        (89.5, NO, "reproduced"),
        (BEYOND, None, "not reproduced"),
        (180 - BEYOND, None, "not reproduced"),
        (BEYOND, NO, "not reproduced"),
        (BEYOND, YES, "partly"),
        (90.5, YES, "reproduced"),
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


@pytest.mark.parametrize("bad", [dict(ours=math.nan), dict(ours=math.inf), dict(paper=math.nan), dict(tolerance=-1.0),
                                 dict(tolerance=math.nan), dict(tolerance=math.inf)])
def test_reproductions_need_numbers(bad):
    with pytest.raises(ValueError, match="X-2: expected finite numbers"):
        claims.reproduce("X-2", **(NUMBER | bad), expect=None)


def test_a_number_that_a_fit_chose_is_not_reproduced():
    for ours, verdict in ((90.5, "consistent"), (BEYOND, "not reproduced")):
        facts = dict(NUMBER, ours=ours, fitted=True)
        assert claims.reproduce("X-2", **facts, expect=verdict).verdict == verdict
    assert claims.reproduce("X-2", **facts, partly=YES, expect="partly").verdict == "partly"


def test_reproductions_wait_for_their_scale():
    row = claims.reproduce("X-2", **dict(NUMBER, scale="smoke", expect="reproduced"))
    assert row.verdict == "not attempted" and row.evidence == "needs scale cpu"
    assert claims.reproduce("X-2", **dict(NUMBER, scale="smoke", needs="smoke", expect="not reproduced"))
    row = claims.reproduce("X-2", **dict(NUMBER, needs="gpu", expect="reproduced"))
    assert row.verdict == "undecided" and row.evidence.startswith("paper 90, ours 91")
    row = claims.reproduce("X-2", **dict(NUMBER, needs="gpu", expect="reproduced", ours=math.nan))
    assert row.verdict == "not attempted" and row.evidence == "needs scale gpu"


def test_not_attempted():
    row = claims.not_attempted("X-3", **FACTS, reason="no GPU")
    assert (row.verdict, row.evidence, row.paper) == ("not attempted", "no GPU", "HEPT")
    with pytest.raises(ValueError, match="X-3: decided is 'training', but nothing decides what was not attempted"):
        claims.not_attempted("X-3", **FACTS, reason="no GPU", decided="training")


def test_what_was_run_is_not_filed_as_not_attempted():
    """In rows that name their origin; older ones are read and made as before."""
    for reason in ("paper 91.9, ours 88.2: noise", "ours only .3", "needs scale gpu; ours -5.4"):
        assert claims.not_attempted("X-3", **FACTS, reason=reason).evidence == reason
        with pytest.raises(ValueError, match="holds a number of ours; what was run is decided, see `decide`"):
            claims.not_attempted("X-3", **FACTS, reason=reason, origin="stated")
    for reason in ("no GPU", "table 3 of theirs, 91.9, needs 60,000 hits", "ours has no GPU", "needs hours 5 to 9"):
        assert claims.not_attempted("X-3", **FACTS, reason=reason, origin="stated").evidence == reason


class Found:
    """An experiment whose verdict is known."""

    decided_by = "training"

    def verdict(self, paper, *, tolerance, sign, printed):
        return "undecided", f"{paper if printed else f'ours {paper}'}, {tolerance}, {sign}"


def test_decide_asks_the_experiment():
    facts = dict(FACTS, kind="order", scale="cpu", tolerance=0.5, experiment=Found())
    row = claims.decide("X-4", **facts, paper=3.0, evidence="600 steps", origin="stated", uses="X-1", source="PAT")
    assert (row.verdict, row.evidence) == ("undecided", "3.0, 0.5, 0 (scale cpu); 600 steps")
    assert (row.decided, row.origin, row.uses, row.paper, row.kind) == ("training", "stated", "X-1", "PAT", "order")
    assert claims.decide("X-4", **facts, paper=None, sign=-1).evidence == "None, 0.5, -1 (scale cpu)"
    assert claims.decide("X-4", **facts, paper=3.0, origin="ours").evidence == "ours 3.0, 0.5, 0 (scale cpu)"
    with pytest.raises(ValueError, match="scale is 'huge'"):
        claims.decide("X-4", **dict(facts, scale="huge"), paper=3.0)
    for wrong in ("expect", "ours", "stated"):  # no word at the claim decides
        with pytest.raises(TypeError, match=wrong):
            claims.decide("X-4", **facts, paper=3.0, **{wrong: "cpu"})
    row = claims.decide("X-4", **facts, paper=3.0, evidence="600 steps", needs="paper")
    assert row.verdict == "undecided" and row.evidence.endswith("600 steps; run at scale cpu, decided at paper")


def test_a_training_is_decided_by_an_interval():
    with pytest.raises(ValueError, match="X-1: a training is decided by an interval beside floors, see `decide`"):
        claims.claim("X-1", **FACTS, expect=None, stated=True, decided="training")


def test_decide_with_an_experiment():
    """The same outcomes, once above the floor and once not."""
    right = {s: np.arange(200) < 150 + s for s in range(3)}
    facts = dict(FACTS, kind="number", scale="cpu", tolerance=0.15, paper=0.75)
    low, high = (Experiment({"HEPT": right}, {"1-NN": np.arange(200) < count}) for count in (80, 149))
    assert claims.decide("X-4", experiment=low, **facts).verdict == "reproduced"
    row = claims.decide("X-4", experiment=high, **facts)
    assert row.verdict == "undecided" and "; HEPT is not two standard errors above 1-NN; " in row.evidence
    assert row.evidence.count("is within chance") == 1


def test_conclude_takes_a_decision():
    facts = dict(FACTS, kind="order", scale="cpu", decided="statistics")
    row = claims.conclude("X-4", ("partly", "p 0.03"), **facts, evidence="9 curves", origin="ours", source="PAT")
    assert (row.verdict, row.evidence, row.decided) == ("partly", "p 0.03 (scale cpu); 9 curves", "statistics")
    assert (row.kind, row.origin, row.paper) == ("order", "ours", "PAT")
    row = claims.conclude("X-4", ("partly", "p 0.03"), **facts, needs="gpu")
    assert (row.verdict, row.evidence) == ("undecided", "p 0.03; run at scale cpu, decided at gpu and paper")
    with pytest.raises(ValueError, match="X-4: a training is decided by an interval beside floors, see `decide`"):
        claims.conclude("X-4", ("partly", "p 0.03"), **facts | {"decided": "training"})


MAKERS = {
    "claim": lambda **o: claims.claim(**{**FACTS, "id": "X", "expect": "holds", "stated": True, **o}),
    "reproduce": lambda **o: claims.reproduce(**{**NUMBER, "id": "X", "expect": "not reproduced", **o}),
    "not_attempted": lambda **o: claims.not_attempted(**{**FACTS, "id": "X", "reason": "none", **o}),
    "decide": lambda **o: claims.decide(
        **{**FACTS, "id": "X", "scale": "cpu", "paper": 1.0, "tolerance": 0.1, "experiment": Found(), **o}
    ),
    "conclude": lambda **o: claims.conclude(
        **{**FACTS, "id": "X", "scale": "cpu", "decided": "clock", "decision": ("partly", "p 0.03"), **o}
    ),
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


@each_maker
def test_origin_phrase_decided_and_uses(make):
    marks = {name: text for name, text in MARKS.items() if name != "decided"}
    for name, text in marks.items():
        assert getattr(make(**marks), name) == text and getattr(make(), name) == ""
    for origin in ("paper", "Stated", None):
        with pytest.raises(ValueError, match=f"origin is {origin!r}; it must be one of stated, implied, ours"):
            make(origin=origin)
    assert make(phrase="one two three four five six seven eight").phrase.endswith("eight")
    with pytest.raises(ValueError, match="X: phrase has 9 words; at most 8"):
        make(phrase="one two three four five six seven eight nine")
    for uses in ("X 1_2", "X-1, X-2", " X-1", "X-1  X-2"):
        with pytest.raises(ValueError, match="uses is .*; letters, digits, dots and hyphens only"):
            make(uses=uses)
    with pytest.raises(ValueError, match="X: uses names the row itself"):
        make(uses="A B X C")
    with pytest.raises(TypeError, match="origins"):
        make(origins="stated")


@pytest.mark.parametrize("make", [MAKERS["claim"], MAKERS["reproduce"]], ids=["claim", "reproduce"])
def test_decided_by(make):
    for decided in set(DECIDED) - {"training"}:
        assert make(decided=decided).decided == decided
    with pytest.raises(ValueError, match="decided is 'fit'; it must be one of proof, exact, statistics"):
        make(decided="fit")
    assert make(decided="clock", scale="smoke", needs="cpu").decided == ""  # nothing has decided yet


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


def test_the_columns_are_written_in_one_order(tmp_path):
    rows = [row(), row("X-2", **MARKS)]
    claims.write(rows, tmp_path / "claims.csv")
    head = (tmp_path / "claims.csv").read_text(encoding="utf-8").splitlines()[0]
    assert head == "id,paper,where,origin,phrase,statement,kind,decided,uses,verdict,evidence,notebook"
    assert set(head.split(",")) == {field.name for field in dataclasses.fields(Claim)}
    assert claims.read(tmp_path / "claims.csv") == rows


def test_files_without_the_later_columns_are_read(tmp_path):
    path = tmp_path / "claims.csv"
    path.write_text("id,paper,where,statement,kind,verdict,evidence,notebook\nX-1,HEPT,Eq 1,a,bound,holds,ok,30_a\n")
    assert claims.read(path) == [Claim("X-1", "HEPT", "Eq 1", "a", "bound", "holds", "ok", "30_a")]


def test_committed_rows_are_read():
    for path in sorted((ROOT / "figures").glob("*/claims.csv")):
        assert claims.read(path), path


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
