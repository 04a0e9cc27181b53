"""Use a trained model: `load` and `Model`."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from html import escape
from pathlib import Path
from pprint import pformat
from typing import Any

from vfl_flower.api import own_code
from vfl_flower.api.arguments import handed_over, listed
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.names import called as called_of
from vfl_flower.config.names import named
from vfl_flower.data.memory import held, node_configs_of
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.launch.engines import Finished, predict_local
from vfl_flower.results.figures import data_called, reached

Features = Sequence[Any] | Mapping[str, Any]

_PARTIES = 4  # that a model's table names
_ABOUT = ("model", "rows", "unknown_rows", "coverage", "epsilon", "assessment", "drift")
"""Figures of a prediction that do not say how well it does."""


def load(folder: str | Path) -> Model:
    """Return the model in the results folder of a run on this machine.

    Raises
    ------
    ConfigError
        If there is no model, or the model needs a class or function of another process.

    Examples
    --------
    >>> import tempfile
    >>> from pathlib import Path
    >>> import vfl_flower
    >>> folder = Path(tempfile.mkdtemp(), "run")
    >>> _ = vfl_flower.train(dataset="breast-cancer", epochs=2, out=folder)
    >>> model = vfl_flower.load(folder)
    >>> model.predict().shape
    (114,)
    """
    place = Path(folder).expanduser().absolute()
    own_code.check_there(_checkpoint(place).config.values())
    return Model(place)


class Model:
    """A trained model: the halves of the parties and of the label holder.

    Attributes
    ----------
    folder : the results folder.

    Examples
    --------
    >>> import vfl_flower
    >>> model = vfl_flower.train(dataset="breast-cancer", epochs=2, parties=3)
    >>> model.classes
    [0, 1]
    >>> model.predict_proba().shape
    (114, 2)
    >>> model.evaluate()["auc"] > 0.9
    True
    >>> sorted(model.assess()["figures"]["gini"])
    ['high', 'low', 'value']
    >>> model.summary["parties"], len(model.history)
    (3, 2)
    """

    def __init__(
        self, folder: Path, temporary: tempfile.TemporaryDirectory[str] | None = None
    ) -> None:
        self.folder = folder
        self._temporary = temporary  # Python deletes it with this object

    def __repr__(self) -> str:
        rows = self._about()
        if "strategy" not in rows:
            return f"Model(unfinished, folder={str(self.folder)!r})"
        return f"Model({rows['strategy']}, {rows['result']}, folder={str(self.folder)!r})"

    def __str__(self) -> str:
        """Return a short table, for `print`."""
        width = max(map(len, self._about()))
        return "\n".join(f"{name:<{width}}  {value}" for name, value in self._about().items())

    def _repr_html_(self) -> str:
        """Return a short table, for notebooks."""
        cells = [(escape(name), escape(value)) for name, value in self._about().items()]
        rows = "".join(f"<tr><th>{name}</th><td>{value}</td></tr>" for name, value in cells)
        return f"<table>{rows}</table>"

    def _about(self) -> dict[str, str]:
        about = {"folder": str(self.folder)}
        if not (self.folder / "summary.json").exists():
            return {"result": "unfinished", **about}
        found = self.summary
        if found["failure"] is not None or "by_party" not in found:
            return {"strategy": found["strategy"], "result": "unfinished", **about}
        of_parties, rows = found["by_party"], found.get("data", {}).get("rows", {})
        counts = [(called_of(each), each.get("columns", "?")) for each in of_parties]
        columns = [f"{name}: {count} column{'s' * (count != 1)}" for name, count in counts]
        auc = found.get("test_auc")
        best, epochs = found.get("best_epoch"), f"{found['epochs']:.5g}"
        told = {
            "strategy": found["strategy"],
            "data": data_called(found["dataset"], list(map(called_of, of_parties)), None),
            "rows": ", ".join(f"{count:,} {kind}" for kind, count in rows.items()),
            "parties": ", ".join(columns[:_PARTIES]) + ", ..." * (len(columns) > _PARTIES),
            "result": reached(found) + (f", AUC {auc:.4f}" if auc is not None else ""),
            "epochs": epochs if best is None else f"{epochs}, the best is {best:.5g}",
            "epsilon": "none claimed" if found["epsilon"] is None else f"{found['epsilon']:.3g}",
            "seconds": f"{found['seconds']:.1f}",
            **about,
        }
        return {name: value for name, value in told.items() if value}

    def __getstate__(self) -> dict[str, Any]:
        """Return the folder, or the files of a temporary folder."""
        if not self._temporary:
            return {"folder": self.folder}
        files = [path for path in self.folder.rglob("*") if path.is_file()]
        return {"files": {str(path.relative_to(self.folder)): path.read_bytes() for path in files}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Use the folder, or write the files into a new temporary folder."""
        if "folder" in state:
            Model.__init__(self, state["folder"])
            return
        temporary = tempfile.TemporaryDirectory()
        Model.__init__(self, Path(temporary.name, "run"), temporary)
        for name, content in state["files"].items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)  # `save` copies modes too
            path.write_bytes(content)

    @property
    def history(self) -> list[dict[str, Any]]:
        """An entry for each evaluation."""
        return Finished(self.folder).history

    @property
    def summary(self) -> dict[str, Any]:
        """The run's options, results and cost, as in summary.json. It prints in short."""
        return _Summary(Finished(self.folder).summary)

    @property
    def classes(self) -> list[Any]:
        """The classes, in the order of `predict_proba`'s columns; empty for regression."""
        return _checkpoint(self.folder).about_labels["classes"]

    def predict(self, features: Features = (), *, own: Any = None, id: str = "") -> Any:
        """Return the class or number of each row, [N]; with ids, a pandas Series by id.

        If rules match people (`match`), return a Series by the index of ``own``. It has the people
        that the parties know, in the order of ``own``. With ``id``, it has their ids.

        Parameters
        ----------
        features : of each party, as for `train`; by default the test rows of a divided data set.
            A mapping has the names of training, in any order.
        own : a frame of the label holder's features, if training had some.
        id : name of the id column of all frames; with `match`, of ``own``.
        """
        frame, _ = self._predicted(features, own, id)
        return self._by_id(frame["prediction"], frame, own, id)

    def predict_proba(self, features: Features = (), *, own: Any = None, id: str = "") -> Any:
        """Return class probabilities [N, classes]; by ids or index, as `predict` does."""
        frame, _ = self._predicted(features, own, id)
        chances = frame.iloc[:, 1:].filter(like="probability_")
        return self._by_id(chances, frame, own, id)

    def evaluate(
        self, features: Features = (), labels: Any = None, *, id: str = ""
    ) -> dict[str, float]:
        """Return the loss and metrics of rows with labels, the user's metrics included.

        Parameters
        ----------
        labels : as for `train`. The test rows of a divided data set need none.
        """
        _, figures = self._predicted(features, labels, id, labelled=True)
        applies = (name for name in figures if name not in _ABOUT and figures[name] is not None)
        return {name: figures[name] for name in applies}

    def assess(
        self, features: Features = (), labels: Any = None, *, id: str = ""
    ) -> dict[str, Any]:
        """Return the assessment of rows with labels: figures with 95 % intervals, and curves.

        It has the form of the field ``assessment`` of a run's summary. It has the segments
        that training named, as far as ``labels`` is a frame with their columns.

        Parameters
        ----------
        labels : as for `evaluate`.

        Raises
        ------
        ConfigError
            If labels are missing, or if all rows of two classes have one class.
        """
        _, figures = self._predicted(features, labels, id, labelled=True)
        if "assessment" not in figures:
            raise ConfigError(
                "The rows with labels have one class only, so there are no figures of two classes. "
                "Give rows of both classes."
            )
        return figures["assessment"]

    def _by_id(self, values: Any, frame: Any, own: Any, id: str) -> Any:
        """Return predictions by id; without ids, by the index of ``own`` if rules match people."""
        if id:
            return values.set_axis(frame.iloc[:, 0]).rename_axis(id)
        if own is not None and _checkpoint(self.folder).config.data.match:
            return values.set_axis(own.index[frame.iloc[:, 0]])
        return values.to_numpy()

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
                f"{option} = {name} has no import path that load could use: define {name} "
                "in a module (a .py file) that can be imported, and train again."
            )
        to = Path(folder).expanduser().absolute()
        if to.exists():
            raise ConfigError(f"{to} exists already: name another folder.")
        shutil.copytree(self.folder, to)

    def _predicted(
        self, features: Features, own: Any, id: str, labelled: bool = False
    ) -> tuple[Any, dict[str, Any]]:
        """Return a frame of predictions in the order of the rows, and figures."""
        import pandas as pd

        found = _checkpoint(self.folder)
        features, called = listed(features, found.names, found.parties)
        own_code.check_there(found.config.values())
        data, parties = found.config.data, found.parties
        if features and not data.own_data:
            raise ConfigError(
                f"The model learned from {data.called}, which was divided. It predicts only the "
                "test rows of that data set. Leave features out."
            )
        if data.own_data and len(features) != parties:
            raise ConfigError(
                f"The model has {parties} parties, and features of {len(features)} are given: "
                "give features of each party, in the order of training."
            )
        of_first = getattr(features[0], "columns", ()) if features else ()
        if id == "" and data.id != "id" and data.id in of_first:
            raise ConfigError(f"The column {data.id!r} of ids is no feature. Give id={data.id!r}.")
        missing = ConfigError(
            "Labels are missing, or noise protects all of them: give evaluate one for each row, of "
            "people who took no part in training."
        )
        if labelled and features and own is None:
            raise missing
        if own is not None and not labelled and not hasattr(own, "columns"):
            raise ConfigError(
                f"own is of type {type(own).__name__}: give a frame of the label holder's features."
            )
        keys: dict[str, Any] = {"model": str(self.folder)}
        node_configs: list[dict[str, Any]] = []
        with ExitStack() as stack:
            stack.enter_context(quiet())
            stack.enter_context(named(called))
            out = Path(stack.enter_context(tempfile.TemporaryDirectory()), "said.parquet")
            if features:
                name = stack.enter_context(
                    held(*handed_over(features, own, data, "" if id is None else id))
                )
                keys |= {"dataset": f"memory:{name}", "align": data.align}
                node_configs = node_configs_of(name, parties, called)
            predict_local({**keys, "out": str(out)}, node_configs)
            figures = json.loads(out.with_suffix(".json").read_text())
            if labelled and "loss" not in figures:
                raise missing
            return pd.read_parquet(out), figures


