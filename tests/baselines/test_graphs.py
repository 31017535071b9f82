"""PointNet, PointNet++ and DGCNN: layers against their equations and PyTorch Geometric's, masks, order, batches."""

import copy
import functools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sparseattn.baselines.graphs import (
    DGCNN,
    EdgeConv,
    FeaturePropagation,
    PointNet,
    PointNet2,
    SetAbstraction,
    ball_query,
    edge_features,
    neighbours,
    orthogonality,
)
from sparseattn.core.points import interpolate, knn

NETWORKS, TASKS = (PointNet, PointNet2, DGCNN), ("shape", "parts", "scene")
each = pytest.mark.parametrize("network", NETWORKS)
every_task = pytest.mark.parametrize("task", TASKS)
SIZES = (40, 4, 25)
LEVELS = {2: ((12, 0.5, 8, (8, 12)), (5, 0.9, 4, (12, 16)))}
LEVELS[4] = tuple((m, r, 4, (8, 8)) for m, r in ((20, 0.3), (10, 0.5), (5, 0.8), (2, 1.2)))


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def padded(n=40, sizes=SIZES):
    return torch.arange(n) < torch.tensor(sizes)[:, None]


def clouds(features=2, dtype=torch.float64, n=40):
    """Coordinates within a ball, features, mask and categories of three clouds."""
    return 0.5 * normal(3, n, 3, dtype=dtype), normal(3, n, features, seed=1, dtype=dtype), padded(n), torch.tensor(
        [0, 3, 1])


def made(network, task="shape", features=2, dtype=torch.float64, **options):
    """A model in evaluation mode with weights and statistics away from where they start."""
    return copy.deepcopy(drawn(network, task, features, **options)).to(dtype)


@functools.cache
def drawn(network, task, features, **options):
    """The same in double precision, drawn once."""
    if network is PointNet2:
        options = {"levels": LEVELS[4 if task == "scene" else 2], **options}
    if network is DGCNN:
        options = {"k": 6, **options}
    torch.manual_seed(0)
    model = network(5, task=task, features=features, categories=4 * (task == "parts"), **options).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model.double()


def run(model, points, features, mask, kind, **options):
    return model(points, features if model.features else None, mask, kind if model.categories else None, **options)


# ---- neighbours


@pytest.mark.parametrize("k", [1, 3, 25, 99])
def test_neighbours_of_padded_clouds_are_those_alone(k):
    points, _, mask, _ = clouds()
    near = neighbours(points, k, mask=mask)
    assert near.shape == (3, 40, min(k, 40))
    for b, real in enumerate(SIZES):
        most = min(k, real)
        assert torch.equal(near[b, :real, :most], knn(points[b : b + 1, :real], most)[0])
        assert (near[b, :real, most:] == near[b, :real, :1]).all()
    garbage = points.masked_fill(~mask[..., None], math.nan)
    assert torch.equal(neighbours(garbage, k, mask=mask)[mask], near[mask])


def test_neighbours_of_other_queries():
    points, queries = normal(2, 30, 3), normal(2, 7, 3, seed=1)
    expected = torch.cdist(queries, points).argsort(-1)[..., :4]
    assert torch.equal(neighbours(points, 4, queries=queries), expected)


@pytest.mark.parametrize("radius, k", [(0.3, 40), (0.6, 5), (0.01, 4)])
def test_ball_by_brute_force(radius, k):
    points, _, mask, _ = clouds()
    found = ball_query(points, radius, k, queries=points, mask=mask)
    away = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
    away = away.masked_fill(~mask[:, None], torch.inf)
    for b, real in enumerate(SIZES):
        for i in range(real):
            inside = [j for j in away[b, i].argsort().tolist() if away[b, i, j] < radius][:k]
            assert set(found[b, i].tolist()) == set(inside)


