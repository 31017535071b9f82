"""Every attention in what a training loop does to it, beside what `tests/test_testing.py` checks: without
kernels, memory that checkpointing frees, checkpoints that choose, lengths under torch.compile with breaks in the graph,
export, forward derivatives, batches of gradients, pruning, mixed precision in shards, evaluations between."""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import forward_ad
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.utils import prune
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import sparseattn
from sparseattn.core.transformer import Encoder, make_attention
from sparseattn.hept.models import HEPTModel
from sparseattn.sampled.autoencoder import EncoderClassifier, MaskedAutoencoder, PointEncoder, cut_into_groups
from sparseattn.sampled.models import HierarchicalClassifier, ShapeClassifier
from sparseattn.samsa.models import GraphNetwork, PointNetwork, SequenceNetwork
from sparseattn.sbm.models import MaskedLanguageModel, SequenceClassifier, TokenClassifier
from sparseattn.testing import check_attention

NEEDS = {"hept": dict(coord_dims=3, block_size=8), "linformer": dict(max_length=24), "samsa": dict(samples=8)}
NEEDS |= dict.fromkeys(("flatformer_k", "flt", "performer_k", "point_transformer", "smyrf_k"), dict(coord_dims=3))


def layer_and_cloud(name, n=20, **options):
    torch.manual_seed(0)
    layer = make_attention(name, 16, 4, **NEEDS.get(name, {}) | options).double()
    return layer, torch.randn(2, n, 16, dtype=torch.float64), torch.rand(2, n, 3, dtype=torch.float64)


each = pytest.mark.parametrize("name", sorted(set(sparseattn.attentions()) - {"none"}))


@each
def test_without_kernels(name, monkeypatch):
    """What `tests/test_testing.py` checks with kernels in C, by torch's own operations."""
    monkeypatch.setenv("CC", "")
    options, properties = NEEDS.get(name, {}), ("mask", "checkpoint", "func.grad", "double backward", "threads", "fork")
    found = check_attention(name, options=options, properties=properties)
    assert set(found.values()) == {"works"}, found


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name, options", [
    ("hept", {}), ("hept", dict(combine="union", hash_by="coords")), ("pat", {}), ("sampled", dict(cycle_for="head")),
    ("sampled", dict(cycles=3)), ("sampled", dict(window=5)), ("samsa", {}), ("samsa", dict(hard=False)), ("sbm", {})])
def test_reference_is_the_same_function(name, options, training):
    """The plain form of a layer, from the same weights and draws: outputs and gradients."""
    found = []
    for impl in ("fast", "reference"):
        layer, x, coords = layer_and_cloud(name, impl=impl, **options)
        x.requires_grad_()
        mask = torch.arange(20) < torch.tensor([[20], [13]])
        layer.train(training)
        torch.manual_seed(1)
        out = layer(x, coords, mask)
        found.append([out, *torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()])])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


