"""The patterns of Lemma 2 are what the formulas say, and the exact searches find what going through all cases finds."""

import doctest
import itertools
import math

import pytest
import torch

from sparseattn.core.patterns import depth_to_connect
from sparseattn.sbm import universal as module
from sparseattn.sbm.universal import (
    cluster_pattern,
    fewest_entries,
    from_relays_pattern,
    hamiltonian_path,
    has_hamiltonian_cycle,
    has_hamiltonian_path,
    is_hamiltonian_path,
    is_rectangle,
    lemma_patterns,
    membership_attention,
    position_rates,
    steps_to_reach,
    to_relays_pattern,
)

PAIRS = [(n, k) for n in range(1, 25) for k in range(1, n + 1)]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def digraphs(count, n, chance, seed=0):
    return torch.rand(count, n, n, generator=generator(seed)) < chance


def walks(pattern, closed):
    "By going through all orders of the tokens."
    n = len(pattern)
    for order in itertools.permutations(range(n)):
        steps = zip(order, order[1:] + order[:1] if closed else order[1:], strict=False)
        if all(pattern[b][a] for a, b in steps):
            return True
    return False


def test_examples():
    found = doctest.testmod(module)
    assert found.attempted > 10 and found.failed == 0


@pytest.mark.parametrize("n", range(1, 25))
def test_patterns_are_the_formulas(n):
    for k in range(1, n + 1):
        check_formulas(n, k)


