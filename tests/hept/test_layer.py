"""The layer around block attention: masks, padding, orders, dtypes, compilation, and what it refuses."""

import copy
import math

import pytest
import torch

from sparseattn.core.transformer import Encoder
from sparseattn.hept import attention
from sparseattn.hept.attention import hept_attention
from sparseattn.hept.layer import HEPTAttention
from sparseattn.hept.models import HEPTModel


@pytest.fixture(autouse=True, params=["loop", "log-sum-exp"])
def form(request, monkeypatch):
    """Every test with the loop in C, where it can be, and without."""
    if request.param == "log-sum-exp":
        monkeypatch.setattr(attention, "_loops", lambda x: None)
    elif attention._loops(torch.zeros(1)) is None:
        pytest.skip("needs a C compiler and vectors of 32 bytes")


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def relative(a, b):
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


LAYERS = {
    "default": dict(),
    "union": dict(combine="union"),
    "features": dict(codes="features"),
    "or only": dict(codes="none"),
    "softmax": dict(kernel="softmax"),
    "coords": dict(hash_by="coords"),
    "coords, softmax": dict(hash_by="coords", kernel="softmax", codes="none"),
    "tied": dict(tied=True),
    "summed": dict(decay="summed"),
}
each_layer = pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)


def layer_inputs(n=23, dtype=torch.float32):
    g = source(1)
    mask = torch.rand(2, n, generator=g) < 0.7
    mask[1] = torch.arange(n) == 3
    return torch.randn(2, n, 8, generator=g).to(dtype), torch.rand(2, n, 3, generator=g).to(dtype), mask


def layer(seed=0, **options):
    torch.manual_seed(seed)
    return HEPTAttention(8, 2, **{**dict(coord_dims=3, block_size=4, generator=source(seed)), **options})


def weights_gradients(module, *args):
    module.zero_grad()
    module(*args).square().sum().backward()
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


@each_layer
def test_layer_learns_with_finite_gradients(options):
    module = layer(**options)
    found = weights_gradients(module, *layer_inputs())
    assert all(g.isfinite().all() for g in found.values())
    trained = {n for n, g in found.items() if g.any()}
    assert trained >= {"query.weight", "value.weight", "out.weight"}
    assert any("decay" in name for name in trained) == (options.get("kernel") != "softmax")


@each_layer
@pytest.mark.parametrize("garbage", [1e30, math.nan], ids=["huge", "nan"])
def test_layer_ignores_masked_points(options, garbage):
    module, (x, coords, mask) = layer(**options), layer_inputs()
    other = [t.masked_fill(~mask[..., None], garbage) for t in (x, coords)]
    out = module(x, coords, mask)
    assert not out[~mask].any() and torch.equal(out, module(*other, mask))
    first, second = (weights_gradients(module, *t, mask) for t in ((x, coords), other))
    assert all(torch.equal(first[name], second[name]) for name in first)


@each_layer
def test_layer_on_a_padded_cloud_equals_the_cloud_alone(options):
    module, (x, coords, mask) = layer(**options), layer_inputs()
    alone = module(x[:1, mask[0]], coords[:1, mask[0]])
    torch.testing.assert_close(module(x, coords, mask)[0, mask[0]], alone[0], rtol=1e-5, atol=1e-6)


@each_layer
def test_layer_with_renumbered_points(options):
    module, (x, coords, mask) = layer(**options), layer_inputs()
    p = torch.randperm(23, generator=source(2))
    expected = module(x, coords, mask)[:, p]
    torch.testing.assert_close(module(x[:, p], coords[:, p], mask[:, p]), expected, rtol=1e-5, atol=1e-6)


def test_layer_does_not_see_where_the_origin_is():
    """Shifts that float32 holds exactly."""
    module, (x, coords, mask) = layer(), layer_inputs()
    coords = (coords * 1024).round() / 1024
    torch.testing.assert_close(module(x, coords + 1024, mask), module(x, coords, mask), rtol=1e-5, atol=1e-6)


