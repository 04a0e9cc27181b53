"""Validation: rows held out to choose by, when training stops, and the best model everywhere."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from strategies.callbacks import BestModel
from strategies.history import History
from strategies.turns import State
from strategies.vertical import Vertical, strategy_of
from tests.conftest import ALL_ROWS, Start, nightly, trained
from tests.data.test_sources import hugging_face, photographs
from tests.organisations import cancer, cut
from tests.party.nodes import asked, refused
from tests.party.test_state import KINDS, elsewhere, feedback_of, model_of, node, same, turn
from tests.protocol.test_label_noise import drawn
from tests.strategy.parts import METRICS, SPENT, TRAIN, Parts
from tests.strategy.test_checkpoint import assert_equal_runs, interrupted, resumed
from tests.strategy.test_faults import Misbehaving, answers_in_vain, refuses
from vfl_flower import client_app
from vfl_flower.config.errors import ConfigError, PartyError
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_features
from vfl_flower.data.split import divide, split
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.metrics import Metrics
from vfl_flower.launch.engines import Finished, predict_local, run_local
from vfl_flower.party import session as between
from vfl_flower.party.state import load_arrays, load_scalars
from vfl_flower.protocol.systems import resolve
from vfl_flower.tasks.inference.contribution import contribution
from vfl_flower.transport.flower_internals import begin_task, state_to_bytes
from vfl_flower.transport.local import LocalGrid
from vfl_flower.transport.messages import EvaluateOrder, RestoreOrder

Array = NDArray[Any]

PARTIES, ROWS = 3, 420
HELD_OUT, VALIDATION = 84, 50  # of them: 15 % of the 336 others


@pytest.fixture(scope="module")
def overfitted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keys of runs that do best early: a quarter of the labels is wrong."""
    generator = np.random.default_rng(0)
    x = generator.standard_normal((ROWS, 12)).astype(np.float32)
    y = (x[:, 0] + x[:, 5] + x[:, 9] > 0) ^ (generator.random(ROWS) < 0.25)
    path = tmp_path_factory.mktemp("data") / "noisy.npz"
    np.savez(path, X=x, y=y.astype(int))
    return {
        **{"dataset": f"npz:{path}", "bottom-hidden": 16, "embedding-size": 4, "top-hidden": 16},
        **{"optimizer": "adam", "party-lr": 0.007, "server-lr": 0.007, "noise-seed": 0},
        **{"epochs": 40, "patience": 3.0, "window": 9},
    }


SYSTEMS: dict[str, dict[str, Any]] = {
    "split-nn": {"strategy": "split-nn"},
    "ef-vfl": {"strategy": "ef-vfl"},
    "cascaded, in step": {"strategy": "cascaded", "quorum": PARTIES},
}
EVERY = {"checkpoint-every": 10}


@pytest.fixture(scope="module")
def whole(
    overfitted: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Finished]:
    """Return the run of a system, which is trained once."""
    out = tmp_path_factory.mktemp("whole")

    def of(name: str) -> Finished:
        keys = {**overfitted, **SYSTEMS[name], **EVERY, "out": str(out / name)}
        return run_local(PARTIES, keys)

    return cache(of)


VAFL: dict[str, Any] = {"strategy": "vafl", "delay": "straggler"}


def models_of(grid: LocalGrid) -> list[dict[str, Array]]:
    """Copies of the parties' models, as their states say that they are."""
    contexts = grid.contexts.values()
    found = [load_arrays(context.state, "model") for context in contexts]
    return [{name: each.copy() for name, each in model.items()} for model in found]


def assert_same(one: Any, other: Any) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys()
    for name, values in one.items():
        np.testing.assert_array_equal(values, other[name], err_msg=name)


def is_same(one: Any, other: Any) -> bool:
    return all(np.array_equal(values, other[name]) for name, values in one.items())


