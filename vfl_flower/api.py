"""From Python: train on what is in memory, and use the model.

model = vfl_flower.train({"strategy": "ef-vfl"}, [accounts, shop], labels)
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
from pathlib import Path
from typing import Any

from vfl_flower.config import RunConfig, parse
from vfl_flower.data.memory import handed_over, held, listed
from vfl_flower.errors import ConfigError, Interrupted, Terminated
from vfl_flower.holder import checkpoint
from vfl_flower.holder.checkpoint import Checkpoint
from vfl_flower.holder.progress import shown
from vfl_flower.registry import ENGINES
from vfl_flower.renamed import notify
from vfl_flower.start import Engine, Finished, predict_local

_NOT_BESIDE_FEATURES = ("dataset", "task")


def train(
    config: Mapping[str, Any] | None = None,
    features: Sequence[Any] = (),
    labels: Any = None,
    *,
    id: str = "",
    parties: int = 4,
    engine: str = "local",
    out: str | Path = "",
    progress: bool | None = None,
) -> Model:
    """Train with one party for each of ``features``; or on a data set that ``config`` names.

    Parameters
    ----------
    config : options of the run configuration; `vfl list` describes them.
    features : of each party an array or tensor [N, ...], a pandas frame, or a torch data set whose
        items are samples; all with the same rows, unless there are ids.
    labels : of the N rows; or a frame of labels (column ``label``) and of features of the label
        holder's own.
    id : the column of ids all frames have, ``labels`` too (or key ``id``); common rows are used.
    parties : how many share a data set that is divided among them, such as "digits".
    engine : runtime; data that are handed over are trained on in this process. By Ctrl-C or
        SIGTERM a run in this process keeps a checkpoint; `KeyboardInterrupt` or `SystemExit` says
        where. ``train({"resume": FOLDER}, features, labels)`` goes on with it.
    out : results folder; without it, one that is gone with the model. Where training fails, a note
        on the error says where it is kept.
    progress : whether to show how far training is; None: on terminals and in notebooks alone, as
        one line that is gone at the end. Elsewhere True prints one line an epoch.

    Raises
    ------
    ConfigError, PartyError
        What cannot work, or what went wrong.
    """
    if not isinstance(config, Mapping | None):
        raise ConfigError(
            f"config = {config!r} must be a mapping of keys, such as {{'strategy': 'vafl'}}."
        )
    notify(config or {})
    keys = parse({**(config or {}), "out": str((config or {}).get("out", ""))})
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
            finished = start(parties, keys, node_configs=node_configs)
        except BaseException as error:
            if temporary:
                _keep(folder, error)
                temporary.cleanup()
            raise
    return Model(finished.folder, temporary)


def load(folder: str | Path) -> Model:
    """The model in the results folder of a run, in process or on this machine.

    Raises
    ------
    ConfigError
        If there is none.
    """
    place = Path(folder).expanduser().absolute()
    _checkpoint(place)
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
        """Copy the results folder, from which `load` reads it.

        Raises
        ------
        ConfigError
            If there is a folder already, or no model.
        """
        _checkpoint(self.folder)
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
