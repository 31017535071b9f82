"""SAMSA networks: identity at the start, sets as sets, padding as nothing, Graph-Bridge's invariances, sizes."""

import copy

import pytest
import torch

from sparseattn.baselines import transformers  # noqa: F401  registers performer
from sparseattn.core.attention import check_values
from sparseattn.lab.measure import counted_flops
from sparseattn.samsa.models import (SAMSA_SETTINGS, SIZES, DropPath, EqualScores, GraphBridge, GraphNetwork,
                                     PointNetwork, SAMSAEncoder, SequenceNetwork, choose_at_random, encoder_flops,
                                     encoder_parameters, sampling_layers, set_inference, sinusoids)

SMALL = dict(dim=16, depth=2, heads=4, samples=6)
EDGES = torch.tensor([[[0, 1], [1, 2], [2, 0], [2, 3], [3, 4], [4, 3], [4, 4]]])


def _awake(model):
    model = model.double().eval()
    model.encoder.alpha.data.fill_(0.5)
    return model


def _near(x, y, tolerance=1e-12):
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def _graph(seed=0, nodes=5):
    g = torch.Generator().manual_seed(seed)
    return *(torch.randn(1, *size, generator=g, dtype=torch.float64) for size in ((nodes, 3), (7, 2))), g


@pytest.mark.parametrize("attention", ["samsa", "dense"])
def test_starts_as_the_identity_and_moves_alpha_alone(attention):
    torch.manual_seed(0)
    options = dict(samples=6) if attention == "samsa" else {}
    encoder = SAMSAEncoder(16, 3, 4, attention=attention, **options).double()
    x = torch.randn(2, 20, 16, dtype=torch.float64, requires_grad=True)
    out = encoder(x)
    assert out.equal(x)
    out.square().sum().backward()
    assert encoder.alpha.grad.abs() > 1e-6 and all((p.grad == 0).all() for p in encoder.layers.parameters())
    _near(x.grad, 2 * x)


def test_alpha_gets_the_sum_over_all_parts():
    torch.manual_seed(0)
    encoder, x = SAMSAEncoder(16, 2, 4, samples=6).double().eval(), torch.randn(1, 9, 16, dtype=torch.float64)
    encoder(x).sum().backward()
    parts = [p for layer in encoder.layers for p in (layer.attention(layer.norm1(x)), layer.feed(layer.norm2(x)))]
    _near(encoder.alpha.grad, sum(p.sum() for p in parts), 1e-10)


def test_drop_path_keeps_the_mean_and_drops_whole_samples():
    torch.manual_seed(0)
    out = DropPath(0.25)(torch.ones(4000, 3, 2))
    assert set(out.flatten(1).std(1).tolist()) == {0.0}
    assert abs(out[:, 0, 0].mean() - 1) < 5 * (0.25 / 0.75 / 4000) ** 0.5
    with pytest.raises(ValueError, match="p must lie"):
        DropPath(1.0)


def test_settings():
    assert len(SAMSA_SETTINGS) == 9
    for s in SAMSA_SETTINGS.values():
        assert set(SIZES) <= set(s) and s["dim"] % s["heads"] == 0 and s["tau"] is None
    assert SAMSA_SETTINGS["listops"]["dim"] == 256 and SAMSA_SETTINGS["peptides-func"]["rate"] == 0.0004


@pytest.mark.parametrize("name", list(SAMSA_SETTINGS))
def test_parameters(name):
    size = {key: SAMSA_SETTINGS[name][key] for key in ("depth", "dim", "hidden", "heads")}
    with torch.device("meta"):
        for samples in (128, 512):
            encoder = SAMSAEncoder(**size, samples=samples)
            expected = sum(encoder_parameters(**size, samples=samples).values())
            assert sum(p.numel() for p in encoder.parameters()) == expected
        dense = SAMSAEncoder(**size, attention="dense")
    assert sum(p.numel() for p in dense.parameters()) == sum(encoder_parameters(**size).values())


