"""On a pretended GPU nothing mixes devices, results are those of the CPU, and few numbers are read from it."""

import copy
import inspect

import numpy as np
import pytest
import torch
from pretend import pretend_gpu
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import sparseattn
from sparseattn import pat, samsa
from sparseattn.baselines import graphs, sets
from sparseattn.core import patterns, relaxation
from sparseattn.core import points as P
from sparseattn.core.attention import edge_attention
from sparseattn.core.transformer import make_attention
from sparseattn.data import collisions, gestures, glue, peptides, scenes, sequences, shapes, toys
from sparseattn.hept import hashing
from sparseattn.hept.models import HEPTModel, tracking_batch, tracking_loss
from sparseattn.lab import metrics, segmentation
from sparseattn.lab.train import Optimiser, Paused, Schedule, fit, to_device
from sparseattn.sampled import attention as attend
from sparseattn.sampled import autoencoder, cycles
from sparseattn.sampled import models as sampled
from sparseattn.sbm import models as sbm
from sparseattn.sbm import regimes
from sparseattn.sbm import sampling as sbm_sampling


def seeded(device="cpu", seed=0):
    return torch.Generator(device).manual_seed(seed)


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def moved(tree, device):
    return tree_map(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x, tree)


def close(ours, expected):
    """Equal up to rounding: the CPU has other kernels."""
    for a, b in zip(tensors(ours), tensors(expected), strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-4, atol=1e-5)


# ---- the pretended device refuses what CUDA refuses

REFUSED = {
    "operands in two places": lambda x: x + torch.ones(3),
    "target of a loss": lambda x: nn.functional.cross_entropy(x[None], torch.tensor([0])),
    "index on the GPU, memory on the CPU": lambda x: torch.ones(3)[torch.tensor([0], device="cuda")],
    "a number of the CPU among others": lambda x: torch.stack([x[0], torch.tensor(1.0)]),
    "numpy": lambda x: x.numpy(),
    "an array": lambda x: np.asarray(x),
    "generator of the CPU": lambda x: torch.rand(3, device="cuda", generator=torch.Generator()),
    "generator of the GPU": lambda x: torch.rand(3, generator=torch.Generator("cuda")),
    "generator in place": lambda x: x.uniform_(generator=torch.Generator()),
    "layer on the CPU": lambda x: nn.Linear(3, 3)(x),
    "address": lambda x: x.data_ptr(),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    with pretend_gpu(), pytest.raises((RuntimeError, TypeError, AssertionError), match="cuda|GPU|device"):
        REFUSED[name](torch.ones(3).to("cuda"))


def test_mixing_in_a_backward_pass_is_refused():
    class Mixed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, grad):
            assert grad.is_cuda
            return grad * torch.full((3,), 2.0)

    with pretend_gpu(), pytest.raises(RuntimeError, match="one device"):
        Mixed.apply(torch.ones(3, device="cuda", requires_grad=True)).sum().backward()


