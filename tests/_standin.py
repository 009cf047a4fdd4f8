"""A stand-in for a GPU: tensors whose ``.device`` is ``privateuseone:0`` and whose numbers live on the CPU.

**This is no proof of CUDA.** No kernel, stream, memory limit or precision of a GPU is involved. What it shows is that
code never mixes devices, and how often it would have waited for the device or copied from it and to it:

- an operation on a stand-in tensor and a CPU tensor raises :class:`MixedDevicesError`. Zero-dimensional CPU tensors
  are numbers, as on CUDA; but not as an index, and CPU index tensors, which CUDA lets pass, are refused altogether;
- :func:`count_transfers` counts copies between host and device, and operations that on CUDA wait for the device:
  those that return a number to Python, or whose result has a shape that depends on the data.

>>> x = torch.ones(3).to(DEVICE)
>>> with count_transfers() as counts:
...     total = float((x + torch.arange(3, device=x.device)).sum())
>>> total, counts.copies, counts.syncs
(6.0, 0, 1)

How it works, on torch 2.13. A wrapper subclass alone computes, but its backward pass aborts the process for want of a
device guard; ``torch.utils.backend_registration._setup_privateuseone_for_python_backend`` (experimental, not in every
torch we support) registers one written in Python. It must be given a name, even the one the device already has:
autograd finds no accelerator otherwise. Factory functions reach the device by kernels registered for PrivateUse1, so
no mode has to be active. All this is for the whole process and cannot be undone, but concerns no other device;
where a real accelerator is present, or torch is older, the stand-in stays out of the way: see :data:`UNAVAILABLE`.

Not supported: ``out=`` that has to grow, assigning ``.data`` of another shape or dtype (so cast a module before it is
moved, not after), pickling, and ``torch.Generator``\\ s of the CPU, which CUDA refuses as well.
"""

import functools
import itertools
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import NamedTuple

import gpytorch
import torch
from torch.utils import backend_registration
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

DEVICE = torch.device("privateuseone:0")

# Why there is no stand-in here, or nothing if there is.
UNAVAILABLE = ""
if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
    UNAVAILABLE = f"torch {torch.__version__} registers no device guard from Python"
elif torch.accelerator.is_available():
    UNAVAILABLE = f"{torch.accelerator.current_accelerator()} is available, and torch wants one accelerator a process"


class MixedDevicesError(RuntimeError):
    """An operation was given tensors of the stand-in device and of the CPU."""


_FEW = 256

# -- counting --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Transfer:
    """One crossing between host and device, or one wait for it."""

    kind: str  # "to host", "to device" or "sync"
    op: str  # such as "_to_copy", "_local_scalar_dense"
    where: str  # file and line of the code that called torch


@dataclass
class Transfers:
    """What crossed between host and device, and who waited for it."""

    events: list[Transfer] = field(default_factory=list)

    @property
    def copies(self) -> int:
        """Tensors copied, either way."""
        return sum(event.kind != "sync" for event in self.events)

    @property
    def syncs(self) -> int:
        """Waits for the device other than copies."""
        return sum(event.kind == "sync" for event in self.events)

    @property
    def by_op(self) -> Counter[tuple[str, str]]:
        """How many of each (kind, op)."""
        return Counter((event.kind, event.op) for event in self.events)

    @property
    def by_line(self) -> Counter[tuple[str, str, str]]:
        """How many of each (kind, op, file and line)."""
        return Counter((event.kind, event.op, event.where) for event in self.events)

    def within(self, package: ModuleType) -> "Transfers":
        """Those that the modules of a package asked torch for themselves, e.g. not through linear_operator."""
        return Transfers([event for event in self.events if event.where.startswith(_folder(package))])


def _folder(package):
    return os.path.join(os.path.dirname(package.__file__), "")


_NOT_CALLERS = (_folder(torch), __file__)
_counters: list[Transfers] = []


@contextmanager
def count_transfers() -> Iterator[Transfers]:
    """Counts inside the block, in the threads of the backward pass too. Blocks may nest."""
    counts = Transfers()
    _counters.append(counts)
    try:
        yield counts
    finally:
        _counters[:] = [other for other in _counters if other is not counts]


