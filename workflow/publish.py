"""Make a finished run the committed one: figures/, the outputs stored in nbs/, the ledger's block in README.md.

    python workflow/publish.py results --scale cpu [--only hept | --only atlas/92_claims]
    python workflow/publish.py readme --scale cpu
    python workflow/publish.py lists

A notebook that did not succeed, or that left what must not be committed, is named, and what is committed of it stays.
A folder of figures/ is replaced as a whole. Results of a larger scale stay: where figures/<stem>/ was made at `gpu`, a
run at `cpu` leaves it alone and says so (delete the folder to have it replaced). The ledger and the index gather what
is there and follow every run. What stood in figures/ before is kept in build/<scale>/committed/ for the page. `lists`
writes what follows from the files as they are: figures/MANIFEST.json, and figures/stale.csv, which names the results
that are older than what they depend on. Results name their code in run.json; figures/executed.json does for pages that
have none.

A folder of figures/ with a runs/ folder holds the records of trainings. No notebook makes them, so they are never
removed here, and the manifest leaves them out: each record carries its own digest.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import graph

RUNS = "runs"  #: figures/<study>/runs/<scale>/*.json, the records of trainings
DERIVED = ("MANIFEST.json", "stale.csv")  #: written from the other files of figures/
EXECUTED = "executed.json"  #: in figures/: of every page without results, the hash of the code that made its outputs
BEGIN, END = "<!-- ledger:begin -->", "<!-- ledger:end -->"
TEXT = (".csv", ".md", ".json", ".txt", ".svg")
#: a path that starts at the root of somebody's machine
ABSOLUTE = re.compile(
    r"(?<![\w./:~>-])/(?:home|root|Users|work|tmp|private|mnt|opt|usr|srv|var|builds|github|runner)/[\w.@-]+|[A-Z]:\\\w+"
)


class Refused(Exception):
    """A result that must not be committed."""


def absolute_paths(text: str) -> list[str]:
    """Absolute paths of a machine in a text."""
    return ABSOLUTE.findall(text)


def output_texts(outputs: list[dict]) -> Iterator[str]:
    """All text in the outputs of a cell; pictures left out."""
    for output in outputs:
        parts = [output.get("text", "")]
        parts += [value for kind, value in output.get("data", {}).items() if not kind.startswith("image/")]
        for part in parts:
            yield part if isinstance(part, str) else "".join(part) if isinstance(part, list) else json.dumps(part)


def check_outputs(where: str, outputs: list[dict]) -> None:
    """Raise `Refused` for outputs with a traceback or an absolute path."""
    if any(o["output_type"] == "error" for o in outputs):
        raise Refused(f"{where}: the output holds a traceback")
    for text in output_texts(outputs):
        if "Traceback (most recent call last)" in text:
            raise Refused(f"{where}: the output holds a traceback")
        if paths := absolute_paths(text):
            raise Refused(f"{where}: the output names a path of this machine, {paths[0]}")


def with_outputs(notebook: dict, executed: dict, name: str) -> dict:
    """The notebook with the outputs of its executed copy, matched by cell id; everything else as it was.

    Raises:
        Refused: a cell was edited since it was executed, or an output must not be committed.
    """
    done = {cell["id"]: cell for cell in executed["cells"]}
    for number, cell in enumerate(notebook["cells"], 1):
        if cell["cell_type"] != "code":
            continue
        ran = done.get(cell["id"])
        if ran is None or "".join(ran["source"]) != "".join(cell["source"]):
            raise Refused(f"{name}, cell {number}: edited since it was executed")
        outputs = [dict(o, metadata={}) if "metadata" in o else dict(o) for o in ran["outputs"]]
        check_outputs(f"{name}, cell {number}", outputs)
        cell.update(outputs=outputs, execution_count=None)
    return notebook


def notebook_text(notebook: dict) -> str:
    """The file's text exactly as `nbdev-clean` writes it."""
    from fastcore.nbio import nb2str
    from nbdev.clean import clean_nb

    clean_nb(notebook, allowed_cell_metadata_keys=["tags"])
    return nb2str(notebook)


def scale_of(folder: Path) -> str:
    """Scale of the results in a folder of figures/; "smoke" where there are none."""
    run = folder / "run.json"
    return json.loads(run.read_text(encoding="utf-8")).get("scale", "smoke") if run.exists() else "smoke"


