"""Attention on a list of edges on a GPU: programs give what torch does, and compile for NVIDIA."""

import pytest
import torch

from sparseattn.core import attention, points
from sparseattn.core.attention import PRESENCE_RULES, edge_attention

pytest.importorskip("triton", reason="needs Triton, the extra named gpu")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU in Triton's interpreter, see conftest.py


def given(n, m, density, widths=(5, 7), dtype=torch.float64, seed=0, size=1.0):
    "Queries, keys, values and a list whose first query and key have no edge."
    g = torch.Generator().manual_seed(seed)
    shapes = (n, widths[0]), (m, widths[0]), (m, widths[1])
    q, k, v = (torch.randn(shape, generator=g).to(DEVICE, dtype) for shape in shapes)
    pattern = torch.rand(n, m, generator=g) < density
    pattern[0], pattern[:, 0] = False, False
    row, column = (x.to(DEVICE) for x in pattern.nonzero().T)
    return (q * size, k * size, v), row, column.int(), torch.randn(n, widths[1], generator=g).to(DEVICE, dtype)


def forward_and_backward(rows, row, column, grad):
    "Output, logarithm of the summed weights, gradients, and scores and changes."
    from sparseattn.core import gpu

    starts, transposed = attention._starts(row, len(rows[0])), attention._transposed(row, column, len(rows[1]))
    out, log_total = gpu.attend(*rows, starts, column, 0.3)
    return out, log_total, *gpu.attend_backward(*rows, starts, column, transposed, out, log_total, grad, 0.3)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    "n, m, density, size", [(1, 1, 0.0, 1), (3, 9, 1.0, 1), (5, 90, 0.9, 1), (90, 5, 0.9, 1), (12, 20, 0.2, 30)]
)
def test_equals_the_composed_form(n, m, density, size, dtype):
    rows, row, column, grad = given(n, m, density, dtype=dtype, size=size)
    leaves = [x.double().requires_grad_() for x in rows]
    literal = attention._composed_on_list(*leaves, None, None, row, column, None, None, 0.3, "weight")
    expected = literal, *torch.autograd.grad(literal, leaves, grad.double())
    out, log_total, *found = forward_and_backward(rows, row, column, grad)
    tolerance = 1e-11 if dtype == torch.float64 else 2e-4 if size > 1 else 5e-6
    for ours, exact in zip((out, *found[:3]), expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance)
    assert not out[0].any() and log_total[0] == -torch.inf


def test_half_precision_is_computed_in_float32():
    rows, row, column, grad = given(9, 30, 0.5, dtype=torch.float16)
    out, log_total, *found = forward_and_backward(rows, row, column, grad)
    exact, total, *expected = forward_and_backward([x.float() for x in rows], row, column, grad.float())
    assert log_total.equal(total)
    torch.testing.assert_close(out.float(), exact, rtol=2e-3, atol=1e-4)  # one rounding, at the end
    for ours, wide in zip(found[:3], expected[:3], strict=True):
        assert out.dtype == ours.dtype == torch.float16
        torch.testing.assert_close(ours.float(), wide, rtol=2e-3, atol=1e-3)  # and that of the output, which they read


@pytest.mark.parametrize("rule", PRESENCE_RULES)
def test_the_function_takes_them(rule, monkeypatch):
    "Outputs and gradients by queries, keys, values, presence and absence, as on a GPU, with lists in any order."
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 3, size, 4, generator=g, dtype=torch.float64).to(DEVICE) for size in (9, 11, 11))
    pattern = torch.rand(6, 9, 11, generator=g) < 0.15
    pattern[0, 0] = False
    others = (torch.rand(6, 9, 11, generator=g) < 0.2) & ~pattern
    orders = [torch.randperm(int(x.sum()), generator=g) for x in (pattern, others)]
    edges, candidates = (x.nonzero().T[:, order].to(DEVICE) for x, order in zip((pattern, others), orders, strict=True))
    found = []
    for on_gpu in (True, False):
        monkeypatch.setattr(attention, "_on_gpu", lambda x, on_gpu=on_gpu: on_gpu)
        collectors = q.new_ones(edges.shape[1]), q.new_zeros(candidates.shape[1])
        leaves = [x.clone().requires_grad_() for x in (q, k, v, *collectors)]
        options = dict(presence=leaves[3], absence=leaves[4], candidates=candidates, rule=rule)
        out = edge_attention(*leaves[:3], edges, **options)
        found.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_operator_says_what_it_gives(dtype, monkeypatch):
    "Shapes, strides and dtypes without data, also from rows that lie transposed in memory and in half precision."
    monkeypatch.setattr(attention, "_on_gpu", lambda x: True)
    rows, row, column, grad = given(9, 30, 0.5, dtype=dtype)
    q, k, v = (x.mT.contiguous().mT for x in rows)
    edges = torch.stack([torch.zeros_like(row), row, column.long()])
    collectors, size = (torch.ones(len(row), device=DEVICE), None), (9, 30, 0.3, "score")
    torch.library.opcheck(attention._operator, (q, k, v, *collectors, edges, None, *size))
    kept = attention._operator(q, k, v, *collectors, edges, None, *size)
    torch.library.opcheck(attention._operator_backward, (grad, q, k, v, edges, None, *kept, *size, True))


