"""Training loop: exact resumption, stops, schedules, several processes."""

import collections
import dataclasses
import errno
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from unittest import mock

import pytest
import torch
from torch import nn

from sparseattn.lab import train as T
from sparseattn.lab.train import Fitted, Optimiser, Paused, Schedule, fit, to_device

POINTS = torch.randn(96, 4, generator=torch.Generator().manual_seed(0))


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.2), nn.BatchNorm1d(16), nn.Linear(16, 1), nn.Flatten(0)
    )


def batches(epoch):
    order = torch.randperm(96, generator=torch.Generator().manual_seed(epoch))
    return [{"x": rows} for rows in POINTS[order].split(16)]  # 6 batches


def loss(model, batch, generator):
    noise = 0.1 * torch.randn(batch["x"].shape, generator=generator)
    return ((model(batch["x"] + noise) - batch["x"].prod(1)) ** 2).mean()


def validate(model):
    assert not model.training and not torch.is_grad_enabled()
    return {"closeness": -float(((model(POINTS) - POINTS.prod(1)) ** 2).mean()), "other": 1.0}


KEEP = dict(optimiser=Optimiser(lr=1e-2, clip=1.0), validate=validate)


def equal(a: Fitted, b: Fitted):
    rows = [[{k: v for k, v in row.items() if "seconds" not in k} for row in fitted.history] for fitted in (a, b)]
    assert rows[0] == rows[1]
    assert (a.best_epoch, a.best_score) == (b.best_epoch, b.best_score)
    for left, right in ((a.model.state_dict(), b.model.state_dict()), (a.best or {}, b.best or {})):
        assert left.keys() == right.keys() and all(torch.equal(left[k], right[k]) for k in left)


@pytest.mark.parametrize(
    "schedule",
    [Schedule(), Schedule("step", every=2), Schedule("plateau", patience=0), Schedule("cosine")],
    ids=lambda s: s.kind,
)
@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_stopped_and_resumed_is_bitwise_equal(tmp_path, schedule, name):
    keep = KEEP | dict(schedule=schedule, optimiser=Optimiser(name, lr=1e-2, clip=1.0))
    straight = fit(network(), batches, loss, epochs=6, **keep)

    def stops(model):  # ends the first session after its third epoch's checkpoint
        if stops.left == 0:
            raise InterruptedError
        stops.left -= 1
        return validate(model)

    stops.left = 3
    with pytest.raises(InterruptedError):
        fit(network(), batches, loss, epochs=6, checkpoint_dir=tmp_path, **keep | {"validate": stops})
    resumed = fit(network(), batches, loss, epochs=6, checkpoint_dir=tmp_path, **keep)
    equal(straight, resumed)
    again = fit(network(), batches, loss, epochs=6, checkpoint_dir=tmp_path, **keep)  # finished: nothing to do
    equal(straight, again)
    assert [r["seconds"] for r in again.history] == [r["seconds"] for r in resumed.history]
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_more_epochs_later(tmp_path):
    straight = fit(network(), batches, loss, epochs=6, **KEEP)
    fit(network(), batches, loss, epochs=3, checkpoint_dir=tmp_path, **KEEP)
    equal(straight, fit(network(), batches, loss, epochs=6, checkpoint_dir=tmp_path, **KEEP))


@pytest.mark.parametrize("at", [1, 6, 8, 12])
def test_ctrl_c_loses_nothing(tmp_path, at):
    calls = itertools.count(1)

    def interrupted(model, batch, generator):
        if next(calls) == at:
            signal.raise_signal(signal.SIGINT)
        return loss(model, batch, generator)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt, match=f"step {at}"):
        fit(network(), batches, interrupted, epochs=3, checkpoint_dir=tmp_path, **KEEP)
    assert signal.getsignal(signal.SIGINT) is before
    equal(
        fit(network(), batches, loss, epochs=3, **KEEP),
        fit(network(), batches, interrupted, epochs=3, checkpoint_dir=tmp_path, **KEEP),
    )
    assert next(calls) == 3 * 6 + 1


