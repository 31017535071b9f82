"""Layers that pass messages: equal to PyG's where it is installed, else to sums over edges; padding means nothing."""

import copy
import math

import pytest
import torch

from sparseattn.baselines.messages import (
    DynamicEdgeLayer,
    GatedLayer,
    GCNLayer,
    GravNetLayer,
    MessageNetwork,
    near_others,
)

NAMES = "gcn", "dgcnn", "gravnet", "gatedgnn"


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def shaken(layer, seed=0):
    torch.manual_seed(seed)
    layer = layer.double()
    for parameter in layer.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return layer


def edges(index):
    "Sources and targets."
    n, k = index.shape
    return torch.stack([index.flatten(), torch.arange(n).repeat_interleave(k)])


def test_near_others_leave_the_point_out():
    places = torch.tensor([[[0.0], [0.0], [0.0], [5.0], [6.0]]])  # three in one place
    index, there = near_others(places, 2)
    assert there.all() and not (index == torch.arange(5)[:, None]).any()
    assert index[0, 4].tolist() == [3, 0]
    index, there = near_others(places, 3, torch.tensor([[True, True, False, False, True]]))
    assert there[0, [0, 1, 4]].sum(1).tolist() == [2, 2, 2]
    assert sorted(index[0, 4][there[0, 4]].tolist()) == [0, 1]


def test_gcn_is_pygs():
    nn = pytest.importorskip("torch_geometric.nn")
    x, rho, layer = numbers(1, 20, 5), numbers(1, 20, 2, seed=1), shaken(GCNLayer(5, 7))
    index, there = near_others(rho, 4)
    theirs = nn.GCNConv(5, 7).double()
    theirs.lin.weight.data, theirs.bias.data = layer.linear.weight.data, layer.bias.data
    pairs = edges(index[0])
    weight = (-(rho[0, pairs[0]] - rho[0, pairs[1]]).square().sum(1) / layer.log_width.exp()).exp()
    torch.testing.assert_close(layer(x, rho, index, there)[0], theirs(x[0], pairs, weight))


def test_gravnet_is_pygs():
    nn, utils = pytest.importorskip("torch_geometric.nn"), pytest.importorskip("torch_geometric.utils")
    x, layer = numbers(1, 20, 5), shaken(GravNetLayer(5, 7, k=4, space=3, sent=6))
    space = layer.space(x[0])
    near = torch.cdist(space, space).argsort(1)[:, :4]
    pairs = edges(near)
    weight = (-(space[pairs[0]] - space[pairs[1]]).square().sum(1) * layer.log_width.exp()).exp()

    assert utils.degree(pairs[1]).eq(4).all()
    messages = layer.send(x[0])[pairs[0]] * weight[:, None]
    sent = nn.MultiAggregation(["mean", "max"])(messages, pairs[1])
    torch.testing.assert_close(layer(x)[0], layer.own(x[0]) + layer.read(sent))


@pytest.mark.parametrize("beta", [10.0, 1.0, 0.3])
def test_gravnet_starts_where_it_is_told(beta):
    """Messages of an untrained layer fall with the squared distance as exp(-beta d^2)."""
    torch.manual_seed(0)
    layer = MessageNetwork(5, 2, layer="gravnet", dim=5, depth=1, k=20, beta=beta).double().layers[0]
    x, rows = numbers(1, 20, 5), []
    space = layer.space(x[0])
    for place in space:
        sent = (-beta * (space - place).square().sum(-1)).exp()[:, None] * layer.send(x[0])
        rows.append(torch.cat([sent.mean(0), sent.amax(0)]))
    expected = layer.own(x[0]) + layer.read(torch.stack(rows))
    torch.testing.assert_close(layer(x)[0], expected, rtol=1e-5, atol=1e-6)  # the start is float32's logarithm


def test_dynamic_edges_are_pygs():
    nn = pytest.importorskip("torch_geometric.nn")
    x, layer = numbers(1, 20, 5), shaken(DynamicEdgeLayer(5, 7, k=4, space=3))
    relu = torch.nn.ReLU()
    net = torch.nn.Sequential(layer.first, layer.norms[0], relu, layer.second, layer.norms[1], relu)
    space = x[0] @ layer.space.double().T
    near = torch.cdist(space, space).argsort(1)[:, :4]
    theirs = nn.EdgeConv(net, aggr="mean")  # draws the network anew, for both
    torch.testing.assert_close(layer(x)[0], theirs(x[0], edges(near)))