def test_layer_equals_the_reference_on_its_own_orders(monkeypatch):
    module, (x, coords, mask) = layer(), layer_inputs()
    seen = {}

    def slow(q, k, v, order_q, order_k, block_size, combine, mask, floor, check):
        seen.update(block_size=block_size)
        options = dict(block_size=block_size, combine=combine, mask=mask, floor=floor)
        return hept_attention(q.double(), k.double(), v.double(), order_q, order_k, impl="reference", **options).float()

    fast = module(x, coords, mask)
    monkeypatch.setattr(attention, "_attend", slow)
    torch.testing.assert_close(module(x, coords, mask), fast, rtol=1e-5, atol=1e-6)
    assert seen == dict(block_size=4)


@pytest.mark.parametrize("kernel", ["hept", "softmax"])
@pytest.mark.parametrize("codes", ["coordinates", "none"])
def test_one_sort_of_a_cloud_for_many_layers(kernel, codes):
    """The order is that of the layer itself, hears no features, and is that of the hash of the coordinates."""
    options = dict(hash_by="coords", kernel=kernel, codes=codes, coord_dims=3, block_size=4)
    x, coords, mask = layer_inputs()
    torch.manual_seed(0)
    encoder = Encoder(8, 3, 2, attention="hept", **options)
    first = encoder.layers[0].attention
    order = first.order(coords, mask)
    assert order.shape == (3, 2, 2, 23)
    for features in (x, x.flip(1)):
        assert torch.equal(first(features, coords, mask, order=order), first(features, coords, mask))
    expected = x
    for each in encoder.layers:
        expected = each(expected, coords, mask, order=order)
    assert torch.equal(encoder(x, coords, mask, order=order), expected.masked_fill(~mask[..., None], 0))
    for place, real in zip(order.flatten(0, 2), mask.repeat_interleave(2, 0).repeat(3, 1), strict=True):
        assert real[place].tolist() == sorted(real.tolist(), reverse=True)
    if codes == "none":
        q, k, v = (first._split(part(x)) for part in (first.query, first.key, first.value))
        centred = coords - (coords * mask[..., None]).sum(1, True) / mask.sum(1)[:, None, None]
        hashes = torch.einsum("thc,bnc->tbhn", first.hash.directions[0], centred)
        again = hashes.masked_fill(~mask[:, None], math.inf).argsort(-1)
        real = mask[None, :, None].expand_as(order).gather(-1, order)
        assert torch.equal(order[real], again[real])


def test_generator_fixes_the_draws():
    names = ("hash.directions", "hash.buckets")
    first, second, third = (dict(layer(s).named_buffers()) for s in (0, 0, 1))
    assert all(torch.equal(first[n], second[n]) and not torch.equal(first[n], third[n]) for n in names)


@each_layer
def test_state_dict_and_deepcopy(options):
    inputs, first, second = layer_inputs(), layer(0, **options), layer(1, **options)
    expected = first(*inputs)
    assert not torch.equal(second(*inputs), expected)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(*inputs), expected)
    assert torch.equal(copy.deepcopy(first)(*inputs), expected)


@each_layer
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_layer_in_other_dtypes(options, dtype):
    x, coords, mask = layer_inputs()
    out = layer(**options).to(dtype)(x.to(dtype), coords.to(dtype), mask)
    assert out.dtype == dtype and out.isfinite().all()
    if dtype == torch.float64:
        torch.testing.assert_close(out.float(), layer(**options)(x, coords, mask), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [LAYERS["default"], LAYERS["features"]], ids=["default", "features"])
def test_autocast(options):
    """Rounded codes may sort otherwise, so values are compared with one block only, where the order does not matter."""
    inputs = layer_inputs()
    module = layer(**options, block_size=4)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(*inputs)
        out.float().square().sum().backward()
    assert out.dtype == torch.bfloat16 and out.isfinite().all()
    assert all(p.grad.isfinite().all() for p in module.parameters())
    module = layer(**options, block_size=100)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(*inputs)
    torch.testing.assert_close(out.float(), module(*inputs), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.02), (torch.float16, 0.003)])
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"codes": "none"}])
@pytest.mark.parametrize("extent", [1, 100, 1000])
def test_autocast_keeps_neighbours_of_wide_clouds(extent, options, dtype, tolerance):
    g = source(5)
    centres = extent * torch.rand(1, 20, 3, generator=g).repeat_interleave(20, 1)
    x, coords = torch.randn(1, 400, 8, generator=g), centres + 0.1 * torch.randn(1, 400, 3, generator=g)
    module = layer(**options, block_size=20)
    with torch.autocast("cpu", dtype):
        found = module(x, coords)
    assert found.dtype == dtype and relative(found.float(), module(x, coords)) < tolerance


