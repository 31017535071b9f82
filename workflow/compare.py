"""Compare the tables of a run with the committed ones.

    python workflow/compare.py [--scale smoke]

Notebooks that neither train nor time compute the same at every scale, but for what a setting of the scale changes:
sizes, trials, steps. compare.yaml names those columns, each with the setting as it stands in the notebook; where its
values at the two scales are the same, the columns are compared too. All other numbers must agree within the tolerance
stated there, all other words exactly. Of claims, all but the evidence is compared; a claim may be open at smoke scale.
"""

from __future__ import annotations

import argparse
import ast
import csv
import functools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parent))
import graph
import publish

TRACE = "trace.csv"  #: lines of a clock, from which other tables are made; not compared
CLOCK = "a clock"  #: in place of a setting: the column is a time, or memory in use
OPEN = ("not attempted", "undecided")  #: verdicts of a run too small to decide
Rows = list[dict[str, str]]


@dataclass(frozen=True)
class Table:
    """What the comparison of one table found."""

    notebook: str  #: stem
    name: str  #: file name
    wrong: str  #: where it differs; empty: it agrees
    left: tuple[str, ...]  #: what was left out, since a setting of the scale or a clock decides it


@functools.cache
def settings() -> dict:
    """compare.yaml."""
    return yaml.safe_load(Path(__file__).with_name("compare.yaml").read_text(encoding="utf-8"))


def compared(notebooks: list[graph.Notebook], whole_machine: list[str], ledger: str) -> list[graph.Notebook]:
    """The notebooks with results that neither train nor time, and those that compare.yaml adds."""
    kept = (n for n in notebooks if n.has_parameters and not n.is_index and n.stem != ledger)
    return [n for n in kept if n.stem not in whole_machine or n.stem in settings()["differ"]]


def differs(setting: str, ours: str, theirs: str) -> bool:
    """Is a setting, `run.pick(smoke=20, cpu=400)`, another one at scale `ours` than at `theirs`? A clock always is."""
    if setting == CLOCK:
        return True
    values = {k.arg: ast.dump(k.value) for k in ast.parse(setting, mode="eval").body.keywords}
    return _value(values, ours) != _value(values, theirs)


def _value(values: dict[str, str], scale: str) -> str:
    """The value at a scale: that of the next smaller one which is named."""
    return next(values[s] for s in reversed(graph.SCALES[: graph.SCALES.index(scale) + 1]) if s in values)


def compare(notebook: graph.Notebook, ours: Path, theirs: Path) -> list[Table]:
    """Compare every CSV file of two results folders of a notebook.

    Args:
        ours: folder of this run.
        theirs: folder of the committed results.
    """
    scales = [json.loads((f / "run.json").read_text(encoding="utf-8"))["scale"] for f in (ours, theirs)]
    rules, tables = settings()["differ"].get(notebook.stem, {}), []
    for name in sorted({p.name for folder in (ours, theirs) for p in folder.glob("*.csv")} - {TRACE}):
        missing = [f"missing {side}" for side, f in (("here", ours), ("there", theirs)) if not (f / name).exists()]
        if missing:
            tables.append(Table(notebook.stem, name, missing[0], ()))
            continue
        rule = [r for r in rules.get(name, []) if differs(r["by"], *scales)]
        left = {column for r in rule for column in r.get("columns", [])}
        more = any(r.get("rows") for r in rule)
        rows = read_rows(ours / name), read_rows(theirs / name)
        wrong = wrong_claims(*rows) if name == "claims.csv" else wrong_table(*rows, left, more)
        tables.append(Table(notebook.stem, name, wrong, (*sorted(left), *["rows"] * more)))
    return tables