def check_folder(folder: Path) -> None:
    """Raise `Refused` for absolute paths in the text files of a results folder, and for a rehearsal."""
    made = folder / "run.json"
    run = json.loads(made.read_text(encoding="utf-8")) if made.exists() else {}
    if run.get("scale") in ("gpu", "paper") and run.get("device", "").startswith("cpu"):
        raise Refused(f"figures/{folder.name} at scale {run['scale']} was made on a CPU: a rehearsal")
    for path in sorted(folder.iterdir()):
        if path.suffix in TEXT and (paths := absolute_paths(path.read_text(encoding="utf-8"))):
            raise Refused(f"{path.name} in figures/{folder.name} names a path of this machine, {paths[0]}")


def manifest(figures: Path) -> str:
    """Every file below figures/ with its hash, sorted; records of trainings and the derived lists left out."""
    names = sorted(p.relative_to(figures) for p in figures.rglob("*") if p.is_file())
    kept = [n for n in names if RUNS not in n.parts[1:-1] and n.as_posix() not in DERIVED]
    return json.dumps({n.as_posix(): _sha256(figures / n) for n in kept}, indent=1) + "\n"


def lists(root: Path) -> list[str]:
    """Write the lists that follow from the files as they are.

    Returns:
        What was written, one line each.
    """
    texts = dict(zip(DERIVED, (manifest(root / "figures"), graph.stale_text(root)), strict=True))
    paths = {root / "figures" / name: text for name, text in texts.items()}
    changed = [p for p, text in paths.items() if not p.exists() or p.read_text(encoding="utf-8") != text]
    for path in changed:
        graph.write_text(path, paths[path])
    return [f"wrote {p.relative_to(root)}" for p in changed]


def executed(root: Path, collection: dict[str, graph.Notebook], hashes: dict[str, str]) -> str:
    """figures/executed.json, with new hashes; pages that are gone, or have results now, are left out."""
    path = root / "figures" / EXECUTED
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    pages = {key for key, notebook in collection.items() if not notebook.has_parameters}
    return json.dumps({key: text for key, text in sorted((known | hashes).items()) if key in pages}, indent=1) + "\n"


def replace_folder(source: Path, target: Path) -> None:
    """Put a copy of `source` in the place of `target` by renaming; records of trainings in `target` stay."""
    new, old = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, new, ignore=shutil.ignore_patterns(RUNS))
    if target.exists():
        if (target / RUNS).is_dir():
            shutil.copytree(target / RUNS, new / RUNS)
        os.replace(target, old)
    os.replace(new, target)
    shutil.rmtree(old, ignore_errors=True)


def keep_committed(root: Path, scale: str) -> None:
    """Copy what stands in figures/ to build/<scale>/committed/, for the page."""
    if (root / "figures").is_dir():
        replace_folder(root / "figures", root / f"build/{scale}/committed")


def results(root: Path, scale: str, only: str = "") -> list[str]:
    """Publish one notebook, or the notebooks of a chapter (empty: of all).

    What failed, and what must not be committed, is left as it is committed; build/<scale>/published.json names it.

    Returns:
        What was written and what was left, one line each.

    Raises:
        ValueError: the scale is smoke.
    """
    if scale == "smoke":
        raise ValueError("smoke results are never published")
    config = settings()
    collection = graph.find_notebooks(root)
    one = {only: collection[only]} if only in collection else None
    notebooks = (one or graph.select(collection, only, config["ledger"])).values()
    texts, folders, hashes, lines, refused = {}, {}, {}, [], []
    for notebook in notebooks:
        built, committed = root / f"build/{scale}/figures/{notebook.stem}", root / "figures" / notebook.stem
        gathers = notebook.is_index or notebook.stem == config["ledger"]
        if not gathers and graph.SCALES.index(scale_of(committed)) > graph.SCALES.index(scale):
            lines.append(f"kept figures/{notebook.stem}, made at {scale_of(committed)}")
            continue
        try:
            texts[root / notebook.path] = finished_text(root, notebook, scale)
        except Refused as error:
            refused.append(notebook.key)
            lines.append(f"not published: {error}; what is committed of it stays")
            continue
        if notebook.has_parameters:
            folders[committed] = built
        else:
            hashes[notebook.key] = graph.code_hash(notebook)
    keep_committed(root, scale)
    (root / "figures").mkdir(exist_ok=True)
    for committed, built in folders.items():
        replace_folder(built, committed)
        lines.append(f"wrote figures/{committed.name}")
    stems = {n.stem for n in collection.values()}
    for folder in sorted(p for p in (root / "figures").glob("*/") if p.name not in stems and not (p / RUNS).is_dir()):
        shutil.rmtree(folder)
        lines.append(f"removed figures/{folder.name}: there is no such notebook")
    for path, text in texts.items():
        if path.read_text(encoding="utf-8") != text:
            graph.write_text(path, text)
            lines.append(f"wrote the outputs of {path.relative_to(root)}")
    graph.write_text(root / "figures" / EXECUTED, executed(root, collection, hashes))
    ledger = root / "figures" / config["ledger"] / config["ledger_table"]
    if ledger.exists():
        graph.write_text(root / "figures/claims.csv", ledger.read_text(encoding="utf-8"))
    lines += lists(root)
    written = [p for folder in folders for p in sorted(folder.iterdir()) if p.is_file()] + list(texts)
    written += [root / "figures" / name for name in (*DERIVED, EXECUTED)]
    record = {p.relative_to(root).as_posix(): _sha256(p) for p in written}
    left = dict(files=record, refused=refused)
    graph.write_text(root / f"build/{scale}/published.json", json.dumps(left, indent=1, sort_keys=True) + "\n")
    return lines


