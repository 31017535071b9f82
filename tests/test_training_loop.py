"""Every attention in what a training loop does to it: checkpointing, derivatives of derivatives, functional transforms,
other lengths under torch.compile, autocast, evaluation in between."""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import sparseattn
from sparseattn.core.transformer import make_attention

NEEDS = {"hept": dict(coord_dims=3, block_size=8), "linformer": dict(max_length=24), "samsa": dict(samples=8)}


def layer_and_cloud(name, n=20, **options):
    torch.manual_seed(0)
    layer = make_attention(name, 16, 4, **NEEDS.get(name, {}) | options).double()
    return layer, torch.randn(2, n, 16, dtype=torch.float64), torch.rand(2, n, 3, dtype=torch.float64)


def gradients(layer, run):
    "Of a number, by the input and all parameters, with one seed."
    torch.manual_seed(1)
    leaves = [p for p in layer.parameters() if p.requires_grad]
    return torch.autograd.grad(run().sin().sum(), leaves, allow_unused=True)


each = pytest.mark.parametrize("name", sorted(set(sparseattn.attentions()) - {"none"}))
# their gradients are estimates, no derivatives of the output: what differences of them give is another number
exact = pytest.mark.parametrize("name", sorted(set(sparseattn.attentions()) - {"none", "samsa", "sbm"}))
with_and_without_kernels = pytest.mark.parametrize("kernels", [True, False], ids=["kernels", "torch"])


@each
@with_and_without_kernels
def test_activation_checkpointing(name, kernels, monkeypatch):
    if not kernels:
        monkeypatch.setenv("CC", "")
    layer, x, coords = layer_and_cloud(name)
    plain = gradients(layer, lambda: layer(x, coords))
    again = gradients(layer, lambda: checkpoint(layer, x, coords, use_reentrant=False))
    torch.testing.assert_close(again, plain, rtol=0, atol=0)


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


@exact
def test_the_gradient_of_a_penalty(name):
    "Double backward against differences of the gradient."
    layer, x, coords = layer_and_cloud(name)
    direction = torch.randn(x.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64)

    def slope(x):
        torch.manual_seed(1)
        return torch.autograd.grad(layer(x, coords).sin().sum(), x, create_graph=True)[0]

    leaf = x.clone().requires_grad_()
    (found,) = torch.autograd.grad((slope(leaf) * direction).sum(), leaf)
    step = 1e-6
    ahead, behind = (slope((x + sign * step * direction).requires_grad_()) for sign in (1, -1))
    expected = (ahead - behind).detach() / (2 * step)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@each
def test_functional_gradients(name):
    layer, x, coords = layer_and_cloud(name)
    parameters = dict(layer.named_parameters())

    def loss(parameters):
        torch.manual_seed(1)
        return torch.func.functional_call(layer, parameters, (x, coords)).sin().sum()

    found = torch.func.grad(loss)(parameters)
    torch.manual_seed(1)
    layer(x, coords).sin().sum().backward()
    for key, parameter in parameters.items():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(found[key].detach(), expected, rtol=1e-9, atol=1e-10)


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
