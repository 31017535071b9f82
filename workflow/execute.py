"""Execute one notebook, with papermill or plainly, and say shortly what went wrong.

    python workflow/execute.py hept/30_tradeoff --scale smoke

Leaves build/<scale>/executed/<key>.ipynb (also when the notebook fails), build/<scale>/log/<key>.txt (the readable
error) and build/<scale>/log/<key>.json (status and seconds). Lines that start with `MARK` are meant for people.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import functools
import json
import os
import re
import shutil
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import graph
import pictures
import plain
import plan

MARK = "» "
ANSI = re.compile(r"\x1b\[[0-9;]*m")


def declared(notebook: graph.Notebook) -> set[str]:
    """The names that the notebook's parameters cell assigns."""
    source = next(s for _, tags, s in notebook.cells if "parameters" in tags.split())
    targets = [t for node in ast.parse(source).body if isinstance(node, ast.Assign) for t in node.targets]
    return {t.id for t in targets if isinstance(t, ast.Name)}


def parameters(notebook: graph.Notebook, scale: str) -> dict[str, str]:
    """What papermill injects: the scale, into notebooks that have a parameters cell.

    Raises:
        ValueError: the cell does not declare `scale`; papermill itself would only warn.
    """
    if not notebook.has_parameters:
        return {}
    if "scale" not in declared(notebook):
        raise ValueError(f"the parameters cell of {notebook.path} does not declare `scale`")
    return {"scale": scale}


def by_papermill(source: Path, output: Path, parameters: dict, root: Path, timeout: int | None = None) -> None:
    """Execute a notebook by Jupyter's kernel; `plain.execute` does without."""
    import papermill

    with seldom_saved():
        papermill.execute_notebook(
            str(source),
            str(output),
            parameters=parameters,
            kernel_name="python3",
            cwd=str(root),
            progress_bar=False,
            execution_timeout=timeout,
            start_timeout=300,
        )


@contextlib.contextmanager
def seldom_saved(seconds: float = 2.0):
    """Inside, papermill saves the copy at most so often, and at the end; else twice a cell, most of what it costs."""
    from papermill import engines, exceptions

    class Manager(engines.NotebookExecutionManager):
        saved, started = -seconds, None

        def save(self, **how):
            Manager.started = self
            if time.monotonic() - self.saved >= seconds:
                super().save(**how)
                self.saved = time.monotonic()

    usual, engines.NotebookExecutionManager = engines.NotebookExecutionManager, Manager
    try:
        yield
    except exceptions.PapermillExecutionError:  # a cell that failed: papermill has written the copy
        raise
    except BaseException:  # a kernel that died: the copy shall say in which cell
        if Manager.started:
            usual.save(Manager.started)
        raise
    finally:
        engines.NotebookExecutionManager = usual


def execute(root: Path, notebook: graph.Notebook, scale: str, by=by_papermill) -> str:
    """Execute one notebook.

    Returns:
        The readable error; empty when nothing failed.
    """
    output = root / notebook.executed(scale)
    output.parent.mkdir(parents=True, exist_ok=True)
    stamps = (root / notebook.stamp(scale, "x")).parent.glob(f"{notebook.stem}.*")
    for old in (output, root / notebook.done(scale), *stamps):
        old.unlink(missing_ok=True)
    shutil.rmtree(root / f"build/{scale}/figures/{notebook.stem}", ignore_errors=True)
    try:
        by(root / notebook.path, output, parameters(notebook, scale), root)
        if notebook.has_parameters and not (root / notebook.run_json(scale)).exists():
            missing = notebook.run_json(scale)
            return f"{notebook.path}\n  has a parameters cell but wrote no {missing}: does it end with run.finish()?"
        if scale != "smoke":  # what is never published stays as it was drawn
            pictures.small_outputs(output)
            pictures.small_files((root / notebook.run_json(scale)).parent)
    except Exception as error:  # whatever it is: the copy and a readable line are left, the other notebooks go on
        return describe(error, notebook, output)
    return ""


def describe(error: Exception, notebook: graph.Notebook, executed: Path) -> str:
    """What failed, where: notebook, cell, line, exception. A dozen lines, not a traceback."""
    cells = _cells(executed)
    started = [
        i
        for i, c in enumerate(cells)
        if c["cell_type"] == "code" and c["metadata"].get("papermill", {}).get("start_time")
    ]
    at = next(
        (i for i in started if _failed(cells[i])), started[-1] if started else None
    )  # a dead kernel leaves no error output
    what = (
        f"{getattr(error, 'ename', type(error).__name__)}: {ANSI.sub('', str(getattr(error, 'evalue', error))).strip()}"
    )
    what = _shorten(what.rstrip(": "), 12)
    if at is None:
        return f"{notebook.path}\n  {what}"
    source = "".join(cells[at]["source"]).splitlines()
    trace = ANSI.sub("", "\n".join(getattr(error, "traceback", None) or []))
    number = _own_number(cells, at)
    lines = [f"{notebook.path}, cell {number} ({cells[at].get('id', '')})" + _heading(cells, at)]
    hit = re.findall(r"Cell In\[\d+\], line (\d+)", trace)
    if hit:
        line = int(hit[0])
        shown = range(max(1, line - 2), min(len(source), line + 1) + 1)
        lines += [f"  {'>' if i == line else ' '} {i:3d} | {source[i - 1]}" for i in shown]
    else:
        lines += [f"    {text}" for text in source[:6]]
    frames = re.findall(r"File [^\n]*?((?:sparseattn|nbs)/[\w/]+\.py):(\d+),? in (\w+)", trace)
    if frames:
        lines.append("  raised in {}, line {}, {}()".format(*frames[-1]))
    return "\n".join([*lines, "  " + what])