ALLOWED = {
    "a number of the CPU": (lambda x: x + torch.tensor(1.0), 0),
    "index on the CPU": (lambda x: x[torch.tensor([0])], 0),
    "copy from the CPU": (lambda x: x.copy_(torch.ones(3)), 0),
    "new memory": (lambda x: torch.zeros(3, device=x.device) + x.new_ones(3) + torch.zeros_like(x), 0),
    "draw": (lambda x: torch.rand(3, device="cuda", generator=seeded("cuda")) + x, 0),
    "number": (lambda x: float(x.sum()), 1),
    "branch": (lambda x: 1 if x.any() else 0, 1),
    "list": (lambda x: x.tolist(), 1),
    "copy to the CPU": (lambda x: x.cpu() + torch.ones(3), 1),
    "mask": (lambda x: x[x > 0], 1),
    "mask on the left": (lambda x: x.__setitem__(x > 0, 0.0), 1),
    "places of a mask": (lambda x: (x > 0).nonzero(), 1),
    "unique": (lambda x: x.unique(), 1),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_allowed_and_counted(name):
    function, reads = ALLOWED[name]
    with pretend_gpu() as gpu:
        out = function(torch.ones(3).to("cuda"))
        assert len(gpu.reads) == reads, gpu.reads
        if isinstance(out, torch.Tensor) and name != "copy to the CPU":
            assert out.is_cuda and out.device == torch.device("cuda", 0)
    assert torch.ones(3).device.type == "cpu" and type(torch.Generator()) is torch.Generator


def test_operator_without_a_kernel_for_the_gpu_is_refused():
    @torch.library.custom_op("pretended::doubled", mutates_args=(), device_types="cpu")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    assert doubled(torch.ones(3)).tolist() == [2, 2, 2]
    with pretend_gpu(), pytest.raises(NotImplementedError, match="pretended::doubled has no kernel for CUDA"):
        doubled(torch.ones(3, device="cuda"))

    @doubled.register_kernel("cuda")
    def tripled(x):
        assert x.is_cuda
        return 3 * x

    with pretend_gpu():
        assert doubled(torch.ones(3, device="cuda")).tolist() == [3, 3, 3]
        assert doubled(torch.ones(3)).tolist() == [2, 2, 2]


def test_modules_optimisers_and_copies_stay_there():
    with pretend_gpu() as gpu:
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.1)).to("cuda")
        rule = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.ones(4, 3, device="cuda")).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        rule.step()
        assert not gpu.reads
        twin = copy.deepcopy(model)
        twin.load_state_dict(model.state_dict())
        assert all(x.is_cuda for x in (*twin.state_dict().values(), *(p.grad for p in model.parameters())))
        model.cpu()
        assert not any(x.is_cuda for x in model.state_dict().values())


# ---- attentions

#: what a mechanism must be told, and sizes that make its parts meet
OPTIONS = {
    "hept": dict(coord_dims=3, block_size=8),
    "knn": dict(k=4),
    "linformer": dict(max_length=21),
    "flatformer": dict(slices=4, size=8),
    "flatformer_k": dict(coord_dims=3, slices=4, size=8),
    "flt": dict(coord_dims=3, features=16),
    "nystrom": dict(landmarks=4),
    "performer_k": dict(coord_dims=3, features=16),
    "point_transformer": dict(coord_dims=3, k=4),
    "scatterbrain": dict(features=16, size=8),
    "smyrf": dict(size=8),
    "smyrf_k": dict(coord_dims=3, size=8),
    "reformer": dict(chunk=8),
    "samsa": dict(samples=5),
    "sbm": dict(clusters=4),
    "window": dict(width=4),
}
#: further options, each of which takes another way through the code
VARIANTS = [
    ("dense", dict(kernel="gaussian", coord_dims=3)),
    ("hept", dict(combine="union")),
    ("hept", dict(codes="features", regions=4.0)),
    ("hept", dict(codes="none", floor=1e-4)),
    ("hept", dict(kernel="softmax", tied=True)),
    ("nystrom", dict(conv=3)),
    ("pat", dict(shuffle=False)),
    ("performer", dict(orthogonal=False)),
    ("reformer", dict(rounds=3, across_buckets=True)),
    ("sampled", dict(window=5)),
    ("sampled", dict(cycles=2, resample="fixed")),
    ("sampled", dict(resample="fixed")),
    ("samsa", dict(hard=False)),
    ("samsa", dict(supports=3)),
    ("samsa", dict(as_released=True, inference="mixed")),
    ("sbm", dict(sampler="fastrg", self_loops=True)),
    ("sbm", dict(window=3, exploration=0.0)),
    ("stratified", dict(shift=True, sample="stride")),
]
#: at most so many times does the CPU wait for the GPU: in a forward pass with a mask, and in its backward pass
READS = {
    "dense": (0, 0),
    "flatformer": (0, 0),
    "flatformer_k": (0, 0),
    "flt": (0, 0),
    "hept": (7, 3),
    "inducing": (4, 0),
    "knn": (8, 0),
    "linear": (4, 0),
    "linformer": (4, 0),
    "none": (2, 0),
    "nystrom": (4, 0),
    "pat": (0, 0),
    "performer": (4, 0),
    "performer_k": (0, 0),
    "point_transformer": (12, 0),
    "reformer": (5, 0),
    "sampled": (0, 0),
    "samsa": (0, 0),
    "sbm": (8, 0),
    "scatterbrain": (0, 0),
    "smyrf": (0, 0),
    "smyrf_k": (0, 0),
    "stratified": (41, 0),
    "window": (5, 0),
}


