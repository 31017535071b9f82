"""The tracking model, its pairs and losses against loops, and the released weights."""

import copy
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

import sparseattn
from sparseattn.core.transformer import Layer, make_attention
from sparseattn.data.cache import data_path, have_data
from sparseattn.hept.models import (
    EmbeddingHead,
    HEPTModel,
    Pairs,
    draw_negatives,
    focal_loss,
    info_nce,
    load_released,
    similarity,
    tracking_batch,
    tracking_loss,
    training_pairs,
)


def source(seed=0):
    return torch.Generator().manual_seed(seed)


def cloud(n=60, particles=12, seed=0):
    """Places, particle numbers (some noise), and which hits are valid."""
    g = source(seed)
    return (
        torch.rand(n, 2, generator=g),
        torch.randint(-1, particles, (n,), generator=g),
        torch.rand(n, generator=g) < 0.8,
    )


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


# --- the model


def small(**options):
    return HEPTModel(15, 6, **{**dict(dim=8, depth=2, heads=2, block_size=10), **options}).eval()


@pytest.mark.parametrize("positions", [False, True, "layers"])
@pytest.mark.parametrize("name", sparseattn.attentions())
def test_every_attention_makes_a_model(name, positions):
    needs = {"linformer": dict(max_length=33, rank=4), "point_transformer": dict(k=4)}.get(name, {})
    model = HEPTModel(15, 6, dim=8, depth=1, heads=2, attention=name, positions=positions, **needs).eval()
    x, coords, mask = inputs()
    out = model(x, coords, mask)
    assert out.shape == (2, 33, 12) and out.isfinite().all() and not out[~mask].any()
    if positions is True or positions and name != "none":  # a layer whose attention is 0 hears no code
        assert not torch.equal(model(x, coords + torch.rand(6), mask), out)


def test_places_enter_every_layer_and_are_not_handed_on():
    model = HEPTModel(15, 6, dim=8, depth=2, heads=2, attention="dense", positions="layers").eval()
    x, coords, _ = inputs()
    states = [model.encode(x)]
    for layer in model.encoder.layers:
        state = states[-1] + layer.attention(layer.norm1(states[-1] + layer.place(coords)))
        states.append(state + layer.feed(layer.norm2(state)))
    torch.testing.assert_close(model(x, coords), model.head(torch.cat(states, -1)))
    first, second = (layer.place[0].weight for layer in model.encoder.layers)
    assert not torch.equal(first, second) and model.place is None


def test_an_attention_may_have_features_of_its_own():
    model = HEPTModel(15, 6, dim=8, depth=1, heads=2, attention="performer", features=5)
    assert model.encoder.layers[0].attention.features.shape[1] == 5 and model.features == 15


def test_layers_of_another_make_are_read_like_others():
    """Every state goes to the head, with as many outputs as wanted."""
    layers = [Layer(make_attention("dense", 8, 2), 8, 8) for _ in range(3)]
    model, (x, coords, _) = HEPTModel(15, 6, 5, dim=8, layers=layers).eval(), inputs()
    states = [model.encode(x)]
    for layer in layers:
        states.append(layer(states[-1]))
    torch.testing.assert_close(model(x, coords), model.head(torch.cat(states, -1)))
    assert model(x, coords).shape == (2, 33, 5)


