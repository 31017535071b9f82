"""The construction of Appendix E against another way to compute each step, and the networks against the functions."""

import doctest
from fractions import Fraction
from itertools import permutations, product

import numpy as np
import pytest
import torch

from sparseattn.sampled import universal as module
from sparseattn.sampled.attention import cycle_attention
from sparseattn.sampled.universal import (
    READINGS,
    AttentionLayer,
    FeedForwardLayer,
    Piece,
    ReluSum,
    all_max_shift,
    build_approximator,
    check_contextual,
    contextual_layers,
    contextual_map,
    delta_for,
    grid_inputs,
    id_bits,
    position_code,
    quantising_layers,
    rank_code,
    selective_shift,
    shift_layers,
    soften,
)

SIZES = [(2, 1, 2), (2, 1, 5), (2, 2, 2), (2, 3, 2), (3, 1, 2), (3, 1, 4), (3, 2, 2), (4, 1, 3), (5, 1, 2)]


def below_max(x):
    return x.max(-1, keepdims=True) - x


def both(x):
    "Two coordinates: distance from the centroid, in each."
    return np.abs(x - x.mean(-1, keepdims=True))


def test_examples():
    found = doctest.testmod(module)
    assert found.attempted > 20 and found.failed == 0


def by_hand(columns, r, reading):
    """Ids of one input in Fractions, column by column, with hardmax by sorting: nothing shared with the module."""
    n, d, delta = len(columns), len(columns[0]), Fraction(1, r)
    labels = [n - 1 - k for k in range(n)] if reading == "cycle" else [n - 1, *range(n - 1)]
    numbers = [sum((Fraction(v) * delta + e) / delta**i for i, v in enumerate(c))
               for c, e in zip(columns, labels, strict=True)]
    big, wide = Fraction(1) / delta**d, sum(1 / delta**i for i in range(d))
    for label in range(n - 1):
        k = labels.index(label)
        seen = {"cycle": [k, (k + 1) % n], "text": [k, k - 1], "printed": [k]}[reading]
        assert label * wide <= numbers[k] < label * wide + big * delta
        numbers[k] += big * (max(numbers[j] for j in seen) - min(numbers[j] for j in seen))
    c = 2 * n**2 / delta ** (n * d + 1)
    for _ in range(n):
        numbers = [v + c * max(v, numbers[(k + 1) % n]) for k, v in enumerate(numbers)]
    return [v / delta for v in numbers]


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("size", SIZES)
def test_ids_are_those_computed_by_hand(size, reading):
    n, d, r = size
    inputs = grid_inputs(n, d, r)
    ids = contextual_map(inputs, r, reading=reading)
    assert all(isinstance(v, int) for v in ids.ravel().tolist())
    for i in np.random.default_rng(0).choice(len(inputs), 12):
        assert ids[i].tolist() == by_hand(inputs[i].T.tolist(), r, reading)


@pytest.mark.parametrize("size", SIZES)
def test_repaired_readings_are_contextual_and_the_printed_one_is_not(size):
    n, d, r = size
    inputs = grid_inputs(n, d, r)
    for reading in ("cycle", "text"):
        assert check_contextual(contextual_map(inputs, r, reading=reading)).holds
    printed = check_contextual(contextual_map(inputs, r, reading="printed"))
    assert not printed.holds and printed.repeated == 0 and printed.shared > 0


def test_check_counts_what_all_pairs_count():
    rng = np.random.default_rng(1)
    for _ in range(50):
        ids = rng.integers(0, 12, (4, 3))
        found, rows = check_contextual(ids), ids.tolist()
        assert found.inputs == 4 and found.repeated == sum(len(set(row)) < 3 for row in rows)
        assert found.shared == sum(any(v in rows[j] for j in range(4) if j != i) for i in range(4) for v in rows[i])
        if found.pair:
            (i, k), (j, m) = found.pair
            assert i < j and rows[i][k] == rows[j][m]
        assert (found.pair is None) == (found.shared == 0)


def test_grid_holds_every_input_once():
    for n, d, r in SIZES:
        inputs = grid_inputs(n, d, r)
        assert inputs.shape == (r ** (n * d), d, n) and inputs.min() == 0 and inputs.max() == r - 1
        assert len({tuple(x.ravel()) for x in inputs}) == len(inputs)


