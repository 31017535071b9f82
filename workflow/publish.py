"""Make a finished run the committed one: figures/, the outputs stored in nbs/, the ledger's block in README.md.

    python workflow/publish.py results --scale cpu [--only hept]
    python workflow/publish.py readme --scale cpu

Everything is checked before anything is written. A folder of figures/ is replaced as a whole. Results of a larger
scale stay: where figures/<stem>/ was made at `gpu`, a run at `cpu` leaves it alone and says so (delete the folder to
have it replaced). The ledger and the index gather what is there and follow every run. What stood in figures/ before
is kept in build/<scale>/committed/ for the page.
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

import yaml

sys.path.insert(0, str(Path(__file__).parent))
import graph

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
    """Raise `Refused` for absolute paths in the text files of a results folder."""
    for path in sorted(folder.iterdir()):
        if path.suffix in TEXT and (paths := absolute_paths(path.read_text(encoding="utf-8"))):
            raise Refused(f"{path.name} in figures/{folder.name} names a path of this machine, {paths[0]}")


def manifest(figures: Path) -> str:
    """Every file below figures/ with its hash, sorted."""
    paths = sorted(p for p in figures.rglob("*") if p.is_file() and p != figures / "MANIFEST.json")
    files = {p.relative_to(figures).as_posix(): _sha256(p) for p in paths}
    return json.dumps(files, indent=1) + "\n"


def replace_folder(source: Path, target: Path) -> None:
    """Put a copy of `source` in the place of `target` by renaming."""
    new, old = target.with_name(f".{target.name}.new"), target.with_name(f".{target.name}.old")
    for leftover in (new, old):
        shutil.rmtree(leftover, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, new)
    if target.exists():
        os.replace(target, old)
    os.replace(new, target)
    shutil.rmtree(old, ignore_errors=True)


def keep_committed(root: Path, scale: str) -> None:
    """Copy what stands in figures/ to build/<scale>/committed/, for the page."""
    if (root / "figures").is_dir():
        replace_folder(root / "figures", root / f"build/{scale}/committed")


def results(root: Path, scale: str, only: str = "") -> list[str]:
    """Publish the notebooks of a chapter (empty: of all).

    Returns:
        What was written and what was left, one line each.

    Raises:
        Refused: an output must not be committed; nothing was written then.
        ValueError: the scale is smoke.
    """
    if scale == "smoke":
        raise ValueError("smoke results are never published")
    config = settings()
    collection = graph.find_notebooks(root)
    notebooks = graph.select(collection, only, config["ledger"]).values()
    texts, folders, lines = {}, {}, []
    for notebook in notebooks:
        built, committed = root / f"build/{scale}/figures/{notebook.stem}", root / "figures" / notebook.stem
        gathers = notebook.is_index or notebook.stem == config["ledger"]
        if not gathers and graph.SCALES.index(scale_of(committed)) > graph.SCALES.index(scale):
            lines.append(f"kept figures/{notebook.stem}, made at {scale_of(committed)}")
            continue
        source = json.loads((root / notebook.path).read_text(encoding="utf-8"))
        executed = json.loads((root / notebook.executed(scale)).read_text(encoding="utf-8"))
        texts[root / notebook.path] = notebook_text(with_outputs(source, executed, str(notebook.path)))
        if notebook.has_parameters:
            check_folder(built)
            folders[committed] = built
    keep_committed(root, scale)
    (root / "figures").mkdir(exist_ok=True)
    for committed, built in folders.items():
        replace_folder(built, committed)
        lines.append(f"wrote figures/{committed.name}")
    for folder in sorted(
        p for p in (root / "figures").glob("*/") if p.name not in {n.stem for n in collection.values()}
    ):
        shutil.rmtree(folder)
        lines.append(f"removed figures/{folder.name}: there is no such notebook")
    for path, text in texts.items():
        if path.read_text(encoding="utf-8") != text:
            graph.write_text(path, text)
            lines.append(f"wrote the outputs of {path.relative_to(root)}")
    ledger = root / "figures" / config["ledger"] / config["ledger_table"]
    if ledger.exists():
        graph.write_text(root / "figures/claims.csv", ledger.read_text(encoding="utf-8"))
    graph.write_text(root / "figures/MANIFEST.json", manifest(root / "figures"))
    written = (
        [p for folder in folders for p in sorted(folder.iterdir())] + list(texts) + [root / "figures/MANIFEST.json"]
    )
    record = {p.relative_to(root).as_posix(): _sha256(p) for p in written}
    graph.write_text(root / f"build/{scale}/published.json", json.dumps(record, indent=1, sort_keys=True) + "\n")
    return lines


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
        files = json.loads(record.read_text(encoding="utf-8"))
        if any(not (root / name).exists() or _sha256(root / name) != value for name, value in files.items()):
            record.unlink()
    config, text = settings(), (root / "README.md").read_text(encoding="utf-8")
    block = root / "figures" / config["ledger"] / config["ledger_readme"]
    if not block.exists() or block.read_text(encoding="utf-8").strip() not in text:
        (root / f"build/{scale}/readme.done").unlink(missing_ok=True)


def settings() -> dict:
    """The workflow's config.yaml."""
    return yaml.safe_load((Path(__file__).parent / "config.yaml").read_text(encoding="utf-8"))


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main(argv: list[str] | None = None) -> int:
    """Command line; the exit status is 1 when something was refused."""
    parser = argparse.ArgumentParser(description="make a finished run the committed one")
    parser.add_argument("what", choices=("results", "readme"))
    parser.add_argument("--scale", choices=graph.SCALES[1:], required=True)
    parser.add_argument("--only", default="", metavar="CHAPTER")
    parser.add_argument("--root", type=Path, default=Path.cwd())
    args = parser.parse_args(argv)
    from execute import say

    began = time.time()
    try:
        lines = (
            results(args.root.resolve(), args.scale, args.only)
            if args.what == "results"
            else [readme(args.root.resolve(), args.scale)]
        )
    except Refused as error:
        say(f"not published: {error}")
        return 1
    say("\n".join([*lines, f"publish {args.what} done in {time.time() - began:.0f} s"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