@pytest.fixture
def listening():
    """Ctrl-C as a terminal has it; a process started in the background by a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_second_ctrl_c_interrupts_at_once(tmp_path, listening):
    def twice(model, batch, generator):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        raise AssertionError("not reached")

    with pytest.raises(KeyboardInterrupt):
        fit(network(), batches, twice, epochs=3, checkpoint_dir=tmp_path, **KEEP)
    assert not list(tmp_path.iterdir())


PROGRAM = textwrap.dedent("""
    import os, signal, sys, torch
    sys.path.insert(0, {folder!r})
    from test_train import KEEP, batches, fit, loss, network
    torch.set_num_threads(1)
    count = 0
    def deadly(model, batch, generator):
        global count
        count += 1
        if count == 20:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss(model, batch, generator)
    fit(network(), batches, deadly, epochs=6, checkpoint_dir=sys.argv[1], **KEEP)
""")


def test_killed_process_and_resumed(tmp_path):
    program = PROGRAM.format(folder=os.path.dirname(__file__))
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["epoch"] == 3
    equal(
        fit(network(), batches, loss, epochs=6, **KEEP),
        fit(network(), batches, loss, epochs=6, checkpoint_dir=tmp_path, **KEEP),
    )


def test_crash_while_writing_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    fit(network(), batches, loss, epochs=2, checkpoint_dir=tmp_path, **KEEP)
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def fails(number):
        raise OSError(errno.EIO, "no such disk")

    monkeypatch.setattr(T.os, "fsync", fails)
    with pytest.raises(OSError, match="no such disk"):
        fit(network(), batches, loss, epochs=3, checkpoint_dir=tmp_path, **KEEP)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before and len(list(tmp_path.iterdir())) == 1


def test_full_disk_is_one_sentence_and_keeps_the_old_checkpoint(tmp_path, monkeypatch):
    fit(network(), batches, loss, epochs=2, checkpoint_dir=tmp_path, **KEEP)
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def full(number):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(T.os, "fsync", full)
        with pytest.raises(OSError, match="checkpoint .*checkpoint.pt is not written: the disk is full"):
            fit(network(), batches, loss, epochs=3, checkpoint_dir=tmp_path, **KEEP)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before and len(list(tmp_path.iterdir())) == 1
    straight = fit(network(), batches, loss, epochs=3, **KEEP)
    equal(straight, fit(network(), batches, loss, epochs=3, checkpoint_dir=tmp_path, **KEEP))


@pytest.fixture
def small_disk(tmp_path):
    """A file system that holds one checkpoint and not two."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("only root mounts a file system")
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True)
    if made.returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_full_disk_for_real(small_disk):
    fit(network(), batches, loss, epochs=2, checkpoint_dir=small_disk, **KEEP)
    before = (small_disk / "checkpoint.pt").read_bytes()
    (small_disk / "other").write_bytes(bytes(4096 * ((65536 - len(before)) // 4096 - 1)))
    with pytest.raises(OSError, match="disk is full"):
        fit(network(), batches, loss, epochs=3, checkpoint_dir=small_disk, **KEEP)
    assert (small_disk / "checkpoint.pt").read_bytes() == before and len(list(small_disk.iterdir())) == 2


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(precision="bfloat16"), "precision was 'float32', is 'bfloat16'"),
        (dict(schedule=Schedule("plateau", patience=3)), "schedule"),
        (dict(seed=1), "seed was 0, is 1"),
        (dict(optimiser=Optimiser(lr=1.0)), "other settings"),
    ],
)
def test_checkpoint_of_other_settings(tmp_path, change, words):
    fit(network(), batches, loss, epochs=1, checkpoint_dir=tmp_path, **KEEP)
    with pytest.raises(ValueError, match=words):
        fit(network(), batches, loss, epochs=2, checkpoint_dir=tmp_path, **KEEP | change)


def test_checkpoint_of_another_model_or_broken(tmp_path):
    fit(network(), batches, loss, epochs=1, checkpoint_dir=tmp_path, **KEEP)
    with pytest.raises(ValueError, match="another model"):
        fit(nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), batches, loss, epochs=2, checkpoint_dir=tmp_path, **KEEP)
    (tmp_path / "checkpoint.pt").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="delete it"):
        fit(network(), batches, loss, epochs=2, checkpoint_dir=tmp_path, **KEEP)