def check_formulas(n, k):
    """Lemma 2 with tokens numbered from 1 and clusters floor((i - 1) k / n)."""
    clusters, gather, collect = lemma_patterns(n, k)
    for i in range(1, n + 1):
        same = {j for j in range(1, n + 1) if (i - 1) * k // n == (j - 1) * k // n}
        relays = set(range(n - k + 1, n + 1))
        for pattern, wanted in (
            (clusters, {i} | same),
            (gather, {i} | relays),
            (collect, set(range(1, n + 1)) if i > n - k else {i}),
        ):
            assert {j + 1 for j in pattern[i - 1].nonzero().flatten().tolist()} == wanted
    assert torch.equal(clusters, cluster_pattern(n, k)) and torch.equal(gather, from_relays_pattern(n, k))
    assert torch.equal(collect, to_relays_pattern(n, k))
    labels = torch.arange(n) * k // n
    assert labels.unique().tolist() == list(range(k)) and labels.bincount().max() - labels.bincount().min() <= 1


@pytest.mark.parametrize("n", range(1, 40))
def test_walk(n):
    for k in range(1, n + 1):
        check_walk(n, k)


def check_walk(n, k):
    union = lemma_patterns(n, k).any(0)
    walk = hamiltonian_path(n, k)
    assert walk.dtype == torch.int64 and is_hamiltonian_path(union, walk)
    steps = list(zip(walk.tolist(), walk.tolist()[1:], strict=False))
    assert sorted(walk.tolist()) == list(range(n)) and all(union[b, a] for a, b in steps)


def test_validator_refuses_what_is_no_path():
    full = torch.ones(4, 4, dtype=torch.bool)
    for walk in ([0, 1, 2], [0, 1, 2, 2], [0, 1, 2, 3, 0], [0, 1, 2, 4]):
        assert not is_hamiltonian_path(full, torch.tensor(walk))
    one_way = torch.ones(4, 4, dtype=torch.bool).tril()  # queries attend what came before
    assert is_hamiltonian_path(one_way, torch.arange(4)) and not is_hamiltonian_path(one_way, torch.arange(4).flip(0))


@pytest.mark.parametrize("n", range(1, 7))
@pytest.mark.parametrize("chance", [0.2, 0.4, 0.7])
def test_search_finds_what_all_orders_find(n, chance):
    graphs = digraphs(25, n, chance, seed=n)
    assert has_hamiltonian_path(graphs).tolist() == [walks(p.tolist(), closed=False) for p in graphs]
    assert has_hamiltonian_cycle(graphs).tolist() == [walks(p.tolist(), closed=True) for p in graphs]


@pytest.mark.parametrize("n", [9, 16, 17, 20])
def test_search_on_larger_graphs(n):
    """A hidden cycle is found whatever the numbering of its tokens, not after it is cut; integers grow past 16."""
    order = torch.randperm(n, generator=generator(n))
    cycle = torch.zeros(n, n, dtype=torch.bool)
    cycle[order.roll(-1), order] = True
    assert has_hamiltonian_cycle(cycle)
    bridged = cycle | torch.eye(n, dtype=torch.bool)
    bridged[order[2], order[0]] = True  # a short cut spoils nothing
    assert has_hamiltonian_cycle(bridged)
    cut = bridged.clone()
    cut[order[0], order[-1]] = False
    cut[order[0], order[1]] = True  # heard by and hearing someone still, so the search has to look
    cut[order[3], order[-1]] = True
    assert not has_hamiltonian_cycle(cut)
    assert n == 20 or has_hamiltonian_path(cut)


def test_search_keeps_leading_dimensions_and_diagonals_do_not_matter():
    graphs = digraphs(24, 5, 0.45).view(2, 3, 4, 5, 5)
    found = has_hamiltonian_cycle(graphs)
    assert found.shape == (2, 3, 4) and 0 < found.sum() < 24
    eye = torch.eye(5, dtype=torch.bool)
    assert torch.equal(found, has_hamiltonian_cycle(graphs | eye))
    assert torch.equal(found, has_hamiltonian_cycle(graphs & ~eye))
    assert torch.equal(found, has_hamiltonian_cycle(graphs.mT))
    assert has_hamiltonian_cycle(graphs[0, 0, 0]).shape == ()


def test_counts_of_hamiltonian_digraphs():
    for n, count in ((2, 1), (3, 15), (4, 1194)):
        code, pairs = torch.arange(2 ** (n * (n - 1))), list(itertools.permutations(range(n), 2))
        graphs = torch.zeros(len(code), n, n, dtype=torch.bool)
        for bit, (i, j) in enumerate(pairs):
            graphs[:, i, j] = (code >> bit) & 1 == 1
        assert has_hamiltonian_cycle(graphs).sum() == count


def layers_by_sets(patterns, limit=60):
    "Assumption 1.3 with sets of tokens."
    n = len(patterns[0])
    attended = [[{j for j in range(n) if row[j]} for row in p.tolist()] for p in patterns]
    known, t = attended[0], 1
    while any(len(s) < n for s in known):
        if t == limit:
            return None
        t += 1
        known = [set().union(*(known[j] for j in attended[(t - 1) % len(patterns)][i])) for i in range(n)]
    return t


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_steps_are_the_recursion(order):
    for n, k in PAIRS[::3]:
        patterns = lemma_patterns(n, k)[list(order)]
        assert steps_to_reach(patterns) == layers_by_sets(patterns)


def test_steps_of_random_patterns():
    found = []
    for seed in range(60):
        patterns = digraphs(1 + seed % 3, 6, 0.2, seed) | torch.eye(6, dtype=torch.bool)
        found.append(steps_to_reach(patterns))
        assert found[-1] == layers_by_sets(patterns)
        assert (found[-1] is None) == (depth_to_connect(patterns.any(0)) is None)
    assert None in found and len(set(found)) > 4


def test_steps_waits_a_whole_round_before_giving_up():
    """Patterns that change nothing for now may be followed by one that does."""
    eye, full = torch.eye(4, dtype=torch.bool), torch.ones(4, 4, dtype=torch.bool)
    assert steps_to_reach(torch.stack([eye, eye, eye, full])) == 4
    assert steps_to_reach(torch.stack([eye, eye])) is None
    assert steps_to_reach(full[None, :1, :1]) == 1


def test_rectangles():
    rows, columns = torch.tensor([True, False, True, False]), torch.tensor([False, True, True, False])
    block = rows[:, None] & columns
    assert is_rectangle(block) and is_rectangle(torch.zeros(2, 5, dtype=torch.bool)) and is_rectangle(block[:, :3])
    eye = torch.eye(2, dtype=torch.bool)
    assert not is_rectangle(eye) and is_rectangle(eye, self_loops=True)
    with_loops = block | torch.eye(4, dtype=torch.bool)
    assert not is_rectangle(with_loops) and is_rectangle(with_loops, self_loops=True)
    count = sum(is_rectangle(torch.tensor(m).view(3, 2)).item() for m in itertools.product((False, True), repeat=6))
    assert count == 1 + (2**3 - 1) * (2**2 - 1)
    for n, k in PAIRS:
        clusters, gather, collect = is_rectangle(lemma_patterns(n, k), self_loops=True).tolist()
        assert gather and collect and clusters == (k == 1 or n <= k + 1)


@pytest.mark.parametrize("n, k", [(5, 1), (6, 3), (8, 2), (9, 4)])
def test_rates_that_sum_to_one_make_rectangles(n, k):
    """0/1 memberships and random weights that sum to 1: where the rate is 1 is a rectangle (Eq 5-8)."""
    g = generator(n)
    for _ in range(50):
        q, keys = (torch.randint(0, 2, (n, k), generator=g).double() for _ in range(2))
        used = (torch.rand(k, k, generator=g) < 0.3).double()
        used[0, 0] += 1
        assert is_rectangle(q @ (used / used.sum()) @ keys.T > 1 - 1e-12)


def test_fewest_entries():
    for n in range(2, 40):
        for patterns in range(1, 45):
            count = fewest_entries(n, patterns)
            assert count >= math.ceil((n - 1) ** 2 / patterns) and count >= n - 1
            if patterns < n:  # cutting the path into equal pieces attains it
                pieces = torch.tensor_split(torch.arange(n - 1), patterns)
                union = torch.zeros(n, n, dtype=torch.bool)
                for piece in pieces:
                    union[(piece + 1)[:, None], piece] = True
                assert union.sum() == count and is_hamiltonian_path(union, torch.arange(n))


def test_no_union_of_two_rectangles_is_cheaper():
    """All unions of two rectangles of four tokens."""
    choices = torch.tensor(list(itertools.product((False, True), repeat=4)))[1:]
    rectangles = (choices[:, None, :, None] & choices[None, :, None, :]).reshape(-1, 4, 4)
    unions = (rectangles[:, None] | rectangles).reshape(-1, 4, 4)
    assert unions[has_hamiltonian_path(unions)].sum((1, 2)).min() == fewest_entries(4, 2) == 5


@pytest.mark.parametrize("n, k", [(1, 1), (6, 2), (9, 3), (5, 5)])
@pytest.mark.parametrize("sharpness", [3.0, 12.0, 30.0])
def test_weights_give_the_lemmas_rates(n, k, sharpness):
    """Rates of one cluster are rectangles, of k clusters blocks at 1/k, within a sigmoid's and a softmax's error."""
    member = torch.nn.functional.one_hot(torch.arange(n) * k // n, k).bool()
    everyone, relay = torch.ones(n, 1, dtype=torch.bool), (torch.arange(n) >= n - k)[:, None]
    error = 3 * math.exp(-sharpness) + k * math.exp(-(sharpness**2))
    for queries, keys in ((everyone, relay), (relay, everyone), (member, member), (member[:, :1], member[:, :1])):
        rates = position_rates(membership_attention(queries, keys, sharpness))
        wanted = queries.double() @ keys.double().T / queries.shape[1]
        assert (rates - wanted).abs().max() < error and rates.dtype == torch.float64


def test_layer_draws_the_lemmas_masks():
    """With sharp memberships every draw of a rectangle is the pattern, self-loops included."""
    n, k = 8, 2
    everyone, relay = torch.ones(n, 1, dtype=torch.bool), (torch.arange(n) >= n - k)[:, None]
    for queries, keys, pattern in (
        (everyone, relay, from_relays_pattern(n, k)),
        (relay, everyone, to_relays_pattern(n, k)),
    ):
        layer = membership_attention(queries, keys, 40.0)
        at = torch.eye(n, dtype=torch.float64)[None]
        for seed in range(3):
            out, info = layer(at, return_info=True, generator=generator(seed))
            assert info.density.item() == pytest.approx(pattern.double().mean().item())
            assert torch.equal(out, torch.zeros_like(out))


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: cluster_pattern(3, 4), ValueError, "k must be at most n = 3, got 4"),
        (lambda: hamiltonian_path(3, 0), ValueError, "k must be"),
        (lambda: from_relays_pattern(2.0, 1), ValueError, "n must be"),
        (lambda: fewest_entries(3, 0), ValueError, "patterns must be"),
        (lambda: has_hamiltonian_cycle(torch.ones(3, 4, dtype=torch.bool)), ValueError, "pattern must have as many"),
        (lambda: has_hamiltonian_cycle(torch.ones(3, 3)), TypeError, "pattern must be a boolean"),
        (lambda: has_hamiltonian_cycle(torch.ones(21, 21, dtype=torch.bool)), ValueError, "at most 20"),
        (lambda: has_hamiltonian_path(torch.ones(20, 20, dtype=torch.bool)), ValueError, "at most 19"),
        (lambda: is_hamiltonian_path(torch.ones(2, 2, dtype=torch.bool), torch.ones(2)), TypeError, "walk"),
        (lambda: is_hamiltonian_path(torch.ones(1, 2, 2, dtype=torch.bool), torch.arange(2)), ValueError, "pattern"),
        (lambda: steps_to_reach(torch.ones(3, 3, dtype=torch.bool)), ValueError, "patterns must have shape"),
        (lambda: steps_to_reach(torch.zeros(1, 3, 3, dtype=torch.bool)), ValueError, "self-loop"),
        (lambda: is_rectangle(torch.ones(2, 3, dtype=torch.bool), self_loops=True), ValueError, "pattern"),
        (lambda: membership_attention(torch.ones(2, 1), torch.ones(2, 1, dtype=torch.bool)), TypeError, "queries"),
        (
            lambda: membership_attention(*(torch.ones(2, k, dtype=torch.bool) for k in (1, 2))),
            ValueError,
            "queries and keys",
        ),
    ],
)
def test_refuses(call, error, words):
    with pytest.raises(error, match=words):
        call()
