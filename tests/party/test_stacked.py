"""Parties of one process that are computed together, against the same parties one by one."""

import gc
from collections.abc import Iterator
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from sklearn.datasets import make_classification

from tests.conftest import ALL_ROWS, Start, nightly
from vfl_flower import client_app
from vfl_flower.config.errors import PartyError, VflError
from vfl_flower.config.options import EstimatorConfig
from vfl_flower.config.plugins import SYSTEMS
from vfl_flower.launch.engines import run_local
from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.party import session as between
from vfl_flower.party import stacked
from vfl_flower.party.learner import Learner
from vfl_flower.party.party import Party
from vfl_flower.party.stacked import FEWEST, Stack, StackedModel
from vfl_flower.party.state import load_arrays, load_scalars
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.directions.window import Directions, StackedDirections
from vfl_flower.protocol.system import load_system
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.local import LocalGrid
from vfl_flower.transport.messages import (
    Arrays,
    DescribeOrder,
    Description,
    EvaluateOrder,
    TrainOrder,
    Upload,
)
from vfl_flower.transport.wire import read_reply, to_message

PARTIES = FEWEST + 2
ROUNDING: Any = {"rtol": 1e-4, "atol": 2e-6}
"""Between a batched product and one for each party, after these few steps."""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two columns for each party, some 100 rows."""
    x, y = make_classification(120, 2 * PARTIES, n_informative=8, random_state=0)
    place = tmp_path_factory.mktemp("data") / "rows.npz"
    np.savez(place, X=x.astype(np.float32), y=y)
    return {
        **ALL_ROWS,
        "dataset": f"npz:{place}",
        "bottom-hidden": 8,
        "embedding-size": 4,
        "top-hidden": 8,
        "noise-seed": 0,
        "epochs": 2,
    }


@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many parties each stack was of, each time that one has embedded."""
    sizes: list[int] = []
    embed = Stack.embed

    def counted(stack: Stack, turns: Any) -> None:
        sizes.append(len(turns))
        embed(stack, turns)

    monkeypatch.setattr(Stack, "embed", counted)
    return sizes


def one_by_one(message: Message, context: Context) -> Message:
    """The ClientApp, as any that serves no turns of many parties."""
    return client_app.app(message, context)


def assert_same(run: Start, keys: dict[str, Any], parties: int = PARTIES) -> None:
    """Of a run together and one by one, models and history are equal but for rounding."""
    together, apart = run(parties, keys), run(parties, keys, one_by_one)  # type: ignore[arg-type]
    names = [path.stem for path in apart.folder.glob("*.npz") if path.stem != "checkpoint"]
    assert len(names) >= parties
    for name in names:
        ours, theirs = together.parameters(name), apart.parameters(name)
        for key in theirs:
            np.testing.assert_allclose(ours[key], theirs[key], **ROUNDING, err_msg=f"{name} {key}")
    counts = "epoch", "steps", "exchanges", "bytes_up", "bytes_down", "virtual_seconds"
    for ours, theirs in zip(together.history, apart.history, strict=True):
        assert all(ours[name] == theirs[name] for name in counts)
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-4)
    assert together.summary.get("epsilon") == apart.summary.get("epsilon")


DAILY = ("split-nn", "vafl", "ef-vfl", "syn-zoo", "dpzv")
SYSTEM_NAMES = [name for name in SYSTEMS.known if not load_system(name).baseline]


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "system", [name if name in DAILY else nightly(name) for name in SYSTEM_NAMES]
)
def test_parties_of_every_system_learn_the_same_together_and_one_by_one(
    run: Start, keys: dict[str, Any], stacks: list[int], system: str
) -> None:
    # Rounding errors of losses are divided by mu.
    mu = {"mu": 0.1} if system in ("asyrevel", "synrevel", "syn-zoo") else {}
    assert_same(run, {**keys, **mu, "strategy": system, "window": 2})
    assert max(stacks, default=0) == PARTIES


