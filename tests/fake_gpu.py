"""A pretended GPU: its tensors say `cuda:0`, and the CPU holds and computes their values.

It shows three things without a GPU. Paths that a device decides are run. As on CUDA, an operation
on tensors of both devices fails. And `FakeGpu` notes each place where a real GPU would make the CPU
wait: a value that is read, a shape that depends on values, a copy that blocks. It does not show
times, kernels, or how a GPU rounds.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

OURS = [Path(__file__).parents[1] / folder for folder in ("vfl_flower", "strategies")]
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")
_ATEN = torch.ops.aten
_BY_VALUE = {  # the result's shape, or Python's next line, depends on values
    *(_ATEN._local_scalar_dense, _ATEN.nonzero, _ATEN.equal, _ATEN.masked_select),
    *(_ATEN._unique2, _ATEN.unique_dim, _ATEN.unique_consecutive, _ATEN.bincount),
}
_INDEXED = {_ATEN.index, _ATEN.index_put_, _ATEN.index_put, _ATEN._index_put_impl_}
_COPIES = {_ATEN.copy_, _ATEN._to_copy}
_LOWERED = {  # by autocast
    *(functional.linear, functional.conv1d, functional.conv2d, torch.addmm, torch.baddbmm),
    *(torch.matmul, torch.mm, torch.bmm, torch.Tensor.matmul, torch.Tensor.mm),
    *(torch.Tensor.__matmul__, torch._VF.lstm, torch._VF.gru),
}


class FakeTensor(torch.Tensor):
    """A tensor that says it is on the GPU. ``held`` has its values."""

    held: torch.Tensor
    device = property(lambda self: CUDA)
    is_cuda = property(lambda self: True)
    is_meta = property(lambda self: False)

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> FakeTensor:
        # To torch's C++ it is on `meta`: without CUDA, torch has no gradients on `cuda`.
        made: FakeTensor = torch.Tensor._make_wrapper_subclass(
            *(cls, held.size()),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device("meta"),
        )
        made.held = held
        return made

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, other: Any) -> None:
        self.held = other.held

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"FakeTensor({self.held!r})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise AssertionError(f"{func} is computed outside of the mode, perhaps in another thread.")


def _held(each: Any) -> Any:
    return each.held if isinstance(each, FakeTensor) else each


def _is_cuda(device: Any) -> bool:
    return isinstance(device, str | torch.device) and torch.device(device).type == "cuda"


class _Calls(TorchFunctionMode):
    """Changes what torch would do before any operator: make tensors, name a device, autocast.

    on_meta : whether Python asked for a tensor on `meta`.
    """

    on_meta = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and _is_cuda(kwargs.get("device")):
            made = func(*args, **{**kwargs, "device": CPU})  # torch hides its copy from modes
            return made.to(CUDA)
        if func is torch.Tensor.tolist and isinstance(args[0], FakeTensor):
            return args[0].cpu().tolist()
        if func is torch.Tensor.numpy and isinstance(args[0], FakeTensor) and kwargs.get("force"):
            return args[0].detach().cpu().numpy()
        if func is torch.Tensor.to:  # without a number, torch would ask CUDA for the device's
            args, kwargs = tree_map(lambda each: CUDA if _is_cuda(each) else each, (args, kwargs))
        if func in _LOWERED and torch.is_autocast_enabled("cuda"):
            lower = torch.get_autocast_dtype("cuda")

            def lowered(each: Any) -> Any:
                on_gpu = isinstance(each, FakeTensor) and each.is_floating_point()
                return each.to(lower) if on_gpu else each

            args, kwargs = tree_map(lowered, (args, kwargs))
        self.on_meta = str(kwargs.get("device")) == "meta"
        try:
            return func(*args, **kwargs)
        finally:
            self.on_meta = False


class FakeGpu(TorchDispatchMode):
    """Computes what `cuda` is asked for.

    waits : for each wait, its place FILE:FUNCTION and its cause.
    operations : number of operators that ran on the GPU.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[tuple[str, str]] = []
        self.operations = 0
        self.calls = _Calls()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, op = dict(kwargs or {}), func.overloadpacket
        leaves = tree_flatten((args, kwargs))[0]
        tensors = [each for each in leaves if isinstance(each, torch.Tensor)]
        taken = [each for each in tensors if isinstance(each, FakeTensor)]
        device = kwargs.get("device")
        on_gpu = bool(taken) if device is None else _is_cuda(device)
        if device is not None and not self.calls.on_meta:
            on_gpu |= torch.device(device).type == "meta"  # torch's C++ took it from a tensor
        if not on_gpu and not taken:
            return func(*args, **kwargs)
        self.operations += 1
        others = [each for each in tensors if each.ndim and not isinstance(each, FakeTensor)]
        if taken and others and op not in _INDEXED | _COPIES:
            raise RuntimeError(f"Expected all tensors to be on the same device: {func}")
        self._note(op, args, kwargs, on_gpu, bool(others))
        if device is not None:
            kwargs["device"] = CPU
        result = func(*tree_map(_held, args), **tree_map(_held, kwargs))
        known = {id(_held(each)): each for each in tensors}  # of operators in place

        def handed_back(each: Any) -> Any:
            if not isinstance(each, torch.Tensor) or id(each) in known:
                return known.get(id(each), each)
            return FakeTensor(each) if on_gpu else each

        return tree_map(handed_back, result)

    def _note(self, op: Any, args: Any, kwargs: Any, on_gpu: bool, mixed: bool) -> None:
        if op in _COPIES:
            to_gpu = on_gpu if op is _ATEN._to_copy else isinstance(args[0], FakeTensor)
            if to_gpu == isinstance(args[op is _ATEN.copy_], FakeTensor):
                return
            free = args[2] if len(args) > 2 else kwargs.get("non_blocking")
            if not to_gpu:
                self._wait("to the CPU")
            elif not free:
                self._wait("to the GPU, blocking")
        elif op in _BY_VALUE:
            self._wait("a value" if op is _ATEN._local_scalar_dense else str(op))
        elif op is _ATEN.repeat_interleave and kwargs.get("output_size") is None:
            self._wait("repeat_interleave without a size")
        elif op in _INDEXED:
            if any(each is not None and each.dtype == torch.bool for each in args[1]):
                self._wait("a mask as an index")
            elif mixed:
                self._wait("an index on the CPU")

    def _wait(self, cause: str) -> None:
        frame: Any = sys._getframe()
        while frame:
            file = Path(frame.f_code.co_filename)
            ours = any(folder in file.parents for folder in OURS)
            if ours and frame.f_code.co_name[0] != "<":  # not within a generator
                break
            frame = frame.f_back
        self.waits.append((f"{file.name}:{frame.f_code.co_name}" if frame else "torch", cause))


@contextmanager
def fake_gpu() -> Iterator[FakeGpu]:
    """Let this thread use `cuda`, where there is none."""
    gpu, cuda = FakeGpu(), torch.cuda
    with ExitStack() as stack:
        stack.enter_context(patch.object(cuda, "_lazy_init"))
        stack.enter_context(patch.object(cuda, "get_rng_state"))
        stack.enter_context(patch.object(cuda, "set_rng_state"))
        stack.enter_context(patch.object(cuda, "is_bf16_supported", lambda: True))
        unavailable = "amp_definitely_not_available"
        stack.enter_context(patch.object(cuda.amp.common, unavailable, lambda: False))
        stack.enter_context(gpu.calls)
        stack.enter_context(gpu)
        yield gpu
