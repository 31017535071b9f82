"""sparseattn.data.toys: labels and laws of repeated tokens, likelihood and laws of mixtures, seeds, bad input.

Statistical tests have fixed seeds; each would reject a correct sampler once in 10^4 seeds.
"""

import itertools
import math

import pytest
import torch
from scipy import stats

from sparseattn.data import toys as T

ALARM = 1e-4


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# facts to look up


@pytest.mark.parametrize("sizes", [(256, 8, 64, 128, 16), (16, 4, 4, 8, 4), (2, 1, 1, 1, 1), (64, 32, 32, 32, 3)])
def test_associations_by_definition(sizes):
    length, facts, queries, keys, values = sizes
    batch = T.associations(20, length, facts, queries, keys=keys, values=values, generator=seeded(2))
    key, value = batch["tokens"].unbind(-1)
    assert key.shape == batch["labels"].shape == (20, length) and batch["mask"].all()
    assert {x.dtype for name, x in batch.items() if name != "mask"} == {torch.int64}
    assert 0 <= key.min() <= key.max() <= keys and 0 <= value.min() <= value.max() <= values
    for tokens, labels in zip(batch["tokens"].tolist(), batch["labels"].tolist(), strict=True):
        known = {key: value for key, value in tokens if key and value}
        kinds = [(key > 0, value > 0) for key, value in tokens]
        assert len(known) == kinds.count((True, True)) == facts and kinds.count((True, False)) == queries
        assert kinds.count((False, False)) == 0
        assert labels == [known[key] - 1 if key and not value else -1 for key, value in tokens]


def test_law_of_associations():
    batch = T.associations(2000, 32, 4, 8, keys=12, values=5, generator=seeded(3))
    facts, queries = (batch["tokens"] > 0).all(-1), batch["labels"] >= 0
    keys, values = batch["tokens"][facts].T
    for counts in (torch.bincount(keys)[1:], torch.bincount(values)[1:], facts.sum(0), queries.sum(0)):
        assert stats.chisquare(counts.double().numpy()).pvalue > ALARM


@pytest.mark.parametrize("sizes, word", [
    (dict(facts=9, keys=8), "facts"), (dict(facts=200, keys=300), "facts"), (dict(queries=0), "queries"),
    (dict(values=True), "values"), (dict(length=-1), "length")])
def test_associations_refuse(sizes, word):
    with pytest.raises(ValueError, match=word):
        T.associations(2, **sizes)


# repeated tokens