def finished_text(root: Path, notebook: graph.Notebook, scale: str) -> str:
    """The notebook with the outputs of this run, as it will be committed.

    Raises:
        Refused: it failed, was not executed as it is now, or left something that must not be committed.
    """
    if not (root / notebook.done(scale)).exists():
        raise Refused(f"{notebook.path} did not succeed")
    source = json.loads((root / notebook.path).read_text(encoding="utf-8"))
    executed = json.loads((root / notebook.executed(scale)).read_text(encoding="utf-8"))
    text = notebook_text(with_outputs(source, executed, str(notebook.path)))
    if notebook.has_parameters:
        check_folder(root / f"build/{scale}/figures/{notebook.stem}")
    return text


def readme(root: Path, scale: str) -> str:
    """Put the ledger's text between the markers of README.md.

    Raises:
        Refused: README.md lacks the markers, or the ledger wrote no text.
    """
    config = settings()
    block = root / "figures" / config["ledger"] / config["ledger_readme"]
    if not block.exists():
        raise Refused(f"the ledger notebook wrote no {config['ledger_readme']}")
    path = root / "README.md"
    old = path.read_text(encoding="utf-8")
    new = with_block(old, block.read_text(encoding="utf-8"))
    if new != old:
        graph.write_text(path, new)
    (root / f"build/{scale}/readme.done").touch()
    return "wrote the ledger's block in README.md" if new != old else "the ledger's block in README.md is up to date"


def with_block(text: str, block: str) -> str:
    """`text` with `block` between its markers."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise Refused(f"README.md must hold {BEGIN} and {END}, once each and in this order")
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    return f"{before}{BEGIN}\n{block.strip()}\n{END}{after}"


def forget_if_touched(root: Path, scale: str) -> None:
    """Publish again when a published file is no longer what was written, say after `git checkout figures`."""
    record = root / f"build/{scale}/published.json"
    if record.exists():
        files = json.loads(record.read_text(encoding="utf-8"))["files"]
        if any(not (root / name).exists() or _sha256(root / name) != value for name, value in files.items()):
            record.unlink()
    config, text = settings(), (root / "README.md").read_text(encoding="utf-8")
    block = root / "figures" / config["ledger"] / config["ledger_readme"]
    if not block.exists() or block.read_text(encoding="utf-8").strip() not in text:
        (root / f"build/{scale}/readme.done").unlink(missing_ok=True)


def settings() -> dict:
    """The workflow's config.yaml."""
    import yaml  # not in the standard library: arguments are checked before anything is installed

    return yaml.safe_load((Path(__file__).parent / "config.yaml").read_text(encoding="utf-8"))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Command line; the exit status is 1 when something was refused."""
    parser = argparse.ArgumentParser(description="make a finished run the committed one")
    parser.add_argument("what", choices=("results", "readme", "lists"))
    parser.add_argument("--scale", choices=graph.SCALES[1:], default="cpu")
    parser.add_argument("--only", default="", metavar="CHAPTER", help="a chapter, or one notebook: atlas/92_claims")
    parser.add_argument("--root", type=Path, default=Path.cwd())
    args = parser.parse_args(argv)
    from execute import say

    began, root = time.time(), args.root.resolve()
    try:
        if args.what == "results":
            told = results(root, args.scale, args.only)
        else:
            told = [readme(root, args.scale)] if args.what == "readme" else lists(root)
    except (Refused, ValueError) as error:
        say(f"not published: {error}")
        return 1
    say("\n".join([*told, f"publish {args.what} done in {time.time() - began:.0f} s"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