def cloud(points=21):
    g = seeded()
    x, coords = torch.randn(2, points, 16, generator=g), torch.rand(2, points, 3, generator=g)
    return x, coords, torch.arange(points) < torch.tensor([[points], [9]])


def attention(name, **options):
    torch.manual_seed(0)
    return make_attention(name, 16, 4, **OPTIONS.get(name, {}) | options)


def test_every_attention_has_a_ceiling():
    assert sorted(READS) == sparseattn.attentions()


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", sparseattn.attentions())
def test_attention_on_a_gpu_is_that_on_a_cpu(name, training, masked):
    same_on_both(attention(name).train(training), masked)


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name, options", VARIANTS, ids=str)
def test_variant_on_a_gpu_is_that_on_a_cpu(name, options, training):
    same_on_both(attention(name, **options).train(training), masked=True)


def same_on_both(module, masked):
    """Output, information and gradients of an attention."""
    x, coords, mask = cloud()
    mask = mask if masked else None

    def results(device):
        layer, x_there = copy.deepcopy(module).to(device), x.clone().to(device).requires_grad_()
        torch.manual_seed(1)
        out, info = layer(x_there, coords.to(device), moved(mask, device), return_info=True)
        if out.requires_grad:
            out.square().sum().backward()
        gradients = [p.grad for p in (x_there, *layer.parameters()) if p.grad is not None]
        assert {t.device.type for t in (out, *gradients, *tensors(vars(info)))} == {device}
        return out, gradients

    expected = results("cpu")
    with pretend_gpu():
        ours = results("cuda")
    close(ours, expected)


@pytest.mark.parametrize("name", sparseattn.attentions())
def test_host_reads_of_an_attention(name):
    forward, backward = READS[name]
    with pretend_gpu() as gpu:
        module, (x, coords, mask) = attention(name).to("cuda"), moved(cloud(), "cuda")
        before = len(gpu.reads)
        out = module(x.requires_grad_(), coords, mask)
        found = gpu.reads[before:]
        assert len(found) <= forward, found
        before = len(gpu.reads)
        if out.requires_grad:
            out.sum().backward()
        assert len(gpu.reads) - before <= backward, gpu.reads[before:]


# ---- networks, through `fit`


def images(channels=3, points=40):
    g = seeded()
    return {
        "points": torch.rand(2, points, channels, generator=g),
        "mask": torch.arange(points) < torch.tensor([[points], [30]]),
    }


def tokens(pairs=False):
    shape = (2, 2, 20) if pairs else (2, 20)
    return {"tokens": torch.randint(9, shape, generator=seeded()), "mask": (torch.arange(20) < 15).expand(shape)}


def plain(model, batch, generator):
    """Mean square of what comes out; the generator goes to networks that take one."""
    given = {"generator": generator} if "generator" in inspect.signature(model.forward).parameters else {}
    return sum(x.square().mean() for x in tensors(model(**batch, **given)) if x.is_floating_point())


def hept():
    cloud, cut = collisions.example_clouds()[0], slice(300)
    batch = tracking_batch(cloud.x[cut], cloud.coords[cut], cloud.particle[cut], cloud.reconstructable[cut])
    return HEPTModel(15, 6, dim=8, depth=1, heads=2, block_size=20), batch, tracking_loss


def language():
    model = sbm.MaskedLanguageModel(9, dim=16, max_length=20, clusters=4)
    where = torch.zeros(2, 20, dtype=torch.bool).index_fill(1, torch.tensor([1, 4]), True)
    return model, tokens() | {"where": where}, plain


CUT = dict(dim=16, depth=1, heads=4, groups=8, group_size=8, token_hidden=(8, 8, 8))


