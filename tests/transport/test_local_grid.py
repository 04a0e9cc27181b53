"""The in-process engine: its virtual clock, the order of replies, and what schedules gain by it."""

import math
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, RecordDict

from strategies.vertical import Vertical
from tests.conftest import ALL_ROWS, Start, trained
from vfl_flower import client_app
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport import local
from vfl_flower.transport.local import LocalGrid, delay_seconds
from vfl_flower.transport.messages import EvaluateOrder, TrainOrder
from vfl_flower.transport.wire import to_message

FAST = {**ALL_ROWS, "dataset": "breast-cancer", "batch-size": 64}  # 8 steps an epoch


def echo(message: Message, context: Context) -> Message:
    return Message(RecordDict(), reply_to=message)


def config_of(delay: str, seed: int = 0) -> RunConfig:
    return resolve({"delay": delay, "seed": seed})


def grid_of(parties: int, delay: str, app: Any = echo) -> LocalGrid:
    return LocalGrid(app, parties, {}, config_of(delay))


def train_message(node: int) -> Message:
    order = TrainOrder(exchange=1, epoch=0, first=0, steps=1, coordinated=True)
    return to_message(order, node, 60.0)


def evaluate_message(node: int) -> Message:
    return to_message(EvaluateOrder(exchange=1), node, 60.0)


# --- delays -------------------------------------------------------------------------------------


@pytest.mark.parametrize("parties", [1, 4])
def test_delays_have_the_means_of_the_paper(parties: int) -> None:
    draws = 3000
    for party in range(parties):
        m = party + 1
        for delay, mean, deviation in (
            ("poisson", m / parties, math.sqrt(2 * m) / (2 * parties)),
            ("exponential", m, m),
        ):
            config = config_of(delay)
            seconds = [delay_seconds(config, party, parties, k) for k in range(draws)]
            assert min(seconds) >= 0
            assert np.mean(seconds) == pytest.approx(mean, abs=5 * deviation / math.sqrt(draws))
            assert np.std(seconds) == pytest.approx(deviation, rel=0.15)


def test_poisson_delays_are_multiples_of_their_unit() -> None:
    config = config_of("poisson")
    units = [delay_seconds(config, 1, 4, k) * 8 for k in range(50)]
    assert all(unit == int(unit) for unit in units)


@pytest.mark.parametrize("parties", [1, 4])
def test_a_straggler_is_20_to_60_percent_slower_than_the_others(parties: int) -> None:
    config = config_of("straggler")
    seconds = np.array(
        [[delay_seconds(config, party, parties, k) for k in range(500)] for party in range(parties)]
    )
    assert (seconds[:-1] == 1.0).all()
    assert 1.2 <= seconds[-1].min() < 1.22
    assert 1.58 < seconds[-1].max() <= 1.6
    assert seconds[-1].mean() == pytest.approx(1.4, abs=5 * 0.4 / math.sqrt(12 * 500))


def test_delays_depend_on_seed_party_and_activation_only() -> None:
    def delay(seed: int = 0, party: int = 0, activation: int = 1) -> float:
        return delay_seconds(config_of("exponential", seed), party, 3, activation)

    assert delay() == delay()
    assert len({delay(), delay(seed=1), delay(party=1), delay(activation=2)}) == 4


def test_without_delay_nothing_takes_time() -> None:
    assert delay_seconds(config_of("none"), 2, 3, 5) == 0.0
    grid = grid_of(3, "none")
    nodes = grid.get_node_ids()
    keys = grid.push_messages(map(train_message, nodes))
    assert len(grid.pull_messages(keys)) == 3
    assert grid.clock == 0.0


# --- the grid -----------------------------------------------------------------------------------


def test_replies_come_in_the_order_of_virtual_time() -> None:
    grid, parties = grid_of(5, "exponential"), 5
    config = config_of("exponential")
    nodes = grid.get_node_ids()
    keys = grid.push_messages(map(train_message, nodes))
    due = {node: delay_seconds(config, party, parties, 1) for party, node in enumerate(nodes)}
    came = []
    while keys:
        (reply,) = grid.pull_messages(keys)
        keys.remove(reply.metadata.reply_to_message_id)
        came.append(reply.metadata.src_node_id)
        assert grid.clock == due[came[-1]]
    assert came == sorted(nodes, key=due.__getitem__)
    assert came != nodes
    assert grid.pull_messages(["1", "2"]) == []


def test_a_reply_is_delivered_once_and_only_to_who_asks_for_it() -> None:
    grid = grid_of(2, "none")
    one, other = grid.push_messages(map(train_message, grid.get_node_ids()))
    assert [r.metadata.reply_to_message_id for r in grid.pull_messages([other])] == [other]
    assert grid.pull_messages([other]) == []
    assert [r.metadata.reply_to_message_id for r in grid.pull_messages([one])] == [one]


