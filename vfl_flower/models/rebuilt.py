"""Compare a model of your own with a copy that is rebuilt from what is saved.

Messages, resumed runs and predictions rebuild a module from its ``state_dict``. A module that keeps
more, such as a counter, would predict otherwise than it was tested. `try_out` finds that before
training, and `check` at each evaluation.
"""

import inspect
import sys
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vfl_flower.config import plugins
from vfl_flower.config.errors import CodeError, ConfigError, VflError
from vfl_flower.config.logs import log
from vfl_flower.data import samples
from vfl_flower.data.samples import Samples
from vfl_flower.models import passes
from vfl_flower.models.pretrained import Pretrained
from vfl_flower.models.training import is_extra, kept, load_model, model_arrays, trained

ROWS = 32  # number of rows to compare

_ROUNDED = 0.01
"""Largest difference that rounding in bfloat16 makes, as a share of the largest output."""

Build = Callable[[], nn.Module]


def try_out(said: str, model: nn.Module, build: Build, rows: Samples) -> None:
    """Train a new model for two steps on these rows, and compare it with a rebuilt copy."""
    before = trained(model)
    try:
        for step in range(2):
            with torch.enable_grad(), _uncompiled():
                outputs = passes.one(model, rows, step, key=b"try out")
            with suppress(Exception):  # a zeroth-order system makes no backward pass
                outputs.sum().backward()
            with torch.no_grad():
                for p in before.values():
                    p.mul_(0.9).add_(0.01)  # as if it had learned
                    p.grad = None
    except Exception as error:  # training will end with the same error
        log.debug("A training pass has failed before training: %s", type(error).__name__)
        return
    after = trained(model)
    for name in before | after:
        if before.get(name) is not after.get(name):
            raise ConfigError(
                f"{said} replaces its parameter {_short(name)!r} in forward, so it would not "
                "learn. Change its values in place."
            )
    try:
        check(said, model, build, rows)
    except CodeError:
        raise
    except VflError as error:
        raise ConfigError(str(error)) from None


