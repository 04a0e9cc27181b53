"""Outputs of a run do not tell a training label that noise protects, but by the noise.

Each run is played in two worlds. They differ in the label of one training row, and all secrets are
equal. The noise of both worlds is chosen so that its sums, or the randomised labels, are equal.
Then everything that anybody but the label holder may read must be equal, byte by byte. Without
noise, each of these outputs differs: so the game could tell.
"""

import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Message
from prometheus_client import CollectorRegistry, generate_latest

from strategies import history, run
from strategies.turns import Spread
from strategies.vertical import strategy_of
from tests.organisations import cut, small
from tests.protocol.test_last_bits import same_sums
from tests.serving import served
from vfl_flower import client_app, party
from vfl_flower.config.errors import ConfigError
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.labels import Labels
from vfl_flower.data.split import divide
from vfl_flower.label_holder import checkpoint, progress
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.label_holder.run_metrics import RunMetrics
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.protocol.privacy import noise
from vfl_flower.protocol.privacy.labels import Randomised
from vfl_flower.protocol.privacy.scalars import NoisyScalars
from vfl_flower.protocol.systems import resolve
from vfl_flower.results.report import report
from vfl_flower.tasks.inference import rows as rows_to_predict
from vfl_flower.tasks.inference.contribution import contribution
from vfl_flower.transport.local import LocalGrid

ROWS, PARTIES = 120, 2
SHORT = {"epochs": 2, "batch-size": 16, "embedding-size": 2, "bottom-hidden": 4, "top-hidden": 4}
LABELS = {"strategy": "split-nn", "privacy": "labels", "epsilon": 2.0}
SCALAR = {"strategy": "dpzv", "epsilon": 3.0, "delta": 1e-3, "subsets": "sampled"}
ALL = {"test-fraction": 0.0}
TOGETHER = {"perturbs": "all", "quorum": 2, "server-update": "zeroth-order"}
NUMBERS = {"target": "regression", "label-range": "0,1"}
Published = dict[str, Any]

_OF_MACHINE = r"[0-9.,]+ ?(s|ms|MiB|MB up|MB down|MB|exchanges/s)\b"
_CLOCK = SimpleNamespace(perf_counter=lambda: 0.0, monotonic=time.monotonic, time=lambda: 0.0)


def world_of(path: Path, config: Any, world: int) -> None:
    """Write the data: the label of one training row is the number of the world."""
    generator = np.random.default_rng(0)
    features = generator.standard_normal((ROWS, 4)).astype(np.float32)
    labels = (features.sum(1) > 0).astype(np.int64)
    labels[divide(config.data, ROWS)[0][5]] = world
    np.savez(path, X=features, y=labels)


def content(message: Message) -> tuple[Any, ...]:
    """All that a message to a party says."""
    order: Any = message.payload  # type: ignore[attr-defined]
    said = [(f.name, getattr(order, f.name)) for f in fields(order) if f.name != "arrays"]
    arrays = {name: (each.dtype, each.tobytes()) for name, each in order.arrays.items()}
    return type(order).__name__, said, arrays


class Listener(Callback):
    """Keeps what observers hear, what Prometheus reads, and the lines of progress."""

    def __init__(self) -> None:
        self.entries: list[dict[str, Any]] = []
        self.scraped: list[bytes] = []
        self.lines: list[str] = []

    def began(self, folder: Path) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(RunMetrics(self.run, "run"))

    def evaluated(self, entry: dict[str, Any]) -> None:
        self.entries.append(entry)
        self.scraped.append(generate_latest(self.registry))
        standing = progress.Standing(1, 2, entry, self.run.state.best)
        self.lines += [*standing.words(), standing.line("run", 80), standing.line("run", 30)]


