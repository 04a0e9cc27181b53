"""Start a whole run from Python: in this process, on Flower's Ray simulation, or on SuperNodes."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, RecordDict
from flwr.clientapp import ClientApp

from vfl_flower import client_app, server_app
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.logs import notice
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.partitioned import check_parties
from vfl_flower.label_holder import checkpoint, earlier_run, results
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.label_holder.results import in_use, results_folder
from vfl_flower.launch.own_states import bring_states, load_states, save_models
from vfl_flower.launch.processes import SuperLink, ray_cluster, ray_cpus
from vfl_flower.launch.submission import from_anywhere, of_node_from_anywhere, run_on
from vfl_flower.party import session
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.systems import resolve, sized
from vfl_flower.tasks.inference.explanation import FILE
from vfl_flower.tasks.inference.party import model as models
from vfl_flower.tasks.inference.predictions import predictions_file
from vfl_flower.tasks.inference.rows import available_parties
from vfl_flower.transport.local import LocalGrid


@dataclass(frozen=True)
class Finished:
    """The results folder of a finished run."""

    folder: Path

    @property
    def summary(self) -> dict[str, Any]:
        """The content of ``summary.json``."""
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def history(self) -> list[dict[str, Any]]:
        """The entries of ``history.jsonl``, one for each evaluation."""
        return [*map(json.loads, (self.folder / "history.jsonl").read_text().splitlines())]

    def parameters(self, name: str) -> dict[str, Any]:
        """Return the parameters of a saved model: "top"; in process also "party-0", ..."""
        with np.load(self.folder / f"{name}.npz", allow_pickle=False) as file:
            return dict(file)


Engine = Callable[..., Finished]
"""Takes the number of parties, the run configuration and the parties' node configurations."""


def run_local(
    parties: int,
    run_config: Mapping[str, Any],
    client: ClientApp = client_app.app,
    node_configs: Sequence[Mapping[str, Any]] = (),
    observers: Sequence[Callback] = (),
) -> Finished:
    """Run the application in this process, on a `LocalGrid` of parties.

    The results folder also gets the parties' bottom models and states. On real nodes, only the
    party sees them.

    Parameters
    ----------
    node_configs : of each party, such as its file; empty if a data set is divided.
    observers : callbacks of this run, besides the one that option ``observer`` names.

    Raises
    ------
    ConfigError, PartyError
        As the strategy's ``start``. The models so far are saved.

    Examples
    --------
    >>> import tempfile
    >>> import vfl_flower
    >>> options = {"dataset": "breast-cancer", "epochs": 2, "out": tempfile.mkdtemp()}
    >>> finished = vfl_flower.run_local(3, options)
    >>> finished.summary["schedule"]
    'sync'
    """
    config, run_config = prepare(parties, run_config, node_configs)
    finished = Finished(Path(run_config["out"]))
    bring_states(config, finished.folder)
    with in_process(parties, run_config, config, node_configs, finished.folder, client) as grid:
        if config.running.resume:
            load_states(grid, checkpoint.load(finished.folder))
        try:
            server_app.serve(grid, of_server(run_config, grid.run_id), observers)
        except BaseException:
            with suppress(VflError):  # of a full disk; the error that ended the run is raised
                save_models(grid, config, finished.folder)
            raise
        save_models(grid, config, finished.folder)
    return finished


def run_ray(
    parties: int,
    run_config: Mapping[str, Any],
    node_configs: Sequence[Mapping[str, Any]] = (),
    actors: int = 0,
) -> Finished:
    """Run the application on Flower's Ray simulation, with a new SuperLink.

    Parameters
    ----------
    actors : number of Ray actors that the parties share. By default, each party has one if there
        are at most two parties per CPU; otherwise, each CPU has one. On a cluster that RAY_ADDRESS
        names, each CPU has one, or each party if there are fewer parties.

    Examples
    --------
    >>> import tempfile
    >>> import vfl_flower
    >>> options = {"dataset": "breast-cancer", "epochs": 2, "out": tempfile.mkdtemp()}
    >>> vfl_flower.run_ray(2, options).summary["engine"]
    'ray'
    """
    if node_configs:
        raise ConfigError(
            "Flower gives the parties of a Ray simulation no node configuration: run parties that "
            "have files in process, or with --engine supernodes."
        )
    config, run_config = prepare(parties, from_anywhere(run_config), ())
    cpus = ray_cpus()
    several = 1 if ray_cluster() else 2  # actors per CPU, at most
    nodes = min(parties, actors or (parties if parties <= several * cpus else cpus))
    if nodes < parties:
        run_config["parties"] = parties
    with _submitting(run_config), SuperLink(True, Path(run_config["out"])) as superlink:
        bring_states(config, Path(run_config["out"]))
        return Finished(run_on(superlink, nodes, run_config))


