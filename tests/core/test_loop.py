"""What a training loop does to registered layers: checkpoints that choose, forward derivatives, batches, export."""

import functools
import io

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import prune
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import sparseattn
from sparseattn.core.attention import merge_attention
from sparseattn.core.transformer import attention_names, make_attention
from sparseattn.hept.models import HEPTModel
from sparseattn.pat.layers import gumbel_subset_sampling
from sparseattn.sampled.attention import cycle_attention
from sparseattn.sbm.models import SequenceClassifier

NEEDS = {"hept": dict(coord_dims=2), "linformer": dict(max_length=20), "sampled": dict(resample="fixed")}
NEEDS["samsa"] = dict(samples=4)
NEEDS |= dict.fromkeys(("flatformer_k", "flt", "performer_k", "point_transformer", "smyrf_k"), dict(coord_dims=2))
RANDOM = {"samsa", "sbm"}                   # their gradients are estimates
each_name = pytest.mark.parametrize("name", sorted(attention_names()))


def layer_of(name):
    torch.manual_seed(0)
    return make_attention(name, 16, 4, **NEEDS.get(name, {})).eval(), torch.rand(2, 20, 2)


def drawn_alike(layer, coords):
    def run(x):
        torch.manual_seed(1)
        return layer(x, coords)
    return run


@each_name
def test_gradients_under_a_checkpoint_that_keeps_products(name):
    layer, coords = layer_of(name)
    kept = {torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default}
    policy = CheckpointPolicy.PREFER_RECOMPUTE, CheckpointPolicy.MUST_SAVE
    chosen = lambda ctx, op, *args, **kwargs: policy[op in kept]  # noqa: E731
    contexts = functools.partial(create_selective_checkpoint_contexts, chosen)
    run, x = drawn_alike(layer, coords), torch.randn(2, 20, 16, requires_grad=True)
    plain, = torch.autograd.grad(run(x).square().sum(), x)
    again, = torch.autograd.grad(checkpoint(run, x, use_reentrant=False, context_fn=contexts).square().sum(), x)
    torch.testing.assert_close(again, plain)


@each_name
def test_forward_derivatives(name):
    layer, coords = layer_of(name)
    layer, coords = layer.double().requires_grad_(False), coords.double()
    run, (x, t) = drawn_alike(layer, coords), torch.randn(2, 2, 20, 16, dtype=torch.float64)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(run(forward_ad.make_dual(x, t))).tangent
    assert found is not None and found.abs().max() > 0 or name == "none"
    if name not in RANDOM | {"none"}:
        x.requires_grad_()
        weight = torch.randn_like(x)
        to, = torch.autograd.grad((run(x) * weight).sum(), x)
        torch.testing.assert_close((found * weight).sum(), (to * t).sum(), rtol=1e-6, atol=1e-8)


@each_name
def test_batches_of_gradients(name):
    layer, coords = layer_of(name)
    x = torch.randn(2, 20, 16, requires_grad=True)
    out = drawn_alike(layer, coords)(x)[0, :2].flatten()[:5]
    if not out.requires_grad:
        return
    found, = torch.autograd.grad(out, x, torch.eye(5), is_grads_batched=True, retain_graph=True)
    for one, at in zip(found, range(5), strict=True):
        torch.testing.assert_close(one, torch.autograd.grad(out[at], x, retain_graph=True)[0], rtol=1e-4, atol=1e-5)


def test_derivatives_of_hard_subsets():
    x, w, to, noise = torch.randn(1, 30, 16), torch.randn(4, 16), torch.randn(4, 16), torch.randn(1, 4, 30)
    chosen = lambda w: gumbel_subset_sampling(x, w, hard=True, noise=noise).square().sum()  # noqa: E731
    found, expected = torch.func.jvp(chosen, (w,), (to,))[1], (torch.func.grad(chosen)(w) * to).sum()
    torch.testing.assert_close(found, expected)


def test_a_query_without_keys_in_any_part_has_no_gradient():
    log_weights = torch.tensor([[-torch.inf, 0.0], [-torch.inf, 1.0]], requires_grad=True)
    out = merge_attention(torch.ones(2, 2, 3), log_weights)
    out.square().sum().backward()
    assert (out[0] == 0).all() and (log_weights.grad[:, 0] == 0).all() and log_weights.grad.isfinite().all()


OF_ONE_SIZE = {"flatformer_k", "knn", "point_transformer", "smyrf_k", "stratified"}


@pytest.mark.parametrize("name", sorted({*attention_names()} - OF_ONE_SIZE))
def test_export_for_any_batch(name):
    layer, coords = layer_of(name)
    size = torch.export.Dim("b", min=2, max=64)
    shapes = {"x": {0: size}, "coords": {0: size}}
    x, coords = torch.randn(3, 20, 16), torch.rand(3, 20, 2)
    program = torch.export.export(layer, (x, coords), dynamic_shapes=shapes).module()
    assert program(torch.randn(5, 20, 16), torch.rand(5, 20, 2)).shape == (5, 20, 16)


def test_masks_drawn_under_vmap_and_after_loading():
    layer, x = sparseattn.SBMAttention(16, 4, clusters=4).eval(), torch.randn(3, 20, 16)
    assert torch.func.vmap(lambda x: layer(x[None]), randomness="different")(x).shape == (3, 1, 20, 16)
    file = io.BytesIO()
    torch.export.save(torch.export.export(layer, (x,)), file)
    file.seek(0)
    assert torch.export.load(file).module()(x).shape == x.shape


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


def test_output_of_cycles_can_be_changed():
    q, k, v = torch.randn(3, 1, 2, 6, 4, requires_grad=True)
    order = torch.arange(6)
    out = cycle_attention(q, k, v, order)
    out *= 2
    found = torch.autograd.grad(out.sum(), v)[0]
    torch.testing.assert_close(found, 2 * torch.autograd.grad(cycle_attention(q, k, v, order).sum(), v)[0])


@pytest.mark.parametrize("name", ["flt", "performer", "performer_k", "scatterbrain"])
def test_features_are_drawn_under_a_half_default(name):
    try:
        torch.set_default_dtype(torch.bfloat16)
        layer = make_attention(name, 16, 4, **NEEDS.get(name, {}))
    finally:
        torch.set_default_dtype(torch.float32)
    assert layer.query.weight.dtype == torch.bfloat16
