"""Re-execute the notebooks: check the arguments, export the modules, plan, train, run Snakemake, show progress.

    python workflow/reproduce.py [--scale smoke|cpu|gpu|paper] [--only CHAPTER] [--budget MINUTES] [--retrain] ...

`scripts/reproduce.sh` calls it twice: with `--check` before anything is installed (so only the standard library is
used up to there), and in earnest after the set-up. Snakemake's own output goes to build/<scale>/log/snakemake.log.
One reproduction runs in a checkout at a time; a killed one leaves no lock behind.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import graph
import plan
import publish
from execute import MARK

TOTAL = re.compile(r"^total\s+(\d+)$")  #: Snakemake's table of jobs
ENDED = re.compile(r"^\S+ (done in|FAILED after|stopped after|left after) \d+ s\b")
FAILED = re.compile(r"^\s*Error in rule (\w+)")
FINISHED = re.compile(r"^Finished jobid: \d+ \(Rule: (\w+)\)")


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
    parser.add_argument(
        "--budget",
        type=minutes,
        default=None,
        metavar="MINUTES",
        help="time for trainings without a record, most valuable first; what is left goes on in the next run; 0: none; "
        "default: all of them, but at gpu scale on one machine as workflow/config.yaml says",
    )
    parser.add_argument("--retrain", action="store_true", help="train anew what has a record")
    parser.add_argument(
        "--packages",
        type=folder,
        default=None,
        metavar="FOLDER",
        help="Debian packages (.deb, or unpacked) to build data sets from; default: apt-get fetches them",
    )
    parser.add_argument(
        "--profile",
        type=folder,
        default=None,
        metavar="FOLDER",
        help="submit jobs as a profile of Snakemake says: workflow/profiles/slurm, workflow/profiles/kubernetes",
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
    if args.scale == "smoke":
        for name in ("budget", "retrain"):
            if getattr(args, name) is not parser.get_default(name):
                parser.error(f"argument --{name}: at smoke scale every notebook trains its own toys; give --scale cpu")
    try:
        graph.select(graph.find_notebooks(args.root), args.only, "")
    except ValueError as error:
        parser.error(f"argument --only: {error}" if args.only else str(error))
    return args


def no_gpu(root: Path) -> bool:
    """Whether torch is here and finds no GPU; before torch is installed nothing is known."""
    own = root / ".venv/bin/python"
    command = [own if own.exists() else sys.executable, "-c", "import torch; print(torch.cuda.is_available())"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip() == "False"


def minutes(text: str) -> float:
    """A time that is not negative."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected minutes, a number from 0 on, got {text!r}")
    return value


def folder(text: str) -> Path:
    """An existing folder."""
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder {text!r}")
    return Path(text).resolve()


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
    """The command line: this machine's cores and its GPU, or the profile's jobs."""
    where = ["--cores", str(args.cores), "--latency-wait", "0"]
    where += ["--resources", f"gpu_share={publish.settings()['units_per_gpu']}"]
    if args.profile:
        where = ["--profile", str(args.profile)]
    return [
        sys.executable,
        "-m",
        "snakemake",
        "--snakefile",
        str(Path(__file__).parent / "Snakefile"),
        "--directory",
        str(args.root),
        *where,
        "--scheduler",
        "greedy",
        "--rerun-triggers",
        "mtime",
        "--rerun-incomplete",
        "--keep-going",
        "--nolock",
        "--nocolor",
        *more,
        "--config",
        f"scale={args.scale}",
    ]


def prepare(args: argparse.Namespace) -> dict:
    """Everything that is known before anything runs: records, units, data; said in a few lines.

    Raises:
        plan.Broken: the studies cannot say what they would train.
    """
    notebooks = graph.select(graph.find_notebooks(args.root), args.only, publish.settings()["ledger"])
    imports = graph.Imports(args.root)
    studies = {name for n in notebooks.values() for name in imports.studies(n)}
    units = plan.list_units(args.root, args.scale, studies)
    if args.retrain and not args.dry_run:
        plan.order_again(args.root, args.scale, units)
    for line in plan.tell(args.root, args.scale, units, args.retrain, trains=args.budget != 0):
        print(line, flush=True)
    return plan.make(
        args.root,
        args.scale,
        notebooks,
        [] if args.budget == 0 else plan.to_train(args.root, args.scale, units, args.retrain),
        only=args.only,
        cores=args.cores,
        budget=args.budget if args.budget is not None or args.profile else publish.settings()["budget"].get(args.scale),
        cluster=bool(args.profile),
    )