def read_rows(path: Path) -> Rows:
    """Rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def wrong_table(ours: Rows, theirs: Rows, left: set[str] = frozenset(), more: bool = False) -> str:
    """Where two tables differ; empty where they agree.

    Args:
        left: columns that are not compared.
        more: the longer table may have rows that the shorter one has not.
    """
    if not ours or not theirs:
        return "" if ours == theirs else "one of them is empty"
    if list(ours[0]) != list(theirs[0]):
        return f"columns {', '.join(ours[0])} and {', '.join(theirs[0])}"
    if missing := left - ours[0].keys():
        return f"no column {', '.join(sorted(missing))}"
    columns = [c for c in ours[0] if c not in left]
    if more:
        short, long = sorted((ours, theirs), key=len)
        rest = iter(long)
        lost = next((r for r in short if not any(all(same(r[c], o[c]) for c in columns) for o in rest)), None)
        return f"no row like {', '.join(lost[c] for c in columns)}" if lost else ""
    if len(ours) != len(theirs):
        return f"{len(ours)} and {len(theirs)} rows"
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True), 1):
        for column in columns:
            if not same(a[column], b[column]):
                return f"row {number}, {column}: {a[column]} and {b[column]}"
    return ""


def wrong_claims(ours: Rows, theirs: Rows) -> str:
    """Where two lists of claims differ, their evidence aside, in the columns that both have."""
    ids, others = [r["id"] for r in ours], [r["id"] for r in theirs]
    if ids != others:
        return f"claims {', '.join(sorted(set(ids) ^ set(others))) or 'in another order'}"
    for a, b in zip(ours, theirs, strict=True):
        for column in (a.keys() & b.keys()) - {"evidence"}:
            if a[column] != b[column] and not (column == "verdict" and a[column] in OPEN):
                return f"{a['id']}, {column}: {a[column]} and {b[column]}"
    return ""


def same(a: str, b: str) -> bool:
    """Two cells: numbers within the tolerance, words exactly."""
    if a == b:
        return True
    try:
        x, y = float(a), float(b)
    except ValueError:
        return False
    tolerance = settings()["tolerance"]
    return math.isfinite(x - y) and abs(x - y) <= tolerance["absolute"] + tolerance["relative"] * max(abs(x), abs(y))


def unknown_settings(notebook: graph.Notebook) -> list[str]:
    """Settings and tables that compare.yaml names and the notebook has not."""
    code = "\n".join(source for kind, _, source in notebook.cells if kind == "code")
    packed, rules = "".join(code.split()), settings()["differ"].get(notebook.stem, {})
    named = [r["by"] for rule in rules.values() for r in rule if r["by"] != CLOCK]
    lost = [s for s in named if "".join(s.split()) not in packed]
    return lost + [name for name in rules if f'"{Path(name).stem}"' not in code]


def collection(root: Path, ours: Path, theirs: Path) -> list[Table]:
    """Compare all notebooks that can be compared and ran; `ours` and `theirs` are folders like figures/."""
    config = publish.settings()
    notebooks = compared(list(graph.find_notebooks(root).values()), config["whole_machine"], config["ledger"])
    pairs = ((n, ours / n.stem, theirs / n.stem) for n in notebooks)
    ran = (p for p in pairs if all((folder / "run.json").exists() for folder in p[1:]))
    return [table for pair in ran for table in compare(*pair)]


def main(argv: list[str] | None = None) -> int:
    """Command line; the exit status is 1 when a table differs."""
    parser = argparse.ArgumentParser(description="compare the tables of a run with the committed ones")
    parser.add_argument("--scale", choices=graph.SCALES, default="smoke")
    parser.add_argument("--root", type=Path, default=Path.cwd())
    args = parser.parse_args(argv)
    root = args.root.resolve()
    tables = collection(root, root / f"build/{args.scale}/figures", root / "figures")
    wrong = [t for t in tables if t.wrong]
    for t in wrong:
        print(f"{t.notebook}/{t.name}: {t.wrong}")
    left = sum(bool(t.left) for t in tables)
    print(f"{len(tables)} tables compared, {len(wrong)} differ; in {left} a setting or a clock decides some columns")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
