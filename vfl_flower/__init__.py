"""Vertical federated learning on Flower.

From Python: `train`, `load` and `Model`; the scikit-learn estimators `VerticalClassifier` and
`VerticalRegressor`; and what `vfl run` and `vfl predict` call: `run_local`, `run_ray`,
`run_supernodes` and `predict_local`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vfl_flower.api.model import Model, load
    from vfl_flower.api.scikit import VerticalClassifier, VerticalRegressor
    from vfl_flower.api.training import train
    from vfl_flower.launch.engines import predict_local, run_local, run_ray, run_supernodes

_HOME = {
    **dict.fromkeys(("Model", "load"), "vfl_flower.api.model"),
    "train": "vfl_flower.api.training",
    **dict.fromkeys(("VerticalClassifier", "VerticalRegressor"), "vfl_flower.api.scikit"),
    **dict.fromkeys(
        ("predict_local", "run_local", "run_ray", "run_supernodes"), "vfl_flower.launch.engines"
    ),
}

__all__ = [
    "Model",
    "VerticalClassifier",
    "VerticalRegressor",
    "load",
    "predict_local",
    "run_local",
    "run_ray",
    "run_supernodes",
    "train",
]


def __getattr__(name: str) -> Any:
    """Import a public name when it is used: many processes of this package need no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'vfl_flower' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
