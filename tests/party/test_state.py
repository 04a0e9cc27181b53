"""A party's state is its model's own memory: what must hold of it all the same."""

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Message, RecordDict
from numpy.typing import NDArray

from tests.conftest import ALL_ROWS, FASTER
from tests.party.nodes import asked, refused
from vfl_flower import client_app
from vfl_flower.config.errors import VflError
from vfl_flower.models import passes, training
from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.party import learner as learner_module
from vfl_flower.party import session as between
from vfl_flower.party import state
from vfl_flower.party.learner import Learner
from vfl_flower.party.party import Party
from vfl_flower.protocol.directions import window as directions_module
from vfl_flower.transport import messages
from vfl_flower.transport.flower_internals import begin_task, state_from_bytes, state_to_bytes
from vfl_flower.transport.wire import to_message

Arrays = dict[str, NDArray[Any]]
KEYS: dict[str, Any] = {
    **{**ALL_ROWS, "dataset": "breast-cancer", "strategy": "vafl", "window": 2, "epochs": 4},
    **{"noise-seed": 0, "party-lr": 0.5},
}
ZEROTH = {**KEYS, "strategy": "cascaded"}
KINDS = {
    "first order": KEYS,
    "momentum": {**KEYS, "optimizer": "momentum"},
    "adam": {**KEYS, "optimizer": "adam"},
    "zeroth order": ZEROTH,
    "dpzv": {**FASTER, **KEYS, "strategy": "dpzv", "noise-multiplier": 1.0},
}
every_kind = pytest.mark.parametrize("keys", KINDS.values(), ids=KINDS)


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    begin_task()
    between.live.clear()
    yield
    between.live.clear()


def node(keys: dict[str, Any]) -> Context:
    of_party: dict[str, Any] = {"partition-id": 0, "num-partitions": 2, "simulated": True}
    context = Context(7, 2, of_party, RecordDict(), dict(keys))
    asked(context, messages.DescribeOrder(outputs=1), messages.Description)
    return context


def sent(context: Context, order: messages.Order) -> Message:
    return client_app.app(to_message(order, 2, 60), context)


def turn(exchange: int, feedback: Arrays | None = None) -> messages.TrainOrder:
    first = 2 * (exchange - 1)
    order = messages.TrainOrder(exchange=exchange, epoch=0, first=first, steps=2, coordinated=False)
    return replace(order, arrays=feedback or {})


def feedback_of(keys: dict[str, Any], upload: Any, size: float = 1.0) -> Arrays:
    if keys["strategy"] == "vafl":
        return {"gradient": size * upload.arrays["embedding"] / 10}
    return {"difference": np.array([size, -size], np.float32) / 10}


def model_of(context: Context) -> dict[str, NDArray[Any]]:
    """A copy of what the state says that the model is."""
    arrays: Any = context.state["model"]
    return {name: array.numpy() for name, array in arrays.items()}


def same(one: dict[str, NDArray[Any]], other: dict[str, NDArray[Any]]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[k], other[k]) for k in one)


def party() -> Party:
    return between.live[0, 2].party


def elsewhere(context: Context) -> Context:
    """The same state, in another process."""
    between.live.clear()
    return copy.deepcopy(context)


# --- once, and as it is -------------------------------------------------------------------------


@every_kind
def test_a_state_has_the_memory_of_the_model_and_no_copy(keys: dict[str, Any]) -> None:
    context = node(keys)
    upload = asked(context, turn(1))
    asked(context, turn(2, feedback_of(keys, upload)))
    places = {
        group: {each.__array_interface__["data"][0] for each in arrays.values()}
        for group in ("model", "optimizer")
        if (arrays := state.load_arrays(context.state, group)) or group == "model"
    }
    learner = party().learner
    of_optimizer = [each for kept in learner.optimizer.state.values() for each in kept.values()]
    found = {"model": [*learner.model.parameters()], "optimizer": of_optimizer}
    for group, tensors in found.items():
        assert places.get(group, set()) == {each.data_ptr() for each in tensors if each is not None}
    assert not any(p.grad is not None for p in party().learner.model.parameters())


