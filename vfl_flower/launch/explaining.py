"""Explain a model in this process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flwr.clientapp import ClientApp

from vfl_flower import client_app
from vfl_flower.launch.engines import use_in_process, with_model
from vfl_flower.tasks.inference.explanation import FILE


def explain_local(
    run_config: Mapping[str, Any],
    node_configs: Sequence[Mapping[str, Any]] = (),
    client: ClientApp = client_app.app,
) -> dict[str, Any]:
    """Explain the model of a run on this machine, and return the content of `FILE`.

    Parameters
    ----------
    run_config : options, with ``model``, the results folder of the run. `FILE` is written there,
        or into the folder ``out``.
    node_configs : node configuration of each party, such as its file.

    Raises
    ------
    ConfigError
        If the run, its parties' states or their files do not fit.

    Examples
    --------
    >>> import tempfile
    >>> import vfl_flower
    >>> folder = tempfile.mkdtemp()
    >>> _ = vfl_flower.run_local(3, {"dataset": "breast-cancer", "epochs": 2, "out": folder})
    >>> explain_local({"model": folder})["metric"]
    'auc'
    """
    run_config = {**run_config, "task": "explain"}
    config, parties, node_configs = with_model(run_config, node_configs)
    use_in_process(run_config, config, parties, node_configs, client)
    out = Path(config.running.out or config.model).expanduser()
    figures: dict[str, Any] = json.loads((out / FILE).read_text())
    return figures
