"""The network of Table 3 without the spatial kernel."""

import torch
from sparseattn.studies.tracking import OriginalKernel


def test_the_original_kernel_learns_in_every_part():
    """Points, queries, keys, values and the encoding of positions all get a gradient."""
    torch.manual_seed(0)
    layer = OriginalKernel(8, 2, coord_dims=3, tables=2, block_size=10).double()
    x = torch.randn(2, 40, 8, dtype=torch.float64, requires_grad=True)
    layer(x, torch.rand(2, 40, 3, dtype=torch.float64)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in (x, *layer.parameters()))
    assert {"query", "value", "encode", "out"} <= {name.split(".")[0] for name, _ in layer.named_parameters()}
