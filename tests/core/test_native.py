"""Functions in C get what Python gave them, and are done without where no compiler is."""

import ctypes
import itertools
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import sparseattn
import sparseattn.hept.loop as loop
from sparseattn.hept.attention import hept_attention
import sparseattn.samsa.sampling as sampling
from sparseattn.core import native, tiles
from sparseattn.core.native import c_kernels, c_source

CSRC = Path(sparseattn.__file__).parent / "csrc"
SOURCE = r"""
#include <stdint.h>
#include <tgmath.h>

int weighted(const REAL *x, const int64_t *sizes, REAL *out, double factor, int64_t number) {
    if (!x) return 5;
    #pragma omp parallel for num_threads(sizes[1])
    for (int64_t i = 0; i < sizes[0]; i++) out[i] = factor * exp(x[i]) + number;
    return 3;
}
"""
needs_compiler = pytest.mark.skipif(c_kernels(SOURCE, torch.zeros(1)) is None, reason="needs a C compiler")


@pytest.fixture
def rebuilt(monkeypatch, tmp_path):
    "Nothing built before or by the test is kept."
    monkeypatch.setenv("SPARSEATTN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_KNOWN", {})
    return tmp_path / "cache" / "kernels"


@needs_compiler
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("threads", [1, 2])
def test_arguments_arrive(dtype, tolerance, threads):
    x = torch.randn(1001, generator=torch.Generator().manual_seed(0), dtype=dtype)
    out = torch.empty_like(x)
    assert c_kernels(SOURCE, x)("weighted", x, (1001, threads), out, -2.5, 2**33) == 3
    torch.testing.assert_close(out, -2.5 * x.exp() + 2**33, rtol=tolerance, atol=0)
    assert c_kernels(SOURCE, x)("weighted", None, (0, 1), None, 0.0, 0) == 5


@needs_compiler
def test_built_once_for_a_dtype(rebuilt):
    x = torch.zeros(1)
    assert c_kernels(SOURCE, x) is c_kernels(SOURCE, x) is not c_kernels(SOURCE, x.double())
    assert len(list(rebuilt.iterdir())) == 2


@needs_compiler
def test_built_once_for_a_machine(rebuilt, monkeypatch):
    x = torch.zeros(1)
    c_kernels(SOURCE, x)
    monkeypatch.setattr(native, "_KNOWN", {})
    monkeypatch.setattr(native, "_compile", None)
    assert c_kernels(SOURCE, x)("weighted", None, (0, 1), None, 0.0, 0) == 5


@needs_compiler
@pytest.mark.parametrize("damaged", [b"", b"no library"])
def test_a_damaged_library_is_built_again(rebuilt, damaged):
    assert c_kernels(SOURCE, torch.zeros(1))
    (file,) = rebuilt.iterdir()
    file.unlink()
    file.write_bytes(damaged)
    code = ("import sys, torch; from sparseattn.core.native import c_kernels; "
            "c_kernels(sys.argv[1], torch.zeros(1))('weighted', None, (0, 1), None, 0.0, 0)")
    subprocess.run([sys.executable, "-c", code, SOURCE], check=True)    # another process: this one has it loaded
    assert file.stat().st_size > 1000


@needs_compiler
@pytest.mark.parametrize("why", ["a file is there", "another user's", "nothing can be written"])
def test_a_cache_that_cannot_be_used(rebuilt, monkeypatch, why):
    if why == "a file is there":
        rebuilt.parent.write_text("")
    elif why == "another user's":
        monkeypatch.setattr(native.os, "geteuid", lambda: 2**20)
    else:
        real, calls = native._compile, []

        def full(*arguments):
            calls.append(arguments)
            if len(calls) == 1:
                raise OSError(28, "No space left on device")
            return real(*arguments)
        monkeypatch.setattr(native, "_compile", full)
    test_arguments_arrive(torch.float64, 1e-14, 2)
    assert native.native_info()["used"]


@needs_compiler
def test_no_folder_at_all(rebuilt, monkeypatch):
    def none(*_, **__):
        raise FileNotFoundError("No usable temporary directory found")
    monkeypatch.setattr(native.tempfile, "TemporaryDirectory", none)
    with pytest.warns(UserWarning, match="No usable temporary directory"):
        assert c_kernels(SOURCE, torch.zeros(1)) is None
        info = native.native_info()
    assert not info["used"] and "No usable temporary directory" in info["why"]


