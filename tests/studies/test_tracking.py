"""The tracking study: networks without the spatial kernel and with the successor's attention; tracks; whole events."""

import torch

from sparseattn.data import collisions
from sparseattn.hept.layer import PointHash
from sparseattn.studies.tracking import (
    AFTER,
    COUNTS,
    DRAWN,
    RADII,
    RIVALS,
    ROWS,
    SMALLER,
    STUDY,
    OriginalKernel,
    _for_whole_events,
    _rival,
    batches,
    find_tracks,
    loss,
    network,
    whole,
)


def test_the_original_kernel_learns_in_every_part():
    """Points, queries, keys, values and the encoding of positions all get a gradient."""
    torch.manual_seed(0)
    layer = OriginalKernel(8, 2, coord_dims=3, tables=2, block_size=10).double()
    x = torch.randn(2, 40, 8, dtype=torch.float64, requires_grad=True)
    layer(x, torch.rand(2, 40, 3, dtype=torch.float64)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in (x, *layer.parameters()))
    assert {"query", "value", "encode", "out"} <= {name.split(".")[0] for name, _ in layer.named_parameters()}


def test_the_successor_sees_the_direction_alone():
    setting, cloud = STUDY.at("smoke"), torch.rand(1, 40, 6)
    data, x = {"_inputs": (torch.zeros(15), torch.ones(15))}, torch.randn(1, 40, 15)
    moved = torch.cat([cloud[..., :2], cloud[..., 2:] + 1], -1)
    for row in AFTER:
        torch.manual_seed(0)
        model = network(row, setting, data).eval()
        assert torch.equal(model(x, cloud), model(x, moved))
        assert not torch.equal(model(x, cloud), model(x, cloud.flip(1)))


def test_drawn_negatives_stand_for_the_farther_half():
    """A row and its twin see the same clouds and the same near negatives; the drawn ones are new in every step."""
    setting = STUDY.at("smoke") | {"epoch": 4}
    data = {"train": {"example": [collisions.positions_only(c) for c in collisions.example_clouds()[:3]]}, "_pairs": {}}
    for name in DRAWN:
        row, half = name.removesuffix(", drawn"), setting["negatives"] // 2
        assert ROWS[name] == {k: v for k, v in ROWS[row].items() if k != "seeds"} | {"drawn": True, "seeds": 1}
        one, other = (list(batches(r, setting, data, 0, 0)) for r in (row, name))
        for a, b in zip(one, other, strict=True):
            near, far = a["pairs"].negatives, b["pairs"].negatives
            assert torch.equal(a["x"], b["x"]) and near.shape == far.shape
            assert torch.equal(near[:, :half], far[:, :half]) and not torch.equal(near[:, half:], far[:, half:])
        same = next(b for b in other[1:] if torch.equal(b["x"], other[0]["x"]))
        assert not torch.equal(same["pairs"].negatives, other[0]["pairs"].negatives)


def test_rivals_that_hash_draw_their_directions_in_every_step():
    """New directions with every loss, the same from the same generator; random features and other rows stay."""
    setting = STUDY.at("smoke") | {"epoch": 1}
    data = {"train": {"example": [collisions.positions_only(collisions.example_clouds()[0])]}, "_pairs": {},
            "_inputs": (torch.zeros(15), torch.ones(15))}
    for row, name in {"Reformer": "rotations", "SMYRF": "directions", "SMYRF-k": "directions",
                      "ScatterBrain": "directions", "Performer": "features", "HEPT, sum": "hash.directions"}.items():
        model, (batch,) = network(row, setting, data), batches(row, setting, data, 0, 0)
        generator, seen = torch.Generator().manual_seed(3), []
        for _ in range(2):
            loss(model, batch, generator)
            seen += [{key: x.clone() for key, x in model.named_buffers() if key.endswith(name)}]
        assert len(seen[0]) == 4
        assert all(torch.equal(x, seen[1][key]) != ROWS[row].get("rehash", False) for key, x in seen[0].items())
        kept = [key for key, _ in model.named_buffers() if key.endswith("features")] if row == "ScatterBrain" else []
        before = {key: x.clone() for key, x in model.named_buffers()}
        loss(model, batch, generator.manual_seed(3))
        now = dict(model.named_buffers())
        assert all(torch.equal(x, now[key]) for key, x in seen[0].items())
        assert all(torch.equal(before[key], now[key]) for key in kept) and len(kept) == 4 * (row == "ScatterBrain")


