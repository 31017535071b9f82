"""sparseattn.data.cache: keys, files that are whole or absent, rebuilding, official paths."""

import inspect
import math
import subprocess
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sparseattn.data import cache
from sparseattn.data.cache import (
    _chosen,
    cache_key,
    cache_root,
    cached,
    data_path,
    have_data,
    load_arrays,
    save_arrays,
    work_through,
)


def test_key_ignores_order_and_sees_everything_else():
    base = cache_key("g", {"a": 1, "b": [1.5, None, True, "x"]}, 1)
    assert base == cache_key("g", {"b": (1.5, None, True, "x"), "a": 1}, 1) and len(base) == 64
    others = [
        cache_key("h", {"a": 1, "b": [1.5, None, True, "x"]}, 1),
        cache_key("g", {"a": 1, "b": [1.5, None, True, "x"]}, 2),
        cache_key("g", {"a": 1.0, "b": [1.5, None, True, "x"]}, 1),
        cache_key("g", {"a": 1, "b": [1.5, None, True, "y"]}, 1),
        cache_key("g", {"a": 1}, 1),
    ]
    assert len({base, *others}) == 6


@pytest.mark.parametrize(
    "name, params, version, error, word",
    [
        ("a/b", {}, 1, ValueError, "name"),
        ("", {}, 1, ValueError, "name"),
        ("../up", {}, 1, ValueError, "name"),
        (3, {}, 1, ValueError, "name"),
        ("g", {}, -1, TypeError, "version"),
        ("g", {}, "1", TypeError, "version"),
        ("g", {}, True, TypeError, "version"),
        ("g", [1], 1, TypeError, "params"),
        ("g", {1: 2}, 1, TypeError, "params"),
        ("g", {"a": {1: 2}}, 1, TypeError, "params"),
        ("g", {"a": float("nan")}, 1, ValueError, "params"),
        ("g", {"a": np.zeros(2)}, 1, TypeError, "params"),
        ("g", {"a": {1}}, 1, TypeError, "params"),
    ],
)
def test_key_refuses(name, params, version, error, word):
    with pytest.raises(error, match=word):
        cache_key(name, params, version)


def test_round_trip_of_kinds(tmp_path):
    arrays = {
        "f": np.arange(6, dtype="f4").reshape(2, 3),
        "i": np.array(2**62),
        "b": np.array([True, False]),
        "s": np.array(["ab", "c"]),
        "e": np.zeros((0, 3)),
    }
    save_arrays(tmp_path / "deep" / "x.npz", arrays)
    back = load_arrays(tmp_path / "deep" / "x.npz")
    assert sorted(back) == sorted(arrays)
    for name, array in arrays.items():
        assert back[name].dtype == array.dtype and back[name].shape == array.shape and (back[name] == array).all()
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["x.npz"]


@pytest.mark.parametrize(
    "arrays, error",
    [
        ({}, TypeError),
        ([1], TypeError),
        ({"x": np.array([object()])}, TypeError),
        ({"_sha256": np.zeros(1)}, ValueError),
        ({"file": np.zeros(1)}, ValueError),
        ({3: np.zeros(1)}, ValueError),
    ],
)
def test_save_refuses_and_leaves_nothing(tmp_path, arrays, error):
    with pytest.raises(error, match="arrays"):
        save_arrays(tmp_path / "x.npz", arrays)
    assert not list(tmp_path.iterdir())


def test_an_interrupted_write_leaves_the_old_file(tmp_path, monkeypatch):
    save_arrays(tmp_path / "x.npz", {"x": np.arange(3)})

    def stop(file, **_):
        file.write(b"PK half")
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez_compressed", stop)
    with pytest.raises(KeyboardInterrupt):
        save_arrays(tmp_path / "x.npz", {"x": np.arange(4)})
    assert (load_arrays(tmp_path / "x.npz")["x"] == np.arange(3)).all() and len(list(tmp_path.iterdir())) == 1


def _damage_cut(path):
    path.write_bytes(path.read_bytes()[:100])


def _damage_empty(path):
    path.write_bytes(b"")


def _damage_text(path):
    path.write_text("not a zip")


def _damage_other_arrays(path):
    np.savez(path, x=np.arange(5))


def _damage_pickle(path):
    np.savez(path, x=np.array([{"a": 1}], dtype=object), allow_pickle=True)


def _damage_swap(path):
    """A valid zip whose numbers differ from its digest."""
    arrays = dict(np.load(path))
    arrays["x"] = arrays["x"] + 1
    np.savez(path, **arrays)


def _damage_bits(path):
    raw = bytearray(path.read_bytes())
    for k in range(40, len(raw), 97):
        raw[k] ^= 0xFF
    path.write_bytes(bytes(raw))


@pytest.mark.parametrize(
    "damage",
    [_damage_cut, _damage_empty, _damage_text, _damage_other_arrays, _damage_pickle, _damage_swap, _damage_bits],
)
def test_broken_entries_are_rebuilt_with_a_warning(tmp_path, damage):
    calls = []

    def build():
        calls.append(1)
        return {"x": np.random.default_rng(0).normal(size=500)}

    first = cached("g", {"n": 500}, build, version=1, root=tmp_path)["x"]
    entry = next((tmp_path / "g").iterdir())
    damage(entry)
    with pytest.raises(ValueError, match=entry.name[:10]):
        load_arrays(entry)
    with pytest.warns(UserWarning, match="broken"):
        again = cached("g", {"n": 500}, build, version=1, root=tmp_path)["x"]
    assert (again == first).all() and len(calls) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cached("g", {"n": 500}, build, version=1, root=tmp_path)
    assert len(calls) == 2


