"""Networks of group attention: sets, padding, sizes, losses, bad input."""

import copy
import math

import pytest
import torch
from torch import nn

from sparseattn.pat.layers import GroupShuffleAttention, GumbelSubsetSampling
from sparseattn.pat.models import (
    HeadShuffleAttention,
    PATClassifier,
    PATSegmenter,
    PointEmbedding,
    class_scores,
    elementwise_loss,
    set_tau,
)

TINY = dict(dim=16, groups=4, hidden=(8,), last=(), head=(8, 8), neighbours=4)
PLANS = {
    "none": {},
    "fps": dict(sampling=("fps", "fps"), sizes=(12, 6)),
    "gss": dict(sampling=("gss",), sizes=(7,)),
    "mixed": dict(sampling=("fps", "gss", "gss"), sizes=(12, 6, 3)),
    "distinct": dict(sampling=("fps", "gss"), sizes=(12, 6), replace=False),
    "pooled": dict(pooled=True),
}


def gen(seed=0):
    return torch.Generator().manual_seed(seed)


def cloud(n=20, b=2, channels=3, dtype=torch.float64, seed=0):
    return torch.randn(b, n, channels, generator=gen(seed), dtype=dtype)


def padded_pair(n=20, real=14):
    x = cloud(n)
    mask = torch.arange(n) < torch.tensor([[n], [real]])
    return x, mask, real


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("features", [0, 2])
def test_shapes(plan, features):
    torch.manual_seed(0)
    model = PATClassifier(5, features=features, **PLANS[plan], **TINY)
    given = None if not features else cloud(channels=2, dtype=torch.float32)
    left = {"none": 20, "pooled": 1}.get(plan, PLANS[plan].get("sizes", (0,))[-1])
    assert model(cloud(dtype=torch.float32), given).shape == (2, left, 5)
    assert PATSegmenter(5, features=features, **TINY)(cloud(dtype=torch.float32), given).shape == (2, 20, 5)


@pytest.mark.parametrize("options", [{}, {"attention": "heads"}, {"embedding": "mlp"}, {"norm": "point"},
                                     {"norm": "point", "norm_groups": 1}, {"shuffle": False}])
def test_order_and_padding_do_not_matter(options):
    torch.manual_seed(0)
    x, mask, real = padded_pair()
    order = torch.randperm(20, generator=gen(1))
    labels = PATSegmenter(5, **TINY, **options).double().eval()
    names = PATClassifier(5, **PLANS["fps"], **TINY, **options).double().eval()
    pooled = PATClassifier(5, pooled=True, **TINY, **options).double().eval()
    spoilt = x.masked_fill(~mask[..., None], torch.nan)
    with torch.no_grad():
        assert (labels(x[:, order]) - labels(x)[:, order]).abs().max() < 1e-8
        out = labels(spoilt, mask=mask)
        assert (out[1:, :real] - labels(x[1:, :real])).abs().max() < 1e-8 and (out[1, real:] == 0).all()
        for model in (names, pooled):
            assert (model(x[:, order]) - model(x)).abs().max() < 1e-8
            assert (model(spoilt, mask=mask)[1:] - model(x[1:, :real])).abs().max() < 1e-8


def test_subsets_follow_the_generator():
    torch.manual_seed(0)
    model = PATClassifier(5, **PLANS["mixed"], **TINY).double().eval()
    x = cloud()
    first, again, other = model(x, generator=gen(3)), model(x, generator=gen(3)), model(x, generator=gen(4))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_heads_read_what_block_diagonal_groups_read():
    ours, theirs = GroupShuffleAttention(12, 3).double(), HeadShuffleAttention(12, 3).double()
    theirs.project.weight.data = torch.block_diag(*ours.attention.weight.data).T.contiguous()
    x = cloud(9, channels=12).requires_grad_()
    a, b = ours(x), theirs(x)
    assert (a - b).abs().max() < 1e-12
    ga, gb = (torch.autograd.grad(y.square().sum(), x)[0] for y in (a, b))
    assert (ga - gb).abs().max() < 1e-11


def test_heads_as_written():
    layer = HeadShuffleAttention(8, 2, shuffle=False).double()
    x = cloud(5, channels=8)
    parts = []
    for w in layer.project.weight.split(4):
        own = x @ w.T
        parts.append((own @ own.mT / 2.0).softmax(-1) @ nn.functional.elu(own))
    expected = layer.norm(x + torch.cat(parts, -1))
    assert (layer(x) - expected).abs().max() < 1e-12
    out, info = layer(x, return_info=True)
    assert info.nnz == 2 * 2 * 25 and info.density == 1.0 and (out - expected).abs().max() < 1e-12