def test_rivals_are_there_as_released_whatever_form_is_trained():
    """Each embeds a cloud; a row that is trained in a smaller form has another network than its released form."""
    cloud = collisions.positions_only(collisions.example_clouds()[0])
    data = {"_inputs": (torch.zeros(15), torch.ones(15))}
    assert set(SMALLER) <= set(RIVALS)
    for row, options in RIVALS.items():
        released, trained = _rival(options).eval(), network(row, STUDY.at("smoke"), data)
        with torch.no_grad():
            out = released(cloud.x[None], cloud.coords[None])
        assert out.shape == (1, len(cloud), options.get("outputs", 12)) and out.isfinite().all()
        assert (row in SMALLER) == (ROWS[row] != options | {"seeds": 1})
        if "positions" in options or "in_turn" in options:
            sizes = [sum(p.numel() for p in model.parameters()) for model in (released, trained)]
            assert (sizes[0] == sizes[1]) == (row not in SMALLER)


def test_an_embedding_that_knows_the_particles_finds_all_tracks():
    """Noise lies apart, hit by hit."""
    clouds = [collisions.positions_only(cloud) for cloud in collisions.example_clouds()[:2]]

    def embed(cloud):
        places = torch.where(cloud.particle > 0, cloud.particle, -1 - torch.arange(len(cloud)))
        blur = torch.rand(len(cloud), generator=torch.Generator().manual_seed(0))
        return torch.stack([places.float(), 0.001 * blur], -1)

    data = {"val": clouds[:1], "test": {"held back": [(c, torch.ones(len(c), dtype=torch.bool)) for c in clouds]}}
    found = find_tracks(embed, data)
    assert found["radius"] == RADII[0]
    for one, cloud in zip(found["tracks, held back"], clouds, strict=True):
        counts = dict(zip(COUNTS, one.tolist(), strict=True))
        particles = cloud.particle[cloud.reconstructable & (cloud.pt > 0.9)].unique()
        hits = torch.bincount(cloud.particle.clamp(min=0))[particles]
        assert counts["particles"] == len(particles)
        assert counts["found"] == counts["perfect"] == (hits >= 3).sum() > 0  # a candidate has three hits
        assert counts["candidates"] == counts["matched"] == counts["pure"] == counts["found"]
    flat = find_tracks(lambda cloud: torch.zeros(len(cloud), 2), data)
    assert flat["tracks, held back"][:, COUNTS.index("found")].sum() == 0


def test_whole_events_have_ten_times_the_regions_and_leave_the_network_alone():
    setting, data = STUDY.at("smoke"), STUDY.data(STUDY.at("smoke"))
    model = network("HEPT, sum", setting, data).eval()
    hashes = [part for part in model.modules() if isinstance(part, PointHash)]
    before = [part.buckets.clone() for part in hashes]
    larger = [part.buckets for part in _for_whole_events(model).modules() if isinstance(part, PointHash)]
    for now, then in zip(larger, before, strict=True):
        torch.testing.assert_close(now.prod(-1), 10 * then.prod(-1))
    told = whole(model, data)
    assert all(torch.equal(part.buckets, old) for part, old in zip(hashes, before, strict=True)) and before
    assert set(told) == {f"whole, {part}" for part in data["_whole"]}
    for part, (score, hits) in told.items():
        assert 0 <= score <= 1 and hits == int(hits) > 0, part
