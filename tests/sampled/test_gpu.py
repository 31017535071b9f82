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

    (given, grad, _), form = _given(33, (), False, False, torch.float16), (2, 3, False)
    out, share = gpu.attend(*_to(given), form, 0.3)
    found = out, *gpu.attend_backward(*_to(given), share, form, 0.3, grad.to(DEVICE))
    wide = *(x.float() for x in given[:3]), *given[3:]
    exact, of_wide = attention._attend(*wide, form, 0.3)
    expected = exact, *attention._attend_backward(*wide, of_wide, form, 0.3, grad.float())
    assert share.dtype == torch.float32
    for x, y in zip(found, expected, strict=True):
        assert x.dtype == torch.float16
        torch.testing.assert_close(x.cpu().float(), y, rtol=2e-3, atol=1e-4)  # one rounding, at the end


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


@pytest.mark.parametrize("name", ["k", "v", "order", "mask"])
def test_what_lies_on_another_device_is_named(name):
    x, mask = torch.zeros(1, 1, 5, 4, device=DEVICE), torch.ones(1, 5, dtype=torch.bool, device=DEVICE)
    tensors = dict(q=x, k=x, v=x, order=sample_cycle(5, device=DEVICE), mask=mask)
    tensors[name] = tensors[name].to("meta")
    with pytest.raises(ValueError, match=f"{name} must lie on {DEVICE}"):
        attention.cycle_attention(**tensors)


COMPILED = """
from sparseattn.sampled import gpu

types = dict.fromkeys(("n", "heads", "by_cloud", "by_head"), "i32") | dict.fromkeys(("order", "count"), "*i64")
constants = dict(SCALE=0.125, D=64, E=64, D_ALL=64, E_ALL=64, REAL=tl.float32, PLACES=16, BY_POINT=True, PADDED=True)
for kernel, processor in ((gpu._forward, 90), (gpu._backward, 80), (gpu._backward, 90)):
    compiled(kernel, processor, types, constants)
"""


def test_compiles_for_two_generations_of_processors(compile_without_gpu):
    compile_without_gpu(COMPILED)
