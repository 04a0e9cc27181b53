"""Optimizer steps, devices, and parameters as named arrays."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.provenance import free_memory
from vfl_flower.config.run_config import RunConfig

# Arrays of messages are read-only, and so are the tensors over them: nothing writes to those.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def step_along(
    optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], step: int = 0
) -> None:
    """Take one optimizer step along these gradients; plain SGD without torch's overhead.

    Parameters
    ----------
    step : its number, from 0, by which a schedule gives its rate.
    """
    group = optimizer.param_groups[0]
    if not group["rates"].constant:
        group["lr"] = group["rates"].of(step)
    if group["plain"]:
        subtract(group["params"], gradients, group["lr"])
        return
    if group["clip"]:
        norm = torch.nn.utils.get_total_norm(gradients)
        kept = (group["clip"] / (norm + 1e-6)).clamp_max(1.0)  # as `clip_grad_norm_` has it
        gradients = [gradient * kept for gradient in gradients]
    for parameter, gradient in zip(group["params"], gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    for parameter in group["params"]:
        parameter.grad = None  # which gives its memory back


@torch.no_grad()
def subtract(parameters: Sequence[Tensor], gradients: Sequence[Tensor], rate: float) -> None:
    """Step along gradients at a rate, as plain SGD does."""
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.add_(gradient, alpha=-rate)


def autocast(model: nn.Module, precision: str) -> AbstractContextManager[Any]:
    """Within it a model is passed through at this precision; its parameters stay as they are."""
    parameter = next(model.parameters(), None) if precision != "float32" else None
    if parameter is None:
        return nullcontext()
    return torch.autocast(parameter.device.type, torch.bfloat16)


def in_float32(z: Tensor) -> Tensor:
    """What a layer has computed at another precision."""
    return z.float() if z.dtype == torch.bfloat16 else z


def choose_device(config: RunConfig) -> torch.device:
    """The GPU where there is one, unless the configuration says otherwise."""
    if config.running.device != "auto":
        try:
            one = torch.ones(1, device=config.running.device)
            one.item()  # which `meta` has none of
            return one.device
        except (RuntimeError, AssertionError, ImportError) as error:
            raise ConfigError(
                f"device = {config.running.device!r} is not to be had here: use cpu, cuda or auto."
            ) from error
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def check_size(numbers: float, keys: str) -> None:
    """Raise `ConfigError` if a model of so many parameters, and its gradient, cannot be had."""
    needed, free = 2 * 4 * numbers, free_memory()
    if needed > free:
        raise ConfigError(
            f"A model needs {needed / 1e9:.1f} GB, where {free / 1e9:.1f} GB are free: choose a "
            f"smaller {keys}."
        )


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def kept(model: nn.Module) -> dict[str, Tensor]:
    """What is kept of a model, by name: parameters, and the buffers of its ``state_dict``.

    But not what is frozen and can be read from files again.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters())
    frozen = [name for name, tensor in tensors.items() if not tensor.requires_grad]
    of_files = [name for name, module in model.named_modules() if _fixed(module)] if frozen else []
    within = tuple(f"{name}." if name else "" for name in of_files)
    for name in frozen:
        if name.startswith(within):
            del tensors[name]
    buffers = dict(model.named_buffers()) if getattr(model, "by_step", True) else {}
    known = model.state_dict().keys() if buffers else ()  # which layers of ours do not have
    return tensors | {name: each for name, each in buffers.items() if name in known}


def fixed(model: nn.Module) -> str:
    """Digests of the files that frozen parameters are read from; empty if there are none."""
    return " ".join(filter(None, map(_fixed, model.modules())))


def _fixed(module: nn.Module) -> str:
    found = getattr(module, "digest_of_files", "")
    return found if isinstance(found, str) else ""


_LARGE = 2**20  # parameters: 4 MB


def is_large(model: nn.Module) -> bool:
    """Whether its memory is what counts: it is not copied, and meets one mini-batch at once."""
    return count(model) > _LARGE


def kind_of(model: nn.Module) -> str:
    """A digest of what models have in common that can be loaded into each other."""
    each = {name: [str(t.dtype), *t.shape] for name, t in kept(model).items()}
    return hashlib.sha256(json.dumps(each, sort_keys=True).encode()).hexdigest()[:16]


def load_model(model: nn.Module, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Copy named arrays into a model's parameters and buffers.

    Raises
    ------
    VflError
        If they are another model's, as the end of a sentence; nothing is copied then.
    """
    tensors = kept(model)
    for name in [*tensors, *arrays]:
        here = tuple(tensors[name].shape) if name in tensors else "nothing"
        there = arrays[name].shape if name in arrays else "nothing"
        if here != there:
            raise VflError(
                f"differs from the model that was kept, which has {there} for {name!r}, where it "
                f"has {here}: give it the class and the arguments of then."
            )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(torch.from_numpy(arrays[name]))


def count(model: nn.Module) -> int:
    """Numbers that a model is made of."""
    return sum(p.numel() for p in model.parameters())


def flat(model: nn.Module) -> Tensor:
    """A model's parameters as one vector, where they are."""
    parts = [p.detach().reshape(-1) for p in model.parameters()]
    return torch.cat(parts) if parts else torch.zeros(0)


def load_flat(model: nn.Module, vector: Tensor) -> None:
    """Copy such a vector into a model's parameters."""
    parameters = list(model.parameters())
    with torch.no_grad():
        for p, part in zip(parameters, vector.split([p.numel() for p in parameters]), strict=True):
            p.copy_(part.view_as(p))


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """What is `kept` of a model, by name, which shares its memory."""
    return {name: tensor.detach() for name, tensor in kept(model).items()}


def model_arrays(model: nn.Module) -> dict[str, NDArray[Any]]:
    """The same as named arrays, which share its memory where it is on the CPU."""
    return {name: tensor.cpu().numpy() for name, tensor in model_tensors(model).items()}


def optimizer_arrays(optimizer: torch.optim.Optimizer) -> dict[str, NDArray[Any]]:
    """The state of a torch optimizer as named arrays, as `optimizer_tensors`."""
    return {name: tensor.cpu().numpy() for name, tensor in optimizer_tensors(optimizer).items()}


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The state of a torch optimizer, named as "parameter number.name", which shares its memory."""
    parameters = optimizer.param_groups[0]["params"]
    return {
        f"{number}.{name}": value
        for number, parameter in enumerate(parameters)
        for name, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def load_optimizer(optimizer: torch.optim.Optimizer, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Take over the state that `optimizer_arrays` gave."""
    optimizer.state.clear()
    parameters = optimizer.param_groups[0]["params"]
    for key, array in arrays.items():
        number, name = key.split(".", 1)
        parameter = parameters[int(number)]
        device = "cpu" if array.ndim == 0 else parameter.device  # torch keeps step counts there
        optimizer.state[parameter][name] = torch.from_numpy(array).clone().to(device)