def run_supernodes(
    parties: int, run_config: Mapping[str, Any], node_configs: Sequence[Mapping[str, Any]] = ()
) -> Finished:
    """Run the application on real SuperNodes and a SuperLink, which end with the run.

    Parameters
    ----------
    node_configs : of each party, such as its file and its rules; empty if a data set is divided.

    Examples
    --------
    >>> import tempfile
    >>> import vfl_flower
    >>> options = {"dataset": "breast-cancer", "epochs": 2, "out": tempfile.mkdtemp()}
    >>> vfl_flower.run_supernodes(2, options).summary["engine"]
    'supernodes'
    """
    node_configs = [of_node_from_anywhere(each) for each in node_configs]
    config, run_config = prepare(parties, from_anywhere(run_config), node_configs)
    data, permitted = config.data, {**aggregation_of(config).permissions()}
    if config.privacy.noise_seed >= 0:  # all parties belong to the caller
        permitted["noise-seed"] = config.privacy.noise_seed
    if data.own_data:  # the caller may fix the method for all parties
        permitted["align"] = "ids" if data.align == "ids" else "psi"
    elif ":" in data.dataset:
        permitted["dataset"] = data.dataset
        permitted |= {"tokenizer": data.tokenizer} if data.tokenizer else {}
    with ExitStack() as stack:
        stack.enter_context(_submitting(run_config))
        bring_states(config, Path(run_config["out"]))
        superlink = stack.enter_context(SuperLink(simulation=False))
        for party, own in enumerate(node_configs or [{}] * parties):
            stack.enter_context(superlink.supernode(party, parties, {**permitted, **own}))
        return Finished(run_on(superlink, parties, run_config))


def predict_local(
    run_config: Mapping[str, Any],
    node_configs: Sequence[Mapping[str, Any]] = (),
    client: ClientApp | None = None,
) -> Path:
    """Predict in this process, with the model of a run in process or on this machine.

    Returns
    -------
    Path
        The file of predictions.

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
    >>> vfl_flower.predict_local({"model": folder}).name
    'predictions.csv'
    """
    return Path(used("predict", run_config, node_configs, client).running.out)


def explain_local(
    run_config: Mapping[str, Any],
    node_configs: Sequence[Mapping[str, Any]] = (),
    client: ClientApp | None = None,
) -> dict[str, Any]:
    """Explain the ``model`` of a run on this machine, and return the content of `FILE`."""
    config = used("explain", run_config, node_configs, client)
    out = Path(config.running.out or config.model).expanduser()
    return json.loads((out / FILE).read_text())


def distil_local(
    run_config: Mapping[str, Any], node_configs: Sequence[Mapping[str, Any]] = ()
) -> Finished:
    """Distil the ``model`` of a run on this machine into one that needs no party."""
    return Finished(results.distilled_folder(used("distil", run_config, node_configs)))


def used(
    task: str,
    run_config: Mapping[str, Any],
    node_configs: Sequence[Mapping[str, Any]],
    client: ClientApp | None = None,
) -> RunConfig:
    """Do a task in this process, with the ``model`` of a run and the states in its folder."""
    config, parties, node_configs = with_model({**run_config, "task": task}, node_configs)
    if task == "predict":
        config = config.with_values({"out": str(predictions_file(config))})
    run_config = {**run_config, "task": task, "out": config.running.out}
    folder = Path(config.model).expanduser().absolute()
    app = client or client_app.app
    with in_process(parties, run_config, config, node_configs, folder, app) as grid:
        server_app.app(grid, of_server(run_config, grid.run_id))
    return config


