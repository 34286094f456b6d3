# SPDX-License-Identifier: Apache-2.0
"""A device that is not there: its tensors answer ``device.type == "far"``, are computed on the CPU, and are watched.

    with FarDevice() as far:
        far.watching = True
        loss = model(batch)              # a tensor on the CPU beside one on the device is an error, as with CUDA
    far.waits                            # {place in the product: what made the host wait there}

What holds for an accelerator holds here: tensors of several devices do not meet in one operation (a number in a tensor
without dimensions may come from the CPU, pointwise), parameters move by `Module.to`, gradients are made by the autograd
engine on the device's own thread. The host waits where a value, a shape or a copy depends on what the device computed
(``.item()``, ``.tolist()``, ``.cpu()``, ``if tensor``, boolean indices, ``nonzero``) and where a blocking copy to it
waits for all that was queued before.

A process can have one such device, for good: use it in a process of its own (`tests.multiprocess.run_distributed`).
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "far"
PRODUCT = ("imaginaire/", "cosmos_predict2/")
_ROOT = Path(__file__).resolve().parent.parent
_aten = torch.ops.aten
_COPIES = (_aten.copy_.default, _aten._foreach_copy_.default)
_MOVES = (_aten._to_copy.default,)
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default, _aten._unsafe_index.Tensor)
_SHAPE_FROM_DATA = {"nonzero", "masked_select", "_unique2", "unique_consecutive", "unique_dim", "bincount", "equal"}
_SHAPE_FROM_DATA |= {"repeat_interleave.Tensor"}


def register() -> None:
    """Make the device known to torch: before the process's first gradient, as autograd has a thread for each device."""
    if torch._C._get_privateuse1_backend_name() != NAME:
        _setup_privateuseone_for_python_backend(NAME, _Module())


def device() -> torch.device:
    return torch.device(NAME, 0)


class _Module:
    """``torch.far``, as torch wants it of a device."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0

    def device_count(self) -> int:
        return 1

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: Any = None) -> Tensor:
        return torch.zeros(0, dtype=torch.uint8)

    def set_rng_state(self, state: Tensor, device: Any = None) -> None:
        pass

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


class FarTensor(Tensor):
    """A tensor of the device; ``host`` holds its numbers."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> "FarTensor":
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls,
            host.shape,
            dtype=host.dtype,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            device=device(),
        )

    def __init__(self, host: Tensor) -> None:
        self.host = host

    def __tensor_flatten__(self) -> tuple[list[str], None]:  # so `Module.to` keeps the parameters' identity
        return ["host"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> "FarTensor":
        return FarTensor(inner["host"])

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"FarTensor({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} met a tensor of the device '{NAME}' outside of `with FarDevice()`")