@needs_compiler
def test_a_layer_does_without_where_nothing_can_be_written(rebuilt, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")
    layer, x = sparseattn.HEPTAttention(8, 2, coord_dims=2), torch.randn(1, 40, 8)
    coords = torch.rand(1, 40, 2)
    monkeypatch.setattr(native, "_compile", full)
    with pytest.warns(UserWarning, match="No space left on device"):
        found = layer(x, coords)
    monkeypatch.undo()
    torch.testing.assert_close(found, layer(x, coords))


NO_MEMORY = """#include <stdlib.h>
static int calls;
#define malloc(size) (calls++ < {} ? malloc(size) : (void *)0)
"""


@needs_compiler
@pytest.mark.parametrize("given", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["tiles", "hept", "samsa"])
def test_memory_that_cannot_be_had(rebuilt, monkeypatch, name, given):
    "The first so many requests of a process are granted."
    module, requests = {"tiles": (tiles, 2), "hept": (loop, 4), "samsa": (sampling, 2)}[name]
    x, rows, order = torch.randn(1, 2, 30, 4), torch.randn(1, 2, 5, 8), torch.rand(1, 1, 2, 30).argsort(-1)
    if c_kernels(tiles.TILES, x) is None or c_kernels(tiles.TILES, x)("vector_bytes") < 64 or given >= requests:
        pytest.skip("the kernels are not used on this processor, or ask for less")
    run = {"tiles": lambda x: tiles.few_keys_attention(x, rows),
           "hept": lambda x: hept_attention(x, x, x, order, order, block_size=10),
           "samsa": lambda x: sampling.sample_without_replacement(x[0], x[0, :, :, 0], 4, noise=rows[0, 0, 0, 0])}[name]
    monkeypatch.setattr(module, "_SOURCE", NO_MEMORY.format(given) + module._SOURCE)
    with pytest.raises(MemoryError, match="not enough memory for a C kernel"):
        run(x.requires_grad_()).sum().backward()


@needs_compiler
def test_threads_that_come_first_together(rebuilt, monkeypatch):
    built, real = [], native._compile
    monkeypatch.setattr(native, "_compile", lambda *a: (built.append(1), real(*a)))
    x, start = torch.zeros(3), threading.Barrier(8)

    def one(_):
        start.wait()
        out = torch.empty(3)
        c_kernels(SOURCE, x)("weighted", x, (3, 1), out, 2.0, 1)
        return out
    with ThreadPoolExecutor(8) as pool:
        assert all(out.tolist() == [3.0] * 3 for out in pool.map(one, range(8)))
    assert len(built) == 1


@pytest.fixture
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@needs_compiler
def test_one_thread_where_torch_brings_none(rebuilt, one_thread, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "torch" / "__init__.py"))
    test_arguments_arrive(torch.float64, 1e-14, 2)
    torch.set_num_threads(2)
    assert c_kernels(SOURCE, torch.zeros(1, dtype=torch.float64)) is None