@pytest.fixture
def poisoned():
    """New memory is full of NaN, so that what is not written shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("kernels", [True, False])
@each
def test_nothing_is_left_unwritten(name, kernels, poisoned, monkeypatch):
    if not kernels:
        monkeypatch.setenv("CC", "")
    for n in (1, 13, 24):
        layer, x, coords = layer_and_cloud(name, n)
        x.requires_grad_()
        for mask in (None, torch.arange(n) < torch.tensor([[n], [n // 2]])):
            for training in (True, False):
                out = layer.train(training)(x, coords, mask)
                gradients = torch.autograd.grad(out.sin().sum(), [x, *layer.parameters()], materialize_grads=True)
                assert all(part.isfinite().all() for part in (out, *gradients))


@each
def test_checkpointing_frees_what_the_layer_keeps(name):
    needs = dict(max_length=500) if name == "linformer" else {}
    layer, x, coords = layer_and_cloud(name, 500, **needs)
    kept, output = [], x.numel() * x.itemsize
    for run in (layer, lambda *inputs: checkpoint(layer, *inputs, use_reentrant=False)):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as memory:
            out = run(x, coords)
        kept.append(sum(event.self_cpu_memory_usage for event in memory.key_averages()))
        del out
    assert kept[1] < 1.2 * output < 1.5 * output < kept[0]


@each
def test_compiled_at_a_second_length(name):
    layer, x, coords = layer_and_cloud(name, 24)
    compiled = torch.compile(layer, backend="eager")
    for n in (20, 21, 23):
        torch.manual_seed(1)
        expected = layer(x[:, :n], coords[:, :n])
        torch.manual_seed(1)
        torch.testing.assert_close(compiled(x[:, :n], coords[:, :n]), expected, rtol=1e-10, atol=1e-11)
    torch.compiler.reset()


@pytest.mark.parametrize("name", ["sampled", "sbm"])
def test_evaluation_with_a_generator_leaves_the_training_draws_alone(name):
    layer, x, coords = layer_and_cloud(name)

    def outputs(validate):
        torch.manual_seed(3)
        found = []
        for _ in range(3):
            found.append(layer.train()(x, coords))
            if validate:
                layer.eval()(x, coords, generator=torch.Generator().manual_seed(4))
        return torch.stack(found)

    before = {key: value.clone() for key, value in layer.state_dict().items()}
    assert torch.equal(outputs(True), outputs(False))
    assert all(torch.equal(value, before[key]) for key, value in layer.state_dict().items())


PATCHES = dict(dim=16, depth=1, heads=4, token_hidden=(8, 8, 8))
GROUPS = dict(groups=16, group_size=6)
EDGES = torch.tensor([[[0, 1], [1, 2], [2, 3]], [[0, 3], [1, 3], [2, 1]]])
NETWORKS = {
    "tokens": lambda: (TokenClassifier(9, 3, attention="sbm", max_length=12), torch.randint(9, (2, 12))),
    "sequence": lambda: (SequenceClassifier(9, 3, attention="sbm", max_length=12), torch.randint(9, (2, 12))),
    "language": lambda: (MaskedLanguageModel(9, attention="sbm", max_length=12), torch.randint(9, (2, 12))),
    "samsa": lambda: (SequenceNetwork(9, 3, attention="sampled", dim=16, depth=2, heads=2, hidden=16),
                      torch.randint(9, (2, 12))),
    "points": lambda: (PointNetwork(3, attention="sampled", dim=16, depth=2, heads=2), torch.randn(2, 12, 3)),
    "graph": lambda: (GraphNetwork(3, node_features=3, attention="sampled", dim=16, depth=2, heads=2),
                      torch.randn(2, 4, 3), None, EDGES),
    "graph, all pairs": lambda: (GraphNetwork(3, node_features=3, attention="dense", dim=16, depth=1, heads=2),
                                 torch.randn(2, 4, 3), None, EDGES),
    "shape": lambda: (ShapeClassifier(5), torch.randn(2, 40, 3)),
    "hierarchy": lambda: (HierarchicalClassifier(5), torch.randn(2, 256, 3)),
    "autoencoder": lambda: (MaskedAutoencoder(**PATCHES, **GROUPS, attention="sampled"), torch.rand(2, 60, 3)),
    "autoencoder, blocks": lambda: (MaskedAutoencoder(**PATCHES, **GROUPS, attention="sbm"), torch.rand(2, 60, 3)),
    "autoencoder, decoder": lambda: (MaskedAutoencoder(**PATCHES, **GROUPS, decoder_attention="sampled"),
                                     torch.rand(2, 60, 3)),
    "patches": lambda: (EncoderClassifier(PointEncoder(**PATCHES, attention="sampled"), 3),
                        cut_into_groups(torch.rand(2, 60, 3), 16, 6)),
}


@pytest.mark.parametrize("make", NETWORKS.values(), ids=NETWORKS)
def test_networks_take_the_source_of_their_draws(make):
    network, *inputs = make()
    network.eval()
    for name, parameter in network.named_parameters():
        if name.endswith("alpha"):  # a layer of SAMSA is the identity at first
            parameter.data.fill_(1.0)
    once, again = (network(*inputs, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    torch.testing.assert_close(once, again, rtol=0, atol=0)


@pytest.mark.parametrize("options", [{}, dict(impl="reference"), dict(gradient="two-sided"), dict(sampler="fastrg")])
def test_block_models_train_under_autocast(options):
    network = torch.nn.Sequential(torch.nn.Linear(8, 16), make_attention("sbm", 16, 4, **options))
    with torch.autocast("cpu", torch.bfloat16):
        found = network(torch.randn(2, 50, 8))
    found.float().sum().backward()
    assert found.dtype == torch.bfloat16
    assert all(p.grad is None or p.grad.isfinite().all() for p in network.parameters())

def drawn_alike(layer, coords):
    """The layer as a function of its input, with the same draws each time."""
    def run(x):
        torch.manual_seed(1)
        return layer(x, coords)
    return run


@each
def test_a_checkpoint_that_keeps_products(name):
    layer, x, coords = layer_and_cloud(name)
    kept = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default}
    policy = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE
    chosen = lambda ctx, op, *args, **named: policy[op in kept]  # noqa: E731
    contexts = functools.partial(create_selective_checkpoint_contexts, chosen)
    run = drawn_alike(layer.eval(), coords)
    x.requires_grad_()
    plain, = torch.autograd.grad(run(x).square().sum(), x)
    again, = torch.autograd.grad(checkpoint(run, x, use_reentrant=False, context_fn=contexts).square().sum(), x)
    torch.testing.assert_close(again, plain)


@each
def test_forward_derivatives(name):
    """Equal to backward ones; those of SAMSA and of block models are estimates, which are not 0."""
    layer, x, coords = layer_and_cloud(name)
    run, to = drawn_alike(layer.eval().requires_grad_(False), coords), torch.randn_like(x)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(run(forward_ad.make_dual(x, to))).tangent
    assert found is not None and found.abs().max() > 0
    if name not in {"samsa", "sbm"}:
        weight = torch.randn_like(x.requires_grad_())
        back, = torch.autograd.grad((run(x) * weight).sum(), x)
        torch.testing.assert_close((found * weight).sum(), (back * to).sum(), rtol=1e-6, atol=1e-8)


@each
def test_batches_of_gradients(name):
    layer, x, coords = layer_and_cloud(name)
    x.requires_grad_()
    out = drawn_alike(layer.eval(), coords)(x)[0, :2].flatten()[:5]
    unit = torch.eye(5, dtype=out.dtype)
    found, = torch.autograd.grad(out, x, unit, is_grads_batched=True, retain_graph=True)
    for one, at in zip(found, range(5), strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(out[at], x, retain_graph=True)[0], rtol=1e-4, atol=1e-5)


OF_ONE_SIZE = {"flatformer_k", "knn", "point_transformer", "smyrf_k", "stratified"}


@pytest.mark.parametrize("name", sorted(set(sparseattn.attentions()) - OF_ONE_SIZE))
def test_export_for_any_batch(name):
    layer, x, coords = layer_and_cloud(name)
    size = torch.export.Dim("b", min=2, max=64)
    shapes = {"x": {0: size}, "coords": {0: size}}
    program = torch.export.export(layer.eval(), (x, coords), dynamic_shapes=shapes).module()
    x, coords = torch.randn(5, *x.shape[1:]).double(), torch.rand(5, *coords.shape[1:]).double()
    found, expected = (drawn_alike(run, coords)(x) for run in (program, layer))
    assert found.shape == x.shape
    if name not in {"sampled", "sbm"}:                                      # their draws may come in another order
        torch.testing.assert_close(found, expected)


def pruned(net):
    for part in net.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            prune.l1_unstructured(part, "weight", amount=0.3)
    return net


@pytest.mark.parametrize("make, inputs", [
    (lambda: HEPTModel(15, 6, decay="summed", block_size=10), (torch.randn(1, 50, 15), torch.rand(1, 50, 6))),
    (lambda: SequenceClassifier(11, 3, max_length=12, attention="dense"), (torch.randint(11, (2, 12)),)),
], ids=["hept", "sequences"])
def test_pruned_networks_load_and_train(make, inputs):
    one, other = pruned(make()).eval(), pruned(make()).eval()
    other.load_state_dict(one.state_dict())
    torch.testing.assert_close(other(*inputs), one(*inputs), rtol=0, atol=0)
    for _ in range(2):
        one(*inputs).sum().backward()


@pytest.fixture
def alone(tmp_path):
    """A group of one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@each
def test_shards_in_mixed_precision(name, alone):
    torch.manual_seed(0)
    encoder = Encoder(16, 2, 4, attention=name, **NEEDS.get(name, {}))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in encoder.layers:
        fully_shard(layer, mesh=alone, mp_policy=policy)
    fully_shard(encoder, mesh=alone, mp_policy=policy)
    encoder(torch.randn(2, 20, 16), torch.rand(2, 20, 3)).square().sum().backward()
    assert all(p.grad is None or p.grad.to_local().isfinite().all() for p in encoder.parameters())
    assert any(p.grad is not None for p in encoder.parameters())
