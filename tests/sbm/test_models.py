"""The models of the experiments: padding, shapes, densities, matched parameters, counted costs."""

import copy

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import sparseattn.baselines.transformers as baselines
import sparseattn.sbm.attention  # noqa: F401  registers "sbm"
from sparseattn.core.attention import AttentionInfo, check_values
from sparseattn.core.transformer import Layer, make_attention
from sparseattn.sbm.models import (
    METHODS,
    PAPER_OPTIONS,
    PAPER_SETTINGS,
    MaskedLanguageModel,
    SequenceClassifier,
    TokenClassifier,
    attention_flops,
    attention_memory,
    density,
    layer_flops,
    layer_parameters,
    matched_hidden,
    table6_time,
)

OPTIONS = {
    "dense": {},
    "linear": {},
    "performer": dict(features=12),
    "linformer": dict(rank=6),
    "nystrom": dict(landmarks=6),
    "reformer": dict(chunk=4),
    "window": dict(width=3),
    "sbm": dict(clusters=8),
}
each = pytest.mark.parametrize("name", OPTIONS)
fixed = pytest.mark.parametrize("name", [name for name in OPTIONS if name != "sbm"])  # the same function every time


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def batch(n=20, pad=7, vocabulary=10, pair=False):
    shape = (2, 2, n) if pair else (2, n)
    mask = torch.ones(shape, dtype=torch.bool)
    mask[1, ..., n - pad :] = False
    return torch.randint(0, vocabulary, shape), mask


def sequence(name, **options):
    return SequenceClassifier(10, 3, attention=name, dim=16, hidden=24, max_length=25, **OPTIONS[name], **options)


MODELS = {
    "sequence": sequence,
    "first": lambda name: sequence(name, pool="first"),
    "pairs": lambda name: sequence(name, pairs=True),
    "places unknown": lambda name: sequence(name, positions=False),
    "token": lambda name: TokenClassifier(10, attention=name, max_length=25, **OPTIONS[name]),
    "language": lambda name: MaskedLanguageModel(10, attention=name, dim=16, hidden=24, max_length=25, **OPTIONS[name]),
}
each_model = pytest.mark.parametrize("kind", MODELS)


@fixed
@each_model
def test_padding_is_neutral(name, kind):
    model = MODELS[kind](name).double().eval()
    tokens, mask = batch(pair=kind == "pairs")
    out = model(tokens.masked_fill(~mask, -99), mask)
    assert torch.equal(out, model(tokens.masked_fill(~mask, 3), mask))
    alone = model(tokens[1:, ..., :13])
    found = out[1:, :13] if kind in ("token", "language") else out[1:]
    torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-10)


@each_model
def test_shapes_and_gradients(kind):
    model = MODELS[kind]("sbm")
    tokens, mask = batch(pair=kind == "pairs")
    out, infos = model(tokens, mask, return_info=True)
    last = {"token": (20, 2), "language": (20, 10)}.get(kind, (3,))
    assert out.shape == (2, *last) and len(infos) == (1 if kind == "token" else 2)
    (out.square().sum() + density(infos)).backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.isfinite().all(), name


def test_settings_of_the_paper_build():
    for task, s in PAPER_SETTINGS.items():
        if task in ("bert", "glue"):
            continue
        sizes = {key: s[key] for key in ("depth", "heads", "dim", "hidden", "head_dim", "max_length", "dropout")}
        if task == "synthetic":
            assert TokenClassifier(256, s["classes"], attention="dense", **sizes).body.max_length == 256
            defaults = TokenClassifier(256, attention="dense")
            same = TokenClassifier(256, s["classes"], attention="dense", **sizes)
            assert [p.shape for p in defaults.parameters()] == [p.shape for p in same.parameters()]
        else:
            SequenceClassifier(32, s["classes"], attention="dense", pool=s["pool"], **sizes)
    for name, options in PAPER_OPTIONS.items():
        make_attention(name, 64, 2, **options | (dict(max_length=512) if name == "linformer" else {}))