def test_gated_layer_edge_by_edge():
    x, rho, layer = numbers(1, 9, 3), numbers(1, 9, 2, seed=1), shaken(GatedLayer(3, 4))
    index, there = near_others(rho, 3)
    count, whole, rows = torch.tensor([math.log(9)]).double(), x[0].mean(0), []
    for i in range(9):
        total = 0
        for j in index[0, i].tolist():
            offset = rho[0, j] - rho[0, i]
            near = (-(offset**2).sum() / layer.log_width.exp()).exp()
            message = torch.cat([x[0, j], x[0, i], whole, offset, near[None], count])
            total = total + layer.gate(message).sigmoid() * message
        heard = total / 3
        keep = layer.keep(torch.cat([heard, x[0, i], whole, count])).sigmoid()
        rows.append((keep * layer.own(x[0, i]) + (1 - keep) * layer.heard(heard)).relu())
    torch.testing.assert_close(layer(x, rho, index, there)[0], torch.stack(rows))


@pytest.mark.parametrize("name", NAMES)
def test_padding_and_order_mean_nothing(name):
    model = shaken(MessageNetwork(5, 3, 2, layer=name, dim=8, depth=2, k=4)).eval()
    x, rho, mask = numbers(2, 20, 5), numbers(2, 20, 3, seed=1), torch.ones(2, 20, dtype=torch.bool)
    mask[1, 2:19] = False
    out, order = model(x, rho, mask), torch.randperm(20)
    assert out.isfinite().all() and not out[~mask].any()
    torch.testing.assert_close(model(x[:, order], rho[:, order], mask[:, order]), out[:, order])
    torch.testing.assert_close(model(x[1:, mask[1]], rho[1:, mask[1]]), out[1:, mask[1]])
    assert torch.equal(model(*(part.masked_fill(~mask[..., None], math.nan) for part in (x, rho)), mask), out)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_reach_every_parameter(name):
    model = shaken(MessageNetwork(5, 3, 2, layer=name, dim=8, depth=2, k=4, dropout=0.0))
    model(numbers(2, 20, 5), numbers(2, 20, 3, seed=1)).sin().sum().backward()
    assert not [key for key, p in model.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("name", NAMES)
def test_one_point(name):
    model = MessageNetwork(5, 3, 2, layer=name, dim=8, depth=1).double()
    assert model(numbers(1, 1, 5), numbers(1, 1, 3)).isfinite().all()


@pytest.mark.parametrize("call, message", [
    (lambda: MessageNetwork(5, 3, layer="gat"), "layer must be one of"),
    (lambda: MessageNetwork(5, 3, layer="gcn", beta=1.0), "beta needs layer='gravnet'"),
    (lambda: GravNetLayer(5, 3, beta=0), "beta must be positive"),
    (lambda: MessageNetwork(5, 3, k=0), "k must be an integer >= 1"),
    (lambda: MessageNetwork(5, 3)(torch.zeros(1, 4, 6), torch.zeros(1, 4, 3)), "x must have 5 channels"),
    (lambda: MessageNetwork(5, 3)(torch.zeros(1, 4, 5), torch.zeros(1, 4, 2)), "coords must have shape"),
    (lambda: GravNetLayer(5, 3, space=0), "space must be an integer >= 1"),
])
def test_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_refuses_another_dtype_than_the_weights():
    x = torch.randn(1, 20, 5).double()
    for call in (lambda: MessageNetwork(5, 3)(x, x[..., :3]), lambda: MessageNetwork(5, 3, layer="gcn")(x, x[..., :3])):
        with pytest.raises(TypeError, match="x must have the dtype of weight, torch.float32, got torch.float64"):
            call()


def test_gated_layer_of_a_large_cloud_in_half_precision():
    """Sums and numbers of points beyond 65,504, where float16 ends."""
    torch.manual_seed(0)
    x, coords = torch.randn(1, 70_000, 4) + 1, torch.rand(1, 70_000, 2)
    index = torch.zeros(1, 70_000, 1, dtype=torch.int64)
    layer, there = GatedLayer(4, 6, coord_dims=2), torch.ones(1, 70_000, 1, dtype=torch.bool)
    for mask in (None, torch.ones(1, 70_000, dtype=torch.bool)):
        out = layer(x, coords, index, there, mask)
        low = copy.deepcopy(layer).half()(x.half(), coords, index, there, mask)
        assert low.dtype == torch.float16
        torch.testing.assert_close(low.float(), out, rtol=0.05, atol=0.02)