@contextmanager
def game(draw: dict[str, Any], home: Path) -> Iterator[list[tuple[Any, ...]]]:
    """Make secrets, clocks, noisy sums and noisy labels equal; yield the messages to parties."""
    sent: list[tuple[Any, ...]] = []
    push, labels, add = LocalGrid.push_messages, Randomised.labels, Spread.add

    def pushed(grid: LocalGrid, messages: Any) -> Any:
        messages = list(messages)
        sent.extend(map(content, messages))
        return push(grid, messages)

    def drawn(self: Randomised) -> Labels:
        found = labels(self)
        first = draw.setdefault("labels", found)
        test = first.test if found.repeats else found.test.copy()
        test[: found.validation] = first.test[: found.validation]
        return replace(found, train=first.train, test=test)

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VFL_HOME", str(home))
        patch.setattr("secrets.token_bytes", lambda size=32: b"1" * size)
        patch.setattr("secrets.randbits", lambda bits: 12345)
        patch.setattr("secrets.token_hex", lambda size=32: "1" * 2 * size)
        patch.setattr(noise, "on_grid", same_sums(noise.on_grid))
        patch.setattr(Randomised, "labels", drawn)
        patch.setattr(LocalGrid, "push_messages", pushed)
        patch.setattr(history, "time", _CLOCK)
        patch.setattr(Spread, "add", lambda self, value: add(self, float(int(value))))
        patch.setattr("vfl_flower.label_holder.tensorboard.time.time", lambda: 0.0)
        for module in (history, run, party.party, party.own_card):
            patch.setattr(module, "utc_now", lambda: "now")
        for module in (run, party.party, party.stacked):
            patch.setattr(module, "peak_memory_mb", lambda: 0.0)
        yield sent


def published(folder: Path, keys: dict[str, Any], world: int, draw: dict[str, Any]) -> Published:
    """Play a run, and return all that is handed on, by name."""
    folder = folder / str(world)  # of the same length in both worlds
    folder.mkdir()
    data, out = folder / "rows.npz", folder / "run"
    given = {**SHORT, "dataset": f"npz:{data}", **keys, "out": str(out)}
    world_of(data, resolve(given), world)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    listener, found = Listener(), Published()
    logs = [logging.getLogger(name) for name in ("flwr", "flwr.notice")]
    levels, disabled = [log.level for log in logs], logging.root.manager.disable
    logs[0].addHandler(handler)
    for log in logs:  # an earlier test of this process may have asked for less, as by --quiet
        log.setLevel(logging.INFO)
    logging.disable(logging.NOTSET)
    try:
        with game(draw, folder / "home") as sent:
            run_local(PARTIES, {**given, "observer": "tensorboard"}, observers=[listener])
            if (out / "checkpoint.npz").exists():  # a baseline keeps no model
                predict_local({"model": str(out)})
                with served(out, folder) as service:
                    found["GET /v1/model"] = service.http.get("/v1/model").text
                    found["GET /metrics, of the service"] = service.http.get("/metrics").text
            if "subsets" in keys:
                found["contributions"] = refused(lambda: contribution(out))
            found["report"] = report([out])
            found["result"] = result_of(given)
            found["messages"] = sent
    finally:
        logs[0].removeHandler(handler)
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)
        logging.disable(disabled)
    found["log records"] = records
    found["observers"] = listener.entries
    found["GET /metrics, of training"] = listener.scraped
    found["progress"] = listener.lines
    for path in out.glob("party-*-audit.jsonl"):
        path.unlink()  # the party's own
    for path in filter(Path.is_file, sorted(out.rglob("*"))):
        name = path.relative_to(out).as_posix()
        if path.suffix == ".npz":
            with np.load(path) as arrays:
                found[name] = {key: arrays[key].tobytes() for key in arrays.files}
        elif name.startswith("tensorboard"):
            found["tensorboard"] = path.read_bytes()
        elif path.suffix in (".json", ".jsonl", ".csv", ".md", ".html", ".png"):
            found[name] = path.read_bytes()
    return {name: plain(each, folder) for name, each in found.items()}


def refused(what: Callable[[], Any]) -> Any:
    """Return its value, or its error."""
    try:
        return what()
    except ConfigError as error:
        return str(error)


def result_of(given: dict[str, Any]) -> dict[str, Any]:
    """Flower's Result, also of a strategy that overrides a hook."""
    config = resolve({key: given[key] for key in given.keys() - {"out"}})

    class Hooked(strategy_of(config)):  # type: ignore[misc]
        def aggregate_train(self, *arguments: Any) -> Any:
            return super().aggregate_train(*arguments)

    labels = load_labels(config)
    found = Hooked(config, labels).start(LocalGrid(client_app.app, PARTIES, given, config))
    return {
        name: {number: dict(each) for number, each in getattr(found, name).items()}
        for name in (
            "train_metrics_clientapp",
            "evaluate_metrics_clientapp",
            "evaluate_metrics_serverapp",
        )
    }


