"""From Python: train on what is in memory, and use the model.

model = vfl_flower.train([accounts, shop], labels, strategy="ef-vfl")
model.predict([accounts_new, shop_new])
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Any, Unpack, overload

from vfl_flower.api import own_code
from vfl_flower.api.keywords import Options
from vfl_flower.api.own_code import KEYWORDS
from vfl_flower.config.errors import ConfigError, Interrupted, Terminated
from vfl_flower.config.plugins import ENGINES
from vfl_flower.config.renamed import notify
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.memory import handed_over, held, listed
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.label_holder.progress import shown
from vfl_flower.launch.engines import Engine, Finished, predict_local

_NOT_BESIDE_FEATURES = ("dataset", "task")


@overload
def train(
    features: Sequence[Any] = (),
    labels: Any = None,
    *,
    config: Mapping[str, Any] | None = None,
    id: str = "",
    parties: int = 4,
    engine: str = "local",
    out: str | Path = "",
    progress: bool | None = None,
    **options: Unpack[Options],
) -> Model: ...


@overload
def train(
    config: Mapping[str, Any] | None,
    features: Sequence[Any] = (),
    labels: Any = None,
    *,
    id: str = "",
    parties: int = 4,
    engine: str = "local",
    out: str | Path = "",
    progress: bool | None = None,
    **options: Unpack[Options],
) -> Model: ...


def train(*given: Any, **options: Any) -> Model:
    """Train a model: ``train(features, labels, strategy="vafl", epochs=20)``.

    Without features, train on the data set that option ``dataset`` names. The order
    ``train(config, features, labels)`` works too.

    Parameters
    ----------
    features : for each party an array or tensor [N, ...], a pandas frame, or a torch data set with
        one sample per item. All parties have the same N rows, unless ``id`` is given.
    labels : array, list or Series of N labels; or a frame with a label column (``label``) and
        features of the label holder.
    config : options under the names that `vfl list` prints, such as ``{"party-lr": 0.1}``.
    id : name of the id column of all frames. Training uses the rows that all frames have.
    parties : number of parties that share a data set such as "digits".
    engine : runtime: "local", "ray" or "supernodes". Features in memory need "local". Ctrl-C or
        SIGTERM keeps a checkpoint, and `KeyboardInterrupt` or `SystemExit` names its folder.
        ``train(features, labels, resume=FOLDER)`` continues the run.
    out : results folder. By default, a temporary folder that Python deletes with the model. If
        training fails, a note on the error names the folder.
    progress : True prints a line per epoch. None shows progress in terminals and notebooks only.
    **options : options of `vfl list` in snake_case, such as ``party_lr=0.1``. None stands for the
        default. ``strategy`` also takes a `System`. ``estimator``, ``codec``, ``downlink_codec``,
        ``bottom_model``, ``top_model``, ``loss``, ``metrics``, ``privacy``, ``augment`` and
        ``observer`` also take classes and functions; ``observer`` also a `Callback`. The values
        of ``config`` may be the same objects. Give option "labels" in ``config``.

    Returns
    -------
    Model
        The trained model, with the halves of all parties.

    Raises
    ------
    ConfigError
        If an option is unknown, is given twice, has a wrong value, or contradicts the data.
    PartyError
        If a party fails.
    TypeError
        If there are more than three positional arguments, or one is also a keyword argument.

    Examples
    --------
    >>> import numpy as np
    >>> import vfl_flower
    >>> rows = np.random.default_rng(0).normal(size=(400, 6))
    >>> labels = (rows[:, 0] + rows[:, 5] > 0).astype(int)
    >>> model = vfl_flower.train([rows[:, :3], rows[:, 3:]], labels, strategy="vafl", epochs=5)
    >>> model.predict([rows[:, :3], rows[:, 3:]]).shape
    (400,)
    """
    config_first = len(given) == 3 or (given and isinstance(given[0], Mapping | None))
    order = ("config", "features", "labels") if config_first else ("features", "labels")
    if len(given) > len(order):
        raise TypeError(f"train() takes at most 3 positional arguments: {len(given)} were given.")
    if twice := [name for name, _ in zip(order, given, strict=False) if name in options]:
        raise TypeError(f"train() got multiple values for argument {twice[0]!r}.")
    return _train(**dict(zip(order, given, strict=False)), **options)


def _train(
    features: Sequence[Any] = (),
    labels: Any = None,
    *,
    config: Mapping[str, Any] | None = None,
    id: str = "",
    parties: int = 4,
    engine: str = "local",
    out: str | Path = "",
    progress: bool | None = None,
    **options: Any,
) -> Model:
    """Train as `train` describes."""
    keys, more = own_code.values_of(config, options)
    if more and engine != "local":
        raise ConfigError(
            f"observer = {type(more['observers'][0]).__name__} is an object of this process, which "
            f"engine = {engine!r} cannot reach: give an observer by its import path."
        )
    for option, name in own_code.without_path(keys).items() if engine != "local" else ():
        raise ConfigError(
            f"{option} = {name} has no import path, which engine = {engine!r} needs: define {name} "
            "in a module (a .py file) that can be imported."
        )
    notify(keys)
    named = out or keys.get("out") or keys.get("resume", "")
    temporary = None if named else tempfile.TemporaryDirectory()
    folder = Path(temporary.name, "run") if temporary else Path(named)
    keys["out"] = str(folder.expanduser().absolute())
    features = listed(features)
    node_configs: list[dict[str, Any]] = []
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        stack.enter_context(shown(progress))
        if features:
            beside = [name for name in _NOT_BESIDE_FEATURES if name in keys]
            beside += ["align"] * (keys.get("align", "any") != "any")
            if beside:
                raise ConfigError(
                    f"{beside[0]} = {keys[beside[0]]!r} is not for features that are handed over: "
                    "leave out the key, or the features."
                )
            if labels is None:
                raise ConfigError("Labels are missing: give train one for each row.")
            if engine != "local":
                raise ConfigError(f"engine = {engine!r} cannot reach data of this process.")
            if id and keys.get("id", id) != id:
                raise ConfigError(
                    f"id = {id!r} contradicts id = {keys['id']!r} in config: leave one of them out."
                )
            parties = len(features)
            id = id or keys.get("id", "")
            before = keys.get("resume") or keys.get("grow")  # whose keys are as then
            data = (checkpoint.configured(keys) if before else RunConfig.of(keys)).data
            then = _name_of_held(keys["resume"], data.dataset) if keys.get("resume") else ""
            name = stack.enter_context(held(*handed_over(features, labels, data, id), name=then))
            keys |= {"dataset": f"memory:{name}"}
            keys.setdefault("align", data.align if before else "ids")
            node_configs = [{"source": "memory", "held": name}] * parties
            if id:
                keys["id"] = id
        elif labels is not None:
            raise ConfigError("Labels are given and no features: give those of each party.")
        start: Engine = ENGINES.load(engine)
        try:
            finished = start(parties, keys, node_configs=node_configs, **more)
        except BaseException as error:
            if temporary:
                _keep(folder, error)
                temporary.cleanup()
            raise
    return Model(finished.folder, temporary)


_options = [Parameter(name, Parameter.KEYWORD_ONLY, default=None) for name in KEYWORDS]
_shown = [*signature(_train).parameters.values()][:-1] + _options
# For notebooks, which complete keywords by it.
train.__signature__ = Signature(_shown, return_annotation="Model")  # type: ignore[attr-defined]


def load(folder: str | Path) -> Model:
    """The model in the results folder of a run, in process or on this machine.

    Raises
    ------
    ConfigError
        If there is none, or it needs a class or function of another process.
    """
    place = Path(folder).expanduser().absolute()
    own_code.check_there(_checkpoint(place).config.values())
    return Model(place)


class Model:
    """A trained model, with the parties' halves beside the label holder's.

    folder : its results folder.
    """

    def __init__(
        self, folder: Path, temporary: tempfile.TemporaryDirectory[str] | None = None
    ) -> None:
        self.folder = folder
        self._temporary = temporary  # which is removed when this is

    def __getstate__(self) -> dict[str, Any]:
        """Where the model is, or if that is gone with this object, the files themselves."""
        if not self._temporary:
            return {"folder": self.folder}
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return {"files": {str(path.relative_to(self.folder)): path.read_bytes() for path in files}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Go on with the folder, or with a temporary one of this object's own."""
        if "folder" in state:
            Model.__init__(self, state["folder"])
            return
        temporary = tempfile.TemporaryDirectory()
        Model.__init__(self, Path(temporary.name, "run"), temporary)
        for name, content in state["files"].items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)  # since `save` copies modes too
            path.write_bytes(content)

    @property
    def history(self) -> list[dict[str, Any]]:
        """An entry for each evaluation."""
        return Finished(self.folder).history

    @property
    def summary(self) -> dict[str, Any]:
        """What ran, what it reached, and what it took."""
        return Finished(self.folder).summary

    @property
    def classes(self) -> list[str]:
        """The classes, in the order of `predict_proba`'s columns; none for numbers."""
        classes: list[str] = _checkpoint(self.folder).about_labels["classes"]
        return classes

    def predict(self, features: Sequence[Any] = (), *, own: Any = None, id: str = "") -> Any:
        """The class or number of each row, [N]; with ids, a pandas Series by id.

        Parameters
        ----------
        features : of each party, as for `train`; none for the test rows of a divided data set.
        own : features of the label holder's own, a frame, if it had some.
        id : the column of ids that all frames have.
        """
        frame, _ = self._said(features, own, id)
        return _by_id(frame["prediction"], frame, id)

    def predict_proba(self, features: Sequence[Any] = (), *, own: Any = None, id: str = "") -> Any:
        """The probability of each class, [N, classes]; with ids, a pandas frame by id."""
        frame, _ = self._said(features, own, id)
        chances = frame.iloc[:, 1:].filter(like="probability_")
        return _by_id(chances, frame, id)

    def evaluate(
        self, features: Sequence[Any] = (), labels: Any = None, *, id: str = ""
    ) -> dict[str, float]:
        """Loss, accuracy and AUC, or RMSE and R2, and further figures, of rows that have labels.

        ``labels`` are as for `train`; of a divided data set's test rows none are needed.
        """
        _, figures = self._said(features, labels, id, labelled=True)
        about = ("model", "rows", "unknown_rows", "epsilon")
        applies = (name for name in figures if name not in about and figures[name] is not None)
        return {name: figures[name] for name in applies}

    def save(self, folder: str | Path) -> None:
        """Copy the results folder, from which `load` reads the model.

        The folder names own classes and functions by their import paths.

        Raises
        ------
        ConfigError
            If the folder exists, there is no model, or a class or function has no import path.
        """
        values = _checkpoint(self.folder).config.values()
        for option, name in own_code.without_path(values).items():
            raise ConfigError(
                f"{option} = {name} has no import path, by which load could find it: define {name} "
                "in a module (a .py file) that can be imported, and train again."
            )
        to = Path(folder).expanduser().absolute()
        if to.exists():
            raise ConfigError(f"{to} is there already: name another folder.")
        shutil.copytree(self.folder, to)

    def _said(
        self, features: Sequence[Any], own: Any, id: str, labelled: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """A frame of predictions in the order of the rows, and figures."""
        import pandas as pd

        found, features = _checkpoint(self.folder), listed(features)
        own_code.check_there(found.config.values())
        data, parties = found.config.data, len(found.strategy["seats"])
        if features and not data.own_data:
            raise ConfigError(
                f"The model is of {data.called}, which was divided, and predicts its test rows: "
                "leave features out."
            )
        if data.own_data and len(features) != parties:
            raise ConfigError(
                f"The model is of {parties} parties, and features of {len(features)} are given: "
                "give those of each party, in their order."
            )
        missing = ConfigError("Labels are missing: give evaluate those of the rows, as for train.")
        if labelled and features and own is None:
            raise missing
        if own is not None and not labelled and not hasattr(own, "columns"):
            raise ConfigError("own = must be a frame of the label holder's own features.")
        keys: dict[str, Any] = {"model": str(self.folder)}
        node_configs: list[dict[str, Any]] = []
        with ExitStack() as stack:
            stack.enter_context(_quiet())
            out = Path(stack.enter_context(tempfile.TemporaryDirectory()), "said.parquet")
            if features:
                name = stack.enter_context(held(*handed_over(features, own, data, id)))
                keys |= {"dataset": f"memory:{name}", "align": data.align}
                node_configs = [{"source": "memory", "held": name}] * parties
            predict_local({**keys, "out": str(out)}, node_configs)
            figures = json.loads(out.with_suffix(".json").read_text())
            if labelled and "loss" not in figures:
                raise missing
            return pd.read_parquet(out), figures


def _name_of_held(folder: str, dataset: str) -> str:
    """The name by which the run in a folder speaks of the data that were handed over."""
    kind, _, name = dataset.partition(":")
    if kind != "memory":
        raise ConfigError(
            f"The run in {folder} is of dataset = {dataset!r}: leave features and labels out."
        )
    return name


_levels: list[int] = []
_lock = threading.Lock()


@contextmanager
def _quiet() -> Iterator[None]:
    """Let Flower's logger say warnings only, as `vfl run` does: the history has the rest.

    It is every thread's logger: the last to leave puts back the level that the first has found.
    """
    log = logging.getLogger("flwr")
    with _lock:
        _levels.append(log.level)
        log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        with _lock:
            level = _levels.pop()
            if not _levels:
                log.setLevel(level)


def _keep(folder: Path, error: BaseException) -> None:
    """Keep what was trained before an error, if anything, and note on the error where."""
    history, model = folder / "history.jsonl", folder / checkpoint.FILE
    if model.exists() or (history.exists() and history.stat().st_size):
        kept = Path(tempfile.mkdtemp(prefix="vfl-flower-"), "run")
        shutil.move(folder, kept)
        if isinstance(error, Interrupted | Terminated):
            error.folder = str(kept)
        use = ", and vfl_flower.load reads it" if (kept / checkpoint.FILE).exists() else ""
        error.add_note(f"What was trained until then is kept in {kept}{use}.")


def _checkpoint(folder: Path) -> Checkpoint:
    """The label holder's half of a model."""
    summary = folder / "summary.json"
    if summary.is_file() and not (folder / checkpoint.FILE).exists():
        said = json.loads(summary.read_text())
        if said["failure"] is None:
            raise ConfigError(
                f"The run in {folder} is of {said['strategy']}, a baseline that keeps no model: it "
                "has history and summary only; train another strategy for a model."
            )
    return checkpoint.load(folder)


def _by_id(values: Any, frame: Any, id: str) -> Any:
    return values.set_axis(frame.iloc[:, 0]).rename_axis(id) if id else values.to_numpy()