def test_mean_is_over_real_tokens():
    model = sequence("dense").eval()
    tokens, mask = batch()
    x, _ = model.body(tokens, mask)
    expected = model.head(torch.stack([x[0].mean(0), x[1, :13].mean(0)]))
    torch.testing.assert_close(model(tokens, mask), expected)


def test_a_pair_is_compared_as_stated():
    model = sequence("dense", pairs=True).eval()
    tokens, mask = batch(pair=True)
    single = [model.body(tokens[:, i], mask[:, i])[0].sum(1) / mask[:, i].sum(1, keepdim=True) for i in range(2)]
    u, v = single
    torch.testing.assert_close(model(tokens, mask), model.head(torch.cat([u, v, u * v, u - v], 1)))
    for wrong in (mask[:, :1].repeat(2, 1, 1), mask.flatten(0, 1)[None], mask.tolist()):   # the first two would flatten
        with pytest.raises(ValueError, match=r"mask must have shape \(\d+, 2, \d+\)"):
            model(tokens, wrong)


def test_every_registered_attention_that_needs_no_places_makes_a_classifier():
    """Also those without a width of heads to choose, as "pat"."""
    tokens = torch.randint(9, (2, 8))
    for name in ("pat", "sampled", "samsa", "dense"):
        model = SequenceClassifier(9, 3, attention=name, dim=16, heads=2, hidden=16, max_length=8)
        assert model(tokens).shape == (2, 3)
    assert matched_hidden("pat", 64, 2, 128) > 128


def test_an_empty_sequence_is_defined():
    tokens, mask = batch(pad=20)
    for kind in ("sequence", "token", "language"):
        assert MODELS[kind]("dense")(tokens, mask).isfinite().all()


def test_language_model_ties_its_tables_and_asks_where():
    model = MODELS["language"]("dense").eval()
    tokens, mask = batch()
    where = torch.rand(2, 20) < 0.2
    out = model(tokens, mask)
    assert out.shape == (2, 20, 10)
    torch.testing.assert_close(model(tokens, mask, where=where), out[where])
    assert sum(p.shape == (10, 16) for p in model.parameters()) == 1
    x = model.transform(model.body(tokens, mask)[0])
    torch.testing.assert_close(out, x @ model.body.tokens.weight.T + model.bias)


def test_a_pretrained_body_moves_to_a_classifier():
    first, second = MODELS["language"]("dense"), sequence("dense")
    second.body.load_state_dict(first.body.state_dict())
    tokens, mask = batch()
    assert torch.equal(first.eval().body(tokens, mask)[0], second.eval().body(tokens, mask)[0])


@each
def test_density(name):
    model = sequence(name)
    found = density(model(*batch(), return_info=True)[1])
    assert found.shape == () and 0 <= found <= 1
    if name == "dense":
        assert found == 1
    if name == "sbm":
        assert found.requires_grad and 0.2 < found < 0.35  # a quarter, and 0.01 for exploration; toy size
        found.backward()
        assert all(layer.attention.clusters.grad.abs().sum() > 0 for layer in model.body.encoder.layers)


def test_density_is_the_mean_over_layers():
    parts = [torch.tensor(0.2, requires_grad=True), 0.6]
    found = density([AttentionInfo(None, 1, part, 1) for part in parts])
    torch.testing.assert_close(found, torch.tensor(0.4))
    found.backward()
    assert parts[0].grad == 0.5
    with pytest.raises(ValueError, match="at least one layer"):
        density([])


@fixed
def test_state_dict_and_deepcopy(name):
    tokens, mask = batch()
    first, second = sequence(name).eval(), sequence(name).eval()
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(tokens, mask), first(tokens, mask))
    assert torch.equal(copy.deepcopy(first)(tokens, mask), first(tokens, mask))


# ---- parameters


