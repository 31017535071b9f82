"""Tracks: the three ways to match against a loop over clusters, and cases that one can count by hand."""

import math

import pytest
import torch

from sparseattn.lab.tracks import cluster_hits, match_tracks


def numbers(*values):
    return torch.tensor(values)


def by_loops(cluster, particle, valid, least=3):
    """Shares of particles (double majority, perfect) and of candidates (LHC, fakes), as the sentences say."""
    cluster, particle = cluster.tolist(), particle.tolist()
    counts = {p for p, v in zip(particle, valid.tolist(), strict=True) if v and p > 0}
    found, perfect, pure, fakes, candidates = set(), set(), 0, 0, 0
    for c in set(cluster) - {-1}:
        members = [p for p, other in zip(particle, cluster, strict=True) if other == c]
        most = min(set(members), key=lambda p: (-members.count(p), p))
        if len(members) < least or most not in counts:
            continue
        candidates, own, all_ = candidates + 1, members.count(most), particle.count(most)
        double = own / len(members) > 0.5 and own / all_ > 0.5
        found |= {most} if double else set()
        perfect |= {most} if own == len(members) == all_ else set()
        pure, fakes = pure + (own / len(members) > 0.75), fakes + (not double)
    return len(found) / len(counts), len(perfect) / len(counts), pure / candidates, fakes / candidates


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("least", [1, 3, 5])
def test_equals_the_sentences(seed, least):
    g = torch.Generator().manual_seed(seed)
    particle = torch.randint(0, 20, (150,), generator=g)
    cluster = torch.where(torch.rand(150, generator=g) < 0.7, particle, torch.randint(-1, 25, (150,), generator=g))
    valid = (particle % 4 != 0) & (particle > 0)
    tracks = match_tracks(cluster, particle * 1000, valid, least=least)
    found = tracks.double_majority, tracks.perfect_efficiency, tracks.lhc, tracks.fake_rate
    assert found == pytest.approx(by_loops(cluster, particle * 1000, valid, least))


def test_noise_is_never_a_particle_and_spoils_clusters():
    tracks = match_tracks(numbers(0, 0, 0, 0, 0, 1, 1, 1), numbers(0, 0, 0, 5, 5, 5, 0, 0))
    assert tracks.particle.tolist() == [5] and not tracks.found.any() and not len(tracks.majority)
    assert math.isnan(tracks.lhc) and math.isnan(tracks.fake_rate)


def test_hits_outside_of_clusters_count_for_their_particle():
    whole = match_tracks(numbers(0, 0, 0, -1), numbers(1, 1, 1, 1))
    assert whole.double_majority == 1 and whole.perfect_efficiency == 0


def test_thresholds_are_strict():
    tracks = match_tracks(numbers(0, 0, 0, 0, 1, 1), numbers(1, 1, 1, 2, 2, 2))
    assert tracks.lhc == 0.0 and tracks.double_majority == 0.5  # three quarters are not more than three quarters
    assert match_tracks(numbers(0, 0, 0, 1, 1, 1), numbers(*[1] * 6)).double_majority == 0.0


def test_relabelling_and_reordering_mean_nothing():
    g = torch.Generator().manual_seed(0)
    particle, cluster = torch.randint(1, 9, (80,), generator=g), torch.randint(0, 9, (80,), generator=g)
    order = torch.randperm(80, generator=g)
    a, b = match_tracks(cluster, particle), match_tracks(3 + 7 * cluster[order], particle[order])
    assert torch.equal(a.found, b.found) and (a.lhc, a.fake_rate) == (b.lhc, b.fake_rate)


def test_clusters_are_connected_parts():
    g = torch.Generator().manual_seed(0)
    x = torch.rand(60, 2, generator=g)
    found = cluster_hits(x, 0.1)
    reach = (torch.cdist(x, x) <= 0.1).double()
    connected = torch.linalg.matrix_power(reach, 60) > 0
    assert torch.equal(found[:, None] == found[None], connected)
    assert (cluster_hits(x, 0.01, neighbours=3) == -1).all()


@pytest.mark.parametrize("call, error, message", [
    (lambda: match_tracks(numbers(0.0), numbers(1)), TypeError, "cluster: expected torch.int32"),
    (lambda: match_tracks(numbers(0, 1), numbers(1)), ValueError, "cluster: expected one number a hit"),
    (lambda: match_tracks(numbers(0), numbers(1), numbers(1)), TypeError, "valid: expected torch.bool"),
    (lambda: match_tracks(numbers(0), numbers(1), least=0), ValueError, "least: expected an integer"),
    (lambda: match_tracks(torch.zeros(0, dtype=torch.long), torch.zeros(0, dtype=torch.long)), ValueError, "no hits"),
    (lambda: cluster_hits(torch.tensor([[math.nan]])), ValueError, "embeddings: expected finite"),
    (lambda: cluster_hits(torch.zeros(2, 1), 0.0), ValueError, "eps: expected a number above 0"),
])
def test_refuses(call, error, message):
    with pytest.raises(error, match=message):
        call()
