"""Costs against torch's counter and brute force; timing, memory, fits, command line."""

import itertools
import math
import os
import shutil
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F

from sparseattn.lab import measure
from sparseattn.lab.measure import (
    Ceilings,
    Cost,
    block_pairs,
    compare,
    counted_flops,
    dense_attention_cost,
    fit_nlogn,
    hept_attention_cost,
    linear_cost,
    loglog_slope,
    machine_ceilings,
    main,
    malloc_environment,
    matmul_cost,
    peak_memory,
    sort_cost,
    timed_afresh,
)

MiB = 2**20


def half(x):
    return -0.5 * (x**2).sum(-1, keepdim=True)


def gaussian(q, k, v):
    """Gaussian attention with norms and denominator folded into the two products."""
    weight = (
        torch.cat([q, torch.ones_like(q[..., :1]), half(q)], -1)
        @ torch.cat([k, half(k), torch.ones_like(k[..., :1])], -1).mT
    ).exp()
    total = weight @ torch.cat([v, torch.ones_like(k[..., :1])], -1)
    return total[..., :-1] / total[..., -1:]


def test_costs_add_and_repeat():
    a, b = Cost(1, 2, 3, "a"), Cost(10, 20, 30, "b")
    assert a + b == Cost(11, 22, 33, "a + b") and sum([a, b]) == a + b and 3 * a == a * 3 == Cost(3, 6, 9, "3 x (a)")
    assert Cost(6, 3).intensity == 2 and Cost(6).intensity == math.inf
    machine = Ceilings(copy=10.0, gemm=100.0, exp=5.0, threads=1, device="cpu")
    assert (
        Cost(50, 1, 1).floor(machine) == 0.5
        and Cost(50, 20, 1).floor(machine) == 2
        and Cost(50, 20, 50).floor(machine) == 10
    )
    with pytest.raises(TypeError):
        a + 1


@pytest.mark.parametrize(
    "batch, heads, n, keys, dim, value_dim", [(1, 1, 1, 1, 1, 1), (2, 3, 17, 29, 8, 5), (1, 8, 64, 64, 24, 24)]
)
def test_dense_flops_equal_the_counter(batch, heads, n, keys, dim, value_dim):
    q, k, v = (torch.randn(batch, heads, m, d) for m, d in ((n, dim), (keys, dim), (keys, value_dim)))
    shape = dict(n=n, heads=heads, dim=dim, value_dim=value_dim, keys=keys, batch=batch)
    assert counted_flops(lambda: (q @ k.mT).softmax(-1) @ v) == dense_attention_cost(**shape).flops
    cost = dense_attention_cost(**shape, kernel="gaussian")
    assert counted_flops(gaussian, q, k, v) == cost.flops and cost.exps == batch * heads * n * keys
    assert cost.bytes == 4 * (q.numel() + k.numel() + v.numel() + batch * heads * n * value_dim)
    stored = dense_attention_cost(**shape, kernel="gaussian", stored=True)
    assert stored.bytes - cost.bytes == 2 * 4 * cost.exps


def test_counter_does_not_see_fused_attention():
    q = torch.randn(1, 2, 64, 32)
    assert counted_flops(F.scaled_dot_product_attention, q, q, q) == 0


@pytest.mark.parametrize("m, k, n", [(1, 1, 1), (3, 5, 7), (64, 32, 16)])
def test_matmul_and_linear(m, k, n):
    a, b = torch.randn(m, k), torch.randn(k, n)
    cost = matmul_cost(m, k, n)
    assert counted_flops(torch.mm, a, b) == cost.flops and cost.bytes == 4 * (a.numel() + b.numel() + m * n)
    assert counted_flops(torch.bmm, a.expand(6, m, k), b.expand(6, k, n)) == matmul_cost(m, k, n, batch=6).flops
    layer = torch.nn.Linear(k, n)
    assert counted_flops(layer, a) == linear_cost(m, k, n).flops
    assert linear_cost(m, k, n).bytes - linear_cost(m, k, n, bias=False).bytes == 4 * n


