"""`check_attention`: faults are caught by the properties that name them, and the table of the collection is right."""

import os
import threading

import pytest
import torch
from torch import nn

import sparseattn
from sparseattn import testing
from sparseattn.testing import PROPERTIES, attention_property, check_attention


class Good(nn.Module):
    """Attention over all pairs with one head; the faults below change one thing each."""

    def __init__(self, dim=16):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.prepare()

    def prepare(self):
        pass

    def forward(self, x, coords=None, mask=None, return_info=False):
        x = x if mask is None else x.masked_fill(~mask[..., None], 0)
        out = self.attend(*(part(x)[:, None] for part in (self.query, self.key, self.value)), mask)[:, 0]
        return self.finish(x, out if mask is None else out.masked_fill(~mask[..., None], 0))

    def attend(self, q, k, v, mask):
        logits = q @ k.mT / 4
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None, None], torch.finfo(logits.dtype).min)
        return logits.softmax(-1) @ v

    def finish(self, x, out):
        return out


class HearsPadding(Good):
    def forward(self, x, coords=None, mask=None, return_info=False):
        out = super().forward(x)
        return out if mask is None else out.masked_fill(~mask[..., None], 0)


class HearsPaddedCoordinates(Good):
    def forward(self, x, coords=None, mask=None, return_info=False):
        out = super().forward(x + coords.mean((1, 2), keepdim=True))
        return out if mask is None else out.masked_fill(~mask[..., None], 0)


class ReturnsPadding(Good):
    def forward(self, x, coords=None, mask=None, return_info=False):
        return super().forward(x, coords, mask) + 1


class CountsPadding(Good):
    def attend(self, q, k, v, mask):
        return super().attend(q, k, v, None)


class MultipliesPaddingByZero(Good):
    def forward(self, x, coords=None, mask=None, return_info=False):
        x = x if mask is None else x * mask[..., None]
        out = self.attend(*(part(x)[:, None] for part in (self.query, self.key, self.value)), mask)[:, 0]
        return out if mask is None else out.masked_fill(~mask[..., None], 0)


class NothingIsNaN(Good):
    def attend(self, q, k, v, mask):
        logits = q @ k.mT / 4
        return (logits if mask is None else logits.masked_fill(~mask[:, None, None], -torch.inf)).softmax(-1) @ v


class HearsTheCloudBefore(Good):
    def attend(self, q, k, v, mask):
        return super().attend(q, k, v, mask) + 0.1 * torch.cat([torch.zeros_like(v[:1]), v[:-1]]).mean(2, keepdim=True)