class Evil:
    def __reduce__(self):
        return print, ("code ran",)


def test_checkpoint_cannot_run_code(tmp_path, capsys):
    torch.save({"model": Evil()}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="cannot read"):
        fit(network(), batches, loss, epochs=2, checkpoint_dir=tmp_path, **KEEP)
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_loss_names_the_step(bad):
    count = itertools.count()
    with pytest.raises(FloatingPointError, match=r"step 7 \(epoch 1, batch 1\)"):
        fit(network(), batches, lambda m, b, g: loss(m, b, g) * (bad if next(count) == 7 else 1.0), epochs=2)


def bad_from(at, bad=float("nan")):
    count = itertools.count()
    return lambda m, b, g: loss(m, b, g) * (bad if next(count) == at else 1.0)


@pytest.mark.parametrize(
    "at, where",
    [
        (5, r"between step 4 and step 5 \(epoch 0, batch 5\)"),  # the end of an epoch of 6
        (6, r"between step 6 and step 9 \(epoch 1, batch 3\)"),
        (11, r"between step 10 and step 11 \(epoch 1, batch 5\)"),
    ],
)
def test_rare_looks_name_the_steps_between(tmp_path, at, where):
    keep = dict(look_every=4, epochs=4, checkpoint_dir=tmp_path)
    with pytest.raises(FloatingPointError, match=where):
        fit(network(), batches, bad_from(at), **keep)
    if at < 6:
        assert not list(tmp_path.iterdir())
    else:  # the checkpoint is that of the first epoch
        kept = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
        assert kept["epoch"] == 1 and all(torch.isfinite(x).all() for x in kept["model"].values())
        equal(fit(network(), batches, loss, epochs=4), fit(network(), batches, loss, **keep))


def test_rare_looks_change_no_number():
    straight = fit(network(), batches, loss, epochs=3, **KEEP)
    equal(straight, fit(network(), batches, loss, epochs=3, look_every=7, **KEEP))


def test_a_look_comes_before_each_checkpoint(tmp_path):
    """A step whose loss is finite and whose gradient is not, without clipping: only the weights show it."""
    count = itertools.count(1)

    def steep(model, batch, generator):
        flat = (0 * model(batch["x"]).abs().sum()).sqrt()  # 0, with a slope of 0 times infinity
        return loss(model, batch, generator) + (flat if next(count) == 12 else 0)

    with pytest.raises(FloatingPointError, match="weights are not finite after step 11"):
        fit(network(), batches, steep, epochs=4, checkpoint_dir=tmp_path)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["epoch"] == 1


def test_non_finite_gradient_names_the_step():
    with pytest.raises(FloatingPointError, match="gradient norm is .* at step 0"):
        fit(
            network(),
            batches,
            lambda m, b, g: (0 * m(b["x"]).abs().sum()).sqrt(),
            epochs=1,
            optimiser=Optimiser(clip=1.0),
        )


def test_weights_that_are_not_finite_are_named_without_a_checkpoint():
    with pytest.raises(FloatingPointError, match="weights are not finite after step 0"):
        fit(network(), batches, lambda m, b, g: (0 * m(b["x"]).abs().sum()).sqrt(), steps=1)


def test_a_budget_ends_no_epoch_in_its_middle(tmp_path):
    stops = iter([False] * 7 + [True])
    with pytest.raises(Paused):                                     # in the second epoch of six steps
        fit(network(), batches, loss, epochs=3, checkpoint_dir=tmp_path, stop=stops.__next__, **KEEP)
    fitted = fit(network(), batches, loss, epochs=3, checkpoint_dir=tmp_path, max_seconds=0.0, **KEEP)
    assert fitted.stopped == "max_seconds" and [row["step"] for row in fitted.history] == [6, 12]


@pytest.mark.parametrize("level", [1.0, 0.0, -1.0])
def test_a_plateau_has_any_sign(level):
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = Schedule("plateau", patience=2).build(optimiser, 9)
    rates = []
    for _ in range(6):
        schedule.step(level)
        rates.append(optimiser.param_groups[0]["lr"])
    assert rates == [1, 1, 1, 0.5, 0.5, 0.5]