def _cells(executed: Path) -> list[dict]:
    """Cells of the executed copy without the banners that papermill puts around an error."""
    try:
        cells = json.loads(executed.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError):
        return []
    return [c for c in cells if not set(c["metadata"].get("tags", [])) & {"papermill-error-cell-tag"}]


def _failed(cell: dict) -> bool:
    """The cell left an error output."""
    return cell["metadata"]["papermill"].get("status") == "failed" or any(
        o["output_type"] == "error" for o in cell["outputs"]
    )


def _own_number(cells: list[dict], at: int) -> int:
    """Number of the cell in the notebook, from 1; papermill's injected cell does not count."""
    return sum("injected-parameters" not in c["metadata"].get("tags", []) for c in cells[: at + 1])


def _heading(cells: list[dict], at: int) -> str:
    """The last heading above the cell."""
    text = "\n".join("".join(c["source"]) for c in cells[:at] if c["cell_type"] == "markdown")
    found = re.findall(r"^#{1,4}\s+(.+)$", text, re.M)
    return f', under "{found[-1].strip()}"' if found else ""


def _shorten(text: str, lines: int) -> str:
    parts = text.splitlines() or [""]
    kept = [p[:200] for p in parts[:lines]]
    return "\n  ".join(
        kept + ([f"... {len(parts) - lines} more lines in the executed copy"] if len(parts) > lines else [])
    )


def leave_with_parent() -> None:
    """End this process when the one that started it is gone: a killed reproduction leaves nothing running."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(143)  # the kernel notices that its own parent is gone

    threading.Thread(target=watch, daemon=True).start()


def set_threads(threads: int) -> None:
    """Let libraries of this process and of its children use so many threads."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[name] = str(threads)


def say(text: str) -> None:
    """Print for people: one write, so that lines of parallel jobs do not mix."""
    sys.stdout.write("".join(f"{MARK}{line}\n" for line in text.splitlines()))
    sys.stdout.flush()


def main(argv: list[str] | None = None) -> int:
    """Command line; the exit status is 1 when the notebook failed."""
    parser = argparse.ArgumentParser(description="execute one notebook")
    parser.add_argument("key", help="hept/30_tradeoff")
    parser.add_argument("--scale", choices=graph.SCALES, default="smoke")
    parser.add_argument("--digest", help="hash of what the notebook depends on, for its stamp; default: computed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--timeout", type=int, default=None, help="seconds a cell may take")
    parser.add_argument("--plain", action="store_true", help="without Jupyter, in this process")
    parser.add_argument("--root", type=Path, default=Path.cwd())
    args = parser.parse_args(argv)
    root = args.root.resolve()
    leave_with_parent()
    if args.digest:  # a job of a plan, perhaps on another node; by hand one's own variables hold
        plan.enter(plan.read(root, args.scale))
    set_threads(args.threads)
    os.environ.update(JUPYTER_PREFER_ENV_PATH="1", PYDEVD_DISABLE_FILE_VALIDATION="1")
    if not (root / f"nbs/{args.key}.ipynb").is_file():
        parser.error(f"there is no nbs/{args.key}.ipynb")
    notebook = graph.read_notebook(root, Path("nbs") / f"{args.key}.ipynb")
    log = root / notebook.log(args.scale)
    graph.write_text(log, "running\n")
    say(f"{notebook.key} started")
    began = time.time()
    imports = graph.Imports(root)
    sources = graph.fingerprint(root, notebook, imports)
    records = graph.records(root, imports.studies(notebook), args.scale)
    by = plain.execute if args.plain else functools.partial(by_papermill, timeout=args.timeout)
    error = execute(root, notebook, args.scale, by)
    seconds = round(time.time() - began, 1)
    status = dict(finished=time.time(), status="failed" if error else "done", seconds=seconds, error=error)
    graph.write_text(log.with_suffix(".json"), json.dumps(status, indent=1) + "\n")
    graph.write_text(log, (error or f"done in {seconds} s") + "\n")
    if not error:
        ran_on = dict(status, sources=sources, records=records)
        graph.write_text(root / notebook.done(args.scale), json.dumps(ran_on, indent=1) + "\n")
        graph.write_text(root / notebook.stamp(args.scale, args.digest or graph.digest(sources)), "")
    say(
        f"{notebook.key} FAILED after {seconds:.0f} s\n{error}\n"
        f"  executed as far as it came: {notebook.executed(args.scale)}"
        if error
        else f"{notebook.key} done in {seconds:.0f} s"
    )
    return int(bool(error))


if __name__ == "__main__":
    sys.exit(main())
