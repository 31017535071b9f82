"""A pretended GPU: tensors that say cuda:0, are computed on the CPU, and refuse what CUDA refuses.

    with pretend_gpu() as gpu:
        x = torch.randn(3).to("cuda")
        x + torch.randn(3)  # RuntimeError: expected all tensors on one device
        float(x.sum())
    gpu.reads  # ["test_x.py:7 item"]: places where the CPU waits for a number of the GPU

A tensor is on the GPU if its memory was marked so. Two modes of torch keep the marks. One sees the calls of Python: it
answers `x.device`, moves, makes new tensors where they are asked for, and compares generators with places. The other
sees the operators below autograd, also those of a backward pass: what is computed from marked memory is marked,
and operands in two places are an error. What this cannot show: kernels that exist for one device only, the order
of asynchronous work, other threads, and time.
"""

from __future__ import annotations

import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
CPU_GENERATOR = torch.Generator
HERE = Path(__file__).parent
aten = torch.ops.aten

#: operators whose operands may lie in two places
COPIES = {aten.copy_.default, aten._to_copy.default}
#: operators that take indices from the CPU too, but not indices from the GPU into the CPU's memory
INDEXED = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default}
#: operators that do not even take a single number from the other place
STRICT = {
    *(aten.cat.default, aten.stack.default, aten.gather.default, aten.index_select.default, aten.scatter.src),
    *(aten.scatter_.src, aten.index_add.default, aten.index_add_.default, aten.index_copy_.default),
    *(aten.searchsorted.Tensor, aten.bucketize.Tensor, aten.embedding.default, aten.take_along_dim.default),
}
#: operators whose result, or its size, the CPU waits for
READS = {
    *(aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default),
    *(aten._unique2.default, aten.unique_dim.default, aten.unique_consecutive.default, aten.bincount.default),
    *(aten.repeat_interleave.Tensor, aten.is_nonzero.default),
}


def _efficient(q, k, v, bias, keep_lse, dropout=0.0, causal=False, *, scale=None):
    assert bias is None and keep_lse and q.shape[0] < 2**16 and q.shape[-1] % 8 == 0
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, scale=scale)
    lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=torch.inf)
    return out, lse, *(torch.zeros((), dtype=torch.int64) for _ in range(2))


def _efficient_backward(grad, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal=False, *, scale=None):
    assert bias is None and lse.shape[-1] % 32 == 0 and wanted == [True, True, True, False]
    blocks = grad, q, k, v, out, lse[..., : q.shape[-2]]
    found = aten._scaled_dot_product_flash_attention_for_cpu_backward(*blocks, dropout, causal, scale=scale)
    return *found, q.new_zeros(0)


#: operators that the CPU has by another name
ONLY_CUDA = {
    aten._scaled_dot_product_efficient_attention.default: _efficient,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}


class _OfGenerator(type(torch.Generator)):
    def __instancecheck__(cls, value):
        return isinstance(value, CPU_GENERATOR)


class Generator(CPU_GENERATOR, metaclass=_OfGenerator):
    """A generator of random numbers for either place."""

    def __new__(cls, device="cpu"):
        made = super().__new__(cls, "cpu")
        made.place = _place(device)
        return made

    def __init__(self, device="cpu"):
        pass

    @property
    def device(self):
        return self.place


def _place(device) -> torch.device:
    """GPU for whatever says cuda, else the device itself."""
    device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    return GPU if device.type == "cuda" else device


def _where() -> str:
    """Line of the package that is being executed, or of the test."""
    frame, test = sys._getframe(2), ""
    while frame:
        path = Path(frame.f_code.co_filename)
        if "sparseattn" in path.parts and "site-packages" not in path.parts and HERE not in path.parents:
            return f"{path.parent.name}/{path.name}:{frame.f_lineno}"
        if not test and HERE in path.parents and path != Path(__file__):
            test = f"{path.name}:{frame.f_lineno}"
        frame = frame.f_back
    return test or "?"


