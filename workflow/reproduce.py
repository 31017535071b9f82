"""Re-execute the notebooks: check the arguments, export the modules, run Snakemake, show progress.

    python workflow/reproduce.py [--scale smoke|cpu|gpu|paper] [--only CHAPTER] [--dry-run] [--cores N]

`scripts/reproduce.sh` calls it twice: with `--check` before anything is installed (so only the standard library is
used up to there), and in earnest after the set-up. Snakemake's own output goes to build/<scale>/log/snakemake.log.
One reproduction runs in a checkout at a time; a killed one leaves no lock behind.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import graph
from execute import MARK

TOTAL = re.compile(r"^total\s+(\d+)$")  #: Snakemake's table of jobs
ENDED = re.compile(r" (done in|FAILED after) \d+ s$")


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Arguments; whatever is unknown ends with a message that names the choices and exit status 2."""
    parser = argparse.ArgumentParser(
        prog="reproduce.sh",
        allow_abbrev=False,
        description=(
            "Execute every notebook and write build/<scale>/index.html. At cpu, gpu and paper scale the results also "
            "go to figures/, to the outputs stored in nbs/ and to README.md. Run it again to go on after a kill."
        ),
    )
    parser.add_argument("--scale", choices=graph.SCALES, default="smoke", help="default: %(default)s")
    parser.add_argument(
        "--only",
        default="",
        metavar="CHAPTER",
        help="a folder of nbs/: its notebooks, the ledger, the index and the page",
    )
    parser.add_argument("--dry-run", action="store_true", help="show what would run, run nothing")
    parser.add_argument(
        "--cores", type=int, default=cores_here(), metavar="N", help="default: all of this machine, %(default)s"
    )
    parser.add_argument("--check", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-export", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--root", type=Path, default=Path(__file__).parent.parent, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.root = args.root.resolve()
    if args.cores < 1:
        parser.error(f"argument --cores: {args.cores} is less than 1")
    try:
        graph.select(graph.find_notebooks(args.root), args.only, "")
    except ValueError as error:
        parser.error(f"argument --only: {error}" if args.only else str(error))
    return args


def cores_here() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def lock(root: Path) -> int | None:
    """The checkout's lock as an open file, None where another has it. The system frees it when its holders are gone."""
    (root / "build").mkdir(exist_ok=True)
    handle = os.open(root / "build/.lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def snakemake(args: argparse.Namespace, *more: str) -> list[str]:
    """The command line."""
    return [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(Path(__file__).parent / "Snakefile"),
        "--directory",
        str(args.root),
        "--cores",
        str(args.cores),
        "--scheduler",
        "greedy",
        "--rerun-triggers",
        "mtime",
        "--rerun-incomplete",
        "--keep-going",
        "--nolock",
        "--nocolor",
        "--latency-wait",
        "0",
        *more,
        "--config",
        f"scale={args.scale}",
        f"only={args.only}",
        f"cores={args.cores}",
    ]


def plan(args: argparse.Namespace) -> int:
    """Print what would run and why."""
    done = subprocess.run(snakemake(args, "--summary"), capture_output=True, text=True)
    if done.returncode:
        print(done.stderr or done.stdout)
        return done.returncode
    rows = [line.split("\t") for line in done.stdout.splitlines() if line.count("\t") == 5][1:]
    pending = {rule for _, _, rule, _, _, plan in rows if plan != "no update"}
    notebooks, imports = graph.find_notebooks(args.root), graph.Imports(args.root)
    reasons = {n.rule: (n.key, reason(args, n, imports)) for n in notebooks.values() if n.rule in pending}
    reasons |= {rule: (rule, "") for rule in ("publish", "readme", "page") if rule in pending}
    print(
        f"scale {args.scale}, {args.cores} cores: "
        f"{len(reasons)} of {len({rule for _, _, rule, *_ in rows})} steps to run"
    )
    for name, why in reasons.values():
        print(f"  {name:<32}{why}".rstrip())
    return 0


def reason(args: argparse.Namespace, notebook: graph.Notebook, imports: graph.Imports) -> str:
    """Why a notebook would run."""
    done = args.root / notebook.done(args.scale)
    if not done.exists():
        return "not run yet"
    then, now = json.loads(done.read_text(encoding="utf-8"))["sources"], graph.fingerprint(args.root, notebook, imports)
    changed = sorted(p for p in then.keys() | now.keys() if then.get(p) != now.get(p))
    return f"changed: {', '.join(changed)}" if changed else "what it depends on runs again"


def export(root: Path) -> bool:
    """Write the modules from the notebooks; False where nbdev cannot."""
    done = subprocess.run([Path(sys.executable).with_name("nbdev-export")], cwd=root, capture_output=True, text=True)
    if done.returncode:
        print(f"nbdev-export failed:\n{done.stderr[-2000:]}", file=sys.stderr)
    return done.returncode == 0


def forget_removed(args: argparse.Namespace) -> None:
    """Drop results of notebooks that are no more, so that they are not taken for current ones."""
    stems = {n.stem for n in graph.find_notebooks(args.root).values()}
    for folder in (args.root / f"build/{args.scale}/figures").glob("*/"):
        if folder.name not in stems:
            shutil.rmtree(folder)


def run(args: argparse.Namespace, held: int) -> int:
    """Run Snakemake; show the lines meant for people, keep the rest in the log."""
    began, shown, ended, total = time.time(), 0, 0, "?"
    log = args.root / f"build/{args.scale}/log/snakemake.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        snakemake(args),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        pass_fds=(held,),
        env=dict(os.environ, PYTHONUNBUFFERED="1"),
    )
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    with log.open("w", encoding="utf-8") as file:
        for line in iter_lines(process):
            file.write(line)
            file.flush()
            if line.startswith(MARK):
                shown, line = shown + 1, line[len(MARK) :].rstrip()
                if ENDED.search(line):
                    ended += 1
                    line += f"  ({ended} of {total})"
                print(f"[{clock(time.time() - began)}] {line}", flush=True)
            elif found := TOTAL.match(line):
                total = int(found[1]) - 1  # rule all does nothing
    status = process.wait()
    page = f"build/{args.scale}/index.html"
    if status and not shown:  # nothing ran: the workflow itself is broken
        print(log.read_text(encoding="utf-8")[-4000:])
    if (args.root / page).exists():
        print(f"{'NOT everything succeeded' if status else 'everything is up to date'}: {page}")
    return status


def iter_lines(process: subprocess.Popen):
    """The output line by line; Ctrl-C goes to Snakemake too, whose last lines are still wanted."""
    while True:
        try:
            line = process.stdout.readline()
        except KeyboardInterrupt:
            continue
        if not line:
            return
        yield line


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60:2d}:{int(seconds) % 60:02d}"


def main(argv: list[str] | None = None) -> int:
    """Command line; exit status 2 for wrong arguments, 1 when something failed."""
    args = parse(argv)
    if args.check:
        return 0
    held = lock(args.root)
    if held is None:
        print("another reproduction is running in this checkout; wait for it or end it", file=sys.stderr)
        return 1
    if args.dry_run:
        return plan(args)
    if not args.no_export and not export(args.root):
        return 1
    forget_removed(args)
    return run(args, held)


if __name__ == "__main__":
    sys.exit(main())
