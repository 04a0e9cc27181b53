"""Start a whole run from Python: in this process, on Flower's Ray simulation, or on SuperNodes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp
from tqdm.auto import tqdm

import strategies
from vfl_flower import client_app, server_app
from vfl_flower.data import load_labels
from vfl_flower.errors import ConfigError, VflError
from vfl_flower.flower_processes import SuperLink
from vfl_flower.local_grid import LocalGrid
from vfl_flower.records import load_arrays
from vfl_flower.results import results_folder


@dataclass(frozen=True)
class Run:
    """What a finished run left in its results folder."""

    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``."""
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary

    @property
    def history(self) -> list[dict[str, Any]]:
        """The entries of ``history.jsonl``, one for each evaluation."""
        lines = (self.folder / "history.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def parameters(self, name: str) -> dict[str, Any]:
        """The parameters of a saved model: "top", or "party-0" and so on (in-process runs)."""
        with np.load(self.folder / f"{name}.npz", allow_pickle=False) as file:
            return dict(file)


def run_local(
    parties: int, run_config: Mapping[str, Any], client: ClientApp = client_app.app
) -> Run:
    """Run the application in this process, on a `LocalGrid` with so many parties.

    Besides what every run leaves, the parties' bottom models are saved, which on real nodes
    nobody but the party sees.

    Raises
    ------
    ConfigError, PartyError
        As the strategy's ``start``; what was trained so far is saved.
    """
    config, run_config = _prepare(parties, run_config)
    grid = LocalGrid(client, parties, run_config, config)
    context = Context(
        run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config=dict(run_config)
    )
    finished = Run(Path(run_config["out"]))
    try:
        server_app.app(grid, context)
    finally:
        trained = strategies.SYSTEMS[config.strategy].trains_parties
        for party, node in enumerate(grid.contexts.values()):
            if trained and "model" in node.state:
                model: dict[str, Any] = load_arrays(node.state, "model")
                np.savez(finished.folder / f"party-{party}.npz", **model)
    return finished


def run_ray(parties: int, run_config: Mapping[str, Any]) -> Run:
    """Run the application on Flower's Ray simulation, by `flwr run` and a SuperLink of its own."""
    config, run_config = _prepare(parties, run_config)
    with SuperLink(simulation=True) as superlink:
        return _run_on(superlink, parties, config.epochs, run_config)


def run_supernodes(parties: int, run_config: Mapping[str, Any]) -> Run:
    """Run the application on real SuperNodes, which like their SuperLink end with the run."""
    config, run_config = _prepare(parties, run_config)
    with ExitStack() as stack:
        superlink = stack.enter_context(SuperLink(simulation=False))
        for party in range(parties):
            stack.enter_context(superlink.supernode(party, parties))
        return _run_on(superlink, parties, config.epochs, run_config)


ENGINES: dict[str, Callable[[int, Mapping[str, Any]], Run]] = {
    "local": run_local,
    "ray": run_ray,
    "supernodes": run_supernodes,
}


def _prepare(parties: int, run_config: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Find what is wrong before anything starts; name the results folder."""
    if parties < 1:
        raise ConfigError(f"{parties} parties cannot train: name at least one.")
    config = strategies.resolve(run_config)
    if config.parties not in (0, parties):
        raise ConfigError(
            f"parties = {config.parties} in the run configuration contradicts the {parties} that "
            "are to run: leave it out."
        )
    load_labels(config)
    return config, {**run_config, "out": str(results_folder(config))}


def _run_on(superlink: SuperLink, parties: int, epochs: int, run_config: dict[str, Any]) -> Run:
    finished = Run(Path(run_config["out"]))
    finished.folder.mkdir(parents=True, exist_ok=True)
    log = finished.folder / "flower.log"
    with tqdm(total=epochs, unit="epoch", disable=None, leave=False) as bar:
        process = superlink.submit(run_config, parties, log)
        while process.poll() is None:
            time.sleep(0.2)
            if (finished.folder / "history.jsonl").exists() and finished.history:
                bar.update(finished.history[-1]["epoch"] - bar.n)
    if not (finished.folder / "summary.json").exists():
        raise VflError(f"Flower ended the run before it began; its log {log} says why.")
    if finished.summary["failure"]:
        raise VflError(finished.summary["failure"])
    return finished