@pytest.mark.parametrize(("plan", "paper"), [((), 5), (("fps", "gss", "gss"), 5.8)])
def test_sizes_of_the_paper(plan, paper):
    with torch.device("meta"):
        model = PATClassifier(40, sampling=plan, sizes=(384, 128, 64)[: len(plan)])
    assert abs(4e-6 * sum(p.numel() for p in model.parameters()) - paper) < 0.05


def test_elementwise_loss_is_the_mean_of_losses_and_bounds_the_mean():
    logits, labels = torch.randn(4, 6, 5, generator=gen()).double() * 3, torch.tensor([0, 1, 4, 2])
    each = [nn.functional.cross_entropy(x, y.expand(6)) for x, y in zip(logits, labels, strict=True)]
    assert abs(elementwise_loss(logits, labels) - torch.stack(each).mean()) < 1e-12
    assert elementwise_loss(logits, labels) >= nn.functional.nll_loss(class_scores(logits), labels)
    assert (class_scores(logits).exp().sum(-1) - 1).abs().max() < 1e-12
    one = logits[:, :1]
    assert (class_scores(one) - one[:, 0].log_softmax(-1)).abs().max() < 1e-12


def test_padding_answers_nothing():
    """Neither in the loss nor in the scores, whatever it holds; a cloud of padding alone answers all classes alike."""
    logits, labels = torch.randn(3, 4, 5, generator=gen()).double(), torch.tensor([0, 4, 2])
    mask = torch.arange(7) < torch.tensor([[4], [2], [0]])
    padded = torch.cat([logits, torch.full((3, 3, 5), torch.nan).double()], 1).requires_grad_()
    each = [class_scores(logits[:1]), class_scores(logits[1:2, :2]), torch.full((1, 5), 0.2, dtype=logits.dtype).log()]
    assert (class_scores(padded, mask) - torch.cat(each)).abs().max() < 1e-12
    known = elementwise_loss(logits[:1], labels[:1]) + elementwise_loss(logits[1:2, :2], labels[1:2])
    loss = elementwise_loss(padded, labels, mask)
    assert (loss - (known + math.log(5)) / 3).abs() < 1e-12
    (loss + class_scores(padded, mask).square().sum()).backward()
    assert (padded.grad[~mask] == 0).all() and padded.grad[0, :4].abs().min() > 0
    model = PATClassifier(5, **TINY).eval()
    short = torch.nn.functional.pad(points := cloud(dtype=torch.float32), (0, 0, 0, 9))
    real = torch.arange(short.shape[1]) < points.shape[1]
    scores = class_scores(model(short, mask=real.expand(len(short), -1)), real.expand(len(short), -1))
    assert (scores - class_scores(model(points))).abs().max() < 1e-5


@pytest.mark.parametrize("plan", PLANS)
def test_every_parameter_learns(plan):
    torch.manual_seed(0)
    model = PATClassifier(5, **PLANS[plan], **TINY).train()
    elementwise_loss(model(cloud(dtype=torch.float32)), torch.tensor([1, 2])).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in model.parameters())


def test_can_learn():
    torch.manual_seed(0)
    g = gen(7)
    x = torch.randn(40, 24, 3, generator=g)
    labels = torch.arange(40) % 2
    x[labels == 1, :, 2] *= 0.1  # flat clouds against round ones
    model = PATClassifier(2, sampling=("fps", "gss"), sizes=(12, 6), dropout=0.0, **TINY)
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(25):
        optimiser.zero_grad()
        elementwise_loss(model(x[:30]), labels[:30]).backward()
        optimiser.step()
    model.eval()
    right = (class_scores(model(x[30:], generator=g)).argmax(-1) == labels[30:]).double().mean()
    assert right >= 0.8


def test_tau_reaches_all_subset_layers():
    model = PATClassifier(3, **PLANS["mixed"], **TINY)
    set_tau(model, 0.25)
    assert [m.tau for m in model.modules() if isinstance(m, GumbelSubsetSampling)] == [0.25, 0.25]


