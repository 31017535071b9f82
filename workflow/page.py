"""The page at the end of a reproduction: build/<scale>/index.html.

    python workflow/page.py --scale smoke

Failed notebooks first, then every figure and table of this run beside the committed one, with what compare.py found
and what changed since the committed one was made, the rendered notebooks and the ledger. The page and what it shows
are in build/<scale>/ alone, so the folder can be moved or uploaded as it is.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from html import escape
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import compare
import graph
import publish

ROWS = 60  #: longer tables are cut on the page, never in the files

STYLE = Path(__file__).with_name("page.css")


def write(root: Path, scale: str) -> Path:
    """Write the page.

    Returns:
        Its path.
    """
    build = root / "build" / scale
    if scale == "smoke":
        publish.keep_committed(root, scale)  # at other scales, publishing keeps what it replaces
    notebooks = list(graph.find_notebooks(root).values())
    status = {n.key: read_status(root, n, scale) for n in notebooks}
    render_notebooks(root, [n for n in notebooks if status[n.key]["status"] != "not run"], scale)
    ledger = read_ledger(build, notebooks)
    committed = Committed(
        graph.stale(root, build / "committed"),
        {(t.notebook, t.name): t for t in compare.collection(root, build / "figures", build / "committed")},
        sum((build / f"committed/{n.stem}/run.json").exists() for n in notebooks),
    )
    parts = [
        head(root, scale, notebooks, status, ledger, committed),
        "<main>",
        failures(notebooks, status),
        trainings(root, scale),
        overview(notebooks, status),
    ]
    parts += [
        chapter(root, scale, name, [n for n in notebooks if n.chapter == name], status, committed)
        for name in with_results(notebooks)
    ]
    parts += [
        ledger_table(ledger),
        "</main>",
        f"<footer>Written by workflow/page.py. Files of this run: build/{scale}/.</footer></body></html>\n",
    ]
    graph.write_text(build / "index.html", "\n".join(p for p in parts if p))
    return build / "index.html"


@dataclass(frozen=True)
class Committed:
    """How the committed results stand to the code as it is, and to this run."""

    stale: dict[str, list[str] | None]  #: what changed since they were made, by notebook; None where that is not known
    tables: dict[tuple[str, str], compare.Table]  #: by notebook and file
    count: int  #: results folders

    @property
    def age(self) -> str:
        """How many are older than what they depend on."""
        rows = [graph.stale_row(*item) for item in self.stale.items()]
        computing = sum(bool(row[graph.STALE[1]]) for row in rows)
        if not rows:
            return f"{self.count} results, none older than its code" if self.count else ""
        return f"{computing} of {self.count} results older than code that computes, {len(rows)} than any code"

    @property
    def agreement(self) -> str:
        """How many tables were compared."""
        wrong = sum(bool(t.wrong) for t in self.tables.values())
        return f"{len(self.tables)} compared with the committed ones, {wrong} differ" if self.tables else ""


def with_results(notebooks: list[graph.Notebook]) -> list[str]:
    """The chapters that make figures and tables."""
    return graph.chapters({n.key: n for n in notebooks if n.has_parameters})


def read_status(root: Path, notebook: graph.Notebook, scale: str) -> dict:
    """What execute.py wrote: status, seconds, error."""
    log = root / notebook.log(scale)
    if not log.exists():
        return dict(status="not run", seconds=0, error="")
    if log.read_text(encoding="utf-8") == "running\n":
        return dict(
            status="interrupted", seconds=0, error="stopped while it ran; start the reproduction again to go on"
        )
    return json.loads(log.with_suffix(".json").read_text(encoding="utf-8"))


def render_notebooks(root: Path, notebooks: list[graph.Notebook], scale: str) -> None:
    """HTML of the executed copies, over all cores; a page whose cells and outputs are as they were stays."""
    places = [(root / n.executed(scale), html_path(root, n, scale)) for n in notebooks]
    shown = [(source, target, what_is_shown(source)) for source, target in places]
    todo = [one for one in shown if one[2] and one[2] != rendered(one[1])]
    workers = min(len(todo), os.cpu_count() or 1)
    if workers < 2:
        for one in todo:
            render(*one)
        return
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(render, *zip(*todo, strict=True)))


def what_is_shown(executed: Path) -> str:
    """Hash of the cells and outputs of an executed copy, times and counts left out; empty where it is not whole."""
    try:
        cells = json.loads(executed.read_text(encoding="utf-8"))["cells"]
    except (OSError, ValueError):  # a copy cut off by a kill: there is nothing to show
        return ""
    shown = [(c["cell_type"], c["source"], [dict(o, execution_count=0) for o in c.get("outputs", [])]) for c in cells]
    return hashlib.sha256(json.dumps([shown, metadata.version("nbconvert")]).encode()).hexdigest()


def rendered(target: Path) -> str:
    """The hash of what a rendered page shows: its last line."""
    if not target.exists():
        return ""
    with target.open("rb") as file:
        file.seek(max(0, target.stat().st_size - 80))
        return file.read().decode("utf-8", "replace").rpartition("<!-- ")[2].removesuffix(" -->\n")


def render(source: Path, target: Path, shown: str) -> None:
    """HTML of one executed notebook."""
    import nbformat

    notebook = nbformat.read(source, as_version=4)
    html = _exporter().from_notebook_node(notebook, {"metadata": {"name": source.stem}})[0]
    graph.write_text(target, f"{html}\n<!-- {shown} -->\n")


@functools.cache
def _exporter():
    """nbconvert's exporter, one a process: it compiles its templates once."""
    from nbconvert import HTMLExporter

    exporter = HTMLExporter(exclude_input_prompt=True, exclude_output_prompt=True)
    exporter.register_filter("clean_html", lambda html: html)  # of escaped code; half of the time
    return exporter


