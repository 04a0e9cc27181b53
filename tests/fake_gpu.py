"""A pretended GPU: its tensors say `cuda:0`, and the CPU holds and computes their values.

A `FakeGpu` notes every place where a real GPU would make the CPU wait: values that are read back,
shapes that depend on values, and copies to the GPU that are not ``non_blocking``. Like CUDA, it
refuses an operation on tensors of both devices.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

CHECKOUT = Path(__file__).parent.parent
CUDA = torch.device("cuda:0")
_ATEN = torch.ops.aten
_MADE = torch.tensor, torch.as_tensor
_BY_VALUE = {  # their shapes, or what Python does next, depend on values
    *(_ATEN._local_scalar_dense, _ATEN.nonzero, _ATEN.equal, _ATEN.masked_select),
    *(_ATEN._unique2, _ATEN.unique_dim, _ATEN.unique_consecutive, _ATEN.bincount),
}
_OF_BOTH = {  # CUDA takes an index from the CPU; Adam counts its steps there
    *(_ATEN.index, _ATEN.index_put_, _ATEN.index_put, _ATEN._index_put_impl_),
    *(_ATEN._foreach_add_, _ATEN.copy_, _ATEN._to_copy),
}


class FakeTensor(torch.Tensor):
    """A tensor that says it is on the GPU. ``held`` has its values."""

    held: torch.Tensor
    device = property(lambda self: CUDA)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    @property
    def data(self) -> FakeTensor:
        return self.detach()

    @data.setter
    def data(self, other: FakeTensor) -> None:
        self.held = other.held

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> FakeTensor:
        # To C++ it is on `meta`: a torch without CUDA computes no gradients on `cuda`.
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            *(cls, held.size()),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device="meta",
        )
        made.held = held
        return made  # type: ignore[no-any-return]

    def __repr__(self, **_: Any) -> str:
        return f"FakeTensor({self.held!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} is computed outside of the mode, perhaps in another thread.")


def _is_on_gpu(each: Any) -> bool:
    return isinstance(each, FakeTensor)


def _held(each: Any) -> Any:
    return each.held if isinstance(each, FakeTensor) else each


class _Made(TorchFunctionMode):
    """Let `torch.tensor(..., device="cuda")` make a tensor on the CPU, and copy it, as torch does.

    Inside of torch, no mode would see this copy.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        device = kwargs.get("device")
        if func in _MADE and device is not None and torch.device(device).type == "cuda":
            return func(*args, **{**kwargs, "device": "cpu"}).to(CUDA)
        return func(*args, **kwargs)


class FakeGpu(TorchDispatchMode):
    """Computes what is asked of `cuda`. ``waits`` has the place of each wait: FILE:FUNCTION, why."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[str, str]] = []
        self.computed = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, op = dict(kwargs or {}), func.overloadpacket
        tensors = [each for each in tree_flatten((args, kwargs))[0] if isinstance(each, torch.Tensor)]
        taken = [each for each in tensors if isinstance(each, FakeTensor)]
        made_on = kwargs.get("device")
        on_gpu = bool(taken) if made_on is None else torch.device(made_on).type == "cuda"
        if op in (_ATEN.scalar_tensor, _ATEN._to_copy):  # of `where`, and `to(another tensor)`
            on_gpu |= made_on is not None and torch.device(made_on).type == "meta"
        if not on_gpu and not taken:
            return func(*args, **kwargs)
        self.computed += 1
        others = [each for each in tensors if each.ndim and not _is_on_gpu(each)]
        if taken and others and op not in _OF_BOTH:
            raise RuntimeError(f"Expected all tensors to be on the same device: {func}")
        self._note(func, args, kwargs, on_gpu, bool(others))
        if made_on is not None:
            kwargs["device"] = torch.device("cpu")
        result = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        known = {id(each.held): each for each in taken} | {
            id(each): each for each in tensors if not _is_on_gpu(each)
        }

        def handed_back(each: Any) -> Any:
            if not isinstance(each, torch.Tensor):
                return each
            return known.get(id(each)) if id(each) in known else FakeTensor(each) if on_gpu else each

        return tree_map(handed_back, result)

    def _note(self, func: Any, args: Any, kwargs: Any, on_gpu: bool, mixed: bool) -> None:
        op = func.overloadpacket
        if op is _ATEN._to_copy and _is_on_gpu(args[0]) != on_gpu:
            if not on_gpu:
                self._wait("to the CPU")
            elif not kwargs.get("non_blocking"):
                self._wait("to the GPU, blocking")
        elif op is _ATEN.copy_ and _is_on_gpu(args[0]) != _is_on_gpu(args[1]):
            if not _is_on_gpu(args[0]):
                self._wait("to the CPU")
            elif not (args[2] if len(args) > 2 else kwargs.get("non_blocking")):
                self._wait("to the GPU, blocking")
        elif op in _BY_VALUE or (op is _ATEN.repeat_interleave and not kwargs.get("output_size")):
            self._wait(str(op).removeprefix("aten."))
        elif op in _OF_BOTH and "index" in str(op):
            masks = [each for each in args[1] if each is not None and each.dtype == torch.bool]
            if masks or mixed:
                self._wait("a mask as an index" if masks else "an index of the CPU")

    def _wait(self, why: str) -> None:
        frame: Any = sys._getframe()
        while frame and (
            CHECKOUT not in Path(frame.f_code.co_filename).parents or __file__ == frame.f_code.co_filename
        ):
            frame = frame.f_back
        place = "torch"
        if frame:
            place = f"{Path(frame.f_code.co_filename).relative_to(CHECKOUT)}:{frame.f_lineno}"
        self.waits.append((place, why))


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """Pretend that this process has a GPU: `device="cuda"` is one."""
    gpu = FakeGpu()
    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.cuda, "_lazy_init"))
        stack.enter_context(_Made())
        stack.enter_context(gpu)
        yield gpu
