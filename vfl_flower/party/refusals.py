"""What a party refuses: `check_order` decides it, and is called first for every message.

It finds each configuration that a message is about, and checks it by the party's own rules
(`party.policy`). Before it returns, nothing of the party's data is read, and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from flwr.app import Context

from vfl_flower.config.node_rules import Rules
from vfl_flower.config.run_config import RunConfig, parse
from vfl_flower.party import state, state_file
from vfl_flower.party.context import read_about, told
from vfl_flower.party.policy import check, own_config
from vfl_flower.protocol.systems import refuse_places, resolve
from vfl_flower.transport.messages import (
    DescribeOrder,
    EarlyOrder,
    GrowOrder,
    Order,
    PredictOrder,
    RejoinOrder,
    ResumeOrder,
    SessionOrder,
    SharedActorOrder,
)
from vfl_flower.transport.node import refused, simulated


def check_order(context: Context, order: Order) -> None:
    """Raise an error if the party's rules forbid an order, or a run that it belongs to.

    A `SessionOrder` and a `SharedActorOrder` carry other orders: each of them comes here by itself.

    Raises
    ------
    ConfigError
        Which rule forbids it.
    VflError
        If a configuration or a state that the order names cannot be read.
    """
    rules = Rules.of(context.node_config)
    if rules.aggregation == "secure" and not rules.sum_peers and not simulated(context):
        raise refused(
            context,
            "every order: its rule is aggregation = 'secure', and sum-peers is missing. Give it "
            "the other parties' keys by sum-peers='1:KEY 2:KEY', or trust the first keys that the "
            "label holder passes on by sum-peers='first-seen'",
        )
    if isinstance(order, SessionOrder | SharedActorOrder):
        return
    if isinstance(order, RejoinOrder):
        state_file.restore(context, state_file.run_name(context, order.nonce))
    for about in _written_down(context, order):
        _check_written(context, about)
    for config in _told(context, order):
        check(context, config)
        own_config(context, config)


def _written_down(context: Context, order: Order) -> Iterator[str]:
    """The configurations of states that an order goes on with, as the party wrote them down."""
    if about := state.load_about(context.state):
        yield about
    if isinstance(order, ResumeOrder | PredictOrder):
        yield state.load_about(state_file.load(context, order.run, order.number).state)


def _told(context: Context, order: Order) -> Iterator[RunConfig]:
    """The configurations that the label holder tells of the run to which an order belongs.

    With ``grow``, ``resume`` and ``task='predict'`` most of it is that of an earlier run. So there
    the order itself tells it, and without it the run configuration has to keep to all rules.
    """
    if isinstance(order, EarlyOrder | GrowOrder) and order.config:
        yield told(context, order.config)
    begins = isinstance(order, DescribeOrder | RejoinOrder) and not isinstance(order, GrowOrder)
    if not begins and not isinstance(order, EarlyOrder):
        return
    if not simulated(context):
        refuse_places(context.run_config)  # before anything that they name is loaded
    given, is_told = parse(context.run_config), isinstance(order, EarlyOrder) and order.config
    of_earlier = bool(given.get("resume") or given.get("grow"))
    in_state = bool(state.load_about(context.state))
    if begins and (in_state or of_earlier) and isinstance(order, RejoinOrder):
        return  # it goes on with its state, or not at all
    if (of_earlier or given.get("task") == "predict") and (is_told or in_state):
        return
    yield resolve(context.run_config)


_kept_to: set[tuple[Any, ...]] = set()
"""What `_check_written` has found to keep to the rules: messages are many."""


def _check_written(context: Context, about: str) -> None:
    """Refuse, by `ConfigError`, to go on with a run that the party's rules do not allow now."""
    node = tuple((name, type(value), value) for name, value in context.node_config.items())
    found = about, node, simulated(context)
    if found in _kept_to:
        return
    config, _, _, rows = read_about(about)
    check(context, config, rows)
    if len(_kept_to) >= 4096:
        _kept_to.clear()
    _kept_to.add(found)