@needs_compiler
@pytest.mark.parametrize("unknown", ["-march=native", "-fopenmp "])
def test_a_compiler_that_knows_less(rebuilt, one_thread, monkeypatch, tmp_path, unknown):
    compiler = tmp_path / "compiler"
    compiler.write_text(f'#!/bin/sh\ncase "$* " in *"{unknown}"*) exit 1;; esac\nexec cc "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    test_arguments_arrive(torch.float64, 1e-14, 2)


@needs_compiler
def test_no_other_threads_than_torchs(rebuilt, one_thread, monkeypatch):
    threads = "#ifdef _OPENMP\nint threads(void) { return 1; }\n#else\nint threads(void) { return 0; }\n#endif\n"
    monkeypatch.setenv("CC", "cc -D__clang__")
    assert c_kernels(threads, torch.zeros(1))("threads") == 0


@needs_compiler
def test_tensors_must_lie_in_one_piece():
    x = torch.zeros(4, 4)
    with pytest.raises(TypeError, match="contiguous tensors of torch.float32 on the CPU here, got torch.float32"):
        c_kernels(SOURCE, x)("weighted", x.T, (4, 1), x, 1.0, 0)


@needs_compiler
def test_calls_are_held_against_the_declaration():
    x, kernels = torch.zeros(4), c_kernels(SOURCE, torch.zeros(4))
    with pytest.raises(TypeError, match="weighted: a C kernel needs 5 arguments, got 4"):
        kernels("weighted", x, (4, 1), x, 1.0)
    with pytest.raises(TypeError, match="tensors of torch.float32 on the CPU here, got torch.float64"):
        kernels("weighted", x.double(), (4, 1), x, 1.0, 0)
    with pytest.raises(TypeError, match="tensors of torch.float32 on the CPU here, got tuple"):
        kernels("weighted", (4, 1), (4, 1), x, 1.0, 0)
    with pytest.raises(ctypes.ArgumentError, match="argument 5"):
        kernels("weighted", x, (4, 1), x, 1.0, 0.5)
    assert kernels("weighted", x, torch.tensor([4, 1]), x, 2, 1) == 3 and x.tolist() == [3.0] * 4


def test_declarations():
    source = "static int hidden(int64_t n) {}\nint shown(const REAL *x, const int64_t *s,\n  double *y, int64_t n) {}\n"
    (name, arguments), = native._declared(source, "double").items()
    pointer = ctypes.c_void_p
    assert name == "shown" and arguments == [(pointer, torch.float64), (pointer, torch.int64), (pointer, torch.float64),
                                             (ctypes.c_int64, None)]


@needs_compiler
def test_memory_that_cannot_be_had_raises():
    kernels = c_kernels("int much(void) { return OUT_OF_MEMORY; }", torch.zeros(1))
    with pytest.raises(MemoryError, match="much: not enough memory"):
        kernels("much")


def test_other_tensors_have_none():
    for x in (torch.zeros(1, dtype=torch.float16), torch.zeros(1, dtype=torch.int64), torch.zeros(1, device="meta")):
        assert c_kernels(SOURCE, x) is None
    seen = []
    torch.compile(lambda x: (seen.append(c_kernels(SOURCE, x)), x + 1)[1], backend="eager")(torch.zeros(2))
    with FlopCounterMode(display=False):
        seen.append(c_kernels(SOURCE, torch.zeros(2)))
    assert seen == [None, None]


@pytest.mark.parametrize("compiler", ["", "no-such-compiler -O1"])
def test_without_a_compiler(rebuilt, monkeypatch, compiler):
    monkeypatch.setenv("CC", compiler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert c_kernels(SOURCE, torch.zeros(1)) is None


@pytest.mark.parametrize("words", ["out of paper", "cc1: not found", "the tray is empty"])
def test_a_compiler_that_fails_is_named(rebuilt, monkeypatch, tmp_path, words):
    broken = tmp_path / "broken"
    broken.write_text(f"#!/bin/sh\necho {words} >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", f"{broken} -x c")
    with pytest.warns(UserWarning, match=f"broken failed: {words}"):
        assert c_kernels(SOURCE, torch.zeros(1)) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert c_kernels(SOURCE, torch.zeros(1)) is None


def test_a_compiler_that_cannot_be_read(rebuilt, monkeypatch):
    monkeypatch.setenv("CC", "gcc 'x")
    with pytest.warns(UserWarning, match="CC is \"gcc 'x\", which cannot be read: No closing quotation"):
        assert c_kernels(SOURCE, torch.zeros(1)) is None


def test_a_system_without_user_ids(rebuilt, monkeypatch):
    monkeypatch.delattr(os, "geteuid")
    assert set(native.native_info()) >= {"used", "why"} and native._cache() == rebuilt


def test_the_switch_works_at_any_time(monkeypatch):
    c_kernels(SOURCE, torch.zeros(1))
    monkeypatch.setenv("CC", "")
    assert c_kernels(SOURCE, torch.zeros(1)) is None
    info = native.native_info()
    assert (info["used"], info["why"], info["threads"]) == (False, "CC is empty", "one")


@needs_compiler
def test_every_source_builds_without_a_warning(tmp_path):
    "All kernels of the package, with the compiler at its strictest; each file also by itself, as an editor sees it."
    strict = ["cc", "-Wall", "-Wextra", "-Werror", "-O2", "-fopenmp-simd", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    files = sorted(CSRC.glob("*.c"))
    assert len(files) >= 4
    for path, real in itertools.product(files, native._REAL.values()):
        file = tmp_path / "kernels.c"
        file.write_text(native._PRELUDE + c_source(path.name))
        for source in (file, path):
            command = [*strict, f"-DREAL={real}", "-o", str(tmp_path / "kernels.so"), str(source), "-lm"]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


def test_headers_stand_once_and_lines_keep_their_numbers(tmp_path):
    source = c_source("few_keys.c")
    assert source.count("enum { LANES") == 1 and '#include "' not in source and source.count("REAL float") == 1
    wrong = source.replace("REAL dot = added(dots);", "REAL dot = nothing(dots);")
    lines = (CSRC / "few_keys.c").read_text().splitlines()
    number = next(i for i, line in enumerate(lines, 1) if "added(dots)" in line)
    (tmp_path / "kernels.c").write_text(wrong)
    command = ["cc", "-Werror", "-fsyntax-only", str(tmp_path / "kernels.c")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert f"few_keys.c:{number}:" in done.stderr


def test_pieces_of_a_source():
    piece = c_source("tiles.h", "product", "copies")
    assert "HEIGHT rows" in piece and "place_columns" in piece and "/* [" not in piece and "exponential" not in piece
    assert piece._repr_markdown_().startswith("```c\n// HEIGHT rows") and repr(piece) == piece
    with pytest.raises(ValueError, match="tiles.h has no piece 'none'; it has vectors, product"):
        c_source("tiles.h", "none")


SUBNORMAL = """
#include "kernel.h"
int halves(REAL *x, int64_t n, int64_t flush, int64_t threads) {
    #pragma omp parallel num_threads(threads)
    {
        uint64_t mode = flush ? flush_subnormals() : 0;
        #pragma omp for
        for (int64_t i = 0; i < n; i++) x[i] /= 2;
        if (flush) restore_subnormals(mode);
    }
    return 0;
}
"""


@needs_compiler
@pytest.mark.parametrize("threads", [1, 2])
def test_subnormals_are_flushed_in_kernels_and_nowhere_else(threads):
    source = SUBNORMAL.replace('#include "kernel.h"', c_source("kernel.h"))
    for dtype, flush in itertools.product((torch.float32, torch.float64), (1, 0)):
        tiny = torch.finfo(dtype).tiny
        x = torch.full((64,), tiny, dtype=dtype)
        c_kernels(source, x)("halves", x, 64, flush, threads)
        assert torch.equal(x, torch.full_like(x, 0 if flush else tiny / 2))
        assert (torch.full((64,), tiny, dtype=dtype) / 2).gt(0).all()


WATCHED = """
import itertools, torch
from sparseattn.core import native
from sparseattn.core.transformer import make_attention
from sparseattn.samsa.sampling import sample_without_replacement
from sparseattn.sbm.sampling import draw_edges

native._FLAGS[0] = "-O1"
assert native.native_info()["used"], native.native_info()
LAYERS = [("hept", dict(coord_dims=2, block_size=8)), ("hept", dict(coord_dims=2, block_size=8, combine="union")),
          ("sampled", {}), ("samsa", dict(samples=5)), ("samsa", dict(samples=5, hard=False))]
torch.manual_seed(0)
for (name, options), dtype, n in itertools.product(LAYERS, (torch.float32, torch.float64), (1, 29)):
    layer = make_attention(name, 16, 4, **options).to(dtype)
    x, coords = torch.randn(2, n, 16, dtype=dtype, requires_grad=True), torch.rand(2, n, 2, dtype=dtype)
    for mask in (None, torch.rand(2, n) < 0.6, torch.zeros(2, n, dtype=torch.bool)):
        out = layer.train()(x, coords, mask)
        gradients = torch.autograd.grad(out.sum(), [x, *layer.parameters()], materialize_grads=True)
        assert all(part.isfinite().all() for part in (out, *gradients, layer.eval()(x, coords, mask)))
for hard, dtype, n in itertools.product((False, True), (torch.float32, torch.float64), (16, 45)):
    x, scores = (torch.randn(2, n, *width, dtype=dtype, requires_grad=True) for width in ((7,), ()))
    sample_without_replacement(x, scores, 8, hard=hard).sum().backward()
for law, dtype, (n, m), size in itertools.product(("counts", "simple", "bernoulli"), (torch.float32, torch.float64),
                                                  ((1, 1), (70, 130), (5, 9000)), (0.0, 0.01, 1.0, 9.0)):
    a, z = (torch.rand(2, points, 6, dtype=dtype) for points in (n, m))
    assert len(draw_edges(a * size, z, law)) == 3
print("watched")
"""


@needs_compiler
def test_no_kernel_leaves_its_arrays(tmp_path):
    """Every kernel, forwards and backwards, built with the sanitizers of addresses and of undefined behaviour; memory
    that it asks for is full of NaN."""
    found = subprocess.run(["cc", "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip("the compiler brings no sanitizers")
    flags = "-g1 -fsanitize=address,undefined -fno-sanitize-recover=all"
    watched = {"CC": f"cc {flags}", "LD_PRELOAD": found, "SPARSEATTN_CACHE": str(tmp_path),
               "ASAN_OPTIONS": "detect_leaks=0:malloc_fill_byte=255:max_malloc_fill_size=1000000000"}
    run = subprocess.run([sys.executable, "-c", WATCHED], env=os.environ | watched, capture_output=True, text=True)
    assert run.stdout == "watched\n", run.stderr[-3000:]


def test_importing_builds_nothing():
    code = "import sparseattn, sparseattn.core.native as n; assert not n._KNOWN"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_cache_without_a_home_is_no_failure(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME", "SPARSEATTN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)    # as where the system knows no such user
    with pytest.raises(OSError, match="home"):
        native._cache()
    x = torch.zeros(1)
    kernels = c_kernels("int homeless(REAL *x) { *x = 3; return 0; }", x)    # built here, for no other test has it
    assert kernels("homeless", x) == 0 and x.item() == 3
    assert native.native_info()["folder"].startswith("a temporary one")