def reconstruction():
    loss = lambda model, batch, generator: model(batch["points"], generator=generator).loss()  # noqa: E731
    return autoencoder.MaskedAutoencoder(**CUT, attention="sampled"), {"points": images()["points"]}, loss


def pretrained():
    encoder = autoencoder.MaskedAutoencoder(**CUT).encoder
    patches = autoencoder.cut_into_groups(torch.rand(2, 40, 3), 8, 8)
    return autoencoder.EncoderClassifier(encoder, 5), {"patches": patches}


def graph():
    sizes = dict(node_features=4, edge_features=3, dim=16, depth=1, heads=2, samples=4)
    g = seeded()
    batch = {
        "nodes": torch.randn(2, 6, 4, generator=g),
        "edge_features": torch.randn(2, 5, 3, generator=g),
        "edges": torch.randint(6, (2, 5, 2), generator=g),
        "node_mask": torch.ones(2, 6, dtype=torch.bool),
        "edge_mask": torch.ones(2, 5, dtype=torch.bool),
    }
    return samsa.models.GraphNetwork(2, **sizes), batch


SMALL_PAT = dict(dim=16, groups=4, depth=2, head=(8,), neighbours=4, hidden=(16,), last=(16,))
OTHER_PAT = dict(attention="heads", norm="point", embedding="mlp")
THINNED = SMALL_PAT | dict(sizes=(16, 8))
TWO_LEVELS = ((16, 0.4, 4, (8, 8)), (8, 0.8, 4, (16, 16)))
SMALL_LEVELS = dict(dims=(8, 16), strides=(2, 2), head_dim=8)
SMALL_SET = dict(dim=8, heads=2)

