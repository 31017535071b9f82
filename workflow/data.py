"""Build a data set from packages of Debian, into the folder `built` of the cache, where `data_path` finds it.

    python workflow/data.py kicad [--packages FOLDER]

The packages are taken from FOLDER (`.deb` files, or folders with the package's name that hold its unpacked files), else
downloaded by `apt-get download`, which needs no rights and installs nothing. A set is built once: it is there, and its
arrays carry their digest. What cannot be built is said in one line; the rows that use it are left out.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import graph
from execute import leave_with_parent, say


class Missing(Exception):
    """Something that is needed to build a set is not here."""


@dataclass(frozen=True)
class DataSet:
    """A set that can be built."""

    name: str
    file: str  #: below the data folder or `built`
    builder: str  #: module:function
    words: tuple[str, ...]  #: names under which notebooks and studies ask for it
    packages: tuple[str, ...] = ()  #: of Debian
    keep: str = "*"  #: which of their files
    needs: tuple[str, ...] = ()  #: official files it is made from
    instead: tuple[str, ...] = ()  #: official files that make it unnecessary
    workers: bool = True  #: the builder takes `workers`


SETS = {
    one.name: one
    for one in (
        DataSet(
            "kicad",
            "kicad/kicad.npz",
            "sparseattn.data.shapes:build_kicad",
            ("kicad", "kicadpart"),
            ("kicad-packages3d",),
            "*.wrl",
        ),
        DataSet(
            "sweethome",
            "sweethome/sweethome.npz",
            "sparseattn.data.shapes:build_sweethome",
            ("sweethome",),
            ("sweethome3d-furniture",),
            "*.sh3f",
        ),
        DataSet(
            "manpages",
            "manpages/pages.npz",
            "sparseattn.data.sequences:build_manpages",
            ("manpages", "retrieval"),
            (
                "manpages",
                "manpages-dev",
                "libssl-doc",
                "git-man",
                "perl-doc",
                "erlang-manpages",
                "tcl8.6-doc",
                "libx11-doc",
            ),
            "*/man/*",
            instead=("tsv_data/new_aan_pairs.train.tsv", "aan/new_aan_pairs.train.tsv"),
            workers=False,
        ),
        DataSet(
            "conformers",
            "peptides_struct/conformers.npz",
            "sparseattn.data.peptides:build_conformers",
            ("conformers",),
            needs=("peptides_func/peptides_func_labels_split.npz", "peptides_func/peptide_multi_class_dataset.csv.gz"),
            instead=("peptides_struct/peptide_structure_dataset.csv.gz", "peptides_struct/train.pt"),
        ),
    )
}


def here(name: str) -> bool:
    """Whether a file is below SPARSEATTN_DATA or was built."""
    return any((folder / name).exists() for folder in graph.data_folders())


def users(notebooks: Iterable[graph.Notebook], imports: graph.Imports) -> dict[str, list[str]]:
    """The sets that notebooks and their studies ask for by name, with the notebooks' names."""
    found: dict[str, list[str]] = {}
    for notebook in notebooks:
        words = imports.words(notebook)
        for one in SETS.values():
            if notebook.chapter != "data" and words.intersection(one.words):
                found.setdefault(one.name, []).append(notebook.stem)
    return found


def to_build(notebooks: Iterable[graph.Notebook], imports: graph.Imports) -> dict[str, list[str]]:
    """Those of `users` that are not here, and that nothing official replaces."""
    found = users(notebooks, imports)
    return {name: stems for name, stems in found.items() if not any(map(here, (SETS[name].file, *SETS[name].instead)))}


def target(one: DataSet) -> Path:
    """Where a set is built."""
    return graph.cache_root() / "built" / one.file


def build(one: DataSet, packages: Path | None, workers: int) -> None:
    """Build one set.

    Raises:
        Missing: a package or an official file is not here; the text says which and how to get it.
    """
    if lacking := [name for name in one.needs if not here(name)]:
        raise Missing(f"{', '.join(lacking)} not below SPARSEATTN_DATA")
    module, function = one.builder.split(":")
    builder = getattr(importlib.import_module(module), function)
    options = {"path": target(one)} | ({"workers": workers} if one.workers else {})
    if not one.packages:
        builder(**options)
        return
    work = graph.cache_root() / "packages"
    work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=work) as folder:
        for package in one.packages:
            unpack(package, Path(folder), packages, one.keep)
        builder(Path(folder), **options)


def unpack(package: str, folder: Path, packages: Path | None, keep: str) -> None:
    """Put a package's files into `folder`/<package>; what the user has unpacked gets a second name there."""
    given = sorted(packages.glob(f"{package}_*.deb")) if packages else []
    if packages and (packages / package).is_dir():
        shutil.copytree(packages / package, folder / package, symlinks=True, copy_function=link_or_copy)
        return
    file = given[-1] if given else download(package, folder)
    if not shutil.which("dpkg-deb"):
        raise Missing(f"dpkg-deb is not here to unpack {file.name}; unpack it to FOLDER/{package} and give {GIVE}")
    (folder / package).mkdir()
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(file)], stdout=subprocess.PIPE) as reader:
        command = ["tar", "-x", "-C", str(folder / package), "--wildcards", keep]
        done = subprocess.run(command, stdin=reader.stdout, capture_output=True, text=True)
    if done.returncode or reader.returncode:
        raise Missing(f"{file.name} cannot be unpacked: {done.stderr.strip() or 'damaged'}")
    if not given:
        file.unlink()


def link_or_copy(source: str, target: str) -> None:
    """A second name for a file, or its copy where the two folders are on different disks."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy(source, target)


GIVE = "--packages FOLDER"


def download(package: str, folder: Path) -> Path:
    """Fetch a package with apt."""
    if not shutil.which("apt-get"):
        raise Missing(f"there is no apt-get to fetch {package}; get the .deb file from Debian and give {GIVE}")
    done = subprocess.run(["apt-get", "-q", "download", package], cwd=folder, capture_output=True, text=True)
    found = sorted(folder.glob(f"{package}_*.deb"))
    if done.returncode or not found:
        why = re.search(r"^E: (.+)$", done.stderr, re.M)
        raise Missing(
            f"apt-get cannot fetch {package} ({why[1] if why else 'no reason given'}): "
            f"`apt-get update` may help, or get the .deb file from Debian and give {GIVE}"
        )
    return found[0]


def main(argv: list[str] | None = None) -> int:
    """Command line; the exit status is 1 when the set was not built."""
    parser = argparse.ArgumentParser(description="build a data set from packages of Debian")
    parser.add_argument("name", choices=SETS)
    parser.add_argument("--packages", default="", metavar="FOLDER", help="with .deb files or unpacked packages")
    parser.add_argument("--users", default="", help="notebooks that use it, for the message")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    args = parser.parse_args(argv)
    leave_with_parent()
    sys.path.insert(0, os.getcwd())  # the package of this checkout
    one, began = SETS[args.name], time.time()
    source = f"from {', '.join(one.packages)}" if one.packages else "by RDKit"
    say(f"data set {one.name}: built {source}, once")
    try:
        build(one, Path(args.packages) if args.packages else None, args.workers)
    except Exception as error:  # whatever it is: one line, and the rows are left out
        why = str(error) or type(error).__name__
        rows = f"; its rows are left out of {args.users.replace(',', ', ')}" if args.users else ""
        say(f"data set {one.name} is not here: {why.splitlines()[0]}{rows}")
        if not isinstance(error, (Missing, ImportError)):
            raise
        return 1
    say(f"data set {one.name} built in {time.time() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
