"""Flower's hooks, overridden in a subclass of the strategy, and the arguments of its ``start``."""

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from strategies.baselines.local_only import Alone
from strategies.vertical import Vertical
from tests.conftest import ALL_ROWS, Start
from tests.examples import EXAMPLES
from vfl_flower import client_app
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.plugins import load_place
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.local import LocalGrid
from vfl_flower.transport.wire import pack, unpack

PARTIES = 3
KEYS: dict[str, Any] = {**ALL_ROWS, "dataset": "breast-cancer", "epochs": 3, "batch-size": 64}
Trained = tuple[ArrayRecord | None, MetricRecord | None]


def start(kind: type[Vertical], *, keys: Any = KEYS, **arguments: Any) -> tuple[Any, Result]:
    """Train with a strategy of this class; return it, and Flower's Result."""
    config = resolve(keys)
    strategy = kind(config, load_labels(config))
    return strategy, strategy.start(LocalGrid(client_app.app, PARTIES, keys, config), **arguments)


@cache
def plain() -> Vertical:
    """Train without any hook, once for all tests."""
    found: Vertical = start(Vertical)[0]
    return found


class Watching(Vertical):
    """Overrides all four hooks, and changes nothing."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.sent: list[tuple[int, str]] = []
        self.taken: list[tuple[int, str]] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        for message in super().configure_train(server_round, arrays, config, grid):
            self.sent.append((server_round, message.metadata.message_type))
            yield message

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        for message in super().configure_evaluate(server_round, arrays, config, grid):
            self.sent.append((server_round, message.metadata.message_type))
            yield message

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Trained:
        replies = list(replies)
        self.taken += [(server_round, each.metadata.message_type) for each in replies]
        return super().aggregate_train(server_round, replies)

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        replies = list(replies)
        self.taken += [(server_round, each.metadata.message_type) for each in replies]
        return super().aggregate_evaluate(server_round, replies)


def test_hooks_see_every_message_and_every_reply_of_training() -> None:
    strategy, _ = start(Watching)
    exchanges = sum(record.exchange for record in strategy.run.records)
    assert len(strategy.sent) == len(strategy.taken) == exchanges
    assert sorted(strategy.sent) == sorted(strategy.taken)
    assert {number for number, _ in strategy.sent} == {1, 2, 3}  # a round for each evaluation
    for name, values in plain().top_arrays().items():
        np.testing.assert_array_equal(strategy.top_arrays()[name], values, err_msg=name)


def test_metrics_that_a_hook_returns_are_in_the_result() -> None:
    class Both(Vertical):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Trained:
            arrays, metrics = super().aggregate_train(server_round, replies)
            if metrics is not None:
                metrics["doubled"] = 2 * float(str(metrics["train_loss"]))
            return arrays, metrics

        def aggregate_evaluate(
            self, server_round: int, replies: Iterable[Message]
        ) -> MetricRecord | None:
            metrics = super().aggregate_evaluate(server_round, replies)
            return metrics and MetricRecord({**metrics, "own": float(server_round)})

    strategy, result = start(Both)
    trained, evaluated = result.train_metrics_clientapp, result.evaluate_metrics_clientapp
    assert sorted(trained) == sorted(evaluated) == [1, 2, 3]
    for metrics in trained.values():
        assert metrics["doubled"] == 2 * float(str(metrics["train_loss"]))
    assert [evaluated[number]["own"] for number in (1, 2, 3)] == [1.0, 2.0, 3.0]
    assert evaluated[3]["test_accuracy"] == strategy.run.history.entries[-1]["test_accuracy"]


def test_arrays_that_a_hook_returns_become_the_top_model() -> None:
    class Zeros(Vertical):
        def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Trained:
            arrays, metrics = super().aggregate_train(server_round, replies)
            if arrays is None:
                return None, metrics
            return pack({name: 0 * each for name, each in unpack(arrays).items()}), metrics

    strategy, result = start(Zeros)
    assert result.arrays is not None
    assert not any(array.numpy().any() for array in result.arrays.values())
    assert not any(values.any() for values in strategy.top_arrays().values())
    assert any(values.any() for values in plain().top_arrays().values())  # the control


class FirstMessage(Vertical):
    def configure_train(self, *arguments: Any) -> Iterable[Message]:
        return list(super().configure_train(*arguments))[:1]


class FirstReply(Vertical):
    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> Trained:
        return super().aggregate_train(server_round, list(replies)[:1])


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (FirstMessage, "Send every message that super"),
        (FirstReply, "leaves out the replies of the nodes"),
    ],
)
def test_a_hook_that_leaves_something_out_is_refused(kind: type[Vertical], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        start(kind)


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", ["train_config", "evaluate_config"])
def test_a_configuration_reaches_a_hook_and_no_party(name: str) -> None:
    given = {name: ConfigRecord({"rate": 0.5})}
    found: list[Any] = []

    class Taking(Vertical):
        def configure_train(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterable[Message]:
            found.append(dict(config))
            return super().configure_train(server_round, arrays, ConfigRecord(), grid)

        def configure_evaluate(
            self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
        ) -> Iterable[Message]:
            found.append(dict(config))
            return super().configure_evaluate(server_round, arrays, ConfigRecord(), grid)

    start(Taking, **given)
    assert {"rate": 0.5} in found
    with pytest.raises(ConfigError, match=f"{name} has rate, which reach no party"):
        start(Vertical, **given)


def test_training_starts_from_given_arrays_and_stops_after_the_given_rounds() -> None:
    rounds: list[tuple[int, ArrayRecord]] = []

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        rounds.append((number, arrays))
        return MetricRecord({"called": float(number)})

    keys = {**KEYS, "epochs": 20, "window": 1}
    given = pack(plain().top_arrays())
    strategy, result = start(
        Vertical, keys=keys, initial_arrays=given, num_rounds=2, evaluate_fn=evaluate
    )
    assert len(strategy.run.history.entries) in (2, 3)  # one more for windows that were out
    assert [number for number, _ in rounds] == list(range(len(rounds)))
    for name, values in unpack(rounds[0][1]).items():
        np.testing.assert_array_equal(values, plain().top_arrays()[name], err_msg=name)
    found = result.evaluate_metrics_serverapp
    assert [found[number]["called"] for number in sorted(found)] == sorted(found)


def test_local_only_stops_after_the_given_rounds_and_evaluates_its_last_top_model() -> None:
    rounds: list[tuple[int, ArrayRecord]] = []
    keys = {**KEYS, "strategy": "local-only", "epochs": 9, "window": 1}
    strategy, _ = start(
        Alone,
        keys=keys,
        num_rounds=2,
        evaluate_fn=lambda number, arrays: rounds.append((number, arrays)),
    )
    trained = len(strategy.history.entries)
    assert trained in (2, 3)
    assert [number for number, _ in rounds] == [0, trained]
    last, reported = unpack(rounds[-1][1]), strategy.top_arrays()
    assert all((last[name] == reported[name]).all() for name in reported)


@pytest.mark.nightly
def test_the_example_of_contributing_counts_uploads(run: Start, tmp_path: Path) -> None:
    file = tmp_path / "counted_uploads.py"
    named = EXAMPLES[file.name].replace("counted_uploads.py:", f"{file}:")
    file.write_text(named)
    summary = run(PARTIES, {**KEYS, "strategy": f"{file}:COUNTED"}).summary
    plain = run(PARTIES, {**KEYS, "strategy": "split-nn"}).summary
    assert summary["test_loss"] == plain["test_loss"]
    strategy, result = start(load_place(f"{file}:CountedUploads"))
    uploads = result.train_metrics_clientapp[3]["uploads"]
    assert uploads == sum(record.traffic.exchanges for record in strategy.run.records) > 0
