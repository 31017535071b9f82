"""Odd inputs to the public functions: each ends in a right answer or in a clear error of ours.

A table holds good calls. Every argument is replaced by odd values of its kind: one at a time, in some pairs, all
tensors together. What a value must come to:

- refused: it means nothing (a count of 0.5, a number for a tensor, NaN among real points);
- same: the answer of the good call (the same numbers laid out in another way; anything in a masked point);
- either: refused, or a right answer: that of the same numbers in plain memory, and close to float64, by the reference
  where there is one; "finite" asks of float64 only that it is finite no more often, "any" (beyond float32) nothing.

An error is clear if it is a ValueError or TypeError of a `raise` statement in this package and names an argument.
In every answer dtype in = dtype out, and masked points are 0.
"""

import copy
import dataclasses
import linecache
import math
import random
import re
import traceback
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sparseattn
from sparseattn.baselines import graphs as nets
from sparseattn.baselines import clouds, sets, transformers
from sparseattn.core import attention as core
from sparseattn.core import patterns, points, relaxation
from sparseattn.core.transformer import head_channels, make_attention
from sparseattn.data import toys
from sparseattn.hept import attention as hept
from sparseattn.hept import hashing, models
from sparseattn.lab import metrics, segmentation
from sparseattn.pat import layers as pat
from sparseattn.sampled import attention as sampled
from sparseattn.sampled import cycles
from sparseattn.samsa import attention as samsa
from sparseattn.samsa import sampling
from sparseattn.sbm import attention as sbm
from sparseattn.sbm import regimes
from sparseattn.sbm import sampling as graphs

HOME = str(Path(sparseattn.__file__).parent)
B, H, N, D = 3, 2, 9, 4


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