@each
@pytest.mark.parametrize("task", ["listops", "image", "bert"])
def test_matched_widths_match(name, task):
    s = PAPER_SETTINGS[task]
    sizes = dict(dim=s["dim"], heads=s["heads"], head_dim=s["head_dim"])
    options = PAPER_OPTIONS.get(name, {}) | (dict(max_length=s["max_length"]) if name == "linformer" else {})
    if name == "linformer" and task != "bert":
        with pytest.raises(ValueError, match="no hidden width matches: a layer of 'linformer'"):
            matched_hidden(name, hidden=s["hidden"], **sizes, **options)
        return
    hidden = matched_hidden(name, hidden=s["hidden"], **sizes, **options)
    dense = layer_parameters("dense", hidden=s["hidden"], **sizes)
    assert abs(layer_parameters(name, hidden=hidden, **sizes, **options) / dense - 1) <= 0.1


def test_width_is_kept_where_it_will_do_and_follows_a_target():
    assert matched_hidden("nystrom", 64, 2, 128, landmarks=4, conv=3) == 128
    sbm = layer_parameters("sbm", 32, 1, 32, clusters=128)
    wide = matched_hidden("dense", 32, 1, 32, target=sbm)
    assert abs(layer_parameters("dense", 32, 1, wide) / sbm - 1) <= 0.1
    with pytest.raises(ValueError, match="no hidden width matches"):
        matched_hidden("sbm", 32, 1, 32, clusters=128)


@each
def test_layer_parameters_are_those_of_a_layer(name):
    options = OPTIONS[name] | (dict(max_length=9) if name == "linformer" else {})
    layer = Layer(make_attention(name, 16, 2, **options), 16, 24)
    assert layer_parameters(name, 16, 2, 24, **options) == sum(p.numel() for p in layer.parameters())


# ---- costs


@each
def test_flops_of_a_layer_agree_with_the_counter(name):
    n, dim, heads, hidden = 50, 16, 2, 24
    build = OPTIONS[name] | {"linformer": dict(max_length=n), "reformer": dict(max_buckets=6)}.get(name, {})
    size = {"performer": dict(rank=12), "linformer": dict(rank=6), "nystrom": dict(rank=6), "window": dict(width=3),
            "reformer": dict(chunk=4, directions=3), "sbm": dict(clusters=8, pairwise=True)}.get(name, {})
    layer = Layer(make_attention(name, dim, heads, head_dim=12, **build), dim, hidden).eval()
    with sdpa_kernel(SDPBackend.MATH), torch.no_grad(), FlopCounterMode(display=False) as counter:
        layer(torch.randn(1, n, dim))
    assert counter.get_total_flops() == layer_flops(name, n, dim, heads, head_dim=12, hidden=hidden, **size)
    feed = 4 * n * dim * hidden
    assert layer_flops(name, n, dim, heads, head_dim=12, **size) == counter.get_total_flops() - feed


@pytest.mark.parametrize("name", [name for name in METHODS if name != "sbm"])
@pytest.mark.parametrize("n, rank", [(50, 8), (5, 8)])
def test_flops_are_those_of_the_baselines(name, n, rank):
    size = dict(rank=rank, rounds=3, chunk=7, directions=5, steps=4, width=9)
    assert attention_flops(name, n, 6, **size) == baselines.attention_flops(name, n, 6, **size)


def test_flops_of_the_sbm_are_those_it_reports():
    """Its own report leaves out the products among clusters, which do not grow with the sequence."""
    layer, x = make_attention("sbm", 16, 2, clusters=8).eval(), torch.randn(1, 200, 16)
    info = layer(x, return_info=True)[1]
    expected = 2 * attention_flops("sbm", 200, 8, density=float(info.density.detach()), clusters=8)
    assert abs(info.flops / expected - 1) < 0.02


def test_sbm_costs_grow_with_density_and_pairs():
    costs = [attention_flops("sbm", 100, 8, density=p) for p in (0, 0.5, 1)]
    assert costs[1] - costs[0] == costs[2] - costs[1] == 4 * 5000 * 8
    assert attention_flops("sbm", 100, 8, pairwise=True) - costs[2] == 2 * 100 * 100 * 128
    assert table6_time(3, 5, 7, 11) == 11 * 5 + 3 * 25 + 3 * 7 * 5 + 49 * 5