@pytest.mark.parametrize("n, block", [(1, 1), (10, 4), (12, 4), (3, 100), (101, 100)])
def test_block_pairs_by_counting(n, block):
    label = np.arange(n) // block
    assert block_pairs(n, block) == (label[:, None] == label).sum()


@pytest.mark.parametrize("n, block, tables", [(40, 8, 3), (42, 8, 2), (5, 100, 1)])
def test_hept_flops_equal_the_counter(n, block, tables):
    heads, dim, value_dim = 2, 6, 5

    def run():
        for _ in range(tables):
            for rows in torch.arange(n).split(block):
                x = torch.randn(heads, len(rows), dim)
                gaussian(x, x, torch.randn(heads, len(rows), value_dim))

    cost = hept_attention_cost(n, heads, dim, value_dim, tables=tables, block=block)
    assert counted_flops(run) == cost.flops and cost.exps == heads * tables * block_pairs(n, block)
    assert cost.bytes == 4 * heads * n * (2 * dim + 2 * value_dim)
    again = hept_attention_cost(n, heads, dim, value_dim, tables=tables, block=block, reread=True)
    assert again.bytes == 4 * heads * n * (tables * (2 * dim + value_dim) + 2 * tables * (value_dim + 1) + value_dim)
    assert hept_attention_cost(n, heads, dim, value_dim, tables=tables, block=block, batch=3).flops == 3 * cost.flops


def test_sort_cost():
    assert sort_cost(1024, 3) == Cost(3 * 1024 * 10, 3 * 1024 * 12, 0, "sort") and sort_cost(1).flops == 0


@pytest.mark.parametrize(
    "call, name",
    [
        (lambda: matmul_cost(0, 1, 1), "m"),
        (lambda: matmul_cost(1, 1.5, 1), "k"),
        (lambda: dense_attention_cost(-3, 1, 1), "n"),
        (lambda: dense_attention_cost(3, 1, 1, kernel="cosine"), "kernel"),
        (lambda: hept_attention_cost(3, 1, 1, block=0), "block"),
        (lambda: hept_attention_cost(3, 1, 1, tables=True), "tables"),
        (lambda: sort_cost(3, 0), "rows"),
    ],
)
def test_bad_sizes_name_the_argument(call, name):
    with pytest.raises(ValueError, match=f"^{name}:"):
        call()


def test_compare_knows_a_fivefold():
    def nap(seconds):
        return lambda: time.sleep(seconds)

    table = compare({"short": nap(0.01), "long": nap(0.05), "same": nap(0.01)}, repeats=5, warmup=0)
    assert list(table.index) == ["short", "long", "same"] and (table.repeats == 5).all() and table.speedup["short"] == 1
    assert 0.01 <= table["median"]["short"] < 0.04 and 0.05 <= table["median"]["long"]
    assert 1 / 6 < table.speedup["long"] < 1 / 2.5
    assert (table.q25 <= table["median"]).all() and (table.speedup_q25 <= table.speedup_q75).all()
    assert (
        compare({"nap": nap(0.05)}, repeats=3, clock="cpu")["median"]["nap"] < 0.02
    )  # sleeping costs no processor time


def test_compare_interleaves_and_restores_threads():
    order, threads = [], torch.get_num_threads()
    compare({n: (lambda n=n: order.append(n)) for n in "abc"}, repeats=3, warmup=1, threads=1)
    assert "".join(order) == "abc" + "abc" + "cba" + "bca" and torch.get_num_threads() == threads


@pytest.mark.parametrize("names", ["ab", "abc", "abcd", "abcde"])
def test_compare_lets_each_follow_every_other_equally_often(names):
    order, n = [], len(names)
    compare({x: (lambda x=x: order.append(x)) for x in names}, repeats=2 * n, warmup=0)
    rounds = np.array(order).reshape(2 * n, n)
    assert all(sorted(one) == list(names) for one in rounds)
    pairs = Counter((a, b) for one in rounds for a, b in itertools.pairwise(one))
    assert pairs == dict.fromkeys(itertools.permutations(names, 2), 2)


