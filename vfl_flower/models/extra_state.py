"""Extra states: what a module of your own adds to its ``state_dict`` by ``get_extra_state``.

An extra state is kept as one array of bytes, in NumPy's npz format: a JSON text, and the tensors
and arrays that the text numbers. It may hold None, truth values, numbers, texts, tensors, arrays,
and lists, tuples and dictionaries of them. Nothing is pickled or unpickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from io import BytesIO
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vfl_flower.config.errors import VflError

_SUFFIX = "_extra_state"  # as in torch's state_dict
_TEXT = "text"


def is_extra(name: str) -> bool:
    """Return whether this is the name of an extra state."""
    return name.rpartition(".")[2] == _SUFFIX


def extra_states(model: nn.Module) -> dict[str, Tensor]:
    """Return the extra states of a model as bytes, uint8 [B], by name.

    Errors about a state that nothing could restore lack their subject.
    """
    return {
        name: torch.from_numpy(np.frombuffer(_encode(each.get_extra_state()), np.uint8).copy())
        for name, each in _with_extra_state(model)
    }


def load_extra_states(model: nn.Module, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Restore extra states by ``set_extra_state``."""
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    for name, each in _with_extra_state(model):
        if name in arrays:
            each.set_extra_state(_decode(arrays[name].tobytes(), device))


def _with_extra_state(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, each in model.named_modules():
        if type(each).get_extra_state is not nn.Module.get_extra_state:
            if type(each).set_extra_state is nn.Module.set_extra_state:
                raise VflError("has a get_extra_state, but no set_extra_state. Write both.")
            yield f"{name}.{_SUFFIX}".removeprefix("."), each


def _encode(value: Any) -> bytes:
    arrays: dict[str, NDArray[Any]] = {}
    text = json.dumps(_coded(value, arrays)).encode()
    arrays[_TEXT] = np.frombuffer(text, np.uint8)
    file = BytesIO()
    np.savez(file, allow_pickle=False, **arrays)
    return file.getvalue()


def _coded(value: Any, arrays: dict[str, NDArray[Any]]) -> Any:
    """Return a value for JSON, with a list [kind, content] for all but plain values."""
    kind, number = type(value), f"array-{len(arrays)}"
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized:
        whole = value.detach().cpu().contiguous()
        arrays[number] = whole.reshape(-1).view(torch.uint8).numpy()  # NumPy has no bfloat16
        dtype = str(value.dtype).removeprefix("torch.")
        return ["tensor", [number, dtype, list(value.shape), value.is_cpu]]
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject:
        arrays[number] = np.asarray(value)
        return ["array" if isinstance(value, np.ndarray) else "number", number]
    if kind in (list, tuple):
        return [kind.__name__, [_coded(each, arrays) for each in value]]
    if kind is dict:
        return ["dict", [[_coded(part, arrays) for part in item] for item in value.items()]]
    raise VflError(
        f"has a get_extra_state with a {kind.__name__}, which is not saved. Return numbers, texts, "
        "tensors, arrays, or lists, tuples and dictionaries of them."
    )


def _decode(content: bytes, device: torch.device) -> Any:
    with np.load(BytesIO(content), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}

    def decoded(coded: Any) -> Any:
        if not isinstance(coded, list):
            return coded
        kind, held = coded
        if kind == "tensor":
            number, dtype, shape, on_cpu = held
            value = torch.empty(shape, dtype=getattr(torch, dtype))  # `view` refuses an empty one
            value.reshape(-1).view(torch.uint8).copy_(torch.from_numpy(arrays[number]))
            return value if on_cpu else value.to(device)
        if kind in ("array", "number"):
            return arrays[held] if kind == "array" else arrays[held][()]
        if kind == "dict":
            return {decoded(key): decoded(each) for key, each in held}
        parts = [decoded(each) for each in held]
        return tuple(parts) if kind == "tuple" else parts

    return decoded(json.loads(arrays[_TEXT].tobytes()))