def paused_and_resumed(folder, every=4, **settings):
    """Started again and again, paused after each `every` steps, until the run is done; the number of starts."""
    for starts in itertools.count(1):
        stops = map(every.__eq__, itertools.count(1))
        try:
            return starts, fit(network(), batches, loss, checkpoint_dir=folder, stop=stops.__next__, **settings)
        except Paused as pause:
            assert pause.step == every * starts and str(pause) == f"paused after step {pause.step}"


NEW = [
    dict(epochs=3),
    dict(epochs=3, save_every_seconds=0.0),
    dict(epochs=3, precision="bfloat16"),
    dict(epochs=3, precision="tf32"),
    dict(epochs=3, look_every=5),
    dict(steps=17, schedule=Schedule("cosine", warmup=5)),
    dict(steps=18, schedule=Schedule("cosine")),
    dict(steps=18, schedule=Schedule(warmup=7)),
]


@pytest.mark.parametrize("settings", NEW, ids=str)
def test_paused_and_resumed_is_bitwise_equal(tmp_path, settings):
    straight = fit(network(), batches, loss, **KEEP | settings)
    starts, fitted = paused_and_resumed(tmp_path, **KEEP | settings)
    assert starts == (settings.get("steps", 18) - 1) // 4 + 1
    equal(straight, fitted)


@pytest.mark.parametrize("settings", NEW, ids=str)
@pytest.mark.parametrize("at", [3, 6, 8, 16])
def test_failed_and_resumed_is_bitwise_equal(tmp_path, settings, at):
    """The loss raises at its call number `at`, without a checkpoint of that moment."""
    calls = itertools.count(1)

    def failing(model, batch, generator):
        if next(calls) == at:
            raise InterruptedError
        return loss(model, batch, generator)

    with pytest.raises(InterruptedError):
        fit(network(), batches, failing, checkpoint_dir=tmp_path, **KEEP | settings)
    if "save_every_seconds" in settings:
        assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["step"] == at - 1
    resumed = fit(network(), batches, loss, checkpoint_dir=tmp_path, **KEEP | settings)
    equal(fit(network(), batches, loss, **KEEP | settings), resumed)


def test_stop_without_a_checkpoint_and_at_the_end():
    with pytest.raises(Paused):
        fit(network(), batches, loss, epochs=2, stop=lambda: True)
    fitted = fit(network(), batches, loss, steps=1, stop=lambda: True)  # done: there is nothing to pause
    assert fitted.stopped == "steps" and len(fitted.history) == 1


def test_ctrl_c_at_the_last_of_some_steps(tmp_path):
    calls = itertools.count(1)

    def interrupted(model, batch, generator):
        if next(calls) == 8:
            signal.raise_signal(signal.SIGINT)
        return loss(model, batch, generator)

    with pytest.raises(KeyboardInterrupt, match="step 8"):
        fit(network(), batches, interrupted, steps=8, checkpoint_dir=tmp_path, **KEEP)
    fitted = fit(network(), batches, interrupted, steps=8, checkpoint_dir=tmp_path, **KEEP)
    equal(fit(network(), batches, loss, steps=8, **KEEP), fitted)


def test_checkpoint_without_a_precision_is_refused(tmp_path):
    fit(network(), batches, loss, epochs=1, checkpoint_dir=tmp_path, **KEEP)
    content = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    del content["settings"]["precision"]
    torch.save(content, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="precision was None, is 'float32'"):
        fit(network(), batches, loss, epochs=2, checkpoint_dir=tmp_path, **KEEP)


@pytest.mark.parametrize("precision, inside", [("float32", "highest"), ("tf32", "high"), ("bfloat16", "highest")])
def test_precision_holds_during_the_run_only(precision, inside):
    before, seen = torch.get_float32_matmul_precision(), set()

    def looking(model, batch, generator):
        assert torch.backends.cudnn.allow_tf32 is (precision == "tf32")
        seen.add((torch.get_float32_matmul_precision(), torch.is_autocast_enabled("cpu"), model(batch["x"]).dtype))
        return loss(model, batch, generator)

    model = network()
    torch.set_float32_matmul_precision("medium")
    try:
        fit(model, batches, looking, epochs=1, precision=precision)
        assert torch.get_float32_matmul_precision() == "medium"
        with pytest.raises(FloatingPointError):
            fit(model, batches, bad_from(2), epochs=1, precision=precision)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.backends.cudnn.allow_tf32                      # torch's own default
    low = precision == "bfloat16"
    assert seen == {(inside, low, torch.bfloat16 if low else torch.float32)}
    assert all(x.dtype == torch.float32 for x in model.parameters()) and not torch.is_autocast_enabled("cpu")