def show_plan(args: argparse.Namespace) -> int:
    """Print what would run and why."""
    for name, stems in data_to_build(args).items():
        print(f"data set {name} would be built, for {', '.join(stems)}")
    made = prepare(args)
    plan.write(args.root, args.scale, made)
    done = subprocess.run(snakemake(args, "--summary"), capture_output=True, text=True)
    if done.returncode:
        print(done.stderr or done.stdout)
        return done.returncode
    rows = [line.split("\t") for line in done.stdout.splitlines() if line.count("\t") == 5][1:]
    pending = {rule for _, _, rule, _, _, plan in rows if plan != "no update"}
    notebooks, imports = graph.find_notebooks(args.root), graph.Imports(args.root)
    other = {n.rule: (n.key, "records changed") for n in plan.outdated(args.root, args.scale) if n.rule not in pending}
    if other:
        ledger = publish.settings()["ledger"]
        after = {n.rule for n in notebooks.values() if n.is_index or n.stem == ledger} | {"publish", "readme", "page"}
        pending |= after & {rule for _, _, rule, *_ in rows}
    reasons = other | {
        u["rule"]: (f"{u['study']}/{u['unit']}", "no record" if not (args.root / u["record"]).exists() else "--retrain")
        for u in made["units"]
    }
    reasons |= {n.rule: (n.key, reason(args, n, imports)) for n in notebooks.values() if n.rule in pending}
    reasons |= {rule: (rule, "") for rule in ("publish", "readme", "page") if rule in pending}
    print(
        f"scale {args.scale}, {args.cores} cores: "
        f"{len(reasons)} of {len({rule for _, _, rule, *_ in rows})} steps to run"
    )
    for name, why in reasons.values():
        print(f"  {name:<32} {why}".rstrip())
    return 0


def reason(args: argparse.Namespace, notebook: graph.Notebook, imports: graph.Imports) -> str:
    """Why a notebook would run."""
    done = args.root / notebook.done(args.scale)
    if not done.exists():
        return "not run yet"
    then, now = json.loads(done.read_text(encoding="utf-8"))["sources"], graph.fingerprint(args.root, notebook, imports)
    changed = sorted(p for p in then.keys() | now.keys() if then.get(p) != now.get(p))
    return f"changed: {', '.join(changed)}" if changed else "what it depends on runs again"


def data_to_build(args: argparse.Namespace) -> dict[str, list[str]]:
    """Data sets that the scale asks for, that are not here and can be built, with the notebooks that use them."""
    if args.scale == "smoke":
        return {}
    import data

    notebooks = graph.select(graph.find_notebooks(args.root), args.only, publish.settings()["ledger"])
    return data.to_build(notebooks.values(), graph.Imports(args.root))


def build_data(args: argparse.Namespace) -> None:
    """Build data sets, a rule each. One that fails has said so: its rows are left out, and the run goes on."""
    wanted = data_to_build(args)
    if not wanted:
        return
    file = args.root / f"build/{args.scale}/data.json"
    packages = str(args.packages or "")
    graph.write_text(file, json.dumps(dict(sets=wanted, packages=packages), indent=1) + "\n")
    rules = ["--snakefile", str(Path(__file__).parent / "data.smk"), "--configfile", str(file)]
    here = ["--directory", str(args.root), "--cores", str(args.cores), "--scheduler", "greedy"]
    quiet = ["--keep-going", "--nolock", "--nocolor", "--rerun-triggers", "mtime", "--rerun-incomplete"]
    watched = Watched(args, [sys.executable, "-m", "snakemake", *rules, *here, *quiet], "data.log")
    watched.wait()
    if watched.interrupted:
        raise KeyboardInterrupt


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


class Watched:
    """A Snakemake process: its lines for people are shown, the rest is kept in a log."""

    def __init__(
        self, args: argparse.Namespace, command: list[str], log: str = "snakemake.log", made: dict | None = None
    ):
        self.args, self.shown, self.ended, self.total, self.failed = args, 0, 0, "?", []
        self.interrupted = False
        self.names = {job["rule"]: job for job in [*made["units"], *made["notebooks"].values()]} if made else {}
        self.log = args.root / f"build/{args.scale}/log/{log}"
        self.log.parent.mkdir(parents=True, exist_ok=True)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts what it puts behind `&` deaf to it
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            pass_fds=(args.held,),
            env=dict(os.environ, PYTHONUNBUFFERED="1"),
        )
        signal.signal(signal.SIGTERM, self.end)

    def end(self, *_) -> None:
        """End as Ctrl-C does: the jobs, each of which keeps what it has, then Snakemake."""
        import psutil

        self.interrupted = True
        children = []
        with contextlib.suppress(psutil.NoSuchProcess):
            children = psutil.Process(self.process.pid).children(recursive=True)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):  # it ended, or is a zombie that nobody has read yet
                if any(str(Path(__file__).parent) in word for word in child.cmdline()):
                    child.send_signal(signal.SIGINT)
        self.process.send_signal(signal.SIGINT)

    def lines(self) -> Iterator[str]:
        """The output line by line; Ctrl-C goes to Snakemake too, whose last lines are still wanted."""
        while True:
            try:
                line = self.process.stdout.readline()
            except KeyboardInterrupt:
                self.interrupted = True
                later = threading.Timer(3, self.end)  # for a signal that came to this process alone
                later.daemon = True
                later.start()
                continue
            if not line:
                return
            yield line

    def wait(self) -> int:
        """Show what happens until the end.

        Returns:
            The exit status.
        """
        with self.log.open("a", encoding="utf-8") as file:
            for line in self.lines():
                file.write(line)
                file.flush()
                self.line(line)
        return self.process.wait()

    def line(self, line: str) -> None:
        """Take notice of one line of Snakemake."""
        if line.startswith(MARK):
            self.show(line[len(MARK) :].rstrip())
        elif found := TOTAL.match(line):
            self.total = int(found[1]) - 1  # rule all does nothing
        elif found := FAILED.match(line):
            self.report(found[1], again=found[1] in self.failed)
            self.failed.append(found[1])
        elif self.args.profile and (found := FINISHED.match(line)):
            self.report(found[1])

    def show(self, line: str) -> None:
        """Print a line with the time since the start, and how many jobs have ended."""
        self.shown += 1
        if ENDED.search(line):
            self.ended += 1
            line += f"  ({self.ended} of {self.total})"
        print(f"[{clock(time.time() - self.args.began)}] {line}", flush=True)

    def report(self, rule: str, again: bool = False) -> None:
        """Say how a job ended whose lines did not come through: it ran on another machine, or it was cut off."""
        job = self.names.get(rule, {})
        if job and (self.args.profile or "unit" in job) and not again and not self.interrupted:
            for line in how_it_ended(self.args.root, job):
                self.show(line)