@pytest.mark.parametrize(
    "arguments, name",
    [
        (({},), "functions"),
        (({"a": 3},), "functions"),
        (({"a": print}, 0), "repeats"),
        (({"a": print}, 1, 1, 0), "threads"),
        (({"a": print}, 1, 1, 1, "sun"), "clock"),
    ],
)
def test_compare_bad_input(arguments, name):
    with pytest.raises(ValueError, match=name):
        compare(*arguments)


def test_fits():
    n = np.array([1_000, 2_000, 8_000, 64_000])
    assert loglog_slope(n, 3 * n**1.5) == pytest.approx(1.5)
    fit = fit_nlogn(n, 0.5 + 1e-6 * n * np.log2(n))
    assert (fit.constant, fit.rate) == (pytest.approx(0.5), pytest.approx(1e-6)) and fit.error < 1e-9
    np.testing.assert_allclose(fit(n), 0.5 + 1e-6 * n * np.log2(n))
    assert fit_nlogn(n, n.astype(float) ** 2).error > 0.3
    for bad in (([1, 2], [1]), ([1], [1]), ([1, 2], [0, 1]), ([1, float("nan")], [1, 1])):
        with pytest.raises(ValueError, match="n and t"):
            loglog_slope(*bad)


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads Linux's counters")


@linux
@pytest.mark.parametrize("isolate", [True, False])
def test_peak_memory_of_known_allocations(isolate):
    assert peak_memory(lambda: None, isolate=isolate) < MiB
    peak = peak_memory(lambda: torch.ones(16 * MiB).sum(), isolate=isolate)
    assert peak == pytest.approx(64 * MiB, abs=2 * MiB)
    assert peak_memory(lambda: (torch.ones(16 * MiB), torch.ones(16 * MiB)), isolate=isolate) == pytest.approx(
        128 * MiB, abs=2 * MiB
    )


@linux
def test_peak_memory_is_not_fooled_by_free_memory():
    """In a process of its own: holes smaller than a page, of which many tests leave a mebibyte, are not given back."""
    script = """if True:
        import torch
        from sparseattn.lab.measure import peak_memory
        pieces = [torch.ones(1024) for _ in range(16 * 1024)]
        del pieces
        print(peak_memory(lambda: [torch.ones(1024) for _ in range(8 * 1024)]))"""
    out = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert int(out) > 31 * MiB


@linux
def test_peak_memory_reports_failure_and_leaves_no_trace():
    seen = []
    with pytest.raises(RuntimeError, match="KeyError: 'x'"):
        peak_memory(lambda: (seen.append(1), {}["x"]))
    assert not seen  # it ran in a copy
    with pytest.raises(RuntimeError, match="exit code 3"):
        peak_memory(lambda: os._exit(3))
    with pytest.raises(TimeoutError, match="isolate=False"):
        peak_memory(lambda: time.sleep(60), timeout=0.3)


@linux
def test_peak_memory_works_with_gradients():
    x = torch.randn(300, 300, requires_grad=True)
    (x @ x).sum().backward()
    assert peak_memory(lambda: (x @ x).exp().sum().backward()) >= 0


def test_ceilings_are_plausible():
    machine = machine_ceilings(threads=1)
    assert 1e8 < machine.copy < 1e13 and 1e9 < machine.gemm < 1e15 and 1e6 < machine.exp < 1e13 and machine.threads == 1


TOY = """
import torch
def squares(n):
    x = torch.ones(n)
    return {"temporary": lambda: (x * x).sum(), "dot": lambda: x @ x, "exact": x.double().sum}
def there(n, device):
    x = torch.ones(n, device=device)
    return {device: lambda: x * x, "error": lambda out: out.device.type != device}
def nothing(n): return {}
def unjudged(n): return {"int": int}
def wrong(n): return {"int": int, "error": lambda out: 1}
number = 3
"""


@pytest.fixture
def toy(tmp_path, monkeypatch):
    (tmp_path / "measure_toy.py").write_text(TOY)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(measure, "_restart_in", lambda regime: None)
    yield tmp_path
    sys.modules.pop("measure_toy", None)