def test_per_sample_gradients():
    module, (x, coords, _) = layer(), layer_inputs()

    def loss(parameters, x, coords):
        return torch.func.functional_call(module, parameters, (x[None], coords[None])).square().sum()

    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(dict(module.named_parameters()), x, coords)
    for i in range(2):
        for name, expected in weights_gradients(module, x[i : i + 1], coords[i : i + 1]).items():
            torch.testing.assert_close(found[name][i], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"tied": True, "codes": "features"},
                                     {"combine": "union", "kernel": "softmax"}])
def test_compiles_in_one_piece(options):
    """With a mask, at lengths below and above a block, values and gradients as without."""
    module, (x, coords, mask) = layer(**options), layer_inputs()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    for n in (x.shape[1], x.shape[1] - 3, 5):
        cloud = x[:, :n].clone().requires_grad_(), coords[:, :n], mask[:, :n]
        found, expected = ([out := run(*cloud), *torch.autograd.grad(out.sin().sum(), [cloud[0], *module.parameters()])]
                           for run in (compiled, module))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    torch.compiler.reset()


def test_per_sample_gradients_compile():
    module, (x, coords, _) = layer().double(), layer_inputs()

    def loss(parameters, x, coords):
        return torch.func.functional_call(module, parameters, (x[None], coords[None])).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
    cloud = dict(module.named_parameters()), x.double(), coords.double()
    torch.testing.assert_close(torch.compile(each, backend="aot_eager")(*cloud), each(*cloud), rtol=1e-9, atol=1e-10)
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_layer_on_a_gpu(dtype):
    x, coords, mask = (t.cuda() for t in layer_inputs())
    module = layer(block_size=100).cuda()
    expected = module(x, coords, mask).cpu()
    torch.testing.assert_close(expected, layer(block_size=100)(*layer_inputs()), rtol=1e-3, atol=1e-4)
    with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
        out = module(x, coords, mask)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float().cpu(), expected, rtol=0.05, atol=0.05)


def test_layer_info():
    out, info = layer()(*layer_inputs(), return_info=True)
    assert out.shape == (2, 23, 8) and 0 < info.nnz and 0 < info.density
    x, coords, mask = layer_inputs()
    out, info = layer()(x, coords, torch.zeros_like(mask), return_info=True)
    assert not out.any() and info.nnz == 0


# --- what the layer refuses


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(heads=3), "heads must divide dim .* got heads 3 and dim 8"),
        (dict(heads=0), "heads must divide dim .* got heads 0"),
        (dict(heads=0, head_dim=4), "heads"),
        (dict(head_dim=0), "head_dim"),
        (dict(tables=0), "tables"),
        (dict(coord_dims=0), "coord_dims"),
        (dict(combine="mean"), "combine must be"),
        (dict(codes="both"), "codes must be one of .coordinates., .features., .none."),
        (dict(kernel="cosine"), "kernel must be one of .hept., .softmax."),
        (dict(decay="fast"), "decay must be"),
        (dict(hash_by="place"), "hash_by must be one of .features., .coords."),
        (dict(hash_by="coords", codes="features"), "codes='features' needs hash_by='features'"),
        (dict(regions=0), "regions"),
        (dict(regions=0.5), "regions"),
        (dict(regions=math.nan), "regions"),
        (dict(floor=-1.0), "floor"),
    ],
    ids=str,
)
def test_layer_refuses_options(options, message):
    with pytest.raises(ValueError, match=message):
        HEPTAttention(8, **{**dict(heads=2, coord_dims=2), **options})


@pytest.mark.parametrize("points", [50, 900, 4000, 60_000])
def test_no_more_aux_codes_than_a_block_can_fill(points):
    """Without `regions` the numbers of buckets multiply to about n / (4 block_size), however uneven they are drawn."""
    hashing = HEPTAttention(8, heads=2, coord_dims=2, block_size=25, tables=200, generator=source()).hash
    found = hashing._bucket_counts(1, points, None)
    codes = found.prod(-1)
    assert found.min() >= 1 and codes.max() <= max(1, points / 100) * (1 + 1e-5)
    assert codes.median() >= 0.5 * points / 100


