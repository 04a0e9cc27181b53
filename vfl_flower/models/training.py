"""Optimizer steps, devices, and what is saved of a model: parameters and states as named arrays."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from io import BytesIO
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.provenance import free_memory
from vfl_flower.config.run_config import RunConfig

# Arrays of messages are read-only, and nothing writes to the tensors that share their memory.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def step_along(
    optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], step: int = 0
) -> None:
    """Take step number ``step`` along these gradients; plain SGD skips torch's overhead."""
    group = optimizer.param_groups[0]
    if not group["rates"].constant:
        group["lr"] = group["rates"].of(step)
    if group["plain"]:
        subtract(group["params"], gradients, group["lr"])
        return
    if group["clip"]:
        norm = torch.nn.utils.get_total_norm(gradients)
        kept = (group["clip"] / (norm + 1e-6)).clamp_max(1.0)  # same as `clip_grad_norm_`
        gradients = [gradient * kept for gradient in gradients]
    for parameter, gradient in zip(group["params"], gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    for parameter in group["params"]:
        parameter.grad = None  # frees its memory


@torch.no_grad()
def subtract(parameters: Sequence[Tensor], gradients: Sequence[Tensor], rate: float) -> None:
    """Take one step of plain SGD at this rate."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.add_(gradient, alpha=-rate)


def autocast(model: nn.Module, precision: str) -> AbstractContextManager[Any]:
    """Run a model's passes at this precision; its parameters keep theirs."""
    parameter = next(model.parameters(), None) if precision != "float32" else None
    if parameter is None:
        return nullcontext()
    return torch.autocast(parameter.device.type, torch.bfloat16)


def in_float32(z: Tensor) -> Tensor:
    """Convert a layer's output from bfloat16 to float32."""
    return z.float() if z.dtype == torch.bfloat16 else z


def choose_device(config: RunConfig) -> torch.device:
    """Return the configured device; auto is the GPU, or the CPU if there is none."""
    if config.running.device != "auto":
        try:
            one = torch.ones(1, device=config.running.device)
            one.item()  # the device `meta` has no values
            return one.device
        except (RuntimeError, AssertionError, ImportError) as error:
            raise ConfigError(
                f"device = {config.running.device!r} is not available here. Use cpu, or auto."
            ) from error
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_size(numbers: float, keys: str) -> None:
    """Refuse so many parameters that they and their gradients exceed the free memory."""
    needed, free = 2 * 4 * numbers, free_memory()
    if needed > free:
        raise ConfigError(
            f"A model needs {needed / 1e9:.1f} GB, but {free / 1e9:.1f} GB are free. Choose a "
            f"smaller {keys}."
        )


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that learn, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def kept(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of a model to save: parameters, buffers, and extra states as bytes.

    Leave out frozen parameters that can be read from files again. Errors lack their subject.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    frozen = [name for name, tensor in tensors.items() if not tensor.requires_grad]
    of_files = [name for name, module in model.named_modules() if _fixed(module)] if frozen else []
    within = tuple(f"{name}." if name else "" for name in of_files)
    for name in frozen:
        if name.startswith(within):
            del tensors[name]
    if not getattr(model, "by_step", True):
        return tensors
    buffers = dict(model.named_buffers())
    names, known = _known.get(model, ((), frozenset()))
    if names != tuple(buffers):
        names, known = tuple(buffers), frozenset(model.state_dict())
        _known[model] = names, known
    tensors |= {name: each for name, each in buffers.items() if name in known}
    for name, each in tensors.items():
        if each.dtype not in _SAVED or each.layout is not torch.strided:
            kind = each.dtype if each.layout is torch.strided else each.layout
            raise VflError(f"has a tensor {name!r} of {kind}, which is not saved. Use float32.")
    return tensors | extra_states(model)


_known: WeakKeyDictionary[nn.Module, tuple[tuple[str, ...], frozenset[str]]] = WeakKeyDictionary()
"""Model -> names of its buffers, and of its ``state_dict``, which takes long to ask."""

_SAVED = {
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.float32, torch.float64),
}
"""Types of tensors that messages and states can hold."""


def fixed(model: nn.Module) -> str:
    """Return digests of the files with frozen parameters; empty if there are none."""
    return " ".join(filter(None, map(_fixed, model.modules())))


def _fixed(module: nn.Module) -> str:
    found = getattr(module, "digest_of_files", "")
    return found if isinstance(found, str) else ""


_LARGE = 2**20  # parameters: 4 MB


def is_large(model: nn.Module) -> bool:
    """Return whether a model is too large to copy, or to run on many mini-batches."""
    return count(model) > _LARGE


def kind_of(model: nn.Module) -> str:
    """Return a digest that is equal for models with the same names, dtypes and shapes."""
    tensors = {name: each for name, each in kept(model).items() if not is_extra(name)}
    each = {name: [str(t.dtype), *t.shape] for name, t in tensors.items()}
    return hashlib.sha256(json.dumps(each, sort_keys=True).encode()).hexdigest()[:16]


def load_model(model: nn.Module, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Copy named arrays into a model's parameters, buffers and extra states, or none of them."""
    tensors = kept(model)
    for name in [*tensors, *arrays]:
        if name in tensors and name in arrays and is_extra(name):
            continue  # its bytes change in number
        here = tuple(tensors[name].shape) if name in tensors else "nothing"
        there = arrays[name].shape if name in arrays else "nothing"
        if here != there:
            raise VflError(
                f"differs from the saved model: {name!r} has {here}, but {there} in the saved "
                "model. Use the class and the arguments of the earlier run."
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            if not is_extra(name):
                tensor.copy_(torch.from_numpy(arrays[name]))
    load_extra_states(model, arrays)


def count(model: nn.Module) -> int:
    """Return the number of a model's parameters."""
    return sum(p.numel() for p in model.parameters())


def flat(model: nn.Module) -> Tensor:
    """Return a model's parameters as one vector, on their device."""
    parts = [p.detach().reshape(-1) for p in model.parameters()]
    return torch.cat(parts) if parts else torch.zeros(0)


def load_flat(model: nn.Module, vector: Tensor) -> None:
    """Copy a vector of `flat` into a model's parameters."""
    parameters = list(model.parameters())
    with torch.no_grad():
        for p, part in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
            p.copy_(part.view_as(p))


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of `kept`, detached; they share the model's memory."""
    return {name: tensor.detach() for name, tensor in kept(model).items()}


def arrays_of(tensors: Mapping[str, Tensor]) -> dict[str, NDArray[Any]]:
    """Return tensors as arrays; they share the memory of tensors on the CPU."""
    return {name: tensor.cpu().numpy() for name, tensor in tensors.items()}


def model_arrays(model: nn.Module) -> dict[str, NDArray[Any]]:
    """Return `model_tensors` as arrays; they share the memory of a model on the CPU."""
    return arrays_of(model_tensors(model))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of a torch optimizer by "parameter number.name", in shared memory."""
    parameters = optimizer.param_groups[0]["params"]
    return {
        f"{number}.{name}": value
        for number, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def load_optimizer(optimizer: torch.optim.Optimizer, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Load the state that `optimizer_tensors` returned, as arrays."""
    optimizer.state.clear()
    parameters = optimizer.param_groups[0]["params"]
    for key, array in arrays.items():
        number, name = key.split(".", 1)
        parameter = parameters[int(number)]
        device = "cpu" if array.ndim == 0 else parameter.device  # torch keeps step counts on CPU
        optimizer.state[parameter][name] = torch.from_numpy(array).clone().to(device)


# --- extra states ---------------------------------------------------------------------------------

# An extra state is what a module of your own adds to its ``state_dict`` by ``get_extra_state``. It
# is kept as one array of bytes, in NumPy's npz format: a JSON text, and the tensors and arrays that
# the text numbers. Nothing is pickled or unpickled.

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


def load_extra_states(model: nn.Module, states: Mapping[str, Tensor | NDArray[Any]]) -> None:
    """Restore extra states by ``set_extra_state``."""
    parameter = next(model.parameters(), None)
    device = torch.device("cpu") if parameter is None else parameter.device
    for name, each in _with_extra_state(model):
        if name in states:
            each.set_extra_state(_decode(np.asarray(states[name]).tobytes(), device))


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
