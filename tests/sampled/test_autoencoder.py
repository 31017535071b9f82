"""Masked autoencoder: exact masks, an exact Chamfer distance, nothing hidden seen, both attentions."""

import copy

import pytest
import torch

from sparseattn.sampled.autoencoder import (SETTINGS, EncoderClassifier, MaskedAutoencoder, Patches, PointEncoder,
                                            Reconstruction, TokenEmbedding, chamfer_distance, cut_into_groups,
                                            draw_hidden, hidden_count, stretch_and_move, visible_and_hidden)

SMALL = dict(dim=16, depth=2, heads=4, groups=10, group_size=6, token_hidden=(8, 8, 8))


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _model(attention="dense", **options):
    torch.manual_seed(0)
    return MaskedAutoencoder(**SMALL, attention=attention, **options).double()


def _clouds(b=3):
    return cut_into_groups(_random(b, 60, 3), 10, 6)


def _hidden(b=3):
    return draw_hidden(b, 10, 0.7, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("n, groups, size", [(60, 10, 6), (5, 5, 5), (7, 1, 1), (40, 3, 40)])
def test_groups_are_the_nearest_points(n, groups, size):
    points = _random(2, n, 3)
    patches = cut_into_groups(points, groups, size)
    brute = (patches.centres[:, :, None] - points[:, None]).norm(dim=3).sort(2)[0][..., :size]
    torch.testing.assert_close(patches.points.norm(dim=3), brute, rtol=0, atol=1e-12)
    assert (patches.points[:, :, 0] == 0).all()


def test_groups_do_not_depend_on_the_batch():
    points = _random(3, 60, 3)
    together, alone = cut_into_groups(points, 10, 6), cut_into_groups(points[1:2], 10, 6)
    assert torch.equal(together.rows([1]).points, alone.points)
    index = torch.tensor([[3, 1]] * 3)
    chosen = together.groups(index)
    assert torch.equal(chosen.points, together.points[:, [3, 1]])
    assert torch.equal(chosen.centres, together.centres[:, [3, 1]])


@pytest.mark.parametrize("groups, ratio, count",
                         [(64, 0.7, 44), (64, 0.6, 38), (100, 0.29, 29), (10, 0.7, 7), (2, 0.5, 1)])
def test_mask_counts(groups, ratio, count):
    assert hidden_count(groups, ratio) == count
    hidden = draw_hidden(20, groups, ratio, generator=torch.Generator().manual_seed(0))
    assert (hidden.sum(1) == count).all()
    visible, masked = visible_and_hidden(hidden)
    assert visible.shape[1] == groups - count and masked.shape[1] == count
    assert not hidden.gather(1, visible).any() and hidden.gather(1, masked).all()


def test_masks_differ_between_clouds_and_repeat_with_the_seed():
    draws = [draw_hidden(20, 64, 0.7, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
    assert torch.equal(*draws) and len(draws[0].unique(dim=0)) == 20


@pytest.mark.parametrize("b, n, m", [(1, 1, 1), (5, 32, 32), (2, 3, 50), (1, 700, 600), (300, 40, 30)])
def test_chamfer_equals_its_definition(b, n, m):
    sets = [_random(b, size, 3, seed=size).requires_grad_() for size in (n, m)]
    weight, found = _random(b), []
    for impl in ("fast", "reference"):
        value = chamfer_distance(*sets, impl=impl)
        found.append([value, *torch.autograd.grad((value * weight).sum(), sets)])
    for fast, reference in zip(*found, strict=True):
        torch.testing.assert_close(fast, reference, rtol=1e-12, atol=1e-12)


def test_chamfer_in_pieces(monkeypatch):
    x, y = _random(7, 30, 3), _random(7, 20, 3, seed=1)
    whole = chamfer_distance(x, y)
    for piece in (1, 50, 700, 3000):
        monkeypatch.setattr("sparseattn.sampled.autoencoder._PIECE", piece)
        assert torch.equal(chamfer_distance(x, y), whole)


def test_chamfer_far_from_the_origin():
    x, y = (_random(4, 50, 3, seed=s).float() for s in (0, 1))
    torch.testing.assert_close(chamfer_distance(x + 1000, y + 1000), chamfer_distance(x, y), rtol=1e-2, atol=0)
    assert chamfer_distance(x + 1000, x + 1000).eq(0).all()


def test_chamfer_gradcheck():
    sets = [_random(2, 4, 3).requires_grad_(), _random(2, 5, 3, seed=1).requires_grad_()]
    assert torch.autograd.gradcheck(chamfer_distance, sets)


@pytest.mark.parametrize("call", [
    lambda: chamfer_distance(torch.rand(2, 0, 3), torch.rand(2, 4, 3)),
    lambda: chamfer_distance(torch.rand(2, 3, 3), torch.rand(1, 4, 3)),
    lambda: chamfer_distance(torch.rand(2, 3, 3), torch.rand(2, 4, 3), impl="magic"),
    lambda: cut_into_groups(torch.rand(1, 10, 3), 11, 4),
    lambda: cut_into_groups(torch.rand(1, 10, 3), 4, 11),
    lambda: cut_into_groups(torch.rand(1, 10, 3), 0, 4),
    lambda: cut_into_groups(torch.rand(10, 3), 4, 4),
    lambda: draw_hidden(2, 10, 1.0),
    lambda: draw_hidden(2, 10, 0.01),
    lambda: visible_and_hidden(torch.tensor([[True, False], [True, True]])),
    lambda: visible_and_hidden(torch.ones(2, 3, dtype=torch.bool)),
    lambda: MaskedAutoencoder(**SMALL | {"ratio": 1.5}),
    lambda: _model()(cut_into_groups(_random(1, 60, 3), 10, 5)),
    lambda: _model().encoder(Patches(torch.rand(1, 4, 3), torch.rand(1, 5, 6, 3))),
    lambda: EncoderClassifier(_model().encoder, 0),
])
def test_bad_input(call):
    with pytest.raises((TypeError, ValueError)):
        call()


def test_token_equals_the_appended_form():
    torch.manual_seed(0)
    embed = TokenEmbedding(16, (8, 12, 20)).double()
    x = _random(2, 5, 10, 3)
    features = embed.point(x / embed.unit)
    appended = torch.cat([features.amax(2, keepdim=True).expand_as(features), features], 3)
    torch.testing.assert_close(embed(x), embed.out(embed.group(appended).relu()).amax(2), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attention", ["dense", "sampled"])
def test_order_of_points_in_groups(attention):
    model, clouds, hidden = _model(attention), _clouds(), _hidden()
    shuffled = Patches(clouds.centres, clouds.points[:, :, torch.randperm(6)])
    drawn = []
    for given in (clouds, shuffled):
        torch.manual_seed(3)
        drawn.append(model(given, hidden))
    torch.testing.assert_close(drawn[0].predicted, drawn[1].predicted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(drawn[0].loss(), drawn[1].loss(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("attention", ["dense", "sampled"])
def test_hidden_points_reach_nothing(attention):
    model, hidden = _model(attention), _hidden()
    centres, points = (x.requires_grad_() for x in _clouds())
    patches = Patches(centres, points)
    features = model.encoder(patches.groups(visible_and_hidden(hidden)[0]))
    by_points, by_centres = torch.autograd.grad(features.square().sum(), (points, centres))
    assert (by_points[hidden] == 0).all() and (by_centres[hidden] == 0).all() and (by_points[~hidden] != 0).any()
    drawn = model(patches, hidden).predicted
    by_points, by_centres = torch.autograd.grad(drawn.square().sum(), (points, centres))
    assert (by_points[hidden] == 0).all() and (by_centres[hidden] != 0).any()


@pytest.mark.parametrize("attention", ["dense", "sampled"])
def test_loss_reaches_hidden_tokens_only(attention):
    model, kept = _model(attention), {}
    model.decoder.norm.register_forward_hook(lambda module, given, out: kept.update(out=out))
    drawn = model(_clouds(), _hidden())
    by_token = torch.autograd.grad(drawn.loss(), kept["out"])[0].norm(dim=2)
    assert (by_token[:, :3] == 0).all() and (by_token[:, 3:] > 0).all()


def test_order_of_groups_dense():
    model, clouds, hidden = _model(), _clouds(), _hidden()
    order = torch.randperm(10)
    moved = Patches(clouds.centres[:, order], clouds.points[:, order])
    given = model(clouds, hidden).loss()
    torch.testing.assert_close(model(moved, hidden[:, order]).loss(), given, rtol=1e-12, atol=1e-12)


def test_perfect_drawing_has_no_loss():
    target = _random(2, 3, 6, 3)
    perfect = Reconstruction(target[:, :, torch.randperm(6)], target, _random(2, 3, 3), _hidden(2))
    assert perfect.loss() < 1e-24


def test_clouds_or_patches():
    model, points, hidden = _model(), _random(2, 60, 3), _hidden(2)
    assert torch.equal(model(points, hidden).predicted, model(cut_into_groups(points, 10, 6), hidden).predicted)
    draws = [model(points, generator=torch.Generator().manual_seed(5)).hidden for _ in range(2)]
    assert torch.equal(*draws)


@pytest.mark.parametrize("name, encoder", [("sampled-transformer", 5_201_664), ("point-mae", 21_823_744)])
def test_named_settings(name, encoder):
    with torch.device("meta"):
        models = [MaskedAutoencoder(**SETTINGS[name], attention=a) for a in ("dense", "sampled")]
    counts = [sum(p.numel() for p in m.encoder.parameters()) for m in models]
    assert counts == [encoder, encoder]


def test_weights_move_between_attentions():
    dense, sampled = _model("dense"), _model("sampled", cycles=9)
    state = {k: v for k, v in dense.state_dict().items() if "_extra_state" not in k}
    sampled.load_state_dict(state, strict=False)
    torch.testing.assert_close(sampled.encoder(_clouds()), dense.encoder(_clouds()), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_and_fine_tuned(frozen):
    encoder = _model("sampled", dropout=0.5).encoder
    before = copy.deepcopy(encoder.state_dict())
    model = EncoderClassifier(encoder, 4, hidden=8, frozen=frozen).double().train()
    assert encoder.training is not frozen and model.head.training
    torch.nn.functional.cross_entropy(model(_clouds()), torch.tensor([0, 1, 2])).backward()
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
    same = [torch.equal(before[k], v) for k, v in encoder.state_dict().items() if "_extra_state" not in k]
    assert all(same) if frozen else not any(same)


def test_a_classifier_freezes_at_once_and_thaws_nothing():
    encoder = _model("sampled", dropout=0.5).encoder
    encoder.token.requires_grad_(False)
    thawed = EncoderClassifier(encoder, 4, hidden=8).encoder
    assert not any(p.requires_grad for p in thawed.token.parameters())
    assert all(p.requires_grad for p in thawed.blocks.parameters())
    model = EncoderClassifier(encoder, 4, hidden=8, frozen=True)
    assert model.training and not any(part.training for part in encoder.modules())
    assert not any(p.requires_grad for p in encoder.parameters())


def test_refuses_another_dtype_than_the_weights():
    model, clouds = _model().float(), _clouds()
    for wrong in (clouds, clouds._replace(points=clouds.points.float()),
                  clouds._replace(centres=clouds.centres.float()), _random(3, 60, 3)):
        with pytest.raises(TypeError, match="dtype of weight, torch.float32, got torch.float64"):
            model(wrong)


def test_info_of_every_layer():
    encoder = PointEncoder(16, 3, 4, attention="sampled", token_hidden=(8, 8, 8))
    out, infos = encoder(_clouds().to(torch.float32), return_info=True)
    assert out.shape == (3, 10, 16) and len(infos) == 3 and all(info.density == 0.2 for info in infos)


def test_stretch_and_move():
    points = _random(4, 60, 3)
    clouds = cut_into_groups(points, 10, 6)
    moved = stretch_and_move(clouds, low=1, high=1, generator=torch.Generator().manual_seed(0))
    shift = moved.centres[:, :1] - points[:, :1]
    assert torch.equal(moved.points, clouds.points) and (shift.abs() <= 0.2).all() and len(shift.unique()) == 12
    torch.testing.assert_close(moved.centres, clouds.centres + shift, rtol=0, atol=1e-12)
    stretched = stretch_and_move(clouds, most=0, generator=torch.Generator().manual_seed(0))
    factor = stretched.centres[:, 0] / clouds.centres[:, 0]
    assert (factor >= 2 / 3).all() and (factor <= 1.5).all()
    torch.testing.assert_close(stretched.points, clouds.points * factor[:, None, None], rtol=1e-12, atol=1e-12)


def test_learns():
    torch.manual_seed(0)
    model = MaskedAutoencoder(**SMALL, attention="sampled")
    clouds = cut_into_groups(torch.rand(8, 60, 3, generator=torch.Generator().manual_seed(0)), 10, 6)
    optimiser, losses = torch.optim.Adam(model.parameters(), lr=5e-3), []
    for _ in range(60):
        loss = model(clouds).loss()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_chamfer_finds_the_nearest_under_autocast(dtype):
    x = 2 * _random(1, 500, 3).float()
    y = x + 0.005 * _random(1, 500, 3, seed=1).float()
    expected = chamfer_distance(x, y, impl="reference")
    with torch.autocast("cpu", dtype):
        torch.testing.assert_close(chamfer_distance(x, y), expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(chamfer_distance(x, y.double()), expected.double(), rtol=1e-4, atol=0)


def test_loss_outside_of_autocast():
    model = MaskedAutoencoder(dim=16, depth=1, heads=4, groups=8, group_size=16, token_hidden=(8, 8, 8))
    with torch.autocast("cpu", torch.bfloat16):
        drawn = model(torch.rand(2, 100, 3))
    drawn.loss().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
