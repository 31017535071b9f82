"""The attentions of HEPT's Table 1: each equals its quadratic form or equation, and meets its limits."""

import math

import pytest
import torch

from sparseattn.baselines.clouds import (
    FLTAttention,
    FlatFormerLayer,
    cluster_counts,
    clustered_attention,
    flatformer_layers,
    gaussian_as_softmax,
    gaussian_performer,
    lifted,
    offset_features,
    projected_order,
    scatterbrain_attention,
    window_order,
)
from sparseattn.baselines.transformers import orthogonal_features
from sparseattn.core.attention import dense_attention
from sparseattn.core.kernels import append_coordinates
from sparseattn.core.transformer import Encoder, make_attention

SMALL = {
    "smyrf": dict(size=5),
    "smyrf_k": dict(size=5, coord_dims=2),
    "scatterbrain": dict(size=5, features=8),
    "flatformer": dict(size=5, slices=3),
    "flatformer_k": dict(size=5, slices=3, coord_dims=2),
    "flt": dict(coord_dims=2, features=8, offsets=3),
    "performer_k": dict(coord_dims=2, features=8),
    "point_transformer": dict(coord_dims=2, k=4),
}


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def qkv(n=22, d=6):
    return [numbers(2, 3, n, d, seed=seed) for seed in range(3)]


def orders(n=22, tables=3):
    return [numbers(2, 3, tables, n, seed=seed).argsort(-1) for seed in (7, 8)]


def gap(n=22):
    mask = torch.ones(2, n, dtype=torch.bool)
    mask[1, 3:9] = False
    return mask


def with_gradients(function, tensors):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    return out, *torch.autograd.grad(out.sin().sum(), leaves)


@pytest.mark.parametrize("mask", [None, gap()], ids=["all", "masked"])
@pytest.mark.parametrize("tables, size", [(1, 4), (1, 22), (2, 5), (3, 7), (2, 40), (3, 1)])
def test_clusters_are_their_quadratic_forms(tables, size, mask):
    both, features = orders(tables=tables), numbers(3, 9, 6, seed=3)
    for function in (
        lambda *x, impl: clustered_attention(*x, *both, size=size, mask=mask, impl=impl),
        lambda *x, impl: scatterbrain_attention(*x, *both, features=features, size=size, mask=mask, impl=impl),
    ):
        fast, slow = (with_gradients(lambda *x, i=i, f=function: f(*x, impl=i), qkv()) for i in ("fast", "reference"))
        torch.testing.assert_close(fast, slow, rtol=1e-8, atol=1e-9)


def test_one_cluster_is_softmax_attention():
    for function in (clustered_attention, lambda *x, **o: scatterbrain_attention(*x, features=numbers(1, 4, 6), **o)):
        out = function(*qkv(), *orders(), size=22, mask=gap())
        expected = dense_attention(*qkv(), mask=gap()).masked_fill(~gap()[:, None, :, None], 0)
        torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-10)