def test_shifts_are_their_formulas():
    """Random patterns with two or three keys, numbers far beyond 64 bits."""
    rng = np.random.default_rng(2)
    for _ in range(40):
        n, d, r = 4, int(rng.integers(1, 4)), int(rng.integers(2, 4))
        pattern = rng.random((n, n)) < 0.5
        x = np.array([[int(v) * 2 * 10**25 for v in row] for row in rng.integers(1, 9, (d, n))], dtype=object)
        numbers = [sum(r**i * x[i, k] for i in range(d)) for k in range(n)]
        target = numbers[1] // 2
        moved, raised = selective_shift(pattern, d, r, target)(x), all_max_shift(pattern, d, r)(x)
        for k in range(n):
            seen = [numbers[j] for j in range(n) if pattern[k, j]]
            gain = r**d * (max(seen) - min(seen)) if seen and numbers[k] == 2 * target else 0
            assert moved[0, k] == x[0, k] + gain
            assert raised[0, k] == x[0, k] + (2 * n**2 * r ** (n * d + 1) * max(seen) if seen else 0)
        assert (moved[1:] == x[1:]).all() and (raised[1:] == x[1:]).all()


def test_layers_take_leading_dimensions_and_leave_their_input():
    layer, x = all_max_shift(np.eye(3, dtype=bool), 1, 2), np.arange(12).reshape(2, 2, 1, 3).astype(object)
    before = x.copy()
    assert layer(x).shape == x.shape and (layer(x)[1, 1] == layer(x[1, 1])).all() and (x == before).all()
    nobody = AttentionLayer(np.zeros((3, 3), bool), layer.query, layer.bias, layer.key, layer.value, layer.output)
    assert (nobody(x) == x).all()


def test_ties_of_different_values_are_refused():
    one = np.array([[1]])
    layer = AttentionLayer(np.ones((2, 2), bool), one, np.array([3]), one, one, one)
    assert layer(np.array([[5, 5]])).tolist() == [[10, 10]]
    with pytest.raises(ArithmeticError, match="same score"):
        layer(np.array([[3, 5]]))


def test_softmax_layer_is_cycle_attention():
    rng = np.random.default_rng(3)
    for n in (2, 3, 5):
        order = torch.from_numpy(rng.permutation(n))
        pattern = np.eye(n, dtype=bool)
        pattern[order, order.roll(-1)] = True
        query, key, value = rng.standard_normal((3, 2, 4))
        bias, output, x = rng.standard_normal(2), rng.standard_normal((4, 2)), rng.standard_normal((6, 4, n))
        layer = AttentionLayer(pattern, query, bias, key, value, output, sharpness=1.7)
        q, k, v = (torch.from_numpy(w @ x)[..., None] for w in (query, key, value))
        heads = cycle_attention(q - torch.from_numpy(bias)[:, None, None], k, v, order, scale=1.7)[..., 0].numpy()
        np.testing.assert_allclose(layer(x), x + output @ heads, rtol=0, atol=1e-12)


def test_softmax_counts_keys_once_when_rows_attend_different_numbers():
    pattern = np.array([[1, 1, 1], [0, 1, 1], [0, 0, 1]], dtype=bool)
    one, zero = np.ones((1, 1)), np.zeros((1, 1))
    layer = AttentionLayer(pattern, zero, np.zeros(1), one, one, one, sharpness=1.0)
    assert layer(np.array([[3.0, 6.0, 9.0]])).tolist() == [[9.0, 13.5, 18.0]]


