"""Attention for sets: blocks and their equations, neighbours and windows and all pairs, mixtures and scikit-learn."""

import copy
import math
import warnings

import pytest
import torch
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from sparseattn.baselines.sets import (
    ISAB,
    MAB,
    PMA,
    SAB,
    SetTransformer,
    cross_attention,
    mixture_parameters,
    mixture_update,
    neighbour_attention,
    stratified_edges,
    stratified_pattern,
    thinned,
    window_cells,
)
from sparseattn.core.attention import dense_attention
from sparseattn.core.patterns import edges_to_pattern
from sparseattn.core.transformer import Encoder, make_attention
from sparseattn.data.toys import mixture_log_likelihood

OPTIONS = {"inducing": dict(points=5), "knn": dict(k=4), "stratified": dict(window=0.5, every=3), "none": {}}
each = pytest.mark.parametrize("name", OPTIONS)
released_too = pytest.mark.parametrize("as_released", [False, True])


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=generator(seed), dtype=torch.float64).to(dtype)


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def with_gradients(function, tensors):
    leaves = [x.clone().requires_grad_() for x in tensors]
    out = function(*leaves)
    weight = torch.linspace(-1, 1, out.shape[-1], dtype=out.dtype)
    return out, *torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)


def assert_same(f, g, tensors, tolerance=1e-10):
    for a, b in zip(with_gradients(f, tensors), with_gradients(g, tensors), strict=True):
        close(a, b, tolerance)


def cloud(n=30, b=2, channels=8, dims=3, dtype=torch.float64, seed=0):
    """Features and coordinates in the unit cube."""
    coords = torch.rand(b, n, dims, generator=generator(seed + 1), dtype=torch.float64).to(dtype)
    return normal(b, n, channels, seed=seed, dtype=dtype), coords


def blocks(dim=8, heads=2, **options):
    torch.manual_seed(0)
    return {
        "sab": SAB(dim, heads, **options).double(),
        "isab": ISAB(dim, heads, points=5, **options).double(),
        "pma": PMA(dim, heads, seeds=3, **options).double(),
    }


# ---- attention between sets, and MAB


