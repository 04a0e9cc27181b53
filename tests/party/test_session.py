"""A party that stays in this process trains without writing its state after each message."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from flwr.app import Context

from tests.party.nodes import BATCH, DESCRIBE, Node, asked, refused, restarted, train
from vfl_flower import client_app
from vfl_flower.config.errors import VflError
from vfl_flower.party import learner, session
from vfl_flower.party.session import Session
from vfl_flower.party.state import load_scalars
from vfl_flower.transport.flower_internals import state_to_bytes
from vfl_flower.transport.messages import Description, EvaluateOrder, Order, Upload
from vfl_flower.transport.wire import read_reply, to_message

Ask = Callable[[Context, Order], Any]


def over_a_stream(context: Context, order: Order) -> Any:
    """The answer to an order whose Flower records nobody makes."""
    return read_reply(client_app.app(to_message(order, 2, 60, call=True), context), Upload)


@pytest.fixture
def begun(node: Node) -> Callable[..., Context]:
    """A party that has described itself; equal ones learn the same."""

    def build(run_id: int = 1, **rules: Any) -> Context:
        own = {"noise-seed": 0, **rules}
        context = node(own, run_id, noise_seed=0, party_lr=0.1, optimizer="adam")
        asked(context, DESCRIBE, Description)
        return context

    return build


def step(number: int, **sent: Any) -> Order:
    """An order for one mini-batch, with feedback for the last one."""
    if number > 1 and not sent:
        sent = {"gradient": np.full((BATCH, 8), 0.1 * number, np.float32)}
    return train(number, steps=1, first=number - 1, **sent)


def exchange_of(context: Context) -> int:
    return int(load_scalars(context.state)["exchange"])


def embedded(context: Context, number: int, ask: Ask = asked) -> Any:
    order = EvaluateOrder(exchange=number, arrays=step(number).arrays)
    return ask(context, order).arrays["embedding"]


@pytest.mark.parametrize(("ask", "written"), [(over_a_stream, 0), (asked, 3)])
def test_the_state_is_written_when_it_is_handed_over(
    begun: Callable[..., Context], ask: Ask, written: int
) -> None:
    """The second case is the control: over plain messages any process may go on."""
    context = begun()
    for number in (1, 2, 3):
        ask(context, step(number))
    assert exchange_of(context) == written
    session.hand_over(context)
    assert exchange_of(context) == 3
    kept = state_to_bytes(context.state)
    here = embedded(context, 4, ask)
    restarted(context, kept)
    np.testing.assert_array_equal(embedded(context, 4), here)


BAD: dict[str, Order] = {
    "another shape": step(3, gradient=np.zeros((BATCH, 7), np.float32)),
    "no number": step(3, gradient=np.full((BATCH, 8), np.nan, np.float32)),
    "an array too many": step(3, **step(3).arrays, more=np.zeros(3, np.float32)),
    "a number too high": step(5),
    "a number again": step(2),
}


def interrupt(*_: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("fault", BAD)
def test_after_a_failed_message_a_party_goes_on_as_if_each_had_been_written(
    fault: str, begun: Callable[..., Context]
) -> None:
    found = []
    for ask in (over_a_stream, asked):
        session.live.clear()
        context = begun()
        for number in (1, 2):
            ask(context, step(number))
        with pytest.raises(VflError):
            ask(context, BAD[fault])
        session.hand_over(context)
        assert exchange_of(context) == 2
        # Feedback that came with the due number is used up.
        ask(context, step(3) if "a number" in fault else train(3, steps=1, first=2))
        found.append(embedded(context, 4, ask))
    np.testing.assert_array_equal(*found)


def test_after_an_interrupt_a_party_serves_the_message_again(
    begun: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = begun()
    over_a_stream(context, step(1))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(learner.Learner, "features", interrupt)
        over_a_stream(context, step(2))  # it has learned before it embeds
    over_a_stream(context, train(2, steps=1, first=1))
    session.hand_over(context)
    assert exchange_of(context) == 2


def test_without_going_back_the_party_is_out_of_step(
    begun: Callable[..., Context], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control."""
    monkeypatch.setattr(Session, "go_back", lambda own: None)
    context = begun()
    over_a_stream(context, step(1))
    with pytest.raises(VflError):
        over_a_stream(context, step(2, gradient=np.zeros((BATCH, 7), np.float32)))
    with pytest.raises(VflError, match="got message 2 after message 2"):
        over_a_stream(context, step(2))


def test_two_runs_of_one_party_in_turn_learn_as_each_alone(begun: Callable[..., Context]) -> None:
    alone = begun()
    for number in (1, 2, 3):
        over_a_stream(alone, step(number))
    expected = embedded(alone, 4, over_a_stream)
    session.live.clear()
    both = begun(run_id=2), begun(run_id=3)
    for number in (1, 2, 3):
        for context in both:
            over_a_stream(context, step(number))
    for context in both:
        np.testing.assert_array_equal(embedded(context, 4, over_a_stream), expected)


def test_a_rule_that_changes_holds_from_the_next_message(begun: Callable[..., Context]) -> None:
    context = begun()
    over_a_stream(context, step(1))
    over_a_stream(context, step(2))  # the control: its rules permit the run
    assert exchange_of(context) == 0
    context.node_config["max-epochs"] = 1
    refused(context, step(3), "max-epochs = 1")
    assert exchange_of(context) == 2  # a refused plain message hands over too
    with pytest.raises(VflError, match="max-epochs = 1"):
        over_a_stream(context, step(3))
    context.node_config["max-epochs"] = 100
    over_a_stream(context, step(3))
    context.node_config["max-epochs"] = 99  # nothing was written since
    over_a_stream(context, step(4))
    limits = next(iter(session.live.values())).party.limits
    assert limits and limits.epochs == 99