def test_command_line_in_process(toy, capsys):
    assert main(["measure_toy:squares", "--n", "10", "1000", "--repeats", "3", "--csv", str(toy / "out.csv")]) == 0
    table = pd.read_csv(toy / "out.csv")
    assert tuple(table) == measure.COLUMNS and set(table["case"]) == {"measure_toy:squares"}
    assert table["sizes"].tolist() == ["n=10"] * 2 + ["n=1000"] * 2
    assert table["form"].tolist() == ["temporary", "dot"] * 2
    assert (table["ratio"][table["form"] == "temporary"] == 1).all() and (table["threads"] == 1).all()
    assert set(table["allocator"]) == {"default"} and table["error"].max() < 1e-6
    assert "temporary" in capsys.readouterr().out
    assert sorted(p.name for p in toy.iterdir() if p.suffix != "" and "cache" not in p.name) == [
        "measure_toy.py",
        "out.csv",
    ]


def test_command_line_asks_for_the_device(toy, capsys):
    assert main(["measure_toy:there", "--n", "10", "--device", "meta", "--csv", str(toy / "out.csv")]) == 0
    table = pd.read_csv(toy / "out.csv")
    assert table["form"].tolist() == table["device"].tolist() == ["meta"]


def test_timed_afresh_is_the_command(toy, monkeypatch):
    here = timed_afresh("measure_toy:there", [10, 20], repeats=1, device="meta")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(toy), *filter(None, [os.environ.get("PYTHONPATH")])]))
    afresh = timed_afresh("measure_toy:squares", [10, 20], repeats=1)
    assert tuple(here) == tuple(afresh) == measure.COLUMNS
    assert here["sizes"].tolist() == ["n=10", "n=20"] and afresh["sizes"].tolist() == ["n=10"] * 2 + ["n=20"] * 2
    assert set(here["device"]) == {"meta"} and set(afresh["device"]) == {"cpu"}
    trace = measure.Trace()
    trace.add(afresh, "squares", kind="ones")
    assert measure.speed_table(trace)["n"].tolist() == [10, 10, 20, 20] and set(trace.frame["inputs"]) == {"ones"}
    with pytest.raises(ValueError, match="measure_toy:squarez: .*squarez"):
        timed_afresh("measure_toy:squarez", [10])


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["no_such_module_here:f", "--n", "3"], "no module named 'no_such_module_here'"),
        (["measure_toy:squarez", "--n", "3"], "no function 'squarez'; it has squares"),
        (["measure_toy:number", "--n", "3"], "no function"),
        (["measure_toy", "--n", "3"], "expected package.module:function"),
        (["measure_toy:squares", "--n", "0"], "positive integer, got '0'"),
        (["measure_toy:squares", "--n", "many"], "positive integer, got 'many'"),
        (["measure_toy:squares"], "--n"),
        (["measure_toy:nothing", "--n", "3"], "a form at least"),
        (["measure_toy:unjudged", "--n", "3"], "says how wrong a result is"),
        (["measure_toy:wrong", "--n", "3"], "measure_toy:wrong: no contender is right"),
        (["measure_toy:squares", "--n", "3", "--malloc", "fast"], "--malloc"),
    ],
)
def test_command_line_errors(toy, capsys, arguments, words):
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--csv", str(toy / "out.csv")])
    assert stop.value.code == 2 and words in capsys.readouterr().err and not (toy / "out.csv").exists()


glibc = pytest.mark.skipif(measure.platform.libc_ver()[0] != "glibc", reason="switches of glibc")


@glibc
@pytest.mark.parametrize(
    "inherited, wanted, restarts",
    [("default", "default", 0), ("default", "reuse", 1), ("reuse", "default", 1), ("reuse", "reuse", 0)],
)
def test_restart_only_if_the_allocator_was_set_otherwise(monkeypatch, inherited, wanted, restarts):
    calls = []
    for name, value in malloc_environment(inherited).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(measure.os, "execve", lambda program, words, environment: calls.append((words, environment)))
    measure._restart_in(wanted)
    assert len(calls) == restarts
    for words, environment in calls:
        assert words[1:] == sys.orig_argv[1:]
        assert {k: v for k, v in environment.items() if k in measure.REUSE} == (
            measure.REUSE if wanted == "reuse" else {}
        )
    with pytest.raises(ValueError, match="regime"):
        malloc_environment("fast")