MASK, DRAW = torch.arange(N) < torch.tensor([[N], [N - 3], [N - 1]]), dict(generator=torch.Generator())
Q, K, V = (numbers(B, H, N, D, seed=s) for s in range(3))
X, COORDS, ORDER, SCORES = numbers(B, N, 8), numbers(B, N, 3).sigmoid(), numbers(N).argsort(), numbers(B, H, N)
Y, Z, RATES = *(numbers(B, H, N, 3, seed=s).sigmoid() / 3 for s in (3, 4)), numbers(H, 3, 3).sigmoid() / 3
EDGES = torch.stack([torch.arange(B * H * N) // N, torch.arange(B * H * N) % N, torch.arange(B * H * N) * 2 % N])
PATTERN, TABLES = numbers(B, H, N, N) > 0, numbers(2, B, H, N).argsort(-1)
PARTICLES = torch.tensor([1, 1, 2, 2, 2, 0, 3, 3, 1])
NEAR, CUTS = TABLES[0, :, 0, :, None] % 6, TABLES.movedim(0, 2)
CLOUD, QKV, HIDE = dict(x=X, coords=COORDS, mask=MASK), dict(q=Q, k=K, v=V), dict(mask=MASK)
NEEDS = {"hept": dict(coord_dims=3, tables=2, block_size=4, regions=2.0, hash_by="coords"),
         "linformer": dict(max_length=N, rank=4), "sbm": dict(clusters=3, window=64, exploration=0.1, rates="rows"),
         "sampled": dict(window=4, seed=1, resample="fixed", cycle_for="head"),
         "samsa": dict(samples=3, tau=0.5, inference="top-k"), "performer": dict(features=8), "knn": dict(k=3),
         "reformer": dict(chunk=4, rounds=2), "nystrom": dict(landmarks=3, steps=6, conv=3), "window": dict(width=2),
         "inducing": dict(points=3), "stratified": dict(window=0.4, every=3),
         "dense": dict(kernel="gaussian", coord_dims=3), "smyrf": dict(size=4, tables=2),
         "smyrf_k": dict(coord_dims=3, size=4), "scatterbrain": dict(size=4, features=8),
         "flt": dict(coord_dims=3, offsets=3, features=8), "performer_k": dict(coord_dims=3, features=8),
         "flatformer": dict(slices=3, size=4), "flatformer_k": dict(coord_dims=3, slices=3, size=4),
         "point_transformer": dict(coord_dims=3, k=3)}


def made(make, *call, **options):
    "The answer of a module with these options, in evaluation."
    torch.manual_seed(0)
    return make(**options).eval()(*call)


def layers():
    for name in sparseattn.attentions():
        options = dict(dim=8, heads=H, **NEEDS.get(name, {}))
        torch.manual_seed(0)
        yield f"{name} layer", make_attention(name, **options).eval(), CLOUD
        yield f"{name} options", partial(made, partial(make_attention, name), X, COORDS, MASK), options
    for name in ("dense", "hept", "none"):
        yield f"{name} encoder", sparseattn.Encoder(8, 1, H, attention=name, **NEEDS.get(name, {})).eval(), CLOUD
    options = dict(dim=8, depth=1, heads=H, hidden=16, dropout=0.0)
    yield "encoder options", partial(made, partial(sparseattn.Encoder, attention="dense"), X, COORDS, MASK), options
    shuffle = pat.GroupShuffleAttention
    yield "shuffle layer", shuffle(8, 2).eval(), CLOUD
    yield "shuffle options", partial(made, shuffle, X), dict(dim=8, groups=2, norm="cloud", norm_groups=2)


def functions():
    most = dict(QKV, scale=0.5, mask=MASK, impl="fast")
    samples = dict(QKV, scores=SCORES, samples=3, tau=0.5, noise=SCORES + 1, mask=MASK, scale=0.5)
    block, model = dict(QKV, order_q=TABLES, order_k=TABLES.flip(0), block_size=4), dict(QKV, y=Y, s=RATES, z=Z, **HIDE)
    tokens, graph = dict(x=X, scores=numbers(B, N), k=3, tau=0.5), dict(DRAW, y=Y[0], b=RATES, z=Z[0], impl="fast")
    where = dict(coords=COORDS, window=0.4, large=0.8, every=3, sample="farthest", mask=MASK)
    subset, points_of = dict(x=X, weight=numbers(4, 8), tau=0.5, mask=MASK), dict(points=COORDS, mask=MASK)
    few, project = dict(queries=COORDS[:, :4], k=3), dict(project_k=numbers(H, 3, N), project_v=numbers(H, 3, N))
    return [
        (core.dense_attention, dict(QKV, mask=MASK, pattern=PATTERN, kernel="gaussian", scale=0.5)),
        (core.edge_attention, dict(QKV, edges=EDGES, scale=0.5, rule="score", impl="fast")),
        (core.pattern_attention, dict(QKV, pattern=PATTERN, presence=PATTERN.float(), rule="score", scale=0.5)),
        (core.edge_products, dict(a=Q, b=K, edges=EDGES)),
        (core.straight_through_presence, dict(a=Q, b=K, edges=EDGES)),
        (hept.hept_attention, dict(block, combine="union", mask=MASK, floor=0.1, impl="fast")),
        (hept.hept_attention, block),
        (sbm.sbm_attention, dict(model, sampler="fastrg", exploration=0.1, gradient="score", edges=EDGES, impl="fast")),
        (sbm.sbm_attention, dict(model, window=1, **DRAW)), (graphs.fastrg, graph), (graphs.bernoulli, graph),
        (sampled.cycle_attention, dict(most, order=ORDER)), (sampled.cycle_attention, dict(QKV, order=ORDER)),
        (sampled.window_attention, dict(most, order=ORDER, window=4)),
        (sampled.random_keys_attention, dict(QKV, q=Q[:, :, :4], keys=TABLES.movedim(0, -1)[:, :, :4] % 6, mask=MASK)),
        (sampled.random_keys_attention, dict(QKV, scale=0.5, **DRAW)),
        (sampled.sample_two_keys, dict(queries=3, points=N, batch=(B,), mask=MASK, **DRAW)),
        (cycles.shift_attention, dict(most, order=ORDER, shifts=3)),
        (cycles.dense_limit_attention, dict(most, orders=numbers(4, N).argsort(-1))),
        (cycles.sample_cycle, dict(n=N, batch=(2,), **DRAW)), (cycles.cycle_pattern, dict(order=ORDER)),
        (cycles.cycle_successor, dict(order=TABLES[0, :, 0], mask=MASK)), (cycles.windows, dict(order=ORDER, size=4)),
        (cycles.windows_pattern, dict(order=ORDER, size=4, inside="dense")), (cycles.path_pattern, dict(size=4)),
        (cycles.average_attention_limit, dict(logits=numbers(B, N, N))), (cycles.expected_cycles, dict(n=N)),
        (pat.group_attention, dict(x=X, weight=numbers(2, 4, 4), scale=0.5, mask=MASK, impl="fast")),
        (pat.channel_shuffle, dict(x=X, groups=2)), (pat.position_set, dict(x=COORDS, index=NEAR)),
        (pat.group_norm, dict(x=X, groups=2, weight=X[0, 0], bias=X[0, 1], over="cloud", mask=MASK, eps=0.1)),
        (pat.dilated_neighbours, dict(points_of, neighbours=3, dilation=1.0, base=8)),
        (pat.gumbel_subset_sampling, dict(subset, noise=numbers(B, 4, N))),
        (pat.gumbel_subset_sampling, dict(subset, hard=True, **DRAW)),
        (pat.annealed_tau, dict(progress=0.5, start=1.0, end=0.1)),
        (samsa.samsa_attention, dict(samples, impl="fast")), (samsa.samsa_attention, dict(samples, hard=False)),
        (samsa.samsa_flops, dict(n=N, samples=3, d=4)), (sampling.swap_flops, dict(k=3, channels=4, batch=2)),
        (sampling.sample_with_replacement, dict(tokens, noise=numbers(B, 3, N))),
        (sampling.sample_with_replacement, dict(tokens, **DRAW)),
        (sampling.sample_without_replacement, dict(tokens, noise=numbers(B, N), impl="fast")),
        (sampling.sample_without_replacement, dict(tokens, hard=True, **DRAW)),
        (hashing.raw_codes, dict(x=Q, directions=numbers(4, H, D))),
        (hashing.bucket_labels, dict(values=SCORES, buckets=torch.tensor(2.5), mask=MASK[:, None])),
        (hashing.sort_order, dict(base=numbers(2, B, H, N), label=TABLES, mask=MASK)),
        (hashing.draw_buckets, dict(tables=2, heads=H, total=9.0, functions=2, **DRAW)),
        (transformers.linear_attention, dict(QKV, mask=MASK)),
        (transformers.linformer_attention, dict(QKV, **project, **HIDE)),
        (transformers.performer_attention, dict(QKV, features=numbers(H, 6, D), mask=MASK)),
        (transformers.nystrom_attention, dict(QKV, landmarks=3, steps=6, conv=numbers(H, 3), mask=MASK)),
        (transformers.reformer_attention, dict(qk=Q, v=V, rotations=numbers(H, 2, D, 2), chunk=4, buckets=4, **HIDE)),
        (transformers.sliding_window_attention, dict(QKV, width=2, mask=MASK)),
        (transformers.orthogonal_features, dict(count=6, dim=D, heads=H, **DRAW)),
        (clouds.clustered_attention, dict(QKV, order_q=CUTS, order_k=CUTS.flip(3), size=4, scale=0.5, mask=MASK)),
        (clouds.scatterbrain_attention, dict(QKV, order_q=CUTS, order_k=CUTS.flip(3), size=4, features=numbers(H, 6, D),
                                             mask=MASK)),
        (clouds.gaussian_performer, dict(QKV, features=numbers(H, 6, D), mask=MASK)),
        (clouds.window_order, dict(coords=COORDS, slices=3, second=True, shift=True, cells=30, mask=MASK)),
        (sets.cross_attention, dict(QKV, **HIDE)),
        (sets.neighbour_attention, dict(QKV, index=NEAR, mask=MASK, impl="fast")), (sets.stratified_pattern, where),
        (sets.stratified_edges, where), (sets.window_cells, dict(coords=COORDS, size=0.4, mask=MASK)),
        (sets.thinned, dict(coords=COORDS, every=3, sample="farthest", mask=MASK)),
        (sets.mixture_parameters, dict(outputs=numbers(B, 4, 5), dims=2, floor=0.1)),
        (nets.neighbours, dict(points_of, **few)), (nets.ball_query, dict(points_of, radius=0.5, **few)),
        (nets.edge_features, dict(x=X, index=NEAR)), (points.knn, dict(points_of, impl="fast", **few)),
        (points.farthest_point_sampling, dict(points_of, m=3, start=1, impl="fast")),
        (points.gather_points, dict(x=X, index=TABLES[0, :, 0])), (points.interpolate, dict(x=X, **points_of, **few)),
        (points.group, dict(points_of, centres=NEAR[:, :2, 0], k=3)),
        (relaxation.gumbel, dict(shape=(2, 3), dtype=torch.float32, **DRAW)),
        (relaxation.gumbel_top_k, dict(scores=SCORES, k=3, noise=numbers(N))),
        (relaxation.gumbel_top_k, dict(scores=SCORES, k=3, **DRAW)),
        (relaxation.gumbel_softmax, dict(logits=SCORES, tau=0.5, noise=numbers(N), dim=1)),
        (relaxation.gumbel_softmax, dict(logits=SCORES, hard=True, **DRAW)),
        (relaxation.plackett_luce, dict(scores=numbers(B, N), order=TABLES[0, :, 0, :4])),
        (relaxation.straight_through, dict(hard=SCORES, soft=SCORES + 1)),
        (relaxation.mean_gumbel_softmax, dict(logits=numbers(2), tau=0.5)), (patterns.density, dict(pattern=PATTERN)),
        (patterns.window_pattern, dict(n=N, width=2)), (patterns.block_pattern, dict(labels=TABLES[0] % 3)),
        (patterns.global_pattern, dict(n=N, relays=torch.tensor([0, 3]))),
        (patterns.reach, dict(pattern=PATTERN, depth=2)),
        (patterns.pattern_to_edges, dict(pattern=PATTERN)), (patterns.depth_to_connect, dict(pattern=PATTERN)),
        (patterns.edges_to_pattern, dict(edges=EDGES, shape=(B * H, N, N))),
        (head_channels, dict(dim=8, heads=2, head_dim=3)), (regimes.bell_gap, dict(p=numbers(B, N, N).sigmoid())),
        (regimes.block_bound, dict(off=numbers(N).sigmoid(), blocks=2)), (toys.is_repeated, dict(tokens=TABLES[0, 0])),
        (metrics.retrieval_precision,
         dict(embeddings=numbers(N, 3), particle=PARTICLES, valid=MASK[1], k_max=3, chunk=4)),
        (metrics.average_precision, dict(scores=numbers(N), labels=PARTICLES % 2, mask=MASK[1])),
        (segmentation.confusion_matrix, dict(predicted=PARTICLES, labels=PARTICLES.flip(0), classes=4, mask=MASK[1])),
        (segmentation.segmentation_scores, dict(confusion=torch.tensor([[8, 2], [1, 9]]))),
        (models.focal_loss, dict(logits=numbers(N), labels=(PARTICLES % 2).float(), alpha=0.25, gamma=2.0)),
    ]


CASES = [*layers(), *((f.__name__, f, good) for f, good in functions())]

# Left out: flags (Python takes anything for true or false); sparse, meta and quantised tensors; sizes that only memory
# refuses; losses, lab and most of data, which check in their own words; mixture_update, whose shares hold roundings of
# the dtype; building blocks that check nothing, as fused_attention, attention_logits, append_coordinates; and
LEFT_OUT = {"gumbel shape"}    # no ints under torch.compile; torch's message names what is odd
REFUSED, SAME, EITHER, FINITE, ANY = "refused", "same", "either", "finite", "any"
FLOATS = torch.float16, torch.bfloat16, torch.float64
ZERO = {"window", "width", "depth", "coord_dims", "start", "dim", "seed", "samsa_flops", "landmarks"}
NEGATIVE = {"dim", "seed"}                                               # numbers that may be below 0
EXCLUDES = {"scores", "logits", "noise"}                                 # where -inf has a meaning
NUMBERS = {"labels", "tokens", "label", "confusion", "particle"}  # integers that number no points
# values of building blocks, and of rows that nobody chooses, are not looked at; what only moves takes any dtype
PASSES = {"cross_attention", "pattern_attention", "channel_shuffle", "gather_points", "group_norm", "straight_through",
          "raw_codes", "bucket_labels", "sort_order", "window_cells", "edge_features", "position_set",
          "samsa_attention k", "samsa_attention v"}
MOVES = {"channel_shuffle x", "gather_points x", "straight_through hard", "bucket_labels buckets", "focal_loss labels",
         "average_precision scores", "average_precision labels"}
SCORES_OUT = {"retrieval_precision", "average_precision", "segmentation_scores"}    # float64 from anything
INSIDE = {"heads": "groups", "index": "edges"}                           # what an argument is called further in


def name_of(function):
    return getattr(function, "__name__", "")


def expected(function, name, what, verdict):
    "What a value must come to, by what the docstring of the function says of it."
    here = {name_of(function), name, f"{name_of(function)} {name}"}
    if what in ("nan", "inf", "-inf", "where masked") and PASSES & here:
        return ANY
    free = (what == "0" and ZERO & here or what in ("-1", "-1000") and name in NEGATIVE
            or what == "-inf" and name in EXCLUDES or what == "large" and name in NUMBERS
            or what == "negative" and name == "label"
            or what in ("integers", "boolean", "complex", "number", "floating") and MOVES & here)
    return EITHER if free else verdict


def odd_tensors(x):
    "(what is odd, value, what it must come to)."
    yield from (("number", 3.0, REFUSED), ("text", "x", REFUSED), ("class", Tensor, REFUSED),
                ("numpy", x.numpy(), EITHER),
                ("list", x.tolist(), EITHER), ("wrapped", x[None], EITHER), ("scalar", x.flatten()[0], EITHER),
                ("expanded", x.flatten()[0].expand(x.shape), EITHER), ("in the midst", torch.stack([x, x])[1], SAME))
    if x.dtype == torch.bool:
        one = x & (torch.arange(x.numel()).view(x.shape) == 1)
        yield from (("floating", x.float(), REFUSED), ("integers", x.long(), REFUSED), ("one True", one, EITHER),
                    ("all False", x & False, EITHER), ("all True", x | True, EITHER), ("turned round", ~x, EITHER))
    else:
        yield from (("complex", x.to(torch.complex64), REFUSED), ("boolean", x > 0, REFUSED), ("all 0", x * 0, EITHER))
    if x.is_floating_point():
        for value in (math.nan, math.inf, -math.inf):
            y = x.clone()
            y.view(-1)[0] = value
            yield str(value), y, REFUSED
        yield "integers", x.long(), REFUSED
        yield from ((str(kind), x.to(kind), EITHER) for kind in FLOATS)
        yield from ((f"times {by}", x * by, way) for by, way in ((1e9, FINITE), (1e-40, ANY), (1e30, ANY)))
    elif x.dtype == torch.int64:
        yield from (("floating", x.double(), REFUSED), ("negative", x - 1000, REFUSED), ("large", x + 1000, REFUSED))
        yield from (("less", x - 1, EITHER), ("more", x + 1, EITHER), ("int32", x.int(), EITHER),
                    ("uint8", x.byte(), EITHER))
    if x.dim():
        yield from (("strided", torch.stack([x, x], -1).flatten(-2)[..., ::2], SAME), ("unwrapped", x[0], EITHER))
    if x.dim() > 1:
        yield "transposed in memory", x.mT.contiguous().mT, SAME
    for dim, size in enumerate(x.shape):
        yield from ((f"cut to {n} of {size}, {dim}", x.narrow(dim, 0, n), EITHER) for n in {0, 1, size - 1})
        yield f"{size + 1} of {size}, {dim}", torch.cat([x, x.narrow(dim, 0, 1)], dim), EITHER


def odd_values(value):
    "Of any argument."
    if isinstance(value, Tensor):
        yield from odd_tensors(value)
        return
    either = []
    if isinstance(value, torch.Generator):
        wrong = 3, "x", random.Random(0), np.random.default_rng(0), torch.Generator
    elif isinstance(value, str):
        wrong = "nope", "", value.upper(), 3, True, [value], b"x"
    elif isinstance(value, torch.dtype):
        wrong = torch.int32, torch.bool, "float32", 3
    elif isinstance(value, tuple):
        wrong = "x", 3, (2.5, 2), ("x", 2), (-1, 2), (None, 2)
    elif isinstance(value, int):
        wrong = -1, 0, 0.5, 2.5, True, False, str(value), math.nan, math.inf, [value], 1j, -1000, np.float32(2.5)
        either = 1, 2, 5, 8, N, 100, np.int64(value), float(value), torch.tensor(value)
    else:
        wrong = "x", [value], math.nan, math.inf, -math.inf, 1j, "1", b"1"
        either = -1.0, 0.0, 1e-40, 1e30, 1, np.float64(value), np.float32(value), torch.tensor(value), True
    for values, verdict in ((wrong, REFUSED), (either, EITHER), ((None,), EITHER)):
        yield from ((repr(x), x, verdict) for x in values)


def masked_values(value, mask):
    "A floating tensor of points with odd values where masked."
    at = value.dim() - 2 if value.dim() > 2 else 1
    if value.is_floating_point() and value.shape[:1] == (B,) and value.shape[at] == N:
        hidden = ~mask.view(B, *[1] * (at - 1), N, *[1] * (value.dim() - at - 1))
        yield from (value.masked_fill(hidden, bad) for bad in (math.nan, math.inf, -math.inf, 1e30))


def cut(args, old, size):
    "Every dimension of some size cut, in all tensors alike; orders remain orders."
    def one(x):
        for dim in range(x.dim()):
            x = x.narrow(dim, 0, size) if x.shape[dim] == old else x
        return x.argsort(-1) if x.dtype == torch.int64 and x.shape[-1:] == (size,) else x
    return {name: one(x) for name, x in args.items() if isinstance(x, Tensor)}


def odd_calls(function, good):
    "(what is odd, arguments to replace, what that must come to)."
    singles = []
    for name, value in good.items():
        if f"{name_of(function)} {name}" in LEFT_OUT or isinstance(value, bool):
            continue
        singles += [(f"{name}: {what}", {name: odd}, expected(function, name, what, way))
                    for what, odd, way in odd_values(value)]
        if isinstance(value, Tensor) and "mask" in good:
            way = expected(function, name, "where masked", SAME)
            singles += [(f"{name}: odd where masked", {name: odd}, way) for odd in masked_values(value, good["mask"])]
    yield from singles
    floats = {n: x for n, x in good.items() if isinstance(x, Tensor) and x.is_floating_point()}
    for kind in FLOATS:
        yield f"all {kind}", {n: x.to(kind) for n, x in floats.items()}, EITHER
    for old, size in ((N, 0), (N, 1), (N, N - 1), (B, 0), (B, 1)):
        yield f"{size} of {old}", cut(good, old, size), EITHER
    draw = random.Random(0)
    for _ in range(10):
        (a, x, first), (b, y, second) = draw.sample(singles, 2)
        if x.keys() != y.keys():
            yield f"{a}, {b}", x | y, first if first == second else REFUSED if REFUSED in (first, second) else ANY


def flat(answer):
    if dataclasses.is_dataclass(answer):
        answer = vars(answer)
    if isinstance(answer, dict):
        answer = list(answer.values())
    if isinstance(answer, tuple | list):
        return [x for part in answer for x in flat(part)]
    return [answer if answer is None else torch.as_tensor(answer)]


def outcome(function, args):
    "The answer as a list of tensors, or the error."
    torch.manual_seed(0)
    for value in args.values():
        if isinstance(value, torch.Generator):
            value.manual_seed(0)
    try:
        return flat(function(**args))
    except Exception as error:  # whichever it is: that is what is tested
        return error


def plain(args):
    "The same numbers in memory of their own."
    def one(x):
        if isinstance(x, Tensor):
            return x.clone(memory_format=torch.contiguous_format)
        return torch.tensor(x) if isinstance(x, np.ndarray | list) else x
    return {name: one(x) for name, x in args.items()}


def exact(function, args):
    "The outcome in float64, by the reference where there is one; None for what is drawn."
    if isinstance(function, partial) or "generator" in args or None in (args.get("noise", 0), args.get("edges", 0)):
        return None
    wide = {n: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in args.items()}
    wide |= {"impl": "reference"} if "impl" in args else {}
    return outcome(copy.deepcopy(function).double() if isinstance(function, nn.Module) else function, wide)


def unclear(error, function, names):
    "What is wrong with an error, or nothing."
    frame, line = list(traceback.walk_tb(error.__traceback__))[-1]
    path = frame.f_code.co_filename
    ours = path.startswith(HOME) and linecache.getline(path, line).strip().startswith("raise ")
    if type(error) not in (ValueError, TypeError) or not ours:
        return f"raw {type(error).__name__}: {error}"
    names = {*names, *(INSIDE.get(n, n) for n in names), *(("x", "coords") if isinstance(function, partial) else ())}
    return "" if any(re.search(rf"\b{n}\b", str(error)) for n in names) else f"names no argument: {error}"


def undocumented(found, function, args):
    "What is wrong with dtype and masked points, or nothing."
    dtype = next((x.dtype for x in args.values() if isinstance(x, Tensor) and x.is_floating_point()), None)
    mask = args.get("mask")
    for x in found:
        if x is None or not x.is_floating_point() or name_of(function) in PASSES | SCORES_OUT:
            continue
        if dtype not in (None, x.dtype):
            return f"{x.dtype} from {dtype}"
        rows = x.movedim(2, 1) if x.dim() == 4 else x
        if isinstance(mask, Tensor) and rows.shape[:2] == mask.shape and rows[~mask].any():
            return "masked points are not 0"
    return ""


TOLERANCE = {torch.float16: 1e-2, torch.bfloat16: 5e-2, torch.float32: 1e-3}


def away(found, truth, args, finite):
    "What is wrong beside float64, or nothing; tolerance by the lowest precision that came in."
    tolerance = max([TOLERANCE.get(x.dtype, 1e-6) for x in args.values() if isinstance(x, Tensor)], default=1e-6)
    for x, y in zip(found, truth, strict=True):
        if x.shape != y.shape or not x.is_floating_point() and not x.equal(y):
            return f"{tuple(x.shape)} {x.dtype} beside {tuple(y.shape)} in float64, or other integers"
        x, y = (part[y.to(x.dtype).isfinite()].double() for part in (x, y))
        if not x.isfinite().all():
            return "not finite where float64 is"
        if not finite and y.numel() and (x - y).abs().max() > tolerance * max(1, y.abs().max()):
            return f"{(x - y).abs().max():.2g} away from float64"
    return ""


def wrong(function, good, usual, change, verdict):
    "What is wrong with the outcome of a call, or nothing."
    args = good | change
    found = outcome(function, args)
    if isinstance(found, Exception):
        return unclear(found, function, args) or (f"refused: {found}" if verdict == SAME else "")
    if verdict == REFUSED:
        return f"taken, answers {str(found)[:80]}"
    if fault := undocumented(found, function, args):
        return fault
    args = plain(args)
    same = usual if verdict == SAME else outcome(function, args)
    if isinstance(same, Exception):
        return f"taken, but in plain memory refused: {same}"
    for x, y in zip(found, same, strict=True):
        if x is not y and not (x.dtype == y.dtype and torch.allclose(x, y, rtol=1e-5, atol=1e-6, equal_nan=True)):
            return "another answer for the same numbers"
    truth = None if verdict == ANY else exact(function, args)
    if isinstance(truth, Exception):
        return f"taken, but in float64 refused: {truth}"
    return "" if truth is None or truth[0] is None else away(found, truth, args, verdict == FINITE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, function, good", CASES, ids=[f"{i}-{name}" for i, (name, *_) in enumerate(CASES)])
def test_odd_inputs_end_in_a_right_answer_or_a_clear_error(name, function, good):
    usual = outcome(function, good)
    assert not isinstance(usual, Exception), usual
    faults = {what: fault for what, change, verdict in odd_calls(function, good)
              if (fault := wrong(function, good, usual, change, verdict))}
    assert not faults


def test_there_are_five_thousand_of_them():
    assert sum(len(list(odd_calls(*case))) for _, *case in CASES) >= 5000