# --- the best model, everywhere -----------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", ["split-nn", nightly("ef-vfl"), "cascaded, in step"])
def test_the_model_is_that_of_a_run_of_just_the_best_epochs(
    overfitted: dict[str, Any], whole: Callable[[str], Finished], name: str, tmp_path: Path
) -> None:
    keys, run = {**overfitted, **SYSTEMS[name]}, whole(name)
    best, entries = run.summary["best_epoch"], run.history
    assert 1 <= best < entries[-1]["epoch"] == best + 3 < 40
    assert [entry["epoch"] for entry in entries] == list(range(1, int(best) + 4))
    just = {**keys, "epochs": int(best), "patience": 0.0, "out": str(tmp_path / "just")}
    short = run_local(PARTIES, just)
    for model in ("top", *(f"party-{party}" for party in range(PARTIES))):
        assert_same(run.parameters(model), short.parameters(model))
    same = [each for each in run.summary if each.startswith(("test_", "validation_"))]
    assert {each: run.summary[each] for each in same} == {
        each: short.summary[each] for each in same
    }
    one, other = (checkpoint.load(each.folder).arrays for each in (run, short))
    np.testing.assert_array_equal(one["test_table.rows"], other["test_table.rows"])
    files = [predict_local({"model": str(each.folder)}) for each in (run, short)]
    assert files[0].read_bytes() == files[1].read_bytes()
    assert len(pd.read_csv(files[0])) == HELD_OUT


@dataclass
class Watched:
    """The ClientApp, and each party's model at each of its evaluations."""

    models: dict[tuple[int, int], dict[str, Array]] = field(default_factory=dict)
    copies: int = 0  # that a party kept at once, at most
    restored: dict[int, int] = field(default_factory=dict)  # party -> number of the evaluation
    evaluated: list[int] = field(default_factory=list)  # numbers, in turn

    def __call__(self, message: Message, context: Context) -> Message:
        reply: Message = client_app.app(message, context)
        party, kind = int(context.node_config["partition-id"]), message.metadata.message_type
        if kind in ("evaluate", "query.restore"):
            scalars: Any = message.content["scalars"]
            number = int(scalars["number"])
            if kind == "query.restore":
                self.restored[party] = number
            else:
                model = load_arrays(context.state, "model")
                self.models[party, number] = {k: each.copy() for k, each in model.items()}
                kept = [each for each in context.state if each.startswith("model-at-")]
                self.copies = max(self.copies, len(kept))
                self.evaluated.append(number)
        return reply