@glibc
def test_malloc_reuse_ends_page_faults(tmp_path):
    """Ten temporaries of 40 MB are 97,656 pages of 4 KiB; with reuse the process keeps them."""
    (tmp_path / "faults_toy.py").write_text(
        "import resource, numpy as np\n"
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "def work():\n    for _ in range(10): np.ones(5_000_000)\n"
        "def count(n):\n    work(); before = faults(); work(); print('faults', faults() - before)\n"
        "    return {'a': lambda: None, 'error': lambda out: 0}\n"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "sparseattn.lab.measure",
            "faults_toy:count",
            "--n",
            "1",
            "--repeats",
            "1",
            "--malloc",
            "reuse",
        ],
        cwd=tmp_path,
        env=malloc_environment("default"),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    faults = next(line for line in done.stdout.splitlines() if line.startswith("faults")).split()[1]
    assert int(faults) < 20_000


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_memory_and_ceilings_of_a_gpu():
    peak = peak_memory(lambda: torch.ones(16 * MiB, device="cuda").sum(), device="cuda")
    assert 64 * MiB <= peak < 66 * MiB
    assert machine_ceilings(device="cuda").copy > 1e10


# --- cases: right before fast


def case(**more):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    facts = dict(
        forms={"torch": lambda x: x.softmax(-1), "forgotten": torch.exp}, inputs=(x,), sizes={"n": 7, "density": 0.5}
    )
    return measure.Case("softmax", **{"exact": lambda x: x.softmax(-1), **facts, **more})


@pytest.mark.parametrize("backward", [False, True])
def test_a_wrong_form_has_an_error_and_no_time(backward, capsys, tmp_path):
    trace = measure.Trace(tmp_path)
    lines = trace.time(case(backward=backward, rivals={"sum": torch.sum}), repeats=3).set_index("form")
    assert lines["error"]["torch"] < 1e-6 < 0.1 < lines["error"]["forgotten"] and math.isnan(lines["error"]["sum"])
    assert lines["seconds"].isna().to_dict() == {"torch": False, "forgotten": True, "sum": False}
    assert lines["ratio"]["torch"] == 1 and lines["role"].tolist() == ["form", "form", "rival"]
    assert "softmax (n=7 density=0.5): forgotten is wrong by" in capsys.readouterr().out
    written = pd.read_csv(tmp_path / "trace.csv")
    assert tuple(written) == measure.COLUMNS and written["form"].tolist() == ["torch", "forgotten", "sum"]
    assert written["dtype"].unique() == ["float32"] and [p.name for p in tmp_path.iterdir()] == ["trace.csv"]