@every_kind
@pytest.mark.parametrize(
    "passed_on",
    [
        lambda each: pickle.loads(pickle.dumps(each)),
        copy.deepcopy,
        lambda each: state_from_bytes(state_to_bytes(each)),
    ],
    ids=["pickle", "copy", "protobuf"],
)
def test_what_leaves_the_process_stays_as_it_was_then(
    keys: dict[str, Any], passed_on: Callable[[RecordDict], RecordDict]
) -> None:
    context = node(keys)
    upload = asked(context, turn(1))
    feedback = feedback_of(keys, upload)
    left = Context(7, 2, context.node_config, passed_on(context.state), context.run_config)
    before = model_of(left)
    order = messages.EvaluateOrder(exchange=2, arrays=feedback)
    expected = asked(context, order).arrays["embedding"]
    assert same(model_of(left), before) and not same(model_of(context), before)
    between.live.clear()
    found = asked(left, order).arrays["embedding"]
    np.testing.assert_array_equal(found, expected)
    assert same(model_of(left), model_of(context))


def test_two_states_in_one_process_do_not_touch_each_other() -> None:
    """As where a state of before is served again: both are of the same party and run."""
    context = node(KEYS)
    feedback = feedback_of(KEYS, asked(context, turn(1)))
    other = copy.deepcopy(context)
    before = model_of(context)
    asked(other, messages.EvaluateOrder(exchange=2, arrays=feedback))
    learned = model_of(other)
    assert same(model_of(context), before) and not same(learned, before)
    asked(context, messages.EvaluateOrder(exchange=2, arrays={"gradient": -feedback["gradient"]}))
    assert same(model_of(other), learned)
    for name, values in model_of(context).items():  # a step to the other side
        np.testing.assert_allclose(values - before[name], before[name] - learned[name], atol=1e-6)