@pytest.mark.parametrize("name", METHODS)
def test_memory_grows_as_table_6_says(name):
    sizes = [attention_memory(name, n, 32, density=64 / n) for n in (2**16, 2**17)]
    assert sizes[1] / sizes[0] == pytest.approx(4 if name == "dense" else 2, rel=0.02)


def test_refuses_unknown_methods():
    for function in (attention_flops, attention_memory):
        with pytest.raises(ValueError, match="name is 'sparkling'; it must be one of dense"):
            function("sparkling", 3, 3)


@pytest.mark.parametrize("name", ["dense", "sbm"])
@each_model
def test_padded_batches_compile_and_export_whole(kind, name):
    model, (tokens, mask) = MODELS[kind](name).eval(), batch(pair=kind == "pairs")
    torch.manual_seed(3)
    expected = model(tokens, mask)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for whole in (compiled, torch.export.export(model, (tokens, mask)).module()):
        torch.manual_seed(3)
        torch.testing.assert_close(whole(tokens, mask), expected)


@pytest.mark.parametrize("pairs", [False, True])
def test_the_first_token_is_the_first_real_one(pairs):
    model, (tokens, _) = sequence("dense", pool="first", pairs=pairs).eval(), batch()
    if pairs:
        tokens = torch.stack([tokens, tokens.roll(3, 1)], 1)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    torch.testing.assert_close(model(tokens, mask), model(tokens), rtol=0, atol=0)
    mask[..., :3] = False
    x = model.body(tokens.flatten(0, -2), mask.flatten(0, -2))[0][:, 3].unflatten(0, tokens.shape[:-1])
    x = torch.cat([x[:, 0], x[:, 1], x[:, 0] * x[:, 1], x[:, 0] - x[:, 1]], 1) if pairs else x
    torch.testing.assert_close(model(tokens, mask), model.head(x), rtol=0, atol=0)
    assert not torch.equal(*model(tokens, mask)[:2])
    nothing = model(tokens, torch.zeros_like(mask))
    torch.testing.assert_close(nothing, model.head(torch.zeros_like(x)), rtol=0, atol=0)


def test_a_body_reports_only_if_asked():
    body, (tokens, mask) = sequence("sbm").eval().body, batch()
    alone, (beside, infos) = (body(tokens, mask, asked, generator=torch.Generator().manual_seed(1))
                              for asked in (False, True))
    assert torch.equal(alone, beside) and len(infos) == len(body.encoder.layers)


# ---- bad input


def test_values_of_tokens_are_looked_at_where_values_are():
    model, wrong = sequence("dense"), torch.tensor([[0, 10]])
    with check_values(False), pytest.raises(IndexError):
        model(wrong)


def test_refuses_tokens_that_do_not_fit():
    model, (tokens, mask) = sequence("dense"), batch()
    with pytest.raises(TypeError, match="tokens must be an int64 tensor, got torch.float32"):
        model(tokens.float())
    with pytest.raises(ValueError, match=r"tokens must have shape \(batch, 1 to 25\), got \(2, 26\)"):
        model(torch.zeros(2, 26, dtype=torch.long))
    with pytest.raises(ValueError, match=r"tokens must have shape \(batch, 1 to 25\), got \(0, 20\)"):
        model(tokens[:0])
    with pytest.raises(ValueError, match="tokens must lie in 0..9, found 0 to 10"):
        model(torch.tensor([[0, 10]]))
    with pytest.raises(ValueError, match="mask"):
        model(tokens, mask[:, 1:])
    with pytest.raises(ValueError, match=r"tokens must have shape \(batch, 2, n\), got \(2, 20\)"):
        sequence("dense", pairs=True)(tokens)
    with pytest.raises(TypeError, match="mask must be a boolean tensor"):
        MODELS["language"]("dense")(tokens, where=mask.long())


@pytest.mark.parametrize("options", [dict(vocabulary=0), dict(classes=0), dict(max_length=0), dict(depth=0),
                                     dict(pool="max")], ids=lambda o: next(iter(o)))
def test_refuses_options_out_of_range(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SequenceClassifier(**dict(vocabulary=10, classes=2, max_length=8, attention="dense") | options)