def test_empty_ball_has_the_nearest():
    line = torch.tensor([[[0.0], [1.0], [9.0]]])
    assert ball_query(line, 0.5, 2, queries=torch.tensor([[[4.0]]])).tolist() == [[[1, 1]]]


# ---- PointNet++'s layers


@pytest.mark.parametrize("masked", [False, True])
def test_set_abstraction_ball_by_ball(masked):
    torch.manual_seed(0)
    points, x, mask, _ = clouds()
    mask = mask if masked else None
    step = SetAbstraction(2, (8, 6), centres=10, radius=0.5, neighbours=40).double().eval()
    level = step(points, x, mask)
    assert level.points.shape == (3, 10, 3) and level.x.shape == (3, 10, 6)
    for b, real in enumerate(SIZES if masked else (40, 40, 40)):
        there = min(10, real)
        assert masked is (level.mask is not None)
        assert not masked or level.mask[b].tolist() == [c < there for c in range(10)]
        assert level.index[b, :there].unique().numel() == there and level.index[b, :there].max() < real
        for c in range(there):
            inside = (points[b, :real] - level.points[b, c]).norm(dim=1) < 0.5
            rows = torch.cat([points[b, :real][inside] - level.points[b, c], x[b, :real][inside]], -1)
            close(level.x[b, c], step.layers(rows).amax(0))
        assert not level.x[b, there:].any()


def test_set_abstraction_starts_at_the_point_farthest_from_the_centroid():
    points = normal(2, 30, 3)
    level = SetAbstraction(0, (4,), centres=5, radius=1.0, neighbours=4).double()(points, points[..., :0])
    first = (points - points.mean(1, keepdim=True)).norm(dim=-1).argmax(1)
    assert torch.equal(level.index[:, 0], first)


def test_feature_propagation_of_clouds_of_any_size():
    torch.manual_seed(0)
    points, x, queries, skip = normal(3, 8, 3), normal(3, 8, 4, seed=1), normal(3, 20, 3, seed=2), normal(3, 20, 2)
    mask, query_mask, shared = padded(8, (8, 1, 2)), padded(20, (20, 7, 1)), normal(3, 3, seed=3)
    step = FeaturePropagation(4 + 2 + 3, (6, 5)).double().eval()
    out = step(x, points, queries, skip, mask, query_mask, shared)
    for b, (m, n) in enumerate(((8, 20), (1, 7), (2, 1))):
        one = slice(b, b + 1)
        rows = interpolate(x[one, :m], points[one, :m], queries[one, :n], k=min(3, m))
        rows = torch.cat([rows, skip[one, :n], shared[one, None].expand(-1, n, -1)], -1)
        close(out[one, :n], step.layers(rows))
    assert not out[~query_mask].any()


# ---- EdgeConv