@pytest.mark.parametrize("shape, top", [((7, 33), 20), ((1, 1), 3), ((3, 2), 2), ((4, 100), 1), ((2, 50), 10**4)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_is_repeated_by_definition(shape, top, dtype):
    tokens = torch.randint(0, min(top, 255 if dtype == torch.uint8 else top) + 1, shape, generator=seeded(1)).to(dtype)
    found = T.is_repeated(tokens)
    assert found.dtype == torch.bool
    for row, labels in zip(tokens.tolist(), found.tolist(), strict=True):
        assert labels == [row.count(value) > 1 for value in row]


def test_is_repeated_ignores_order_and_empty():
    tokens = torch.randint(0, 30, (5, 40), generator=seeded())
    order = torch.randperm(40, generator=seeded())
    assert torch.equal(T.is_repeated(tokens)[:, order], T.is_repeated(tokens[:, order]))
    assert T.is_repeated(torch.zeros(0, 4, dtype=torch.long)).shape == (0, 4)
    assert T.is_repeated(torch.zeros(4, 0, dtype=torch.long)).shape == (4, 0)


def test_batch_of_repeated_tokens():
    batch = T.repeated_tokens(6, 9, generator=seeded())
    assert {name: (x.shape, x.dtype) for name, x in batch.items()} == {
        "tokens": ((6, 9), torch.int64), "mask": ((6, 9), torch.bool), "labels": ((6, 9), torch.int64)}
    assert batch["mask"].all() and batch["tokens"].min() >= 1 and batch["tokens"].max() <= 9
    assert torch.equal(batch["labels"].bool(), T.is_repeated(batch["tokens"]))
    assert T.repeated_tokens(2)["tokens"].shape == (2, 256)
    assert T.repeated_tokens(50, 4, 100)["tokens"].max() > 4
    assert T.repeated_tokens(3, 1)["labels"].sum() == 0
    assert T.repeated_tokens(3, 5, 1)["labels"].all()


@pytest.mark.parametrize("length, values", [(1, 1), (1, 4), (2, 1), (2, 2), (2, 5), (3, 3), (4, 2), (4, 4), (5, 3)])
def test_repeat_law_by_enumeration(length, values):
    every = torch.tensor(list(itertools.product(range(values), repeat=length)))
    share = T.is_repeated(every).double().mean(1)
    mean, sd = T.repeat_law(length, values)
    assert abs(share.mean() - mean) < 1e-12 and abs(share.std(correction=0) - sd) < 1e-7


def test_repeat_law_of_the_paper():
    assert abs(T.repeat_law()[0] - (1 - (255 / 256) ** 255)) < 1e-12
    batch = T.repeated_tokens(3000, generator=seeded(3))
    mean, sd = T.repeat_law()
    share = batch["labels"].double().mean().item()
    assert 2 * stats.norm.sf(abs(share - mean) / (sd / 3000**0.5)) > ALARM
    assert stats.chisquare(torch.bincount(batch["tokens"].flatten(), minlength=257)[1:]).pvalue > ALARM


def test_all_sequences_are_equally_likely():
    tokens = T.repeated_tokens(30_000, 3, generator=seeded(4))["tokens"] - 1
    code = tokens @ torch.tensor([9, 3, 1])
    assert stats.chisquare(torch.bincount(code, minlength=27)).pvalue > ALARM


# mixtures


def parameters(b=3, n=20, k=4, d=2, dtype=torch.float64):
    g = seeded(7)
    points, logits, means, scales = (
        torch.randn(s, generator=g, dtype=dtype) for s in ((b, n, d), (b, k), (b, k, d), (b, k, d)))
    return points, logits, means, scales.exp()


@pytest.mark.parametrize("k, d", [(1, 1), (4, 2), (3, 5)])
def test_density_is_that_of_torch(k, d):
    points, logits, means, scales = parameters(k=k, d=d)
    D = torch.distributions
    parts = D.Independent(D.Normal(means[:, None], scales[:, None]), 1)
    wanted = D.MixtureSameFamily(D.Categorical(logits=logits[:, None]), parts).log_prob(points)
    torch.testing.assert_close(T.mixture_log_density(points, logits, means, scales), wanted, rtol=0, atol=1e-12)
    shifted = T.mixture_log_density(points, logits + 5, means, scales)
    torch.testing.assert_close(shifted, wanted, rtol=0, atol=1e-12)


def test_likelihood_gradients_and_far_points():
    leaves = [x.requires_grad_() for x in parameters(n=6)]
    assert torch.autograd.gradcheck(T.mixture_log_likelihood, leaves)
    points, logits, means, scales = (x.detach() for x in leaves)
    far = T.mixture_log_density(points + 1e6, logits, means, scales)
    assert torch.isfinite(far).all() and (far < -1e9).all()
    logits[:, 0] = -torch.inf  # a share of zero
    logits.requires_grad_()
    T.mixture_log_likelihood(points, logits, means, scales).sum().backward()
    assert torch.isfinite(logits.grad[:, 1:]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_masked_points_change_nothing(dtype):
    points, logits, means, scales = parameters(n=10, dtype=dtype)
    mask = torch.ones(3, 10, dtype=torch.bool)
    mask[0, 4:] = False
    points[0, 4:] = torch.nan
    points.requires_grad_()
    score = T.mixture_log_likelihood(points, logits, means, scales, mask)
    alone = T.mixture_log_likelihood(points[:1, :4], logits[:1], means[:1], scales[:1])
    assert score.dtype == dtype
    torch.testing.assert_close(score[:1], alone)
    score.sum().backward()
    assert (points.grad[0, 4:] == 0).all() and torch.isfinite(points.grad).all()


def test_batch_of_mixtures():
    batch = T.mixtures(5, 3, 4, sizes=(6, 9), per_set=True, generator=seeded(), dtype=torch.float64)
    n = batch["mask"].sum(1)
    assert n.min() >= 6 and n.max() <= 9 and batch["points"].shape == (5, n.max(), 4)
    assert batch["points"].dtype == batch["means"].dtype == torch.float64
    assert (batch["points"][~batch["mask"]] == 0).all() and (batch["labels"][~batch["mask"]] == -1).all()
    assert set(batch["labels"][batch["mask"]].tolist()) <= {0, 1, 2}
    torch.testing.assert_close(batch["log_weights"].exp().sum(1), torch.ones(5, dtype=torch.float64))
    assert (batch["scales"] == 0.3).all() and batch["means"].abs().max() <= 4
    whole = T.mixtures(4, generator=seeded(2))
    assert whole["mask"].all() and 100 <= whole["points"].shape[1] <= 500 and whole["points"].dtype == torch.float32


def test_law_of_mixtures():
    batch = T.mixtures(1500, per_set=True, generator=seeded(5), dtype=torch.float64)
    mask, labels, weights = batch["mask"], batch["labels"], batch["log_weights"].exp()
    own = batch["means"].gather(1, labels.clamp(min=0)[..., None].expand(-1, -1, 2))
    residual = ((batch["points"] - own) / 0.3)[mask]
    assert stats.kstest(batch["means"].flatten(), stats.uniform(-4, 8).cdf).pvalue > ALARM
    for k in range(4):
        assert stats.kstest(weights[:, k], stats.beta(1, 3).cdf).pvalue > ALARM
    assert stats.kstest(residual.flatten()[::7], stats.norm.cdf).pvalue > ALARM
    assert abs((residual[:, 0] * residual[:, 1]).mean().item()) * len(residual) ** 0.5 < 4  # two-sided 6e-5
    hits = torch.stack([(labels == k).sum(1) for k in range(4)], 1)
    wanted = mask.sum(1, True) * weights
    keep = wanted.amin(1) > 5
    pearson = ((hits - wanted) ** 2 / wanted)[keep].sum()
    assert stats.chi2(3 * int(keep.sum())).sf(pearson) > ALARM
    g = seeded(6)
    sizes = torch.cat([T.mixtures(1, sizes=(3, 6), generator=g)["mask"].sum(1) for _ in range(600)])
    assert stats.chisquare(torch.bincount(sizes, minlength=7)[3:]).pvalue > ALARM


def test_oracle_of_one_gaussian_and_of_four():
    exact = -math.log(2 * math.pi * math.e * 0.3**2)
    one = T.mixtures(200, 1, sizes=(200, 200), generator=seeded(8), dtype=torch.float64)
    score = T.mixture_log_likelihood(*T.oracle_arguments(one)).mean().item()
    assert 2 * stats.norm.sf(abs(score - exact) * 200) > ALARM  # variance of a point: D / 2 = 1
    four = T.mixtures(500, generator=seeded(9), dtype=torch.float64)
    score = T.mixture_log_likelihood(*T.oracle_arguments(four))
    error = 4 * score.std().item() / 500**0.5
    assert exact - 13 / 12 - error < score.mean() < exact
    points, logits, means, scales, mask = T.oracle_arguments(four)
    for worse in ((logits * 0, means, scales), (logits, means + 0.1, scales), (logits, means, scales * 1.3),
                  (logits, means, scales / 1.3)):
        assert T.mixture_log_likelihood(points, *worse, mask).mean() < score.mean()


@pytest.mark.parametrize("make", [lambda g: T.repeated_tokens(3, 7, generator=g),
                                  lambda g: T.mixtures(3, per_set=True, generator=g)])
def test_same_seed_same_batch_and_nothing_else_touched(make):
    state = torch.get_rng_state()
    first, second, other = make(seeded(1)), make(seeded(1)), make(seeded(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(state, torch.get_rng_state())
    first = next(iter(first.values()))
    other = next(iter(other.values()))
    assert first.shape != other.shape or not torch.equal(first, other)


@pytest.mark.gpu
def test_batches_on_the_generators_device():
    if not torch.cuda.is_available():
        pytest.skip("needs CUDA")
    g = torch.Generator("cuda").manual_seed(0)
    for batch in (T.repeated_tokens(2, 9, generator=g), T.mixtures(2, per_set=True, generator=g)):
        assert all(x.device.type == "cuda" for x in batch.values())


@pytest.mark.parametrize("call, error, word", [
    (lambda: T.is_repeated(torch.zeros(2, 3)), TypeError, "tokens"),
    (lambda: T.is_repeated([[1]]), TypeError, "tokens"),
    (lambda: T.is_repeated(torch.zeros(2, 3, dtype=torch.bool)), TypeError, "tokens"),
    (lambda: T.is_repeated(torch.zeros(3, dtype=torch.long)), ValueError, "tokens"),
    (lambda: T.is_repeated(torch.tensor([[-1]])), ValueError, "tokens"),
    (lambda: T.repeated_tokens(0), ValueError, "batch"),
    (lambda: T.repeated_tokens(1, 2.0), ValueError, "length"),
    (lambda: T.repeated_tokens(1, 2, True), ValueError, "values"),
    (lambda: T.repeat_law(0), ValueError, "length"),
    (lambda: T.mixtures(1, 0), ValueError, "components"),
    (lambda: T.mixtures(1, sizes=(5, 4)), ValueError, "sizes"),
    (lambda: T.mixtures(1, sizes=(0, 4)), ValueError, "sizes"),
    (lambda: T.mixtures(1, scale=0.0), ValueError, "scale"),
    (lambda: T.mixtures(1, half_width=math.nan), ValueError, "half_width"),
    (lambda: T.mixture_log_density(*parameters()[:3], parameters(k=3)[3]), ValueError, "scales"),
    (lambda: T.mixture_log_density(*parameters()[:3], -parameters()[3]), ValueError, "scales"),
    (lambda: T.mixture_log_density(parameters(d=3)[0], *parameters()[1:]), ValueError, "points"),
    (lambda: T.mixture_log_likelihood(*parameters(), torch.zeros(3, 20, dtype=torch.bool)), ValueError, "mask"),
    (lambda: T.mixture_log_likelihood(*parameters(), torch.ones(3, 20)), ValueError, "mask"),
])
def test_bad_input_names_the_argument(call, error, word):
    with pytest.raises(error, match=word):
        call()