def _strided(tensor) -> list:
    """The tensor, or the parts of a sparse one."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]


class Marks:
    """Which memory is on the GPU. A weak reference keeps an address from being used again."""

    def __init__(self):
        self.known = {}

    def set(self, tensor, there: bool):
        for part in _strided(tensor):
            reference = StorageWeakRef(part.untyped_storage())
            self.known[reference.cdata] = reference, there

    def get(self, tensor) -> bool | None:
        """True on the GPU, False on the CPU, None unknown: made where nobody looked, so on the CPU."""
        found = self.known.get(_strided(tensor)[-1].untyped_storage()._cdata)
        return found and found[1]

    def purge(self):
        if len(self.known) > 20_000:
            self.known = {key: item for key, item in self.known.items() if not item[0].expired()}


class PretendGPU:
    """What the two modes share.

    Attributes:
        reads: places where the CPU waited for something of the GPU, in order.
        sends: places where something of the CPU's was copied to the GPU.
    """

    def __init__(self):
        self.marks, self.frames = Marks(), []
        self.reads, self.sends = [], []
        self.calls, self.operators = _Calls(self), _Operators(self)

    def holds(self, tensor) -> bool:
        """Whether the tensor is on the GPU."""
        with torch._C.DisableTorchFunction():
            return bool(self.marks.get(tensor))

    def note(self, what: list, name: str):
        what.append(f"{_where()} {name}")

    def moved(self, tensor, there: bool):
        """The tensor there, a copy if it is elsewhere."""
        return tensor if self.holds(tensor) == there else _Move.apply(tensor, self, there)

    def copied(self, tensor, there: bool):
        self.note(self.sends if there else self.reads, "copy")
        with self.frame(there, forced=True), torch._C.DisableTorchFunction():
            return tensor.clone()

    @contextmanager
    def frame(self, there: bool, forced: bool = False):
        """While it lasts, new memory is made there; `forced`: whatever it is computed from."""
        self.frames.append((there, forced))
        try:
            yield
        finally:
            self.frames.pop()


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gpu, there):
        ctx.gpu, ctx.there = gpu, there
        return gpu.copied(x, there)

    @staticmethod
    def backward(ctx, grad):
        return ctx.gpu.moved(grad, not ctx.there), None, None


def _tensors(*trees) -> list:
    return [x for x in tree_leaves(trees) if isinstance(x, torch.Tensor)]


class _Operators(TorchDispatchMode):
    """Below autograd: marks what is computed, refuses operands in two places, notes what makes the CPU wait."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunction():
            return self._run(operator, args, kwargs or {})

    def _run(self, operator, args, kwargs):
        gpu, operands = self.gpu, _tensors(args, kwargs)
        new, said = gpu.frames[-1] if operator is aten.lift_fresh.default and gpu.frames else (False, False)
        if new and said:  # torch.tensor(numbers, device="cuda")
            gpu.note(gpu.sends, "tensor")
        for x in operands:
            if gpu.marks.get(x) is None:
                gpu.marks.set(x, new)
        there = self._there(operator, args, kwargs, operands)
        own = there and operator.namespace not in ("aten", "prims")
        out = self._kernel(operator, args, kwargs) if own else ONLY_CUDA.get(operator, operator)(*args, **kwargs)
        for x in _tensors(out):
            if gpu.marks.get(x) is None:
                gpu.marks.set(x, there)
        gpu.marks.purge()
        return out

    def _kernel(self, operator, args, kwargs):
        """An operator that is not torch's own, by its kernel for CUDA, on what is really in the CPU's memory."""
        keys = ("CUDA", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
        if not any(torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key) for key in keys):
            raise NotImplementedError(f"{operator.name()} has no kernel for CUDA, at {_where()}")
        with torch._C._EnableTorchFunction(), self.gpu.operators, self.gpu.calls:
            return operator.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA), *args, **kwargs)

    def _there(self, operator, args, kwargs, operands) -> bool:
        """Whether the result is on the GPU."""
        gpu = self.gpu
        ours = [x for x in operands if gpu.marks.get(x)]
        default, forced = gpu.frames[-1] if gpu.frames else (False, False)
        if operator in COPIES:
            return self._copy(operator, operands, default, forced)
        if ours:
            self._check(operator, args, [x for x in operands if not gpu.marks.get(x)], ours)
            if operator in READS or operator in INDEXED and _by_mask(args):
                gpu.note(gpu.reads, operator.name().removeprefix("aten::"))
        return default if forced or not operands else bool(ours)

    def _copy(self, operator, operands, default, forced):
        if operator is aten._to_copy.default:  # moves are made by `copied`: this one only changes the type
            return default if forced else bool(self.gpu.marks.get(operands[0]))
        to, of = (bool(self.gpu.marks.get(x)) for x in operands[:2])
        if of != to and operands[1].numel():
            self.gpu.note(self.gpu.reads if of else self.gpu.sends, "copy")
        return to

    def _check(self, operator, args, others, ours):
        wrong = others if operator in STRICT else [x for x in others if x.dim()]
        if operator in INDEXED:
            indices = {id(x) for x in _tensors(args[1])}
            if id(args[0]) in {id(x) for x in ours}:
                wrong = [x for x in wrong if id(x) not in indices]
        if wrong:
            raise RuntimeError(
                f"{operator}: expected all tensors on one device, found {GPU} "
                f"{[tuple(x.shape) for x in ours]} and cpu {[tuple(x.shape) for x in wrong]}, at {_where()}"
            )


def _by_mask(args) -> bool:
    return any(x.dtype in (torch.bool, torch.uint8) for x in _tensors(args[1]))


