"""Organisations with their own files, for tests: rows and columns of a table for each."""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from sklearn.datasets import load_breast_cancer

from vfl_flower import client_app
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch.engines import Finished as Run
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.transport.flower_internals import lasting_home, to_bytes

ID = "who"  # the name of the id column at all organisations


@dataclass
class Organisations:
    """A label holder and parties with a file each, in a folder."""

    folder: Path
    labels: Path
    files: list[Path]
    words: list[dict[str, str]] = field(default_factory=list)  # further rules of the parties

    @property
    def keys(self) -> dict[str, Any]:
        """Run configuration: where the labels are."""
        return {"dataset": f"files:{self.labels}", "id": ID, "label": "label"}

    @property
    def node_configs(self) -> list[dict[str, str]]:
        """Return each party's node configuration, which describes its file."""
        words = self.words or [{}] * len(self.files)
        return [
            {"file": str(path), "id": ID, **more}
            for path, more in zip(self.files, words, strict=True)
        ]

    def run(
        self, out: str, keys: Mapping[str, Any] | None = None, client: ClientApp = client_app.app
    ) -> Run:
        """A run of them in this process, as if none had been before."""

        run_config = {**self.keys, "out": str(self.folder / out), **(keys or {})}
        return run_local(len(self.files), run_config, client, self.node_configs)

    def copy(self, folder: Path) -> "Organisations":
        """Return the same with copies of all files, which a test may change."""
        shutil.copytree(self.folder, folder)
        files = [folder / path.name for path in self.files]
        return Organisations(folder, folder / self.labels.name, files)

    def resume(self, out: str, **keys: Any) -> Run:
        """Go on with that run, as processes do that have just been started."""

        run_config = {"resume": str(self.folder / out), **keys}
        return run_local(len(self.files), run_config, node_configs=self.node_configs)

    def predict(self, run: str, labels: Path | None = None, **keys: Any) -> pd.DataFrame:
        """Predict, with the model of that run, the rows that all parties have now."""

        given = {"model": str(self.folder / run), "dataset": f"files:{labels or self.labels}"}
        return read(predict_local({**given, **keys}, self.node_configs))


def cut(
    folder: Path,
    table: pd.DataFrame,
    parties: int = 2,
    own: int = 0,
    known: float = 0.9,
    seed: int = 0,
    suffixes: tuple[str, ...] = (".parquet", ".csv"),
) -> Organisations:
    """Cut a table with an id and a label into files.

    The label holder has the first ``own`` columns. Parties share the other columns evenly. Each
    party has a share of the rows, ``known``, in its own order.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(seed)
    columns = [name for name in table if name not in (ID, "label")]
    labels = folder / "labels.csv"
    write(table[[ID, "label", *columns[:own]]], labels)
    files = []
    for number, block in enumerate(np.array_split(np.array(columns[own:], object), parties)):
        rows = generator.permutation(len(table))[: round(known * len(table))]
        files.append(folder / f"party-{number}{suffixes[number % len(suffixes)]}")
        write(table[[*block[:1], ID, *block[1:]]].iloc[rows], files[-1])
    return Organisations(folder, labels, files)


def cancer(columns: int = 30, rows: int = 569) -> pd.DataFrame:
    """Breast-cancer, with ids that are no row numbers."""
    features, labels = load_breast_cancer(return_X_y=True)
    table = pd.DataFrame(features[:rows, :columns], columns=[f"f{n}" for n in range(columns)])
    ids = np.random.default_rng(1).permutation(100 * rows)[:rows]
    return table.assign(**{ID: ids, "label": labels[:rows]})


def small(rows: int = 60) -> pd.DataFrame:
    """A little table that a line can tell apart."""
    generator = np.random.default_rng(2)
    features = generator.standard_normal((rows, 4)).round(3)
    table = pd.DataFrame(features, columns=["f0", "f1", "f2", "f3"])
    return table.assign(**{ID: 1000 + np.arange(rows), "label": (features.sum(1) > 0).astype(int)})


def common(organisations: Organisations) -> list[Any]:
    """The ids that all have, in common order: that of their texts."""
    files = [organisations.labels, *organisations.files]
    sets = [set(read(path)[ID].tolist()) for path in files]
    return sorted(set.intersection(*sets), key=lambda each: str(each).encode())


def read(path: Path) -> pd.DataFrame:
    """A csv or parquet file."""
    return pd.read_csv(path) if path.suffix == ".csv" else pd.read_parquet(path)


def write(frame: pd.DataFrame, path: Path) -> None:
    """A csv or parquet file."""
    if path.suffix == ".csv":
        frame.to_csv(path, index=False)
    else:
        frame.to_parquet(path, index=False)


def change(path: Path, how: Callable[[pd.DataFrame], pd.DataFrame]) -> None:
    """Have an organisation change its file."""
    write(how(read(path)), path)


@dataclass
class Recorder:
    """The ClientApp, and all messages that parties are sent and send."""

    sent: list[bytes] = field(default_factory=list)
    orders: list[bytes] = field(default_factory=list)

    def __call__(self, message: Message, context: Context) -> Message:
        self.orders.append(to_bytes(message))
        reply: Message = client_app.app(message, context)
        self.sent.append(to_bytes(reply))
        return reply


def forget_alignments() -> None:
    """As if nobody had kept one."""
    for name in ("alignments", "sets"):
        shutil.rmtree(lasting_home() / name, ignore_errors=True)


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Return content and modification time of each file in a folder."""
    return {
        path.name: (path.read_bytes(), os.stat(path).st_mode)
        for path in sorted(folder.iterdir())
        if path.is_file()
    }


def kept_state(folder: Path, party: int) -> Path:
    """Where a party of an in-process run keeps the checkpoint that the label holder has too."""
    found = checkpoint.load(folder)
    return folder / f"run-{found.run}-party-{party}-checkpoint-{found.number}.state"