NETWORKS = {
    "HEPT, tracking": hept,
    "SBM, classifier": lambda: (sbm.SequenceClassifier(9, 3, dim=16, max_length=20, clusters=4), tokens()),
    "SBM, pairs": lambda: (sbm.SequenceClassifier(9, 2, dim=16, pairs=True, max_length=20, clusters=4), tokens(True)),
    "SBM, tokens": lambda: (sbm.TokenClassifier(9, dim=16, max_length=20, clusters=4), tokens()),
    "SBM, fastRG": lambda: (sbm.TokenClassifier(9, dim=16, max_length=20, clusters=4, sampler="fastrg"), tokens()),
    "SBM, language": language,
    "Sampled, shapes": lambda: (sampled.ShapeClassifier(5, dim=16, stem=8, heads=2, head_dim=8, hidden=16), images()),
    "Sampled, levels": lambda: (
        sampled.HierarchicalClassifier(5, levels=2, blocks=(1, 1), neighbours=(4, 4), **SMALL_LEVELS),
        images(),
    ),
    "Sampled, autoencoder": reconstruction,
    "Sampled, fine-tuning": pretrained,
    "PAT, all points": lambda: (pat.models.PATSegmenter(4, **SMALL_PAT), images()),
    "PAT, heads": lambda: (pat.models.PATSegmenter(4, **SMALL_PAT, **OTHER_PAT), images()),
    "PAT, farthest": lambda: (pat.models.PATClassifier(4, sampling=("fps", "fps"), **THINNED), images()),
    "PAT, drawn": lambda: (pat.models.PATClassifier(4, sampling=("gss", "gss"), **THINNED), images()),
    "SAMSA, sequences": lambda: (
        samsa.models.SequenceNetwork(9, 3, dim=16, depth=2, heads=2, drop_path=0.1, samples=4),
        tokens(),
    ),
    "SAMSA, points": lambda: (
        samsa.models.PointNetwork(3, dim=16, depth=2, heads=2, samples=4),
        images(),
    ),
    "SAMSA, graphs": graph,
    "PointNet": lambda: (graphs.PointNet(5), images(points=64)),
    "PointNet++": lambda: (graphs.PointNet2(5, levels=TWO_LEVELS), images()),
    "DGCNN": lambda: (graphs.DGCNN(5, k=4), images()),
    "DGCNN, points": lambda: (graphs.DGCNN(5, task="scene", k=4), images()),
    "Set Transformer": lambda: (
        sets.SetTransformer(3, 2, points=4, **SMALL_SET),
        {"x": images()["points"], "mask": images()["mask"]},
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_network_is_trained_on_a_gpu(name, tmp_path):
    """Two steps, a pause, two more from the checkpoint; then an answer in evaluation mode, as on a CPU."""
    torch.manual_seed(0)
    model, batch, loss = (*NETWORKS[name](), plain)[:3]
    settings = dict(
        steps=4,
        optimiser=Optimiser("adamw", lr=1e-3, clip=1.0),
        schedule=Schedule("cosine", warmup=2),
        checkpoint_dir=tmp_path,
        device="cuda",
        validate=lambda model: {"size": sum(float(p.abs().sum()) for p in model.parameters())},
    )
    stops = iter([False, True, False, False])
    with pretend_gpu():
        batches = lambda epoch: [batch, batch, batch]  # noqa: E731
        with pytest.raises(Paused):
            fit(model, batches, loss, stop=stops.__next__, **settings)
        fitted = fit(model, batches, loss, stop=stops.__next__, **settings)
        assert fitted.stopped == "steps" and [row["step"] for row in fitted.history] == [3, 4]
        assert all(x.is_cuda for x in (*model.parameters(), *model.buffers()))
        with torch.no_grad():
            torch.manual_seed(2)
            ours = loss(model, to_device(batch, "cuda"), seeded("cuda", 1)).cpu()
        model.cpu()
    with torch.no_grad():
        torch.manual_seed(2)
        torch.testing.assert_close(ours, loss(model, batch, seeded(seed=1)), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16"])
def test_a_step_reads_nothing(precision):
    """A network without checks: `fit` itself waits for the GPU at the end of the epoch only."""
    model, marks = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)), []
    with pretend_gpu() as gpu:

        def loss(model, batch, generator):
            marks.append(len(gpu.reads))
            assert batch.is_cuda and generator.device.type == "cuda"
            return model(batch).float().square().mean()

        settings = dict(optimiser=Optimiser(clip=1.0), schedule=Schedule("cosine", warmup=2), device="cuda")
        fit(model, lambda epoch: [torch.ones(4, 3)] * 30, loss, steps=30, precision=precision, **settings)
        after = gpu.reads[marks[-1] :]
    assert marks == [0] * 30 and len(after) <= 2, after


def test_a_look_now_and_then():
    with pretend_gpu() as gpu:
        loss = lambda model, batch, generator: model(batch).sum()  # noqa: E731
        fit(nn.Linear(3, 1), lambda epoch: [torch.ones(4, 3)] * 30, loss, steps=30, look_every=10, device="cuda")
        assert len(gpu.reads) <= 4
        bad = lambda model, batch, generator: model(batch).sum() / 0  # noqa: E731
        with pytest.raises(FloatingPointError, match="between step 0 and step 9"):
            fit(nn.Linear(3, 1), lambda epoch: [torch.ones(4, 3)] * 30, bad, steps=30, look_every=10, device="cuda")


# ---- points, samplers, scores


def sphere(points=50):
    return torch.randn(2, points, 3, generator=seeded()), torch.arange(points) < torch.tensor([[points], [30]])


def on_points(function):
    """A case of points and a mask."""
    return lambda device, generator: function(*moved(sphere(), device))


def on(device):
    "The form that a GPU takes, which on a CPU is not the fast one."
    return "composed" if device == "cpu" else "fast"


def rates(device):
    g = seeded()
    return [torch.rand(3, size, 4, generator=g).to(device) / 4 for size in (12, 4, 12)]


def heads(device):
    g = seeded()
    return [torch.randn(2, 2, 12, 4, generator=g).to(device) for _ in range(3)]


FUNCTIONS = {
    "farthest": on_points(lambda x, mask: P.farthest_point_sampling(x, 9, mask=mask)),
    "farthest, start": on_points(lambda x, mask: P.farthest_point_sampling(x, 9, start="farthest-from-centroid")),
    "nearest": on_points(lambda x, mask: P.knn(x, 5, mask=mask)),
    "nearest, queries": on_points(lambda x, mask: P.knn(x, 5, queries=x[:, :7] + 0.1)),
    "gather": on_points(lambda x, mask: P.gather_points(x, P.knn(x, 5))),
    "group": on_points(lambda x, mask: P.group(x, P.farthest_point_sampling(x, 9, mask=mask), 4, mask=mask)),
    "interpolate": on_points(lambda x, mask: P.interpolate(x[:, :9], x[:, :9], x)),
    "ball": on_points(lambda x, mask: graphs.ball_query(x, 0.5, 4, queries=x[:, :5], mask=mask)),
    "windows": on_points(lambda x, mask: sets.window_cells(x, 0.5, mask=mask)),
    "thinned": on_points(lambda x, mask: sets.thinned(x, 4, mask=mask)),
    "dilated": lambda device, g: pat.layers.dilated_neighbours(sphere()[0].to(device), 4, draw=True, generator=g),
    "groups": on_points(lambda x, mask: tuple(autoencoder.cut_into_groups(x, 8, 8))),
    "chamfer": on_points(lambda x, mask: autoencoder.chamfer_distance(x, x[:, :20] + 0.1)),
    "hidden": lambda device, g: autoencoder.draw_hidden(2, 10, 0.7, generator=g, device=device),
    "patterns": lambda device, g: [
        patterns.window_pattern(9, 3, device=device),
        patterns.pattern_to_edges(patterns.window_pattern(9, 3, device=device)[None, None].expand(2, 2, -1, -1)),
        patterns.edges_to_pattern(torch.tensor([[0, 0], [1, 2], [2, 1]]).to(device), (1, 3, 3)),
        patterns.reach(patterns.window_pattern(9, 3, device=device), 2),
    ],
    "average of cycles": lambda device, g: cycles.dense_limit_attention(
        *heads(device), torch.stack([cycles.sample_cycle(12, generator=g, device=device) for _ in range(3)])
    ),
    "shifts of a cycle": lambda device, g: cycles.shift_attention(
        *heads(device), cycles.sample_cycle(12, generator=g, device=device), 4
    ),
    "two keys": lambda device, g: attend.random_keys_attention(
        *heads(device), attend.sample_two_keys(12, 12, batch=(2, 2), generator=g, device=device)
    ),
    "edges": lambda device, g: edge_attention(
        *heads(device), patterns.pattern_to_edges(patterns.window_pattern(12, 3, device=device).expand(2, 2, -1, -1))
    ),
    "regimes": lambda device, g: regimes.bell_gap(rates(device)[0]),
    "cycle": lambda device, g: cycles.sample_cycle(20, batch=(3,), generator=g, device=device),
    "successor": lambda device, g: cycles.cycle_successor(cycles.sample_cycle(20, generator=g, device=device)),
    "windows of a cycle": lambda device, g: cycles.windows(cycles.sample_cycle(20, generator=g, device=device), 5),
    "gumbel": lambda device, g: relaxation.gumbel((3, 4), generator=g, device=device),
    "top k": lambda device, g: relaxation.gumbel_top_k(sphere()[0].to(device), 2, generator=g),
    "softmax": lambda device, g: relaxation.gumbel_softmax(sphere()[0].to(device), hard=True, generator=g),
    "with replacement": lambda device, g: samsa.sampling.sample_with_replacement(
        sphere()[0].to(device), sphere()[0][..., 0].to(device), 6, hard=True, generator=g
    ),
    "without replacement": lambda device, g: samsa.sampling.sample_without_replacement(
        sphere()[0].to(device), sphere()[0][..., 0].to(device), 6, hard=True, generator=g
    ),
    "subset": lambda device, g: pat.layers.gumbel_subset_sampling(
        sphere()[0].to(device), torch.rand(6, 3, generator=seeded()).to(device), generator=g
    ),
    "fastRG": lambda device, g: sbm_sampling.fastrg(*rates(device), generator=g, impl=on(device)),
    "Bernoulli": lambda device, g: sbm_sampling.bernoulli(*rates(device), generator=g, impl=on(device)),
    "buckets": lambda device, g: hashing.sort_order(sphere()[0].to(device).movedim(-1, 0)[:, :, None]),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_on_a_gpu_is_that_on_a_cpu(name):
    torch.manual_seed(0)
    expected = FUNCTIONS[name]("cpu", seeded())
    with pretend_gpu():
        torch.manual_seed(0)
        found = FUNCTIONS[name]("cuda", seeded("cuda"))
        assert tensors(found) and all(x.is_cuda for x in tensors(found))
    close(found, expected)


def test_clouds_are_stretched_where_the_generator_is():
    patches = autoencoder.cut_into_groups(torch.rand(2, 40, 3, generator=seeded()), 8, 8)
    expected = autoencoder.stretch_and_move(patches, generator=seeded())
    with pretend_gpu():
        found = autoencoder.stretch_and_move(patches.to("cuda"), generator=seeded("cuda"))
        assert found.points.is_cuda
    close(tuple(found), tuple(expected))


def test_scores_on_a_gpu():
    x, particle = torch.randn(60, 4, generator=seeded()), torch.arange(60) // 5
    labels = torch.randint(3, (60,), generator=seeded())

    def scores(device):
        found = metrics.retrieval_precision(x.to(device), particle.to(device))
        area = metrics.average_precision(x[:, 0].to(device), (labels > 0).to(device))
        confusion = segmentation.confusion_matrix(labels.to(device), labels.roll(1).to(device), 3)
        assert isinstance(area, float)
        return [*tensors(vars(found)), torch.tensor(area), confusion]

    expected = scores("cpu")
    with pretend_gpu():
        found = scores("cuda")
    close(found, expected)


# ---- batches


def peptide_batches(g):
    few = peptides.load_peptides("toy_func", split="val")
    return peptides.batches(few, 4, generator=g)


def gesture_batches(g):
    t = np.arange(0, 750_000, 500, dtype=np.int32)
    at = (np.arange(len(t)) % 128).astype(np.uint8)
    stream = gestures.Stream(at, at, t, np.arange(len(t)) % 2 == 1, 750_000, 0, "user001")
    return gestures.batches(gestures.cut_clips(gestures.Gestures("one", (stream,))), 1, points=32, generator=g)


def glue_batches(g):
    pytest.importorskip("tokenizers")
    examples = glue._toy(40)
    vocabulary = glue.train_vocabulary(examples.texts(), 150)
    batch = next(iter(glue.batches(glue.encode_examples(examples, vocabulary, 32), 8, generator=g)))
    return iter([batch | {"masked": glue.mask_words(batch, 150, generator=g)}])


def sequence_batches(g):
    part = sequences.Part(torch.ones(6, 9, dtype=torch.uint8), torch.full((6,), 9), torch.arange(6))
    return sequences.batches(part, 3, generator=g)


def shape_batches(g):
    batch = next(iter(shapes.batches(shapes.load_shapes("fixture", points=64), 3, generator=g)))
    return iter([shapes.augment(batch, generator=g)])


def scene_batches(g):
    rooms = scenes.load_rooms("fixture", rooms=1, areas=(1,), density=40, progress=False)
    return scenes.block_batches(scenes.whole_blocks(rooms, 100), 2, generator=g)


def collision_batches(g):
    cloud = collisions.example_clouds()[0]
    yield tracking_batch(cloud.x, cloud.coords, cloud.particle, cloud.reconstructable)


BATCHES = {
    "collisions": collision_batches,
    "gestures": gesture_batches,
    "glue": glue_batches,
    "mixtures": lambda g: iter([toys.mixtures(3, generator=g)]),
    "peptides": peptide_batches,
    "repeats": lambda g: iter([toys.repeated_tokens(3, 16, generator=g)]),
    "scenes": scene_batches,
    "sequences": sequence_batches,
    "shapes": shape_batches,
}


@pytest.mark.parametrize("name", BATCHES)
def test_batches_are_moved(name, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    batch = next(iter(BATCHES[name](seeded())))
    with pretend_gpu():
        there = to_device(batch, "cuda")
        assert tensors(there) and all(x.is_cuda for x in tensors(there))
        assert not any(x.is_cuda for x in tensors(batch))
    for a, b in zip(tensors(there), tensors(batch), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)