class _Calls(TorchFunctionMode):
    """Calls of Python: where tensors say they are, moves, new tensors, generators, ways out of torch."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, name = dict(kwargs or {}), getattr(function, "__name__", "")
        if name == "__get__":
            name = function.__self__.__name__
        if special := getattr(self, f"_{name}", None):
            if isinstance(args[0] if args else None, torch.Tensor):
                return special(function, *args, **kwargs)
        there, forced = self._target(args, kwargs)
        self._check_generator(function, args, kwargs, there)
        if "device" in kwargs:
            kwargs["device"] = CPU
        with self.gpu.frame(there, forced):
            out = function(*args, **kwargs)
            if name == "__deepcopy__":
                self.gpu.marks.set(out, there)
        if name in ("as_tensor", "asarray") and forced:
            return self.gpu.moved(out, there)
        return out

    def _target(self, args, kwargs) -> tuple[bool, bool]:
        """Where new memory belongs, and whether the call says so."""
        if kwargs.get("device") is not None:
            return _place(kwargs["device"]) == GPU, True
        return any(self.gpu.holds(x) for x in _tensors(args, kwargs)), False

    def _check_generator(self, function, args, kwargs, there):
        for generator in (x for x in tree_leaves((args, kwargs)) if isinstance(x, CPU_GENERATOR)):
            if (generator.device.type == "cuda") != there:
                wants = "cuda" if there else "cpu"
                raise RuntimeError(
                    f"{function.__name__}: expected a {wants!r} device type for generator but found "
                    f"{generator.device.type!r}, at {_where()}"
                )

    # where a tensor says it is

    def _device(self, function, x):
        return GPU if self.gpu.holds(x) else function(x)

    def _is_cuda(self, function, x):
        return self.gpu.holds(x)

    def _is_cpu(self, function, x):
        return not self.gpu.holds(x) and function(x)

    def _get_device(self, function, x):
        return 0 if self.gpu.holds(x) else function(x)

    # moves

    def _to(self, function, x, *args, **kwargs):
        if args and isinstance(args[0], torch.Tensor):
            args = (args[0].device if not self.gpu.holds(args[0]) else GPU, args[0].dtype, *args[1:])
        target = kwargs.get("device", args[0] if args else None)
        if target is None or isinstance(target, torch.dtype) or _place(target).type not in ("cuda", "cpu"):
            return function(x, *args, **kwargs)
        x = self.gpu.moved(x, _place(target) == GPU)
        return function(x, CPU, *args[1:], **{k: v for k, v in kwargs.items() if k != "device"})

    def _cuda(self, function, x, *args, **kwargs):
        return self.gpu.moved(x, True)

    def _cpu(self, function, x, *args, **kwargs):
        return self.gpu.moved(x, False)

    # ways out of torch

    def _numpy(self, function, x, *args, **kwargs):
        if self.gpu.holds(x) and not kwargs.get("force"):
            raise TypeError(f"can't convert cuda:0 device type tensor to numpy, at {_where()}")
        return function(x, *args, **kwargs)

    ___array__ = _numpy

    def _tolist(self, function, x):
        if self.gpu.holds(x):
            self.gpu.note(self.gpu.reads, "tolist")
        return function(x)

    def _data_ptr(self, function, x):
        if self.gpu.holds(x):
            raise AssertionError(f"the address of memory of the GPU is asked for, at {_where()}")
        return function(x)


def _grouped(original, gpu):
    """`_group_tensors_by_device_and_dtype` of torch, which looks at the tensors in C++."""

    def grouped(lists, with_indices=False):
        found = original(lists, with_indices)
        at = {True: GPU, False: CPU}
        return {(at[gpu.holds(group[0][0][0])], kind): group for (_, kind), group in found.items()}

    return grouped


@contextmanager
def pretend_gpu():
    """Torch with a pretended GPU, for this thread and as long as it lasts; gives a :class:`PretendGPU`."""
    gpu, state = PretendGPU(), {"rng": torch.get_rng_state()}
    run, autocast = torch.autograd.graph._engine_run_backward, torch.autocast
    group = torch.utils._foreach_utils._group_tensors_by_device_and_dtype

    def backward(*args, **kwargs):
        with gpu.calls:
            return run(*args, **kwargs)

    def cast(device_type, *args, **kwargs):
        return autocast("cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "get_device_name": lambda device=None: "pretended GPU",
        "get_rng_state": lambda device=None: state["rng"].clone(),
        "set_rng_state": lambda new, device=None: state.update(rng=new.clone()),
    }
    with ExitStack() as stack:
        for name, function in cuda.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        for module in (torch.autograd, torch.autograd.graph):
            stack.enter_context(mock.patch.object(module, "_engine_run_backward", backward))
        for module in (torch.utils._foreach_utils, torch.nn.utils.clip_grad):
            stack.enter_context(mock.patch.object(module, "_group_tensors_by_device_and_dtype", _grouped(group, gpu)))
        stack.enter_context(mock.patch.object(torch, "Generator", Generator))
        stack.enter_context(mock.patch.object(torch, "autocast", cast))
        stack.enter_context(mock.patch.object(torch.Tensor, "pin_memory", lambda x, *args: x))
        stack.enter_context(gpu.operators)
        stack.enter_context(gpu.calls)
        yield gpu


def to_gpu(tree):
    """Tensors and modules of a tree on the GPU."""
    move = lambda x: x.to("cuda") if isinstance(x, torch.Tensor | torch.nn.Module) else x  # noqa: E731
    return tree_map(move, tree)
