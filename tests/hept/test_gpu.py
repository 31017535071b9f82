"""HEPT's block attention on a GPU: programs give what torch does, and compile for NVIDIA."""

import pytest
import torch
from pretend import pretend_gpu

pytest.importorskip("triton", reason="needs Triton, the extra named gpu")

from sparseattn.core.attention import check_values  # noqa: E402
from sparseattn.hept import attention  # noqa: E402
from sparseattn.hept.attention import hept_attention, multiplicity  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU in Triton's interpreter, see conftest.py


def given(n, tables, *, batch=1, heads=2, widths=(5, 7), spread=1.0, masked=None, emptied=False, seed=0):
    "Queries, keys, values, two orders, and a mask: point 0 and every so-many-th is hidden, or the first of two clouds."
    g = torch.Generator().manual_seed(seed)
    q, k = spread * torch.randn(2, batch, heads, n, widths[0], generator=g)
    v = torch.randn(batch, heads, n, widths[1], generator=g)
    orders = torch.rand(2, tables, batch, heads, n, generator=g).argsort(-1)
    mask = (torch.arange(n) % masked > 0).expand(batch, n) if masked else None
    if emptied:
        mask = torch.arange(batch)[:, None].expand(batch, n) > 0
    return [x.to(DEVICE) for x in (q, k, v)], orders.to(DEVICE), mask


def results(rows, orders, mask, **options):
    "Output, and gradients by queries, keys and values."
    leaves = [x.clone().requires_grad_() for x in rows]
    out = hept_attention(*leaves, *orders, mask=None if mask is None else mask.to(DEVICE), **options)
    return out, *torch.autograd.grad(out.sin().sum(), leaves)


@pytest.fixture
def on_gpu(monkeypatch):
    "The form that a GPU gets, wherever this runs."
    monkeypatch.setattr(attention, "_form", lambda q: attention._BY_PROGRAMS)


@pytest.mark.parametrize(
    "case",
    [
        dict(n=1, tables=1, block_size=1),
        dict(n=18, tables=2, block_size=18, heads=1),
        dict(n=22, tables=2, block_size=9, widths=(30, 24), heads=1),
        dict(n=13, tables=3, block_size=5, combine="union", masked=3),
        dict(n=13, tables=2, block_size=5, floor=1e-3, masked=4),
        dict(n=13, tables=2, block_size=5, combine="union", spread=6.0),
        dict(n=11, tables=2, block_size=4, batch=2, emptied=True),
        dict(n=75, tables=1, block_size=70, heads=1),
        dict(n=68, tables=2, block_size=65, combine="union", masked=40, heads=1),
    ],
    ids=str,
)
def test_equals_the_reference(on_gpu, case):
    "Blocks of more points than a program holds and blocks that are not full, far points, and a cloud without points."
    options = {name: case.pop(name) for name in ("block_size", "combine", "floor") if name in case}
    rows, orders, mask = given(**case)
    expected = results([x.double() for x in rows], orders, mask, impl="reference", **options)
    for ours, exact in zip(results(rows, orders, mask, **options), expected, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - exact).abs().max() <= 2e-5 * exact.abs().max().clamp(min=0.1)


def test_a_far_query_takes_the_nearest_key(on_gpu):
    "Squares of 10^8, whose roundings in float32 would be larger than their differences."
    q, k = torch.full((1, 1, 4, 2), 1e4), torch.tensor([[1.0, 0], [0, 2], [2, 2], [3, 2.5]]).view(1, 1, 4, 2)
    v, order = torch.eye(4).view(1, 1, 4, 4), torch.arange(4).view(1, 1, 1, 4)
    q, k, v, order = (x.to(DEVICE) for x in (q, k, v, order))
    torch.testing.assert_close(hept_attention(q, k, v, order, order), v[:, :, 3:].expand_as(v))


@pytest.mark.parametrize("place", [1e5, 3.3e5])
def test_gradients_of_a_query_far_from_every_key(on_gpu, place):
    (q, k, v), orders, _ = given(8, 2, heads=1)
    q[:, :, 2] += place
    expected = results([x.double() for x in (q, k, v)], orders, None, impl="reference", block_size=4)
    for ours, exact in zip(results((q, k, v), orders, None, block_size=4), expected, strict=True):
        assert (ours - exact).abs().max() <= 1e-4 * exact.abs().max()


@pytest.mark.parametrize("floor", [0.0, 1e-3])
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_what_is_no_number_shows(on_gpu, part, floor):
    "In a query's own output, in those of all queries that a key or value meets, and in no other."
    rows, orders, _ = given(13, 2, heads=1)
    rows["qkv".index(part)][0, 0, 4] = torch.nan
    with check_values(False):
        out, to_q, *_ = results(rows, orders, None, block_size=5, floor=floor)
    met = multiplicity(*orders, 5)[..., 4] > 0
    assert 0 < met.sum() < met.numel()
    spoilt = torch.arange(13, device=DEVICE).expand_as(met) == 4 if part == "q" else met
    assert all(x.isnan().all(-1).equal(spoilt) and x.isnan().any(-1).equal(spoilt) for x in (out, to_q))


