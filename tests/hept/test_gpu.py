"""HEPT's block attention on a GPU: programs give what torch does, and compile for NVIDIA."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton, the extra named gpu")

from sparseattn.hept import attention  # noqa: E402
from sparseattn.hept.attention import hept_attention  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU in Triton's interpreter, see conftest.py


def given(n, tables, *, heads=2, widths=(5, 7), spread=1.0, masked=False, seed=0):
    "Queries, keys, values, two orders, and a mask."
    g = torch.Generator().manual_seed(seed)
    q, k = spread * torch.randn(2, 1, heads, n, widths[0], generator=g)
    orders = torch.rand(2, tables, 1, heads, n, generator=g).argsort(-1)
    mask = (torch.rand(1, n, generator=g) < 0.7).index_fill(1, torch.tensor([0]), True) if masked else None
    return [x.to(DEVICE) for x in (q, k, torch.randn(1, heads, n, widths[1], generator=g))], orders.to(DEVICE), mask


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
        dict(n=13, tables=3, block_size=5, combine="union", masked=True),
        dict(n=13, tables=2, block_size=5, floor=1e-3, masked=True),
        dict(n=13, tables=2, block_size=5, combine="union", spread=6.0),
        dict(n=75, tables=1, block_size=70, heads=1),
    ],
    ids=str,
)
def test_equals_the_reference(on_gpu, case):
    "More points a block than a program holds, blocks that are not full, and far points among them."
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


def test_a_run_repeats_bit_by_bit(on_gpu):
    rows, orders, mask = given(21, 2, heads=1)
    runs = [results(rows, orders, mask, block_size=8) for _ in range(2)]
    assert all(map(torch.equal, *runs))


@pytest.mark.parametrize("name, change", [("order_q", 7), ("order_k", 99), ("order_k", -1)])
def test_what_is_no_order_is_named(on_gpu, name, change):
    rows, orders, mask = given(20, 2, heads=1)
    tensors = dict(zip(("q", "k", "v", "order_q", "order_k"), (*rows, *orders.clone()), strict=True))
    tensors[name].view(-1)[3] = change
    with pytest.raises(ValueError, match=name):
        hept_attention(*tensors.values(), mask=mask, block_size=5)


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sparseattn.hept import gpu

types = dict.fromkeys(("order_q", "order_k", "count"), "*i64") | dict.fromkeys(("block_q", "block_k"), "*i32")
types |= dict.fromkeys(("rows", "n", "d"), "i32") | {"log_total": "*fp64"}
for union, processor in ((False, 80), (True, 90)):
    for kernel in (gpu._forward, gpu._backward_queries, gpu._backward_keys):
        constants = dict(D=30, E=24, D_ALL=32, E_ALL=32, UNION=union, FAR=128.0, BLOCK=100, TILES=2, TILE=64)
        known = types | dict.fromkeys(constants, "constexpr")
        names = {name: known.get(name, "*fp32") for name in kernel.arg_names}
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        triton.compile(ASTSource(kernel, signature=names, constexprs=places), target=GPUTarget("cuda", processor, 32))
print("compiled")
"""


def test_compiles_for_two_generations_of_processors(compile_without_gpu):
    compile_without_gpu(COMPILED)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("block_size", [100, 1000])
@pytest.mark.parametrize("combine", ["sum", "union"])
def test_on_a_gpu(combine, block_size):
    "A cloud of the size of a sector, against the gather form in float64."
    rows, orders, mask = given(2_500, 3, heads=8, widths=(30, 24), spread=0.3, masked=True)
    assert attention._form(rows[0]) is attention._BY_PROGRAMS
    options = dict(combine=combine, block_size=block_size)
    expected = results([x.double() for x in rows], orders, mask, impl="composed", **options)
    for ours, exact in zip(results(rows, orders, mask, **options), expected, strict=True):
        assert (ours - exact).abs().max() <= 1e-5 * exact.abs().max()
