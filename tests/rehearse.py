"""Execute a notebook at a large scale on a CPU, with the sizes of smoke scale and trainings of two steps.

    python tests/rehearse.py pat/63_scenes gpu FOLDER [--empty]

What it writes goes to FOLDER. With --empty there are no records, as where the data of a study are missing.
"""

import os
import sys
from pathlib import Path

from sparseattn.lab import run, study

ROOT = Path(__file__).parent.parent
LENGTHS = {"steps": 2, "epoch": 1, "probe": 1, "warm-up": 1, "seeds": 1}
AT = study.Study.at


def settings(one: study.Study, scale: str) -> dict:
    """The recipe of a scale, the data of smoke, and two steps."""
    recipe = AT(one, scale)
    return AT(one, "smoke") | {name: recipe[name] for name in study.RECIPE} | LENGTHS


def shorten(scale: str, folder: Path, empty: bool) -> None:
    """Small settings under the name of a large scale; records that are made here and now, or none."""
    pick = run.pick

    def records(one, name, *, root=None):
        chosen = study.units(one, name, root=folder)
        found = [] if empty else [study.train(unit) for unit in chosen]
        lasting, tried = ([r for r in found if (r["kind"] == "probe") == probe] for probe in (False, True))
        return study.Records(one, name, lasting, tried, [unit.name for unit in chosen] if empty else [])

    study.Study.at, study.records = lambda one, _: settings(one, scale), records
    run.pick = lambda _, **given: pick("smoke", **given)
    run._Setup.folder = property(lambda self: folder / "figures" / self.stem)


def main(key: str, scale: str, folder: str, *empty: str) -> None:
    """Command line."""
    os.environ["SPARSEATTN_DEVICE"] = "cpu"
    sys.path.append(str(ROOT / "workflow"))
    import plain

    place = Path(folder).resolve()
    shorten(scale, place, bool(empty))
    plain.execute(ROOT / f"nbs/{key}.ipynb", place / "executed.ipynb", {"scale": scale}, ROOT)


if __name__ == "__main__":
    main(*sys.argv[1:])