@pytest.mark.one_by_day
@pytest.mark.parametrize("more", [{}, {"quorum": 2, "strategy": "vafl-t"}], ids=["1", "2"])
def test_out_of_step_each_party_has_the_model_that_was_evaluated(
    overfitted: dict[str, Any], monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    tops: list[dict[str, Array]] = []
    record = History.record

    def watched(self: History, *given: Any) -> Any:
        model = strategy.run.holder.top.state_dict()
        tops.append({name: each.numpy().copy() for name, each in model.items()})
        return record(self, *given)

    monkeypatch.setattr(History, "record", watched)
    client: Any = Watched()
    keys = {**overfitted, **VAFL, "eval-every": 0.5, **more}
    config = resolve(keys)
    strategy = strategy_of(config)(config, load_labels(config))
    grid = LocalGrid(client, PARTIES, keys, config)
    strategy.start(grid)

    history, figures = strategy.history, strategy.figures()
    assert history.best is not None and history.best < len(history.entries) - 1
    assert figures["best_epoch"] == history.entries[history.best]["epoch"]
    assert history.last["epoch"] < 40  # it has stopped, though one party is slower
    assert client.restored.keys() == set(range(PARTIES)) and client.copies == 3
    for party, model in enumerate(models_of(grid)):
        assert_same(model, client.models[party, client.restored[party]])
    assert_same(strategy.top_arrays(), tops[history.best])
    test = strategy.run.holder.evaluate().test
    assert test.loss == history.entries[history.best]["test_loss"] == figures["test_loss"]


def test_without_validation_rows_nothing_is_kept_and_the_last_model_counts(
    overfitted: dict[str, Any],
) -> None:
    client: Any = Watched()
    strategy, _ = trained(PARTIES, {**overfitted, "epochs": 8, "validation-fraction": 0.0}, client)
    assert client.copies == 0 and client.restored == {} and set(client.evaluated) == {0}
    figures = strategy.figures()
    assert figures["best_epoch"] is None and figures["validation_loss"] is None
    assert figures["test_loss"] == strategy.history.last["test_loss"]


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", ["split-nn", nightly("ef-vfl"), nightly("cascaded, in step")])
def test_a_run_that_is_cut_short_ends_with_the_same_best_model(
    overfitted: dict[str, Any], whole: Callable[[str], Finished], name: str, tmp_path: Path
) -> None:
    keys, best = {**overfitted, **SYSTEMS[name], **EVERY}, int(whole(name).summary["best_epoch"])
    after = {"before the best": max(1, best - 1), "after it": best + 2}
    for where, evaluation in after.items():
        folder = interrupted(tmp_path / where, keys, evaluation)
        assert_equal_runs(resumed(folder, **EVERY), whole(name))


# --- who chooses, and who does not --------------------------------------------------------------


def with_labels(keys: Mapping[str, Any], rows: slice) -> tuple[Vertical, LocalGrid]:
    """A run where the labels of these test rows are others."""
    config = resolve(keys)
    labels = load_labels(config)
    test = labels.test.copy()
    test[rows] = 1 - test[rows]
    strategy = strategy_of(config)(config, replace(labels, test=test))
    grid = LocalGrid(client_app.app, PARTIES, keys, config)
    strategy.start(grid)
    return strategy, grid


def test_test_rows_have_no_part_in_the_choice(overfitted: dict[str, Any]) -> None:
    (one, nodes), (other, others), (third, _) = (
        with_labels(overfitted, rows)
        for rows in (slice(0), slice(VALIDATION, None), slice(VALIDATION))
    )
    assert one.labels.validation == VALIDATION
    assert len(one.history.entries) == len(other.history.entries)
    assert one.history.best == other.history.best
    assert one.figures()["test_loss"] != other.figures()["test_loss"]
    assert_same(one.top_arrays(), other.top_arrays())
    for mine, theirs in zip(models_of(nodes), models_of(others), strict=True):
        assert_same(mine, theirs)
    # The control: validation rows have.
    assert one.history.best != third.history.best
    assert not is_same(one.top_arrays(), third.top_arrays())


@pytest.mark.parametrize("strategy", ["frozen", "centralised"])
def test_baselines_go_back_too(overfitted: dict[str, Any], strategy: str, run: Start) -> None:
    keys = {**overfitted, "strategy": strategy, "epochs": 60, "server-lr": 0.05}
    found = run(PARTIES, keys)
    best = found.summary["best_epoch"]
    assert best + 3 == found.history[-1]["epoch"] < 60
    short = run(PARTIES, {**keys, "epochs": int(best), "patience": 0.0})
    assert_same(found.parameters("top"), short.parameters("top"))
    assert found.summary["test_loss"] == short.summary["test_loss"]


def test_validation_rows_are_not_trained_on_and_scale_nothing(
    overfitted: dict[str, Any], tmp_path: Path
) -> None:
    """Other features and labels of validation rows change nothing that is learned."""
    config = resolve(overfitted)
    labels = load_labels(config)
    assert labels.places is not None and labels.test_places is not None
    chosen = labels.test_places[: labels.validation]
    assert not set(chosen) & set(labels.places)
    with np.load(overfitted["dataset"].removeprefix("npz:")) as arrays:
        x, y = arrays["X"].copy(), arrays["y"].copy()
    still = {**overfitted, "epochs": 2, "patience": 0.0}

    def ran(rows: Array) -> tuple[dict[str, Array], list[float]]:
        changed, labels = x.copy(), y.copy()
        changed[rows] *= 100
        labels[rows] = 1 - labels[rows]
        np.savez(tmp_path / "changed.npz", X=changed, y=labels)
        keys = {**still, "dataset": f"npz:{tmp_path / 'changed.npz'}", "eval-every": 2.0}
        strategy, _ = trained(PARTIES, keys)
        return strategy.top_arrays(), [each["test_loss"] for each in strategy.history.entries]

    unchanged = ran(chosen[:0])
    assert_same(unchanged[0], ran(chosen)[0])
    assert unchanged[1] == ran(chosen)[1]
    assert not is_same(unchanged[0], ran(labels.places[:5])[0])  # the control


# --- parties that are away, or have lost their state --------------------------------------------


def evaluated(*losses: float) -> Parts:
    """Parts of a run with these validation losses."""
    parts = Parts({"on-party-failure": "continue"})
    parts.run.attach([BestModel(lambda records: None)])
    for number, loss in enumerate(losses, 1):
        parts.budget.answered += 30
        for record in parts.records:
            record.evaluation = number
        entry = parts.history.record(parts.budget, 3, SPENT, None, Metrics(loss), METRICS)
        parts.run.tell("evaluated", entry)
    return parts


def is_asked_back(parts: Parts) -> None:
    """Party 1 fails."""
    parts.send(1, TRAIN)
    parts.take_failure(1, "raised an error.")
    parts.budget.answered += 30
    parts.messenger.ask_back()


def test_a_party_that_was_away_changes_the_choice_to_what_all_can_go_back_to() -> None:
    parts = evaluated(0.5, 0.6)
    assert parts.history.best == 0
    parts.run.stop("It is enough")
    is_asked_back(parts)
    parts.rejoin(1)
    seat = parts.records[1]
    assert seat.state is State.IDLE and not seat.remembers
    assert parts.budget.left == 0  # it has stopped, whoever comes back
    assert parts.history.best is None
    parts.history.best, parts.history.restored = 0, True  # at the end it is too late to choose
    is_asked_back(parts)
    parts.rejoin(1)
    assert parts.history.best == 0


@pytest.mark.parametrize("copy", ["none", "older", "best"])
def test_the_best_model_stays_if_the_returned_party_has_its_copy(copy: str) -> None:
    parts = evaluated(0.3, 0.5)
    is_asked_back(parts)
    best, last = {"none": (0, 0), "older": (0, 2), "best": (1, 0)}[copy]
    parts.rejoin(1, replace(parts.describe(1), best=best, last=last))
    assert parts.history.best == (0 if copy == "best" else None)
    # The run does not choose a model that a party lacks, however good it is.
    parts.records[1].remembers = False
    entry = parts.history.record(parts.budget, 3, SPENT, None, Metrics(0.1), METRICS)
    parts.run.tell("evaluated", entry)
    assert parts.history.best == (0 if copy == "best" else None)


class Forgetful(Misbehaving):
    """A party that fails and has lost all its state when it comes back."""

    def __call__(self, message: Message, context: Context) -> Message:
        fails_next = self.seen == self.number and self.later == []
        if fails_next and context.node_config["partition-id"] == self.party:
            context.state.clear()
        return super().__call__(message, context)


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        ("evaluate", answers_in_vain),
        nightly("evaluate", refuses),
        nightly("train", answers_in_vain),
        nightly("train", refuses),
    ],
)
def test_a_party_that_came_back_without_its_copies_goes_back_to_what_it_has(
    overfitted: dict[str, Any], kind: str, fault: Any
) -> None:
    keys = {**overfitted, **VAFL, "on-party-failure": "continue", "window": 11, "patience": 6.0}
    client: Any = Forgetful(fault, kind=kind, number=5)
    strategy, grid = trained(PARTIES, keys, client)
    figures, history = strategy.figures(), strategy.history
    assert client.later[0] == "query.rejoin" and figures["failed_parties"] == []
    assert history.best is not None
    losses = [entry["validation_loss"] for entry in history.entries]
    assert min(losses[: history.best]) < losses[history.best]  # that was before it was away
    assert figures["best_epoch"] == history.entries[history.best]["epoch"]
    test = strategy.run.holder.evaluate().test
    assert test.loss == history.entries[history.best]["test_loss"]
    # The label holder's embeddings equal the parties'.
    table = strategy.run.holder.held_out.table
    for party, context in enumerate(grid.contexts.values()):
        x = load_features(strategy.config, party, 3).test
        h = between.resume(context).party.learner.embeddings(x)
        np.testing.assert_array_equal(h.numpy(), table.of(party).numpy())


