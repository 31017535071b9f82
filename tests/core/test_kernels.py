"""Coordinates as further channels, and softmax attention as Gaussian attention, against the formulas written out."""

import pytest
import torch

from sparseattn.core.attention import attention_logits, dense_attention
from sparseattn.core.kernels import CoordinateDecay, append_coordinates, softmax_as_gaussian


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_coordinates_multiply_the_kernel_by_their_own():
    q, k, coords, omega = draw(2, 3, 5, 4), draw(2, 3, 5, 4, seed=1), draw(2, 5, 2, seed=2), draw(3, 2, seed=3).exp()
    found = attention_logits(*(append_coordinates(x, coords, omega) for x in (q, k)), kernel="gaussian")
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(s) for s in (2, 3, 5, 5))).tolist():
        features = 0.5 * (q[b, h, i] - k[b, h, j]).square().sum()
        places = sum(omega[h, c] * (coords[b, i, c] - coords[b, j, c]) ** 2 for c in range(2))
        torch.testing.assert_close(found[b, h, i, j], -features - places, rtol=1e-12, atol=1e-12)


def test_omega_of_zero_changes_no_weight():
    q, k, coords = draw(1, 2, 5, 4), draw(1, 2, 5, 4, seed=1), draw(1, 5, 3, seed=2)
    found = attention_logits(*(append_coordinates(x, coords, torch.zeros(2, 3)) for x in (q, k)), kernel="gaussian")
    torch.testing.assert_close(found, attention_logits(q, k, kernel="gaussian"), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtype_of_the_features_is_kept(dtype):
    out = append_coordinates(torch.zeros(1, 2, 5, 3, dtype=dtype), torch.rand(1, 5, 2), torch.ones(2, 2))
    assert out.dtype == dtype and out.shape == (1, 2, 5, 5)


def test_gradients_of_coordinates_and_omega():
    inputs = [x.requires_grad_() for x in (draw(1, 2, 3, 2), draw(1, 3, 2, seed=1), draw(2, 2, seed=2).exp())]
    assert torch.autograd.gradcheck(append_coordinates, inputs)


@pytest.mark.parametrize("n, m", [(1, 1), (5, 8)])
def test_softmax_attention_is_gaussian_attention(n, m):
    q, k, v = draw(2, 3, n, 4), draw(2, 3, m, 4, seed=1), draw(2, 3, m, 5, seed=2)
    found = dense_attention(*softmax_as_gaussian(q, k), v, kernel="gaussian")
    torch.testing.assert_close(found, dense_attention(q, k, v, scale=1.0), rtol=1e-12, atol=1e-12)


def test_lifted_keys_have_one_norm():
    _, k = softmax_as_gaussian(draw(2, 3, 5, 4), draw(2, 3, 8, 4, seed=1))
    norms = k.square().sum(-1)
    torch.testing.assert_close(norms, norms[..., :1].expand_as(norms), rtol=1e-12, atol=1e-12)


def test_gradients_of_softmax_as_gaussian_equal_those_of_softmax():
    """The longest key is lifted by sqrt(0), whose derivative is infinite; the attention's gradient there is not."""
    inputs = [x.requires_grad_() for x in (draw(1, 2, 5, 4), draw(1, 2, 6, 4, seed=1), draw(1, 2, 6, 3, seed=2))]
    q, k, v = inputs
    ours = dense_attention(*softmax_as_gaussian(q, k), v, kernel="gaussian").square().sum()
    theirs = dense_attention(q, k, v, scale=1.0).square().sum()
    for a, b in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(theirs, inputs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_coordinates_that_do_not_fit_are_refused():
    x, coords = torch.zeros(1, 2, 5, 3), torch.zeros(1, 5, 1)
    with pytest.raises(ValueError, match="must fit"):
        append_coordinates(x, coords, torch.ones(2, 2))
    with pytest.raises(TypeError, match="floating-point"):
        append_coordinates(x.long(), coords, torch.ones(2, 1))
    with pytest.raises(ValueError, match="negative"):
        append_coordinates(x, coords, -torch.ones(2, 1))


def test_decay_forms():
    assert torch.allclose(CoordinateDecay(3, 2)(), torch.tensor(10.0))
    with pytest.raises(ValueError, match="coord_dims must be an integer >= 2"):
        CoordinateDecay(2, 1, "summed", 4)
    summed = CoordinateDecay(2, 3, "summed", 4)
    assert not summed.rpe.bias.requires_grad, "never used: a trained parameter without a gradient stops DDP"
    omega, weight = summed(), summed.rpe.weight
    assert omega.shape == (2, 3)
    for h, c in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        j = max(c - 1, 0)
        terms = [sum(weight[4 * h + d, 10 * j + k] for d in range(4)).exp() for k in range(10)]
        torch.testing.assert_close(omega[h, c], sum(terms))
    with pytest.raises(ValueError, match="decay must be one of"):
        CoordinateDecay(2, 3, "other")
