"""Networks of the tracking study: without the spatial kernel, and with the successor's attention."""

import torch
from sparseattn.studies.tracking import AFTER, STUDY, OriginalKernel, network


def test_the_original_kernel_learns_in_every_part():
    """Points, queries, keys, values and the encoding of positions all get a gradient."""
    torch.manual_seed(0)
    layer = OriginalKernel(8, 2, coord_dims=3, tables=2, block_size=10).double()
    x = torch.randn(2, 40, 8, dtype=torch.float64, requires_grad=True)
    layer(x, torch.rand(2, 40, 3, dtype=torch.float64)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in (x, *layer.parameters()))
    assert {"query", "value", "encode", "out"} <= {name.split(".")[0] for name, _ in layer.named_parameters()}


def test_the_successor_sees_the_direction_alone():
    setting, cloud = STUDY.at("smoke"), torch.rand(1, 40, 6)
    data, x = {"_inputs": (torch.zeros(15), torch.ones(15))}, torch.randn(1, 40, 15)
    moved = torch.cat([cloud[..., :2], cloud[..., 2:] + 1], -1)
    for row in AFTER:
        torch.manual_seed(0)
        model = network(row, setting, data).eval()
        assert torch.equal(model(x, cloud), model(x, moved)) and not torch.equal(model(x, cloud), model(x, cloud.flip(1)))
