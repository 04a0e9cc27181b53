"""From Python: train on what is in memory, and use the model.

model = vfl_flower.train({"strategy": "vafl", "epochs": 10}, [accounts, shop], labels)
model.predict([accounts_new, shop_new])
"""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.data.memory import ArraySource, DataSetSource, Frame, held
from vfl_flower.data.source import Source
from vfl_flower.errors import ConfigError
from vfl_flower.holder import checkpoint
from vfl_flower.registry import ENGINES
from vfl_flower.start import Engine, Finished, predict_local

_ROW = "row"  # the id column of what has no ids of its own


def train(
    config: Mapping[str, Any] | None = None,
    features: Sequence[Any] = (),
    labels: Any = None,
    *,
    id: str = "",
    parties: int = 4,
    engine: str = "local",
    out: str | Path = "",
) -> Model:
    """Train with one party for each of ``features``; or on a data set that ``config`` names.

    Parameters
    ----------
    config : run configuration keys, as `vfl list` prints them.
    features : of each party an array or tensor [N, ...], a pandas frame, or a torch data set whose
        items are samples; all with the same rows, unless there are ids.
    labels : of the N rows; or a frame of labels (column ``label``) and of features of the label
        holder's own.
    id : the column of ids that all frames have, ``labels`` too; rows that all have are used.
    parties : how many share a data set that is divided among them, such as "digits".
    engine : runtime; data that are handed over are trained on in this process.
    out : results folder; without it, one that is gone with the model.

    Raises
    ------
    ConfigError, PartyError
        What cannot work, or what went wrong.
    """
    keys = dict(config or {})
    with ExitStack() as stack:
        stack.enter_context(_quiet())
        temporary = None if out or keys.get("out") else tempfile.TemporaryDirectory()
        folder = Path(temporary.name, "run") if temporary else Path(out or keys["out"])
        keys["out"] = str(folder.expanduser().absolute())
        node_configs: list[dict[str, Any]] = []
        if len(features):
            if labels is None:
                raise ConfigError("Labels are missing: give train one for each row.")
            if engine != "local":
                raise ConfigError(f"engine = {engine!r} cannot reach data of this process.")
            parties = len(features)
            name = stack.enter_context(_held(features, labels, keys, id))
            keys |= {"dataset": f"memory:{name}", "id": id or _ROW, "align": "ids"}
            node_configs = [{"source": "memory", "held": name}] * parties
        start: Engine = ENGINES.load(engine)
        finished = start(parties, keys, node_configs=node_configs)
    return Model(finished.folder, temporary)


def load(folder: str | Path) -> Model:
    """The model in the results folder of a run, in process or on this machine.

    Raises
    ------
    ConfigError
        If there is none.
    """
    checkpoint.load(folder)
    return Model(Path(folder).expanduser().absolute())


class Model:
    """A trained model, with the parties' halves beside the label holder's.

    folder : its results folder.
    """

    def __init__(
        self, folder: Path, temporary: tempfile.TemporaryDirectory[str] | None = None
    ) -> None:
        self.folder = folder
        self._temporary = temporary  # which is removed when this is

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
        classes: list[str] = checkpoint.load(self.folder).about_labels["classes"]
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
        return _by_id(frame.drop(columns=["id", "prediction"]), frame, id)

    def evaluate(
        self, features: Sequence[Any] = (), labels: Any = None, *, id: str = ""
    ) -> dict[str, float]:
        """Loss, accuracy and AUC, or RMSE and R2, of rows that have labels.

        ``labels`` are as for `train`.
        """
        _, figures = self._said(features, labels, id, labelled=True)
        names = ("loss", "accuracy", "auc", "rmse", "r2")
        return {name: figures[name] for name in names if figures.get(name) is not None}

    def save(self, folder: str | Path) -> None:
        """Copy the results folder, from which `load` reads it.

        Raises
        ------
        ConfigError
            If there is a folder already.
        """
        to = Path(folder).expanduser().absolute()
        if to.exists():
            raise ConfigError(f"{to} is there already: name another folder.")
        shutil.copytree(self.folder, to)

    def _said(
        self, features: Sequence[Any], own: Any, id: str, labelled: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """A frame of predictions in the order of the rows, and figures."""
        import pandas as pd

        keys: dict[str, Any] = {"model": str(self.folder)}
        node_configs: list[dict[str, Any]] = []
        with ExitStack() as stack:
            stack.enter_context(_quiet())
            out = Path(stack.enter_context(tempfile.TemporaryDirectory()), "said.parquet")
            if len(features):
                if own is None:
                    own = _rows_of(features[0], id)
                elif not labelled and not hasattr(own, "columns"):
                    raise ConfigError("own = must be a frame of the label holder's own features.")
                name = stack.enter_context(_held(features, own, self._words(), id))
                keys |= {"dataset": f"memory:{name}", "id": id or _ROW, "align": "ids"}
                node_configs = [{"source": "memory", "held": name}] * len(features)
            predict_local({**keys, "out": str(out)}, node_configs)
            return pd.read_parquet(out), json.loads(out.with_suffix(".json").read_text())

    def _words(self) -> dict[str, Any]:
        values = checkpoint.load(self.folder).config.values()
        return {key: values[key] for key in ("label", "columns", "missing", "text")}


@contextmanager
def _quiet() -> Iterator[None]:
    """Let Flower's logger say warnings only, as `vfl run` does: the history has the rest."""
    log = logging.getLogger("flwr")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)


