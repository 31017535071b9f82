"""Execute a notebook at a large scale on a CPU, with the sizes of smoke scale and trainings of two steps.

    python tests/rehearse.py pat/63_scenes gpu FOLDER [second | some | floors | none]

What it writes goes to FOLDER. The last word says what has a record: all rows; second, their second training
alone; some, the floors and the first row beside them; floors, no training; none, as where the data of a study
are missing.
"""

import os
import sys
from pathlib import Path

from sparseattn.lab import run, study

ROOT = Path(__file__).parent.parent
LENGTHS = {"steps": 2, "epoch": 1, "probe": 1, "warm-up": 1}
AT, READ = study.Study.at, study.records


def settings(one: study.Study, scale: str, seeds: int = 1) -> dict:
    """The recipe of a scale, the data of smoke, and two steps."""
    recipe = AT(one, scale)
    return AT(one, "smoke") | {name: recipe[name] for name in study.RECIPE} | LENGTHS | {"seeds": seeds}


def wanted(one: study.Study, there: str) -> set[str]:
    """Rows that get records."""
    floors = {row for row, options in one.rows.items() if options.get("floor")}
    first = next(row for row in one.rows if row not in floors)
    chosen = {"some": floors | {first}, "floors": floors, "none": set()}
    return chosen.get(there, set(one.rows))


def shorten(scale: str, folder: Path, there: str) -> None:
    """Small settings under the name of a large scale, and records that are made here and now."""
    pick, seeds = run.pick, 2 if there == "second" else 1

    def at(one, name):
        """As `settings`; the data of the scale where there are no records and no files of it."""
        if name == "smoke":
            return AT(one, name)
        real = AT(one, scale)
        absent = ("data",) if there == "none" and one.missing(real) else ()
        return settings(one, scale, seeds) | {name: real[name] for name in absent if name in real}

    def records(one, name):
        for unit in study.units(one, name, root=folder):
            if unit.row in wanted(one, there) and (unit.kind != "network" or unit.seed == seeds - 1):
                study.train(unit)
        return READ(one, name, root=folder)

    study.Study.at, study.records = at, records
    run.pick = lambda _, **given: pick("smoke", **given)
    run._Setup.folder = property(lambda self: folder / "figures" / self.stem)


def main(key: str, scale: str, folder: str, there: str = "all") -> None:
    """Command line."""
    os.environ["SPARSEATTN_DEVICE"] = "cpu"
    sys.path.append(str(ROOT / "workflow"))
    import plain

    place = Path(folder).resolve()
    shorten(scale, place, there)
    plain.execute(ROOT / f"nbs/{key}.ipynb", place / "executed.ipynb", {"scale": scale}, ROOT)


if __name__ == "__main__":
    main(*sys.argv[1:])