def how_it_ended(root: Path, job: dict) -> list[str]:
    """Lines about a unit or a notebook, from what its job left."""
    import train

    unit = "unit" in job
    name = f"{job['study']}/{job['unit']}" if unit else job["key"]
    left = root / job["stamp"] if unit else (root / job["log"]).with_suffix(".json")
    if not left.exists():
        return [f"{name} was cut off; see {job['log']}"]
    state = json.loads(left.read_text(encoding="utf-8"))
    if unit:
        return train.line(name, state).splitlines()
    if state["status"] == "done":
        return [f"{name} done in {state['seconds']:.0f} s"]
    return [f"{name} FAILED after {state['seconds']:.0f} s", *state["error"].splitlines()]


def run(args: argparse.Namespace) -> int:
    """Run Snakemake, again without what failed, until nothing more can be done.

    Returns:
        0 where all succeeded.
    """
    made, failed = prepare(args), set()
    plan.forget(args.root, args.scale, made)
    (args.root / f"build/{args.scale}/log/snakemake.log").unlink(missing_ok=True)
    while True:
        left = plan.without(made, failed)
        plan.write(args.root, args.scale, left)
        watched = Watched(args, snakemake(args), made=left)
        status = watched.wait()
        new = set(watched.failed) - failed
        if not status or watched.interrupted or not new:
            break
        failed |= new
    if watched.interrupted:
        raise KeyboardInterrupt
    if status and not watched.shown:  # nothing ran: the workflow itself is broken
        print(watched.log.read_text(encoding="utf-8")[-4000:])
        return status
    return summary(args, made, bool(status or failed))


def summary(args: argparse.Namespace, made: dict, bad: bool) -> int:
    """Say how it ended; the exit status is 0 where all succeeded."""
    ended = [
        json.loads(p.read_text(encoding="utf-8"))["outcome"]
        for u in made["units"]
        if (p := args.root / u["stamp"]).exists()
    ]
    ended += ["cut off"] * (len(made["units"]) - len(ended))
    counts = {word: ended.count(word) for word in ("done", "stopped", "left", "failed", "cut off") if word in ended}
    if made["units"]:
        print(f"trainings: {', '.join(f'{n} {word}' for word, n in counts.items())}")
    bad = bad or "failed" in counts or bool(refused(args))
    page = f"build/{args.scale}/index.html"
    if (args.root / page).exists():
        print(f"{'NOT everything succeeded' if bad else 'everything is up to date'}: {page}")
    return int(bad)


def refused(args: argparse.Namespace) -> list[str]:
    """Notebooks of the last publication that were kept back."""
    record = args.root / f"build/{args.scale}/published.json"
    return json.loads(record.read_text(encoding="utf-8")).get("refused", []) if record.exists() else []


def clock(seconds: float) -> str:
    """Minutes and seconds."""
    return f"{int(seconds) // 60:2d}:{int(seconds) % 60:02d}"


def main(argv: list[str] | None = None) -> int:
    """Command line; exit status 2 for wrong arguments, 1 when something failed, 130 when it was interrupted."""
    args = parse(argv)
    on_gpu = args.scale in ("gpu", "paper") and "SPARSEATTN_DEVICE" not in os.environ
    if on_gpu and not args.dry_run and not args.profile and no_gpu(args.root):
        how = "SPARSEATTN_DEVICE=cpu rehearses it on the CPU"
        print(f"scale {args.scale} needs a CUDA device; torch finds none here. {how}", file=sys.stderr)
        return 2
    if args.check:
        return 0
    args.began, args.held = time.time(), lock(args.root)
    if args.held is None:
        print("another reproduction is running in this checkout; wait for it or end it", file=sys.stderr)
        return 1
    try:
        return work(args)
    except plan.Broken as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here")
        return 130


def work(args: argparse.Namespace) -> int:
    """Plan, and unless that is all, export, build data, train and execute."""
    if args.dry_run:
        return show_plan(args)
    if not args.no_export and not export(args.root):
        return 1
    forget_removed(args)
    build_data(args)
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
