"""The registry, dense attention as a module, and the encoder: equations, masks, saving, compiling, casting."""

import copy
import math

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import sparseattn  # noqa: F401  registers every mechanism
from sparseattn.core.attention import dense_attention
from sparseattn.core.transformer import (
    DenseAttention,
    Encoder,
    Layer,
    head_channels,
    attention_names,
    draws_of,
    make_attention,
    register_attention,
)

KINDS = {
    "softmax": dict(),
    "gaussian": dict(kernel="gaussian"),
    "coordinates": dict(kernel="gaussian", coord_dims=2),
}
# what an encoder of a mechanism needs to be told; the others need nothing
NEEDS = {"hept": dict(coord_dims=2), "linformer": dict(max_length=7)}
NEEDS |= dict.fromkeys(("flatformer_k", "flt", "performer_k", "point_transformer", "smyrf_k"), dict(coord_dims=2))
each_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def inputs(b=2, n=7, dim=8, dtype=torch.float64):
    mask = torch.ones(b, n, dtype=torch.bool)
    mask[0, 2], mask[-1, 1:] = False, False
    return torch.randn(b, n, dim, dtype=dtype), torch.rand(b, n, 2, dtype=dtype), mask


def gradients(module, *args):
    module.zero_grad()
    module(*args).square().sum().backward()
    return [p.grad.clone() for p in module.parameters()]


@each_kind
def test_module_equals_its_equations(options):
    x, coords, mask = inputs()
    module = DenseAttention(8, 2, **options).double()
    heads = []
    for h in range(2):
        rows = slice(4 * h, 4 * h + 4)
        q, k, v = (x @ f.weight[rows].T for f in (module.query, module.key, module.value))
        if module.log_omega is not None:
            q, k = (torch.cat([t, coords * (2 * module.log_omega[h].exp()).sqrt()], -1) for t in (q, k))
        kernel = options.get("kernel", "softmax")
        heads.append(dense_attention(q[:, None], k[:, None], v[:, None], mask=mask, kernel=kernel)[:, 0])
    expected = torch.cat(heads, -1) @ module.out.weight.T + module.out.bias
    expected[~mask] = 0
    torch.testing.assert_close(module(x, coords, mask), expected, rtol=1e-12, atol=1e-12)


def test_head_dim_frees_heads_from_dividing():
    assert DenseAttention(10, 3, head_dim=4)(torch.randn(1, 5, 10)).shape == (1, 5, 10)


