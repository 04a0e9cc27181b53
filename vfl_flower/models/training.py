"""Optimizer steps, devices, and parameters as named arrays."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from vfl_flower.config import RunConfig
from vfl_flower.errors import ConfigError
from vfl_flower.provenance import free_memory

# Arrays of messages are read-only, and so are the tensors over them: nothing writes to those.
warnings.filterwarnings("ignore", message="The given NumPy array is not writable")


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that learn, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def kept(model: nn.Module) -> dict[str, Tensor]:
    """What states hold of a model, by name: not what is frozen and can be read from files again."""
    named: dict[str, Tensor] = dict(model.named_parameters())
    frozen = [name for name, p in named.items() if not p.requires_grad]
    of_files = [name for name, module in model.named_modules() if _fixed(module)] if frozen else []
    within = tuple(f"{name}." if name else "" for name in of_files)
    for name in frozen:
        if name.startswith(within):
            del named[name]
    return named


def fixed(model: nn.Module) -> str:
    """Digests of the files that frozen parameters are read from; empty if there are none."""
    return " ".join(filter(None, map(_fixed, model.modules())))


def _fixed(module: nn.Module) -> str:
    return str(getattr(module, "fixed", ""))


_LARGE = 2**20  # parameters: 4 MB


def is_large(model: nn.Module) -> bool:
    """Whether its memory is what counts: it is not copied, and meets one mini-batch at once."""
    return count(model) > _LARGE


def is_plain_sgd(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its steps are linear in the gradients, so that several can be taken as one."""
    return isinstance(optimizer, torch.optim.SGD) and optimizer.param_groups[0]["momentum"] == 0


def step_along(optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor]) -> None:
    """One optimizer step along these gradients; plain SGD without torch's overhead."""
    group = optimizer.param_groups[0]
    if is_plain_sgd(optimizer):
        with torch.no_grad():
            for parameter, gradient in zip(group["params"], gradients, strict=True):
                parameter.add_(gradient, alpha=-group["lr"])
        return
    for parameter, gradient in zip(group["params"], gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()
    forget_gradients(group["params"])


def forget_gradients(parameters: Sequence[Tensor]) -> None:
    """Give their memory back."""
    for parameter in parameters:
        parameter.grad = None


def build_optimizer(config: RunConfig, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """The configured torch optimizer."""
    parameters = list(trained(model).values())
    if config.training.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=lr)
    momentum = 0.9 if config.training.optimizer == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def choose_device(config: RunConfig) -> torch.device:
    """The GPU where there is one, unless the configuration says otherwise."""
    if config.running.device != "auto":
        try:
            one = torch.ones(1, device=config.running.device)
            one.item()  # which `meta` has none of
            return one.device
        except (RuntimeError, AssertionError, ImportError) as error:
            raise ConfigError(
                f"device = {config.running.device!r} is not to be had here."
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


def load_model(model: nn.Module, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Copy named arrays into a model's parameters."""
    with torch.no_grad():
        for name, tensor in kept(model).items():
            tensor.copy_(as_tensor(arrays[name]))


def count(model: nn.Module) -> int:
    """Numbers that a model is made of."""
    return sum(p.numel() for p in model.parameters())


def flat(model: nn.Module) -> Tensor:
    """A model's parameters as one vector."""
    return torch.cat([torch.zeros(0), *(p.detach().cpu().reshape(-1) for p in model.parameters())])


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
        optimizer.state[parameter][name] = as_tensor(array).clone().to(device)


def as_tensor(array: NDArray[Any]) -> Tensor:
    """A tensor over an array that may be read-only, for reading only."""
    return torch.from_numpy(array)