def test_a_small_error_in_a_gradient_is_found():
    class Off(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 1

        @staticmethod
        def backward(ctx, g):
            return 1.01 * g

    forms = {"torch": lambda x: x.softmax(-1), "off": lambda x: Off.apply(x.softmax(-1))}
    assert max(case(forms=forms).errors().values()) < 1e-6
    errors = case(forms=forms, backward=True).errors()
    assert errors["torch"] < 1e-6 and 0.005 < errors["off"] < 0.02


def test_gradients_of_modules_and_of_unused_inputs():
    layer = torch.nn.Linear(7, 3)
    exact = lambda x, y: torch.nn.functional.linear(x, layer.weight.double(), layer.bias.double())  # noqa: E731
    made = case(
        forms={"one": lambda x, y: layer(x)},
        exact=exact,
        backward=True,
        rivals={"layer": (layer, (torch.ones(2, 7),))},
        inputs=(torch.ones(2, 7), torch.ones(1)),
    )
    assert made.errors()["one"] < 1e-6
    assert [x.shape for x in made.calls()["layer"]()] == [(2, 3), (2, 7), (3, 7), (3,)]


def test_errors_of_results():
    one = torch.tensor([1.0, 2.0])
    assert measure.relative_error({"a": one + 0.5, "b": "words"}, [one]) == 0.25
    for wrong in ([one, one], [], one[:1], one * math.nan, one * math.inf):
        assert measure.relative_error(wrong, one) == math.inf
    assert measure.relative_error((torch.ones(3), torch.zeros(0)), (torch.ones(3), torch.zeros(0))) == 0


def test_bad_cases():
    for wrong, message in (
        (dict(forms={}), "forms and rivals: expected names with functions, and a form at least"),
        (dict(forms={"a": 1}), "forms and rivals"),
        (dict(exact=None), "expected an exact form, or a function that says how wrong"),
        (dict(error=abs), "expected an exact form, or a function that says how wrong"),
        (dict(rivals={"torch": torch.sum}), "torch: a form and a rival"),
    ):
        with pytest.raises(ValueError, match=f"softmax: {message}"):
            case(**wrong)
    trace = measure.Trace()
    trace.time(case(), repeats=1)
    with pytest.raises(
        ValueError, match="case 'softmax' with random inputs and n=7 density=0.5 is in the trace already"
    ):
        trace.time(case(), repeats=1)
    trace.time(case(kind="real"), repeats=1), trace.time(case(sizes={"n": 8}), repeats=1)
    with pytest.raises(ValueError, match="unit: expected one of s, ms, us, got 'h'"):
        measure.speed_table(trace, unit="h")
    with pytest.raises(ValueError, match="the trace is empty"):
        measure.speed_table(measure.Trace())


def test_what_is_drawn_is_judged_by_a_function():
    forms = {"dice": lambda x: torch.randint(1, 7, (50,)), "loaded": lambda x: torch.full((50,), 7)}
    made = case(forms=forms, exact=None, error=lambda out: ((out < 1) | (out > 6)).float().mean())
    assert made.errors() == {"dice": 0, "loaded": 1}


def test_speed_tables():
    trace = measure.Trace()
    for n in (7, 9):
        trace.time(case(sizes={"n": n}, rivals={"sum": torch.sum}, kind="real" if n == 9 else "random"), repeats=3)
    long = measure.speed_table(trace)
    assert long.columns.tolist() == ["case", "inputs", "n", "device", "form", "ms", "time / ours", "error"]
    assert long["n"].tolist() == [7] * 3 + [9] * 3 and np.allclose(
        long["ms"], 1e3 * trace.frame["seconds"], equal_nan=True
    )
    wide = measure.speed_table(trace.frame, wide=True, unit="us")
    assert wide.columns.tolist()[-3:] == ["torch [us]", "forgotten / torch", "sum / torch"] and wide[
        "inputs"
    ].tolist() == ["random", "real"]
    assert wide["forgotten / torch"].isna().all() and (wide["sum / torch"] > 0).all()


def test_passages_are_of_one_length_and_topic():
    passages, topics = measure.manual_passages(2000)
    assert passages.dtype == torch.int64 and passages.shape == (len(topics), 2000) and passages.max() < 256
    assert (topics.diff() >= 0).all() and topics.unique().tolist() == list(range(int(topics.max()) + 1))
    every = bytes(passages[topics == topics.mode().values].flatten().tolist()).decode()
    assert any(every in text for text in vars(__import__("pydoc_data.topics", fromlist=["topics"]))["topics"].values())


def test_inputs_of_layers_and_a_brief_training():
    network = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1))
    x = torch.randn(5, 2, generator=torch.Generator().manual_seed(0))
    (first,), (second,) = measure.layer_inputs(network, torch.nn.Linear, x)
    assert torch.equal(first, x) and torch.equal(second, network[:2](x)) and not second.requires_grad
    assert not network[0]._forward_pre_hooks
    losses = measure.train_briefly(network, lambda step: network(x).square().mean(), steps=30, rate=0.05)
    assert len(losses) == 30 and losses[-1] < losses[0]
    with pytest.raises(ValueError, match="network: has no Conv1d"):
        measure.layer_inputs(network, torch.nn.Conv1d, x)


# --- the registry, and two versions of the tree