def test_lr_by_step():
    seen = []

    def looking(model, batch, generator):
        seen.append(optimiser.rates())
        return loss(model, batch, generator)

    class Watched(Optimiser):
        def build(self, parameters):
            built = super().build(parameters)
            object.__setattr__(self, "rates", lambda: built.param_groups[0]["lr"])
            return built

    optimiser = Watched("sgd", lr=2.0, betas=(0.0, 0.0))
    model = nn.Sequential(nn.Linear(4, 1), nn.Flatten(0))
    fitted = fit(model, batches, looking, steps=10, optimiser=optimiser, schedule=Schedule("cosine", warmup=4))
    half = [1 + math.cos(math.pi * s / 6) for s in range(6)]
    assert seen == pytest.approx([0.5, 1.0, 1.5, 2.0] + half)
    assert [row["lr"] for row in fitted.history] == pytest.approx([half[2], 0.0])


def test_clocks_count_all_sessions(tmp_path):
    def busy(model, batch, generator):
        begin = time.process_time()
        while time.process_time() - begin < 0.01:
            pass
        return loss(model, batch, generator)

    first = fit(network(), batches, busy, epochs=1, checkpoint_dir=tmp_path)
    second = fit(network(), batches, busy, epochs=2, checkpoint_dir=tmp_path)
    assert first.cpu_seconds >= 0.06 and second.cpu_seconds >= first.cpu_seconds + 0.06 and second.seconds >= 0.12
    times = [row["cpu_seconds"] for row in second.history]
    assert 0.06 <= times[0] <= first.cpu_seconds and times[0] + 0.06 <= times[1] <= second.cpu_seconds


def test_batches_made_ahead_by_one_thread():
    made, threads = [], set()

    def source():
        for number in range(6):
            made.append(number)
            threads.add(threading.current_thread())
            yield number

    seen = []
    for batch in T._ahead(source(), lambda number: -number):
        seen.append(batch)
        assert len(made) <= len(seen) + 1
    assert seen == [0, -1, -2, -3, -4, -5] and len(threads) == 1 and threading.current_thread() not in threads


def test_error_while_making_batches_ahead_is_raised_in_its_place():
    def source():
        yield 1
        raise KeyError("lost")

    ahead = T._ahead(source(), lambda number: number)
    assert next(ahead) == 1
    with pytest.raises(KeyError, match="lost"):
        next(ahead)


def test_thread_ends_when_batches_are_given_up():
    before = threading.active_count()
    ahead = T._ahead(itertools.count(), lambda number: number)
    next(ahead)
    ahead.close()
    for _ in range(100):
        if threading.active_count() == before:
            return
        time.sleep(0.02)
    raise AssertionError("the thread still runs")


def test_fit_with_batches_made_ahead(monkeypatch, tmp_path):
    """The path of a GPU, but for the device: the same numbers, also when interrupted and when the generator fails."""
    straight = fit(network(), batches, loss, epochs=3, **KEEP)
    monkeypatch.setattr(T, "_on_device", lambda source, device: T._ahead(source, lambda batch: batch))
    equal(straight, fit(network(), batches, loss, epochs=3, **KEEP))
    calls = itertools.count(1)

    def interrupted(model, batch, generator):
        if next(calls) == 8:
            signal.raise_signal(signal.SIGINT)
        return loss(model, batch, generator)

    with pytest.raises(KeyboardInterrupt, match="step 8"):
        fit(network(), batches, interrupted, epochs=3, checkpoint_dir=tmp_path, **KEEP)
    equal(straight, fit(network(), batches, interrupted, epochs=3, checkpoint_dir=tmp_path, **KEEP))

    def failing(epoch):
        yield from batches(epoch)[:4]
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        fit(network(), failing, loss, epochs=3, **KEEP)