def test_activations_of_a_party_follow_each_other() -> None:
    grid, config = grid_of(2, "exponential"), config_of("exponential")
    node = grid.get_node_ids()[1]
    of_activation = [delay_seconds(config, 1, 2, activation) for activation in range(1, 6)]
    for activation in range(1, 4):
        grid.send_and_receive([train_message(node)])
        assert grid.clock == pytest.approx(sum(of_activation[:activation]))
    grid.send_and_receive([train_message(node), train_message(node), evaluate_message(node)])
    assert grid.clock == pytest.approx(sum(of_activation))


def test_evaluations_take_no_virtual_time() -> None:
    grid = grid_of(2, "exponential")
    replies = grid.send_and_receive(map(evaluate_message, grid.get_node_ids()))
    assert len(replies) == 2
    assert grid.clock == 0.0


def test_an_exception_of_the_app_becomes_an_error_reply() -> None:
    def broken(message: Message, context: Context) -> Message:
        raise ValueError("broken")

    grid = grid_of(1, "none", broken)
    (reply,) = grid.send_and_receive([train_message(grid.get_node_ids()[0])])
    assert reply.has_error()
    assert "broken" in (reply.error.reason or "")


def test_nodes_know_which_party_they_are() -> None:
    contexts = LocalGrid(client_app.app, 3, {"epochs": 2}, resolve({})).contexts
    assert [c.node_config["partition-id"] for c in contexts.values()] == [0, 1, 2]
    assert all(c.node_config["num-partitions"] == 3 for c in contexts.values())
    assert all(c.run_config == {"epochs": 2} for c in contexts.values())
    assert len({id(c.state) for c in contexts.values()}) == 3


# --- runs on the virtual clock ------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize("delay", ["poisson", "exponential"])
@pytest.mark.parametrize("window", [1, 4])
def test_synchronous_rounds_take_as_long_as_their_slowest_party(
    run: Start, delay: str, window: int
) -> None:
    keys = {**FAST, "epochs": 2, "window": window, "delay": delay}
    finished, config = run(3, keys), resolve(keys)
    rounds = 2 * 8 // window
    slowest = [
        max(delay_seconds(config, party, 3, activation) for party in range(3))
        for activation in range(1, rounds + 1)
    ]
    assert finished.summary["exchanges"] == 3 * rounds
    assert finished.summary["virtual_seconds"] == pytest.approx(sum(slowest), abs=1e-3)
    after_one_epoch = sum(slowest[: rounds // 2])
    assert finished.history[0]["virtual_seconds"] == pytest.approx(after_one_epoch, abs=1e-3)


@pytest.mark.one_by_day
@pytest.mark.parametrize("delay", ["poisson", "exponential"])
def test_the_fewer_parties_are_waited_for_the_sooner_the_same_work_is_done(
    run: Start, delay: str
) -> None:
    def time_of(strategy: str, **more: Any) -> float:
        keys = {**FAST, "epochs": 2, "delay": delay, "strategy": strategy, **more}
        summary = run(4, keys).summary
        assert summary["epochs"] == 2.0
        assert summary["exchanges"] == 4 * 2 * 8
        return summary["virtual_seconds"]

    assert time_of("vafl") < time_of("vafl-t", quorum=2) < time_of("split-nn")


def test_a_straggler_holds_up_only_those_who_wait_for_it(run: Start) -> None:
    keys = {**FAST, "epochs": 3, "eval-every": 3, "window": 1}
    waiting = run(3, {**keys, "strategy": "synrevel"}).summary["virtual_seconds"]
    alone = [delay_seconds(config_of("straggler"), 2, 3, k) for k in range(1, 25)]
    assert waiting == pytest.approx(sum(alone), abs=1e-3)
    free = run(3, {**keys, "strategy": "asyrevel"}).summary["virtual_seconds"]
    assert free < 0.85 * waiting


@pytest.mark.one_by_day
@pytest.mark.parametrize("strategy", ["split-nn", "vafl", "vafl-t"])
def test_the_same_seed_gives_the_same_run_on_the_same_clock(run: Start, strategy: str) -> None:
    keys = {**FAST, "epochs": 2, "delay": "exponential", "strategy": strategy, "window": 3}
    one, again, other = run(3, keys), run(3, keys), run(3, {**keys, "seed": 1})
    assert one.summary["virtual_seconds"] == again.summary["virtual_seconds"] > 0
    assert one.summary["virtual_seconds"] != other.summary["virtual_seconds"]
    for name in ("top", "party-0", "party-1", "party-2"):
        for key, values in one.parameters(name).items():
            np.testing.assert_array_equal(values, again.parameters(name)[key])
    times = [entry["virtual_seconds"] for entry in one.history]
    assert times == sorted(times)
    if strategy == "split-nn":  # delays do not change what a synchronous run learns
        at_once = run(3, {**keys, "delay": "none"}).parameters("top")
        for key, values in one.parameters("top").items():
            np.testing.assert_array_equal(values, at_once[key])


def test_a_fast_party_takes_more_steps_than_a_slow_one() -> None:
    strategy, _ = trained(3, {**FAST, "strategy": "vafl", "delay": "exponential", "epochs": 4})
    steps = [seat.steps for seat in strategy.run.records]
    assert steps[0] > 1.5 * max(steps[1:])
    assert sum(steps) == 3 * 4 * 8


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "more",
    [{"strategy": "vafl"}, {"strategy": "vafl-t", "quorum": 2}, {"strategy": "split-nn"}],
    ids=str,
)
@pytest.mark.parametrize("window", [1, 4])
def test_no_embedding_older_than_the_delay_bound_is_used(
    run: Start, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any], window: int
) -> None:
    bound = 5
    oldest = []
    answer = LabelHolder.answer

    def watched(holder: LabelHolder, arrivals: Any) -> Any:
        for arrival in arrivals:
            lengths = arrival.window.lengths
            used_at = holder.steps + np.repeat(np.arange(len(lengths)), lengths)
            for party, written in holder.table.written.items():
                if party == arrival.party:  # waits with its parameters as they were
                    continue
                at = written[arrival.window.ids]
                assert (at >= 0).all(), "an embedding that was never uploaded is used"
                oldest.append(int((used_at - at).max()))
        return answer(holder, arrivals)

    monkeypatch.setattr(LabelHolder, "answer", watched)
    keys = {**FAST, **more, "delay": "exponential", "epochs": 2}
    run(4, {**keys, "max-delay": bound, "window": window})
    assert max(oldest) <= bound


