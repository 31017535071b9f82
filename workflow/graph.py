"""Which notebooks there are, and which files each of them depends on.

Everything is read from the sources (JSON and `ast`); nothing is imported or executed. A notebook depends on its own
cells, on the modules of the package that it imports, directly or through other modules, on those that register an
attention it names, and on the data files those modules name. A package's `__init__.py` counts only for the names that
are taken from it: `from sparseattn.core.attention import x` does not depend on everything that
`sparseattn/__init__.py` re-exports.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = "sparseattn"
SCALES = ("smoke", "cpu", "gpu", "paper")
REGISTRY = f"{PACKAGE}.core.transformer"  #: finds attentions by name


@dataclass(frozen=True)
class Notebook:
    """One notebook of the collection."""

    path: Path  #: relative to the repository, nbs/hept/30_tradeoff.ipynb
    key: str  #: "hept/30_tradeoff"
    stem: str  #: "30_tradeoff"
    chapter: str  #: "hept"; "" for notebooks directly in nbs/
    title: str
    module: str | None  #: the module it exports, "sparseattn.hept.tradeoff"
    has_parameters: bool  #: has a cell tagged `parameters`, so it writes build/<scale>/figures/<stem>/run.json
    cells: tuple[tuple[str, str, str], ...]  #: (cell type, tags, source)

    @property
    def is_index(self) -> bool:
        """Directly in nbs/: it reads the other notebooks and their ledger, so it runs after them."""
        return not self.chapter

    def run_json(self, scale: str) -> str:
        """What a notebook with a parameters cell writes last."""
        return f"build/{scale}/figures/{self.stem}/run.json"

    def done(self, scale: str) -> str:
        """Says that the notebook ran without an error; holds the hashes of what it ran on."""
        return f"build/{scale}/executed/{self.key}.done"

    def stamp(self, scale: str, digest: str) -> str:
        """An empty file whose name says what the notebook ran on: another digest, and it is missing."""
        return f"build/{scale}/sources/{self.key}.{digest}"

    def products(self, scale: str, digest: str) -> list[str]:
        """All that must be there for the notebook to be up to date."""
        return [self.stamp(scale, digest), self.done(scale)] + [self.run_json(scale)] * self.has_parameters

    def executed(self, scale: str) -> str:
        """The executed copy; it stays also where the notebook failed."""
        return f"build/{scale}/executed/{self.key}.ipynb"

    def log(self, scale: str) -> str:
        """The readable error, or one line of success."""
        return f"build/{scale}/log/{self.key}.txt"

    @property
    def rule(self) -> str:
        """Name of its rule in the Snakefile."""
        return self.key.replace("/", "_")


def read_notebook(root: Path, path: Path) -> Notebook:
    """Read one notebook; `path` is relative to `root`."""
    cells = []
    for cell in json.loads((root / path).read_text(encoding="utf-8"))["cells"]:
        tags = " ".join(cell.get("metadata", {}).get("tags", []))
        cells.append((cell["cell_type"], tags, "".join(cell["source"])))
    key = path.relative_to("nbs").with_suffix("").as_posix()
    text = "\n".join(source for kind, _, source in cells if kind == "code")
    export = re.search(r"^#\|\s*default_exp\s+([\w.]+)", text, re.M)
    title = re.search(r"^#\s+(.+)$", "\n".join(s for k, _, s in cells if k == "markdown"), re.M)
    return Notebook(
        path,
        key,
        path.stem,
        key.rpartition("/")[0],
        title[1].strip() if title else path.stem,
        f"{PACKAGE}.{export[1]}" if export else None,
        any("parameters" in t.split() for _, t, _ in cells),
        tuple(cells),
    )


def find_notebooks(root: Path) -> dict[str, Notebook]:
    """All notebooks below `root`/nbs by key, sorted; names that start with `_` or `.` are skipped, as nbdev does.

    Raises:
        ValueError: two notebooks have the same file name (figures/<stem>/ could not tell them apart).
    """
    found: dict[str, Notebook] = {}
    stems: dict[str, Path] = {}
    for path in sorted((root / "nbs").rglob("*.ipynb")):
        path = path.relative_to(root)
        if any(part[0] in "_." for part in path.parts[1:]):
            continue
        notebook = read_notebook(root, path)
        if notebook.stem in stems:
            raise ValueError(f"{stems[notebook.stem]} and {path} have the same name")
        stems[notebook.stem] = path
        found[notebook.key] = notebook
    return found


def chapters(notebooks: dict[str, Notebook]) -> list[str]:
    """The folders of nbs/ that hold notebooks."""
    return sorted({n.chapter for n in notebooks.values() if n.chapter})


def select(notebooks: dict[str, Notebook], only: str, ledger: str) -> dict[str, Notebook]:
    """The notebooks of chapter `only` (empty: of all), the ledger and the index.

    Raises:
        ValueError: no such chapter.
    """
    if only and only not in chapters(notebooks):
        raise ValueError(f"unknown chapter {only!r}; choose one of: {', '.join(chapters(notebooks))}")
    return {k: n for k, n in notebooks.items() if not only or n.chapter == only or n.stem == ledger or n.is_index}


class Imports:
    """The package's import graph, read statically and remembered."""

    def __init__(self, root: Path):
        self.root = root
        self._direct: dict[str, frozenset[str]] = {}
        self._strings: dict[str, frozenset[str]] = {}

    def imported(self, notebook: Notebook) -> set[str]:
        """Modules a notebook imports, transitively."""
        return self._close({name for tree in _trees(notebook) for name in self._names(tree, PACKAGE)})

    def of(self, notebook: Notebook) -> set[str]:
        """Modules a notebook depends on: those it imports, and those of the attentions found by name."""
        found = self.imported(notebook)
        if REGISTRY not in found:
            return found
        written = frozenset().union(*map(_strings, _trees(notebook)))
        while more := self._registered(found, written) - found:
            found = self._close(found | more)
        return found

    def _registered(self, modules: set[str], written: frozenset[str]) -> set[str]:
        """Modules of the attentions that a notebook names, or that a module names which looks them up."""
        users = (m for m in modules if REGISTRY in self._direct[m] and m not in self._attentions.values())
        names = written.union(*(self._strings[m] for m in users))
        return {module for name, module in self._attentions.items() if name in names}

    @functools.cached_property
    def _attentions(self) -> dict[str, str]:
        """Names under which modules register attentions."""
        found = {}
        for path in (self.root / PACKAGE).rglob("*.py"):
            module = ".".join(path.relative_to(self.root).with_suffix("").parts)
            names = re.findall(r"^@register_attention\(\"(\w+)\"\)", path.read_text(encoding="utf-8"), re.M)
            found |= dict.fromkeys(names, module)
        return found

    def file(self, module: str) -> Path | None:
        """The file of a module or package, relative to the repository."""
        base = Path(*module.split("."))
        for path in (base.with_suffix(".py"), base / "__init__.py"):
            if (self.root / path).is_file():
                return path
        return None

    def _close(self, todo: set[str]) -> set[str]:
        done: set[str] = set()
        while todo:
            module = todo.pop()
            done.add(module)
            if module not in self._direct:
                tree = _parse((self.root / self.file(module)).read_text(encoding="utf-8"))
                self._direct[module] = frozenset(self._names(tree, self._parent(module)))
                self._strings[module] = _strings(tree)
            todo |= self._direct[module] - done
        return done

    def _parent(self, module: str) -> str:
        """The package that a relative import in `module` starts from."""
        return module if self.file(module).name == "__init__.py" else module.rpartition(".")[0]

    def _names(self, tree: ast.AST, package: str) -> Iterator[str]:
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    yield from self._whole(alias.name)
            elif isinstance(node, ast.ImportFrom):
                module = node.module or ""
                if node.level:
                    up = package.split(".")[: len(package.split(".")) - node.level + 1]
                    module = ".".join(up + ([module] if module else []))
                for alias in node.names:
                    yield from self._name(module, alias.name)

    def _whole(self, module: str) -> Iterator[str]:
        """`import module`: for a package, everything its `__init__` brings."""
        if module.split(".")[0] == PACKAGE and self.file(module):
            yield module

    def _name(self, module: str, name: str) -> Iterator[str]:
        """`from module import name`: the submodule, where a package takes the name from, or the module itself."""
        if module.split(".")[0] != PACKAGE:
            return
        if self.file(f"{module}.{name}"):
            yield f"{module}.{name}"
        elif (path := self.file(module)) and path.name == "__init__.py":
            origin = self._origin(module, name)
            yield from (self._name(*origin) if origin else self._whole(module))
        else:
            yield from self._whole(module)

    def _origin(self, package: str, name: str) -> tuple[str, str] | None:
        """Where a package's `__init__` takes `name` from: (module, name there)."""
        tree = _parse((self.root / self.file(package)).read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                        return ".".join(up + ([node.module] if node.module else [])), alias.name
        return None


def _parse(source: str) -> ast.AST:
    """The syntax tree; IPython's magics are dropped; of a cell that is not Python only import lines are read."""
    lines = [line for line in source.splitlines() if not line.lstrip().startswith(("%", "!", "?"))]
    try:
        return ast.parse("\n".join(lines))
    except SyntaxError:
        return ast.parse("\n".join(line for line in lines if re.match(r"(import|from)\s+[\w.]+.*[\w*]$", line)))


def _trees(notebook: Notebook) -> list[ast.AST]:
    return [_parse(source) for kind, _, source in notebook.cells if kind == "code"]


def _strings(tree: ast.AST) -> frozenset[str]:
    """The strings written in a piece of code."""
    return frozenset(n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str))