def test_a_state_that_nobody_holds_costs_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under Ray, where each message brings a new copy of the state."""
    settled: list[ArrayRecord] = []
    monkeypatch.setattr(state, "settle", settled.append)
    context = node(KEYS)
    feedback: Arrays = {}
    for exchange in (1, 2, 3):
        context.state = pickle.loads(pickle.dumps(context.state))
        feedback = feedback_of(KEYS, asked(context, turn(exchange, feedback)))
    assert not settled
    held = context.state["model"]  # the control
    context.state = pickle.loads(pickle.dumps(context.state))
    asked(context, messages.EvaluateOrder(exchange=4, arrays=feedback))
    assert settled == [held]


# --- messages that fail -------------------------------------------------------------------------


@every_kind
def test_a_message_that_fails_before_learning_leaves_all_as_it_was(keys: dict[str, Any]) -> None:
    context = node(keys)
    upload = asked(context, turn(1))
    kept = state_to_bytes(context.state)
    for order in (replace(turn(2), first=10**6), turn(9, feedback_of(keys, upload))):
        with pytest.raises(VflError):
            asked(context, order)
        assert state_to_bytes(context.state) == kept


@every_kind
@pytest.mark.parametrize("goes_on", ["here", "elsewhere"])
def test_what_a_message_that_fails_has_learned_stays_and_is_learned_once(
    keys: dict[str, Any], goes_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = node(keys)
    feedback = feedback_of(keys, asked(context, turn(1)))
    whole = copy.deepcopy(context)
    with monkeypatch.context() as patch:  # when the model has learned, and embeds anew
        patch.setattr(Learner, "embeddings", raises)
        refused(context, messages.EvaluateOrder(exchange=2, arrays=feedback), "not enough memory")
    twice = copy.deepcopy(context)
    failed = context if goes_on == "here" else elsewhere(context)
    between_ = model_of(failed)
    asked(failed, messages.RejoinOrder(exchange=3, outputs=1), messages.Description)
    asked(failed, messages.EvaluateOrder(exchange=4))
    between.live.clear()
    asked(whole, messages.EvaluateOrder(exchange=2, arrays=feedback))
    assert same(model_of(failed), between_) and same(model_of(failed), model_of(whole))
    between.live.clear()
    sent(twice, messages.EvaluateOrder(exchange=2, arrays=feedback))
    assert same(model_of(twice), between_)  # if it is sent the same once more
    again = copy.deepcopy(failed)
    sent(again, messages.EvaluateOrder(exchange=5, arrays=feedback))  # no window awaits it any more
    assert same(model_of(again), between_)


def raises(*given: Any) -> Any:
    raise MemoryError


@pytest.mark.parametrize(
    ("kind", "fails_at"),
    [("zeroth order", 0), ("zeroth order", 1), *(("dpzv", each) for each in range(4))],
)
def test_a_perturbed_model_is_restored_when_its_pass_fails(
    kind: str, fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directions_module, "_STACK", 0)
    context = node(KINDS[kind])
    before = model_of(context)
    calls = iter(range(100))

    def call(model: Any, *given: Any) -> Any:
        if next(calls) == fails_at:
            assert not same(model_of(context), before)  # the control: it is perturbed then
            raise KeyboardInterrupt
        return torch.zeros(32, 32)

    monkeypatch.setattr(passes, "one", call)
    with pytest.raises(KeyboardInterrupt):
        sent(context, turn(1))
    for name, values in model_of(context).items():
        np.testing.assert_allclose(values, before[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_a_direction_that_is_added_in_part_is_taken_back(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(directions_module, "_STACK", 0)
    monkeypatch.setattr(directions_module, "_BLOCK", 100)
    context = node(ZEROTH)
    before, draw = model_of(context), directions_module.Directions._draw
    drawn = iter(range(100))

    def broken(*given: Any) -> Any:
        for number, each in enumerate(draw(*given)):
            if number == kept and next(drawn) == 0:
                raise MemoryError
            yield each

    monkeypatch.setattr(directions_module.Directions, "_draw", broken)
    sent(context, turn(1))
    for name, values in model_of(context).items():
        np.testing.assert_allclose(values, before[name], rtol=0, atol=1e-6)


# --- large models, and many rows ----------------------------------------------------------------


@pytest.mark.parametrize("large", [False, True])
def test_many_rows_are_embedded_part_by_part(large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    node({**KEYS, "batch-size": 16})
    whole, forward, seen = party(), BottomModel.forward, list[int]()

    def watched(model: BottomModel, x: Any, *given: Any) -> Any:
        seen.append(len(x))
        return forward(model, x, *given)

    monkeypatch.setattr(BottomModel, "forward", watched)
    at_once = whole.learner.embeddings(whole.inputs.block.test)
    assert seen == [114]
    most = 16 if large else 50
    monkeypatch.setattr(learner_module, "_AT_ONCE", 50 * whole.inputs.columns)
    monkeypatch.setattr(training, "_LARGE", 10 if large else 2**20)
    seen.clear()
    by_part = whole.learner.embeddings(whole.inputs.block.test)
    assert sum(seen) == 114 and max(seen) == most
    torch.testing.assert_close(by_part, at_once, rtol=0, atol=1e-6)
    assert whole.learner.embeddings(whole.inputs.block.test[:0]).shape == (0, 32)


@pytest.mark.parametrize("strategy", ["cascaded", "dpzv"])
def test_a_large_model_meets_one_mini_batch_at_once(
    strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = KINDS["dpzv" if strategy == "dpzv" else "zeroth order"]
    sent_up = asked(node(keys), turn(1)).arrays
    monkeypatch.setattr(training, "_LARGE", 10)
    call, rows = passes.one, list[int]()

    def watched(model: Any, x: Any, *given: Any) -> Any:
        rows.append(len(x))
        return call(model, x, *given)

    monkeypatch.setattr(passes, "one", watched)
    between.live.clear()
    found = asked(node(keys), turn(1)).arrays
    assert set(rows) == {32} and found.keys() == sent_up.keys()
    for name, values in sent_up.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-4, atol=1e-5)