def test_hidden_points_change_no_bit():
    "Not even where point 0 is one, which idle lanes of a program read."
    from sparseattn.hept.gpu import attend_on_gpu, differentiate_on_gpu

    (q, k, v), orders, _ = given(9, 2, heads=1)
    q, k, v, order_q, order_k = q[0], k[0], v[0], *orders[:, :, 0]
    real = torch.arange(9, device=DEVICE)[None] > 0
    listed, found = attention._listed(order_q, order_k, real), []
    for place in (0.0, 50.0):
        q[:, 0] = k[:, 0] = place
        out, log_total = attend_on_gpu(q, k, v, *listed, block_size=5)
        gradients = differentiate_on_gpu(v, q, k, v, *listed, out, log_total, block_size=5)
        found.append([x[:, 1:] for x in (out, log_total, *gradients)])
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter runs one program after the other")
def test_a_run_repeats_bit_by_bit(on_gpu):
    rows, orders, mask = given(21, 2, heads=1)
    runs = [results(rows, orders, mask, block_size=8) for _ in range(2)]
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("name, change", [("order_q", 7), ("order_k", 99), ("order_k", -1)])
def test_what_is_no_order_is_named(on_gpu, name, change):
    rows, orders, mask = given(20, 2, heads=1)
    tensors = dict(zip(("q", "k", "v", "order_q", "order_k"), (*rows, *orders.clone()), strict=True))
    tensors[name].view(-1)[3] = change
    with check_values(True), pytest.raises(ValueError, match=name):
        hept_attention(*tensors.values(), mask=mask, block_size=5)


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_not_finite_is_named(on_gpu, name):
    rows, orders, _ = given(20, 2, heads=1)
    rows["qkv".index(name)][0, 0, 3, 1] = torch.inf
    with check_values(True), pytest.raises(ValueError, match=f"{name} holds NaN or infinite"):
        hept_attention(*rows, *orders, block_size=5)


def test_values_on_a_gpu_are_read_where_that_is_asked_for():
    with pretend_gpu() as gpu:
        x, order = torch.zeros(1, 4, 2, device="cuda"), torch.zeros(1, 1, 4, dtype=torch.int64, device="cuda")
        attention._check_entries(x, x, x, order, order)
        assert not gpu.reads
        with check_values(True), pytest.raises(ValueError, match="order_q must hold permutations"):
            attention._check_entries(x, x, x, order, order)


@pytest.mark.parametrize("name", ["k", "v", "order_q", "order_k", "mask"])
def test_what_lies_on_another_device_is_named(name):
    rows, orders, mask = given(20, 2, masked=3)
    tensors = dict(zip(("q", "k", "v", "order_q", "order_k"), (*rows, *orders), strict=True), mask=mask.to(DEVICE))
    tensors[name] = tensors[name].to("meta")
    with pytest.raises(ValueError, match=f"{name} must lie on {DEVICE}"):
        hept_attention(**tensors)


COMPILED = """
from sparseattn.hept import gpu

types = dict.fromkeys(("order_q", "order_k", "count"), "*i64") | dict.fromkeys(("block_q", "block_k"), "*i32")
types |= dict(rows="i32", n="i32", log_total="*fp64")
for union, processor in ((False, 80), (True, 90)):
    constants = dict(D=30, E=24, D_ALL=32, E_ALL=32, UNION=union, FAR=128.0, BLOCK=100, TILES=2, TILE=64)
    for kernel in (gpu._forward, gpu._backward_queries, gpu._backward_keys):
        compiled(kernel, processor, types, constants)
"""


IN_REGISTERS = """
from sparseattn.hept import gpu

types = dict.fromkeys(("order_q", "order_k", "count"), "*i64") | dict.fromkeys(("block_q", "block_k"), "*i32")
types |= dict(rows="i32", n="i32", log_total="*fp64")
for channels in (32, 64, 128):
    tile, warps = gpu._program(channels, channels, 100)
    wide = dict(D=channels, E=channels, D_ALL=channels, E_ALL=channels)
    constants = wide | dict(UNION=True, FAR=128.0, BLOCK=100, TILES=-(-100 // tile), TILE=tile)
    for kernel in (gpu._forward, gpu._backward_queries, gpu._backward_keys):
        assert stack(kernel, 90, types, constants, num_warps=warps) <= 16, (kernel.__name__, channels)
"""


@pytest.mark.parametrize("script", [COMPILED, IN_REGISTERS], ids=["two generations", "in registers"])
def test_compiles_for_nvidia(compile_without_gpu, script):
    compile_without_gpu(script)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("block_size", [100, 1000])
@pytest.mark.parametrize("combine", ["sum", "union"])
def test_on_a_gpu(combine, block_size):
    "A cloud of the size of a sector, against the gather form in float64."
    rows, orders, mask = given(2_500, 3, heads=8, widths=(30, 24), spread=0.3, masked=4)
    assert attention._form(rows[0]) is attention._BY_PROGRAMS
    options = dict(combine=combine, block_size=block_size)
    expected = results([x.double() for x in rows], orders, mask, impl="composed", **options)
    for ours, exact in zip(results(rows, orders, mask, **options), expected, strict=True):
        assert (ours - exact).abs().max() <= 1e-5 * exact.abs().max()