KINDS: dict[str, dict[str, Any]] = {
    "momentum, windows": {"optimizer": "momentum", "window": 3, "party-lr": 0.05},
    "adamw, weight decay, schedule": {
        **{"optimizer": "adamw", "weight-decay": 0.01, "party-lr": 0.01},
        **{"lr-schedule": "cosine", "warm-up": 0.5},
    },
    "schedule, l2, windows": {
        **{"lr-schedule": "one-cycle", "regulariser-weight": 0.01, "window": 2}
    },
    # Rounding errors of losses are divided by mu, so one step needs a large mu.
    "one difference a window": {"strategy": "syn-zoo", "window": 1, "mu": 0.1},
    "two-sided, sphere, sgd": {
        **{"strategy": "syn-zoo", "differences": "two-sided", "directions": "sphere"},
        **{"optimizer": "sgd", "lr-schedule": "one-cycle", "window": 1, "mu": 0.1},
    },
    "differences, regulariser, windows": {
        **{"strategy": "synrevel", "regulariser": "nonconvex", "regulariser-weight": 0.01},
        **{"optimizer": "momentum", "window": 3},
    },
    "difference of a regulariser": {
        **{"strategy": "synrevel", "regulariser-weight": 0.01, "window": 1, "mu": 0.1}
    },
    "differences of all at once, masked": {
        **{"strategy": "syn-zoo", "perturbs": "all", "aggregation": "secure", "combine": "mean"}
    },
    "differences, qsgd": {"strategy": "cascaded", "codec": "qsgd", "bits": 8, "window": 2},
    "clipped and noisy, windows": {
        **{"strategy": "dpzv", "batch-size": 32, "window": 2, "mu": 0.1}
    },
    "Poisson": {"sampling": "poisson", "window": 2},
    "error feedback, qsgd": {"strategy": "ef-vfl", "codec": "qsgd", "bits": 8},
    "validation": {"validation-fraction": 0.2, "patience": 1, "epochs": 4, "party-lr": 2.0},
    "masked sums": {"aggregation": "secure", "combine": "mean", "window": 2},
    "linear, sum": {"bottom-model": "linear", "top-model": "sum", "embedding-size": "auto"},
}


BY_DAY = [name if place in (0, 1, 3, 4) else nightly(name) for place, name in enumerate(KINDS)]


@pytest.mark.one_by_day
@pytest.mark.parametrize("kind", BY_DAY)
def test_so_they_do_by_every_optimizer_and_schedule(
    run: Start, keys: dict[str, Any], stacks: list[int], kind: str
) -> None:
    assert_same(run, {**keys, **KINDS[kind]})
    assert max(stacks) == PARTIES


APART: dict[str, dict[str, Any]] = {
    "noise": {"privacy": "perturbed-embedding"},
    "clipped": {"clip-gradient": 1.0},
    "surrogates down": {"downlink-codec": "top-k", "downlink-compression": "error-feedback"},
    "secret mini-batches": {"strategy": "vafl", "sampling": "poisson"},
    "shared labels": {"strategy": "ef-vfl", "labels": "shared"},
    "delays": {"strategy": "vafl", "delay": "exponential"},
}


@pytest.mark.nightly
@pytest.mark.parametrize("kind", APART)
def test_what_is_not_alike_is_computed_one_by_one(
    run: Start, keys: dict[str, Any], stacks: list[int], kind: str
) -> None:
    """The first turns of all come at once, whatever delays there are then."""
    run(PARTIES, {**keys, **APART[kind], "epochs": 1})
    assert len(stacks) == (1 if kind == "delays" else 0)


