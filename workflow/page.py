"""The page at the end of a reproduction: build/<scale>/index.html.

    python workflow/page.py --scale smoke

Failed notebooks first, then every figure and table of this run beside the committed one, the rendered notebooks and
the ledger. The page and what it shows are in build/<scale>/ alone, so the folder can be moved or uploaded as it is.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from html import escape
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
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
    parts = [
        head(root, scale, notebooks, status, ledger),
        "<main>",
        failures(notebooks, status),
        overview(notebooks, status),
    ]
    parts += [
        chapter(root, scale, name, [n for n in notebooks if n.chapter == name], status)
        for name in with_results(notebooks)
    ]
    parts += [
        ledger_table(ledger),
        "</main>",
        f"<footer>Written by workflow/page.py. Files of this run: build/{scale}/.</footer></body></html>\n",
    ]
    graph.write_text(build / "index.html", "\n".join(p for p in parts if p))
    return build / "index.html"


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
    """HTML of the executed copies, over all cores; what is newer than its notebook stays."""
    todo = []
    for notebook in notebooks:
        source, target = root / notebook.executed(scale), html_path(root, notebook, scale)
        if source.exists() and not (target.exists() and target.stat().st_mtime >= source.stat().st_mtime):
            todo.append((source, target))
    workers = min(len(todo), os.cpu_count() or 1)
    if workers < 2:
        for source, target in todo:
            render(source, target)
        return
    with ProcessPoolExecutor(workers) as pool:
        list(pool.map(render, *zip(*todo, strict=True)))


def render(source: Path, target: Path) -> None:
    """HTML of one executed notebook."""
    import nbformat
    from nbconvert import HTMLExporter

    try:
        notebook = nbformat.read(source, as_version=4)
    except Exception:  # a copy cut off by a kill: there is nothing to show
        return
    exporter = HTMLExporter(exclude_input_prompt=True, exclude_output_prompt=True)
    graph.write_text(target, exporter.from_notebook_node(notebook, {"metadata": {"name": source.stem}})[0])


def html_path(root: Path, notebook: graph.Notebook, scale: str) -> Path:
    """Where the rendered notebook is."""
    return root / f"build/{scale}/html/{notebook.key}.html"


def read_ledger(build: Path, notebooks: list[graph.Notebook]) -> list[dict[str, str]]:
    """The claims of all notebooks that ran at this scale, in the order of the collection."""
    rows: list[dict[str, str]] = []
    for notebook in notebooks:
        path = build / "figures" / notebook.stem / "claims.csv"
        if path.exists():
            rows += read_csv(path)
    return rows


def read_csv(path: Path) -> list[dict[str, str]]:
    """Rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def count(rows: list[dict[str, str]]) -> dict[str, int]:
    """How often each verdict occurs."""
    verdicts = [r.get("verdict", "") for r in rows]
    return {v: verdicts.count(v) for v in sorted(set(verdicts))}


def head(root: Path, scale: str, notebooks: list[graph.Notebook], status: dict, ledger: list) -> str:
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


def tag(text: str, kind: str = "") -> str:
    """A small coloured label."""
    kind = kind or {"holds with a condition": "condition", "false as stated": "false"}.get(text, text.replace(" ", "-"))
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


def chapter(root: Path, scale: str, name: str, notebooks: list[graph.Notebook], status: dict) -> str:
    """A chapter: its notebooks that left figures or tables."""
    parts = [article(root, scale, n, status[n.key]) for n in notebooks if n.has_parameters]
    return f'<h2 id="{name}">{name}</h2>' + "\n".join(parts)


def article(root: Path, scale: str, notebook: graph.Notebook, state: dict) -> str:
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
        f"{tag(state['status'])}<span class='links'><a href='html/{notebook.key}.html'>notebook</a></span></div>"
    ]
    for name in names:
        same = (
            (ours / name).exists()
            and (theirs / name).exists()
            and (ours / name).read_bytes() == (theirs / name).read_bytes()
        )
        parts.append(f"<h4>{escape(name)} {tag('identical', 'done') if same else ''}</h4><div class='pair'>")
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


def show(path: Path, base: Path) -> str:
    """A picture or a table."""
    if not path.exists():
        return '<p class="none">none</p>'
    link = path.relative_to(base).as_posix()
    if path.suffix == ".png":
        return f'<a href="{link}"><img src="{link}" alt="{escape(path.stem)}" loading="lazy"></a>'
    rows = read_csv(path)
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
    counts = " ".join(
        tag(
            f"{v}: {k}", {"holds with a condition": "condition", "false as stated": "false"}.get(v, v.replace(" ", "-"))
        )
        for v, k in count(rows).items()
    )
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