def _count(kind, op):
    if not _counters:
        return
    frame = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_CALLERS):
        frame = frame.f_back
    where = "autograd" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"
    for counts in _counters:
        counts.events.append(Transfer(kind, op, where))


# -- the tensor ------------------------------------------------------------------------------------------------------


class StandInTensor(torch.Tensor):
    """`host`, said to be on the stand-in device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, host, requires_grad=False):
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            layout=host.layout,
            device=DEVICE,
            requires_grad=requires_grad,
        )
        tensor.host = host
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})

    def data_ptr(self):
        return self.host.data_ptr()

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, value):
        """What `nn.Module.to` does to a module that is here already."""
        same = isinstance(value, StandInTensor) and value.dtype == self.dtype and value.shape == self.shape
        if not same or value.stride() != self.stride():
            raise NotImplementedError("the stand-in device cannot assign .data of another layout; cast, then move")
        self.host = value.host

    def tolist(self):
        if self.numel() > _FEW:
            return self.cpu().tolist()
        _count("sync", "tolist")  # a few numbers are what `item` is: a wait
        return self.host.tolist()

    def numpy(self, *, force=False):
        if force:
            return self.detach().cpu().numpy()
        raise TypeError(f"can't convert {DEVICE} tensor to numpy. Use Tensor.cpu() first.")

    def __repr__(self, **kwargs):
        return f"StandInTensor({self.host})"

    def __deepcopy__(self, memo):
        copied = StandInTensor(self.host.clone(), self.requires_grad)
        if getattr(self, "_is_param", False):
            copied._is_param = True
        return memo.setdefault(id(self), copied)

    def __reduce_ex__(self, protocol):
        raise NotImplementedError("stand-in tensors are not pickled")


_WAITS = {
    "_linalg_check_errors",
    "_local_scalar_dense",
    "_unique",
    "_unique2",
    "bincount",
    "equal",
    "is_nonzero",
    "linalg_lstsq",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "unique_consecutive",
    "unique_dim",
    "unique_dim_consecutive",
}
_INDEXING = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"}


class _Schema(NamedTuple):
    name: str
    aliases: bool  # whether it writes to an argument or returns a view of one
    written: tuple[tuple[int, str], ...]  # arguments written to, by position and name


@functools.cache
def _schema(func):
    schema = func._schema
    info = [(i, argument.name, argument.alias_info) for i, argument in enumerate(schema.arguments)]
    return _Schema(
        schema.name.removeprefix("aten::"),
        any(alias is not None for _, _, alias in info),
        tuple((i, name) for i, name, alias in info if alias is not None and alias.is_write),
    )


def _map(function, value):
    """Over tensors in tuples and lists: what arguments and results of operations are. pytree is ten times slower."""
    if isinstance(value, torch.Tensor):
        return function(value)
    return type(value)(_map(function, part) for part in value) if type(value) in (tuple, list) else value


def _run(func, args, kwargs):
    """The operation on the host's numbers, after the checks that a device would make."""
    schema = _schema(func)
    tensors = []
    for value in (args, *kwargs.values()):
        _map(tensors.append, value)
    onto_host = _checked(schema, tensors, args, kwargs)
    if _waits(schema.name, args, kwargs):
        _count("sync", schema.name)
    host_args = _map(_host, args)
    host_kwargs = {name: _map(_host, value) for name, value in kwargs.items()}
    if host_kwargs.get("device") is not None:
        onto_host = torch.device(host_kwargs["device"]).type == "cpu"
        host_kwargs["device"] = torch.device("cpu")
        if onto_host and schema.name == "_to_copy":
            _count("to host", schema.name)
    result = func(*host_args, **host_kwargs)
    if onto_host:
        return result
    result = _map(lambda tensor: StandInTensor(_resolved(tensor)), result)
    if schema.aliases:
        result = return_and_correct_aliasing(func, args, kwargs, result)
        if any(tensor.shape != _host(tensor).shape for tensor in tensors):
            raise NotImplementedError(f"{schema.name}: the stand-in device cannot resize a tensor in place")
    return result


