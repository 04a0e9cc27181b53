"""Vertical federated learning on Flower.

From Python: `train`, `load` and `Model`; the scikit-learn estimators `VerticalClassifier` and
`VerticalRegressor`; and what `vfl run` and `vfl predict` call: `run_local`, `run_ray`,
`run_supernodes` and `predict_local`.
"""

from __future__ import annotations

import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vfl_flower.api.model import Model, load
    from vfl_flower.api.scikit import VerticalClassifier, VerticalRegressor
    from vfl_flower.api.training import train
    from vfl_flower.launch.engines import predict_local, run_local, run_ray, run_supernodes

# Threads of torch that wait for work take a core each. Beside other processes, a run took eight
# times as long. OpenMP reads this once, so it must be set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

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


def _check_strategies() -> None:
    """Raise `ImportError` if Python finds another `strategies` than the one beside this package."""
    ours = Path(__file__).resolve().parents[1] / "strategies" / "__init__.py"
    found = find_spec("strategies")
    where = found.origin if found else None
    if where is None or Path(where).resolve() != ours:
        raise ImportError(
            f"vfl_flower needs its own package 'strategies', but Python finds {where} instead of "
            f"{ours}. Rename the other file or folder, or install vfl-flower again."
        )


_check_strategies()


def __getattr__(name: str) -> Any:
    """Import a public name when it is used: many processes of this package need no torch."""
    if name not in _HOME:
        raise AttributeError(f"module 'vfl_flower' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