@each_kind
@pytest.mark.parametrize("garbage", [1e30, math.nan], ids=["huge", "nan"])
def test_masked_points_change_nothing(options, garbage):
    x, coords, mask = inputs()
    module = DenseAttention(8, 2, **options).double()
    other = [t.masked_fill(~mask[..., None], garbage) for t in (x, coords)]
    out = module(x, coords, mask)
    assert not out[~mask].any()
    assert torch.equal(out, module(*other, mask))
    for a, b in zip(gradients(module, x, coords, mask), gradients(module, *other, mask), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", sparseattn.attentions())
@pytest.mark.parametrize("garbage", [1e30, math.nan], ids=["huge", "nan"])
def test_encoder_ignores_masked_points(name, garbage):
    x, coords, mask = inputs(dtype=torch.float32)
    encoder = Encoder(8, 2, 2, attention=name, **NEEDS.get(name, {})).eval()
    other = [t.masked_fill(~mask[..., None], garbage) for t in (x, coords)]

    def real(*args):
        torch.manual_seed(1)  # mechanisms that draw, draw the same
        return encoder(*args)[mask]

    assert torch.equal(real(x, coords, mask), real(*other, mask))
    for t in (x, coords), other:
        encoder.zero_grad()
        real(*t, mask).square().sum().backward()
        assert all(p.grad.isfinite().all() for p in encoder.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", sparseattn.attentions())
def test_encoder_returns_zero_at_masked_points(name):
    x, coords, mask = inputs(dtype=torch.float32)
    encoder = Encoder(8, 2, 2, attention=name, **NEEDS.get(name, {})).eval()
    assert not encoder(x, coords, mask)[~mask].any()


@each_kind
def test_permuted_points_give_permuted_outputs(options):
    x, coords, mask = inputs()
    encoder, p = Encoder(8, 2, 2, **options).double(), torch.randperm(7)
    expected = encoder(x, coords, mask)[:, p]
    torch.testing.assert_close(encoder(x[:, p], coords[:, p], mask[:, p]), expected, rtol=1e-12, atol=1e-12)


def test_layer_adds_attention_then_feed_forward():
    x, coords, mask = inputs()
    layer = Layer(make_attention("dense", 8, 2), 8, 16).double()
    middle = x + layer.attention(layer.norm1(x), coords, mask)
    torch.testing.assert_close(layer(x, coords, mask), middle + layer.feed(layer.norm2(middle)), rtol=0, atol=0)


def test_encoder_returns_all_layers():
    x, coords, _ = inputs()
    encoder = Encoder(8, 3, 2).double()
    outputs = encoder(x, coords, all_layers=True)
    assert len(outputs) == 4 and torch.equal(outputs[0], x) and torch.equal(outputs[-1], encoder(x, coords))
    assert torch.equal(outputs[1], encoder.layers[0](x, coords))


def test_dropout_only_in_training():
    x, coords, mask = inputs()
    encoder = Encoder(8, 1, 2, dropout=0.5).double()
    assert not torch.equal(encoder(x), encoder(x))
    encoder.eval()
    assert torch.equal(encoder(x), encoder(x))


@each_kind
def test_state_dict_and_deepcopy(options):
    x, coords, mask = inputs()
    first, second = (Encoder(8, 2, 2, **options).double() for _ in range(2))
    expected = first(x, coords, mask)
    assert not torch.equal(second(x, coords, mask), expected)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(x, coords, mask), expected)
    assert torch.equal(copy.deepcopy(first)(x, coords, mask), expected)


def test_compiles():
    x, coords, mask = inputs(dtype=torch.float32)
    module = DenseAttention(8, 2, kernel="gaussian", coord_dims=2)
    compiled = torch.compile(module, backend="aot_eager")
    torch.testing.assert_close(compiled(x, coords, mask), module(x, coords, mask), rtol=1e-6, atol=1e-6)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_in_is_dtype_out(options, dtype):
    x, coords, mask = inputs(dtype=dtype)
    assert Encoder(8, 1, 2, **options).to(dtype)(x, coords, mask).dtype == dtype


@each_kind
def test_autocast(options):
    x, coords, mask = inputs(dtype=torch.float32)
    module = DenseAttention(8, 2, **options)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x, coords, mask)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), module(x, coords, mask), rtol=0.05, atol=0.05)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu(dtype):
    x, coords, mask = inputs(dtype=torch.float32)
    encoder = Encoder(8, 2, 2, kernel="gaussian", coord_dims=2)
    expected = encoder(x, coords, mask)
    out = encoder.cuda().to(dtype)(x.cuda().to(dtype), coords.cuda().to(dtype), mask.cuda())
    assert out.dtype == dtype and out.is_cuda
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(out.cpu().float()[mask], expected[mask], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("heads", [3, 0, -1])
def test_refuses_heads_that_do_not_divide(heads):
    with pytest.raises(ValueError, match=f"heads must divide dim .* got heads {heads} and dim 8"):
        DenseAttention(8, heads)


@pytest.mark.parametrize("options", [dict(head_dim=0), dict(heads=0, head_dim=4)], ids=["head_dim", "heads"])
def test_refuses_heads_without_channels(options):
    with pytest.raises(ValueError, match="head"):
        DenseAttention(8, options.pop("heads", 2), **options)


def test_refuses_unknown_names_and_options():
    with pytest.raises(ValueError, match="attention is 'nothing'; it must be one of dense"):
        Encoder(8, 1, 2, attention="nothing")
    with pytest.raises(TypeError, match="wrong"):
        Encoder(8, 1, 2, wrong=1)
    with pytest.raises(ValueError, match="kernel .*'cosine'"):
        DenseAttention(8, 2, kernel="cosine")


def test_refuses_coordinates_that_do_not_fit():
    x, coords, _ = inputs()
    module = DenseAttention(8, 2, kernel="gaussian", coord_dims=2).double()
    with pytest.raises(ValueError, match="coords are needed"):
        module(x)
    for other in (coords[..., :1], coords[:, :5], coords[:1], coords[0]):
        with pytest.raises(ValueError, match="coords"):
            module(x, other)
    with pytest.raises(ValueError, match="coords"):
        module(x, coords / 0)


@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(3, 8), lambda: torch.nn.Sequential(torch.nn.Linear(3, 8))])
def test_refuses_coordinates_that_a_code_of_places_does_not_read(make):
    encoder, x = Encoder(8, 1, 2, place=make), torch.randn(2, 7, 8)
    assert encoder(x, torch.rand(2, 7, 3)).shape == x.shape
    with pytest.raises(ValueError, match=r"coords must have shape \(b, n, 3\), which place reads, got None"):
        encoder(x)
    with pytest.raises(ValueError, match=r"which place reads, got \(2, 7, 2\)"):
        encoder(x, torch.rand(2, 7, 2))
    with pytest.raises(ValueError, match=r"coords must have shape \(b, n, k\), which place reads, got None"):
        Encoder(8, 1, 2, place=torch.nn.ReLU)(x)


def test_draws_go_to_what_draws():
    source, names = torch.Generator(), ("dense", "performer", "hept", "sampled", "samsa", "sbm")
    options = {"samsa": dict(samples=2), "hept": dict(coord_dims=2)}
    made = {name: make_attention(name, 8, 2, **options.get(name, {})) for name in names}
    assert [name for name in names if draws_of(made[name], source)] == ["sampled", "samsa", "sbm"]
    assert all(draws_of(made[name], None) == {} for name in names)