def test_copies_and_state():
    torch.manual_seed(0)
    model = PATClassifier(5, **PLANS["mixed"], **TINY).eval()
    other = PATClassifier(5, **PLANS["mixed"], **TINY).eval()
    other.load_state_dict(model.state_dict())
    x = cloud(dtype=torch.float32)
    expected = model(x, generator=gen(1))
    for twin in (other, copy.deepcopy(model)):
        assert torch.equal(twin(x, generator=gen(1)), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtype_in_is_dtype_out(dtype):
    model = PATClassifier(5, **PLANS["fps"], **TINY).to(dtype).eval()
    out = model(cloud(dtype=dtype))
    assert out.dtype == dtype and out.isfinite().all()


def test_autocast():
    model = PATClassifier(5, **PLANS["mixed"], **TINY)
    with torch.autocast("cpu", torch.bfloat16):
        loss = elementwise_loss(model(cloud(dtype=torch.float32)).float(), torch.tensor([1, 2]))
    loss.backward()
    assert math.isfinite(loss.item())


def test_compiled():
    torch.manual_seed(0)
    model = PATClassifier(5, **PLANS["fps"], **TINY).eval()
    x = cloud(dtype=torch.float32)
    with torch.no_grad():
        assert (torch.compile(model, backend="aot_eager")(x) - model(x)).abs().max() < 1e-5


BAD = {
    "sampling must have no fps": lambda: PATClassifier(3, sampling=("gss", "fps"), sizes=(8, 4), **TINY),
    "sizes must not grow": lambda: PATClassifier(3, sampling=("fps", "fps"), sizes=(4, 8), **TINY),
    "sampling must be one of": lambda: PATClassifier(3, sampling=("random",), sizes=(8,), **TINY),
    "equally long": lambda: PATClassifier(3, sampling=("fps",), sizes=(8, 4), **TINY),
    "at most depth": lambda: PATClassifier(3, sampling=("fps",) * 4, sizes=(8,) * 4, **TINY),
    "sizes must be": lambda: PATClassifier(3, sampling=("fps",), sizes=(0,), **TINY),
    "outputs must be": lambda: PATSegmenter(0, **TINY),
    "embedding must be one of": lambda: PATSegmenter(3, embedding="graph", **TINY),
    "attention must be one of": lambda: PATSegmenter(3, attention="dense", **TINY),
    "fewer than the 12": lambda: PATClassifier(3, **PLANS["fps"], **TINY)(torch.randn(1, 10, 3)),
    "features must have": lambda: PointEmbedding(16, hidden=(8,), last=())(torch.randn(1, 5, 3), torch.randn(1, 5, 1)),
    "labels must have shape": lambda: elementwise_loss(torch.zeros(2, 3, 4), torch.zeros(3, dtype=torch.long)),
    "logits must be": lambda: class_scores(torch.zeros(2, 4)),
    "heads must divide dim, got 3 and 16": lambda: HeadShuffleAttention(16, 3, norm_groups=8),
    "groups must divide dim, got 3 and 20": lambda: PATClassifier(3, dim=20, groups=3),
    "hidden: the 4 groups of the norms must divide every width, got 6": lambda: PATSegmenter(
        3, **TINY | dict(dim=16, groups=4, norm_groups=None, hidden=(6,))),
    "head must have a width": lambda: PATClassifier(3, **TINY | dict(head=())),
    "hidden must have a width": lambda: PATSegmenter(3, **TINY | dict(hidden=())),
    "tau must be": lambda: set_tau(PATClassifier(3, **TINY), 0.0),
}  # fmt: skip


@pytest.mark.parametrize("words", BAD)
def test_refuses(words):
    with pytest.raises(ValueError, match=words):
        BAD[words]()


@pytest.mark.parametrize("labels", [[0, 1], torch.zeros(2), torch.zeros(2, dtype=torch.int32)], ids=str)
def test_labels_are_numbers_of_classes(labels):
    with pytest.raises(TypeError, match="labels must be an int64 tensor"):
        elementwise_loss(torch.zeros(2, 3, 4), labels)


@pytest.mark.parametrize("embedding", ["position", "mlp"])
def test_other_dtypes_than_the_weights_are_named(embedding):
    model = PATSegmenter(3, embedding=embedding, **TINY)
    with pytest.raises(TypeError, match="points must have the dtype of"):
        model(torch.randn(1, 12, 3, dtype=torch.float64))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.randn(1, 12, 3)).isfinite().all()


def test_heads_of_padding_attend_nothing():
    layer, x = HeadShuffleAttention(16, 4), torch.randn(2, 5, 16)
    assert layer(x, mask=torch.zeros(2, 5).bool(), return_info=True)[1].density == 0.0
    assert layer(x, mask=torch.tensor([[True] * 5, [False] * 5]), return_info=True)[1].density == 1.0
    with pytest.raises(TypeError, match="dtype"):
        layer(x.double())
