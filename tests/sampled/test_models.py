"""Classifiers of point clouds: a set in, padding exact, hierarchies of any depth, counted costs, bad input refused."""

import copy
import math
from itertools import permutations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import sparseattn.baselines.sets  # noqa: F401  registers inducing, knn, stratified, none
from sparseattn.core.points import farthest_point_sampling
from sparseattn.sampled.cycles import sample_cycle
from sparseattn.sampled.models import (
    PAPER_ATTENTION,
    PAPER_SETTINGS,
    Embedding,
    HierarchicalClassifier,
    Level,
    ShapeClassifier,
    carried_orders,
    classifier_flops,
    classifier_memory,
    key_points,
    logits_of_draws,
    scored_pairs,
)

SMALL = dict(dim=16, stem=8, heads=2, head_dim=8, hidden=12, features=3)
DEEP = dict(dims=(8, 16, 16), strides=(4, 2, 2), neighbours=(8, 8, 16), blocks=(2, 1, 1), head_dim=8, levels=3,
            features=3)
each = pytest.mark.parametrize("row", PAPER_ATTENTION)
cycles = ("sparse", "sampled")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def clouds(b=2, n=40):
    return torch.randn(b, n, 3, dtype=torch.float64), torch.randn(b, n, 3, dtype=torch.float64)


def basic(row, **options):
    return ShapeClassifier(5, **SMALL | options, **PAPER_ATTENTION[row]).double().eval()


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_no_layer_by_hand():
    model, (x, y) = basic("MLP + FC"), clouds()
    e = model.embedding
    close(model(x, y), model.head((e.position(x) + e.feature(y)).amax(1)))


def test_one_layer_by_hand():
    model, (x, y) = basic("feed-forward"), clouds()
    h = model.embedding(x, y)
    close(model(x, y), model.head((h + model.layer.feed(model.layer.norm2(h))).amax(1)))


@each
def test_order_of_the_points(row):
    if row == "stratified":
        pytest.skip("its sample starts at the first point")
    model, (x, y), moved, order = basic(row), clouds(), torch.randperm(40), sample_cycle(40)
    place = torch.empty_like(moved).scatter_(0, moved, torch.arange(40))
    count = row in cycles
    with carried_orders(model, [order] * count):
        expected = model(x, y)
    with carried_orders(model, [place[order]] * count):
        close(model(x[:, moved], y[:, moved]), expected)


@pytest.mark.parametrize("attention", ["dense", "knn", "sampled"])
def test_order_of_the_points_in_a_hierarchy(attention):
    model, (x, y), moved = HierarchicalClassifier(5, attention=attention, **DEEP).double(), clouds(), torch.randperm(40)
    orders = [sample_cycle(m) for m in (10, 10, 5, 3)] if attention == "sampled" else []
    with carried_orders(model, orders):
        close(model(x[:, moved], y[:, moved]), model(x, y))


@each
def test_padding_changes_nothing(row):
    model, (x, y), mask = basic(row), clouds(), torch.arange(40) < torch.tensor([[40], [23]])
    order, count = sample_cycle(40), row in cycles
    spoiled = [part.masked_fill(~mask[..., None], torch.nan) for part in (x, y)]
    with carried_orders(model, [order] * count):
        padded = model(*spoiled, mask)
        assert torch.equal(model(x * mask[..., None], y, mask), padded)
    with carried_orders(model, [order[order < 23]] * count):
        close(model(x[1:, :23], y[1:, :23]), padded[1:], 1e-9)


@pytest.mark.parametrize("attention", ["dense", "knn", "sampled"])
@pytest.mark.parametrize("real", [23, 5, 1])
def test_padding_in_a_hierarchy(attention, real):
    model, (x, y) = HierarchicalClassifier(5, attention=attention, **DEEP).double(), clouds()
    mask = torch.ones(2, 40, dtype=torch.bool)
    mask[1, real:] = False
    orders = [sample_cycle(m) for m in (10, 10, 5, 3)] if attention == "sampled" else []
    sizes = [math.ceil(real / stride) for stride in (4, 4, 8, 16)]
    alone = [order[order < m] for order, m in zip(orders, sizes, strict=False)]
    spoiled = [part.masked_fill(~mask[..., None], torch.nan) for part in (x, y)]
    with carried_orders(model, orders):
        padded = model(*spoiled, mask)
    with carried_orders(model, alone):
        close(model(x[1:, :real], y[1:, :real]), padded[1:], 1e-9)


def test_mask_in_the_middle():
    model, (x, y) = HierarchicalClassifier(5, attention="dense", **DEEP).double(), clouds(1)
    mask = torch.rand(1, 40) < 0.6
    close(model(x, y, mask), model(x[:, mask[0]], y[:, mask[0]]), 1e-9)


@pytest.mark.parametrize("model", [basic("sampled"), basic("inducing"), HierarchicalClassifier(5, **DEEP).double()])
def test_empty_clouds_are_finite(model):
    x, y = clouds(2, 9)
    mask = torch.tensor([[True] * 9, [False] * 9])
    (out := model(x, y, mask)).sum().backward()
    assert out.isfinite().all() and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("row", ["sampled", "sparse"])