def test_parties_whose_directions_take_much_memory_are_computed_one_by_one(
    run: Start, keys: dict[str, Any], stacks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {**keys, "strategy": "cascaded", "window": 4}
    run(PARTIES, given)
    assert stacks and set(stacks) == {PARTIES}
    stacks.clear()
    monkeypatch.setattr(stacked, "_DIRECTIONS", 4 * 100)
    run(PARTIES, given)
    assert not stacks


@pytest.fixture(params=[False, True])
def exempts(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Say whether the program has exempted its objects from garbage collection, as tests have."""
    if not request.param:
        gc.unfreeze()
    yield request.param
    gc.freeze()


def test_garbage_collection_is_rare_until_a_run_of_many_parties_ends(
    elsewhere: None, keys: dict[str, Any], exempts: bool
) -> None:
    before, within = (gc.get_threshold(), gc.get_freeze_count()), Mock()
    assert (before[1] > 0) is exempts
    within.evaluated = lambda entry: seen.append((gc.get_threshold()[0], gc.get_freeze_count()))
    for parties, rarely in ((PARTIES, True), (2, False)):  # few are the control
        seen: list[tuple[int, int]] = []
        run_local(parties, {**keys, "epochs": 1}, observers=[within])
        assert seen and (seen[-1][0] == 100 * PARTIES) is rarely
        assert (seen[-1][1] > before[1]) is (rarely and not exempts)
        assert gc.get_threshold() == before[0] and (gc.get_freeze_count() > 0) is exempts


@pytest.mark.parametrize("kind", ["gaussian", "sphere", "scaled-sphere"])
def test_each_party_of_a_stack_has_the_directions_that_it_has_alone(kind: str) -> None:
    config = EstimatorConfig(directions=kind)
    models = [torch.nn.Linear(3, 2) for _ in range(3)]
    keys = [b"a|1", b"b|1", b"c|2"]
    named = [list(model.parameters()) for model in models]
    stacked = [torch.stack([each.detach() for each in of]) for of in zip(*named, strict=True)]
    u = StackedDirections(config, keys, models[0], stacked).stack(4)
    together = StackedDirections(config, keys, models[0], stacked)
    together.add(0, together.parameters, [0.5, -0.25, 2.0])
    for party, (key, model) in enumerate(zip(keys, models, strict=True)):
        alone = Directions(config, key, model)
        torch.testing.assert_close(u[:, party], alone.stack(4), rtol=1e-6, atol=0)
        assert not torch.allclose(u[:, party], Directions(config, b"d|1", model).stack(4))
        alone.add(0, alone.parameters, [0.5, -0.25, 2.0][party])
        for of_stack, mine in zip(stacked, alone.parameters, strict=True):
            torch.testing.assert_close(of_stack[party], mine, rtol=1e-6, atol=1e-7)


def contexts_of(keys: dict[str, Any]) -> list[Context]:
    """Of parties that have described themselves."""
    grid = LocalGrid(client_app.app, PARTIES, keys, resolve(keys))
    orders = [to_message(DescribeOrder(outputs=1), node, 60.0) for node in grid.get_node_ids()]
    for reply in grid.send_and_receive(orders):
        read_reply(reply, Description)
    return list(grid.contexts.values())


def turns(contexts: list[Context], number: int, answers: list[Arrays]) -> list[Message]:
    """Messages of a turn, each with an answer."""
    epoch, first = divmod(number - 1, 3)
    order = partial(
        TrainOrder, exchange=number, epoch=epoch, first=first, steps=1, coordinated=True
    )
    return [
        to_message(order(arrays=answer), context.node_id, 60.0)
        for context, answer in zip(contexts, answers, strict=True)
    ]


def sent(reply: Message) -> Any:
    return read_reply(reply, Upload).arrays["embedding"]


def test_who_is_sent_an_answer_of_no_use_fails_alone(
    keys: dict[str, Any], stacks: list[int]
) -> None:
    serve, replies = client_app.app.serve_turns, []
    answers: list[Arrays] = [
        {"gradient": np.full((32, 4), 0.1 * party, np.float32)} for party in range(PARTIES)
    ]
    answers[3] = {"gradient": np.full((32, 4), np.nan, np.float32)}
    answers[5] = {**answers[5], "odd": np.zeros(1)}
    for together in (True, False):
        contexts = contexts_of(keys)
        first, second, third = (
            turns(contexts, 1, [{}] * PARTIES),
            turns(contexts, 2, answers),
            turns(contexts, 3, answers),
        )
        served = [
            serve(turn, contexts) if together else list(map(client_app.app, turn, contexts))
            for turn in (first, second, third)
        ]
        replies.append(served)
        between.forget(contexts[0].run_id)
    for ours, theirs in zip(*replies, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            try:
                expected = sent(other)
            except VflError as error:
                with pytest.raises(type(error)) as raised:
                    sent(one)
                assert str(raised.value) == str(error)
            else:
                np.testing.assert_allclose(sent(one), expected, **ROUNDING)
    for turn in (1, 2):
        failures = []
        for party, reply in enumerate(replies[0][turn]):
            try:
                sent(reply)
            except VflError as error:
                failures.append((party, str(error)))
        assert [party for party, _ in failures] == [3, 5]
    assert stacks == [PARTIES, PARTIES - 2]  # one by one, where an answer was of no use


@pytest.mark.one_by_day
@pytest.mark.parametrize("odd", [None, np.nan, 1e7])
def test_an_evaluation_learns_in_a_stack_and_feedback_of_no_use_fails_alone(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch, odd: float | None
) -> None:
    answers: list[Arrays] = [
        {"gradient": np.full((32, 4), 0.1 * party, np.float32)} for party in range(PARTIES)
    ]
    if odd is not None:
        answers[3]["gradient"][5, 2] = odd
    alone, replies = [], []
    learn = Party.learn

    def counted(party: Party, arrays: Arrays) -> None:
        alone.append(party.learner.index)
        learn(party, arrays)

    for together in (True, False):
        contexts = contexts_of(keys)
        client_app.app.serve_turns(turns(contexts, 1, [{}] * PARTIES), contexts)
        messages = [
            to_message(EvaluateOrder(exchange=2, arrays=answer), context.node_id, 60.0)
            for context, answer in zip(contexts, answers, strict=True)
        ]
        with monkeypatch.context() as watched:
            watched.setattr(Party, "learn", counted)
            serve = client_app.app.serve_turns
            served = serve(messages, contexts) if together else None
        assert len(alone) == (0 if odd is None else PARTIES)
        replies.append(served or list(map(client_app.app, messages, contexts)))
        assert not any(load_scalars(context.state)["pending"] for context in contexts)
        between.forget(contexts[0].run_id)
    for party, (one, other) in enumerate(zip(*replies, strict=True)):
        if party == 3 and odd is not None:
            for reply in (one, other):
                with pytest.raises(VflError, match="feedback that it cannot use"):
                    sent(reply)
        else:
            np.testing.assert_allclose(sent(one), sent(other), **ROUNDING)


@pytest.mark.one_by_day
@pytest.mark.parametrize("optimizer", ["adam", "momentum"])
@pytest.mark.parametrize("leaves", ["alone", "process"])
def test_a_party_that_leaves_a_stack_keeps_its_own_optimizer(
    keys: dict[str, Any], stacks: list[int], optimizer: str, leaves: str
) -> None:
    """Parties of a stack share the memory of moments, and count their steps by themselves."""
    generator, ends = np.random.default_rng(0), []
    drawn = generator.standard_normal((6, PARTIES, 32, 4), np.float32)
    for together in (True, False):
        contexts = contexts_of({**keys, "optimizer": optimizer, "party-lr": 0.01})
        for number, of_turn in enumerate(drawn, start=1):
            answers = [{"gradient": each} for each in of_turn] if number > 1 else [{}] * PARTIES
            messages = turns(contexts, number, answers)
            apart = PARTIES if not together else int(leaves == "alone" and number == 3)
            replies = list(map(client_app.app, messages[:apart], contexts[:apart]))
            if together:
                replies += client_app.app.serve_turns(messages[apart:], contexts[apart:])
            if leaves == "process" and number == 3:
                between.forget(contexts[0].run_id)
        optimizers = [load_arrays(context.state, "optimizer") for context in contexts]
        ends.append(([sent(reply) for reply in replies], optimizers))
        between.forget(contexts[0].run_id)
    (ours, our_states), (theirs, their_states) = ends
    np.testing.assert_allclose(ours, theirs, **ROUNDING)
    for mine, other in zip(our_states, their_states, strict=True):
        assert mine.keys() == other.keys() and len(mine) > 0
        for name, array in mine.items():
            np.testing.assert_allclose(array, other[name], rtol=1e-4, atol=1e-5, err_msg=name)
            assert not name.endswith("step") or array == 5
    assert PARTIES - int(leaves == "alone") in stacks


def test_parties_whose_stack_could_not_embed_learn_on_in_a_new_stack(
    run: Start, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An evaluation comes before and after: a stack that has moved on must not come back."""
    embed, calls = Stack.embed, count(1)

    def fails_once(stack: Stack, turns: Any) -> None:
        if next(calls) == 2:
            raise MemoryError
        embed(stack, turns)

    monkeypatch.setattr(Stack, "embed", fails_once)
    assert_same(run, {**keys, "eval-every": 1 / 3})
    assert next(calls) > 5


def test_parties_with_other_optimizer_states_train_alone(
    keys: dict[str, Any], stacks: list[int]
) -> None:
    contexts = contexts_of({**keys, "optimizer": "adam", "party-lr": 0.01})
    answers: list[Arrays] = [{"gradient": np.ones((32, 4), np.float32)}] * PARTIES
    for number in (1, 2, 3):
        if number == 3:  # party 0 has not learned yet
            party = between.live[0, PARTIES].party
            party.learner.optimizer.state.clear()
            party.in_process.stack = None
        messages = turns(contexts, number, answers if number > 1 else [{}] * PARTIES)
        replies = client_app.app.serve_turns(messages, contexts)
        assert all(np.isfinite(sent(reply)).all() for reply in replies)
    steps = [load_arrays(context.state, "optimizer")["0.step"] for context in contexts]
    assert steps == [1] + [2] * (PARTIES - 1)
    assert stacks == [PARTIES, PARTIES]


def test_of_a_stack_whose_party_cannot_read_its_rows_that_party_fails_alone(
    run: Start, keys: dict[str, Any], stacks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    features = Learner.features

    def broken(learner: Learner, window: Window) -> Any:
        if learner.index == 7 and learner.exchange == 2:
            raise ValueError("a row of its own: 1234")
        return features(learner, window)

    monkeypatch.setattr(Learner, "features", broken)
    with pytest.raises(PartyError, match=r"Party 7 failed: raised ValueError") as raised:
        run(PARTIES, {**keys, "epochs": 1})
    assert max(stacks) == PARTIES and "1234" not in str(raised.value)
    going_on = {"strategy": "vafl", "on-party-failure": "continue", "epochs": 1}
    clients: Any = client_app.app, one_by_one
    ways = [run(PARTIES, {**keys, **going_on}, each).summary for each in clients]
    assert ways[0]["failed_parties"] == ways[1]["failed_parties"]
    assert ways[0]["steps"] == ways[1]["steps"] > 0


def test_products_of_linear_layers_equal_vmap_to_the_last_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers = [[torch.nn.Linear(4, 8), torch.nn.Linear(8, 3)] for _ in range(PARTIES)]
    models = [BottomModel(each, ["relu", "sigmoid"]) for each in layers]
    x, signal = torch.randn(6, PARTIES, 4), torch.randn(6, PARTIES, 3)
    found = {}
    mapped = Mock(side_effect=torch.func.vmap)
    monkeypatch.setattr("vfl_flower.party.stacked.vmap", mapped)
    for linear in (True, False):
        stack = StackedModel(models)
        assert stack._linear
        stack._linear = linear
        h = stack(x)
        found[linear] = [h, *torch.autograd.grad(h, list(stack.parameters()), signal)]
        assert mapped.called is not linear
    assert all(map(torch.equal, found[True], found[False]))
    for number, model in enumerate(models):
        torch.testing.assert_close(found[True][0][:, number], model(x[:, number]))
    models[1] = BottomModel([torch.nn.Linear(4, 3), torch.nn.Dropout()], ["none", "none"])
    assert not StackedModel(models[1:2])._linear


def test_feedback_of_a_turn_that_fails_or_ends_halfway_is_used_once_at_most(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts = contexts_of(keys)
    serve = client_app.app.serve_turns
    serve(turns(contexts, 1, [{}] * PARTIES), contexts)
    answers: list[Arrays] = [{"gradient": np.ones((32, 4), np.float32)}] * PARTIES
    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):  # it is asked again
        broken.setattr(Stack, "learn", Mock(side_effect=KeyboardInterrupt))
        serve(turns(contexts, 2, answers), contexts)
    for reply in serve(turns(contexts, 2, answers), contexts):
        assert np.isfinite(sent(reply)).all()
    assert load_scalars(contexts[0].state)["exchange"] == 2
    monkeypatch.setattr(Stack, "learn", Mock(side_effect=MemoryError))
    serve(turns(contexts, 3, answers), contexts)
    assert not any(load_scalars(context.state)["pending"] for context in contexts)