def data_files(root: Path, imports: Imports, modules: Iterable[str]) -> set[Path]:
    """Files in a package's files/ folder that one of the modules names."""
    found: set[Path] = set()
    for module in modules:
        folder = imports.file(module).parent / "files"
        if (root / folder).is_dir():
            text = (root / imports.file(module)).read_text(encoding="utf-8")
            found |= {p.relative_to(root) for p in (root / folder).iterdir() if p.name in text or p.stem in text}
    return found


def data_listing() -> str:
    """Names and sizes of the files that SPARSEATTN_DATA points to; empty where it is not set."""
    folder = os.environ.get("SPARSEATTN_DATA", "")
    if not folder or not Path(folder).is_dir():
        return ""
    files = sorted(p for p in Path(folder).rglob("*") if p.is_file())
    return "\n".join(f"{p.relative_to(folder).as_posix()} {p.stat().st_size}" for p in files)


def fingerprint(root: Path, notebook: Notebook, imports: Imports) -> dict[str, str]:
    """Hash of everything the notebook depends on, by file. Stored outputs do not count."""
    modules = imports.of(notebook)
    files = {imports.file(m) for m in modules} | data_files(root, imports, modules)
    hashes = {p.as_posix(): _sha256((root / p).read_bytes()) for p in sorted(files)}
    hashes[notebook.path.as_posix()] = _sha256(json.dumps(notebook.cells, ensure_ascii=False).encode())
    if any(m.startswith(f"{PACKAGE}.data") for m in modules) and (listing := data_listing()):
        hashes["SPARSEATTN_DATA"] = _sha256(listing.encode())
    return hashes


def digest(hashes: dict[str, str]) -> str:
    """One short hash of a fingerprint."""
    return _sha256(json.dumps(hashes, sort_keys=True).encode())[:12]


def data_notebooks(notebooks: dict[str, Notebook], notebook: Notebook, imports: Imports) -> list[Notebook]:
    """The notebooks of the data chapter that export a module `notebook` uses: they run before it."""
    if notebook.chapter == "data":
        return []
    used = imports.of(notebook)
    return [n for n in notebooks.values() if n.chapter == "data" and n.module in used]


def priority(root: Path, notebook: Notebook) -> int:
    """Data first, since others wait for it, then what took longest when the committed results were made."""
    if notebook.chapter == "data":
        return 100_000
    run = root / "figures" / notebook.stem / "run.json"
    seconds = json.loads(run.read_text(encoding="utf-8")).get("seconds", 0) if run.exists() else 0
    return int(seconds) + notebook.has_parameters


def write_text(path: Path, text: str) -> None:
    """Write a file beside its place, then rename it: nobody reads half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