@pytest.mark.parametrize("n, m", [(5, 7), (7, 7), (1, 1), (3, 1)])
def test_cross_attention_masks_keys_and_not_queries(n, m):
    q, k, v = normal(3, 2, n, 4), normal(3, 2, m, 4, seed=1), normal(3, 2, m, 6, seed=2)
    real = torch.tensor([m, (m + 1) // 2, 0])
    mask = torch.arange(m) < real[:, None]
    out = cross_attention(q, k, v, mask)
    for i in (0, 1):
        close(out[i : i + 1], dense_attention(q[i : i + 1], k[i : i + 1, :, : real[i]], v[i : i + 1, :, : real[i]]))
    assert not out[2].any()
    close(cross_attention(q, k, v), cross_attention(q, k, v, torch.ones(3, m, dtype=torch.bool)))


@pytest.mark.parametrize("heads, head_dim", [(1, None), (3, None), (2, 5)])
@pytest.mark.parametrize("norm", [None, False])
def test_mab_equals_its_equations(heads, head_dim, norm):
    torch.manual_seed(0)
    block = MAB(12, heads, head_dim=head_dim, norm=norm, key_dim=7).double()

    def plain(x, y):
        outs = []
        parts = (w.weight.chunk(heads) for w in (block.query, block.key, block.value))
        for query, key, value in zip(*parts, strict=True):
            scores = (x @ query.T) @ (y @ key.T).mT / (heads * len(query)) ** 0.5
            outs.append(scores.softmax(-1) @ (y @ value.T))
        ln = (lambda h: h) if norm is False else lambda h: torch.nn.functional.layer_norm(h, (12,))
        h = ln(x + torch.cat(outs, -1) @ block.out.weight.T)
        (w1, b1), (w2, b2) = ((block.feed[i].weight, block.feed[i].bias) for i in (0, 2))
        return ln(h + (h @ w1.T + b1).relu() @ w2.T + b2)

    assert_same(block, plain, (normal(2, 5, 12), normal(2, 9, 7, seed=1)))


@pytest.mark.parametrize("norm", [None, True])
def test_released_mab_equals_a_formula_by_hand(norm):
    torch.manual_seed(0)
    block = MAB(6, 3, query_dim=2, key_dim=4, norm=norm, as_released=True).double()
    x, y = normal(2, 4, 2), normal(2, 5, 4, seed=1)
    with torch.no_grad():
        q, k, v = (f(s) for f, s in ((block.query, x), (block.key, y), (block.value, y)))
        out = torch.empty(2, 4, 6, dtype=torch.float64)
        for b in range(2):
            for i in range(4):
                for c in range(6):
                    part = slice(2 * (c // 2), 2 * (c // 2) + 2)
                    scores = [math.exp(q[b, i, part] @ k[b, j, part] / math.sqrt(6)) for j in range(5)]
                    mean = sum(s * v[b, j, c].item() for j, s in enumerate(scores)) / sum(scores)
                    out[b, i, c] = q[b, i, c] + mean
        if norm:
            out = block.norm1(out)
        weight, bias = block.feed[0].weight, block.feed[0].bias
        for row in out.view(-1, 6):
            row += torch.stack([(weight[c] @ row + bias[c]).clamp(min=0) for c in range(6)])
        close(block(x, y), block.norm2(out) if norm else out)


def test_the_released_block_has_other_parameters():
    paper, released = ({name for name, _ in MAB(8, 2, as_released=r).named_parameters()} for r in (False, True))
    assert "out.weight" in paper and "query.bias" not in paper and "norm1.weight" in paper and "feed.2.weight" in paper
    assert released == {f"{part}.{kind}" for part in ("query", "key", "value", "feed.0") for kind in ("weight", "bias")}


# ---- blocks and the Set Transformer


@released_too
def test_equivariance_and_invariance(as_released):
    x, order = normal(2, 30, 8), torch.randperm(30, generator=generator(1))
    for name, block in blocks(as_released=as_released).items():
        out = block(x)
        close(block(x[:, order]), out if name == "pma" else out[:, order], 1e-12)
        twice = block(torch.cat([x, x], 1))
        close(twice, out if name == "pma" else torch.cat([out, out], 1))  # means do not count


@released_too
@pytest.mark.parametrize("points", [5, 30])  # as many as the padded set: a mask of keys is none of queries
@pytest.mark.parametrize("garbage", [1e30, math.nan])
def test_blocks_ignore_masked_points(as_released, points, garbage):
    torch.manual_seed(0)
    x, mask = normal(2, 30, 8), torch.arange(30) < torch.tensor([[30], [17]])
    options = dict(as_released=as_released)
    for block in (SAB(8, 2, **options), ISAB(8, 2, points=points, **options), PMA(8, 2, seeds=points, **options)):
        block = block.double()
        out, alone = block(x, mask), block(x[1:, :17])
        assert torch.equal(out, block(x.masked_fill(~mask[..., None], garbage), mask))
        close(out[1:, : alone.shape[1]], alone)
        assert isinstance(block, PMA) or not out[~mask].any()


@released_too
def test_sets_without_real_points_are_finite(as_released):
    x, mask = normal(2, 6, 8), torch.arange(6) < torch.tensor([[6], [0]])
    for name, block in blocks(as_released=as_released).items():
        out, gradient = with_gradients(lambda s, block=block: block(s, mask), [x])
        assert out.isfinite().all() and not gradient[1].any()
        assert name == "pma" or not out[1].any()


def test_isab_is_its_two_blocks_and_linear():
    from torch.utils.flop_counter import FlopCounterMode

    def plain(q, k, v, mask):
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v

    torch.manual_seed(0)
    block, x = ISAB(8, 2, points=5, attention=plain).double(), normal(2, 30, 8)
    close(block(x), block.read(x, block.write(block.points.expand(2, -1, -1), x)))
    counts = []
    for n in (100, 200, 300):
        with FlopCounterMode(display=False) as counter:
            block(normal(1, n, 8))
        counts.append(counter.get_total_flops())
    assert counts[1] - counts[0] == counts[2] - counts[1] > 0


def test_attention_is_plugged_into_both_halves():
    seen = []

    def attention(q, k, v, mask):
        seen.append((tuple(q.shape), tuple(k.shape), tuple(v.shape), mask))
        return cross_attention(q, k, v, mask)

    x, mask = normal(2, 30, 8, dtype=torch.float32), torch.arange(30) < torch.tensor([[30], [17]])
    torch.manual_seed(0)
    block = ISAB(8, 2, points=5, attention=attention)
    torch.manual_seed(0)
    torch.testing.assert_close(block(x, mask), ISAB(8, 2, points=5)(x, mask))
    assert [s[:3] for s in seen] == [((2, 2, 5, 4), *[(2, 2, 30, 4)] * 2), ((2, 2, 30, 4), *[(2, 2, 5, 4)] * 2)]
    assert seen[0][3] is mask and seen[1][3] is None
    seen.clear()
    SetTransformer(8, 1, dim=8, heads=2, points=5, attention=attention)(x, mask)
    assert len(seen) == 4  # the two ISABs, and neither the pooling nor what follows


@pytest.mark.parametrize("options", [{}, dict(as_released=True), dict(as_released=True, norm=True), dict(points=None),
                                     dict(decoder=0, encoder=1), dict(as_released=True, points=None)])
def test_set_transformer(options):
    torch.manual_seed(0)
    x, order = normal(2, 30, 3), torch.randperm(30, generator=generator(1))
    mask = torch.arange(30) < torch.tensor([[30], [17]])
    model = SetTransformer(3, 5, **{"seeds": 4, "dim": 8, "heads": 2, "points": 6, **options}).double()
    out = model(x, mask)
    assert out.shape == (2, 4, 5)
    close(model(x[:, order], mask[:, order]), out)
    close(model(x[1:, :17]), out[1:])
    assert torch.equal(out, model(x.masked_fill(~mask[..., None], math.nan), mask))
    out.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    other = SetTransformer(3, 5, **{"seeds": 4, "dim": 8, "heads": 2, "points": 6, **options}).double()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))


def test_set_transformer_drops_in_training_only():
    model, x = SetTransformer(3, 5, dim=8, heads=2, dropout=0.5), normal(1, 30, 3, dtype=torch.float32)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_keep_their_dtype(dtype):
    x, mask = normal(2, 30, 3, dtype=dtype), torch.arange(30) < torch.tensor([[30], [17]])
    for released in (False, True):
        out = SetTransformer(3, 5, dim=8, heads=2, points=4, as_released=released).to(dtype)(x, mask)
        assert out.dtype == dtype and out.isfinite().all()


# ---- neighbours


def lists(b=2, n=30, k=4, seed=0):
    return torch.rand(b, n, n, generator=generator(seed)).argsort(-1)[..., :k]


@pytest.mark.parametrize("n, k", [(1, 1), (2, 1), (30, 4), (30, 30)])
@pytest.mark.parametrize("masked", [False, True])
def test_neighbours_fast_equals_reference_and_pattern(n, k, masked):
    q, kk, v = normal(2, 3, n, 6), normal(2, 3, n, 6, seed=1), normal(2, 3, n, 5, seed=2)
    index, mask = lists(n=n, k=k), torch.rand(2, n, generator=generator(5)) < 0.7 if masked else None
    pattern = torch.zeros(2, n, n, dtype=torch.bool).scatter_(2, index, True)[:, None]
    for impl in ("fast", "reference"):
        assert_same(lambda *x, impl=impl: neighbour_attention(*x, index, mask=mask, impl=impl),
                    lambda *x: dense_attention(*x, mask=mask, pattern=pattern), (q, kk, v))


def test_neighbours_ignore_masked_points_and_missing_ones():
    q, k, v = (normal(2, 3, 30, 6, seed=s) for s in range(3))
    index, mask = lists(), torch.rand(2, 30, generator=generator(5)) < 0.6
    nan = [x.masked_fill(~mask[:, None, :, None], math.nan) for x in (q, k, v)]
    out = neighbour_attention(q, k, v, index, mask=mask)
    assert torch.equal(out, neighbour_attention(*nan, index, mask=mask))
    assert not out.transpose(1, 2)[~mask].any()
    gone = index.masked_fill(~mask.gather(1, index.flatten(1)).view_as(index), -1)
    assert torch.equal(out, neighbour_attention(q, k, v, gone, mask=mask))


def test_neighbours_of_many_points_in_little_memory():
    """All pairs of 30,000 points would be 7 GB; a ring of two keys has a closed form."""
    n = 30_000
    q, k, v = (normal(1, 2, n, 4, seed=s) for s in range(3))
    here = torch.arange(n)
    out = neighbour_attention(q, k, v, torch.stack([here, (here + 1) % n], -1)[None])
    other = torch.sigmoid((q * (k.roll(-1, 2) - k)).sum(-1, keepdim=True) / 2)
    close(out, v + other * (v.roll(-1, 2) - v))


def test_knn_module_equals_brute_force():
    torch.manual_seed(0)
    x, coords = cloud()
    module = make_attention("knn", 8, 2, k=4).double()
    nearest = torch.cdist(coords, coords).argsort(-1)[..., :4]
    pattern = torch.zeros(2, 30, 30, dtype=torch.bool).scatter_(2, nearest, True)
    q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (module.query, module.key, module.value))
    expected = module.out(dense_attention(q, k, v, pattern=pattern[:, None]).transpose(1, 2).flatten(2))
    out, info = module(x, coords, return_info=True)
    close(out, expected)
    assert torch.equal(edges_to_pattern(info.pattern, pattern.shape), pattern) and info.nnz == 2 * pattern.sum()


@pytest.mark.parametrize("k", [17, 25, 100])
def test_knn_of_small_clouds_attends_all_that_are_there(k):
    torch.manual_seed(0)
    x, coords = cloud()
    mask = torch.arange(30) < torch.tensor([[30], [17]])
    module = make_attention("knn", 8, 2, k=k).double()
    q, key, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (module.query, module.key, module.value))
    everyone = module.out(dense_attention(q, key, v, mask=mask).transpose(1, 2).flatten(2))
    close(module(x, coords, mask)[1, :17], everyone[1, :17])
    assert module(x, coords, mask, True)[1].nnz == 2 * (30 * min(k, 30) + 17 * 17)