def test_layer_refuses_orders():
    x, coords, mask = layer_inputs()
    with pytest.raises(ValueError, match="order needs hash_by='coords', got 'features'"):
        layer().order(coords)
    module = layer(hash_by="coords")
    order = module.order(coords, mask)
    for bad in (order[:, :1], order[..., :5], order.flatten(0, 1)):
        with pytest.raises(ValueError, match="order must have shape"):
            module(x, coords, mask, order=bad)
    with pytest.raises(TypeError, match="order must be an int64 tensor"):
        module(x, coords, mask, order=order.float())
    with pytest.raises(ValueError, match="must hold permutations"):
        module(x, coords, mask, order=torch.zeros_like(order))
    with pytest.raises(ValueError, match="coords"):
        module.order(coords[..., :2])


def test_layer_refuses_inputs():
    module, (x, coords, mask) = layer(), layer_inputs()
    for bad, message in [
        ((x, None), "coords are needed"),
        ((x, coords[..., :2]), r"coords must have shape \(2, 23, 3\)"),
        ((x, coords[:, :5]), r"coords must have shape \(2, 23, 3\)"),
        ((x, coords / 0), "coords holds NaN or infinite"),
        ((x * math.nan, coords), "x holds NaN or infinite"),
        ((x[:, :0], coords[:, :0]), "x has no points"),
        ((x[0], coords[0]), "x must have 3 dimensions"),
        ((x, coords, mask[:1]), r"mask must have shape \(2, 23\)"),
    ]:
        with pytest.raises(ValueError, match=message):
            module(*bad)


def test_layer_refuses_another_number_of_channels():
    x, coords, _ = layer_inputs()
    with pytest.raises(ValueError, match="x must have"):
        layer()(x[..., :5], coords)


@pytest.mark.parametrize("masked", [False, True])
def test_layer_refuses_types(masked):
    module, (x, coords, mask) = layer(), layer_inputs()
    more = (mask,) if masked else ()
    for bad, message in [
        (([1.0], coords), "x must be a floating-point tensor, got list"),
        ((x.long(), coords), "x must be a floating-point tensor, got torch.int64"),
        ((x, coords.tolist()), "coords must be a floating-point tensor, got list"),
    ]:
        with pytest.raises(TypeError, match=message):
            module(*bad, *more)
    with pytest.raises(TypeError, match="mask must be a boolean tensor"):
        module(x, coords, mask.float())


def test_released_form_refuses_masks_and_odd_sizes():
    module, (x, coords, mask) = layer(as_released=True), layer_inputs(24)
    assert module(x, coords).shape == x.shape
    for bad in ((x, coords, mask), (x[:, :23], coords[:, :23])):
        with pytest.raises(ValueError, match="as_released"):
            module(*bad)


@pytest.mark.parametrize("impl", ["composed", "reference"])
def test_released_form_is_one(impl):
    with pytest.raises(ValueError, match=f"as_released has one form, impl='fast', got impl='{impl}'"):
        layer(as_released=True, impl=impl)


@pytest.mark.parametrize("impl", ["composed", "reference"])
def test_forms_of_the_layer(impl):
    inputs = layer_inputs()
    torch.testing.assert_close(layer(impl=impl)(*inputs), layer()(*inputs), rtol=1e-5, atol=1e-6)


def test_one_sort_for_a_network():
    """An order given to the network reaches every layer."""
    g = source(4)
    x, coords = torch.randn(1, 60, 5, generator=g), torch.rand(1, 60, 2, generator=g)
    torch.manual_seed(0)
    model = HEPTModel(5, 2, dim=8, heads=2, depth=3, hash_by="coords", block_size=10).eval()
    layers = [each.attention for each in model.encoder.layers]
    for each in layers[1:]:
        each.hash.load_state_dict(layers[0].hash.state_dict())
    order = layers[0].order(coords)
    torch.testing.assert_close(model(x, coords, order=order), model(x, coords))
    assert not torch.allclose(model(x, coords, order=order.flip(-1).roll(3, -1)), model(x, coords))
