"""Which notebooks there are, and which files each of them depends on.

Everything is read from the sources (JSON and `ast`); nothing is imported or executed. A notebook depends on its own
cells, on the modules of the package that it imports, directly or through other modules, on those that register an
attention it names, and on the data files those modules name. A package's `__init__.py` counts only for the names that
are taken from it: `from sparseattn.core.attention import x` does not depend on everything that
`sparseattn/__init__.py` re-exports.

Results hold the hashes of the files they depend on (`sources` and `records` in run.json); of a module, of what
computes: a docstring that is reworded makes old only what prints docstrings. `changes` compares them with the files as
they are: results are *stale* when something changed since. That is no error, a kernel proved equal does not void
results, but it is told: figures/stale.csv lists them.
"""

from __future__ import annotations

import ast
import csv
import functools
import hashlib
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# jsonschema takes it where it is there: a grammar of web addresses, three times what papermill needs to start
sys.modules.setdefault("rfc3987_syntax", None)

PACKAGE = "sparseattn"
LIBRARIES = ("torch", "numpy", "scipy")  #: their versions count too
#: modules that every results notebook has for writing results down and judging them; they compute none
BOOKKEEPING = tuple(f"{PACKAGE}/lab/{name}.py" for name in ("__init__", "claims", "report", "run"))
STALE = ("notebook", "changed since", "changed since, bookkeeping")  #: columns of figures/stale.csv
UNKNOWN = "unknown: made before hashes were kept"
REGISTRY = f"{PACKAGE}.core.transformer"  #: finds attentions by name
STUDIES = f"{PACKAGE}.studies"  #: what is trained
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_EXPORTED = re.compile(r"^#\|\s*export", re.M)


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

    @property
    def uses_device(self) -> bool:
        """Runs something on the run's device, so that it needs a GPU at gpu and paper scale."""
        return any(kind == "code" and re.search(r"\brun\.device\b", source) for kind, _, source in self.cells)

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
        return self._close({name for nodes in _parsed(notebook) for name in self._names(nodes, PACKAGE)})

    def of(self, notebook: Notebook) -> set[str]:
        """Modules a notebook depends on: those it imports, and those of the attentions found by name."""
        found = self.imported(notebook)
        if REGISTRY not in found:
            return found
        written = frozenset().union(*map(_strings, _parsed(notebook)))
        while more := self._registered(found, written) - found:
            found = self._close(found | more)
        return found

    def words(self, notebook: Notebook) -> set[str]:
        """Strings written in a notebook and in the studies it reads: names of data, for one."""
        shared = {m for m in self.imported(notebook) if m.startswith(f"{STUDIES}._")}
        studies = shared | {f"{STUDIES}.{name}" for name in self.studies(notebook)}
        self._close(set(studies))
        return set().union(*map(_strings, _parsed(notebook)), *(self._strings[m] for m in studies))

    def studies(self, notebook: Notebook) -> list[str]:
        """Names of the studies whose records a notebook reads: it writes them, or imports them and exports nothing.

        What an exported cell takes from another study is code, as is what a study takes from another.
        """
        read = (source for kind, _, source in notebook.cells if kind == "code" and not _EXPORTED.search(source))
        modules = {name for source in read for name in self._names(_parse(source), PACKAGE)} | {notebook.module or ""}
        names = {m.removeprefix(f"{STUDIES}.") for m in modules if m.startswith(f"{STUDIES}.")}
        return sorted(name for name in names if not name.startswith("_"))  # those share what studies have in common

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
                nodes = _parse((self.root / self.file(module)).read_text(encoding="utf-8"))
                self._direct[module] = frozenset(self._names(nodes, self._parent(module)))
                self._strings[module] = _strings(nodes)
            todo |= self._direct[module] - done
        return done

    def strings(self, module: str) -> frozenset[str]:
        """The strings written in a module."""
        self._close({module})
        return self._strings[module]

    def _parent(self, module: str) -> str:
        """The package that a relative import in `module` starts from."""
        return module if self.file(module).name == "__init__.py" else module.rpartition(".")[0]

    def _names(self, nodes: list[ast.AST], package: str) -> Iterator[str]:
        for node in nodes:
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
        for node in _parse((self.root / self.file(package)).read_text(encoding="utf-8")):
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                        return ".".join(up + ([node.module] if node.module else [])), alias.name
        return None