def with_model(
    run_config: Mapping[str, Any], node_configs: Sequence[Mapping[str, Any]]
) -> tuple[RunConfig, int, Sequence[Mapping[str, Any]]]:
    """Return the configuration, the parties of its ``model``, and a node configuration of each."""
    config = resolve(run_config)
    found = checkpoint.load(config.model)
    parties = found.parties
    if not found.finished and config.task == "serve":
        raise ConfigError(
            f"The run in {config.model} is unfinished. Resume it first, by resume='{config.model}'."
        )
    if not found.finished:
        epochs = found.config.training.epochs  # None: the sides chose them
        notice.warning(
            "The run in %s is unfinished: its model after %.3g%s epochs is used. Set "
            "resume='%s' to run it to its end.",
            *(config.model, found.epoch, f" of {epochs}" if epochs else "", config.model),
        )
    left = there.without if (there := available_parties(config, found)) else frozenset()
    if len(node_configs) == parties - len(left):  # of the available parties
        given = iter(node_configs)
        node_configs = [{} if party in left else next(given) for party in range(parties)]
    check_files(found.config, parties, node_configs)
    return config, parties, node_configs


@contextmanager
def in_process(
    parties: int,
    run_config: Mapping[str, Any],
    config: RunConfig,
    node_configs: Sequence[Mapping[str, Any]],
    states: Path,
    client: ClientApp,
) -> Iterator[LocalGrid]:
    """Yield a grid whose parties keep their states in this folder, and forget them at the end."""
    own = [{"states": str(states), **each} for each in node_configs or [{}] * parties]
    grid = LocalGrid(client, parties, run_config, config, own)
    try:
        yield grid
    finally:
        session.forget(grid.run_id)
        models.forget(grid.run_id)
        grid.forget()


def of_server(run_config: Mapping[str, Any], run_id: int) -> Context:
    """Return the ServerApp's Context."""
    return Context(run_id, 1, {}, RecordDict(), dict(run_config))


def prepare(
    parties: int, run_config: Mapping[str, Any], node_configs: Sequence[Mapping[str, Any]]
) -> tuple[RunConfig, dict[str, Any]]:
    """Check a run before it starts; return its configuration and options."""
    if parties < 1:
        raise ConfigError(f"{parties} parties cannot train: name at least one.")
    config = earlier_run.configured(run_config)
    if config.running.resume:
        then = checkpoint.load(config.running.resume).parties
        if parties != then:
            raise ConfigError(
                f"The run in {config.running.resume} has {then} parties, not {parties}. Start all "
                "of them, and no others."
            )
    if config.running.grow and not config.running.resume:
        earlier = checkpoint.load(config.running.grow)
        earlier_run.check_number(config.running.grow, earlier, config, parties)
    default = parties == 4 and not node_configs
    check_files(config, parties, node_configs, " (--parties is 4 by default)" if default else "")
    if config.running.parties not in (0, parties):
        raise ConfigError(
            f"parties = {config.running.parties} in the run configuration contradicts the "
            f"{parties} that are to run: leave it out."
        )
    if not config.data.own_data:
        sized(config, len(load_labels(config).train))
        check_parties(config.data, config.models.bottom == "lstm", parties)
    return config, {**run_config, "out": str(results_folder(config))}


def check_files(
    config: RunConfig, parties: int, node_configs: Sequence[Mapping[str, Any]], why: str = ""
) -> None:
    """Raise `ConfigError` if parties, so many because of ``why``, need files and lack one."""
    if len(node_configs) == parties:
        return
    if config.data.own_data and not node_configs:
        raise ConfigError(
            f"dataset = {config.data.dataset!r} needs a file of each of the {parties} "
            f"parties{why}. Name them with --node-config \"file='...' id='...'\", once for each "
            "party, in process or with --engine supernodes."
        )
    if node_configs:
        raise ConfigError(
            f"{len(node_configs)} node configurations are given for {parties} parties. Give one "
            'for each, and "" for a party without options; or give none.'
        )


@contextmanager
def _submitting(run_config: Mapping[str, Any]) -> Iterator[None]:
    """Lock the results folder of a run whose ServerApp is another process."""
    folder = Path(run_config["out"])
    with in_use(folder, "flower.lock"):
        with in_use(folder):  # tells early if an in-process run is going on there
            pass
        yield