def test_operations():
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for options, samples in ((dict(attention="dense"), None), (dict(samples=16), 16)):
        net = SAMSAEncoder(32, 2, 4, hidden=48, **options).eval()
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            assert counted_flops(net, torch.randn(1, 50, 32)) == encoder_flops(50, 2, 32, 48, 4, samples=samples)
    assert encoder_flops(128 + 128 + 4, 8, 128, 512, 8) == encoder_flops(260, 8, 128, 512, 8, samples=128)


def test_sinusoids():
    assert sinusoids(5, 7).shape == (5, 7)
    angles = sinusoids(300, 16).double()
    between = angles @ angles.T
    _near(between.diagonal(9), between[0, 9].expand(291), 1e-4)


@pytest.mark.parametrize("pool", ["mean", "max"])
def test_sequences_and_their_padding(pool):
    torch.manual_seed(0)
    net, tokens = _awake(SequenceNetwork(12, 5, pool=pool, **SMALL)), torch.randint(12, (3, 20))
    mask = torch.arange(20) < torch.tensor([[20], [9], [1]])
    padded = net(tokens.masked_fill(~mask, -99), mask)
    for row, m in zip(range(3), mask.sum(1), strict=True):
        _near(net(tokens[row : row + 1, :m]), padded[row : row + 1])
    assert net(tokens, mask & False).isfinite().all()


def test_pairs():
    torch.manual_seed(0)
    net, tokens = _awake(SequenceNetwork(12, 2, pairs=True, **SMALL)), torch.randint(12, (2, 2, 11))
    mask = torch.arange(11) < torch.tensor([[[11], [4]], [[7], [11]]])
    out, infos = net(tokens, mask, return_info=True)
    _near(net(tokens[1:, :, :11], mask[1:]), out[1:])
    assert out.shape == (2, 2) and len(infos) == 2 and not torch.allclose(net(tokens[:, [1, 0]], mask[:, [1, 0]]), out)


@pytest.mark.parametrize("features, options", [(0, {}), (3, {}),
                                               (3, {"per_point": True, "categories": 4, "pool": "max"})])
def test_points_are_a_set(features, options):
    torch.manual_seed(0)
    net = _awake(PointNetwork(5, features, **options, **SMALL))
    cloud, normals = torch.randn(2, 2, 30, 3, dtype=torch.float64)
    normals, moved = normals if features else None, torch.randperm(30)
    more = {"category": torch.tensor([3, 0])} if "categories" in options else {}
    out = net(cloud, normals, **more)
    found = net(cloud[:, moved], None if normals is None else normals[:, moved], **more)
    _near(found, out[:, moved] if net.per_point else out)
    mask = torch.arange(30) < torch.tensor([[30], [17]])
    spoiled = [x if x is None else x.masked_fill(~mask[..., None], torch.nan) for x in (cloud, normals)]
    padded = net(*spoiled, mask, **more)
    short = net(cloud[1:, :17], None if normals is None else normals[1:, :17], **{k: x[1:] for k, x in more.items()})
    _near(padded[1:, :17] if net.per_point else padded[1:], short)
    _near(padded[:1], out[:1])
    assert not net.per_point or (padded[1, 17:] == 0).all()


def test_bridge_paper_form():
    torch.manual_seed(0)
    nodes, _, g = _graph()
    bridge = GraphBridge(8, 3).double()
    start, end = bridge.vectors(nodes, bridge.draw(1, 5, g))
    p = start[:, EDGES[0, :, 0]] - end[:, EDGES[0, :, 1]]
    _near(p[:, 4], -p[:, 5])
    assert p[:, :3].sum(1).abs().max() < 1e-12 and (p[:, 6] == 0).all() and p[:, 0].norm() > 0.1


