"""Asking nodes over a Flower Grid: push, pull, and wait for all parties of a run.

Only `push_messages` and `pull_messages` of a Grid are used, so that any Grid serves.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import TypeVar

from flwr.app import Message
from flwr.serverapp import Grid

from vfl_flower.config import RunConfig
from vfl_flower.errors import ConfigError, PartyError, VflError
from vfl_flower.records import Introduction, Order, Payload, read_reply, to_message

log = logging.getLogger("flwr")

P = TypeVar("P", bound=Payload)
I = TypeVar("I", bound=Introduction)  # noqa: E741

_SLEEPS = (0.001, 0.05)  # seconds between two looks for replies: the first, and the longest


def push(grid: Grid, messages: Iterable[Message]) -> list[str]:
    """Send messages; their ids.

    Raises
    ------
    ConfigError
        If Flower refuses one.
    """
    messages = list(messages)
    keys = list(grid.push_messages(messages))
    if len(keys) < len(messages) or None in keys:
        raise ConfigError(
            "Flower did not take a message, most likely for its size: use a smaller window."
        )
    return keys


def pull(grid: Grid, keys: Iterable[str], deadline: float) -> list[Message]:
    """At least one of the replies, or none at the deadline (in monotonic seconds)."""
    pause, longest = _SLEEPS
    while True:
        messages = list(grid.pull_messages(list(keys)))
        if messages or time.monotonic() > deadline:
            return messages
        time.sleep(pause)
        pause = min(1.5 * pause, longest)


def ask(
    grid: Grid, orders: Mapping[int, Order], kind: type[P], timeout: float, deadline: float = 0.0
) -> dict[int, P]:
    """Send an order to each node, and wait for the answers: node id -> answer.

    Raises
    ------
    PartyError, ConfigError
        If a party fails, or some do not answer within ``timeout`` seconds.
    """
    deadline = deadline or time.monotonic() + timeout
    keys = push(grid, [to_message(order, node, timeout) for node, order in orders.items()])
    pending = dict(zip(keys, orders, strict=True))
    answers: dict[int, P] = {}
    while pending:
        messages = pull(grid, pending, deadline)
        if not messages:
            raise ConfigError(
                f"{len(pending)} nodes did not answer within {timeout:g} s: look at their logs."
            )
        for message in messages:
            node = pending.pop(message.metadata.reply_to_message_id, None)
            if node is None:  # it came twice
                continue
            try:
                answers[node] = read_reply(message, kind)
            except VflError as error:
                raise PartyError(f"The party on node {node}", str(error)) from None
    return answers


def ask_all(grid: Grid, order: Order, kind: type[I], config: RunConfig) -> dict[int, I]:
    """Send an order to every node as it comes, until there are as many as the first ones say.

    Returns node id -> answer, in the order of the parties.

    Raises
    ------
    PartyError, ConfigError
        If a party fails, too few nodes come, or they do not have the numbers 0 to M - 1.
    """
    found: dict[int, I] = {}
    wanted = max(1, config.parties)
    deadline = time.monotonic() + config.party_timeout
    waiting = False
    while len(found) < wanted:
        new = {node: order for node in grid.get_node_ids() if node not in found}
        found.update(ask(grid, new, kind, config.party_timeout, deadline))
        most = max(found.values(), key=lambda each: each.parties, default=None)
        wanted = max(wanted, most.parties if most else 0)
        if len(found) < wanted:
            if time.monotonic() > deadline:
                said = f", of which party {most.party} speaks" if most else ""
                raise ConfigError(
                    f"Only {len(found)} of the {wanted} nodes{said} came within "
                    f"{config.party_timeout:g} s: start the others, or correct the number."
                )
            if not waiting:
                log.info("Waiting for %d nodes; %d are here", wanted, len(found))
            waiting = True
            time.sleep(_SLEEPS[1])
    numbers = sorted(each.party for each in found.values())
    if numbers != list(range(len(found))):
        raise ConfigError(
            f"The nodes' partition-ids are {numbers}: give each SuperNode its own, from 0 to "
            f"{len(found) - 1}."
        )
    return dict(sorted(found.items(), key=lambda each: each[1].party))