def test_law_of_a_set(row):
    model, (x, _) = basic(row, features=0), clouds(1, 4)

    def law(cloud):
        found = []
        for order in permutations(range(4)):
            with torch.no_grad(), carried_orders(model, [torch.tensor(order)]):
                found.append(model(cloud)[0])
        return torch.stack(sorted(found, key=lambda row: row.tolist()))

    close(law(x), law(x[:, [2, 0, 3, 1]]))


def test_fixed_and_fresh_cycles():
    x = clouds()
    with torch.no_grad():
        fixed = basic("sparse")
        assert torch.equal(fixed(*x), fixed(*x))
        fresh = basic("sampled")
        assert not torch.equal(fresh(*x), fresh(*x))


@each
def test_any_size_and_one_point(row):
    model = basic(row)
    for n in (1, 2, 3, 50):
        assert model(*clouds(2, n)).shape == (2, 5)


@pytest.mark.parametrize("levels", range(1, 6))
@pytest.mark.parametrize("n", [1, 3, 70])
def test_hierarchies_of_the_paper(levels, n):
    model = HierarchicalClassifier(3, levels=levels, dims=(4, 4, 8, 8, 8), head_dim=4)
    assert model(torch.randn(2, n, 3)).isfinite().all()
    assert [len(level.layers) for level in model.levels] == [2, 3, 4, 6, 3][:levels]


def test_level_by_hand():
    level, (x, points) = Level(3, 8, 4, 5, 1, attention="none").double(), clouds(1, 12)
    out, centres, kept = level(x, points)
    index = farthest_point_sampling(points, 3, start="farthest-from-centroid")
    assert kept is None and torch.equal(centres, points[:, index[0]])
    for i, centre in enumerate(index[0].tolist()):
        near = (points[0] - points[0, centre]).norm(dim=1).argsort()[:5]
        merged = level.collect(torch.cat([points[0, near] - points[0, centre], x[0, near]], 1)).amax(0)
        h = merged + level.embedding.position(points[0, centre])
        close(out[0, i], h + level.layers[0].feed(level.layers[0].norm2(h)))


