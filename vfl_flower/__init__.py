"""Vertical federated learning on Flower: `train`, `load` and `Model` from Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vfl_flower.api import Model, load, train

__all__ = ["Model", "load", "train"]


def __getattr__(name: str) -> Any:
    """Load what is asked for: processes of this package that need no torch start often."""
    if name not in __all__:
        raise AttributeError(f"module 'vfl_flower' has no attribute {name!r}")
    from vfl_flower import api

    return getattr(api, name)
