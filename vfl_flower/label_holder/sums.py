"""Masked sums at the label holder: it passes the parties' keys on, and adds what they upload."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from vfl_flower.config.errors import PartyError, VflError
from vfl_flower.config.options import RunningConfig
from vfl_flower.config.run_config import RunConfig
from vfl_flower.label_holder.table import Table
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.estimators.base import Arrival, Reading
from vfl_flower.protocol.secure_sum import OFFERS, MaskedReading, Sum, check_tags, read_offers
from vfl_flower.transport.base import Transport, ask_all
from vfl_flower.transport.messages import (
    Agreed,
    AgreeOrder,
    Arrays,
    Introduction,
    KeyMade,
    KeyOrder,
)


def offered(transport: Transport, running: RunningConfig, about: RunConfig) -> Arrays:
    """Return the fresh keys of all parties, in order, as orders bring them.

    Parameters
    ----------
    about : configuration of the model whose sums are masked.

    Raises
    ------
    PartyError, ConfigError
        If a party makes none, or not all are there.
    """
    order = KeyOrder(config=json.dumps(about.values()))
    made = sorted(ask_all(transport, order, KeyMade, running).values(), key=lambda each: each.party)
    for each in made:
        try:
            read_offers(each.arrays, 1)
        except VflError as error:
            raise PartyError(f"Party {each.party}", f"sent no key: {error}") from None
    return {name: np.concatenate([each.arrays[name] for each in made]) for name in OFFERS}


def agree(transport: Transport, config: RunConfig) -> None:
    """Have all parties agree on keys; their uploads are masked from then on.

    Raises
    ------
    PartyError, ConfigError
        If a party does not take another's key, or they are not of one mind about the rest.
    """
    order = AgreeOrder(arrays=offered(transport, config.running, config))
    check(ask_all(transport, order, Agreed, config.running).values())


def check(answers: Iterable[Introduction]) -> None:
    """Raise an error, as `check_tags`, if two of these parties have not agreed."""
    by_party = sorted(answers, key=lambda each: each.party)
    try:
        check_tags([each.arrays for each in by_party])
    except VflError as error:
        if type(error) is not VflError:
            raise
        raise PartyError("A party", f"sent no tags of its keys: {error}") from None


def summed(
    arrivals: Sequence[Arrival], table: Table, read: Callable[[int, Arrays, Window, int], Reading]
) -> list[Arrival]:
    """Uploads of all parties, each read as what can be read of them: their sum, now in the table.

    Parameters
    ----------
    read : reads the arrays of one party's window, of embeddings of this width.

    Raises
    ------
    SumError, VflError
        If there is none: some are missing, or of other rows, or masks do not vanish.
    """
    party, window = arrivals[0].party, arrivals[0].window
    of_all, total = Sum(len(table.columns)), None
    width = table.received
    for arrival in arrivals:
        assert isinstance(arrival.reading, MaskedReading)
        if not np.array_equal(arrival.window.ids, window.ids):
            raise VflError(f"Party {arrival.party} was asked for other rows than the others.")
        total = of_all.add(arrival.party, arrival.reading.blocks, (len(window.ids), width))
    if total is None:
        raise VflError("Not all parties are there, without whom their sum is not known.")
    reading = read(party, total, window, width)
    table.write(party, window, reading.fresh.to(table.rows.device))
    return [replace(arrival, reading=reading) for arrival in arrivals]
