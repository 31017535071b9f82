"""Attention along a cycle on a GPU: both programs give what torch's operations give, and compile for NVIDIA."""

import pytest
import torch

from sparseattn.sampled import attention
from sparseattn.sampled.cycles import sample_cycle

pytest.importorskip("triton")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU in Triton's interpreter, see conftest.py


def _given(n, lead, by_point, padded, dtype):
    g = torch.Generator().manual_seed(n)
    mask = torch.arange(n) < torch.tensor([[n], [n // 2]]) if padded else None
    q, k, v = (attention._clear(torch.randn(2, 3, n, d, generator=g).to(dtype), mask) for d in (5, 5, 7))
    order, count = attention._moved(attention._three(sample_cycle(n, batch=lead, generator=g)), mask)
    rows = [attention._rows_of(x, by_point) for x in (q, k, v)]
    real = torch.ones(2, n, dtype=torch.bool) if mask is None else mask
    real = attention._rows_of(real[:, None, :, None].expand(2, 3, n, 1), by_point)[:, 0]
    return (*rows, order.contiguous(), count), torch.randn(rows[2].shape, generator=g).to(dtype), real


def _to(x):
    return [part if part is None else part.to(DEVICE) for part in x]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("n, lead, by_point, padded", [
    (1, (), False, False), (2, (2, 3), True, False), (3, (2,), False, True), (33, (), True, True),
    (301, (2, 3), False, True)])
def test_equals_torch(n, lead, by_point, padded, dtype):
    from sparseattn.sampled import gpu

    (given, grad, real), form = _given(n, lead, by_point, padded, dtype), (2, 3, by_point)
    out, share = attention._attend(*given, form, 0.3)
    expected = out, share, *attention._attend_backward(*given, share, form, 0.3, grad)
    there = _to(given)
    found = *gpu.attend(*there, form, 0.3), *gpu.attend_backward(*there, share.to(DEVICE), form, 0.3, grad.to(DEVICE))
    tolerance = 1e-13 if dtype == torch.float64 else 2e-6
    for x, y in zip(found, expected, strict=True):
        assert not x[~real.to(DEVICE)].any() and x.dtype == dtype
        torch.testing.assert_close(x.cpu()[real], y[real], rtol=tolerance, atol=tolerance)


def test_half_precision_is_computed_in_float32():
    from sparseattn.sampled import gpu

    given, _, _ = _given(33, (), False, False, torch.float16)
    out, share = gpu.attend(*_to(given), (2, 3, False), 0.3)
    exact, _ = attention._attend(*(x.float() for x in given[:3]), *given[3:], (2, 3, False), 0.3)
    assert out.dtype == torch.float16 and share.dtype == torch.float32
    torch.testing.assert_close(out.cpu().float(), exact, rtol=2e-3, atol=1e-4)  # one rounding, at the end


def test_the_layer_takes_them(monkeypatch):
    """Through the public function: outputs and all gradients, as on a GPU."""
    monkeypatch.setattr(attention, "_on_gpu", lambda x: True)
    x = torch.randn(3, 2, 3, 9, 4, dtype=torch.float64, device=DEVICE)
    order, mask = sample_cycle(9, device=DEVICE), (torch.arange(9) < torch.tensor([[9], [4]])).to(DEVICE)
    found = []
    for impl in ("fast", "reference"):
        leaves = [part.clone().requires_grad_() for part in x]
        out = attention.cycle_attention(*leaves, order, mask=mask, impl=impl)
        found.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


COMPILED = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sparseattn.core import points
from sparseattn.sampled import gpu


def compiled(kernel, types, constants, processor, **options):
    names = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names}
    constants = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = ASTSource(kernel, signature=names, constexprs=constants)
    return triton.compile(source, target=GPUTarget("cuda", processor, 32), options=options).asm["ptx"]


integers = dict.fromkeys(("n", "m", "heads", "by_cloud", "by_head"), "i32")
types = integers | dict.fromkeys(("order", "count", "picks"), "*i64")
constants = dict(SCALE=0.125, D=64, E=64, D_ALL=64, E_ALL=64, REAL=tl.float32, PLACES=16, BY_POINT=True, PADDED=True)
for kernel, processor in ((gpu._forward, 90), (gpu._backward, 80), (gpu._backward, 90)):
    compiled(kernel, types, constants, processor)
farthest = compiled(points._compiled_program(), types, dict(AXES=3, BLOCK=1024), 90, enable_fp_fusion=False)
assert "fma.rn.f32" not in farthest  # multiplication and addition are rounded apart, as the definition rounds them
print("compiled")
"""


def test_compiles_for_two_generations_of_processors(compile_without_gpu):
    compile_without_gpu(COMPILED)