def _held(features: Sequence[Any], labels: Any, keys: Mapping[str, Any], id: str) -> Any:
    """Hold what is handed over as data of the label holder and of the parties."""
    import pandas as pd

    if id:
        for number, frame in enumerate(features):
            if id not in getattr(frame, "columns", ()):
                raise ConfigError(
                    f"The features of party {number} are no frame with a column {id!r} of ids."
                )
        if isinstance(labels, pd.Series):
            labels = labels.rename(keys.get("label", "label")).rename_axis(id).reset_index()
        if id not in getattr(labels, "columns", ()):
            raise ConfigError(
                f"With id = {id!r}, labels must be a frame with ids, or a Series by id."
            )
        common = set(labels[id]).intersection(*(frame[id] for frame in features))
        labels, *features = (frame[frame[id].isin(common)] for frame in (labels, *features))
    sources = [_source(each, party, keys, id) for party, each in enumerate(features)]
    if not hasattr(labels, "columns"):
        labels = pd.DataFrame({keys.get("label", "label"): _array(labels)})
    if not id:
        labels = labels.assign(**{_ROW: np.arange(len(labels))})
        for party, source in enumerate(sources):
            if len(source.id_column) != len(labels):
                raise ConfigError(
                    f"Party {party} has {len(source.id_column)} rows, and there are {len(labels)} "
                    "labels: give one label for each row, or name the ids by id."
                )
    table = Frame(
        "labels",
        id=id or _ROW,
        columns=str(keys.get("columns", "")),
        missing=str(keys.get("missing", "refuse")),
        text=str(keys.get("text", "refuse")),
        label=str(keys.get("label", "label")),
        frame=labels,
    )
    return held(table, sources)


def _source(features: Any, party: int, keys: Mapping[str, Any], id: str) -> Source:
    if hasattr(features, "columns"):
        frame = features if id else features.assign(**{_ROW: np.arange(len(features))})
        return Frame(
            "features",
            id=id or _ROW,
            missing=str(keys.get("missing", "refuse")),
            text=str(keys.get("text", "refuse")),
            party=party,
            frame=frame,
        )
    if hasattr(features, "__getitem__") and not hasattr(features, "shape"):
        return DataSetSource(features, party)
    return ArraySource(_array(features), party)


def _array(values: Any) -> NDArray[Any]:
    """An array of an array, a tensor, a Series or a list."""
    return np.asarray(values.detach().cpu() if hasattr(values, "detach") else values)


def _rows_of(features: Any, id: str) -> Any:
    """A frame that says which rows there are, and nothing else."""
    import pandas as pd

    if id:
        return features[[id]]
    return pd.DataFrame(index=range(len(features)))


def _by_id(values: Any, frame: Any, id: str) -> Any:
    return values.set_axis(frame["id"]).rename_axis(id) if id else values.to_numpy()