# ---- windows of two sizes


def test_window_cells_by_hand():
    line = torch.tensor([[[5.0], [5.9], [6.2], [-99.0]]])
    mask = torch.tensor([[True, True, True, False]])
    assert window_cells(line, 1.0, mask=mask)[0, :3].flatten().tolist() == [0, 0, 1]
    assert window_cells(line, 1.0, shift=True, mask=mask)[0, :3].flatten().tolist() == [0, 1, 1]


@pytest.mark.parametrize("sample", ["farthest", "stride"])
def test_thinned_keeps_one_in_so_many_real_points(sample):
    _, coords = cloud(b=3)
    mask = torch.rand(3, 30, generator=generator(2)) < torch.tensor([[1.1], [0.5], [-1.0]])
    kept = thinned(coords, 4, sample=sample, mask=mask)
    assert kept.sum(1).tolist() == [-(-int(n) // 4) for n in mask.sum(1)] and not (kept & ~mask).any()
    assert torch.equal(thinned(coords, 1, sample=sample, mask=mask), mask)
    moved = coords.masked_fill(~mask[..., None], 7.0)
    assert torch.equal(thinned(moved, 4, sample=sample, mask=mask), kept)


def test_farthest_sample_by_brute_force():
    _, coords = cloud(b=1)
    chosen = [int((coords[0] - coords[0].mean(0)).norm(dim=1).argmax())]
    while len(chosen) < 8:
        chosen.append(int(torch.cdist(coords[0], coords[0, chosen]).amin(1).argmax()))
    assert sorted(chosen) == thinned(coords, 4)[0].nonzero().flatten().tolist()


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [
    {}, dict(shift=True), dict(large=0.3), dict(large=0.95, every=3), dict(window=1e-6), dict(window=5.0),
    dict(sample="stride", every=1), dict(window=1e30)])
def test_stratified_list_equals_pattern(dims, masked, options):
    _, coords = cloud(40, dims=dims)
    coords[:, 7] = coords[:, 3]  # two at one place
    mask = torch.rand(2, 40, generator=generator(5)) < 0.7 if masked else None
    options = {"window": 0.3, "mask": mask, **options}
    edges, pattern = stratified_edges(coords, **options), stratified_pattern(coords, **options)
    assert torch.equal(edges_to_pattern(edges, pattern.shape), pattern) and edges.shape[1] == pattern.sum()
    number = (edges[0] * 40 + edges[1]) * 40 + edges[2]
    assert (number.diff() > 0).all()


def test_stratified_pattern_by_its_sentence():
    _, coords = cloud(25, b=1, dims=2)
    low, kept = coords[0].amin(0), thinned(coords, 4)[0]
    for shift in (False, True):
        pattern = stratified_pattern(coords, window=0.3, every=4, shift=shift)[0]
        for i in range(25):
            for j in range(25):
                near, wide = (all(math.floor((coords[0, i, c] - low[c]) / w + shift / 2)
                                  == math.floor((coords[0, j, c] - low[c]) / w + shift / 2) for c in range(2))
                              for w in (0.3, 0.6))
                assert pattern[i, j] == (near or (wide and bool(kept[j])))
        assert pattern.diagonal().all() and not pattern.all()


def test_stratified_edges_of_no_points():
    _, coords = cloud(5)
    none = torch.zeros(2, 5, dtype=torch.bool)
    assert stratified_edges(coords, window=0.3, mask=none).shape == (3, 0)
    assert not make_attention("stratified", 8, 2)(torch.randn(2, 5, 8), coords.float(), none).any()


@pytest.mark.parametrize("options", [dict(window=9.0), dict(window=0.1, large=9.0, every=1)])
def test_stratified_limits_are_all_pairs(options):
    torch.manual_seed(0)
    x, coords = cloud()
    module = make_attention("stratified", 8, 2, **options).double()
    q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (module.query, module.key, module.value))
    close(module(x, coords), module.out(dense_attention(q, k, v).transpose(1, 2).flatten(2)))
    assert module(x, coords, None, True)[1].density == 1