def test_key_points():
    x = torch.randn(3, 21, 3)
    index, kept = key_points(x, 4)
    assert index.shape == (3, 6) and kept is None and all(len(row.unique()) == 6 for row in index)
    mask = torch.rand(3, 21) < 0.5
    mask[2] = False
    index, kept = key_points(x, 4, mask=mask)
    assert kept.sum(1).tolist() == [-(-m // 4) for m in mask.sum(1).tolist()]
    assert mask.gather(1, index)[kept].all()
    assert torch.equal(key_points(x, 1)[0].sort().values, torch.arange(21).expand(3, -1))


def test_draws():
    x = clouds()
    found = logits_of_draws(basic("sampled"), 4, *x)
    assert found.shape == (4, 2, 5) and not found.requires_grad
    assert len({tuple(row.flatten().tolist()) for row in found}) == 4
    assert torch.equal(*logits_of_draws(basic("dense"), 2, *x))


def test_carried_orders_end():
    model, x = basic("sampled"), clouds()
    with pytest.raises(RuntimeError), carried_orders(model, [torch.arange(40)]):
        assert torch.equal(model(*x), model(*x))
        raise RuntimeError
    assert not torch.equal(model(*x), model(*x))


@pytest.mark.parametrize("row", ["MLP + FC", "feed-forward", "dense", "sampled", "inducing"])
@pytest.mark.parametrize("features", [0, 3])
def test_flops(row, features):
    sizes = SMALL | dict(features=features, classes=5)
    attention, size = PAPER_ATTENTION[row]["attention"], PAPER_ATTENTION[row].get("points")
    model = basic(row, features=features).requires_grad_(False)
    counter = FlopCounterMode(display=False)
    x, y = clouds(1, 30)
    with sdpa_kernel(SDPBackend.MATH), counter:
        model(x, y if features else None)
    pairs = 0 if row == "sampled" else None
    assert counter.get_total_flops() == classifier_flops(attention, 30, size=size, pairs=pairs, **sizes)


@pytest.mark.parametrize("row", ["MLP + FC", "dense", "sampled"])
def test_memory_is_what_autograd_keeps(row):
    model, inputs = basic(row).float(), torch.randn(2, 1, 200, 3)
    own, held = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def pack(x):
        held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x), sdpa_kernel(SDPBackend.MATH):
        out = model(*inputs)
    kept = sum(size for where, size in held.items() if where not in own)
    assert out.requires_grad
    assert 0.99 < kept / (4 * classifier_memory(PAPER_ATTENTION[row]["attention"], 200, classes=5, **SMALL)) < 1.2


def test_pairs():
    assert [scored_pairs(name, 100) for name in ("dense", "sampled", "knn", "inducing", "none", None)] == [
        10000, 200, 1600, 3200, 0, 0]
    assert (scored_pairs("sampled", 1), scored_pairs("knn", 5), scored_pairs("knn", 100, size=3)) == (1, 25, 300)
    for row in ("dense", "sampled", "kNN", "inducing"):
        info = basic(row)(*clouds(1, 30), return_info=True)[1][0]
        assert info.nnz == 2 * scored_pairs(PAPER_ATTENTION[row]["attention"], 30)


def test_state_copies_and_types():
    model, x = basic("sampled").float(), [part.float() for part in clouds()]
    twin = ShapeClassifier(5, **SMALL)
    twin.load_state_dict(model.state_dict())
    order = sample_cycle(40)
    outs = []
    for one in (model, twin, copy.deepcopy(model)):
        with carried_orders(one, [order]):
            outs.append(one(*x))
    assert torch.equal(outs[0], outs[1]) and torch.equal(outs[0], outs[2]) and outs[0].dtype == torch.float32


def test_settings():
    basic_, deep = PAPER_SETTINGS["basic"], PAPER_SETTINGS["hierarchical"]
    assert basic_["heads"] * basic_["head_dim"] == basic_["dim"] == 256 and basic_["points"][-1] == 8192
    assert {len(deep[name]) for name in ("dims", "strides", "neighbours", "blocks")} == {deep["levels"]}
    shape = {name: value for name, value in basic_.items() if name in (*SMALL, "classes")}
    assert sum(p.numel() for p in ShapeClassifier(**shape).parameters()) == 439080


@pytest.mark.parametrize("call, words", [
    (lambda: ShapeClassifier(0), "classes"),
    (lambda: ShapeClassifier(3, attention="nothing"), "attention"),
    (lambda: ShapeClassifier(3, attention=None, k=3), "options"),
    (lambda: ShapeClassifier(3, dim=10, heads=3, head_dim=None), "heads"),
    (lambda: ShapeClassifier(3, hidden=0), "hidden"),
    (lambda: Embedding(8, 0), "stem"),
    (lambda: ShapeClassifier(3)(torch.zeros(1, 4, 2)), "3 channels"),
    (lambda: ShapeClassifier(3)(torch.full((1, 4, 3), torch.nan)), "finite"),
    (lambda: ShapeClassifier(3)(torch.zeros(1, 4, 3), torch.zeros(1, 4, 3)), "features"),
    (lambda: ShapeClassifier(3, features=3)(torch.zeros(1, 4, 3)), "features"),
    (lambda: ShapeClassifier(3, features=3)(torch.zeros(1, 4, 3), torch.zeros(1, 5, 3)), "features"),
    (lambda: ShapeClassifier(3)(torch.zeros(1, 4, 3), None, torch.ones(1, 5) > 0), "mask"),
    (lambda: HierarchicalClassifier(3, levels=6), "levels"),
    (lambda: HierarchicalClassifier(3, levels=0), "levels"),
    (lambda: HierarchicalClassifier(3, strides=(4, 0, 4, 4, 4)), "stride"),
    (lambda: Level(8, 8, 4, 0, 1), "neighbours"),
    (lambda: key_points(torch.zeros(1, 4, 3), 0), "stride"),
    (lambda: logits_of_draws(ShapeClassifier(3), 0, torch.zeros(1, 4, 3)), "draws"),
    (lambda: scored_pairs("stratified", 10), "attention"),
    (lambda: scored_pairs("dense", 0), "n"),
    (lambda: carried_orders(ShapeClassifier(3), []).__enter__(), "orders"),
])
def test_bad_input(call, words):
    with pytest.raises(ValueError, match=words):
        call()


def test_refuses_another_dtype_than_the_weights():
    points = torch.randn(1, 40, 3)
    for name, call in (("points", lambda: ShapeClassifier(3)(points.double())),
                       ("points", lambda: HierarchicalClassifier(3)(points.double())),
                       ("features", lambda: ShapeClassifier(3, features=3)(points, points.double()))):
        with pytest.raises(TypeError, match=f"{name} must have the dtype of weight, torch.float32, got torch.float64"):
            call()


def test_a_network_without_attention_takes_no_word_for_it():
    with pytest.raises(TypeError, match="nothing takes return_inof"):
        ShapeClassifier(3, attention=None)(torch.randn(1, 40, 3), return_inof=True)


@pytest.mark.parametrize("attention", ["sampled", "dense"])
def test_a_generator_goes_to_attentions_that_draw(attention):
    points = torch.rand(2, 40, 3)
    for network in (ShapeClassifier(5, attention=attention, dim=16, heads=2, head_dim=8, hidden=16),
                    HierarchicalClassifier(5, attention=attention, levels=2)):
        with torch.no_grad():
            found = [network.eval()(points, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2]) == (attention == "dense")


def test_an_attention_without_the_option_takes_its_own_channels():
    assert ShapeClassifier(4, attention="pat", dim=32, heads=4)(torch.rand(1, 10, 3)).shape == (1, 4)