def _resolved(tensor):
    """Lazy conjugates of complex tensors carried out: below the dispatch of subclasses, operations ignore them."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _host(tensor):
    return tensor.host if isinstance(tensor, StandInTensor) else tensor


def _checked(schema, tensors, args, kwargs):
    """Whether the result is on the host, as that of `host.copy_(device)`; raises where devices are mixed."""
    if schema.name == "copy_":
        here, there = (isinstance(t, StandInTensor) for t in args[:2])
        if here != there:
            _count("to device" if here else "to host", schema.name)
        return not here
    if isinstance(kwargs.get("generator"), torch.Generator):
        raise RuntimeError(f"{schema.name}: expected a generator of {DEVICE}, got one of the cpu")
    hosts = [tensor for tensor in tensors if not isinstance(tensor, StandInTensor)]
    if not hosts or len(hosts) == len(tensors):
        return False
    numbers_not_allowed = [args[i] if i < len(args) else kwargs.get(name) for i, name in schema.written]
    numbers_not_allowed += args[1] if schema.name in _INDEXING else []
    for tensor in hosts:
        if tensor.dim() or any(tensor is other for other in numbers_not_allowed):
            shapes = ", ".join(f"{tuple(t.shape)} on {t.device}" for t in tensors)
            raise MixedDevicesError(f"{schema.name}: expected all tensors on {DEVICE}, got {shapes}")
    return False


def _waits(name, args, kwargs):
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None
    if name not in _INDEXING:
        return name in _WAITS
    masked = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in args[1])
    # a number written under a mask needs no positions
    fills = "put" in name and args[2].numel() == 1 and not isinstance(args[2], StandInTensor)
    return masked and not fills


# -- the device ------------------------------------------------------------------------------------------------------

# Factories whose own kernels grow an empty tensor, which a wrapper cannot do.
_FACTORIES = ("arange", "arange.start", "arange.start_step", "eye", "eye.m", "linspace", "logspace", "range")


def _register():
    """Makes torch know the device; the libraries must be kept alive."""
    backend_registration._setup_privateuseone_for_python_backend(rename="privateuseone")
    # asked of every accelerator by autocast, and so by torch.utils.checkpoint, on the CPU as well
    torch.privateuseone.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(lambda func, *args, **kwargs: _run(func, args, kwargs), "PrivateUse1")
    some = torch.library.Library("aten", "IMPL", "PrivateUse1")
    # `torch.tensor(..., device=...)` copies with subclasses switched off, where the fallback is not reached
    for name in (*_FACTORIES, "copy_"):
        packet, _, overload = name.partition(".")
        func = getattr(getattr(torch.ops.aten, packet), overload or "default")
        some.impl(name, lambda *args, func=func, **kwargs: _run(func, args, kwargs))
    return everything, some


_libraries = () if UNAVAILABLE else _register()


# -- for tests -------------------------------------------------------------------------------------------------------


def to_standin(value):
    """A module, an operator, a tensor, or a nest of them, moved to the stand-in device.

    Modules are moved in place, and get new parameters: optimizers are made afterwards.
    """
    if isinstance(value, (tuple, list, dict)):
        return tree_map(to_standin, value)
    if not hasattr(value, "to"):
        return value
    moved = value.to(DEVICE)
    if isinstance(moved, torch.nn.Module):
        left = [name for name, t in itertools.chain(moved.named_parameters(), moved.named_buffers()) if not _here(t)]
        if left:
            raise MixedDevicesError(f"{type(moved).__name__}: left on the host by .to(): {', '.join(left)}")
    return moved


def _here(tensor):
    return tensor.device == DEVICE


def to_host(value):
    """A nest with its stand-in tensors replaced by plain CPU copies, detached; not counted."""
    return tree_map(lambda t: t.detach().host.clone() if isinstance(t, StandInTensor) else t, value)


def training_steps(model, steps=1, lr=0.1):
    """Adam on the exact marginal likelihood of an `ExactGP`, on the device where it is; the losses, as floats."""
    model.train()
    mll = gpytorch.mlls.ExactMarginalLogLikelihood(model.likelihood, model)
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = -mll(model(*model.train_inputs), model.train_targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