# ---- what every module owes


@each
def test_encoder_ignores_masked_points(name):
    torch.manual_seed(0)
    (x, coords), mask = cloud(20, dtype=torch.float32), torch.arange(20) < torch.tensor([[20], [13]])
    encoder = Encoder(8, 2, 2, attention=name, **OPTIONS[name])
    out = encoder(x, coords, mask)
    garbage = [s.masked_fill(~mask[..., None], math.nan) for s in (x, coords)]
    assert torch.equal(out, encoder(*garbage, mask)) and not out[~mask].any()
    torch.testing.assert_close(out[1:, :13], encoder(x[1:, :13], coords[1:, :13]), rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in encoder.parameters())


@each
def test_padding_in_front_is_neutral_too(name):
    torch.manual_seed(0)
    (x, coords), mask = cloud(20), torch.arange(20) >= torch.tensor([[0], [7]])
    module = make_attention(name, 8, 2, **OPTIONS[name]).double()
    close(module(x, coords, mask)[1:, 7:], module(x[1:, 7:], coords[1:, 7:]))


@each
def test_order_of_the_points_does_not_matter(name):
    torch.manual_seed(0)
    x, coords = cloud(20)
    order = torch.randperm(20, generator=generator(3))
    module = make_attention(name, 8, 2, **OPTIONS[name]).double()
    close(module(x[:, order], coords[:, order]), module(x, coords)[:, order])


