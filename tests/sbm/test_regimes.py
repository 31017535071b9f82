"""What masks a block model can express: the gap of the inequality, and the bound for blocks."""
import itertools

import pytest
import torch

from sparseattn.sbm.regimes import bell_gap, block_bound


def minors(p):
    "All gaps, one minor at a time."
    n, m = p.shape
    return [(p[i, j] + p[u, v] - 1 - torch.minimum(p[i, v], p[u, j])).item()
            for i, u in itertools.permutations(range(n), 2) for j, v in itertools.permutations(range(m), 2)]


@pytest.mark.parametrize("n,m", [(2, 2), (2, 5), (6, 2), (4, 7)])
@pytest.mark.parametrize("ties", [False, True])
def test_gap_is_the_largest_over_all_minors(n, m, ties):
    g = torch.Generator().manual_seed(n * 10 + m)
    for _ in range(25):
        p = torch.rand(n, m, generator=g, dtype=torch.float64)
        p = (3 * p).round() / 3 if ties else p
        assert bell_gap(p).item() == pytest.approx(max(minors(p)), abs=1e-15)


def test_gap_of_known_matrices():
    assert bell_gap(torch.eye(5)) == 1  # two certain blocks with nothing between them
    assert bell_gap(torch.eye(5) / 2) == 0
    assert bell_gap(torch.full((4, 4), 0.25)) == -0.75
    assert bell_gap(torch.tensor([[1.0, 1.0], [1.0, 0.0]])) == 1  # not a rectangle
    assert bell_gap(torch.tensor([[1.0, 1.0], [0.0, 0.0]])) == 0  # a rectangle


def test_gap_does_not_count_a_row_or_column_twice():
    p = torch.zeros(3, 3)
    p[1, 1] = 1
    assert bell_gap(p) == 0  # 1 + 0 - 1 - 0; a repeated entry would give 1 + 1 - 1 - 1 as well, but never more
    p = torch.tensor([[0.9, 0.1], [0.1, 0.0]])
    assert bell_gap(p).item() == pytest.approx(-0.2)


def test_gap_batches_and_orders():
    p = torch.rand(2, 3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    each = torch.stack([bell_gap(x) for x in p.flatten(0, 1)]).view(2, 3)
    assert torch.equal(bell_gap(p), each)
    rows, columns = torch.randperm(5), torch.randperm(4)
    torch.testing.assert_close(bell_gap(p[..., rows, :][..., columns]), each)
    torch.testing.assert_close(bell_gap(p.mT), each)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gap_keeps_the_dtype(dtype):
    assert bell_gap(torch.eye(3, dtype=dtype)).dtype == dtype
    assert block_bound(torch.tensor([0.0, 0.5], dtype=dtype), 2).dtype == dtype


def test_gradient_of_the_gap():
    p = torch.tensor([[0.8, 0.1], [0.2, 0.7]], dtype=torch.float64, requires_grad=True)
    bell_gap(p).backward()
    assert torch.equal(p.grad, torch.tensor([[1.0, -1.0], [0.0, 1.0]], dtype=torch.float64))


@pytest.mark.parametrize("scale", [0.2, 1.0, 3.0, 8.0])
def test_no_parameters_have_a_positive_gap(scale):
    g = torch.Generator().manual_seed(int(10 * scale))
    queries, keys, clusters = (scale * torch.randn(2000, size, 4, generator=g, dtype=torch.float64)
                               for size in (6, 6, 5))
    s = (clusters @ clusters.mT).flatten(1).softmax(1).view(-1, 5, 5)
    p = (queries @ clusters.mT).sigmoid() @ s @ (keys @ clusters.mT).sigmoid().mT
    assert bell_gap(p).max() <= 1e-12
    flipped = 1 - p[:, 0, 0]  # the check can fail: break one entry of each matrix
    p[:, 0, 0] += flipped
    assert bell_gap(p).max() > 1e-3


@pytest.mark.parametrize("blocks", [2, 3, 5])
def test_block_bound_holds_for_mixtures_and_is_attained(blocks):
    g = torch.Generator().manual_seed(blocks)
    rows, columns = (torch.randint(0, 2, (500, 3, blocks), generator=g, dtype=torch.float64) for _ in range(2))
    weights = torch.rand(500, 3, generator=g, dtype=torch.float64).pow(4)
    p = torch.einsum("sr,sri,srj->sij", weights / weights.sum(1, keepdim=True), rows, columns)
    inside = p.diagonal(dim1=1, dim2=2).mean(1)
    off = (p.sum((1, 2)) - blocks * inside) / (blocks * (blocks - 1))
    assert (inside <= block_bound(off.clamp(0, 1), blocks) + 1e-12).all()
    size = torch.arange(1, blocks + 1, dtype=torch.float64)
    torch.testing.assert_close(block_bound(size * (size - 1) / (blocks * (blocks - 1)), blocks), size / blocks)


def test_bound_for_two_blocks_is_the_inequality():
    off = torch.linspace(0, 1, 11, dtype=torch.float64)
    torch.testing.assert_close(2 * block_bound(off, 2), 1 + off)


def test_bound_for_exact_blocks_is_one_share_each():
    for blocks in (2, 7, 128):
        assert block_bound(torch.zeros(1, dtype=torch.float64), blocks).item() == pytest.approx(1 / blocks)


def test_bad_input():
    with pytest.raises(TypeError, match="floating-point"):
        bell_gap(torch.ones(2, 2, dtype=torch.bool))
    with pytest.raises(TypeError, match="floating-point"):
        bell_gap([[1.0, 0.0], [0.0, 1.0]])
    for shape in ((3,), (1, 4), (4, 1)):
        with pytest.raises(ValueError, match="two rows and two columns"):
            bell_gap(torch.zeros(shape))
    with pytest.raises(ValueError, match="blocks must be an integer >= 2"):
        block_bound(torch.zeros(1), 1)
    for off in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="probabilities"):
            block_bound(torch.tensor([off]), 2)
    with pytest.raises(TypeError, match="floating-point"):
        block_bound(torch.zeros(1, dtype=torch.long), 2)