def plain(found: Any, folder: Path) -> str:
    """As text, without the folder and what the machine decides."""
    if isinstance(found, bytes):
        found = found.decode("latin-1")
    text = found if isinstance(found, str) else repr(found)
    for name in (str(folder), str(folder).replace("_", r"\_")):
        text = text.replace(name, "FOLDER")
    text = re.sub(r"(seconds|vfl_\w+_(?:seconds|bytes)\w*)\W+[0-9.e+-]+", r"\1", text)
    return re.sub(_OF_MACHINE, "", text)


def differing(folder: Path, keys: dict[str, Any]) -> tuple[set[str], set[str]]:
    """The names of outputs that differ between the worlds, and of all outputs."""
    draw: dict[str, Any] = {}
    one, other = (published(folder, keys, world, draw) for world in (0, 1))
    return {name for name in one if one[name] != other.get(name)}, set(one) | set(other)


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "keys",
    [
        {**SCALAR, **ALL},
        {**LABELS, **ALL},
        SCALAR,
        LABELS,
        {**SCALAR, **TOGETHER},
        {**SCALAR, **ALL, **NUMBERS},
        {**LABELS, **ALL, **NUMBERS},
        {**LABELS, **ALL, "strategy": "cascaded", "subsets": "sampled"},
        {**LABELS, "strategy": "local-only"},
        {**LABELS, "strategy": "centralised", "class-weights": "balanced"},
    ],
    ids=str,
)
def test_nothing_that_is_handed_on_tells_a_protected_label(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    found, everything = differing(tmp_path, keys)
    assert not found
    no_service = keys.get("strategy") == "local-only"  # it has no checkpoint and no card either
    assert len(everything) >= (13 if no_service else 14)


@pytest.mark.nightly
def test_without_noise_each_output_tells_the_label(tmp_path: Path) -> None:
    # The control. A party's card has what the party knows, and tests leave HTML of cards empty.
    found, everything = differing(tmp_path, {**ALL, "subsets": "sampled"})
    equal = {name for name in everything - found if ".card." not in name}
    assert equal == {"GET /metrics, of the service", "model_card.html"}


@pytest.mark.nightly
def test_the_training_loss_of_noisy_scalars_would_tell_the_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The control.
    monkeypatch.setattr(NoisyScalars, "hides_figures", False)
    found, _ = differing(tmp_path, SCALAR)
    assert found >= {"observers", "GET /metrics, of training", "tensorboard", "history.jsonl"}
    assert "summary.json" in found and "result" in found and "messages" not in found


# --- predictions for files ------------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize("recognised", [True, False])
@pytest.mark.parametrize("keys", [LABELS, {**SCALAR, **ALL}], ids=["labels", "scalar, all rows"])
def test_no_figure_of_predictions_counts_a_person_whose_label_noise_protects(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], recognised: bool
) -> None:
    """In the run's file, or in one with the same people in another order, and others."""
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))
    table = small()
    organisations = cut(tmp_path, table[:-10], known=1.0)
    organisations.run("run", {**SHORT, **keys})
    if not recognised:  # the control
        monkeypatch.setattr(
            rows_to_predict, "learnt_by", lambda found, file, rows: np.zeros(len(rows), bool)
        )
    found = checkpoint.load(tmp_path / "run")
    train, _, _ = divide(found.config.data, len(found.rows))
    labels = pd.read_csv(organisations.labels)
    said = []
    for flipped in (False, True):
        file = labels.copy()
        places = found.rows[train[:5]]
        file.loc[places, "label"] = file.loc[places, "label"] ^ int(flipped)
        for order in (file.index, file.index[::-1]):
            path = tmp_path / f"{flipped}-{order[0]}.csv"
            file.loc[order].to_csv(path, index=False)
            organisations.predict("run", path, out=str(path.with_suffix(".said.csv")))
            figures = json.loads(path.with_suffix(".said.json").read_text())
            del figures["drift"], figures["coverage"]["file"]["written"]
            said.append(figures)
    assert (said[0] == said[2] and said[1] == said[3]) == recognised
    assert ("accuracy" in said[0]) == (not recognised or "test-fraction" not in keys)