@each
def test_a_set_without_real_points_returns_zero(name):
    (x, coords), mask = cloud(6), torch.arange(6) < torch.tensor([[6], [0]])
    module = make_attention(name, 8, 2, **OPTIONS[name]).double()
    out, gradient = with_gradients(lambda s: module(s, coords, mask), [x])
    assert not out[1].any() and gradient.isfinite().all() and not gradient[1].any()


@each
def test_one_point(name):
    torch.manual_seed(0)
    x, coords = cloud(1)
    module = make_attention(name, 8, 2, **OPTIONS[name]).double()
    out = module(x, coords)
    assert out.isfinite().all()
    if name in ("knn", "stratified"):
        close(out, module.out(module.value(x)))


@each
def test_info(name):
    (x, coords), mask = cloud(20, dtype=torch.float32), torch.arange(20) < torch.tensor([[20], [13]])
    module = make_attention(name, 8, 2, head_dim=5, **OPTIONS[name])
    out, info = module(x, coords, mask, return_info=True)
    assert torch.equal(out, module(x, coords, mask))
    real = mask[:, :, None] & mask[:, None]
    pairs = {
        "inducing": lambda: 2 * 5 * (20 + 13),
        "knn": lambda: 4 * (20 + 13),
        "stratified": lambda: int((stratified_pattern(coords, **OPTIONS[name], mask=mask) & real).sum()),
        "none": lambda: 0,
    }[name]()
    assert info.nnz == 2 * pairs and info.density == pytest.approx(pairs / (400 + 169))
    assert info.flops == 2 * pairs * 4 * 5
    if info.pattern is not None:
        assert info.pattern.shape == (3, pairs) and real[tuple(info.pattern)].all()