def loses_all_at_the_end(message: Message, context: Context) -> Message:
    """Party 1 has lost its state by the time that it is to go back."""
    at_the_end = message.metadata.message_type == "query.restore"
    if at_the_end and context.node_config["partition-id"] == 1 and not LOST:
        LOST.append(1)
        context.state.clear()
    return client_app.app(message, context)


LOST: list[int] = []


@pytest.mark.nightly
def test_a_party_that_loses_its_state_at_the_end_goes_back_by_what_is_on_its_disk(
    overfitted: dict[str, Any], tmp_path: Path
) -> None:
    LOST.clear()
    keys = {**overfitted, "checkpoint-every": 5}
    whole = run_local(PARTIES, {**keys, "out": str(tmp_path / "whole")})
    client: Any = loses_all_at_the_end
    run = run_local(PARTIES, {**keys, "out": str(tmp_path / "lost")}, client)
    assert LOST and run.summary["best_epoch"] == whole.summary["best_epoch"]
    for model in ("top", *(f"party-{party}" for party in range(PARTIES))):
        assert_same(run.parameters(model), whole.parameters(model))
    LOST.clear()
    sentence = r"^Party 1 failed: has no copy of the model at evaluation \d+\.$"
    with pytest.raises(PartyError, match=sentence):
        trained(PARTIES, overfitted, client)