def test_bridge_released_form():
    torch.manual_seed(0)
    nodes, _, g = _graph()
    bridge = GraphBridge(8, 3, as_released=True).double()
    start, end = bridge.vectors(nodes, bridge.draw(1, 5, g))
    p = start[:, EDGES[0, :, 0]] - end[:, EDGES[0, :, 1]]
    assert min((p[:, 4] + p[:, 5]).norm(), p[:, :3].sum(1).norm(), p[:, 6].norm()) > 0.1


@pytest.mark.parametrize("released", [False, True])
def test_bridge_tokens(released):
    torch.manual_seed(0)
    nodes, marks, g = _graph()
    bridge = GraphBridge(8, 3, 2, as_released=released).double()
    noise = bridge.draw(1, 5, g)
    tokens, mask = bridge(nodes, marks, EDGES, noise=noise)
    p, q = bridge.vectors(nodes, noise)
    own = torch.cat([nodes, p, q] if released else [nodes, p], -1)
    between = p[:, EDGES[0, :, 0]] - q[:, EDGES[0, :, 1]]
    _near(tokens, torch.cat([bridge.node(own), bridge.edge(torch.cat([marks, between], -1))], 1))
    assert mask is None and not bridge(nodes, marks, EDGES)[0].equal(bridge(nodes, marks, EDGES)[0])
    label = torch.randperm(5)
    place = torch.empty_like(label).scatter_(0, label, torch.arange(5))
    found, _ = bridge(nodes[:, label], marks, place[EDGES], noise=noise[:, label])
    _near(found, torch.cat([tokens[:, :5][:, label], tokens[:, 5:]], 1))


def test_gram_matrix_is_that_of_the_graph():
    torch.manual_seed(0)
    bridge, draws = GraphBridge(32, 3).double(), 2000
    with torch.no_grad():
        noise = bridge.draw(draws, 5, torch.Generator().manual_seed(0))
        nodes = torch.zeros(draws, 5, 3, dtype=torch.float64)
        p = bridge.vectors(nodes, noise)[0] - bridge.place(nodes)
    tokens = torch.cat([p, p[:, EDGES[0, :, 0]] - p[:, EDGES[0, :, 1]]], 1)
    stacked = torch.eye(5, dtype=torch.float64)
    stacked = torch.cat([stacked, stacked[EDGES[0, :, 0]] - stacked[EDGES[0, :, 1]]])
    law = stacked @ stacked.T
    spread = (law.diag()[:, None] * law.diag() + law**2).sqrt() / 32**0.5
    assert (((tokens @ tokens.mT).mean(0) / 32 - law).abs() <= 5 * spread / draws**0.5 + 1e-12).all()


@pytest.mark.parametrize("released", [False, True])
def test_graphs_up_to_numbering_and_padding(released):
    torch.manual_seed(0)
    nodes, marks, g = _graph()
    net = _awake(GraphNetwork(4, node_features=3, edge_features=2, released_bridge=released, **SMALL))
    noise, label = net.bridge.draw(1, 5, g), torch.randperm(5, generator=g)
    place, order = torch.empty_like(label).scatter_(0, label, torch.arange(5)), torch.randperm(7, generator=g)
    out = net(nodes, marks, EDGES, noise=noise)
    _near(net(nodes[:, label], marks[:, order], place[EDGES][:, order], noise=noise[:, label]), out)
    assert not torch.allclose(net(nodes, marks, EDGES), net(nodes, marks, EDGES))
    pad_nodes, pad_edges = torch.arange(5) < torch.tensor([[5], [3]]), torch.arange(7) < torch.tensor([[7], [3]])
    two = torch.cat([nodes, nodes]).masked_fill(~pad_nodes[..., None], torch.nan)
    pair = torch.cat([marks, marks]).masked_fill(~pad_edges[..., None], torch.nan)
    ends = torch.cat([EDGES, EDGES]).masked_fill(~pad_edges[..., None], -7)
    padded = net(two, pair, ends, pad_nodes, pad_edges, noise=torch.cat([noise, noise]))
    _near(padded, torch.cat([out, net(nodes[:, :3], marks[:, :3], EDGES[:, :3], noise=noise[:, :3])]))


