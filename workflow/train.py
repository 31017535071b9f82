"""Train one unit of a study as a job, and say shortly how it ended.

    python workflow/train.py tracking hept-or-0 --scale cpu

Calls `python -m sparseattn.studies` for the unit, in this process, so that nothing outlives it. Its output goes to
build/<scale>/log/units/<study>/<unit>.txt. A unit that fails, or for which no time is left, ends the job well: the
notebooks leave its row out. How it ended stands in build/<scale>/units/<study>/<unit>.json; a job that was killed
leaves no such file.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import runpy
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import graph
import plan
from execute import set_threads, say

STOPPED = 75  #: exit status of a study that ran out of time, or of a unit that another process has
GRACE = 60  #: seconds to write a checkpoint when the job is ended


def train(root: Path, scale: str, unit: dict, budget: float | None) -> tuple[str, str]:
    """Train one unit.

    Returns:
        How it ended (done, stopped, left, failed) and why.
    """
    if waiting := [record for record in unit["needs"] if not (root / record).exists()]:
        return "left", f"{', '.join(waiting)} is not there"
    began = first_start(root, scale)
    left = None if budget is None else budget - (time.time() - began) / 60
    if left is not None and left <= 0:
        return "left", "no time is left of --budget"
    command = [unit["study"], "--unit", unit["unit"], "--scale", scale]
    device = os.environ.get("SPARSEATTN_DEVICE", "") if unit["gpu"] else "cpu"
    command += ["--device", device] if device else []
    command += [] if left is None else ["--budget", f"{max(left, 0.001):.3f}"]
    mark = plan.again(root, scale, unit)
    if mark.exists():  # only now does the old record go, and only once
        set_aside(root, scale, unit)
        mark.unlink()
        command.append("--retrain")
    status = call(command)
    if (root / unit["record"]).exists() and not status:
        return "done", ""
    if status == STOPPED:
        return "stopped", "it goes on in the next run"
    return "failed", f"exit status {status}"


def first_start(root: Path, scale: str) -> float:
    """When the first unit of this run started; if none has, now."""
    file = root / f"build/{scale}/units/began"
    if not file.exists():
        own = file.with_name(f"began.{os.uname().nodename}.{os.getpid()}")
        graph.write_text(own, str(time.time()))
        with contextlib.suppress(FileExistsError):
            os.link(own, file)  # whole, or not there
        own.unlink()
    return float(file.read_text(encoding="utf-8"))


def set_aside(root: Path, scale: str, unit: dict) -> None:
    """Move a record that is made anew to build/<scale>/replaced/."""
    record = root / unit["record"]
    if record.exists():
        kept = root / f"build/{scale}/replaced/{unit['record']}"
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(record, kept)


def call(arguments: list[str]) -> int:
    """`python -m sparseattn.studies` in this process.

    Returns:
        Its exit status.
    """
    sys.argv = [graph.STUDIES, *arguments]
    try:
        runpy.run_module(graph.STUDIES, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def start_in(environment: dict[str, str]) -> None:
    """Start this program again, in this process, where variables that count at its start only (glibc's) are others."""
    if any(os.environ.get(name) != value for name, value in environment.items()):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], os.environ | environment)


def end_with_parent() -> None:
    """Stop as by Ctrl-C on SIGTERM too, and when the process that started this one is gone."""
    parent = os.getppid()
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(GRACE)
        os._exit(143)

    threading.Thread(target=watch, daemon=True).start()


def listen() -> int:
    """A pipe that holds a byte as soon as a signal came, whoever handles it: a study that is told to end ends well."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False), os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def was_told(reader: int) -> bool:
    """Whether a signal to end came."""
    try:
        return bool({signal.SIGINT, signal.SIGTERM}.intersection(os.read(reader, 1000)))
    except BlockingIOError:
        return False


def shortly(log: Path, lines: int = 4) -> str:
    """The last lines of a log, of a progress bar its last state."""
    text = [
        line.rsplit("\r", 1)[-1].rstrip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines()
    ]
    return "\n".join(f"  {line[:200]}" for line in [line for line in text if line][-lines:])


def main(argv: list[str] | None = None) -> int:
    """Command line; the exit status is 0 unless the job was interrupted."""
    parser = argparse.ArgumentParser(description="train one unit of a study")
    parser.add_argument("study")
    parser.add_argument("unit")
    parser.add_argument("--scale", choices=graph.SCALES[1:], required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--root", type=Path, default=Path.cwd())
    args = parser.parse_args(argv)
    root = args.root.resolve()
    made = plan.read(root, args.scale)
    unit = next(u for u in made["units"] if (u["study"], u["unit"]) == (args.study, args.unit))
    plan.enter(made)
    set_threads(args.threads)
    start_in(unit["environment"])
    end_with_parent()
    signals = listen()
    sys.path.insert(0, str(root))  # the package of this checkout
    log, name = root / unit["log"], f"{args.study}/{args.unit}"
    log.parent.mkdir(parents=True, exist_ok=True)
    say(f"{name} started")
    out, began = os.dup(1), time.time()
    with log.open("a", encoding="utf-8") as file:
        os.dup2(file.fileno(), 1), os.dup2(file.fileno(), 2)
        try:
            how, why = train(root, args.scale, unit, made["budget"])
        except KeyboardInterrupt:
            pass
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os.dup2(out, 1)
    if was_told(signals):
        return 130
    seconds = time.time() - began
    if how == "failed":
        why += f"\n{shortly(log)}"
    ended = dict(outcome=how, why=why, seconds=round(seconds, 1), finished=time.time())
    graph.write_text(root / unit["stamp"], json.dumps(ended, indent=1) + "\n")
    say(line(name, ended))
    return 0


def line(name: str, ended: dict) -> str:
    """How a unit ended, for people."""
    words = {"done": "done in", "failed": "FAILED after", "stopped": "stopped after", "left": "left after"}
    why = f": {ended['why']}" if ended["why"] else ""
    return f"{name} {words[ended['outcome']]} {ended['seconds']:.0f} s{why}"


if __name__ == "__main__":
    sys.exit(main())