def test_a_product_that_half_precision_cannot_hold(monkeypatch):
    "The one edge of a query has the gradient v . grad by its presence, here up to 2e5; float16 ends at 65,504."
    monkeypatch.setattr(attention, "_on_gpu", lambda x: True)
    (q, k, v), row, column, grad = given(9, 30, 0.05, dtype=torch.float16)
    v, grad, found = 200 * v, 200 * grad, []
    for wide in (torch.float16, torch.float32):
        rows = [x.to(wide) for x in (q, k, v)]
        out, log_total = attention._softmax_on_list(*rows, row, column, 0.3)[:2]
        gradients = attention._list_gradients(
            grad.to(wide), *rows, row, column, out, log_total, None, 0.3, "removal")
        found.append(gradients[3])
    alone = (row.bincount(minlength=9) == 1)[row]
    assert alone.any() and found[1][alone].abs().max() > 65504
    torch.testing.assert_close(found[0][alone], found[1][alone], rtol=2e-3, atol=200.0)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU: the interpreter runs one program after the other")
def test_a_run_repeats_bit_by_bit():
    inputs = given(4, 70, 0.9, dtype=torch.float32)
    assert all(map(torch.equal, forward_and_backward(*inputs), forward_and_backward(*inputs)))


COMPILED = """
from sparseattn.core import gpu

types = dict(starts="*i32", column="*i32", row="*i32", order="*i64")
constants = dict(SCALE=0.125, D=48, E=64, D_ALL=64, E_ALL=64, REAL=tl.float32, EDGES=64, SUMMED=True)
half = dict.fromkeys(("q", "k", "v", "out", "grad", "to_q", "to_k", "to_v"), "*bf16")
for kernel in (gpu._forward, gpu._backward_queries, gpu._backward_keys):
    compiled(kernel, 80, types, constants)
    compiled(kernel, 90, types | half, constants)
"""

FARTHEST = """
from sparseattn.core import points

types = dict(n="i32", m="i32", picks="*i64")
farthest = compiled(points._compiled_program(), 90, types, dict(AXES=3, BLOCK=1024), enable_fp_fusion=False)
assert "fma.rn.f32" not in farthest  # multiplication and addition are rounded apart, as the definition rounds them
"""


@pytest.mark.parametrize("script", [COMPILED, FARTHEST], ids=["edges", "farthest points"])
def test_compiles_for_nvidia(compile_without_gpu, script):
    compile_without_gpu(script)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype):
    "A list of the size of a layer, against all pairs in float64."
    g = torch.Generator(DEVICE).manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 500, 64, generator=g, device=DEVICE, dtype=dtype)
    edges = (torch.rand(8, 500, 500, generator=g, device=DEVICE) < 0.02).nonzero().T
    found = []
    for impl, wide in (("fast", dtype), ("reference", torch.float64)):
        leaves = [x.to(wide).requires_grad_() for x in (q, k, v)]
        out = edge_attention(*leaves, edges, impl=impl)
        found.append([out, *torch.autograd.grad(out.float().sin().sum(), leaves)])
    tolerance = 1e-4 if dtype == torch.float32 else 3e-2
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("n, m, density", [(1, 1, 1.0), (150, 150, 0.05), (40, 300, 0.01)])
def test_flex_attention_is_what_the_list_gives(n, m, density):
    """Queries without an edge among them, in float32; on a GPU the gradients too, which torch has nowhere else."""
    from sparseattn.core.gpu import flex_attention_on

    g = torch.Generator().manual_seed(0)
    pattern = torch.rand(2, n, m, generator=g) < density
    learns = DEVICE == "cuda"
    leaves = [torch.randn(1, 2, size, 16, generator=g).to(DEVICE).requires_grad_(learns) for size in (n, m, m)]
    pattern, found = pattern.to(DEVICE), []
    for form in (flex_attention_on(pattern), edge_attention):
        out = form(*leaves, pattern.nonzero().T)
        found.append((out, *(torch.autograd.grad(out.square().sum(), leaves) if learns else ())))
    for flex, listed in zip(*found, strict=True):
        torch.testing.assert_close(flex, listed, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("capability, compiles", [((6, 1), False), ((7, 0), True)])
def test_triton_needs_a_gpu_that_it_compiles_for(monkeypatch, capability, compiles):
    monkeypatch.setattr(torch._C, "_cuda_getDeviceCount", lambda: 1, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: capability)
    assert points._compiles_for.__wrapped__(0) is compiles  # it remembers a GPU


@pytest.mark.parametrize("name", ["k", "v", "edges", "presence", "candidates", "absence"])
def test_what_lies_on_another_device_is_named(name):
    x, edges = torch.zeros(1, 1, 3, 4, device=DEVICE), torch.tensor([[0, 0], [1, 1], [0, 2]], device=DEVICE)
    pair = x[0, 0, 0, :2]
    tensors = dict(q=x, k=x, v=x, edges=edges, presence=pair, candidates=edges.flip(1), absence=pair)
    tensors[name] = tensors[name].to("meta")
    with pytest.raises(ValueError, match=f"{name} must lie on {DEVICE}"):
        edge_attention(**tensors)


def test_peers_stand_beside_kernels_on_a_gpu_alone():
    from sparseattn.core.gpu import peers
    from sparseattn.core.points import peers_on_gpu
    from sparseattn.sampled.attention import cycle_cases

    names, pattern = ["gather, compiled", "FlexAttention"], torch.ones(1, 2, 2, dtype=torch.bool, device=DEVICE)
    there = names if DEVICE == "cuda" else []
    assert list(peers_on_gpu(pattern, torch.relu, lambda: pattern)) == there
    assert list(cycle_cases(50, 2, 16, device=DEVICE)) == ["cycle", "gather", "indexed", *there, "rivals", "exact"]
    assert list(peers(torch.relu, pattern)) == names