@functools.lru_cache(maxsize=4096)
def _parse(source: str) -> list[ast.AST]:
    """Imports and constants; IPython's magics are dropped; of a cell that is not Python only import lines are read."""
    lines = [line for line in source.splitlines() if not line.lstrip().startswith(("%", "!", "?"))]
    try:
        tree = ast.parse("\n".join(lines))
    except SyntaxError:
        tree = ast.parse("\n".join(line for line in lines if re.match(r"(import|from)\s+[\w.]+.*[\w*]$", line)))
    return [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom | ast.Constant)]


def _parsed(notebook: Notebook) -> list[list[ast.AST]]:
    return [_parse(source) for kind, _, source in notebook.cells if kind == "code"]


def _strings(nodes: list[ast.AST]) -> frozenset[str]:
    """The strings written in a piece of code."""
    return frozenset(n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str))


def data_files(root: Path, imports: Imports, modules: Iterable[str], written: Iterable[str] = ()) -> set[Path]:
    """Files of csrc/ and of a package's files/ folder that a string of a module, or one `written` by hand, is the name
    of; with a C file, all headers."""
    csrc = Path(PACKAGE, "csrc")
    named = {csrc: set(written)}
    for module in modules:
        for folder in (imports.file(module).parent / "files", csrc):
            named.setdefault(folder, set()).update(imports.strings(module))
    there = {folder: names for folder, names in named.items() if (root / folder).is_dir()}
    found = {folder / p.name for folder, names in there.items() for p in (root / folder).iterdir() if p.name in names}
    if any(p.parent == csrc for p in found):
        found |= {p.relative_to(root) for p in (root / PACKAGE / "csrc").glob("*.h")}
    return found


def cache_root() -> Path:
    """The cache folder, as `sparseattn.data.cache.cache_root` has it."""
    usual = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", PACKAGE)
    return Path(os.environ.get("SPARSEATTN_CACHE") or usual).expanduser()


def data_folders() -> list[Path]:
    """Where `sparseattn.data.cache.data_path` looks: the user's own folder, and sets that were built."""
    own = os.environ.get("SPARSEATTN_DATA")
    return [p for p in ([Path(own).expanduser()] if own else []) + [cache_root() / "built"] if p.is_dir()]


def data_listing() -> str:
    """Names and sizes of the files in `data_folders`; empty where there are none."""
    files = ((f, p) for f in data_folders() for p in sorted(f.rglob("*")) if p.is_file())
    return "\n".join(f"{p.relative_to(f).as_posix()} {p.stat().st_size}" for f, p in files)


def module_sources(
    root: Path, imports: Imports, modules: Iterable[str], docstrings: bool = False, written: Iterable[str] = ()
) -> dict[str, str]:
    """Hash of each module's code, with its docstrings or without, and of the `data_files`, by path."""
    modules = set(modules)
    files = {imports.file(m) for m in modules} | data_files(root, imports, modules, written)
    read = Path.read_bytes if docstrings else _computes
    return {p.as_posix(): _sha256(read(root / p)) for p in sorted(files)}


def _computes(path: Path) -> bytes:
    """What a file computes with: of Python, all but docstrings, empty lines and nbdev's marks between cells."""
    if path.suffix != ".py":
        return path.read_bytes()
    source = path.read_text(encoding="utf-8")
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            if lines[text.lineno - 1].lstrip().startswith(('"""', 'r"""')):  # alone on its lines
                lines[text.lineno - 1 : text.end_lineno] = [""] * (text.end_lineno - text.lineno + 1)
    return "\n".join(line for line in lines if line.strip() and not line.startswith("# %% ")).encode()


def sources(root: Path, notebook: Notebook, imports: Imports) -> dict[str, str]:
    """Hash of every file of the repository that the notebook depends on, by path. Stored outputs do not count."""
    shown = any(kind == "code" and "getdoc" in source for kind, _, source in notebook.cells)
    written = frozenset().union(*map(_strings, _parsed(notebook)))
    hashes = module_sources(root, imports, imports.of(notebook), docstrings=shown, written=written)
    return hashes | {notebook.path.as_posix(): _sha256(json.dumps(notebook.cells, ensure_ascii=False).encode())}


def fingerprint(root: Path, notebook: Notebook, imports: Imports) -> dict[str, str]:
    """`sources` and what else the results depend on: libraries, compiler, the files in a user's own data folder."""
    hashes = sources(root, notebook, imports) | environment(root)
    if any(m.startswith(f"{PACKAGE}.data") for m in imports.of(notebook)) and (listing := data_listing()):
        hashes["SPARSEATTN_DATA"] = _sha256(listing.encode())
    return hashes