@each
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_dtype_in_is_dtype_out(name, dtype):
    x, coords = cloud(20, dtype=dtype)
    out = Encoder(8, 1, 2, attention=name, **OPTIONS[name]).to(dtype)(x, coords)
    assert out.dtype == dtype and out.isfinite().all()


@each
def test_autocast(name):
    torch.manual_seed(0)
    module, (x, coords) = make_attention(name, 8, 2, **OPTIONS[name]), cloud(20, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x, coords)
    torch.testing.assert_close(out.float(), module(x, coords), rtol=0.1, atol=0.1)


@each
def test_state_dict_and_deepcopy(name):
    x, coords = cloud(20, dtype=torch.float32)
    first, second = (Encoder(8, 2, 2, attention=name, **OPTIONS[name]) for _ in range(2))
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(x, coords), first(x, coords))
    assert torch.equal(copy.deepcopy(first)(x, coords), first(x, coords))


@each
def test_compiles(name):
    torch.manual_seed(0)
    module, (x, coords) = make_attention(name, 8, 2, **OPTIONS[name]), cloud(20, dtype=torch.float32)
    mask = torch.arange(20) < torch.tensor([[20], [13]])
    compiled = torch.compile(module, backend="eager")
    torch.testing.assert_close(compiled(x, coords, mask), module(x, coords, mask), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_on_a_gpu(name, dtype):
    torch.manual_seed(0)
    module, (x, coords) = make_attention(name, 8, 2, **OPTIONS[name]).to(dtype), cloud(20, dtype=dtype)
    mask = torch.arange(20) < torch.tensor([[20], [13]])
    expected = module(x, coords, mask)
    out, info = module.cuda()(x.cuda(), coords.cuda(), mask.cuda(), return_info=True)
    assert out.dtype == dtype and out.is_cuda and (name == "none" or info.flops)
    if name != "none":  # zeros, without a parameter
        out.sum().backward()
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(out.cpu().float(), expected.float(), rtol=tolerance, atol=tolerance)


def test_none_is_a_network_without_attention():
    torch.manual_seed(0)
    encoder, (x, coords) = Encoder(8, 2, 2, attention="none"), cloud(20, dtype=torch.float32)
    expected = x
    for layer in encoder.layers:
        expected = expected + layer.feed(layer.norm2(expected))
    assert torch.equal(encoder(x, coords), expected)


# ---- mixtures


@pytest.mark.parametrize("width", [4, 5])
def test_mixture_parameters(width):
    raw = normal(3, 4, width)
    log_weights, means, scales = mixture_parameters(raw, 2)
    close(log_weights.exp(), torch.softmax(raw[..., 0], -1))
    assert torch.equal(means, raw[..., 1:3])
    for axis in (0, 1):
        close(scales[..., axis], torch.log1p(raw[..., 3 if width == 4 else 3 + axis].exp()))
    close(mixture_parameters(raw, 2, floor=0.25)[2], scales + 0.25)
    assert [x.shape for x in mixture_parameters(raw[..., :3], 1)] == [(3, 4), (3, 4, 1), (3, 4, 1)]


def fitted(log_weights, means, scales, cloud=None):
    """scikit-learn's mixture with these parameters, after one step on `cloud` if there is one."""
    w, m, precisions = log_weights.exp().numpy(), means.numpy(), (scales**-2).numpy()
    mixture = GaussianMixture(len(w), covariance_type="diag", max_iter=1, weights_init=w, means_init=m,
                              precisions_init=precisions)
    if cloud is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            return mixture.fit(cloud.numpy())
    mixture.weights_, mixture.means_, mixture.covariances_ = w, m, 1 / precisions
    mixture.precisions_cholesky_ = precisions**0.5
    return mixture


@pytest.mark.parametrize("width", [4, 5])
def test_mixtures_agree_with_scikit_learn(width):
    points = 3 * normal(5, 4, 2).repeat_interleave(20, 1) + 0.4 * normal(5, 80, 2, seed=1)
    mask = torch.arange(80) < torch.tensor([80, 61, 80, 30, 9])[:, None]
    start = mixture_parameters(normal(5, 4, width, seed=2), 2, floor=0.3)
    score = mixture_log_likelihood(points, *start, mask)
    nan = points.masked_fill(~mask[..., None], math.nan)
    after = mixture_update(nan, *start, mask)
    later = mixture_log_likelihood(points, *after, mask)
    assert (later > score - 1e-6).all()
    for i in range(5):
        real, begin = points[i, mask[i]], [x[i] for x in start]
        close(score[i].item(), fitted(*begin).score(real.numpy()))
        theirs = fitted(*begin, real)
        close(after[0][i].exp(), torch.from_numpy(theirs.weights_), 1e-8)
        close(after[1][i], torch.from_numpy(theirs.means_), 1e-8)
        close(after[2][i] ** 2, torch.from_numpy(theirs.covariances_), 1e-8)


def test_mixture_gradients_reach_every_output():
    raw = normal(2, 4, 5).requires_grad_()
    mixture_log_likelihood(normal(2, 50, 2, seed=1), *mixture_parameters(raw, 2)).sum().backward()
    assert (raw.grad != 0).all()


# ---- bad input


def test_refuses_what_does_not_fit():
    x, coords = cloud(dtype=torch.float32)
    q = normal(2, 3, 30, 4)
    for name in ("knn", "stratified"):
        with pytest.raises(ValueError, match=r"coords are needed, shape \(2, 30, any\), got None"):
            make_attention(name, 8, 2)(x)
        with pytest.raises(ValueError, match="coords holds NaN"):
            make_attention(name, 8, 2)(x, coords / 0)
        with pytest.raises(ValueError, match="coords must have shape"):
            make_attention(name, 8, 2)(x, coords[:, 1:])
    with pytest.raises(TypeError, match="index must be an int64 tensor"):
        neighbour_attention(q, q, q, lists().float())
    with pytest.raises(ValueError, match=r"index must have shape \(2, 30, any\)"):
        neighbour_attention(q, q, q, lists(n=29))
    with pytest.raises(ValueError, match=r"index must lie in -1..29"):
        neighbour_attention(q, q, q, lists() + 1)
    with pytest.raises(ValueError, match="twice"):
        neighbour_attention(q, q, q, torch.zeros(2, 30, 2, dtype=torch.long))
    with pytest.raises(ValueError, match="impl must be"):
        neighbour_attention(q, q, q, lists(), impl="quick")
    with pytest.raises(ValueError, match="as many sets, got 2 and 1"):
        MAB(8, 2)(x, x[:1])
    with pytest.raises(ValueError, match="y holds NaN"):
        MAB(8, 2)(x, x / 0)
    for call, words in ((lambda: MAB(8, 2, hidden=0), "hidden"), (lambda: SetTransformer(3, 3, decoder=-1), "decoder")):
        with pytest.raises(ValueError, match=f"{words} must be an integer"):
            call()
    with pytest.raises(ValueError, match="x must have 8 channels"):
        PMA(8, 2)(torch.randn(2, 5, 3))
    with pytest.raises(ValueError, match="outputs must have 4 channels .* or 5"):
        mixture_parameters(torch.randn(1, 4, 6), 2)
    with pytest.raises(ValueError, match="real point in every cloud"):
        mixture_update(coords, *mixture_parameters(torch.randn(2, 4, 5), 3), torch.zeros(2, 30, dtype=torch.bool))


@pytest.mark.parametrize("make, message", [
    (lambda: MAB(8, 2, query_dim=3), "query_dim must be dim = 8"),
    (lambda: MAB(8, 2, as_released=True, hidden=9), "hidden must be None as released"),
    (lambda: MAB(8, 2, as_released=True, head_dim=3), "heads \\* head_dim must be dim = 8"),
    (lambda: MAB(8, 3), "heads must divide dim"),
    (lambda: ISAB(8, 2, points=0), "points must be an integer >= 1"),
    (lambda: PMA(8, 2, seeds=0), "seeds must be an integer >= 1"),
    (lambda: SetTransformer(3, 1, encoder=0), "encoder must be an integer >= 1"),
    (lambda: make_attention("inducing", 8, 2, points=0), "points must be an integer >= 1"),
    (lambda: make_attention("knn", 8, 2, k=0), "k must be an integer >= 1"),
    (lambda: make_attention("stratified", 8, 2, window=0.0), "window and large"),
    (lambda: make_attention("stratified", 8, 2, window=1.0, large=0.5), "window and large"),
    (lambda: make_attention("stratified", 8, 2, every=0), "every must be an integer >= 1"),
    (lambda: make_attention("stratified", 8, 2, sample="best"), "sample must be one of"),
    (lambda: make_attention("none", 8, 3), "heads must divide dim"),
])
def test_refuses_options_out_of_range(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_refuses_another_dtype_than_the_weights():
    x = torch.randn(2, 5, 8)
    for name, call in (("x", lambda: SetTransformer(8, 3)(x.double())), ("x", lambda: MAB(8, 2)(x.double(), x)),
                       ("y", lambda: MAB(8, 2)(x, x.double())), ("x", lambda: PMA(8, 2)(x.double()))):
        with pytest.raises(TypeError, match=f"{name} must have the dtype of weight, torch.float32, got torch.float64"):
            call()