def test_quantiser_rounds_down():
    rng = np.random.default_rng(4)
    for n, d, r in ((2, 1, 3), (3, 2, 2)):
        x = rng.integers(0, n * r * 64, (50, d, n)).astype(object)
        y, layers = x, quantising_layers(n, d, r, ticks=64)
        for layer in layers:
            y = layer(y)
        assert len(layers) == n * d * r and (y == x // 64 * 64).all()


def test_piece_and_relus():
    t = np.linspace(-2, 3, 101)
    assert (Piece(0, 1, -1, 0)(t) == np.where((t >= 0) & (t < 1), -t, 0)).all()
    step = ReluSum((0.0, 0.75, 1.0), (-1.0, 4.0, -3.0))
    away = (t <= 0.75) | (t >= 1)
    np.testing.assert_allclose(step(t)[away], Piece(0, 1, -1, 0)(t)[away], atol=1e-12)
    assert step.width == 3 and FeedForwardLayer(np.ones((2, 1)), np.zeros(2), step, np.ones((1, 2))).width == 6


@pytest.mark.parametrize("size", SIZES)
def test_layer_counts_and_bits(size):
    n, d, r = size
    for reading in READINGS:
        layers = contextual_layers(n, d, r, reading=reading)
        assert len(layers) == (n - 1) * r**d + n and all(len(layer.query) <= 2 for layer in layers)
    assert id_bits(n, d, r) == max(contextual_map(grid_inputs(n, d, r), r).ravel().tolist()).bit_length()


def test_codes():
    assert position_code(5).tolist() == [4, 3, 2, 1, 0] and position_code(5, reading="text").tolist() == [4, 0, 1, 2, 3]
    rng = np.random.default_rng(5)
    points = rng.integers(0, 3, (60, 2, 4))
    codes = rank_code(points)
    for cloud, code in zip(points, codes, strict=True):
        columns = [tuple(c) for c in cloud.T]
        assert [columns[k] for k in np.argsort(-code)] == sorted(columns) and sorted(code) == [0, 1, 2, 3]
        for order in permutations(range(4)):
            if len(set(columns)) == 4:
                assert (rank_code(cloud[:, list(order)]) == code[list(order)]).all()


@pytest.mark.parametrize("f, n, d, r", [(below_max, 2, 1, 5), (below_max, 3, 1, 3), (both, 2, 2, 2), (both, 4, 1, 2),
                                        (lambda x: -2 * x, 2, 1, 4), (lambda x: np.sort(x, -1), 3, 1, 2)])
def test_network_is_the_function_at_the_middle_of_the_cell(f, n, d, r):
    network = build_approximator(f, n, d, Fraction(1, r))
    x = np.concatenate([np.random.default_rng(6).random((60, d, n)), grid_inputs(n, d, r)[:60] / r])
    middle = (np.floor(x * r) + 0.5) / r
    np.testing.assert_allclose(network(x), f(middle), rtol=0, atol=2**-16 / r)
    assert network(x[0]).shape == (d, n) and np.array_equal(network(x[0]), network(x)[0])
    assert {name: len(some) for name, some in network.stages.items()} == {
        "quantise": n * d * r, "contextual map": (n - 1) * r**d + n, "value map": n * r ** (n * d)}
    assert len(network.layers) == sum(map(len, network.stages.values()))


def test_both_number_types_agree():
    "One network fits 64 bits, the same one with finer ticks does not."
    coarse, fine = (build_approximator(below_max, 3, 1, 1 / 4, ticks=ticks) for ticks in (2**8, 2**30))
    assert coarse.dtype is np.int64 and fine.dtype is object
    x = np.random.default_rng(7).random((40, 1, 3))
    np.testing.assert_allclose(coarse(x), fine(x), rtol=0, atol=2**-9)


def test_cycle_and_listing_do_not_show_in_equivariant_functions():
    network, x = build_approximator(both, 3, 1, 1 / 3), np.random.default_rng(8).random((30, 1, 3))
    for order in map(list, permutations(range(3))):
        assert np.array_equal(network(x, order=order), network(x))
        assert np.array_equal(network(x[..., order]), network(x)[..., order])
    each = np.random.default_rng(9).permuted(np.tile(np.arange(3), (30, 1)), axis=1)
    assert np.array_equal(network(x, order=each), network(x))
    plain = build_approximator(lambda v: np.sort(v, -1), 3, 1, 1 / 3)
    assert not np.array_equal(plain(x[..., [2, 0, 1]]), plain(x)[..., [2, 0, 1]])


def test_order_is_the_way_of_the_cycle():
    "Relabelled columns, then back: what a permuted pattern with labels that follow would compute."
    n, d, r, order = 4, 1, 2, [2, 0, 3, 1]
    pattern, label = np.eye(n, dtype=bool), np.empty(n, dtype=int)
    pattern[order, np.roll(order, -1)], label[order] = True, position_code(n)
    inputs = grid_inputs(n, d, r)
    x = 2 * (inputs + label * r).astype(object)
    for layer in shift_layers([pattern] * (n - 1), [pattern] * n, d, r):
        x = layer(x)
    assert (x[:, 0, order] // 2 == contextual_map(inputs[..., order], r)).all()


@pytest.mark.parametrize("f, n, d, r", [(below_max, 2, 1, 2), (below_max, 2, 1, 4), (both, 3, 1, 2), (both, 2, 2, 2)])
def test_softened_network_agrees_off_its_ramps(f, n, d, r):
    hard = build_approximator(f, n, d, 1 / r, ticks=2**8)
    soft = soften(hard, sharpness=300.0, ramp=2**-6)
    x = np.random.default_rng(10).random((200, d, n))
    off = ((x * r) % 1 < 1 - 2**-6).all((1, 2))
    assert off.sum() > 100 and (~off).any()
    np.testing.assert_allclose(soft(x)[off], hard(x)[off], rtol=0, atol=1e-9)
    assert np.abs(soft(x)).max() <= np.abs(hard(grid_inputs(n, d, r) / r)).max() + 1e-12
    assert max(layer.width for layer in soft.layers if isinstance(layer, FeedForwardLayer)) == 4


@pytest.mark.parametrize("eps", [1.0, 0.3, 0.1])
@pytest.mark.parametrize("p", [1, 2])
def test_error_asked_for_is_kept(eps, p):
    delta = delta_for(eps, 2, n=2, d=1, p=p)
    r = delta.denominator
    assert delta.numerator == 1 and 2 ** (1 / p) / r <= eps * (1 + 1e-12) and (r == 2 or 2 ** (1 / p) / (r - 1) > eps)
    x = np.random.default_rng(11).random((300, 1, 2))
    gap = build_approximator(below_max, 2, 1, delta)(x) - below_max(x)
    assert (np.abs(gap) ** p).sum((1, 2)).mean() ** (1 / p) <= eps


def test_blunt_softmax_does_not_agree():
    hard = build_approximator(below_max, 2, 1, 1 / 4, ticks=2**8)
    x = (grid_inputs(2, 1, 4) + 0.5) / 4
    assert np.abs(soften(hard, sharpness=10.0, ramp=2**-6)(x) - hard(x)).max() > 0.1


def test_value_map_meets_any_table():
    rng = np.random.default_rng(11)
    for n, d, r in ((2, 1, 3), (3, 1, 2), (2, 2, 2)):
        values = {key: rng.integers(-64, 64, (d, n)) / 32 for key in product(range(r), repeat=n * d)}

        def f(x, values=values, r=r):
            return np.array([values[tuple(np.floor(v * r).astype(int).T.ravel())] for v in x])

        x = rng.random((50, d, n))
        if r == 2:  # the values are whole ticks
            assert np.array_equal(build_approximator(f, n, d, 0.5, ticks=2**10)(x), f(x))
        np.testing.assert_allclose(build_approximator(f, n, d, Fraction(1, r))(x), f(x), rtol=0, atol=2**-16)


NETWORK = build_approximator(below_max, 2, 1, 1 / 2)


@pytest.mark.parametrize(
    "call, error, words",
    [
        (lambda: check_contextual(np.zeros(3)), ValueError, "ids must be a table"),
        (lambda: grid_inputs(0, 1, 2), ValueError, "n must be"),
        (lambda: grid_inputs(2, 1, 1), ValueError, "resolution .* at least 2, got 1"),
        (lambda: grid_inputs(16, 3, 2), ValueError, "more than 2.24"),
        (lambda: position_code(3, reading="other"), ValueError, "reading must be one of"),
        (lambda: rank_code(np.zeros(3)), ValueError, "points must have shape"),
        (lambda: shift_layers([], [], 1, 2), ValueError, "selective must hold"),
        (lambda: contextual_layers(1, 1, 2), ValueError, "n must be at least 2"),
        (lambda: contextual_layers(2, 1, 2, ticks=3), ValueError, "ticks must be an even"),
        (lambda: quantising_layers(2, 1, 2, ticks=0), ValueError, "ticks must be an integer >= 1"),
        (lambda: quantising_layers(2, 1, 2, ticks=1.5), ValueError, "ticks must be an integer >= 1"),
        (lambda: contextual_map(np.zeros((1, 1, 2)), 2), TypeError, "inputs must be an integer"),
        (lambda: contextual_map(np.full((1, 1, 2), 2), 2), ValueError, r"entries 0\.\.1"),
        (lambda: build_approximator(below_max, 2, 1, 0.3), ValueError, "delta must be 1 / r"),
        (lambda: build_approximator(below_max, 2, 1, 1), ValueError, "delta must be 1 / r"),
        (lambda: build_approximator(below_max, 1, 1, 0.5), ValueError, "n must be at least 2"),
        (lambda: delta_for(0, 1, 2, 1), ValueError, "eps must be positive"),
        (lambda: delta_for(0.1, -1, 2, 1), ValueError, "lipschitz must"),
        (lambda: delta_for(0.1, 1, 2, 1, p=0.5), ValueError, "p must"),
        (lambda: build_approximator(0.5, 2, 1, 0.5), TypeError, "f must be a function"),
        (lambda: build_approximator(lambda x: x[0], 2, 1, 0.5), ValueError, "finite values of shape"),
        (lambda: build_approximator(lambda x: x / 0, 2, 1, 0.5), ValueError, "finite values of shape"),
        (lambda: build_approximator(lambda x: x * 1e9, 2, 1, 0.5), ValueError, "as large as the ids"),
        (lambda: NETWORK(np.zeros((2, 1))), ValueError, "x must have shape"),
        (lambda: NETWORK(np.ones((1, 2))), ValueError, r"entries in \[0, 1\)"),
        (lambda: NETWORK(np.zeros((1, 2)), order=[0, 0]), ValueError, "order must hold"),
        (lambda: NETWORK(np.zeros((1, 2)), order=[0, 1, 2]), ValueError, "order must hold"),
        (lambda: soften(NETWORK, sharpness=0, ramp=0.1), ValueError, "sharpness must be positive"),
        (lambda: soften(NETWORK, sharpness=1, ramp=1), ValueError, "ramp in"),
        (lambda: soften(build_approximator(below_max, 4, 1, 0.5), sharpness=1, ramp=0.5), ValueError, "float64 holds"),
    ],
)
@pytest.mark.filterwarnings("ignore:divide by zero")
def test_refuses(call, error, words):
    with pytest.raises(error, match=words):
        call()
