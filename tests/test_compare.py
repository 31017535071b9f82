"""Comparing the tables of two runs: what counts as equal, and what may be left out."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import compare
import graph
import pytest

ROOT = Path(__file__).parent.parent


def rows(text: str) -> compare.Rows:
    """Rows of a table written with spaces."""
    head, *body = [line.split() for line in text.strip().splitlines()]
    return [dict(zip(head, line, strict=True)) for line in body]


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ("1.0", "1", True),
        ("1.0000009", "1", True),
        ("1.000002", "1", False),
        ("1e-10", "0", True),
        ("1e-8", "0", False),
        ("-1", "1", False),
        ("inf", "inf", True),
        ("nan", "nan", True),
        ("inf", "1", False),
        ("nan", "1", False),
        ("", "0", False),
        ("holds", "holds", True),
        ("holds", "typo", False),
    ],
)
def test_cells(a, b, expected):
    assert compare.same(a, b) == compare.same(b, a) == expected


def test_tables():
    table = rows("n error\n1 0.5\n2 0.25")
    assert compare.wrong_table(table, table) == "" == compare.wrong_table([], [])
    assert compare.wrong_table(table, rows("n error\n1 0.5\n2 0.26")) == "row 2, error: 0.25 and 0.26"
    assert compare.wrong_table(table, rows("n error\n1 0.5\n2 0.26"), {"error"}) == ""
    assert compare.wrong_table(table, rows("n error\n1 0.5\n3 0.26"), {"error"}) == "row 2, n: 2 and 3"
    assert compare.wrong_table(table, table[:1]) == "2 and 1 rows"
    assert "empty" in compare.wrong_table(table, [])
    assert "columns n, error and n" in compare.wrong_table(table, rows("n\n1\n2"))
    assert compare.wrong_table(table, table, {"gone"}) == "no column gone"


def test_rows_of_the_shorter_table_are_in_the_longer_one_in_order():
    long = rows("n error\n1 0.5\n2 0.25\n4 0.125")
    for short in (long[:1], long[1:], [long[0], long[2]], long):
        assert compare.wrong_table(short, long, more=True) == "" == compare.wrong_table(long, short, more=True)
    assert compare.wrong_table(rows("n error\n3 0.5"), long, more=True) == "no row like 3, 0.5"
    assert compare.wrong_table([long[2], long[0]], long, more=True)
    assert compare.wrong_table(rows("n error\n2 9"), long, {"error"}, more=True) == ""


def test_claims():
    ours = rows("id verdict statement evidence\nA-1 holds x 3\nA-2 typo y 4")
    assert compare.wrong_claims(ours, rows("id verdict statement evidence\nA-1 holds x 5\nA-2 typo y 4")) == ""
    assert compare.wrong_claims(ours, rows("id verdict statement\nA-1 holds x\nA-2 typo y")) == ""
    other = rows("id verdict statement evidence\nA-1 loose x 3\nA-2 typo y 4")
    assert compare.wrong_claims(ours, other) == "A-1, verdict: holds and loose"
    assert compare.wrong_claims(ours, ours[:1]) == "claims A-2"
    assert compare.wrong_claims(ours, ours[::-1]) == "claims in another order"
    open_ = [dict(ours[0], verdict="undecided"), ours[1]]
    assert compare.wrong_claims(open_, ours) == "" and compare.wrong_claims(ours, open_)


def test_settings_decide_by_their_values():
    assert compare.differs("run.pick(smoke=20, cpu=400)", "smoke", "cpu")
    assert not compare.differs("run.pick(smoke=20, cpu=400)", "cpu", "gpu")
    assert compare.differs("run.pick(smoke=20, cpu=400, gpu=4000)", "cpu", "gpu")
    assert not compare.differs("run.pick(smoke=20, cpu=20)", "smoke", "cpu")
    assert compare.differs(compare.CLOCK, "cpu", "cpu")


def test_every_exception_names_a_setting_of_its_notebook_that_changes_with_the_scale():
    notebooks = {n.stem: n for n in graph.find_notebooks(ROOT).values()}
    for stem, tables in compare.settings()["differ"].items():
        assert compare.unknown_settings(notebooks[stem]) == []
        for name, rules in tables.items():
            with (ROOT / "figures" / stem / name).open(newline="", encoding="utf-8") as file:
                header = next(csv.reader(file))
            for rule in rules:
                assert compare.differs(rule["by"], "smoke", "cpu")
                assert set(rule.get("columns", [])) <= set(header) and (rule.get("columns") or rule.get("rows"))


def test_settings_that_a_notebook_has_not_are_named(monkeypatch):
    rule = [{"by": "run.pick(smoke=1, cpu=2)", "columns": ["a"]}]
    monkeypatch.setitem(compare.settings()["differ"], "30_x", {"t.csv": rule})
    cells = (("code", "", "run.pick(smoke=1,\n cpu=3)"),)
    page = graph.Notebook(Path("nbs/x.ipynb"), "x", "30_x", "", "", None, True, cells)
    assert compare.unknown_settings(page) == ["run.pick(smoke=1, cpu=2)", "t.csv"]


def test_folders(tmp_path, monkeypatch):
    """Files on one side only are named; columns are left out only where their setting differs."""
    rule = [{"by": "run.pick(smoke=1, cpu=2)", "columns": ["a"]}]
    monkeypatch.setitem(compare.settings()["differ"], "30_x", {"t.csv": rule})
    page = graph.Notebook(Path("nbs/x.ipynb"), "x", "30_x", "", "", None, True, ())

    def folder(name: str, scale: str, **tables: str) -> Path:
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text(json.dumps(dict(scale=scale)))
        for stem, text in tables.items():
            (tmp_path / name / f"{stem}.csv").write_text(text)
        return tmp_path / name

    smoke = folder("smoke", "smoke", t="a,b\n1,1\n", u="c\n1\n")
    cpu, again = folder("cpu", "cpu", t="a,b\n2,1\n"), folder("again", "cpu", t="a,b\n3,1\n", u="c\n1\n")
    assert [(t.name, t.wrong, t.left) for t in compare.compare(page, smoke, cpu)] == [
        ("t.csv", "", ("a",)),
        ("u.csv", "missing there", ()),
    ]
    assert [t.wrong for t in compare.compare(page, again, cpu)] == ["row 1, a: 3 and 2", "missing there"]
