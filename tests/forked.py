"""Python programs in a fork of this process, which has torch in memory: importing it costs seconds every time."""

import faulthandler
import os
import random
import runpy
import signal
import subprocess
import sys
import traceback
import warnings

import numpy as np
import torch
import torch._dynamo  # what the first optimiser of a process imports

OWN = ("sparseattn.studies",)  #: packages that read the environment when they are imported


def popen(command, *, env=None, preexec_fn=lambda: None, **options) -> subprocess.Popen:
    """`subprocess.Popen` for `python -m module ...` and `python script.py ...`; in place of an exec they run here."""
    assert command[0] == sys.executable

    def become():
        try:
            status = _run(command[1:], os.environ if env is None else env, preexec_fn)
        except BaseException:
            traceback.print_exc()
            status = 1
        sys.stdout.flush(), sys.stderr.flush()
        os._exit(status)

    return subprocess.Popen(command, preexec_fn=become, **options)


def _run(words, env, limit) -> int:
    """Run a program as if Python had just started; its exit status."""
    os.closerange(3, 4096)                              # of the tests; the last is the one that `Popen` waits for
    _forget(dict(env))
    limit()
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, int | None):
            return ended.code or 0
        print(ended.code, file=sys.stderr)
        return 1
    return 0


def _forget(env) -> None:
    """Leave streams, signals, draws and modules of the tests behind."""
    faulthandler.disable()
    warnings.resetwarnings()
    os.environ.clear()
    os.environ.update(env)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w", buffering=1)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):     # `Popen` lets these end a process; Python does not
        signal.signal(number, signal.SIG_IGN)
    random.seed(), np.random.seed(), torch.seed()       # no two runs agree because they come from one process
    for name in [name for name in sys.modules if name.startswith(OWN)]:
        del sys.modules[name]