class _Summary(dict[str, Any]):
    """A summary that prints without empty fields, and without the content of nested ones."""

    def __repr__(self) -> str:
        told = {key: each for key, each in self.items() if each not in (None, [], {})}
        short = {k: "..." if isinstance(v, dict | list) else v for k, v in told.items()}
        return pformat(short, width=100, compact=True, sort_dicts=False)


_levels: list[int] = []
_lock = threading.Lock()


@contextmanager
def quiet(level: int = logging.WARNING) -> Iterator[None]:
    """Have Flower's logger print warnings only, as `vfl run` does.

    All threads share the logger. The last one to leave restores the level that the first found.
    """
    log = logging.getLogger("flwr")
    with _lock:
        _levels.append(log.level)
        log.setLevel(level)
    try:
        yield
    finally:
        with _lock:
            before = _levels.pop()
            if not _levels:
                log.setLevel(before)


def _checkpoint(folder: Path) -> Checkpoint:
    summary = folder / "summary.json"
    if summary.is_file() and not (folder / checkpoint.FILE).exists():
        said = json.loads(summary.read_text())
        if said["failure"] is None:
            raise ConfigError(
                f"The run in {folder} used {said['strategy']}, a baseline that keeps no model. It "
                "has only a history and a summary. Train another strategy for a model."
            )
    return checkpoint.load(folder)