def html_path(root: Path, notebook: graph.Notebook, scale: str) -> Path:
    """Where the rendered notebook is."""
    return root / f"build/{scale}/html/{notebook.key}.html"


def read_ledger(build: Path, notebooks: list[graph.Notebook]) -> list[dict[str, str]]:
    """The claims of all notebooks that ran at this scale, in the order of the collection."""
    rows: list[dict[str, str]] = []
    for notebook in notebooks:
        path = build / "figures" / notebook.stem / "claims.csv"
        if path.exists():
            rows += compare.read_rows(path)
    return rows


def count(rows: list[dict[str, str]]) -> dict[str, int]:
    """How often each verdict occurs."""
    verdicts = [r.get("verdict", "") for r in rows]
    return {v: verdicts.count(v) for v in sorted(set(verdicts))}


def head(root: Path, scale: str, notebooks: list, status: dict, ledger: list, committed: Committed) -> str:
    """Title, the run's header, links."""
    states = [s["status"] for s in status.values()]
    runs = [root / "build" / scale / "figures" / n.stem / "run.json" for n in notebooks]
    devices = sorted({json.loads(p.read_text(encoding="utf-8")).get("device", "") for p in runs if p.exists()})
    seconds = sum(s["seconds"] for s in status.values())
    facts = {
        "scale": scale,
        "notebooks": ", ".join(
            f"{states.count(s)} {s}" for s in ("done", "failed", "interrupted", "not run") if s in states
        ),
        "claims": f"{len(ledger)}" + (": " + ", ".join(f"{k} {v}" for v, k in count(ledger).items()) if ledger else ""),
        "committed": committed.age,
        "tables": committed.agreement,
        "device": "; ".join(d for d in devices if d) or platform.machine(),
        "machine": f"{os.cpu_count()} cores, {platform.system()}",
        "versions": ", ".join(f"{n} {v}" for n, v in versions().items()),
        "notebooks' time, summed": duration(seconds),
        "page written": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
    items = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items() if v)
    links = "".join(f'<a href="#{c}">{c}</a>' for c in with_results(notebooks))
    bad = '<a href="#failed">failed</a>' if {"failed", "interrupted"} & set(states) else ""
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>sparseattn at {scale}</title><style>{STYLE.read_text(encoding="utf-8")}</style></head><body>
<header><h1>sparseattn, reproduced at <em>{scale}</em> scale</h1><dl>{items}</dl>
<nav>{bad}<a href="#notebooks">notebooks</a>{links}<a href="#ledger">ledger</a></nav></header>"""


def versions() -> dict[str, str]:
    """Versions of what matters most."""
    found = {"Python": platform.python_version()}
    for name in ("torch", "numpy", "scipy", "matplotlib"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return found


def duration(seconds: float) -> str:
    """Seconds for people."""
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def of_verdict(verdict: str) -> str:
    """The class of a label with a verdict."""
    return {"holds with a condition": "condition", "false as stated": "false"}.get(verdict, verdict.replace(" ", "-"))


def tag(text: str, kind: str = "") -> str:
    """A small coloured label."""
    kind = kind or of_verdict(text)
    return f'<span class="tag {escape(kind)}">{escape(text)}</span>'


def failures(notebooks: list[graph.Notebook], status: dict) -> str:
    """The notebooks that failed, with their readable errors."""
    bad = [n for n in notebooks if status[n.key]["status"] in ("failed", "interrupted")]
    if not bad:
        return ""
    parts = [f'<h2 id="failed">{len(bad)} failed</h2>']
    for n in bad:
        parts.append(
            f'<article class="error"><div class="head"><h3>{escape(n.title)}</h3><span class="key">{n.key}</span>'
            f'<span class="links"><a href="html/{n.key}.html">executed as far as it came</a></span></div>'
            f"<pre>{escape(status[n.key]['error'])}</pre></article>"
        )
    return "\n".join(parts)


def trainings(root: Path, scale: str) -> str:
    """Trainings of this run that did not end, and why: where no older record stands, their rows are missing."""
    ended = {}
    for path in sorted((root / f"build/{scale}/units").rglob("*.json")):
        ended[f"{path.parent.name}/{path.stem}"] = json.loads(path.read_text(encoding="utf-8"))
    bad = {name: one for name, one in ended.items() if one["outcome"] != "done"}
    if not bad:
        return ""
    items = [
        f"<li><span class='key'>{escape(name)}</span>{tag(one['outcome'], 'failed' * (one['outcome'] == 'failed'))}"
        f"<pre>{escape(one['why'])}</pre></li>"
        for name, one in bad.items()
    ]
    count = f"{len(ended)} trainings in this run, {len(bad)} did not end"
    return f'<h2 id="trainings">{count}</h2><article class="error"><ul>{"".join(items)}</ul></article>'


def overview(notebooks: list[graph.Notebook], status: dict) -> str:
    """All notebooks with links and times."""
    items = []
    for n in notebooks:
        state = status[n.key]
        name = f"{escape(n.title)} <span class='key'>{n.key}</span>"
        label = duration(state["seconds"]) if state["status"] == "done" else state["status"]
        link = name if state["status"] == "not run" else f'<a href="html/{n.key}.html">{name}</a>'
        items.append(f"<li>{link}{tag(label, state['status'])}</li>")
    return f'<h2 id="notebooks">Notebooks</h2><article><ul class="map">{"".join(items)}</ul></article>'


def chapter(root: Path, scale: str, name: str, notebooks: list, status: dict, committed: Committed) -> str:
    """A chapter: its notebooks that left figures or tables."""
    parts = [article(root, scale, n, status[n.key], committed) for n in notebooks if n.has_parameters]
    return f'<h2 id="{name}">{name}</h2>' + "\n".join(parts)


def article(root: Path, scale: str, notebook: graph.Notebook, state: dict, committed: Committed) -> str:
    """One notebook: each figure and table beside the committed one."""
    ours, theirs = (root / f"build/{scale}/{kind}/{notebook.stem}" for kind in ("figures", "committed"))
    names = sorted(
        {p.name for f in (ours, theirs) if f.is_dir() for p in f.iterdir() if p.suffix in (".png", ".csv")}
        - {"claims.csv"}
    )
    made_at = publish.scale_of(theirs)
    parts = [
        f'<article id="{notebook.stem}"><div class="head"><h3>{escape(notebook.title)}</h3>'
        f'<span class="key">{notebook.key}</span>'
        f"{tag(state['status'])}<span class='links'><a href='html/{notebook.key}.html'>notebook</a></span></div>",
        older(notebook.stem, committed),
    ]
    for name in names:
        same = (
            (ours / name).exists()
            and (theirs / name).exists()
            and (ours / name).read_bytes() == (theirs / name).read_bytes()
        )
        mark = tag("identical", "done") if same else agreement(committed.tables.get((notebook.stem, name)))
        parts.append(f"<h4>{escape(name)} {mark}</h4><div class='pair'>")
        sides = (
            [(ours, f"this run, {scale}"), (theirs, f"committed, {made_at}")]
            if theirs.exists()
            else [(ours, f"this run, {scale}; nothing committed yet")]
        )
        for folder, text in sides:
            alone = " class='alone'" if len(sides) == 1 else ""
            parts.append(
                f"<div{alone}><div class='side'>{text}</div>{show(folder / name, root / 'build' / scale)}</div>"
            )
        parts.append("</div>")
    if not names:
        parts.append('<p class="none">No figures or tables.</p>')
    return "\n".join([*parts, "</article>"])


def older(stem: str, committed: Committed) -> str:
    """What changed since the committed results were made."""
    if stem not in committed.stale:
        return ""
    changed = committed.stale[stem]
    text = graph.UNKNOWN if changed is None else ", ".join(changed)
    return f'<p class="none">Changed since the committed results were made: {escape(text)}</p>'


def agreement(found: compare.Table | None) -> str:
    """What the comparison with the committed table says; empty where there was none."""
    if found is None:
        return ""
    left = f' <small class="none">but for {escape(", ".join(found.left))}</small>' if found.left else ""
    return tag(f"differs, {found.wrong}", "failed") if found.wrong else tag("agrees", "done") + left


def show(path: Path, base: Path) -> str:
    """A picture or a table."""
    if not path.exists():
        return '<p class="none">none</p>'
    link = path.relative_to(base).as_posix()
    if path.suffix == ".png":
        return f'<a href="{link}"><img src="{link}" alt="{escape(path.stem)}" loading="lazy"></a>'
    rows = compare.read_rows(path)
    more = (
        f'<p class="none">{len(rows) - ROWS} more rows in <a href="{link}">{path.name}</a></p>'
        if len(rows) > ROWS
        else ""
    )
    return f'<div class="scroll">{table(rows[:ROWS])}</div>{more}'


def table(rows: list[dict[str, str]]) -> str:
    """Rows as an HTML table; numbers with four digits, to the right."""
    if not rows:
        return '<p class="none">empty</p>'
    top = "".join(f"<th>{escape(str(k))}</th>" for k in rows[0])
    body = "".join("<tr>" + "".join(_cell(v) for v in row.values()) + "</tr>" for row in rows)
    return f"<table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table>"


def _cell(value: str | None) -> str:
    value = value or ""
    try:
        number = float(value)
    except ValueError:
        return f"<td>{escape(value)}</td>"
    text = value if value.lstrip("-").isdigit() else f"{number:.4g}"
    return f'<td class="n">{text}</td>'


def ledger_table(rows: list[dict[str, str]]) -> str:
    """The claims with their verdicts."""
    if not rows:
        return '<h2 id="ledger">Ledger</h2><p class="none">No claims recorded in this run.</p>'
    counts = " ".join(tag(f"{v}: {k}", of_verdict(v)) for v, k in count(rows).items())
    names = [
        k for k in ("id", "paper", "where", "statement", "kind", "verdict", "evidence", "notebook") if k in rows[0]
    ]
    body = []
    for row in rows:
        cells = {k: escape(row.get(k) or "") for k in names}
        cells["verdict"] = tag(row.get("verdict") or "")
        if "notebook" in cells:
            cells["notebook"] = f'<a href="#{cells["notebook"]}">{cells["notebook"]}</a>'
        body.append("<tr>" + "".join(f"<td>{v}</td>" for v in cells.values()) + "</tr>")
    top = "".join(f"<th>{n}</th>" for n in names)
    return (
        f'<h2 id="ledger">Ledger: {len(rows)} claims</h2><p>{counts}</p>'
        f'<div class="scroll ledger"><table><thead><tr>{top}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def main(argv: list[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="write build/<scale>/index.html")
    parser.add_argument("--scale", choices=graph.SCALES, default="smoke")
    parser.add_argument("--root", type=Path, default=Path.cwd())
    args = parser.parse_args(argv)
    from execute import say

    began = time.time()
    write(args.root.resolve(), args.scale)
    say(f"page done in {time.time() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