def test_undirected_graphs_need_both_directions():
    torch.manual_seed(0)
    nodes, _, g = _graph()
    net = _awake(GraphNetwork(4, node_features=3, **SMALL))
    noise, edges = net.bridge.draw(1, 5, g), EDGES[:, :4]
    turned = edges.clone()
    turned[:, 2] = edges[:, 2].flip(-1)
    both, both_turned = (torch.cat([e, e.flip(-1)], 1) for e in (edges, turned))
    _near(net(nodes, None, both_turned, noise=noise), net(nodes, None, both, noise=noise))
    assert not torch.allclose(net(nodes, None, turned, noise=noise), net(nodes, None, edges, noise=noise), atol=1e-9)


def test_graph_without_edges():
    net = GraphNetwork(4, node_features=3, **SMALL)
    assert net(torch.randn(2, 5, 3), None, torch.zeros(2, 0, 2, dtype=torch.long)).shape == (2, 4)


@pytest.mark.parametrize("kind", ["sequence", "points", "graph"])
def test_trains_copies_and_compiles(kind):
    torch.manual_seed(0)
    small = SMALL | dict(depth=1)
    make, inputs = {
        "sequence": (lambda: SequenceNetwork(12, 5, dropout=0.1, drop_path=0.1, **small), (torch.randint(12, (2, 9)),)),
        "points": (lambda: PointNetwork(5, **small), (torch.randn(2, 9, 3),)),
        "graph": (lambda: GraphNetwork(5, node_features=3, **small), (torch.randn(1, 5, 3), None, EDGES)),
    }[kind]
    net, other = make(), make()
    net.encoder.alpha.data.fill_(0.3)
    net(*inputs).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in net.parameters())
    other.load_state_dict(net.state_dict())
    noise = {"noise": net.bridge.draw(1, 5)} if kind == "graph" else {}
    out = net.eval()(*inputs, **noise)
    _near(other.eval()(*inputs, **noise), out, 1e-6)
    _near(copy.deepcopy(net)(*inputs, **noise), out, 1e-6)
    if kind == "graph":
        _near(torch.compile(net, backend="eager")(*inputs, **noise), out, 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert net(*inputs, **noise).isfinite().all()


def test_bad_input():
    three, bridge = torch.zeros(1, 3, 2), GraphBridge(8, 2)
    hidden = torch.tensor([[True, True, False]])
    sequence, points = SequenceNetwork(4, 2, **SMALL), PointNetwork(4, 3, categories=2, **SMALL)
    cases = [(lambda: bridge(three, None, torch.tensor([[[0, 3]]])), "edges must lie in 0..2"),
             (lambda: bridge(three, None, torch.tensor([[[0, 2]]]), hidden), "real nodes"),
             (lambda: bridge(three, None, torch.tensor([[0, 2]])), "edges must have shape"),
             (lambda: bridge(three, torch.zeros(1, 1, 4), torch.tensor([[[0, 1]]])), "edge_features must be None"),
             (lambda: GraphBridge(8, 2, 3)(three, torch.zeros(1, 1, 4), torch.tensor([[[0, 1]]])), "edge_features"),
             (lambda: bridge(three + torch.nan, None, torch.tensor([[[0, 1]]])), "NaN"),
             (lambda: sequence(torch.tensor([[0, 4]])), "tokens must lie"),
             (lambda: sequence(torch.zeros(1, 2, 3, dtype=torch.long)), "tokens must have shape"),
             (lambda: sequence(torch.zeros(1, 3, dtype=torch.long), torch.ones(1, 2).bool()), "mask"),
             (lambda: points(torch.zeros(1, 5, 3)), "features must"),
             (lambda: points(torch.zeros(1, 5, 3), torch.zeros(1, 5, 3)), "category must"),
             (lambda: SAMSAEncoder(8, 0, 2), "depth"), (lambda: SAMSAEncoder(8, 1, 3), "heads"),
             (lambda: SequenceNetwork(4, 2, pool="sum", **SMALL), "pool")]
    for call, message in cases:
        with pytest.raises(ValueError, match=message):
            call()
    with pytest.raises(TypeError, match="tokens must be an int64"):
        sequence(torch.zeros(1, 4))
    with pytest.raises(TypeError, match="edges must be an int64"):
        bridge(three, None, torch.zeros(1, 1, 2))


@pytest.mark.parametrize("features", [0, 2])
def test_a_graph_may_have_no_edges(features):
    nodes, edges = torch.randn(2, 3, 3), torch.zeros(2, 0, 2, dtype=torch.long)
    tokens, _ = GraphBridge(8, 3, features)(nodes, torch.zeros(2, 0, features) if features else None, edges)
    assert tokens.shape == (2, 3, 8) and tokens.isfinite().all()


def test_options_go_to_the_attention_and_unknown_ones_are_named():
    for make in (lambda **options: SequenceNetwork(4, 2, **options), lambda **options: PointNetwork(4, **options),
                 lambda **options: GraphNetwork(4, node_features=3, **options)):
        small = dict(dim=16, depth=1, heads=2)
        assert make(**small, samples=5, hidden=24).encoder.layers[0].attention.samples == 5
        assert make(**small, attention="performer", features=7).encoder.layers[0].attention.features.shape[1] == 7
        with pytest.raises(TypeError, match="'sample'"):
            make(**small, sample=5)


@pytest.mark.parametrize("wrong, error, message", [
    (torch.tensor([0, 2]), ValueError, r"category must lie in 0..1, got \[0, 2\]"),
    (torch.tensor([-1, 0]), ValueError, "category must lie in 0..1"),
    (torch.tensor([0]), ValueError, r"category must have shape \(2,\), got \(1,\)"),
    (torch.tensor([[0], [1]]), ValueError, r"category must have shape \(2,\), got \(2, 1\)"),
    (torch.tensor([0, 1], dtype=torch.int32), TypeError, "category must be an int64 tensor, got torch.int32"),
    ([0, 1], TypeError, "category must be an int64 tensor, got list"),
    (None, ValueError, r"category must be int64 \(b,\), got None")], ids=str)
def test_refuses_categories_that_do_not_fit(wrong, error, message):
    with pytest.raises(error, match=message):
        PointNetwork(4, categories=2, **SMALL)(torch.zeros(2, 9, 3), category=wrong)


def test_refuses_another_dtype_than_the_weights():
    points, double = torch.randn(1, 9, 3), torch.randn(1, 9, 3).double()
    for call in (lambda: PointNetwork(4, **SMALL)(double), lambda: PointNetwork(4, 3, **SMALL)(points, double),
                 lambda: GraphNetwork(4, node_features=3, **SMALL)(double, None, EDGES)):
        with pytest.raises(TypeError, match="dtype of weight, torch.float32, got torch.float64"):
            call()


def test_values_of_indices_are_looked_at_where_values_are():
    hidden = torch.tensor([[True, True, False]])
    graph, tokens = GraphBridge(8, 2), SequenceNetwork(4, 2, **SMALL)
    with check_values(False):
        assert graph(torch.zeros(1, 3, 2), None, torch.tensor([[[0, 2]]]), hidden)[0].isfinite().all()
        for call in (lambda: tokens(torch.tensor([[0, 4]])), lambda: PointNetwork(4, categories=2, **SMALL)(
                torch.zeros(1, 9, 3), category=torch.tensor([2]))):
            with pytest.raises(IndexError):
                call()
        with pytest.raises(RuntimeError, match="out of bounds"):
            graph(torch.zeros(1, 3, 2), None, torch.tensor([[[0, 3]]]))


@pytest.mark.parametrize("attention", ["samsa", "dense"])
@pytest.mark.parametrize("kind", ["sequence", "points", "graph"])
def test_padded_batches_compile_and_export_whole(kind, attention):
    small = dict(dim=16, depth=2, heads=4, attention=attention) | (dict(samples=6) if attention == "samsa" else {})
    mask, some = (torch.arange(n) < torch.tensor([[n], [n - 1]]) for n in (9, 5))
    edges = torch.tensor([[[0, 1], [1, 2], [3, 4]], [[0, 3], [1, 3], [4, 4]]])
    model, inputs, options = {
        "sequence": lambda: (SequenceNetwork(4, 3, **small), (torch.randint(4, (2, 9)),), dict(mask=mask)),
        "points": lambda: (PointNetwork(3, categories=2, **small), (torch.randn(2, 9, 3),),
                           dict(mask=mask, category=torch.tensor([0, 1]))),
        "graph": lambda: (GraphNetwork(3, node_features=3, **small), (torch.randn(2, 5, 3), None, edges),
                          dict(node_mask=some, edge_mask=some[:, 2:]))}[kind]()
    model.eval().encoder.alpha.data.fill_(0.5)
    torch.manual_seed(3)
    expected = model(*inputs, **options)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for whole in (compiled, torch.export.export(model, inputs, options).module()):
        torch.manual_seed(3)
        torch.testing.assert_close(whole(*inputs, **options), expected)


def test_a_network_is_set_to_an_inference_mode_as_a_whole():
    net = _awake(PointNetwork(3, **SMALL, hard=False))
    x = torch.randn(1, 30, 3).double()
    assert len(sampling_layers(net)) == 2 and not sampling_layers(PointNetwork(3, attention="dense"))
    found = {mode: set_inference(net, mode)(x) for mode in ("top-k", "mixed", "noise")}
    assert not found["top-k"].equal(found["mixed"]) and not found["noise"].equal(net(x))
    assert all(set_inference(net, mode)(x).equal(found[mode]) for mode in ("top-k", "mixed"))
    with pytest.raises(ValueError, match="inference"):
        set_inference(net, "soft")


def test_a_random_choice_stays_random_and_learns_no_scores():
    net, x = _awake(choose_at_random(PointNetwork(3, **SMALL))), torch.randn(1, 30, 3).double()
    assert not set_inference(net, "top-k")(x).equal(net(x))
    for layer in sampling_layers(net):
        assert isinstance(layer.importance, EqualScores) and not layer.support_scores.requires_grad


@pytest.mark.parametrize("attention", ["samsa", "dense"])
def test_a_generator_goes_to_attentions_that_draw(attention):
    encoder, x = SAMSAEncoder(16, 2, 4, attention=attention), torch.randn(2, 12, 16)
    with torch.no_grad():
        encoder.alpha.fill_(0.5)
        found = [encoder(x, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2]) == (attention == "dense")


def test_random_choice_without_supports():
    encoder = choose_at_random(SAMSAEncoder(16, 2, 4, samples=4, supports=0))
    assert all(isinstance(layer.importance, EqualScores) for layer in sampling_layers(encoder))


def test_masked_means_of_half_precision_do_not_overflow():
    network = SequenceNetwork(10, 3, dim=16, depth=1, heads=2, samples=4).half().eval()
    tokens = torch.zeros(1, 4096).long()
    with torch.no_grad():
        network.tokens.weight.fill_(20.0)
        found = network(tokens, mask=torch.ones(1, 4096, dtype=torch.bool))
    assert found.isfinite().all()


@pytest.mark.parametrize("bad, error", [
    (dict(noise=torch.zeros(1, 1, 1)), ValueError), (dict(noise=torch.full((1, 3, 16), torch.nan)), ValueError),
    (dict(noise=torch.zeros(1, 3, 16).double()), TypeError), (dict(noise=torch.zeros(5, 3, 16)), ValueError),
    (dict(generator=3), TypeError),
])
def test_bridges_refuse_noise_that_does_not_fit(bad, error):
    with pytest.raises(error, match=next(iter(bad))):
        GraphBridge(16, 3)(torch.randn(1, 3, 3), None, torch.tensor([[[0, 1], [1, 2]]]), **bad)
