"""Execute a notebook in this process, for a machine without Jupyter.

What differs from papermill: the executed copy holds what cells print and show as text and HTML, and no pictures inline;
figures that a run keeps are files as always.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import os
import sys
import time
import types
from pathlib import Path


class _Tee(io.StringIO):
    """Text of a cell, printed at once as well."""

    def write(self, text: str) -> int:
        sys.__stdout__.write(text)
        return super().write(text)


def _bundle(value: object) -> dict:
    """A value as a notebook keeps it: text, and HTML or Markdown where it has them."""
    kinds = {"text/html": "_repr_html_", "text/markdown": "_repr_markdown_"}
    found = {kind: getattr(value, name)() for kind, name in kinds.items() if hasattr(value, name)}
    return {"text/plain": repr(value)} | {kind: text for kind, text in found.items() if text}


class _Page:
    """The outputs of the cell that runs, and the part of IPython that notebooks import."""

    def __init__(self):
        self.outputs: list[dict] = []

    def display(self, *values: object, **_) -> None:
        for value in values:
            self.outputs.append({"output_type": "display_data", "metadata": {}, "data": _bundle(value)})

    def modules(self) -> dict[str, types.ModuleType]:
        def shows(method):
            return type(method, (), {"__init__": lambda self, text: setattr(self, "text", text),
                                     method: lambda self: self.text, "__repr__": lambda self: self.text})

        ipython, display = types.ModuleType("IPython"), types.ModuleType("IPython.display")
        display.display, display.clear_output = self.display, lambda *_, **__: self.outputs.clear()
        display.HTML, display.Markdown = shows("_repr_html_"), shows("_repr_markdown_")
        ipython.display, ipython.get_ipython, ipython.version_info = display, lambda: None, (9, 0, 0)
        return {"IPython": ipython, "IPython.display": display}


def _run(source: str, name: str, space: dict, page: _Page) -> None:
    """Run a cell; the value of its last expression is shown."""
    body = ast.parse(source, name).body
    last = body.pop() if body and isinstance(body[-1], ast.Expr) else None
    exec(compile(ast.Module(body, []), name, "exec"), space)
    value = None if last is None else eval(compile(ast.Expression(last.value), name, "eval"), space)
    if value is not None:
        page.display(value)


def execute(notebook: Path, output: Path, parameters: dict, root: Path) -> None:
    """Run all cells of a notebook in order and leave an executed copy, also where a cell fails.

    Raises:
        Exception: what the cell raised.
    """
    copy, page, space = json.loads(notebook.read_text(encoding="utf-8")), _Page(), {"__name__": "__main__"}
    os.environ["MPLBACKEND"] = "agg"
    os.chdir(root)
    sys.path.insert(0, str(root))
    sys.modules.update(page.modules())
    try:
        for cell in (c for c in copy["cells"] if c["cell_type"] == "code"):
            _cell(cell, space, page, parameters)
    finally:
        output.write_text(json.dumps(copy, indent=1) + "\n", encoding="utf-8")


def _cell(cell: dict, space: dict, page: _Page, parameters: dict) -> None:
    """Run a cell and keep its outputs in it."""
    cell["outputs"], told, mark = page.outputs, _Tee(), {"start_time": time.time(), "status": "failed"}
    cell["metadata"]["papermill"] = mark
    try:
        with contextlib.redirect_stdout(told):
            _run("".join(cell["source"]), f"cell {cell['id']}", space, page)
            if hasattr(run := space.get("run"), "show_claims"):  # what `lab.run.start` asks of IPython
                run.show_claims()
        if "parameters" in cell["metadata"].get("tags", []):
            space.update(parameters)
        mark["status"] = "completed"
    finally:
        shown = [{"output_type": "stream", "name": "stdout", "text": told.getvalue()}] if told.getvalue() else []
        cell["outputs"], page.outputs = shown + page.outputs, []