class _MadeOfNumbers(TorchFunctionMode):
    """Tensors that torch makes out of Python numbers on the host and copies, beneath where operations are seen."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        asked = kwargs.get("device")
        if func in (torch.tensor, torch.as_tensor) and asked is not None and torch.device(asked).type == NAME:
            return func(*args, **{**kwargs, "device": "cpu"}).to(asked)
        if func is Tensor.new_tensor and isinstance(args[0], FarTensor):
            return torch.tensor(*args[1:], **{"dtype": args[0].dtype, **kwargs}).to(args[0].device)
        if func in (Tensor.__getitem__, Tensor.__setitem__) and isinstance(args[0], FarTensor):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(part) if isinstance(part, list) else part for part in index)
            args = (args[0], index, *args[2:])
        return func(*args, **kwargs)


class FarDevice(TorchDispatchMode):
    """Computes what happens on the device; ``waits`` counts where the host waited while ``watching``."""

    def __init__(self) -> None:
        super().__init__()
        self._made_of_numbers = _MadeOfNumbers()
        self.watching = False
        self.waits: Counter[str] = Counter()

    def __enter__(self) -> "FarDevice":
        register()
        super().__enter__()
        self._made_of_numbers.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._made_of_numbers.__exit__(kind, error, trace)
        super().__exit__(kind, error, trace)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        flat = list(_leaves((*args, *(kwargs or {}).values())))
        tensors = [value for value in flat if isinstance(value, Tensor)]
        far = [tensor for tensor in tensors if isinstance(tensor, FarTensor)]
        asked = (kwargs or {}).get("device")
        is_made_far = not far and func not in _MOVES and asked is not None and torch.device(asked).type == NAME
        is_moved_out = func in _MOVES and far and asked is not None and torch.device(asked).type != NAME
        is_moved_in = func in _MOVES and not far and asked is not None and torch.device(asked).type == NAME
        if not far and not is_made_far and not is_moved_in:
            return func(*args, **(kwargs or {}))
        near = [tensor for tensor in tensors if not isinstance(tensor, FarTensor)]
        if func not in _COPIES and far:
            _check_devices(func, far, near, isinstance(flat[0], FarTensor))
        if why := _why_the_host_waits(func, args, kwargs or {}, far, near, bool(is_moved_in or is_moved_out)):
            self._note(why)
        inner = {key: _mapped(_on_the_host, value) for key, value in (kwargs or {}).items()}
        result = func(*_mapped(_on_the_host, args), **inner)
        if is_moved_out or (func in _COPIES and not isinstance(flat[0], FarTensor)):
            return result
        return _wrapped(result, far)

    def _note(self, why: str) -> None:
        if self.watching:
            self.waits[f"{_place()} {why}"] += 1


def _leaves(value: Any) -> Iterator[Any]:
    """All values in lists and tuples; torch's functions for trees would take a third of the time of these tests."""
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _leaves(one)
    else:
        yield value


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    return type(value)([_mapped(function, one) for one in value]) if type(value) in (list, tuple) else function(value)


def _on_the_host(value: Any) -> Any:
    if isinstance(value, FarTensor):
        return value.host
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _wrapped(result: Any, given: list[FarTensor]) -> Any:
    """The result on the device; an operation in place gives the tensor that it was called with."""

    def wrapped(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        same = [one for one in given if one.host is value]
        return same[0] if same else FarTensor(value)

    return _mapped(wrapped, result)


def _check_devices(func: Any, far: list[FarTensor], near: list[Tensor], is_far_indexed: bool) -> None:
    """Raise as CUDA does for tensors of two devices. A tensor on the CPU takes no index from the device."""
    if not near or (func in _INDEXING and is_far_indexed):  # indices may lie on the CPU: they are copied
        return
    is_pointwise = torch.Tag.pointwise in func.tags or func is _aten.where.self
    if is_pointwise and all(tensor.dim() == 0 for tensor in near):
        return
    shapes = ", ".join(str(tuple(tensor.shape)) for tensor in near)
    raise RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and cpu: {func} has"
        f" {shapes} on the cpu, at {_place()}"
    )


def _why_the_host_waits(
    func: Any, args: Any, kwargs: Any, far: list[FarTensor], near: list[Tensor], is_moved: bool
) -> str | None:
    name = func.__name__.removesuffix(".default")
    if func is _aten._local_scalar_dense.default:
        return "reads a number"
    if is_moved:
        if not far:
            return None if kwargs.get("non_blocking") else "copies to the device and waits"
        return "copies to the host"
    if func in _COPIES and near:
        is_blocking = not (kwargs.get("non_blocking") or (len(args) > 2 and args[2]))
        return "copies and waits" if is_blocking else None
    if func in _INDEXING:
        indices = [index for index in args[1] if index is not None]
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
            return "indexes by a mask"
        if any(not isinstance(index, FarTensor) and index.dim() for index in indices):
            return "copies an index to the device and waits"
    if name in _SHAPE_FROM_DATA:
        return f"needs the shape of {name}"
    return None


def _place() -> str:
    """file:function of the product whose line led here."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(str(_ROOT)):
            path = str(Path(name).relative_to(_ROOT))
            if path.startswith(PRODUCT):
                return f"{path}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "elsewhere"
