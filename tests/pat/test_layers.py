"""Group shuffle attention, norms, position embedding and Gumbel subset sampling, each against its definition."""

import copy
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch.utils._pytree import tree_leaves

from sparseattn.core.relaxation import gumbel, gumbel_softmax, plackett_luce
from sparseattn.core.transformer import Encoder
from sparseattn.lab import measure
from sparseattn.pat import layers as module
from sparseattn.pat.layers import (
    GroupAttention,
    GroupShuffleAttention,
    GumbelSubsetSampling,
    PointMLP,
    PositionEmbedding,
    SetGroupNorm,
    annealed_tau,
    channel_shuffle,
    dilated_neighbours,
    dilated_pool,
    expected_distinct,
    group_attention,
    group_norm,
    gumbel_subset_sampling,
    position_set,
)

ALARM = 1e-6  # a test with random draws fails for one seed in a million


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def noise_for(*shape, seed=0):
    return gumbel(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(x, y, tolerance=1e-12):
    torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)


def agree(fast, reference, *tensors):
    """Outputs and gradients."""
    weight = draw(*reference(*tensors).shape, seed=9)
    for x, y in zip(*([f(*tensors), *torch.autograd.grad((f(*tensors) * weight).sum(), tensors)]
                      for f in (fast, reference)), strict=True):
        close(x, y)


# ---- channel shuffle