def check(said: str, model: nn.Module, build: Build, rows: Samples) -> None:
    """Refuse a model unless a rebuilt copy gives the same outputs, and each row's are its own.

    The model does not change, unless its passes in eval mode change it.
    """
    mode = model.training
    try:
        before = _saved_state(model)
        first, second = (_outputs(model, rows, number) for number in range(2))
        half = second[: len(second) // 2]
        apart = _outputs(model, samples.rows(rows, slice(len(half))), 1) if len(half) else half
        after = _saved_state(model)
    except VflError as error:
        raise VflError(f"{said} {error}") from None
    finally:
        model.train(mode)
    for name in before | after:
        both = [each[name].nan_to_num() for each in (before, after) if name in each]
        if not (len(both) == 2 and torch.equal(*both)):
            raise VflError(
                f"{said} changes {_short(name)!r} in eval mode, so outputs depend on earlier rows. "
                "Change it only where self.training is true."
            )
    if not _alike(first, second):
        raise VflError(
            f"{said} gives other outputs at a second pass over the same rows in eval mode. Draw "
            "and count only where self.training is true."
        )
    if not _alike(half, apart, _ROUNDED * float(second.nan_to_num().abs().max())):
        raise VflError(
            f"{said} gives a row other outputs in eval mode if other rows come with it. Compute "
            "each row's output from this row alone."
        )
    try:
        with plugins.read_again():
            copy = build()
        _check_shapes(said, kept(copy), kept(model))
        load_model(copy, model_arrays(model))
        found = _outputs(copy, rows, 2)
    except VflError:
        raise
    except Exception as error:
        raise CodeError(f"{said} cannot be rebuilt from what is saved", error) from error
    if not _alike(second, found):
        names = [_short(name) for name in _differences(model, copy)]
        why = f"differs in {', '.join(map(repr, names[:3]))}" if names else "gives other outputs"
        raise VflError(
            f"{said} would predict otherwise than it is tested: a copy rebuilt from its state_dict "
            f"{why}. Keep all that changes outputs by register_buffer or get_extra_state."
        )


def _check_shapes(said: str, new: dict[str, Tensor], now: dict[str, Tensor]) -> None:
    """Refuse a model whose training has changed the names or shapes of tensors."""
    for name in (each for each in new | now if not is_extra(each)):
        was, has = (str(tuple(of[name].shape)) if name in of else "none" for of in (new, now))
        if was != has:
            raise VflError(
                f"{said} changes the shape of {_short(name)!r} after it is built: {was}, then "
                f"{has}. Give it its shape in __init__, or keep it by get_extra_state."
            )


def is_own(model: nn.Module) -> bool:
    """Return whether its code is a user's: not of this project, nor of the transformers library."""
    return bool(model.by_step) and not any(isinstance(m, Pretrained) for m in model.modules())


def _saved_state(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the saved tensors that are no parameters."""
    return {k: v.clone() for k, v in kept(model).items() if not isinstance(v, nn.Parameter)}


def _outputs(model: nn.Module, rows: Samples, number: int) -> Tensor:
    """Return the outputs in eval mode, with random numbers that differ by ``number``."""
    model.eval()
    with torch.no_grad(), _uncompiled():
        return passes.one(model, rows, number, key=b"rebuilt")


def _uncompiled() -> AbstractContextManager[Any]:
    """Pass through modules of torch.compile without compiling each copy."""
    used = "torch._dynamo" in sys.modules  # its import takes long
    return torch.compiler.set_stance("force_eager") if used else nullcontext()


def _alike(first: Tensor, second: Tensor, apart: float = 1e-6) -> bool:
    return torch.allclose(first, second, rtol=1e-5, atol=max(apart, 1e-6), equal_nan=True)


def _short(name: str) -> str:
    """Return the name of an attribute as the module's author knows it."""
    return name.removeprefix("layers.0.").removeprefix("module.")


# --- what differs -------------------------------------------------------------------------------

_OF_TORCH = vars(nn.Module()).keys()
_PLAIN = bool, int, float, complex, str, bytes, set, frozenset, deque, type(None)


def _differences(model: nn.Module, copy: nn.Module) -> list[str]:
    """Return the names of values outside the state_dict that differ between two modules."""
    found: dict[str, None] = {}
    copies = dict(copy.named_modules())
    for path, module in model.named_modules():
        if path not in copies:
            found[path] = None
            continue
        here, there = (dict(_values(each)) for each in (module, copies[path]))
        for name, value in here.items():
            if name not in there or not _equal(value, there[name]):
                found[f"{path}.{name}".removeprefix(".")] = None
    return list(found)


def _values(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield attributes, other buffers, class attributes, and variables that forward reads."""
    unsaved, kind = module._non_persistent_buffers_set, type(module)
    if kind.__module__.startswith("vfl_flower.") or isinstance(module, torch.jit.ScriptModule):
        return
    yield from ((name, each) for name, each in vars(module).items() if name not in _OF_TORCH)
    yield from ((name, each) for name, each in module._buffers.items() if name in unsaved)
    if kind.__module__.startswith("torch."):
        return
    yield from ((name, each) for name, each in vars(kind).items() if not name.startswith("__"))
    forward = getattr(kind, "forward", None)
    if isinstance(forward, FunctionType):
        for name, each in inspect.getclosurevars(forward).nonlocals.items():
            yield f"closure {name}", each
        for name, each in inspect.getclosurevars(forward).globals.items():
            yield f"global {name}", each


def _equal(first: Any, second: Any, depth: int = 3) -> bool:
    """Return whether two values are alike, as far as that can be seen."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return first.shape == second.shape and bool(torch.equal(first, second))
    if isinstance(first, np.ndarray) and isinstance(second, np.ndarray):
        return np.array_equal(first, second)
    if isinstance(first, nn.Module) and isinstance(second, nn.Module):
        return _equal(first.state_dict(), second.state_dict())
    if not depth or isinstance(first, ModuleType) or callable(first):
        return True
    if type(first).__qualname__ != type(second).__qualname__:  # classes of a second module differ
        return False
    if isinstance(first, dict) and isinstance(second, dict):
        return first.keys() == second.keys() and all(
            _equal(each, second[name], depth - 1) for name, each in first.items()
        )
    if isinstance(first, list | tuple) and isinstance(second, list | tuple):
        pairs = zip(first, second, strict=False)
        return len(first) == len(second) and all(_equal(*pair, depth - 1) for pair in pairs)
    named = getattr(first, "__dict__", None)
    if named is not None and not isinstance(first, _PLAIN):
        return _equal(named, vars(second), depth - 1)
    return not isinstance(first, _PLAIN) or bool(first == second)