def environment(root: Path) -> dict[str, str]:
    """Versions of the libraries that compute, the pins of all others, and the C compiler."""
    found = {name: version for name in LIBRARIES if (version := _version(name))}
    if (pins := root / "constraints.txt").exists():
        found["constraints.txt"] = _sha256(pins.read_bytes())
    return found | {"C compiler": compiler()}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


@functools.cache
def compiler() -> str:
    """First line of what the C compiler says of itself ($CC, or cc); "none" where there is none or CC is empty."""
    command = shlex.split(os.environ.get("CC", "cc"))
    if not command or not shutil.which(command[0]):
        return "none"
    done = subprocess.run([*command, "--version"], capture_output=True, text=True)
    return (done.stdout.splitlines() or [command[0]])[0]


def records(root: Path, studies: Iterable[str], scale: str) -> dict[str, str]:
    """Hashes of the records of some studies, by file: results depend on them as on code."""
    found = (p for study in studies for p in sorted((root / f"figures/{study}/runs/{scale}").glob("*.json")))
    return {p.relative_to(root).as_posix(): _sha256(p.read_bytes()) for p in found}


def code_hash(notebook: Notebook) -> str:
    """Hash of the notebook's code, text and outputs aside."""
    return _sha256(json.dumps([source for kind, _, source in notebook.cells if kind == "code"]).encode())


def digest(hashes: dict[str, str]) -> str:
    """One short hash of a fingerprint."""
    return _sha256(json.dumps(hashes, sort_keys=True).encode())[:12]


def changes(root: Path, notebook: Notebook, imports: Imports, run: dict) -> list[str] | None:
    """Files, records and libraries that changed since results were made.

    Args:
        run: what run.json says of the results.

    Returns:
        Paths, folders of records with the number that changed, and libraries with the version then; None where
        run.json holds no hashes.
    """
    if not run.get("sources"):
        return None
    files = _other(run["sources"], sources(root, notebook, imports))
    if "records" in run:
        other = _other(run["records"], records(root, imports.studies(notebook), run["scale"]))
        count = Counter(Path(path).parent.as_posix() for path in other)
        files += [f"{folder} ({number} record{'s' * (number > 1)})" for folder, number in count.items()]
    return files + _other_libraries(root, run.get("versions", {}))


def _other(then: dict[str, str], now: dict[str, str]) -> list[str]:
    """Paths whose hash is another one, or that only one of the two has."""
    return [path for path in sorted(then.keys() | now.keys()) if then.get(path) != now.get(path)]


def _other_libraries(root: Path, versions: dict[str, str]) -> list[str]:
    """Libraries whose version then is not the one pinned now; a suffix such as +cpu aside."""
    pins = (root / "constraints.txt").read_text(encoding="utf-8") if (root / "constraints.txt").exists() else ""
    pinned = dict(re.findall(r"^([\w.-]+)==(\S+)$", pins, re.M))
    then = {name: versions[name].partition("+")[0] for name in LIBRARIES if name in versions}
    return [f"{name} {v}" for name, v in then.items() if pinned.get(name, v) != v]


def stale(root: Path, figures: Path) -> dict[str, list[str] | None]:
    """What changed since the results in `figures` were made, by notebook; None where that is not known."""
    imports, found = Imports(root), {}
    for notebook in sorted(find_notebooks(root).values(), key=lambda n: n.stem):
        path = figures / notebook.stem / "run.json"
        if path.exists():
            changed = changes(root, notebook, imports, json.loads(path.read_text(encoding="utf-8")))
            if changed or changed is None:
                found[notebook.stem] = changed
    return found


def stale_row(stem: str, changed: list[str] | None) -> dict[str, str]:
    """One line of figures/stale.csv."""
    if changed is None:
        return dict(zip(STALE, (stem, UNKNOWN, ""), strict=True))
    parts = [p for p in changed if p not in BOOKKEEPING], [p for p in changed if p in BOOKKEEPING]
    return dict(zip(STALE, (stem, *map(", ".join, parts)), strict=True))


def stale_text(root: Path) -> str:
    """figures/stale.csv: which committed results are older than what they depend on."""
    text = io.StringIO()
    rows = csv.DictWriter(text, STALE, lineterminator="\n")
    rows.writeheader()
    rows.writerows(stale_row(*item) for item in stale(root, root / "figures").items())
    return text.getvalue()


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


def _scales() -> tuple[str, ...]:
    """The names of the scales, as `sparseattn.lab` lists them; read, since importing it would need torch."""
    path = Path(__file__).parent.parent / PACKAGE / "lab" / "__init__.py"
    return ast.literal_eval(re.search(r"^SCALES = (\(.+\))", path.read_text(encoding="utf-8"), re.M)[1])


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


SCALES = _scales()