def test_budget_steps_and_history(tmp_path):
    fitted = fit(network(), batches, loss, epochs=50, max_seconds=0.0, checkpoint_dir=tmp_path, **KEEP)
    assert fitted.stopped == "max_seconds" and len(fitted.history) == 1 and fitted.history[0]["seconds"] > 0
    more = fit(network(), batches, loss, epochs=50, max_seconds=0.0, checkpoint_dir=tmp_path, **KEEP)
    assert more.stopped == "max_seconds" and len(more.history) == 1  # the budget counts all sessions
    fitted = fit(network(), batches, loss, steps=8, **KEEP)
    assert fitted.stopped == "steps" and [r["step"] for r in fitted.history] == [6, 8]
    assert list(fitted.history[0]) == ["epoch", "step", "loss", "lr", "seconds", "cpu_seconds", "closeness", "other"]


def test_best_weights_are_kept():
    scores = iter([0.1, 0.9, 0.3, float("nan")])
    seen = []

    def fake(model):
        seen.append({k: v.clone() for k, v in model.state_dict().items()})
        return {"score": next(scores)}

    fitted = fit(network(), batches, loss, epochs=4, validate=fake)
    assert fitted.best_epoch == 1 and fitted.best_score == 0.9
    assert all(torch.equal(v, seen[3][k]) for k, v in fitted.model.state_dict().items()) and not fitted.model.training
    assert all(torch.equal(v, seen[1][k]) for k, v in fitted.use_best().state_dict().items())


def test_global_generator_is_given_back_and_seed_matters():
    torch.manual_seed(5)
    state = torch.get_rng_state()
    model = network()
    torch.set_rng_state(state)
    a = fit(model, batches, loss, epochs=1, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    b = fit(network(), batches, loss, epochs=1, seed=2)
    assert a.history[0]["loss"] != b.history[0]["loss"]


@pytest.mark.parametrize(
    "change, word",
    [
        (dict(epochs=None), "epochs and steps"),
        (dict(steps=3), "epochs and steps"),
        (dict(epochs=0), "epochs"),
        (dict(optimiser=Optimiser("adamax")), "optimiser"),
        (dict(schedule=Schedule("linear")), "schedule"),
        (dict(schedule=Schedule("plateau")), "plateau"),
        (dict(schedule=Schedule("cosine", warmup=2)), "warmup needs steps"),
        (dict(epochs=None, steps=9, schedule=Schedule("step", warmup=2)), "warmup needs steps"),
        (dict(epochs=None, steps=3, schedule=Schedule("cosine", warmup=3)), "less than steps"),
        (dict(epochs=None, steps=3, schedule=Schedule("cosine", warmup=-1)), "at least 0"),
        (dict(precision="float16"), "precision"),
        (dict(look_every=0), "look_every"),
    ],
)
def test_bad_arguments(change, word):
    with pytest.raises(ValueError, match=word):
        fit(network(), batches, loss, **{"epochs": 1, **change})


def test_no_batches():
    with pytest.raises(ValueError, match="batches"):
        fit(network(), lambda epoch: [], loss, epochs=1)


def test_to_device_walks_through_containers():
    Pair = collections.namedtuple("Pair", "a b")

    @dataclasses.dataclass(frozen=True)
    class Cloud:
        x: torch.Tensor
        name: str

    moved = to_device(
        {"c": Cloud(torch.zeros(2), "n"), "p": Pair(torch.ones(1), 3), "l": [torch.ones(1)], "none": None}, "meta"
    )
    assert moved["c"].x.is_meta and moved["c"].name == "n" and moved["p"].a.is_meta and moved["p"].b == 3
    assert moved["l"][0].is_meta and moved["none"] is None and to_device(torch.zeros(1), "meta").is_meta


TWIN = textwrap.dedent("""
    import os, sys, torch
    from torch import nn
    from sparseattn.lab.train import Optimiser, Schedule, fit

    def train(size, epochs, folder=None):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
        model.unused = nn.Parameter(torch.ones(3))
        points = torch.randn(256, 4, generator=torch.Generator().manual_seed(0))
        loss = lambda model, x, generator: ((model(x) - x.prod(1)) ** 2).mean()
        validate = lambda model: {"closeness": -float(((model(points) - points.prod(1)) ** 2).mean())}
        return fit(model, lambda epoch: points.split(size), loss, epochs=epochs, optimiser=Optimiser(lr=1e-2),
                   validate=validate, schedule=Schedule("plateau", patience=0), checkpoint_dir=folder)

    if __name__ == "__main__":
        train(32, 2, sys.argv[1])
        fitted = train(32, 4, sys.argv[1])
        if os.environ["RANK"] == "0":
            torch.save([fitted.model.state_dict(), fitted.history], sys.argv[2])
""")


def test_two_processes_equal_one_with_joined_batches(tmp_path):
    """Under torchrun, with gloo, stopped after two epochs and resumed; weights to 1e-6."""
    (tmp_path / "twin.py").write_text(TWIN)
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        port,
        "twin.py",
        "state",
        "out.pt",
    ]
    done = subprocess.run(
        launch, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    weights, history = torch.load(tmp_path / "out.pt", weights_only=True)
    space = {"__name__": "twin"}
    exec(TWIN, space)
    one = space["train"](64, 4)
    assert len(history) == 4
    for name, weight in one.model.state_dict().items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-6)
    for ours, theirs in zip(history, one.history, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], abs=1e-6) and ours["closeness"] == pytest.approx(
            theirs["closeness"], abs=1e-6
        )
    with pytest.raises(ValueError, match="processes was 2, is 1"):
        space["train"](32, 5, tmp_path / "state")