class TooSteep(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


class WrongGradient(Good):
    def forward(self, x, coords=None, mask=None, return_info=False):
        weight = TooSteep.apply(self.value.weight)
        x = x if mask is None else x.masked_fill(~mask[..., None], 0)
        out = self.attend(self.query(x)[:, None], self.key(x)[:, None], (x @ weight.mT)[:, None], mask)[:, 0]
        return out if mask is None else out.masked_fill(~mask[..., None], 0)


class MixesClouds(Good):
    def attend(self, q, k, v, mask):
        return super().attend(q, k, v, mask) + 0.1 * v.mean(0, keepdim=True)


class WholeBlocks(Good):
    def finish(self, x, out):
        return out if out.shape[1] == 1 else out[:, : out.shape[1] // 4 * 4] if out.shape[1] > 100 else out


class OnePointIsNaN(Good):
    def finish(self, x, out):
        return out if out.shape[1] > 1 else out / (out - out)


class GoesByPlace(Good):
    def finish(self, x, out):
        return out * torch.linspace(0.5, 1, out.shape[1], dtype=out.dtype)[:, None]


class UnusedParameter(Good):
    def prepare(self):
        self.late = nn.Parameter(torch.zeros(3))


class DetachedKeys(Good):
    def attend(self, q, k, v, mask):
        return super().attend(q, k.detach(), v, mask)


class DropsAPoint(Good):
    def attend(self, q, k, v, mask):
        loud = k.square().sum(-1)
        rest = loud < loud.amax(-1, keepdim=True) if k.shape[2] > 1 else torch.ones_like(loud, dtype=torch.bool)
        return super().attend(q, k, v, rest[:, 0] if mask is None else rest[:, 0] & mask)


class CountsItsCalls(Good):
    def prepare(self):
        self.calls = 0

    def attend(self, q, k, v, mask):
        self.calls += 1
        return super().attend(q, k, v * self.calls, mask)


class AsksTheHost(Good):
    def finish(self, x, out):
        return out if out.square().sum() > 0 else out + 1


class BreaksTheGraph(Good):
    def finish(self, x, out):
        torch._dynamo.graph_break()
        return out


class WrongAtOtherLengths(Good):
    def finish(self, x, out):
        return out * 2 if torch.compiler.is_compiling() and out.shape[1] == 23 else out


class WrongExport(Good):
    def finish(self, x, out):
        return out * 2 if torch.compiler.is_exporting() else out


@torch.library.custom_op("tests::columns", mutates_args=())
def _columns(x: torch.Tensor) -> torch.Tensor:
    return x.mT.clone(memory_format=torch.contiguous_format).mT


_columns.register_fake(torch.empty_like)  # which says that rows are contiguous
_columns.register_autograd(lambda _, grad: grad)


class WrongLayout(Good):
    def finish(self, x, out):
        return _columns(out) if torch.compiler.is_dynamo_compiling() else out


class WrongRecomputation(Good):
    def attend(self, q, k, v, mask):
        recomputed = not torch.compiler.is_compiling() and torch._C._current_graph_task_id() != -1
        return super().attend(2 * q if recomputed else q, k, v, mask)


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0] * grad


class NoFunctionalTransforms(Good):
    def finish(self, x, out):
        return _Square.apply(out)


class _SquareOnce(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        return 2 * ctx.saved_tensors[0].detach() * grad


class WrongSecondDerivative(Good):
    def finish(self, x, out):
        return _SquareOnce.apply(out)


class OverflowsInHalf(Good):
    def finish(self, x, out):
        return out * 1e5 if out.dtype == torch.float16 else out


class CoarseInBfloat(Good):
    def finish(self, x, out):
        return out.round() if out.dtype == torch.bfloat16 else out


class OtherInThreads(Good):
    def finish(self, x, out):
        compiling = torch.compiler.is_compiling()
        return out if compiling or threading.current_thread() is threading.main_thread() else out + 1


class DiesInAFork(Good):
    def prepare(self):
        self.home = os.getpid()

    def finish(self, x, out):
        if not torch.compiler.is_compiling() and os.getpid() != self.home:
            raise RuntimeError("initialised in another process")
        return out


class OtherOnEachProcess(Good):
    def finish(self, x, out):
        together = not torch.compiler.is_compiling() and torch.distributed.is_initialized()
        return out * torch.distributed.get_rank() if together else out


class NoDeepcopy(Good):
    def __deepcopy__(self, memo):
        raise TypeError("not twice")


class SharedCopy(Good):
    def __deepcopy__(self, memo):
        return self


class NoPickle(Good):
    def __reduce__(self):
        raise TypeError("not on disk")

    def __deepcopy__(self, memo):
        other = NoPickle().to(self.query.weight.dtype)
        other.load_state_dict(self.state_dict())
        return other


class KeepsDrawsToItself(Good):
    def prepare(self):
        self.directions = torch.rand(()).item()

    def finish(self, x, out):
        return out * self.directions


FAULTS = {
    HearsPadding: {"mask"},
    HearsPaddedCoordinates: {"mask"},
    ReturnsPadding: {"mask"},
    CountsPadding: {"mask"},
    MultipliesPaddingByZero: {"mask"},
    NothingIsNaN: {"mask"},
    HearsTheCloudBefore: {"batch", "mask"},  # and alone a cloud hears none
    WrongGradient: {"gradients"},
    MixesClouds: {"batch", "mask"},
    WholeBlocks: {"lengths"},
    OnePointIsNaN: {"lengths"},
    GoesByPlace: {"equivariance", "mask"},  # places are counted by the length, with padding
    UnusedParameter: {"gradients", "DDP"},
    DetachedKeys: {"gradients", "double backward", "DDP"},  # what is differentiated is not the derivative either
    DropsAPoint: {"heard"},
    CountsItsCalls: {"repeats", "checkpoint", "threads", "DDP"},  # calls differ by how many there were before
    AsksTheHost: {"compile", "export"},
    BreaksTheGraph: {"compile"},
    WrongAtOtherLengths: {"compile"},
    WrongExport: {"export"},
    WrongLayout: {"opcheck"},
    WrongRecomputation: {"checkpoint"},
    NoFunctionalTransforms: {"func.grad"},
    WrongSecondDerivative: {"double backward"},
    OverflowsInHalf: {"autocast fp16"},
    CoarseInBfloat: {"autocast bf16"},
    OtherInThreads: {"threads"},
    DiesInAFork: {"fork"},
    OtherOnEachProcess: {"DDP"},
    NoDeepcopy: {"deepcopy"},
    SharedCopy: {"deepcopy"},
    NoPickle: {"pickle"},
    KeepsDrawsToItself: {"state_dict", "DDP"},
}


def failing(attention, **options):
    return {name: why for name, why in check_attention(attention, **options).items() if why != "works"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_caught_by_its_property(fault):
    found = failing(fault, backend="eager")
    assert set(found) == FAULTS[fault], found


def test_every_property_catches_a_fault():
    assert set().union(*FAULTS.values()) == set(PROPERTIES)


def test_nothing_is_found_where_nothing_is_wrong():
    assert failing(Good) == failing(Good()) == {}


# ---- the function


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_is_left_as_it_was(dtype):
    module = Good().to(dtype)
    module.query.weight.grad = torch.ones_like(module.query.weight)
    before, state = {name: x.clone() for name, x in module.state_dict().items()}, torch.random.get_rng_state()
    assert not failing(module, dtype=dtype, properties=[name for name in PROPERTIES if name != "compile"])
    assert all(torch.equal(x, before[name]) for name, x in module.state_dict().items())
    assert module.query.weight.dtype == dtype and module.query.weight.grad.eq(1).all()
    assert torch.equal(torch.random.get_rng_state(), state)


def test_it_prints_nothing(capfd):
    assert check_attention("hept", properties=("mask", "export"))["mask"] == "works"
    assert capfd.readouterr() == ("", "")


def test_what_is_not_promised_is_not_checked():
    found = check_attention(GoesByPlace, properties=("equivariance",), not_promised={"equivariance": "by place"})
    assert found == {"equivariance": "not promised: by place"}


def test_a_property_of_ones_own(monkeypatch):
    monkeypatch.setattr(testing, "PROPERTIES", {})

    @attention_property("trains")
    def trains(case):
        assert not case.module().training, "it trains"

    assert check_attention("dense") == {"trains": "it trains"}


@pytest.mark.parametrize(
    "given, message",
    [
        (dict(attention="nothing"), "attention is 'nothing'"),
        (dict(attention="dense", properties=("speed",)), "properties must be one of 'mask'"),
        (dict(attention="dense", not_promised={"speed": "slow"}), "properties must be one of 'mask'"),
        (dict(attention="dense", heads=3), "heads must divide dim"),
    ],
)
def test_refuses(given, message):
    with pytest.raises(ValueError, match=message):
        check_attention(**given)


def test_channels_coordinates_and_options_are_passed_on():
    fast = ("mask", "lengths", "gradients")
    assert not failing(lambda: Good(24), dim=24, properties=fast)
    assert not failing("hept", dim=24, heads=2, coord_dims=2, options=dict(coord_dims=2), properties=fast)


def test_draws_are_those_of_the_seed():
    case = testing.Case(lambda: sparseattn.core.transformer.make_attention("sampled", 16, 4), seed=3)
    first, again = (testing.results(case, case.module(), *case.cloud()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


# ---- the collection

# the table itself is the page, whose last cell asserts every entry


@pytest.mark.parametrize("name", testing._NOT_PROMISED)
def test_what_is_not_promised_does_not_hold(name):
    """With the check made all the same."""
    not_promised = testing._NOT_PROMISED[name]
    found = check_attention(name, properties=list(not_promised), not_promised={})
    assert "works" not in found.values(), found


@pytest.mark.parametrize("name", testing._ESTIMATES)
def test_second_derivatives_of_estimates_are_no_differences(name):
    found = check_attention(name, properties=("double backward",), estimates=False)
    assert "gradient of a gradient: off by" in found["double backward"]


OPTIONS = [("dense", dict(kernel="gaussian", coord_dims=3)), ("hept", dict(combine="union")),
           ("hept", dict(impl="reference")), ("sampled", dict(cycle_for="cloud")),
           ("sampled", dict(cycle_for="head")), ("sampled", dict(cycles=3)), ("sampled", dict(window=5)),
           ("samsa", dict(hard=False)), ("samsa", dict(inference="noise")), ("sbm", dict(gradient="two-sided")),
           ("sbm", dict(sampler="fastrg")), ("sbm", dict(rates="rows", window=3))]


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_promises_hold_with_other_options_too(name, options):
    properties = ("mask", "batch", "gradients", "double backward", "func.grad", "autocast bf16", "autocast fp16",
                  "compile")
    found = check_attention(name, options=options, properties=properties)
    assert not [why for why in found.values() if why != "works" and not why.startswith("not promised")], found