def test_a_failing_build_leaves_nothing(tmp_path):
    def build():
        raise RuntimeError("no luck")

    with pytest.raises(RuntimeError, match="no luck"):
        cached("g", {}, build, version=1, root=tmp_path)
    assert not list(tmp_path.rglob("*.*"))


def test_root_argument_variable_home(tmp_path, monkeypatch):
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path / "a"))
    assert cache_root() == tmp_path / "a" and cache_root(tmp_path) == tmp_path
    cached("g", {}, lambda: {"x": np.zeros(1)}, version=0)
    assert len(list((tmp_path / "a" / "g").iterdir())) == 1
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_root() == tmp_path / "a"
    monkeypatch.delenv("SPARSEATTN_CACHE")
    assert cache_root() == tmp_path / "b" / "sparseattn" and cache_root(tmp_path) == tmp_path
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "sparseattn"


def test_two_writers_at_once(tmp_path):
    def one(_):
        return int(cached("g", {}, lambda: {"x": np.arange(20_000)}, version=1, root=tmp_path)["x"].sum())

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(one, range(32))) == {sum(range(20_000))}
    code = (  # the module alone, without the package's imports
        "import sys, runpy, numpy as np\n"
        "cached = runpy.run_path(sys.argv[2])['cached']\n"
        "for k in range(20):\n"
        "    x = cached('p', {'k': k}, lambda: {'x': np.full(3000, k)}, version=1, root=sys.argv[1])['x']\n"
        "    assert (x == k).all()"
    )
    command = [sys.executable, "-W", "error", "-c", code, str(tmp_path), inspect.getsourcefile(cached)]
    both = [subprocess.Popen(command) for _ in range(2)]
    assert [process.wait(60) for process in both] == [0, 0]
    assert len(list((tmp_path / "p").iterdir())) == 20 and len(list((tmp_path / "g").iterdir())) == 1


@pytest.mark.parametrize("workers", [1, 2, 9])
def test_work_through_keeps_the_order(workers):
    found = work_through(math.factorial, range(12), "factorials", workers=workers)
    assert found == [math.factorial(n) for n in range(12)]


def test_work_through_stops_at_an_error():
    with pytest.raises(ValueError, match="workers: expected at least 1, got 0"):
        work_through(abs, [1], "numbers", workers=0)
    for workers in (1, 2):
        with pytest.raises(ValueError, match="factorial"):
            work_through(math.factorial, [3, -1, *range(50)], "factorials", workers=workers)
    assert work_through(abs, [], "numbers", workers=2) == []


def test_numbers_or_a_mask_choose():
    """A mask is not taken for the numbers 0 and 1."""
    torch = pytest.importorskip("torch")
    mask = np.array([False, True, False, True])
    for index in (mask, torch.from_numpy(mask), mask.tolist(), np.flatnonzero(mask), range(1, 4, 2), iter([1, 3])):
        assert torch.equal(_chosen(index, 4), torch.tensor([1, 3]))
    assert _chosen([3, 3, 0], 4).tolist() == [3, 3, 0] and _chosen([], 4).dtype == torch.int64
    with pytest.raises(ValueError, match="mask of 4, got one of shape"):
        _chosen([True, False], 4)


def test_data_path(tmp_path, monkeypatch):
    monkeypatch.delenv("SPARSEATTN_DATA", raising=False)
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path / "cache"))
    with pytest.raises(FileNotFoundError, match="SPARSEATTN_DATA"):
        data_path("trackml", "x.npz")
    (tmp_path / "trackml").mkdir()
    (tmp_path / "trackml" / "x.npz").write_bytes(b"")
    assert data_path("trackml", "x.npz", root=tmp_path).exists()
    monkeypatch.setenv("SPARSEATTN_DATA", str(tmp_path))
    assert (
        data_path("trackml", "x.npz") == tmp_path / "trackml" / "x.npz" and have_data("trackml") and not have_data("no")
    )
    with pytest.raises(FileNotFoundError, match="no/y.npz.*SPARSEATTN_DATA"):
        data_path("no", "y.npz")
    with pytest.raises(ValueError, match="names"):
        data_path()


def test_sets_that_were_built_are_found_after_the_users_own(tmp_path, monkeypatch):
    monkeypatch.delenv("SPARSEATTN_DATA", raising=False)
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path / "cache"))
    assert not have_data("kicad", "kicad.npz")
    built, own = tmp_path / "cache/built/kicad/kicad.npz", tmp_path / "own/kicad/kicad.npz"
    for file in (built, own):
        file.parent.mkdir(parents=True)
        file.touch()
    assert data_path("kicad", "kicad.npz") == built
    monkeypatch.setenv("SPARSEATTN_DATA", str(tmp_path / "own"))
    assert data_path("kicad", "kicad.npz") == own
    own.unlink()
    assert data_path("kicad", "kicad.npz") == built
    assert not have_data("kicad", "kicad.npz", root=tmp_path / "own")  # an argument is the only place then


def test_a_plain_file_that_was_not_downloaded_whole_is_named(tmp_path):
    path = tmp_path / "events.npz"
    np.savez(path, x=np.arange(1000.0))
    assert len(cache._plain_file(path, ["x"])["x"]) == 1000
    with pytest.raises(ValueError, match="events.npz: expected arrays"):
        cache._plain_file(path, ["x", "y"])
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(ValueError, match="events.npz: not a readable array file"):
        cache._plain_file(path, ["x"])