@pytest.mark.parametrize("estimator", ["first-order", "zeroth-order"])
def test_bounded_delay_does_not_wait_for_an_evaluation_that_has_come(
    run: Start, estimator: str
) -> None:
    keys = {"strategy": "vafl-t", "quorum": 3, "max-delay": 8, "window": 8, "epochs": 2}
    keys |= {"party-lr": 1e-6}  # so that it diverges with no directions
    summary = run(4, {**keys, "estimator": estimator, "party-timeout": 0.5}).summary
    assert summary["epochs"] == 2.0


# --- evaluations --------------------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("keys", "epochs"),
    [
        ({"eval-every": 0.25}, [0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2]),
        ({"eval-every": 0.25, "strategy": "vafl"}, [0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2]),
        ({"eval-every": 0.25, "window": 4}, [0.5, 1, 1.5, 2]),  # as often as windows end
        ({"eval-every": 1.5}, [1.5, 2]),
        ({"eval-every": 5.0}, [2]),
        ({"eval-every": 0.25, "strategy": "frozen"}, [1, 2]),
        ({"eval-every": 0.25, "strategy": "centralised"}, [1, 2]),
        ({"eval-every": 1.5, "strategy": "centralised"}, [2]),
    ],
    ids=str,
)
def test_evaluations_are_so_many_epochs_or_parts_of_one_apart(
    run: Start, keys: dict[str, Any], epochs: list[float]
) -> None:
    history = run(2, {**FAST, "epochs": 2, **keys}).history
    assert [entry["epoch"] for entry in history] == epochs


def test_evaluations_of_an_asynchronous_run_with_delays_are_no_more_than_asked_for(
    run: Start,
) -> None:
    keys = {**FAST, "strategy": "vafl", "delay": "exponential", "eval-every": 0.25, "epochs": 4}
    found = [entry["epoch"] for entry in run(3, keys).history]
    assert found[-1] == 4 and 8 <= len(found) <= 16


def test_a_synchronous_run_that_ends_between_two_evaluations_answers_no_party_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A party that answers an evaluation first waits for the others, without validation too."""
    monkeypatch.setattr(local, "_TAKES_TIME", (*local._TAKES_TIME, "evaluate"))
    answered: list[int] = []
    answer = LabelHolder.answer

    def counted(holder: LabelHolder, arrivals: Any) -> Any:
        answered.append(len(arrivals))
        return answer(holder, arrivals)

    monkeypatch.setattr(LabelHolder, "answer", counted)
    keys = {**ALL_ROWS, "dataset": "breast-cancer", "epochs": 3, "delay": "straggler"}
    config = resolve({**keys, "strategy": "split-nn"})
    strategy = Vertical(config, load_labels(config))
    strategy.start(LocalGrid(client_app.app, 3, keys, config), num_rounds=2)
    assert answered and set(answered) == {3}
    assert len({record.steps for record in strategy.run.records}) == 1