@pytest.mark.parametrize("groups", [1, 2, 3, 4, 6, 12])
def test_shuffle_deals_and_comes_back(groups):
    x = draw(2, 5, 12)
    out = channel_shuffle(x, groups)
    for i, j in itertools.product(range(groups), range(12 // groups)):
        assert out[..., j * groups + i].equal(x[..., i * (12 // groups) + j])
    assert channel_shuffle(out, 12 // groups).equal(x)


@pytest.mark.parametrize("groups", [5, 0, -1, 2.0, True])
def test_shuffle_refuses(groups):
    with pytest.raises(ValueError, match="groups"):
        channel_shuffle(torch.zeros(3, 12), groups)


# ---- group attention


@pytest.mark.parametrize("n", [1, 2, 17])
@pytest.mark.parametrize("groups", [1, 3, 12])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
def test_attention_forms_agree(n, groups, masked, shuffle):
    x, weight = draw(3, n, 12).requires_grad_(), draw(groups, 12 // groups, 12 // groups, seed=1).requires_grad_()
    mask = torch.arange(n) < torch.tensor([[n], [(n + 1) // 2], [0]]) if masked else None
    options = dict(mask=mask, shuffle=shuffle)
    agree(*(lambda *a, i=i: group_attention(*a, **options, impl=i) for i in ("fast", "reference")), x, weight)


def test_attention_by_hand():
    out = group_attention(torch.tensor([[[1.0], [-1.0]]]), torch.ones(1, 1, 1))
    share, low = 1 / (1 + math.exp(-2)), math.exp(-1) - 1
    assert out.flatten().tolist() == pytest.approx([share + (1 - share) * low, (1 - share) + share * low], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_attention_keeps_the_dtype(dtype):
    x, weight = draw(2, 9, 8).to(dtype), draw(2, 4, 4, seed=1).to(dtype)
    out = group_attention(x, weight)
    assert out.dtype == dtype
    close(out.double(), group_attention(x.double(), weight.double()), 2e-5 if dtype == torch.float32 else 0.08)


def test_attention_scale_and_activation():
    x, weight = draw(1, 6, 8), draw(2, 4, 4, seed=1)
    own = torch.cat([x[..., :4] @ weight[0], x[..., 4:] @ weight[1]], -1)
    uniform = group_attention(x, weight, scale=0.0, activation=lambda v: v)
    close(uniform, own.mean(1, keepdim=True).expand_as(own))


@pytest.mark.parametrize("norm", ["cloud", "point"])
def test_padding_changes_nothing_whatever_it_holds(norm):
    layer = GroupShuffleAttention(16, 4, norm=norm).double()
    x, mask = draw(3, 11, 16), torch.arange(11) < torch.tensor([[11], [6], [0]])
    filled = x.masked_fill(~mask[..., None], math.nan).requires_grad_()
    out, info = layer(filled, mask=mask, return_info=True)
    close(out[1, :6], layer(x[1:2, :6])[0])
    assert (out[~mask] == 0).all() and info.nnz == 4 * (121 + 36) and info.density == 1 and info.flops == 4 * 157 * 16
    grad = torch.autograd.grad(out.square().sum(), filled)[0]
    assert grad.isfinite().all() and (grad[~mask] == 0).all()


@pytest.mark.parametrize("norm", ["cloud", "point"])
@pytest.mark.parametrize("n", [1, 2, 30])
def test_layer_is_equivariant_and_takes_a_set_twice_as_the_set(norm, n):
    layer, x, move = GroupShuffleAttention(16, 4, norm=norm).double(), draw(2, n, 16), torch.randperm(n)
    close(layer(x[:, move]), layer(x)[:, move])
    close(layer(torch.cat([x, x], 1))[:, :n], layer(x))


def test_layer_is_equation_11():
    layer, x = GroupShuffleAttention(12, 3, norm_groups=2).double(), draw(2, 7, 12)
    with torch.no_grad():
        layer.norm.weight.copy_(draw(12, seed=3))
        layer.norm.bias.copy_(draw(12, seed=4))
    parts = []
    for i in range(3):
        own = x[..., 4 * i:4 * i + 4] @ layer.attention.weight[i]
        parts.append((own @ own.mT / 2).softmax(-1) @ F.elu(own))
    mixed = torch.stack(parts, -1).flatten(2)  # (.., w, g): channel j of group i at place j g + i
    close(layer(x), F.group_norm((mixed + x).mT, 2, layer.norm.weight, layer.norm.bias).mT)


def test_layer_without_shuffle_keeps_groups_apart():
    for shuffle in (False, True):
        layer = GroupAttention(8, 2, shuffle=shuffle).double()
        jacobian = torch.autograd.functional.jacobian(lambda x, f=layer: f(f(x)), draw(1, 3, 8))[0, 0, :, 0, 0]
        assert ((jacobian[:4, 4:] != 0).any() or (jacobian[4:, :4] != 0).any()).item() == shuffle


MODULES = {
    "group attention": lambda: GroupAttention(16, 4),
    "layer, norm of the cloud": lambda: GroupShuffleAttention(16, 4),
    "layer, norm of the point": lambda: GroupShuffleAttention(16, 4, norm="point"),
    "norm": lambda: SetGroupNorm(4, 16),
    "point network": lambda: PointMLP([16, 24, 16]),
    "embedding": lambda: PositionEmbedding(16, coords=16, neighbours=4, base=8),
    "slots": lambda: GumbelSubsetSampling(16, 4),
    "distinct slots": lambda: GumbelSubsetSampling(16, 4, replace=False),
}
MASK = torch.arange(9) < torch.tensor([[9], [5]])


def made(name, training=False):
    """A module with fixed weights, and the noise it is to use."""
    torch.manual_seed(0)
    module = MODULES[name]().train(training)
    options = dict(noise=noise_for(2, 4, 9).float()) if "slots" in name else {}
    draws = dict(generator=torch.Generator().manual_seed(3)) if name == "embedding" and training else {}
    return module, options | draws


@pytest.mark.parametrize("name", MODULES)
def test_modules_copy_save_and_differentiate(name):
    layer, options = made(name)
    other, x = MODULES[name]().eval(), draw(2, 9, 16, dtype=torch.float32)
    other.load_state_dict(layer.state_dict())
    out = layer(x, **options)
    assert out.equal(other(x, **options)) and out.equal(copy.deepcopy(layer)(x, **options))
    layer.train()(x).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize("name, training", [
    ("group attention", False), ("layer, norm of the cloud", True), ("embedding", True), ("slots", True),
    ("distinct slots", False)])
def test_compiled_modules_do_the_same(name, training):
    x = draw(2, 9, 16, dtype=torch.float32).requires_grad_()
    found = []
    for wrap in (lambda f: f, lambda f: torch.compile(f, backend="eager")):
        layer, options = made(name, training)
        out = wrap(layer)(x, mask=MASK, **options)
        grads = torch.autograd.grad(out.square().sum(), (x, *layer.parameters()), allow_unused=True)
        found.append([out, *(torch.zeros(()) if grad is None else grad for grad in grads)])
    for here, there in zip(*found, strict=True):
        close(here, there, 1e-5)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("training", [False, True])
def test_modules_under_autocast(name, training):
    layer, options = made(name, training)
    x = draw(2, 9, 16, dtype=torch.float32).requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(x, mask=MASK, **options)
    out.float().square().sum().backward()
    assert out.isfinite().all() and x.grad.dtype == torch.float32 and x.grad.isfinite().all()
    assert all(p.grad is None or p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in layer.parameters())
    if "slots" not in name:  # a rounded score may choose another point
        layer, options = made(name, training)
        close(out.float(), layer(x, mask=MASK, **options), 0.15)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_modules_keep_the_dtype(name, dtype):
    layer, options = made(name)
    x = draw(2, 9, 16, dtype=torch.float32)
    out = layer.to(dtype)(x.to(dtype), mask=MASK, **options)
    assert out.dtype == dtype and out.isfinite().all()
    if "slots" not in name and dtype != torch.float64:
        close(out.float(), layer.float()(x, mask=MASK, **options), 0.15)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("training", [False, True])
def test_modules_of_equal_points(name, training):
    layer, _ = made(name, training)
    x = torch.ones(2, 9, 16, requires_grad=True)
    out = layer(x)
    out.square().sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()
    close(out, out[:, :1].expand_as(out), 1e-5)


@pytest.mark.parametrize("name", [name for name in MODULES if name != "distinct slots"])
def test_modules_of_one_point(name):
    layer, _ = made(name)
    x = draw(2, 1, 16, dtype=torch.float32).requires_grad_()
    layer(x).square().sum().backward()
    assert layer(x).shape == (2, 4 if name == "slots" else 1, 16) and x.grad.isfinite().all()


def test_encoder_knows_pat():
    encoder, x = Encoder(16, 2, 4, attention="pat"), draw(2, 9, 16, dtype=torch.float32)
    out, infos = encoder(x, return_info=True)
    assert out.shape == x.shape and [info.nnz for info in infos] == [4 * 2 * 81] * 2


def test_parameter_counts():
    count = lambda layer: sum(p.numel() for p in layer.parameters())  # noqa: E731
    assert count(GroupShuffleAttention(64, 8)) == 64**2 // 8 + 2 * 64
    assert count(GumbelSubsetSampling(64, 10)) == 640


# ---- norm


@pytest.mark.parametrize("groups", [1, 3, 12])
def test_norm_is_torchs(groups):
    tensors = [draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(((2, 7, 12), (12,), (12,)))]
    agree(lambda *a: group_norm(a[0], groups, *a[1:]),
          lambda x, w, b: F.group_norm(x.mT.contiguous(), groups, w, b).mT, *tensors)
    agree(lambda *a: group_norm(a[0], groups, *a[1:], over="point"),
          lambda x, w, b: F.group_norm(x.flatten(0, 1), groups, w, b).view_as(x), *tensors)


def test_norm_of_one_group_and_point_is_layer_norm():
    x = draw(2, 5, 12)
    close(group_norm(x, 1, over="point"), F.layer_norm(x, (12,)))


@pytest.mark.parametrize("over", ["cloud", "point"])
def test_norm_of_neighbourhoods_with_a_mask(over):
    x, mask = draw(2, 6, 4, 8), (torch.arange(6) < torch.tensor([[6], [3]]))[..., None].expand(-1, -1, 4)
    out = group_norm(x, 2, over=over, mask=mask)
    close(out[1, :3], group_norm(x[1:, :3], 2, over=over)[0])
    assert (out[1, 3:] == 0).all()


def test_norm_half_precision_and_empty_cloud():
    x = (100 + draw(2, 50, 8)).half()
    out = group_norm(x, 2)
    assert out.dtype == torch.float16 and (out.float() - group_norm(x.float(), 2)).abs().max() < 2e-3
    assert (group_norm(x, 2, mask=torch.zeros(2, 50, dtype=torch.bool)) == 0).all()


# ---- position embedding


@pytest.mark.parametrize("n, pool", [(1, 32), (256, 32), (511, 32), (512, 32), (1024, 64), (1040, 65), (4096, 256)])
def test_pool(n, pool):
    assert dilated_pool(n) == pool


def sorted_neighbours(points, k):
    order = torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").argsort(dim=-1, stable=True)
    return torch.stack([torch.stack([row[row != i][:k] for i, row in enumerate(one)]) for one in order])


def test_neighbours_even_and_drawn():
    points, source = draw(2, 40, 3), torch.Generator().manual_seed(0)
    nearest = sorted_neighbours(points, 39)
    assert dilated_neighbours(points, 5, dilation=0.0).equal(nearest[..., :5])
    assert dilated_neighbours(points, 5, dilation=3.0, base=40).equal(nearest[..., [0, 3, 6, 9, 12]])
    seen = torch.zeros(2, 40, 40)
    for _ in range(100):
        found = dilated_neighbours(points, 5, dilation=3.0, base=40, draw=True, generator=source)
        assert all(len(set(row)) == 5 for row in found.flatten(0, 1).tolist())
        seen.scatter_(2, found, 1)
    assert seen.equal(torch.zeros(2, 40, 40).scatter_(2, nearest[..., :15], 1))


def test_neighbours_of_few_points_repeat_and_a_lone_one_is_its_own():
    points, mask = draw(3, 6, 3), torch.arange(6) < torch.tensor([[6], [3], [1]])
    found = dilated_neighbours(points, 8, mask=mask)
    assert all(set(found[0, i].tolist()) == set(range(6)) - {i} for i in range(6))
    assert all(set(found[1, i].tolist()) == set(range(3)) - {i} for i in range(3))
    assert (found[2, 0] == 0).all()


def test_neighbours_of_coincident_points():
    found = dilated_neighbours(torch.zeros(1, 8, 3), 3, dilation=0.0)
    assert all(i not in row for i, row in enumerate(found[0].tolist()) if i < 4) and found.max() < 8


def test_position_set():
    x, index = draw(2, 5, 4), torch.randint(0, 5, (2, 5, 3))
    found = position_set(x, index)
    for b, p, k in itertools.product(range(2), range(5), range(3)):
        assert found[b, p, k].equal(torch.cat([x[b, p], x[b, index[b, p, k]] - x[b, p]]))


@pytest.mark.parametrize("norm", ["cloud", "point"])
@pytest.mark.parametrize("features", [0, 2])
def test_embedding_masks_and_permutations(norm, features):
    embed = PositionEmbedding(16, features=features, neighbours=4, hidden=(8,), last=(8,), norm=norm).double().eval()
    points, mask = draw(2, 12, 3), torch.arange(12) < torch.tensor([[12], [7]])
    more = draw(2, 12, features, seed=1) if features else None
    junk = points.masked_fill(~mask[..., None], math.inf)
    out, move = embed(junk, more, mask), torch.randperm(12)
    close(out[1, :7], embed(points[1:, :7], None if more is None else more[1:, :7])[0])
    assert (out[1, 7:] == 0).all() and out.shape == (2, 12, 16)
    close(embed(points[:, move], None if more is None else more[:, move]), embed(points, more)[:, move])


def test_embedding_draws_in_training_only():
    embed = PositionEmbedding(16, neighbours=4, base=8, hidden=(8,), last=())
    points, source = draw(1, 60, 3, dtype=torch.float32), torch.Generator().manual_seed(0)
    assert not embed(points, generator=source).equal(embed(points, generator=source))
    assert embed.eval()(points).equal(embed(points)) and embed(points[:, :1]).shape == (1, 1, 16)


def test_point_mlp():
    net = PointMLP([3, 16, 8], groups=4, norm="point").double()
    x = draw(2, 5, 3)
    for linear, norm in zip(net.maps, net.norms, strict=True):
        x = F.elu(F.group_norm(linear(x).flatten(0, 1), 4, norm.weight, norm.bias)).view(2, 5, -1)
    close(net(draw(2, 5, 3)), x)
    assert sum(p.numel() for p in PointMLP([3, 16, 8]).parameters()) == 3 * 16 + 16 * 8 + 3 * (16 + 8)


# ---- Gumbel subset sampling


def as_matrix(x, weight, noise, mask, tau, hard):
    z = weight @ x.mT + noise
    z = z if mask is None else z.masked_fill(~mask[:, None], -torch.inf)
    x = x if mask is None else x.masked_fill(~mask[..., None], 0)
    return gumbel_softmax(z, tau=tau, hard=hard, noise=torch.zeros((), dtype=z.dtype)) @ x


@pytest.mark.parametrize("tau", [0.1, 2.0])
@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_subset_is_a_selection_matrix(tau, hard, masked):
    x, weight, noise = draw(3, 12, 5).requires_grad_(), draw(4, 5, seed=1).requires_grad_(), noise_for(3, 4, 12)
    mask = torch.arange(12) < torch.tensor([[12], [7], [1]]) if masked else None
    agree(lambda x, w: gumbel_subset_sampling(x, w, tau=tau, hard=hard, noise=noise, mask=mask),
          lambda x, w: as_matrix(x, w, noise, mask, tau, hard), x, weight)


@pytest.mark.parametrize("hard", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_second_derivatives_of_a_subset(hard, masked):
    x, weight, noise = draw(3, 12, 5), draw(4, 5, seed=1), noise_for(3, 4, 12)
    mask = torch.arange(12) < torch.tensor([[12], [7], [1]]) if masked else None
    found = []
    for choose in (lambda x, w: gumbel_subset_sampling(x, w, tau=0.5, hard=hard, noise=noise, mask=mask),
                   lambda x, w: as_matrix(x, w, noise, mask, 0.5, hard)):
        leaves = [part.clone().requires_grad_() for part in (x, weight)]
        first = torch.autograd.grad(choose(*leaves).sin().sum(), leaves, create_graph=True)
        found.append([*first, *torch.autograd.grad(sum(part.sin().sum() for part in first), leaves)])
        found[-1] += torch.func.grad(lambda *x, f=choose: f(*x).sin().sum(), argnums=(0, 1))(x, weight)
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-11)


def test_hard_subset_without_gradient_is_the_one_with():
    x, weight, noise = draw(2, 30, 6), draw(9, 6, seed=1), noise_for(2, 9, 30)
    for replace in (True, False):
        options = dict(hard=True, noise=noise, replace=replace, return_index=True)
        plain, index = gumbel_subset_sampling(x, weight, **options)
        with_grad, other = gumbel_subset_sampling(x, weight.clone().requires_grad_(), **options)
        rows = x.gather(1, index[..., None].expand(-1, -1, 6))
        assert plain.equal(with_grad) and index.equal(other) and plain.equal(rows)


def test_only_what_needs_a_gradient_gets_one():
    x, weight, noise = draw(2, 8, 3), draw(4, 3, seed=1), noise_for(2, 4, 8)
    both = gumbel_subset_sampling(x.clone().requires_grad_(), weight, hard=True, noise=noise)
    assert both.requires_grad and not gumbel_subset_sampling(x, weight, hard=True, noise=noise).requires_grad


@pytest.mark.parametrize("replace", [True, False])
def test_padding_is_never_drawn(replace):
    x, mask = draw(3, 9, 4), torch.arange(9) < torch.tensor([[9], [5], [4]])
    junk = x.masked_fill(~mask[..., None], math.nan)
    for hard in (False, True):
        options = dict(hard=hard, mask=mask, replace=replace, return_index=True)
        out, index = gumbel_subset_sampling(junk, 9 * draw(4, 4, seed=1), **options)
        assert out.isfinite().all() and mask.gather(1, index).all()


def test_cloud_of_padding_returns_zero():
    x, mask = draw(2, 6, 4), torch.arange(6) < torch.tensor([[6], [0]])
    for hard in (False, True):
        assert (gumbel_subset_sampling(x, draw(3, 4), hard=hard, mask=mask)[1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("hard", [False, True])
def test_subset_keeps_the_dtype(dtype, hard):
    x, weight = draw(2, 9, 4).to(dtype), draw(3, 4, seed=1).to(dtype).requires_grad_()
    out = gumbel_subset_sampling(x, weight, hard=hard)
    assert out.dtype == dtype and torch.autograd.grad(out.float().square().sum(), weight)[0].dtype == dtype


def test_one_point_and_equal_scores():
    x = draw(2, 1, 4)
    assert gumbel_subset_sampling(x, draw(5, 4), hard=True).equal(x.expand(2, 5, 4))
    index = gumbel_subset_sampling(torch.zeros(20_000, 5, 1), torch.zeros(1, 1), hard=True, return_index=True,
                                   generator=torch.Generator().manual_seed(0))[1]
    assert stats.chisquare(torch.bincount(index.flatten()).numpy()).pvalue > ALARM


def test_noise_moves_with_the_points():
    x, weight, noise, move = draw(2, 15, 4), draw(6, 4, seed=1), noise_for(2, 6, 15), torch.randperm(15)
    for hard, replace in itertools.product((False, True), repeat=2):
        options = dict(hard=hard, replace=replace)
        close(gumbel_subset_sampling(x[:, move], weight, noise=noise[..., move], **options),
              gumbel_subset_sampling(x, weight, noise=noise, **options))


def serially(z):
    z, found = z.clone(), []
    for row in range(len(z)):
        found.append(int(z[row].argmax()))
        z[:, found[-1]] = -torch.inf
    return found


@pytest.mark.parametrize("m, n", [(1, 1), (7, 7), (8, 30), (60, 64)])
def test_distinct_slots_are_those_of_the_loop(m, n):
    for z in (draw(20, m, n), torch.randint(0, 2, (20, m, n)).double(), draw(20, 1, n).expand(-1, m, -1)):
        before = z.clone()
        assert module._distinct(z).tolist() == [serially(one) for one in z] and z.equal(before)


def test_distinct_slots_law():
    scores, n = draw(3, 4), 40_000
    orders, code = torch.tensor(list(itertools.permutations(range(4), 3))), torch.tensor([16, 4, 1])
    x = torch.eye(4, dtype=torch.float64).expand(n, 4, 4)
    for rows in (scores, scores[:1].expand(3, 4)):
        chances = []
        for order in orders.tolist():
            left, chance = rows.softmax(-1).clone(), 1.0
            for m, j in enumerate(order):
                chance *= (left[m, j] / left[m].sum()).item()
                left[:, j] = 0
            chances.append(chance)
        found = gumbel_subset_sampling(x, rows.contiguous(), hard=True, replace=False, return_index=True,
                                       generator=torch.Generator().manual_seed(1))[1]
        counts = torch.bincount(found @ code, minlength=64)[orders @ code].numpy()
        assert counts.sum() == n and stats.chisquare(counts, [n * c for c in chances]).pvalue > ALARM
    assert chances == pytest.approx(plackett_luce(scores[0].expand(24, 4), orders).exp().tolist(), abs=1e-12)


def test_soft_distinct_slots():
    x, weight, noise = draw(2, 9, 4).requires_grad_(), draw(6, 4, seed=1).requires_grad_(), noise_for(2, 6, 9)
    options = dict(noise=noise, replace=False)
    hard, index = gumbel_subset_sampling(x, weight, hard=True, return_index=True, **options)
    close(gumbel_subset_sampling(x, weight, tau=1e-6, **options), hard, 1e-9)
    weights = module._soft_picks(weight @ x.mT + noise, 1.0, index)
    close(weights.sum(-1), torch.ones(2, 6, dtype=torch.float64))
    for b, m in itertools.product(range(2), range(6)):
        assert (weights[b, m, index[b, :m]] == 0).all()
    grads = torch.autograd.grad(gumbel_subset_sampling(x, weight, **options).square().sum(), (x, weight))
    assert all(grad.isfinite().all() and grad.norm() > 0 for grad in grads)


def test_expected_distinct_is_that_of_draws():
    chances = draw(6, 10).softmax(-1)
    assert expected_distinct(torch.eye(4)).item() == 4 and expected_distinct(torch.eye(4)[:1].expand(3, 4)).item() == 1
    index = torch.multinomial(chances, 20_000, replacement=True, generator=torch.Generator().manual_seed(0)).T
    found = torch.zeros(20_000, 10).scatter_(1, index, 1).sum(1).double()
    z = (found.mean() - expected_distinct(chances)) / (found.std() / 20_000**0.5)
    assert abs(z.item()) < stats.norm.isf(ALARM / 2)


def test_module_is_soft_in_training_and_hard_in_evaluation():
    layer, x, noise = GumbelSubsetSampling(4, 3).double(), draw(2, 9, 4), noise_for(2, 3, 9)
    layer.tau = 0.5
    close(layer(x, noise=noise), gumbel_subset_sampling(x, layer.weight, tau=0.5, noise=noise))
    out, index = layer.eval()(x, noise=noise, return_index=True)
    assert out.equal(x.gather(1, index[..., None].expand(-1, -1, 4)))


def test_annealing():
    assert annealed_tau(0.0) == 1.0 and annealed_tau(1.0) == pytest.approx(0.1)
    assert annealed_tau(0.5, start=4.0, end=1.0) == pytest.approx(2.0)


# ---- bad input


@pytest.mark.parametrize("call, error, message", [
    (lambda: GroupAttention(8, 3), ValueError, "groups must divide"),
    (lambda: GroupShuffleAttention(8, 2, norm="batch"), ValueError, "norm must be"),
    (lambda: GroupShuffleAttention(8, 2, norm_groups=3), ValueError, "groups must divide"),
    (lambda: GroupShuffleAttention(8, 2)(torch.zeros(1, 3, 7)), ValueError, "8 channels"),
    (lambda: GroupShuffleAttention(8, 2)(torch.full((1, 3, 8), math.nan)), ValueError, "NaN"),
    (lambda: GroupShuffleAttention(8, 2)(torch.zeros(1, 3, 8), mask=torch.ones(1, 4).bool()), ValueError, "mask"),
    (lambda: group_attention(torch.zeros(1, 3, 8), torch.zeros(2, 4, 3)), ValueError, "weight"),
    (lambda: group_attention(torch.zeros(1, 3, 8), torch.zeros(2, 4, 4).double()), TypeError, "dtype"),
    (lambda: group_attention(torch.zeros(1, 3, 8), torch.zeros(2, 4, 4), impl="quick"), ValueError, "impl"),
    (lambda: group_norm(torch.zeros(1, 3, 8), 3), ValueError, "groups"),
    (lambda: SetGroupNorm(3, 8), ValueError, "groups"),
    (lambda: SetGroupNorm(4, 8, over="batch"), ValueError, "over"),
    (lambda: group_norm(torch.zeros(1, 3, 8), 2, over="batch"), ValueError, "over"),
    (lambda: group_norm([1.0], 1), TypeError, "x must be"),
    (lambda: group_norm(torch.zeros(1, 3, 8), 2, mask=torch.ones(1, 4).bool()), ValueError, "mask"),
    (lambda: group_norm(torch.zeros(1, 3, 8), 2, mask=torch.ones(1, 3)), TypeError, "mask"),
    (lambda: channel_shuffle("cards", 1), TypeError, "x must be"),
    (lambda: GroupAttention(8, 2)(torch.zeros(1, 3, 8).double()), TypeError, "dtype"),
    (lambda: GroupAttention(8, 2)([1.0]), TypeError, "x must be"),
    (lambda: dilated_pool(0), ValueError, "points"),
    (lambda: dilated_pool(5, 0), ValueError, "neighbours"),
    (lambda: dilated_pool(5, dilation=-1.0), ValueError, "dilation"),
    (lambda: dilated_neighbours(torch.zeros(1, 3, 3), mask=torch.ones(1, 4).bool()), ValueError, "mask"),
    (lambda: dilated_neighbours(torch.zeros(3, 3)), ValueError, "points"),
    (lambda: PositionEmbedding(16, neighbours=0), ValueError, "neighbours"),
    (lambda: PointMLP([0, 8]), ValueError, "channels"),
    (lambda: PointMLP([3, 8])(torch.zeros(1, 5, 2)), ValueError, "3 channels"),
    (lambda: PointMLP([3, 8])([1.0]), TypeError, "x must be"),
    (lambda: PointMLP([3, 8])(torch.zeros(1, 5, 3).double()), TypeError, "x must have the dtype"),
    (lambda: PointMLP([3, 8, 0]), ValueError, "channels"),
    (lambda: PointMLP([]), ValueError, "widths"),
    (lambda: PositionEmbedding(16, hidden=()), ValueError, "hidden must have a width"),
    (lambda: PositionEmbedding(16)(torch.zeros(1, 5, 3).double()), TypeError, "points must have the dtype"),
    (lambda: PositionEmbedding(16, features=1)(torch.zeros(1, 5, 3), torch.zeros(1, 5, 1).double()), TypeError,
     "features must have the dtype"),
    (lambda: PositionEmbedding(16, features=2)(torch.zeros(1, 5, 3)), ValueError, "got None"),
    (lambda: position_set(torch.zeros(5, 3), torch.zeros(1, 5, 2, dtype=int)), TypeError, "x must be"),
    (lambda: position_set(torch.zeros(2, 5, 3), torch.zeros(1, 5, 2, dtype=int)), ValueError, "x must be"),
    (lambda: expected_distinct(torch.zeros(4)), TypeError, "chances"),
    (lambda: PositionEmbedding(15), ValueError, "groups must divide"),
    (lambda: PositionEmbedding(16)([[0.0]]), ValueError, "points must have shape"),
    (lambda: PositionEmbedding(16, features=2)([[0.0]], torch.zeros(1, 5, 2)), ValueError, "points must have shape"),
    (lambda: dilated_neighbours(torch.full((1, 3, 3), math.nan)), ValueError, "NaN"),
    (lambda: PositionEmbedding(16)(torch.zeros(1, 5, 2)), ValueError, "points must have shape"),
    (lambda: PositionEmbedding(16, features=2)(torch.zeros(1, 5, 3)), ValueError, "features must have shape"),
    (lambda: gumbel_subset_sampling(torch.zeros(1, 3, 8), torch.zeros(2, 7)), ValueError, "7 channels"),
    (lambda: gumbel_subset_sampling(torch.zeros(1, 3, 8), torch.zeros(8)), ValueError, "weight"),
    (lambda: gumbel_subset_sampling(torch.zeros(1, 3, 8), torch.full((2, 8), math.nan)), ValueError, "weight"),
    (lambda: gumbel_subset_sampling(torch.zeros(1, 3, 8), torch.zeros(4, 8), replace=False), ValueError, "4 slots"),
    (lambda: gumbel_subset_sampling(torch.zeros(1, 3, 8), torch.zeros(2, 8), tau=0.0), ValueError, "tau"),
    (lambda: gumbel_subset_sampling(torch.zeros(1, 3, 8), torch.zeros(2, 8).double()), TypeError, "dtype"),
    (lambda: gumbel_subset_sampling(torch.zeros(1, 3, 8), torch.zeros(2, 8, dtype=int)), ValueError, "weight"),
    (lambda: GumbelSubsetSampling(8, 2)(torch.zeros(1, 3, 8), noise=torch.zeros(5)), ValueError, "noise"),
    (lambda: gumbel_subset_sampling([[0.0]], torch.zeros(2, 8)), TypeError, "x must be"),
    (lambda: GumbelSubsetSampling(8, 0), ValueError, "points"),
    (lambda: GumbelSubsetSampling(8, 2, tau=0.0), ValueError, "tau"),
    (lambda: annealed_tau(1.5), ValueError, "progress"),
])
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- the contenders of the speed tables


def test_contenders_compute_the_same():
    for backward in (False, True):
        cases = module.group_attention_cases(24, 16, 4, backward=backward)
        errors = measure.contest("attention", cases, n=24).errors()
        assert errors.keys() == {"fast", "per group", "batched"} and max(errors.values()) < 1e-5
        assert [x.shape for x in tree_leaves(cases["fast"]())] == [(1, 24, 16), *[(4, 4, 4)] * backward]
    inputs = draw(1, 9, 8), draw(2, 4, 4)
    given = module.group_attention_cases(0, inputs=inputs)["exact"]()
    assert torch.equal(given, module.group_attention(*inputs, shuffle=True, impl="reference"))
    subsets = module.subset_cases(16, 8)
    errors = measure.contest("subset", subsets, n=16).errors()
    assert list(errors) == ["rows", "one-hot matrix", "distinct rows"] and max(errors.values()) < 1e-5
    assert all(subsets[name]().shape == (1, 6, 8) for name in errors)
    assert subsets["error"](torch.zeros(1, 6, 8)) > 0.1
    assert list(module.group_attention_cases_32(4)) == list(cases)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu():
    torch.manual_seed(0)
    x, points = draw(2, 100, 32, dtype=torch.float32).cuda(), draw(2, 100, 3, dtype=torch.float32).cuda()
    mask = torch.arange(100, device="cuda") < torch.tensor([[100], [40]], device="cuda")
    layer = GroupShuffleAttention(32, 4).cuda()
    close(layer(x, mask=mask), layer.cpu()(x.cpu(), mask=mask.cpu()).cuda(), 1e-4)
    embed = PositionEmbedding(32, neighbours=8).cuda()
    assert embed(points, mask=mask).isfinite().all()
    for hard, replace in itertools.product((False, True), repeat=2):
        out = GumbelSubsetSampling(32, 16, replace=replace).cuda().train(not hard)(x, mask)
        out.sum().backward()
        assert out.is_cuda and out.isfinite().all()


@pytest.mark.parametrize("draw", [False, True])
def test_printed_pool_with_repetition(draw):
    """Below K points in the pool: all K come from the pool as printed; above it nothing changes."""
    g = torch.Generator().manual_seed(5)
    x = torch.randn(2, 128, 3, generator=g)
    near = dilated_neighbours(x, 32, repeat=True, draw=draw, generator=g)
    pool = dilated_pool(128, 32, repeat=True)
    inside = dilated_neighbours(x, pool, dilation=0.0)
    assert pool == 8 and near.shape == (2, 128, 32)
    assert (near[..., None] == inside[..., None, :]).any(-1).all()
    assert draw or all(len(row.unique()) == pool for row in near.flatten(0, 1))
    many = torch.randn(1, 700, 3, generator=g)
    assert dilated_neighbours(many, repeat=True).equal(dilated_neighbours(many))
    alone = dilated_neighbours(x[:, :1], 4, repeat=True, draw=draw, generator=g)
    assert alone.eq(0).all()


@pytest.mark.parametrize("hard", [False, True])
def test_draws_without_replacement_end(hard):
    "Scores or noise beyond all numbers of a dtype: distinct points all the same."
    large = dict(x=torch.full((1, 4, 1), 1e30) * torch.arange(1, 5)[:, None], weight=torch.full((2, 1), -1e10))
    half = dict(x=torch.full((1, 4, 1024), 80.0).half(), weight=-torch.ones(2, 1024).half())
    noise = dict(x=torch.randn(1, 4, 2), weight=torch.randn(2, 2), noise=torch.tensor([0.0, *[-math.inf] * 3]))
    for given in (large, half, noise):
        subset, index = gumbel_subset_sampling(**given, replace=False, hard=hard, return_index=True)
        assert len(set(index[0].tolist())) == 2 and subset.dtype == given["x"].dtype
        assert gumbel_subset_sampling(**given, hard=hard).isfinite().all()


def test_padding_reaches_no_gradient_of_a_point_network():
    network, x, mask = PointMLP([3, 16, 16], groups=4), torch.randn(1, 6, 3), torch.arange(6)[None] < 5
    network(x.masked_fill(~mask[..., None], math.nan), mask).square().sum().backward()
    found = [p.grad.clone() for p in network.parameters()]
    network.zero_grad()
    network(x, mask).square().sum().backward()
    assert all(torch.equal(a, p.grad) for a, p in zip(found, network.parameters(), strict=True))


def test_forward_derivatives_of_hard_subsets():
    x, w, to, noise = torch.randn(1, 30, 16), torch.randn(4, 16), torch.randn(4, 16), torch.randn(1, 4, 30)

    def chosen(w):
        return gumbel_subset_sampling(x, w, hard=True, noise=noise).square().sum()

    found, expected = torch.func.jvp(chosen, (w,), (to,))[1], (torch.func.grad(chosen)(w) * to).sum()
    torch.testing.assert_close(found, expected)