@pytest.mark.nightly
def test_of_a_synchronous_system_no_party_runs_ahead_of_an_evaluation(
    overfitted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one party answers late, as nodes may, all stop after the same step."""
    pull, late = LocalGrid.pull_messages, list[Message]()

    def others_first(grid: LocalGrid, wanted: Any) -> list[Message]:
        heard = [*late, *pull(grid, wanted)]
        late[:] = [m for m in heard if m.metadata.src_node_id == 3]
        if len(late) == len(heard):
            late.clear()
            return heard
        return [message for message in heard if message not in late]

    keys = {**overfitted, "strategy": "ef-vfl", "labels": "shared"}
    in_turn, nodes = trained(PARTIES, keys)
    monkeypatch.setattr(LocalGrid, "pull_messages", others_first)
    strategy, others = trained(PARTIES, keys)
    assert strategy.history.last["epoch"] < 40
    for name in ("steps", "exchanges", "bytes_up", "bytes_down", "evaluation_bytes"):
        assert strategy.figures()[name] == in_turn.figures()[name]
    assert len(strategy.history.entries) == len(in_turn.history.entries)
    for one, other in zip(models_of(nodes), models_of(others), strict=True):
        assert_same(one, other)


# --- what a party keeps -------------------------------------------------------------------------


@pytest.fixture
def party() -> Iterator[Context]:
    """The Context of a party that has described itself."""
    begin_task()
    between.live.clear()
    yield node({**KINDS["momentum"], "validation-fraction": "auto"})
    between.live.clear()


def test_a_model_that_was_not_kept_is_refused_and_nothing_changes(party: Context) -> None:
    asked(party, EvaluateOrder(exchange=1, number=5))
    upload = asked(party, turn(2))
    before = {name: state_to_bytes(RecordDict({name: each})) for name, each in party.state.items()}
    sentence = r"^failed: has no copy of the model at evaluation 4\.$"
    refused(party, RestoreOrder(exchange=3, number=4), sentence)
    after = {name: state_to_bytes(RecordDict({name: each})) for name, each in party.state.items()}
    assert after == before
    asked(party, turn(3, feedback_of(KINDS["momentum"], upload)))  # it goes on as if it had not
    learned = model_of(party)
    asked(party, RestoreOrder(exchange=4, number=5))
    assert not same(learned, model_of(party))
    assert load_scalars(party.state)["pending"] == []


def test_copies_do_not_pile_up_whatever_numbers_are_sent(party: Context) -> None:
    numbers = [1, 2, 3, 2**53, 7, 7, 0, 2**30, 5, 6]
    for place, number in enumerate(numbers):
        best, last = numbers[place // 2], numbers[place - 1]
        asked(party, EvaluateOrder(exchange=place + 1, number=number, best=best, last=last))
        assert sum(name.startswith("model-at-") for name in party.state) <= 3


def test_a_copy_does_not_change_while_the_model_learns(party: Context) -> None:
    keys = KINDS["momentum"]
    feedback = feedback_of(keys, asked(party, turn(1)))
    asked(party, EvaluateOrder(exchange=2, number=1, arrays=feedback))
    evaluated = model_of(party)
    feedback = feedback_of(keys, asked(party, turn(3)))
    asked(party, EvaluateOrder(exchange=4, number=2, best=1, last=1, arrays=feedback))
    assert not same(evaluated, model_of(party))
    moved = elsewhere(party)  # another process has the same copies
    asked(moved, RestoreOrder(exchange=5, number=1))
    assert same(evaluated, model_of(moved))


# --- which rows ---------------------------------------------------------------------------------


@given(
    rows=st.integers(2, 400),
    test=st.sampled_from([0.0, 0.1, 0.2, 0.5]),
    fraction=st.sampled_from([None, 0.0, 0.01, 0.15, 0.5, 0.9]),
    apart=st.booleans(),
)
def test_parts_are_disjoint_cover_all_rows_and_agree(
    rows: int, test: float, fraction: float | None, apart: bool
) -> None:
    data = replace(resolve({}).data, test_fraction=test, validation_fraction=fraction)
    ids = np.arange(rows + 9 * apart)
    features = np.stack([ids, ids], 1).astype(np.float32)
    sides = []
    for whole in (ids, features):
        parts = [whole[:rows], whole[rows:]] if apart else [whole]
        try:
            sides.append(split(data, parts))
        except ConfigError as error:
            assert "leaves none to train on" in str(error)
            return
    (train, held, (train_ids, held_ids, validation)), (x, x_held, found) = sides
    assert np.array_equal(train, train_ids) and np.array_equal(held, held_ids)
    assert np.array_equal(x[:, 0], train) and np.array_equal(x_held[:, 1], held)
    assert found[2] == validation and len(train) > 0
    assert not set(train) & set(held[:validation])
    assert sorted({*train, *held}) == ids.tolist()
    if apart or test:
        assert len(train) + len(held) == len(ids)  # none of them twice
    else:
        assert held[validation:].tolist() == train.tolist()
    trainable = len(train) + validation
    if fraction is None:
        assert validation == (int(0.15 * trainable) if trainable >= 200 else 0)
    else:
        assert validation == math.ceil(fraction * trainable)


def test_of_many_rows_20000_are_enough() -> None:
    *_, validation = divide(resolve({"test-fraction": 0.0}).data, 200_000)
    assert validation == 20_000


def test_some_rows_are_left_to_train_on(overfitted: dict[str, Any]) -> None:
    keys = {**overfitted, "validation-fraction": 0.999}
    with pytest.raises(ConfigError, match=r"336 training rows and validation-fraction = 0\.999 le"):
        load_labels(resolve(keys))
    with pytest.raises(ConfigError, match=r"leaves none to train on\. Use a smaller fraction"):
        load_features(resolve(keys), 0, 2)


KINDS_OF_ROWS: dict[str, dict[str, Any]] = {
    "partial rows": {"presence": 0.6},
    "tested on training rows": {"test-fraction": 0.0},
    "out of step, partial rows": {"strategy": "vafl", "presence": 0.6},
}


@pytest.mark.one_by_day
@pytest.mark.parametrize("more", KINDS_OF_ROWS.values(), ids=list(KINDS_OF_ROWS))
def test_figures_and_predictions_are_of_test_rows_alone(
    overfitted: dict[str, Any], more: dict[str, Any], tmp_path: Path
) -> None:
    keys = {**overfitted, **more, "epochs": 8, "out": str(tmp_path / "run")}
    run = run_local(PARTIES, keys)
    labels = load_labels(resolve(overfitted | more))
    assert labels.validation >= VALIDATION and run.summary["best_epoch"] is not None
    file = predict_local({"model": str(run.folder)})
    said = pd.read_csv(file)
    assert len(said) == len(labels.tested.test) == len(labels.test) - labels.validation
    true = np.asarray(labels.classes)[labels.tested.test]
    accuracy = (said["prediction"].to_numpy() == true).mean()
    assert accuracy == pytest.approx(run.summary["test_accuracy"], abs=1e-6)


def test_a_separate_test_part_stays_whole(tmp_path: Path) -> None:
    x, y = np.random.default_rng(0).standard_normal((300, 6)), np.arange(300) % 2
    path = tmp_path / "parts.npz"
    np.savez(path, X_train=x[:240], y_train=y[:240], X_test=x[240:], y_test=y[240:])
    keys = {"dataset": f"npz:{path}", "epochs": 2, "out": str(tmp_path / "run")}
    labels = load_labels(resolve(keys))
    assert (len(labels.train), labels.validation) == (204, 36)
    assert labels.tested.test.tolist() == y[240:].tolist()
    run_local(2, keys)
    assert len(pd.read_csv(predict_local({"model": str(tmp_path / "run")}))) == 60


@pytest.mark.parametrize("align", [nightly("psi"), "any"])
def test_organisations_choose_by_their_own_rows(tmp_path: Path, align: str) -> None:
    organisations = cut(tmp_path, cancer(columns=9), own=3)
    run = organisations.run("run", {"align": align, "epochs": 4, "strategy": "vafl"})
    assert run.summary["best_epoch"] is not None
    if align == "psi":  # of all parties or none
        return
    figures = contribution(run.folder)
    assert figures["all"] == pytest.approx(run.summary["test_auc"], abs=1e-6)


def test_images_that_are_read_when_needed(tmp_path: Path) -> None:
    dataset = hugging_face(tmp_path / "photos", "image", photographs())
    keys = {"dataset": dataset, "validation-fraction": 0.2, "epochs": 1}
    keys |= {"out": str(tmp_path / "run")}
    run = run_local(2, keys)
    labels, block = load_labels(resolve(keys)), load_features(resolve(keys), 0, 2)
    assert block.validation == labels.validation > 0
    assert len(block.tested) == len(labels.tested.test)
    assert run.summary["validation_loss"] is not None
    assert len(pd.read_csv(predict_local({"model": str(run.folder)}))) == len(block.tested)


# --- privacy ------------------------------------------------------------------------------------


def test_validation_labels_carry_the_noise_too(
    overfitted: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))
    keys = {**overfitted, "privacy": "labels", "epsilon": 1.0}
    labels = load_labels(resolve(keys))
    noisy, _ = drawn(labels, keys)
    first = labels.validation
    flipped = (noisy.test[:first] != labels.test[:first]).mean()
    assert 0.1 < flipped < 0.5  # by randomised response 1 / (1 + e); the true ones have none
    assert np.array_equal(noisy.test[first:], labels.test[first:])
    # A row has one noise, whether it is trained on or chosen by.
    all_train, _ = drawn(load_labels(resolve(keys | ALL_ROWS)), keys | ALL_ROWS)
    of_row = dict(zip(all_train.places, all_train.train, strict=True))  # type: ignore[arg-type]
    places = noisy.test_places[:first]  # type: ignore[index]
    assert [of_row[place] for place in places] == noisy.test[:first].tolist()


def test_epsilon_of_scalars_covers_no_validation_labels(run: Start) -> None:
    dpzv = {"strategy": "dpzv", "noise-multiplier": 1.0, "dataset": "breast-cancer"}
    assert resolve(dpzv).data.validation_fraction == 0.0
    with pytest.raises(ConfigError, match=r"validation-fraction = 0\.1\. Leave it out"):
        resolve({**dpzv, "validation-fraction": 0.1})
    assert resolve({**dpzv, "validation-fraction": 0.0})
    assert run(2, {**dpzv, "epochs": 1, "window": 15}).summary["validation_loss"] is None


def test_test_rows_count_among_uploads_like_validation_rows(run: Start) -> None:
    """Both are uploaded at each evaluation: so is what is said to be spent."""
    keys = {"privacy": "perturbed-embedding", "dataset": "breast-cancer", "window": 13}
    keys |= {"epochs": 2, "eval-every": 0.1, "strategy": "split-nn", "noise-seed": -1}
    with_validation = run(2, keys).summary["epsilon"]
    assert with_validation == run(2, {**keys, **ALL_ROWS, "window": 15}).summary["epsilon"]