def inputs(n=33):
    g = source(2)
    mask = torch.arange(n) < torch.tensor([[n], [n // 2]])
    return torch.randn(2, n, 15, generator=g), torch.rand(2, n, 6, generator=g), mask


def test_number_of_parameters():
    """Tracking: 15 features, 6 coordinates, width 24, 4 layers of 8 heads, the decay in its released form."""
    assert sum(p.numel() for p in HEPTModel(15, 6, decay="summed").parameters()) == 326_436


def test_number_of_parameters_added_up():
    linear, norm = (lambda a, b, bias=1: (a + bias) * b), (lambda a: 2 * a)
    encode = linear(15, 24) + linear(24, 24)
    attention = 3 * linear(24, 192, 0) + linear(192, 24) + linear(50, 192)
    layer = attention + 2 * norm(24) + 2 * linear(24, 24)
    head = linear(120, 12, 0) + linear(12, 256) + 3 * linear(256, 256) + 4 * norm(256) + linear(256, 12)
    assert encode + 4 * layer + head == 326_436


@pytest.mark.parametrize("attention", ["hept", "dense"])
@pytest.mark.parametrize("garbage", [1e30, math.nan], ids=["huge", "nan"])
def test_model_ignores_masked_points(attention, garbage):
    options = dict(attention=attention) if attention == "hept" else dict(attention=attention, kernel="gaussian")
    model = HEPTModel(15, 6, dim=8, depth=2, heads=2, **options).eval()
    x, coords, mask = inputs()
    out = model(x, coords, mask)
    assert out.shape == (2, 33, 12) and not out[~mask].any()
    assert torch.equal(out, model(*(t.masked_fill(~mask[..., None], garbage) for t in (x, coords)), mask))
    torch.testing.assert_close(out[1:, :16], model(x[1:, :16], coords[1:, :16]), rtol=1e-4, atol=1e-5)


def test_head_is_linear_plus_correction():
    head, x = EmbeddingHead(7, 3, hidden=5).eval(), torch.randn(4, 7)
    first = x @ head.project.weight.T
    torch.testing.assert_close(head(x), first + head.correct(first))


def test_state_dict_deepcopy_and_training_mode():
    first, second, arguments = small(), small(), inputs()
    expected = first(*arguments)
    assert not torch.equal(second(*arguments), expected)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(*arguments), expected) and torch.equal(copy.deepcopy(first)(*arguments), expected)
    assert not torch.equal(first.train()(*arguments), expected)


def test_model_in_float64():
    x, coords, mask = inputs()
    assert small().double()(x.double(), coords.double(), mask).dtype == torch.float64


def test_model_refuses():
    x, coords, _ = inputs()
    with pytest.raises(ValueError, match="attention is 'nothing'"):
        small(attention="nothing")
    with pytest.raises(ValueError, match="positions must be one of"):
        small(positions="everywhere")
    with pytest.raises(TypeError, match="wrong"):
        small(wrong=1)
    with pytest.raises(ValueError, match="coords"):
        small()(x, coords[..., :5])
    with pytest.raises(ValueError, match="coords holds NaN or infinite"):
        small()(x, coords / 0)
    with pytest.raises(ValueError, match="x holds NaN or infinite"):
        small()(x * math.nan, coords)


@pytest.mark.parametrize("shape", [(2, 5), (33,), (1, 33), (2, 33, 1)])
def test_model_refuses_masks(shape):
    x, coords, _ = inputs()
    with pytest.raises(ValueError, match=r"mask must have shape \(2, 33\)"):
        small()(x, coords, torch.ones(shape, dtype=torch.bool))
    with pytest.raises(TypeError, match="mask must be a boolean tensor"):
        small()(x, coords, torch.ones(2, 33))


# --- pairs


@pytest.mark.parametrize("n, negatives, radius", [(60, 5, 0.3), (60, 256, 1.0), (60, 1, 0.05), (2, 3, 1.0)])
def test_pairs_equal_the_loop(n, negatives, radius):
    place, particle, valid = cloud(n) if n > 2 else (torch.rand(2, 2), torch.tensor([4, 4]), torch.ones(2).bool())
    pairs = training_pairs(place, particle, valid, negatives=negatives, radius=radius)
    index = [i for i in range(n) if valid[i] and particle[i] > 0]
    expected = {(i, j) for i, j in itertools.permutations(index, 2) if particle[i] == particle[j]}
    assert len(pairs.anchor) == len(expected)
    assert set(zip(pairs.anchor.tolist(), pairs.positive.tolist(), strict=True)) == expected
    assert pairs.hits.tolist() == sorted({i for i, _ in expected})
    assert torch.equal(pairs.hits[pairs.row], pairs.anchor)
    numbers = {p: i for i, p in enumerate(sorted({int(particle[i]) for i, _ in expected}))}
    assert pairs.particle.tolist() == [numbers[int(particle[i])] for i in pairs.anchor]
    for i, row in zip(pairs.hits.tolist(), pairs.negatives.tolist(), strict=True):
        gap = (place.double() - place[i].double()).norm(dim=1)
        near = sorted((j for j in range(n) if particle[j] != particle[i] and gap[j] < radius), key=lambda j: gap[j])
        assert row == (near + [-1] * negatives)[:negatives]


def test_no_pairs():
    place, particle, valid = cloud()
    for nothing in ((torch.arange(60) + 1, valid), (particle, torch.zeros(60).bool()), (-particle.abs(), valid)):
        pairs = training_pairs(place, *nothing)
        assert len(pairs.anchor) == len(pairs.hits) == 0
        with pytest.raises(ValueError, match="pairs: no particle has two valid hits"):
            info_nce(torch.randn(60, 3), pairs)


def test_drawn_negatives_are_uniform_and_of_other_particles():
    """A chi-square test over all anchors, 50,000 hits each, with a false-alarm rate of 1e-4."""
    place, particle, valid = cloud()
    pairs = training_pairs(place, particle, valid, negatives=5, radius=0.3)
    more = draw_negatives(pairs, particle, 50_000, source())
    assert torch.equal(more.negatives[:, :5], pairs.negatives)
    assert torch.equal(more.hits, pairs.hits) and torch.equal(more.row, pairs.row)
    drawn = more.negatives[:, 5:]
    own = particle[pairs.hits][:, None] == particle  # (anchors, hits)
    rows = drawn >= 0
    assert not own.gather(1, drawn.clamp(min=0))[rows].any()
    counts = torch.stack([row[row >= 0].bincount(minlength=len(particle)) for row in drawn])
    found = torch.cat([counts, (~rows).sum(1, keepdim=True)], 1).double()
    expected = 50_000 / len(particle) * torch.cat([(~own).double(), own.sum(1, keepdim=True)], 1)
    there = expected > 0
    statistic = ((found - expected).square() / expected)[there].sum()
    assert stats.chi2.sf(statistic.item(), int(there.sum()) - len(drawn)) > 1e-4


def test_model_names_what_does_not_fit():
    model = HEPTModel(3, 2, dim=8, depth=1, heads=2, attention="dense", positions="input")
    x, coords = torch.rand(1, 5, 3), torch.rand(1, 5, 2)
    for bad, error, words in (((x, None), ValueError, "coords"), ((x, coords[..., :1]), ValueError, "coords"),
                              ((x.double(), coords.double()), TypeError, "x must have the dtype of weight")):
        with pytest.raises(error, match=words):
            model(*bad)


def test_model_tells_what_every_layer_did():
    model = HEPTModel(3, 2, dim=8, depth=3, heads=2, block_size=5).eval()
    x, coords, mask = torch.rand(2, 12, 3), torch.rand(2, 12, 2), torch.arange(12) < torch.tensor([[12], [7]])
    out, infos = model(x, coords, mask, return_info=True)
    assert torch.equal(out, model(x, coords, mask)) and len(infos) == 3 and all(i.nnz for i in infos)


def test_particles_may_have_any_numbers():
    """Those of TrackML have 16 digits."""
    place, particle, valid = cloud()
    pairs = training_pairs(place, particle, valid, negatives=5)
    long = torch.where(particle > 0, particle + (1 << 52), particle)
    some = training_pairs(place.requires_grad_(), long, valid, negatives=5)
    assert torch.equal(some.anchor, pairs.anchor) and torch.equal(some.negatives, pairs.negatives)
    with pytest.raises(ValueError, match="eta and phi"):
        training_pairs(torch.rand(60, 3), particle, valid)


def test_pairs_refuse_different_lengths():
    place, particle, valid = cloud()
    for bad in ((place[:5], particle, valid), (place, particle, valid[:5])):
        with pytest.raises(ValueError, match="coords, particle and valid must have one length"):
            training_pairs(*bad)


# --- losses


def literal_similarity(d, form, tau):
    """The three forms."""
    return {"released": math.exp(-d / 1.125) / tau, "printed": math.exp(-d * d / tau), "squared": -d * d / tau}[form]


def literal_loss(points, pairs, form, tau):
    """-log of e^near over e^near plus all e^far, averaged within particles, then over them."""
    points, terms = points.double().tolist(), {}
    for i, j, number, row in zip(
        *(t.tolist() for t in (pairs.anchor, pairs.positive, pairs.particle, pairs.row)), strict=True
    ):
        near = literal_similarity(math.dist(points[i], points[j]), form, tau)
        others = [m for m in pairs.negatives[row].tolist() if m >= 0]
        far = [literal_similarity(math.dist(points[i], points[m]), form, tau) for m in others]
        total = sum(math.exp(f - near) for f in far)
        terms.setdefault(number, []).append(math.log1p(total))
    return sum(sum(t) / len(t) for t in terms.values()) / len(terms)


@pytest.mark.parametrize("form", ["released", "printed", "squared"])
@pytest.mark.parametrize("negatives, radius", [(256, 1.0), (4, 0.2), (4, 1e-6)])
def test_info_nce_equals_the_loop(form, negatives, radius):
    pairs = training_pairs(*cloud(), negatives=negatives, radius=radius)
    points = 0.4 * torch.randn(60, 3, generator=source(1), dtype=torch.float64)
    for tau in (0.05, 0.7):
        found = info_nce(points, pairs, form=form, tau=tau).item()
        assert found == pytest.approx(literal_loss(points, pairs, form, tau), rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("form", ["released", "squared"])
def test_info_nce_gradients(form):
    particle = torch.arange(12) // 4 + 1
    pairs = training_pairs(torch.rand(12, 2, generator=source()), particle, particle > 0, negatives=4)
    points = torch.randn(12, 2, generator=source(1), dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: info_nce(x, pairs, form=form, tau=0.5), points)


@pytest.mark.parametrize("form", ["released", "printed", "squared"])
def test_info_nce_of_coinciding_embeddings(form):
    """All similarities are equal, so each pair costs log(1 + negatives); the gradient is finite."""
    pairs = Pairs(*(torch.tensor(t) for t in ([0, 1], [1, 0], [0, 0], [0, 1], [[2, 3], [2, -1]], [0, 1], [2])))
    points = torch.zeros(4, 2, requires_grad=True)
    loss = info_nce(points, pairs, form=form)
    assert loss.item() == pytest.approx((math.log(3) + math.log(2)) / 2, rel=1e-6)
    loss.backward()
    assert points.grad.isfinite().all()


@pytest.mark.parametrize("tau", [0.0, -1.0, math.nan])
def test_similarity_refuses(tau):
    with pytest.raises(ValueError, match="tau must be positive"):
        similarity(torch.tensor(1.0), tau=tau)
    with pytest.raises(ValueError, match="form is 'cosine'; it must be one of released, printed, squared"):
        similarity(torch.tensor(1.0), "cosine")


def test_tracking_loss_is_the_loss_of_the_model():
    x, coords, _ = inputs()
    particle = torch.arange(33) // 4
    batch, model = tracking_batch(x[0], coords[0], particle, particle > 0), small()
    expected = info_nce(model(x[:1], coords[:1])[0], training_pairs(coords[0, :, :2], particle, particle > 0))
    assert torch.equal(tracking_loss(model, batch), expected)
    tracking_loss(model, batch).backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("gamma", [0.0, 2.0, 3.5])
def test_focal_loss_equals_the_formula(balanced, gamma):
    logits, labels = torch.randn(30, generator=source(), dtype=torch.float64) * 3, (torch.arange(30) % 3 == 0).double()
    total = 0.0
    for z, y in zip(logits.tolist(), labels.tolist(), strict=True):
        p = 1 / (1 + math.exp(-z)) if y else 1 - 1 / (1 + math.exp(-z))
        factor = 0.25 if y or not balanced else 0.75
        total -= factor * (1 - p) ** gamma * math.log(p)
    found = focal_loss(logits, labels, gamma=gamma, balanced=balanced)
    assert found.item() == pytest.approx(total / 30, rel=1e-10)


def test_focal_loss_of_extreme_logits():
    logits = torch.tensor([200.0, -200.0, 200.0], requires_grad=True)
    loss = focal_loss(logits, torch.tensor([1.0, 0.0, 0.0]))
    loss.backward()
    assert loss.item() == pytest.approx(0.25 * 200 / 3) and logits.grad.isfinite().all()


# --- the released weights


def test_load_released_is_exported():
    import sparseattn.hept

    assert sparseattn.hept.load_released is load_released


def test_load_released_without_a_file(tmp_path):
    with pytest.raises(FileNotFoundError, match="path: no file 'none.npz'"):
        load_released(tmp_path / "none.npz")
    with pytest.raises(FileNotFoundError, match="path"):
        load_released(tmp_path)


def released_names():
    """Names and shapes that the file must hold, as released."""
    shapes = {"regions": (3, 2, 8), "W.weight": (12, 120)}
    for i, width in ((0, 15), (2, 24)):
        shapes |= {f"feat_encoder.{i}.weight": (24, width), f"feat_encoder.{i}.bias": (24,)}
    for i in range(4):
        parts = {"w_q.weight": (192, 24), "w_k.weight": (192, 24), "w_v.weight": (192, 24)}
        parts |= {"w_rpe.weight": (192, 50), "w_rpe.bias": (192,), "attn.e2lsh.alpha": (8, 30, 3)}
        parts |= {"attn.out_linear.weight": (24, 192), "attn.out_linear.bias": (24,)}
        parts |= {f"{n}.{p}": (24,) for n in ("norm1", "norm2") for p in ("weight", "bias")}
        parts |= {f"ff.{j}.weight": (24, 24) for j in (0, 2)} | {f"ff.{j}.bias": (24,) for j in (0, 2)}
        shapes |= {f"attns.{i}.{name}": shape for name, shape in parts.items()}
    for i in range(5):
        out = 12 if i == 4 else 256
        shapes |= {f"mlp_out.lins.{i}.weight": (out, 12 if i == 0 else 256), f"mlp_out.lins.{i}.bias": (out,)}
    return shapes | {f"mlp_out.norms.{i}.{p}": (256,) for i in range(4) for p in ("weight", "bias")}


@pytest.fixture
def arrays():
    rng = np.random.default_rng(0)
    made = {name: rng.standard_normal(shape).astype("float32") * 0.1 for name, shape in released_names().items()}
    return made | {"regions": np.full((3, 2, 8), 12.0, "float32")}


def test_load_released_takes_such_arrays(tmp_path, arrays):
    np.savez(tmp_path / "made.npz", **arrays)
    model = load_released(tmp_path / "made.npz", as_released=False)
    assert not model.training
    x, coords, mask = inputs(150)
    assert model(x, coords, mask).shape == (2, 150, 12)
    assert torch.equal(model.encoder.layers[2].attention.key.weight, torch.from_numpy(arrays["attns.2.w_k.weight"]))
    assert torch.equal(model.head.project.weight, torch.from_numpy(arrays["W.weight"]))


def test_load_released_takes_the_published_kind_of_file(tmp_path, arrays):
    "A state_dict saved by torch, read as tensors and nothing else."
    np.savez(tmp_path / "made.npz", **arrays)
    torch.save({name: torch.from_numpy(array) for name, array in arrays.items()}, tmp_path / "made.pt")
    ours, theirs = (load_released(tmp_path / f"made.{kind}").state_dict() for kind in ("npz", "pt"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    torch.save({"regions": Fraction(1, 2)}, tmp_path / "pickled.pt")
    with pytest.raises(ValueError, match="path: pickled.pt"):
        load_released(tmp_path / "pickled.pt")


@pytest.fixture
def released(tmp_path, arrays):
    np.savez(tmp_path / "made.npz", **arrays)
    return load_released(tmp_path / "made.npz")


def clouds(*sizes):
    g = torch.Generator().manual_seed(0)
    return [(torch.randn(1, n, 15, generator=g), torch.rand(1, n, 6, generator=g)) for n in sizes]


@torch.no_grad()
def test_released_model_in_threads(released):
    given = clouds(*[230, 250, 270, 310] * 4)
    alone = [released(*cloud) for cloud in given]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda cloud: released(*cloud), given))
    assert all(map(torch.equal, alone, together))


@torch.no_grad()
def test_released_model_keeps_nothing_of_a_cloud(released):
    first, second = clouds(300, 300)
    new = copy.deepcopy(released).encoder(released.encode(second[0]), second[1])
    released(*first)
    assert torch.equal(released.encoder(released.encode(second[0]), second[1]), new)


@torch.no_grad()
def test_released_model_needs_a_block_and_no_mask(released):
    (cloud,) = clouds(50)
    with pytest.raises(ValueError, match="x: a cloud needs at least 100 points as released, got 50"):
        released(*cloud)
    with pytest.raises(ValueError, match="mask: as_released knows none"):
        released(*cloud, torch.ones(1, 50, dtype=torch.bool))


@pytest.mark.parametrize("name", ["regions", "W.weight", "attns.3.attn.e2lsh.alpha", "mlp_out.norms.0.bias"])
def test_load_released_refuses_wrong_arrays(tmp_path, arrays, name):
    path = tmp_path / "wrong.npz"
    np.savez(path, **{n: a for n, a in arrays.items() if n != name})
    with pytest.raises(ValueError, match=r"path: wrong.npz does not hold the released tracking model"):
        load_released(path)
    np.savez(path, **arrays | {name: arrays[name][:1]})
    with pytest.raises(ValueError, match=r"path: wrong.npz does not hold the released tracking model"):
        load_released(path)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off"], ids=["empty", "text", "cut"])
def test_load_released_refuses_files_that_are_no_archive(tmp_path, content):
    path = tmp_path / "broken.npz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"path: broken.npz"):
        load_released(path)


def test_load_released_never_unpickles(tmp_path, arrays):
    path = tmp_path / "pickled.npz"
    np.savez(path, **arrays | {"regions": np.array([{}], dtype=object)})
    with pytest.raises(ValueError, match="path: pickled.npz"):
        load_released(path)


needs_weights = pytest.mark.skipif(
    not have_data("hept_checkpoint", "tracking60k.npz"), reason="needs the released weights, see SPARSEATTN_DATA"
)


def away(found, expected):
    "Number of hits whose embeddings differ by more than 1e-4."
    return int(((found - expected).norm(dim=1) > 1e-4 * expected.norm(dim=1)).sum())


@needs_weights
@pytest.mark.parametrize("name", ["reference_1400", "reference"])
def test_released_embeddings(name):
    """But for hits that rounding moves over the border of a block, and which ones depends on the processor.

    How many those are the last bit of the inputs tells: 11 to 22 of 1,400, 4 to 10 of 777. The sums of four layers are
    rounded too, hence twice as many.
    """
    model, g = load_released(data_path("hept_checkpoint", "tracking60k.npz")), torch.Generator().manual_seed(0)
    with np.load(data_path("hept_checkpoint", f"{name}.npz"), allow_pickle=False) as file:
        x, coords, expected = (torch.from_numpy(file[key]) for key in ("x", "coords", "embeddings"))
    moved = []
    with torch.no_grad():
        found = model(x[None], coords[None])[0]
        for _ in range(8):
            towards = torch.randint(0, 2, x.shape, generator=g) * 2e9 - 1e9
            moved.append(away(model(x.nextafter(towards)[None], coords[None])[0], found))
    assert max(moved) < 0.03 * len(x)
    assert away(found, expected) <= 2 * max(moved)


@needs_weights
def test_released_weights_with_exact_masks():
    model = load_released(data_path("hept_checkpoint", "tracking60k.npz"), as_released=False)
    assert sum(p.numel() for p in model.parameters()) == 326_436
    with np.load(data_path("hept_checkpoint", "reference.npz"), allow_pickle=False) as file:
        x, coords = (torch.from_numpy(file[key])[None] for key in ("x", "coords"))
    mask = torch.arange(800)[None] < 777
    padded = [torch.nn.functional.pad(t, (0, 0, 0, 23), value=math.nan) for t in (x, coords)]
    with torch.no_grad():
        alone, found = model(x, coords), model(*padded, mask)
    assert not found[~mask].any()
    assert (found[:, :777] - alone).norm() / alone.norm() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form", ["released", "printed", "squared"])
def test_info_nce_of_half_precision_is_that_of_float32(dtype, form):
    place, particle, valid = cloud()
    pairs = training_pairs(place, particle, valid, negatives=5)
    embeddings = (300 * draw_embeddings(len(particle))).to(dtype).requires_grad_()
    loss = info_nce(embeddings, pairs, form=form)
    expected = info_nce(embeddings.float(), pairs, form=form)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert torch.autograd.grad(loss, embeddings)[0].isfinite().all()


def draw_embeddings(n):
    return torch.randn(n, 12, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
def test_focal_loss_of_certain_points(gamma):
    logits = torch.tensor([15.0, 20.0, 100.0], requires_grad=True)
    focal_loss(logits, torch.ones(3), gamma=gamma).backward()
    assert logits.grad.isfinite().all()
    wide = logits.detach().double()
    certain = (0.25 * torch.sigmoid(-wide).pow(gamma) * torch.nn.functional.softplus(-wide))[0]
    torch.testing.assert_close(focal_loss(logits[:1], torch.ones(1), gamma=gamma).double(), certain, rtol=1e-5, atol=0)


@pytest.mark.parametrize("bad", [dict(negatives=-3), dict(radius=math.nan), dict(radius=-1.0)])
def test_pairs_refuse_options_that_find_nothing(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        training_pairs(*cloud(), **bad)
    with pytest.raises(TypeError, match="valid"):
        place, particle, valid = cloud()
        training_pairs(place, particle, valid.long())