def test_counts_by_hand():
    order_q, order_k = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]]), torch.tensor([[3, 2, 1, 0], [3, 2, 1, 0]])
    found = cluster_counts(order_q[None, None], order_k[None, None], 2)[0, 0]
    assert found.tolist() == [[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    alone = torch.tensor([[True, True, True, False]])
    found = cluster_counts(order_q[None, None, :1], order_k[None, None, :1], 2, alone)[0, 0]
    assert found.tolist() == [[0, 1, 1, 0], [0, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
def test_large_scores_stay_finite_in_float32(scale):
    q, k, v = (x.float() for x in qkv())
    features = orthogonal_features(8, 6)
    for out in (
        clustered_attention(scale * q, scale * k, v, *orders(), size=5),
        scatterbrain_attention(scale * q, scale * k, v, *orders(), features=features, size=5),
        gaussian_performer(scale * q, scale * k, v, features=features),
    ):
        assert out.isfinite().all()


@pytest.mark.parametrize("tables", [1, 3])
def test_weights_below_rounding_are_left_out_and_nothing_else(tables):
    (q, k, v), both = qkv(), orders(tables=tables)
    inputs = 8 * q, 8 * k, v
    scores = inputs[0] @ inputs[1].mT * 6**-0.5
    assert (scores - scores.amax(-1, keepdim=True) < -40).any()
    fast, slow = (with_gradients(lambda *x, i=i: clustered_attention(*x, *both, size=7, impl=i), inputs)
                  for i in ("fast", "reference"))
    torch.testing.assert_close(fast, slow, rtol=1e-8, atol=1e-9)


def test_kernel_by_features_written_out_far_from_the_centre():
    (q, k, v), features = qkv(), numbers(3, 9, 6, seed=3)
    inputs = 4 * q, 4 * k, v

    def written(q, k, v):
        exponents = q @ features.mT, k @ features.mT - k.square().sum(-1, keepdim=True)
        return (exponents[0][..., :, None, :] + exponents[1][..., None, :, :]).logsumexp(-1).softmax(-1) @ v

    exponents = inputs[1] @ features.mT - inputs[1].square().sum(-1, keepdim=True)
    assert (exponents - exponents.amax(-2, keepdim=True) < -40).any()
    found = with_gradients(lambda *x: gaussian_performer(*x, features=features), inputs)
    expected = with_gradients(written, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-9)


def test_lift_turns_inner_products_into_distances():
    q, k, _ = qkv()
    a, b = lifted(q, 3 * k)
    far = torch.cdist(a, b).square()
    for row in (far + 2 * q @ (3 * k).mT).flatten(2).unbind(1):
        torch.testing.assert_close(row, row[:, :1].expand_as(row))


def test_projections_sort():
    x, a = numbers(2, 3, 22, 6), numbers(3, 4, 6, seed=1)
    order = projected_order(x, a)
    along = torch.einsum("hte,bhne->bhtn", a, x).gather(-1, order)
    assert (along.diff(dim=-1) >= 0).all()


def test_kernel_is_a_softmax():
    q, k, v = qkv()
    expected = dense_attention(q, k, v, kernel="gaussian")
    torch.testing.assert_close(dense_attention(*gaussian_as_softmax(q, k), v, scale=1.0), expected)


def test_offset_features_have_the_law_they_should():
    place = torch.tensor([[[0.0, 0.0], [0.3, 0.1], [0.0, 1.0]]], dtype=torch.float64)
    omega, alpha = torch.tensor([[2.0, 0.5]], dtype=torch.float64), torch.tensor([3.0], dtype=torch.float64)
    psi = offset_features(place, numbers(1, 400_000, 2), omega, alpha)[0, 0]
    law = 3 * (-(place[0] - place[0, 1]).square() @ omega[0]).exp()
    torch.testing.assert_close(psi @ psi[1], law, rtol=0, atol=0.03)
    torch.testing.assert_close(psi.square().sum(-1), torch.full((3,), 3.0, dtype=torch.float64))


def test_random_features_approach_the_kernel():
    q, k, v = (0.3 * x for x in qkv())
    out = gaussian_performer(q, k, v, features=orthogonal_features(30_000, 6), mask=gap())
    expected = dense_attention(q, k, v, kernel="gaussian", mask=gap()).masked_fill(~gap()[:, None, :, None], 0)
    torch.testing.assert_close(out, expected, rtol=0, atol=0.02)


def test_flt_approaches_softmax_with_an_offset():
    torch.manual_seed(0)
    layer, rho = FLTAttention(6, 1, coord_dims=2, offsets=200, features=30_000).double(), numbers(1, 22, 2)
    q, k, v = (0.3 * x[:1, :1] for x in qkv())
    offset = (-(2.3 * torch.ones(1)).exp() * (rho[:, None, :, None] - rho[:, None, None]).square().sum(-1)).exp()
    expected = (q @ k.mT * 6**-0.5 + offset).softmax(-1) @ v
    torch.testing.assert_close(layer._attend(q, k, v, rho, None), expected, rtol=0, atol=0.03)


def test_flt_by_group_written_out():
    """The first two coordinates together, the others alone; each with a height, a decay and frequencies of its own."""
    torch.manual_seed(0)
    layer = FLTAttention(6, 2, coord_dims=4, offsets=3, features=8, head_dim=6, by_group=True).double()
    (q, k, v), rho = (0.3 * x[:1, :2] for x in qkv()), numbers(1, 22, 4)
    for h in range(2):
        parts = []
        for g, columns in enumerate(([0, 1], [2], [3])):
            weights = layer.rpe.weight[6 * h : 6 * h + 6, 10 * g : 10 * g + 10].sum(0).exp()
            height, decay = weights[:5].sum(), weights[5:].sum()
            angle = (decay.sqrt() * rho[0][:, columns]) @ layer.frequencies[h][:, columns].T
            parts += [(height / 3).sqrt() * angle.cos(), (height / 3).sqrt() * angle.sin()]
        a, b = (torch.cat([x[0, h] * 6**-0.25, *parts], -1) for x in (q, k))
        to_a, to_b = ((x @ layer.features[h].T - x.square().sum(-1, keepdim=True) / 2).exp() for x in (a, b))
        weight = to_a @ to_b.T
        expected = weight / weight.sum(-1, keepdim=True) @ v[0, h]
        torch.testing.assert_close(layer._attend(q, k, v, rho, None)[0, h], expected)


def test_flt_by_group_starts_where_the_released_code_does():
    """Heights and twice the decays are sums of five exponentials of 24 weights between +-50 ** -0.5."""
    torch.manual_seed(0)
    layer = FLTAttention(24, 400, coord_dims=6, offsets=1, features=1, head_dim=24, by_group=True)
    with torch.no_grad():
        height, decay = layer._gaussians()
    mean = 5 * (math.sinh(50**-0.5) / 50**-0.5) ** 24
    assert height.shape == (400, 5) and decay.shape == (400, 6) and torch.equal(decay[:, 0], decay[:, 1])
    assert height.mean().item() == pytest.approx(mean, rel=0.02)
    assert decay.mean().item() == pytest.approx(mean / 2, rel=0.02)


def test_windows_by_hand():
    """Two windows each way: first row left to right, second row back; cells inside likewise."""
    place = torch.tensor([[[0.0, 0.0], [1.0, 0.1], [0.9, 0.9], [0.1, 1.0], [0.2, 0.0]]])
    assert window_order(place, 2, cells=10).tolist() == [[0, 4, 1, 2, 3]]
    assert window_order(place, 2, cells=10, second=True).tolist() == [[0, 4, 3, 2, 1]]
    assert window_order(place, 1, cells=1).tolist() == [[0, 3, 4, 2, 1]]  # one cell: by the coordinates


def test_windows_keep_their_points_together():
    place = torch.rand(1, 300, 2, generator=torch.Generator().manual_seed(0))
    low, high = place.amin(1), place.amax(1)
    window = ((place - low) / (high - low) * 100).floor().clamp(max=99).div(25).floor()
    window = window[0, window_order(place, 4, cells=100)[0]]
    assert (window.diff(dim=0).abs().sum(1) > 0).sum() == 15  # sixteen windows, each left once
    assert window.diff(dim=0).abs().sum(1).max() == 1  # for the next one


@pytest.mark.parametrize("name", SMALL)
def test_order_of_the_list_and_padding_mean_nothing(name):
    torch.manual_seed(0)
    layer, x, rho = make_attention(name, 8, 4, **SMALL[name]).double(), numbers(2, 22, 8), numbers(2, 22, 2, seed=5)
    out, order = layer(x, rho, gap()), torch.randperm(22)
    torch.testing.assert_close(layer(x[:, order], rho[:, order], gap()[:, order]), out[:, order])
    assert torch.equal(layer(*(part.masked_fill(~gap()[..., None], math.nan) for part in (x, rho)), gap()), out)
    torch.testing.assert_close(layer(x[1:, gap()[1]], rho[1:, gap()[1]]), out[1:, gap()[1]])


@pytest.mark.parametrize("name", [name for name in SMALL if name != "point_transformer"])
def test_places_alone_may_move_together(name):
    """A cloud that moves attends as before."""
    torch.manual_seed(0)
    layer, x, rho = make_attention(name, 8, 4, **SMALL[name]).double(), numbers(2, 22, 8), numbers(2, 22, 2, seed=5)
    torch.testing.assert_close(layer(x, rho + 5), layer(x, rho), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("name", ["smyrf", "smyrf_k", "scatterbrain", "flatformer", "flatformer_k"])
def test_impl_of_a_layer_is_the_same_function(name):
    outs = []
    for impl in ("fast", "reference"):
        torch.manual_seed(0)
        layer = make_attention(name, 8, 4, impl=impl, **SMALL[name]).double()
        outs.append(layer(numbers(2, 22, 8), numbers(2, 22, 2, seed=5), gap()))
    torch.testing.assert_close(*outs, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("decay", ["direct", "summed"])
@pytest.mark.parametrize("tied", [True, False])
def test_kernel_of_a_layer_is_hepts(tied, decay):
    """One group of all points: the paper's kernel on all pairs."""
    torch.manual_seed(0)
    layer = make_attention("flatformer_k", 8, 2, coord_dims=2, size=22, decay=decay).double()
    x, rho = numbers(1, 22, 8), numbers(1, 22, 2, seed=5)
    if tied:
        layer.key.load_state_dict(layer.query.state_dict())
    q, k, v = (f(x).view(1, 22, 2, 4).transpose(1, 2) for f in (layer.query, layer.key, layer.value))
    omega = torch.full((2, 2), 10.0, dtype=torch.float64)
    if decay == "summed":  # ten exponentials of sums over a head's channels, shared by both coordinates
        omega = layer.decay.rpe.weight.view(2, 4, 10).sum(1).exp().sum(-1, keepdim=True).expand(2, 2)
    q, k = (append_coordinates(part, rho, omega) for part in (q, k))
    expected = layer.out(dense_attention(q, k, v, kernel="gaussian").transpose(1, 2).flatten(2))
    torch.testing.assert_close(layer(x, rho), expected)


@pytest.mark.parametrize("kernel", ["softmax", "hept"])
def test_flatformer_in_turn_written_out(kernel):
    """One order a layer, normalised behind its sums; the code of places is in queries and keys alone."""
    torch.manual_seed(0)
    layers = [layer.double() for layer in flatformer_layers(6, 2, 3, coord_dims=2, kernel=kernel, size=5, slices=3)]
    x, rho = numbers(1, 22, 6), numbers(1, 22, 2, seed=5)
    encoder = Encoder(6, 0, 3).double()
    encoder.layers.extend(layers)
    found = encoder(x, rho, all_layers=True)
    expected = [x[0]]
    for number, layer in enumerate(layers):
        first, turn, part = layers[number // 4 * 4], number % 4, layer.attention
        order = window_order(rho, 3, second=turn < 2, shift=turn % 2 == 1)[0]
        state = expected[-1]
        read = state + first.place(rho)[0] if kernel == "softmax" else state
        q, k, v = (f(y).view(22, 3, 6) for f, y in ((part.query, read), (part.key, read), (part.value, state)))
        out = torch.zeros_like(v)
        for group in order.split(5):
            for h in range(3):
                score = q[group, h] @ k[group, h].T * 6**-0.5
                if kernel == "hept":
                    far = (rho[0][group][:, None] - rho[0][group]).square() @ first.attention.decay()[h]
                    score = -torch.cdist(q[group, h], k[group, h]).square() / 2 - far
                out[group, h] = score.softmax(-1) @ v[group, h]
        state = layer.norm1(state + part.out(out.flatten(1)))
        expected.append(layer.norm2(state + layer.feed(state)))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one[0], other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("kernel", ["softmax", "hept"])
def test_flatformer_in_turn_knows_no_padding(kernel):
    torch.manual_seed(0)
    encoder = Encoder(6, 0, 3).double()
    encoder.layers.extend(flatformer_layers(6, 1, 3, coord_dims=2, kernel=kernel, size=5, slices=3))
    encoder, x, rho = encoder.double(), numbers(2, 22, 6), numbers(2, 22, 2, seed=5)
    out, infos = encoder(x, rho, gap(), return_info=True)
    assert torch.equal(encoder(*(part.masked_fill(~gap()[..., None], math.nan) for part in (x, rho)), gap()), out)
    torch.testing.assert_close(encoder(x[1:, gap()[1]], rho[1:, gap()[1]]), out[1:, gap()[1]])
    assert not out[~gap()].any() and [info.nnz for info in infos] == [3 * (104 + 76)] * 4


@pytest.mark.parametrize("name", SMALL)
def test_info_counts_the_weights(name):
    x, rho = numbers(2, 22, 8).float(), numbers(2, 22, 2, seed=5).float()
    info = make_attention(name, 8, 4, **SMALL[name])(x, rho, gap(), return_info=True)[1]
    pairs = {"flatformer": 4 * (104 + 76), "point_transformer": 4 * (22 + 16), "flt": 0, "performer_k": 0}
    expected = pairs.get(name.removesuffix("_k") if name == "flatformer_k" else name)
    tables = {"smyrf": 3, "smyrf_k": 3, "scatterbrain": 2}.get(name, 0)
    assert info.nnz == (tables * pairs["flatformer"] if expected is None else expected)
    assert info.flops > 0 or name == "none"


@pytest.mark.parametrize("name", ["point_transformer"])
def test_point_transformer_is_pygs(name):
    nn = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    layer, x, rho = make_attention(name, 8, 2, coord_dims=2, k=5).double(), numbers(1, 22, 8), numbers(1, 22, 2, seed=5)
    theirs = nn.PointTransformerConv(8, 8, pos_nn=layer.place, attn_nn=layer.score).double()
    for ours, name_ in ((layer.query, "lin_dst"), (layer.key, "lin_src"), (layer.value, "lin")):
        getattr(theirs, name_).weight.data.copy_(ours.weight)
    near = torch.cdist(rho[0], rho[0]).argsort(1)[:, 1:5]
    edges = torch.stack([near.flatten(), torch.arange(22).repeat_interleave(4)])
    torch.testing.assert_close(layer(x, rho)[0], layer.out(theirs(x[0], rho[0], edges)))


def test_neighbours_in_a_plane_point_by_point():
    """The nearest by the first two coordinates, offsets by all three."""
    torch.manual_seed(0)
    layer = make_attention("point_transformer", 8, 2, coord_dims=3, k=5, plane=2).double()
    x, rho = numbers(1, 22, 8), numbers(1, 22, 3, seed=5)
    rows = []
    for i in range(22):
        near = (rho[0, i, :2] - rho[0, :, :2]).square().sum(-1).argsort()[:5]
        delta = layer.place(rho[0, i] - rho[0, near])
        weight = layer.score(layer.query(x[0, i]) - layer.key(x[0, near]) + delta).softmax(0)
        rows.append(layer.out((weight * (layer.value(x[0, near]) + delta)).sum(0)))
    torch.testing.assert_close(layer(x, rho)[0], torch.stack(rows))
    everywhere = make_attention("point_transformer", 8, 2, coord_dims=3, k=5).double()
    everywhere.load_state_dict(layer.state_dict())
    assert not torch.allclose(everywhere(x, rho), layer(x, rho))


@pytest.mark.parametrize("change, message", [
    (lambda q, k, v, a, b: clustered_attention(q, k, v, a.double(), b, size=4), "order_q must be an int64 tensor"),
    (lambda q, k, v, a, b: clustered_attention(q, k, v, a, b[..., :-1], size=4), "order_k must have shape"),
    (lambda q, k, v, a, b: clustered_attention(q, k, v, a * 0, b, size=4), "order_q must hold every point once"),
    (lambda q, k, v, a, b: clustered_attention(q, k, v, a, b[:, :, :1], size=4), "order_q and order_k must have one"),
    (lambda q, k, v, a, b: clustered_attention(q, k, v, a, b, size=0), "size must be an integer >= 1"),
    (lambda q, k, v, a, b: scatterbrain_attention(q, k, v, a, b, size=4, features=v[0]), "features must have shape"),
    (lambda q, k, v, a, b: make_attention("flatformer", 8, 2)(q[:, 0, :, :1].expand(-1, -1, 8)), "coords are needed"),
    (lambda q, k, v, a, b: make_attention("smyrf", 8, 2, kernel="gauss"), "kernel must be one of"),
    (lambda q, k, v, a, b: make_attention("smyrf", 8, 2, kernel="hept"), "coord_dims must be an integer >= 1"),
    (lambda q, k, v, a, b: make_attention("point_transformer", 8, 2, coord_dims=2, plane=3), "plane must be at most"),
    (lambda q, k, v, a, b: make_attention("flatformer", 8, 2, turn=4), "turn must be one of"),
    (lambda q, k, v, a, b: window_order(q[:, 0], 5, cells=4), "cells must be an integer >= 5"),
])
def test_refuses(change, message):
    with pytest.raises((TypeError, ValueError), match=message):
        change(*(x.float() for x in qkv()[:2]), qkv(d=5)[2].float(), *orders())


def test_every_trained_number_of_flt_is_used():
    for by_group in (False, True):
        layer = FLTAttention(16, 4, coord_dims=3, by_group=by_group)
        layer(torch.randn(2, 10, 16), torch.rand(2, 10, 3)).square().sum().backward()
        assert all(p.grad is not None for p in layer.parameters() if p.requires_grad)


def test_padding_reaches_no_gradient_of_flatformer():
    layer = FlatFormerLayer(8, 2, coord_dims=2, size=4, slices=3)
    x, mask = torch.randn(1, 6, 8), torch.arange(6)[None] < 5
    layer(x.masked_fill(~mask[..., None], math.nan), torch.rand(1, 6, 2), mask).square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters() if p.grad is not None)


def test_windows_that_cannot_be_shifted_are_refused():
    places = torch.rand(1, 50, 2)
    window_order(places, 500, shift=True)
    window_order(places, 501)
    with pytest.raises(ValueError, match="cells"):
        window_order(places, 501, shift=True)


def test_more_slices_than_a_plane_has_cells_for_are_refused():
    for turn, most in ((None, 500), (0, 1000), (2, 500)):
        make_attention("flatformer", 8, 2, slices=most, turn=turn)(torch.randn(1, 9, 8), torch.rand(1, 9, 2))
        with pytest.raises(ValueError, match=f"slices must be at most {most}"):
            make_attention("flatformer", 8, 2, slices=most + 1, turn=turn)


def test_a_layer_that_needs_places_says_so():
    with pytest.raises(ValueError, match="coords must have shape"):
        flatformer_layers(16, 1, 4, coord_dims=2)[0](torch.randn(1, 9, 16), None)