def test_convolutions_told_of_by_the_newer_switch_stay_as_they_are():
    """Reading the older switch is refused then."""
    newer = torch.backends.cudnn.conv
    newer.fp32_precision, before = "ieee", newer.fp32_precision
    try:
        fit(network(), batches, loss, epochs=1)
        assert newer.fp32_precision == "ieee"
    finally:
        newer.fp32_precision = before


def test_a_run_on_the_cpu_seeds_no_gpu(monkeypatch):
    model, seeded = network(), []
    for name in ("manual_seed", "manual_seed_all"):
        monkeypatch.setattr(torch.cuda, name, seeded.append)
    fit(model, batches, loss, epochs=1, seed=3)
    assert not seeded


def test_the_thread_that_prepares_has_the_device_of_the_run():
    "Which GPU is current each thread knows for itself."
    from pretend import pretend_gpu  # not above: programs import this file from other folders

    threads, begun = [], []

    def prepared(batch):
        threads.append(threading.get_ident())
        return batch

    found = list(T._ahead(range(5), prepared, lambda: begun.append(threading.get_ident())))
    assert found == list(range(5)) and set(threads) == set(begun) != {threading.get_ident()} and len(begun) == 1
    with pretend_gpu(), mock.patch.object(torch.cuda, "set_device", begun.append):
        assert len(list(T._on_device([torch.zeros(2)], torch.device("cuda", 0)))) == 1
    assert begun[1:] == [torch.device("cuda", 0)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_resumed_on_a_gpu(tmp_path):
    def noisy(model, batch, generator):
        assert batch["x"].is_cuda and generator.device.type == "cuda"
        return (
            (
                model(batch["x"] + 0.1 * torch.randn(batch["x"].shape, generator=generator, device="cuda"))
                - batch["x"].prod(1)
            )
            ** 2
        ).mean()

    keep = dict(optimiser=Optimiser(lr=1e-2), device="cuda")
    straight = fit(network(), batches, noisy, epochs=4, **keep)
    fit(network(), batches, noisy, epochs=2, checkpoint_dir=tmp_path, **keep)
    resumed = fit(network(), batches, noisy, epochs=4, checkpoint_dir=tmp_path, **keep)
    for a, b in zip(straight.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("clip", [0.0, -1.0, math.nan])
def test_a_limit_that_turns_or_stops_the_step_is_refused(clip):
    with pytest.raises(ValueError, match="clip must be above 0"):
        Optimiser(clip=clip).build([nn.Parameter(torch.zeros(1))])
    with pytest.raises(ValueError, match="every must be at least 1"):
        Schedule("step", every=0).build(Optimiser().build([nn.Parameter(torch.zeros(1))]), 3)