def test_registry_names_what_can_be_timed():
    names = measure.registry()
    assert names["pat.layers.subset_cases"] == "sparseattn.pat.layers:subset_cases" and not any(
        "lab" in n for n in names
    )
    assert measure._target("subset_cases") == measure._target("layers.subset_cases") == names["pat.layers.subset_cases"]
    for wrong, message in (("cases", "prints those there are"), ("nothing", "prints those there are")):
        with pytest.raises(ValueError, match=f"got {wrong!r}; .*{message}"):
            measure._target(wrong)


WRONG = """
import torch
def sums(n):
    x = torch.ones(n)
    return {"sum": x.sum, "off": lambda: 2 * x.sum(), "exact": x.double().sum, "rivals": {"max": x.max}}
"""


def test_command_line_gives_a_wrong_contender_no_time(tmp_path, monkeypatch, capsys):
    (tmp_path / "wrong_sums.py").write_text(WRONG)
    monkeypatch.syspath_prepend(tmp_path)
    assert measure.main(["wrong_sums:sums", "--n", "10", "--repeats", "2", "--csv", str(tmp_path / "out.csv")]) == 0
    table = pd.read_csv(tmp_path / "out.csv").set_index("form")
    assert table["seconds"].isna().to_dict() == {"sum": False, "off": True, "max": False} and table["error"]["off"] == 1
    assert "wrong_sums:sums (n=10): off is wrong by 1.0e+00, allowed 1e-03: no time" in capsys.readouterr().out


def test_two_versions_of_the_tree(tmp_path, monkeypatch):
    """The older one takes longer and lacks a form; a wrong form is not timed."""
    new, old = tmp_path / "new", tmp_path / "old"
    for folder, seconds, more in ((new, 0.002, ", 'late': one"), (old, 0.02, "")):
        folder.mkdir()
        (folder / "tree_sums.py").write_text(
            "import time, torch\ndef one():\n    return torch.ones(1)\n"
            f"def wait():\n    time.sleep({seconds})\n    return one()\n"
            f"def sums(n):\n    return {{'wait': wait, 'two': lambda: 2 * one(){more}, 'exact': one}}\n"
        )
    monkeypatch.syspath_prepend(new)
    monkeypatch.setattr(measure, "_unpack", lambda commit, folder: shutil.copytree(old, folder, dirs_exist_ok=True))
    monkeypatch.setattr(measure, "_package_folder", lambda: new / "sparseattn")
    monkeypatch.chdir(new)  # where the call is made: the folder of the tree as it is must not hide the older one
    assert (
        measure.main(
            ["tree_sums:sums", "--n", "3", "--repeats", "3", "--against", "HEAD", "--csv", str(tmp_path / "out.csv")]
        )
        == 0
    )
    (row,) = pd.read_csv(tmp_path / "out.csv").to_dict("records")
    assert (row["n"], row["name"], row["repeats"]) == (3, "wait", 3) and row["then / now"] > 1.5


def test_an_unknown_commit_is_one_sentence(capsys):
    with pytest.raises(SystemExit):
        measure.main(["subset_cases", "--n", "3", "--against", "no-such-commit"])
    assert "--against: " in capsys.readouterr().err


def test_imaginary_parts_count():
    assert measure.relative_error(torch.tensor([1 + 2j]), torch.tensor([1 + 1j])) == pytest.approx(1 / 2**0.5)


def test_a_form_in_place_spoils_no_other():
    for dtype in (torch.float32, torch.float64):
        forms = {"in place": lambda x: x.mul_(2), "right": lambda x: x * 2}
        case = measure.Case("double", forms, (torch.ones(4, dtype=dtype),), exact=lambda x: x.mul_(2))
        assert case.errors() == {"in place": 0.0, "right": 0.0}


def test_inputs_are_those_given():
    network = torch.nn.Sequential(torch.nn.ReLU(inplace=True))
    (given,), = measure.layer_inputs(network, torch.nn.ReLU, torch.tensor([[-1.0, 1.0]]))
    assert given.tolist() == [[-1.0, 1.0]]