def edge_case(widths, masked, training, n=40, k=6, channels=5):
    torch.manual_seed(0)
    conv = EdgeConv(channels, widths).double().train(training)
    for layer in conv.layers:
        nn.init.normal_(layer.norm.weight)
        nn.init.normal_(layer.norm.bias)
        layer.norm.running_mean.normal_()
        layer.norm.running_var.uniform_(0.5, 2)
    mask = padded(n, (n, (n + 1) // 10, (n + 1) // 2)).logical_or(torch.arange(n) == 0) if masked else None
    x = normal(3, n, channels)
    return conv, x, neighbours(x, k, mask=mask), mask


def outcome(conv, x, index, mask, impl):
    conv, x = copy.deepcopy(conv), x.clone().requires_grad_()
    out = conv(x, index, mask, impl=impl)
    weight = torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)
    return out, *torch.autograd.grad((out * weight).sum(), [x, *conv.parameters()]), *conv.buffers()


@pytest.mark.parametrize("widths", [(7,), (7, 4)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("n, k", [(40, 6), (2, 2), (1, 1), (5, 30)])
def test_edgeconv_fast_equals_reference(widths, masked, training, n, k):
    case = edge_case(widths, masked, training, n, k)
    for a, b in zip(outcome(*case, "fast"), outcome(*case, "reference"), strict=True):
        close(a, b, 1e-8)


def test_edgeconv_by_hand():
    conv, x, index, _ = edge_case((3,), False, False)
    layer, out = conv.layers[0], conv(x, index)
    for b, i in ((0, 3), (2, 17)):
        rows = torch.stack([torch.cat([x[b, i], x[b, j] - x[b, i]]) for j in index[b, i]])
        h = (rows @ layer.linear.weight.T - layer.norm.running_mean) / (layer.norm.running_var + 1e-5).sqrt()
        h = h * layer.norm.weight + layer.norm.bias
        close(out[b, i], torch.where(h > 0, h, 0.2 * h).amax(0))


def test_edgeconv_in_evaluation_without_gradients_and_with_them():
    conv, x, index, mask = edge_case((7,), True, False)
    with torch.no_grad():
        quiet = conv(x, index, mask)
    close(quiet, conv(x.requires_grad_(), index, mask), 1e-12)


def test_edgeconv_never_writes_edges_down():
    """One layer in training: no tensor as large as rows for all edges is kept for backward."""
    conv, x, index, _ = edge_case((64,), False, True, n=200, k=20, channels=16)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        conv(x.requires_grad_(), index)
    assert max(sizes) < 3 * 200 * 20 * 16
    sizes.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        conv(x, index, impl="reference")
    assert max(sizes) >= 3 * 200 * 20 * 64


def test_edgeconv_with_one_copy_of_a_point_or_two():
    conv, x, _, _ = edge_case((7,), False, False)
    index = neighbours(x, 6)
    doubled = torch.cat([index, index[..., :3]], -1)
    close(conv(x, doubled), conv(x, index))


@pytest.mark.parametrize("offset, tolerance", [(0.0, 2e-5), (30.0, 2e-3)])
def test_edgeconv_in_single_precision_far_from_the_origin(offset, tolerance):
    """Centring keeps the variance of the edges from cancelling; errors are of float32 at |x| = offset."""
    torch.manual_seed(0)
    conv = EdgeConv(3, (16,)).double()
    x = normal(2, 200, 3) + offset
    index = neighbours(x, 10)
    exact = copy.deepcopy(conv)(x, index, impl="reference")
    for impl in ("fast", "reference"):
        found = copy.deepcopy(conv).float()(x.float(), index, impl=impl)
        assert (found - exact).abs().max() < tolerance


def test_edgeconv_momentum_of_a_running_mean():
    conv, x, index, _ = edge_case((7,), False, True)
    conv.layers[0].norm.momentum = None
    conv.layers[0].norm.reset_running_stats()
    other = copy.deepcopy(conv)
    for scale in (1, 2, 3):
        conv(scale * x, index)
        other(scale * x, index, impl="reference")
    for a, b in zip(conv.buffers(), other.buffers(), strict=True):
        close(a, b)


def test_edge_features_by_hand():
    x = torch.tensor([[[1.0, 2.0], [4.0, 8.0]]])
    found = edge_features(x, torch.tensor([[[0, 1], [1, 0]]]))
    assert found.tolist() == [[[[1, 2, 0, 0], [1, 2, 3, 6]], [[4, 8, 0, 0], [4, 8, -3, -6]]]]


# ---- against PyTorch Geometric, where it is installed


def listed(index):
    """Edges (source, target) of clouds laid end to end."""
    b, n, k = index.shape
    source = (index + n * torch.arange(b)[:, None, None]).flatten()
    return torch.stack([source, torch.arange(b * n).repeat_interleave(k)])


@pytest.mark.parametrize("widths", [(7,), (7, 4)])
@pytest.mark.parametrize("training", [False, True])
def test_edgeconv_equals_pytorch_geometric(widths, training):
    geometric = pytest.importorskip("torch_geometric.nn")
    conv, x, index, _ = edge_case(widths, False, training)
    theirs = geometric.EdgeConv(copy.deepcopy(conv.layers), aggr="max")
    theirs.nn.load_state_dict(conv.layers.state_dict())  # it has drawn new weights
    close(conv(x, index).flatten(0, 1), theirs(x.flatten(0, 1), listed(index)))


def test_set_abstraction_equals_pytorch_geometric():
    geometric = pytest.importorskip("torch_geometric.nn")
    torch.manual_seed(0)
    points, x, _, _ = clouds()
    step = SetAbstraction(2, (8, 6), centres=10, radius=0.5, neighbours=7).double().eval()
    level = step(points, x)

    def local(rows):  # theirs has the features first
        return step.layers(rows.roll(3, -1))

    conv = geometric.PointNetConv(local, add_self_loops=False)
    source = (level.near + 40 * torch.arange(3)[:, None, None]).flatten()
    edges = torch.stack([source, torch.arange(30).repeat_interleave(7)])
    out = conv((x.flatten(0, 1), None), (points.flatten(0, 1), level.points.flatten(0, 1)), edges)
    close(level.x.flatten(0, 1), out)


def test_masked_maximum_equals_pytorch_geometric():
    geometric = pytest.importorskip("torch_geometric.nn")
    model, (points, _, mask, _) = made(PointNet, features=0, transforms=False), clouds()
    rows = model.second(model.first(points[mask]))
    pooled = geometric.global_max_pool(rows, mask.nonzero()[:, 0])
    close(model.head(pooled), model(points, mask=mask))


# ---- the networks


@each
@every_task
def test_networks_ignore_order_padding_and_company(network, task):
    model, data = made(network, task), clouds()
    points, features, mask, kind = data
    out, order = run(model, *data), torch.randperm(40, generator=torch.Generator().manual_seed(3))
    assert out.shape == ((3, 5) if task == "shape" else (3, 40, 5)) and out.isfinite().all()
    moved = run(model, points[:, order], features[:, order], mask[:, order], kind)
    close(moved, out if task == "shape" else out[:, order], 1e-8)
    nan = [x.masked_fill(~mask[..., None], math.nan) for x in (points, features)]
    assert torch.equal(run(model, *nan, mask, kind), out)
    for b, real in enumerate(SIZES):
        one = slice(b, b + 1)
        alone = run(model, points[one, :real], features[one, :real], None, kind[one])
        close(alone, out[one] if task == "shape" else out[one, :real], 1e-8)
        assert task == "shape" or not out[b, real:].any()


@each
@every_task
def test_networks_in_training_ignore_padding(network, task):
    """Outputs, gradients of the weights and running statistics, whatever the padding holds, and however much of it."""
    points, features, mask, kind = clouds()
    outs, longer = [], F.pad(mask, (0, 5))
    for value, seen in ((7.0, mask), (math.nan, mask), (-1e3, longer)):
        model = made(network, task, dropout=0.0).train()
        more = seen.shape[1] - 40
        inputs = [F.pad(x, (0, 0, 0, more)).masked_fill(~seen[..., None], value) for x in (points, features)]
        out = run(model, *inputs, seen, kind)
        out = out if task == "shape" else out[:, :40]
        (out * torch.linspace(-1, 1, 5, dtype=out.dtype)).sum().backward()
        outs.append([out, *(p.grad for p in model.parameters()), *model.buffers()])
    for other in outs[1:]:
        for a, b in zip(outs[0], other, strict=True):
            close(a, b, 1e-7)
    assert all(part.isfinite().all() for part in outs[0])


@each
@every_task
def test_every_weight_is_used(network, task):
    model = made(network, task, dropout=0.0).train()
    run(model, *clouds()).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


@each
@every_task
def test_copies_and_state(network, task):
    model, data = made(network, task), clouds()
    out = run(model, *data)
    assert torch.equal(run(copy.deepcopy(model), *data), out)
    model.train()
    run(model, *data, return_info=True)
    copy.deepcopy(model)  # nothing is left behind that cannot be copied
    other = made(network, task)
    nn.init.zeros_(other.head.out.weight)
    other.load_state_dict(model.state_dict())
    close(run(other.eval(), *data), run(model.eval(), *data))


@each
@every_task
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_networks_keep_their_dtype(network, task, dtype):
    model = made(network, task, dtype=dtype)
    data = clouds(dtype=dtype)
    out = run(model, *data)
    assert out.dtype == dtype and out.isfinite().all()
    if dtype == torch.float32:
        close(out.double(), run(made(network, task), *(x.double() if x.is_floating_point() else x for x in data)), 1e-3)
    model.train()
    run(model, *data).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@each
def test_networks_under_autocast(network):
    model, data = made(network, dtype=torch.float32), clouds(dtype=torch.float32)
    out = run(model, *data)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        low = run(model, *data)
        trained = run(model.train(), *data)
    assert (low.float() - out).abs().max() < 0.15 * out.abs().max() and trained.isfinite().all()


def test_a_norm_that_keeps_no_statistics_takes_their_place():
    model, (points, x, mask, kind) = made(PointNet), clouds()
    for layer in model.modules():
        if isinstance(getattr(layer, "norm", None), nn.BatchNorm1d):
            layer.norm = nn.LayerNorm(layer.norm.num_features, dtype=torch.float64)
    out = run(model, points, x, mask, kind)
    longer = [F.pad(one, (0, 0, 0, 7), value=9.0) for one in (points, x)]
    close(run(model, *longer, F.pad(mask, (0, 7)), kind), out, 1e-9)


@each
def test_padding_means_nothing_without_running_statistics(network):
    model, (points, x, mask, kind) = made(network), clouds()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.track_running_stats, norm.running_mean, norm.running_var = False, None, None
    out = run(model, points, x, mask, kind)
    longer = [F.pad(one, (0, 0, 0, 7), value=9.0) for one in (points, x)]
    close(run(model, *longer, F.pad(mask, (0, 7)), kind), out, 1e-9)


@pytest.mark.parametrize("network, options", [
    (PointNet, dict(transforms=False)),
    (PointNet2, {}),
    (DGCNN, dict(edges=((8,), (8, 8)), task="scene")),
])
def test_compiled(network, options):
    model, data = made(network, dtype=torch.float32, **options), clouds(dtype=torch.float32)
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        close(run(compiled, *data), run(model, *data), 1e-5)
    torch._dynamo.reset()


@each
def test_categories_do_not_break_a_compiled_graph(network):
    points, kind = clouds()[0].float(), torch.tensor([0, 2, 1])
    options = {"levels": LEVELS[2]} if network is PointNet2 else {}
    model = network(5, task="parts", categories=3, **options).eval()
    compiled = torch.compile(model, backend="eager", fullgraph=network is PointNet)
    torch.testing.assert_close(compiled(points, category=kind), model(points, category=kind))
    torch._dynamo.reset()
    breaks = torch._dynamo.explain(model)(points, category=kind).break_reasons
    assert {one.user_stack[-1].name for one in breaks} <= {"uncompiled"}     # searches for neighbours, in all forms
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="category must lie in 0..2"):
        model(points, category=kind + 1)


@each
def test_without_features_categories_or_mask(network):
    points = clouds()[0]
    for task in TASKS:
        options = {"levels": LEVELS[4 if task == "scene" else 2]} if network is PointNet2 else {}
        model = network(5, task=task, **options).double().eval()
        assert model(points).shape == ((3, 5) if task == "shape" else (3, 40, 5))


@each
def test_the_category_matters(network):
    model, (points, features, mask, kind) = made(network, "parts"), clouds()
    out, other = run(model, points, features, mask, kind), run(model, points, features, mask, (kind + 1) % 4)
    assert ((out - other).abs().amax((1, 2)) > 1e-6).all()


def test_pointnet_aligns_from_the_identity():
    torch.manual_seed(0)
    model, (points, *_) = PointNet(5).double().eval(), clouds()
    plain = copy.deepcopy(model)
    plain.align = plain.align_features = None
    out, info = model(points, return_info=True)
    assert torch.equal(info["input"], torch.eye(3).double().expand(3, 3, 3)) and info["features"].shape == (3, 64, 64)
    close(out, plain(points))
    assert orthogonality(info["features"]).item() == 0
    turn = torch.linalg.qr(normal(4, 6, 6))[0]
    close(orthogonality(turn), torch.zeros((), dtype=torch.float64))
    close(orthogonality(2 * turn), torch.tensor(9.0 * 6, dtype=torch.float64))


def test_pointnet_hears_its_critical_points_only():
    model, points = made(PointNet, features=0, transforms=False), normal(1, 3000, 3)
    critical = model.second(model.first(points))[0].argmax(0).unique()
    assert len(critical) <= 1024
    close(model(points[:, critical]), model(points))


def test_what_the_networks_report():
    data = clouds()
    _, levels = run(made(PointNet2), *data, return_info=True)
    assert [level.points.shape[1] for level in levels] == [12, 5]
    assert [level.mask.sum(1).tolist() for level in levels] == [[12, 4, 12], [5, 4, 5]]
    _, info = run(made(DGCNN, "parts"), *data, return_info=True)
    assert len(info["graphs"]) == 3 and info["input"].shape == (3, 3, 3)
    near = neighbours(info["features"][0], 6, mask=data[2])
    assert torch.equal(near[data[2]], info["graphs"][1][data[2]])


def test_pointnet2_sees_shape_and_not_place():
    model, (points, *_) = made(PointNet2, "scene", features=0), clouds()
    close(model(points + 8), model(points), 1e-8)


def count(*widths, norm=True):
    """Weights of layers without bias, with batch normalisation, or of a linear map with bias."""
    pairs = zip(widths, widths[1:], strict=False)
    return sum(a * b + (2 * b if norm else b) for a, b in pairs)


ALIGN3 = count(3, 64, 128, 1024, 512, 256) + count(256, 9, norm=False)
COUNTS = {
    (PointNet, "shape"): ALIGN3 + count(64, 64, 128, 1024, 512, 256) + count(256, 4096, norm=False)
    + count(3, 64, 64, 64, 128, 1024, 512, 256) + count(256, 40, norm=False),
    (PointNet, "parts"): count(3, 64, 128, 1024, 128, 128) + count(128, 9, norm=False)
    + count(128, 256, 1024, 512, 256) + count(256, 128 * 128, norm=False) + count(3, 64, 128, 128, 512, 2048)
    + count(64 + 128 + 128 + 512 + 2048 + 2048 + 16, 256, 256, 128) + count(128, 50, norm=False),
    (PointNet, "scene"): count(9, 64, 64, 64, 128, 1024, 256, 128) + count(1152, 512, 256)
    + count(256, 13, norm=False),
    (PointNet2, "shape"): count(3, 64, 64, 128) + count(131, 128, 128, 256) + count(259, 256, 512, 1024, 512, 256)
    + count(256, 40, norm=False),
    (PointNet2, "parts"): count(3, 64, 64, 128) + count(131, 128, 128, 256) + count(259, 256, 512, 1024)
    + count(1280, 256, 256) + count(384, 256, 128) + count(128 + 3 + 16, 128, 128, 128, 128)
    + count(128, 50, norm=False),
    (PointNet2, "scene"): count(9, 32, 32, 64) + count(67, 64, 64, 128) + count(131, 128, 128, 256)
    + count(259, 256, 256, 512) + count(768, 256, 256) + count(384, 256, 256) + count(320, 256, 128)
    + count(128 + 6, 128, 128, 128, 128) + count(128, 13, norm=False),
    (DGCNN, "shape"): count(6, 64) + count(128, 64) + count(128, 128) + count(256, 256) + count(512, 1024)
    + count(2048, 512, 256) + count(256, 40, norm=False),
    (DGCNN, "parts"): count(6, 64, 128, 1024, 512, 256) + count(256, 9, norm=False) + count(6, 64, 64)
    + count(128, 64, 64) + count(128, 64) + count(192, 1024) + count(16, 64) + count(1280, 256, 256, 128)
    + count(128, 50, norm=False),
    (DGCNN, "scene"): count(18, 64, 64) + count(128, 64, 64) + count(128, 64) + count(192, 1024)
    + count(1216, 512, 256) + count(256, 13, norm=False),
}


@each
@every_task
def test_weights_are_those_of_the_released_networks(network, task):
    """Layer by layer from the released code, without the biases that batch normalisation removes."""
    outputs, features = {"shape": (40, 0), "parts": (50, 0), "scene": (13, 6)}[task]
    model = network(outputs, task=task, features=features, categories=16 * (task == "parts"))
    assert sum(p.numel() for p in model.parameters()) == COUNTS[network, task]


@each
def test_can_learn(network):
    """Balls or boxes, 24 of them: loss falls below a third of where it starts."""
    torch.manual_seed(0)
    x = 2 * torch.rand(24, 32, 3) - 1
    labels = torch.arange(24) % 2
    x[labels == 1] = F.normalize(x[labels == 1], dim=-1)
    options = {PointNet2: {"levels": LEVELS[2]}, DGCNN: {"k": 6, "edges": ((16,), (16,))}}.get(network, {})
    model = network(2, dropout=0.0, **options)
    adam, losses = torch.optim.Adam(model.parameters(), 1e-3), []
    for _ in range(6):
        loss = F.cross_entropy(model(x), labels)
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 3


# ---- bad input


def test_refuses_what_does_not_fit():
    points, features, mask, kind = clouds(dtype=torch.float32)
    model = PointNet(5, task="parts", features=2, categories=4).eval()
    for bad, error, message in (
        ((points[..., :2], features, mask, kind), ValueError, r"points must have shape \(batch, points, 3\)"),
        ((points / 0, features, mask, kind), ValueError, "points holds NaN"),
        ((points.long(), features, mask, kind), TypeError, "points must be a floating-point tensor"),
        ((points, None, mask, kind), ValueError, r"features must be of shape \(3, 40, 2\), got None"),
        ((points, features[:, 1:], mask, kind), ValueError, r"features must be of shape \(3, 40, 2\)"),
        ((points, features / 0, mask, kind), ValueError, "features holds NaN"),
        ((points, features, mask[:, 1:], kind), ValueError, "mask must have shape"),
        ((points, features, mask & (kind > 0)[:, None], kind), ValueError, "real point in every cloud"),
        ((points, features, mask, None), ValueError, r"category must be int64 of shape \(3,\), got None"),
        ((points, features, mask, kind + 1), ValueError, "category must lie in 0..3"),
        ((points, features, mask, kind.float()), ValueError, "category must be int64"),
    ):
        with pytest.raises(error, match=message):
            model(*bad)
    with pytest.raises(ValueError, match="features must be None"):
        PointNet(5).eval()(points, features)
    with pytest.raises(ValueError, match="category must be None"):
        PointNet(5, task="parts").eval()(points, category=kind)
    with pytest.raises(ValueError, match="x must have shape"):
        EdgeConv(4, (8,))(features, neighbours(features, 3))
    with pytest.raises(TypeError, match="index must be a tensor of int64 or int32"):
        EdgeConv(2, (8,))(features, neighbours(features, 3).float())
    with pytest.raises(ValueError, match="index must have shape"):
        EdgeConv(2, (8,))(features, neighbours(features, 3)[:, 1:])
    with pytest.raises(ValueError, match="impl must be"):
        EdgeConv(2, (8,))(features, neighbours(features, 3), impl="quick")
    with pytest.raises(ValueError, match="at least 2 edges"):
        EdgeConv(2, (8,))(features[:1, :1], torch.zeros(1, 1, 1, dtype=torch.long))
    with pytest.raises(ValueError, match="radius must be positive"):
        ball_query(points, 0.0, 3, queries=points)


@pytest.mark.parametrize("make, message", [
    (lambda: PointNet(0), "outputs must be an integer >= 1"),
    (lambda: PointNet(5, task="room"), "task must be one of"),
    (lambda: PointNet(5, features=-1), "features must be an integer >= 1"),
    (lambda: DGCNN(5, categories=4), "categories must be 0 unless"),
    (lambda: DGCNN(5, k=0), "k must be an integer >= 1"),
    (lambda: DGCNN(5, pools=("median",)), "pools must be one of"),
    (lambda: PointNet2(5, levels=LEVELS[4]), "levels must be 2 for 'shape'"),
    (lambda: SetAbstraction(3, (8,), centres=0, radius=1.0, neighbours=4), "centres must be an integer >= 1"),
    (lambda: SetAbstraction(3, (8,), centres=4, radius=1.0, neighbours=0), "neighbours must be an integer >= 1"),
    (lambda: SetAbstraction(3, (8,), centres=4, radius=-1.0, neighbours=4), "radius must be positive"),
    (lambda: neighbours(torch.zeros(1, 3, 2), 0), "k must be an integer >= 1"),
])
def test_refuses_options_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_refuses_another_dtype_than_the_weights():
    points = torch.randn(2, 40, 3).double()
    for call in (lambda: PointNet(3)(points), lambda: PointNet2(3)(points), lambda: DGCNN(3)(points)):
        with pytest.raises(TypeError, match="x must have the dtype of weight, torch.float32, got torch.float64"):
            call()


@pytest.mark.parametrize("network", [PointNet, PointNet2, DGCNN])
def test_norms_may_be_converted(network):
    model, points = network(5).eval(), torch.randn(2, 60, 3)
    mask = torch.arange(60) < torch.tensor([[60], [40]])
    expected, state = model(points, mask=mask), model.state_dict()
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    assert any(isinstance(m, nn.SyncBatchNorm) for m in converted.modules())
    torch.testing.assert_close(converted(points, mask=mask), expected, rtol=1e-4, atol=1e-5)
    assert list(converted.state_dict()) == list(state)


@each
def test_norms_may_have_no_running_statistics(network):
    """Then those of the batch serve, in training and in evaluation, as in training with them."""
    options, x = {"k": 5} if network is DGCNN else {}, torch.rand(4, 40, 3)
    plain = network(5, **options).train()
    for part in plain.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    without = torch.func.replace_all_batch_norm_modules_(copy.deepcopy(plain))
    expected = plain(x)
    torch.testing.assert_close(without(x), expected)
    torch.testing.assert_close(without.eval()(x), expected)


@each
def test_hooks_on_gradients_fire(network):
    net, fired = network(5, **({"k": 5} if network is DGCNN else {})), []
    for part in net.modules():
        part.register_full_backward_hook(lambda part, to_input, to_output: fired.append(part))
    net(torch.rand(2, 40, 3, requires_grad=True)).sum().backward()
    assert net in fired and net.head.out in fired


def test_clouds_of_padding_alone_are_named():
    points, mask = torch.randn(2, 10, 3), torch.arange(10) < torch.tensor([[10], [0]])
    with pytest.raises(ValueError, match="mask must have a real point in every cloud"):
        SetAbstraction(0, (8,), centres=4, radius=0.5, neighbours=3)(points, torch.zeros(2, 10, 0), mask)
    with pytest.raises(ValueError, match="mask must have a real point in every cloud"):
        FeaturePropagation(4, (8,))(torch.randn(2, 10, 4), points, torch.rand(2, 40, 3), mask=mask)