@pytest.mark.parametrize("name", ["dense", "sampled"])
def test_a_generator_reaches_what_draws_and_troubles_nothing_else(name):
    x, _, _ = inputs(n=40, dtype=torch.float32)
    encoder = Encoder(8, 2, 2, attention=name)

    def drawn(seed):
        return encoder(x, generator=torch.Generator().manual_seed(seed))

    first, draws = drawn(0), name == "sampled"
    assert drawn(0).equal(first) and drawn(1).equal(first) != draws
    for layer in encoder.layers:
        layer.attention = torch.compile(layer.attention, backend="eager")
    torch.testing.assert_close(drawn(0), first)
    with pytest.raises(TypeError, match="nonsense"):
        encoder(x, nonsense=1)


def test_registry():
    assert attention_names() == sorted(attention_names()) == sparseattn.attentions()
    assert type(make_attention("dense", 8, 2)) is DenseAttention
    with pytest.raises(ValueError, match="attention 'dense' is already registered by sparseattn.core.transformer"):
        register_attention("dense")(type("Other", (torch.nn.Module,), {}))
    assert type(make_attention("dense", 8, 2)) is DenseAttention


def test_infos_of_every_layer():
    x, coords, mask = inputs()
    encoder = Encoder(8, 2, 2, attention="dense").double().eval()
    out, infos = encoder(x, mask=mask, return_info=True)
    assert torch.equal(out, encoder(x, mask=mask)) and len(infos) == 2
    pairs = 2 * (6**2 + 1)
    assert all(info.nnz == pairs and info.density == 1.0 and info.flops == pairs * 2 * 8 for info in infos)


def test_a_cloud_without_points_harms_nothing():
    x, _, mask = inputs()
    mask[1] = False
    module = DenseAttention(8, 2).double()
    assert all(g.isfinite().all() for g in gradients(module, x, None, mask))
    assert not module(x, None, mask)[1].any()


def test_counts_may_be_numpy_s():
    assert head_channels(np.int64(16), np.int32(4)) == 4


def test_a_generator_reaches_what_is_wrapped():
    encoder, x = Encoder(16, 1, 2, attention="sbm"), torch.randn(1, 12, 16)
    expected = encoder(x, generator=torch.Generator().manual_seed(3))
    layer = encoder.layers[0]
    layer.attention = checkpoint_wrapper(layer.attention)
    found = encoder(x, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_places_keep_their_digits_under_autocast(dtype):
    layer, x = make_attention("dense", 16, 2, kernel="gaussian", coord_dims=2), torch.randn(1, 100, 16)
    coords, leaf = 100 + 10 * torch.rand(1, 100, 2), layer.log_omega
    expected = layer(x, coords)
    with torch.autocast("cpu", dtype):
        found = layer(x, coords)
    torch.testing.assert_close(found.float(), expected, rtol=0.03, atol=0.03 * expected.abs().max().item())
    to, wanted = (torch.autograd.grad(out.float().square().sum(), leaf)[0] for out in (found, expected))
    torch.testing.assert_close(to, wanted, rtol=0.05, atol=0.05 * wanted.abs().max().item())


@pytest.mark.parametrize("name", sorted({*attention_names()} - {"knn", "stratified"}))     # their shapes follow values
def test_layers_run_without_memory(name):
    needs = NEEDS | {"linformer": dict(max_length=12)}
    with FakeTensorMode():
        x = torch.randn(1, 12, 8, requires_grad=True)
        out = make_attention(name, 8, 2, **needs.get(name, {}))(x, torch.rand(1, 12, 2))
        out.sum().backward()
    assert x.grad.shape == out.shape == (1, 12, 8)


class Holds(torch.nn.Module):
    def __init__(self, name, inner):
        super().__init__()
        self.held = name
        self.add_module(name, inner)

    def forward(self, *args, **kwargs):
        return getattr(self, self.held)(*args, **kwargs)


class TakesNone(Holds):
    def forward(self, x, coords=None, mask=None, return_info=False):
        return getattr(self, self.held)(x, coords, mask, return_info)


@pytest.mark.parametrize("name", ["_orig_mod", "module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"])
def test_a_generator_goes_through_what_hands_it_on_and_to_nothing_else(name):
    draws, plain, source = make_attention("sbm", 16, 4), make_attention("dense", 16, 4), torch.Generator()
    for held in (Holds(name, draws), Holds("module", Holds(name, draws))):
        assert draws_of(held, source) == {"generator": source}
    assert draws_of(Holds(name, plain), source) == draws_of(TakesNone(name, draws), source) == {}
    assert draws_of(Holds("other", draws), source) == {}
    for held in (torch.nn.DataParallel(draws), torch.compile(draws)):
        assert draws_of(held, source) == {"generator": source}


def test_a_name_is_not_taken_twice():
    from sparseattn.core import transformer

    def another(module):
        return type("Mine", (torch.nn.Module,), {"__module__": module, "__qualname__": "Mine"})

    before = transformer._REGISTRY["window"]
    for module in ("__main__", "somewhere"):
        with pytest.raises(ValueError, match="already registered"):
            transformer.register_attention("window")(another(module))
    assert transformer._REGISTRY["window"] is before
    try:
        for module in ("__main__", "__main__", "mine"):
            transformer.register_attention("mine")(another(module))
    finally:
        transformer._REGISTRY.pop("mine", None)
