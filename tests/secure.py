"""Parties whose embeddings are summed, and a label holder that asks them whatever it likes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, RecordDict
from numpy.typing import NDArray

from tests.party.nodes import asked
from vfl_flower.party import session as between
from vfl_flower.protocol.aggregation.masks import OFFERS, Sum, check_tags
from vfl_flower.transport import messages
from vfl_flower.transport.early_messages import Agreed, AgreeOrder, KeyMade, KeyOrder
from vfl_flower.transport.flower_internals import state_from_bytes, state_to_bytes

Rows = NDArray[np.float32]

CANCER: dict[str, Any] = {
    **{"dataset": "breast-cancer", "combine": "mean", "aggregation": "secure"},
    **{"bottom-model": "linear", "embedding-size": 3, "top-model": "linear", "batch-size": 32},
    **{"validation-fraction": 0.0, "optimizer": "sgd"},
}


class Parties:
    """Real nodes with parts of one data set, and a folder for each.

    Parameters
    ----------
    own : further options of their node configurations.
    keys : options of each node's run configuration, besides `CANCER`.
    """

    def __init__(
        self,
        folder: Path,
        count: int = 3,
        own: Mapping[str, Any] | None = None,
        run: int = 1,
        keys: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        between.live.clear()
        self.exchange = 0
        self.nodes: list[Context] = []
        for party in range(count):
            node: dict[str, Any] = {"partition-id": party, "num-partitions": count}
            node |= {"states": str(folder / f"party-{party}"), **(own or {})}
            given = {**CANCER, **(keys[party] if keys else {})}
            self.nodes.append(Context(run, 2 + party, node, RecordDict(), given))

    def begin(self) -> None:
        """Have all describe themselves."""
        for node in self.nodes:
            asked(node, messages.DescribeOrder(outputs=1), messages.Description)

    def offers(self) -> messages.Arrays:
        """The fresh keys of all."""
        made = [asked(node, KeyOrder(), KeyMade) for node in self.nodes]
        return {name: np.concatenate([each.arrays[name] for each in made]) for name in OFFERS}

    def agree(self, offers: messages.Arrays | None = None) -> None:
        """Have all agree on keys."""
        order = AgreeOrder(arrays=self.offers() if offers is None else offers)
        check_tags([asked(node, order, Agreed).arrays for node in self.nodes])

    def ready(self) -> Parties:
        """Have all describe themselves, and agree."""
        self.begin()
        self.agree()
        return self

    def ask(self, orders: Sequence[messages.Order]) -> list[messages.Arrays]:
        """Return each party's answer to its order."""
        return [asked(node, order).arrays for node, order in zip(self.nodes, orders, strict=True)]

    def evaluated(self, feedback: Sequence[messages.Arrays] = ()) -> list[messages.Arrays]:
        """Return all parties' answers to one evaluation."""
        self.exchange += 1
        each = feedback or [{}] * len(self.nodes)
        return self.ask([messages.EvaluateOrder(exchange=self.exchange, arrays=a) for a in each])

    def trained(
        self, feedback: Sequence[messages.Arrays] = (), **order: int
    ) -> list[messages.Arrays]:
        """Return all parties' uploads of the first mini-batch of the first epoch, or of another."""
        self.exchange += 1
        given: dict[str, Any] = {"epoch": 0, "first": 0, "steps": 1, "coordinated": True, **order}
        each = feedback or [{}] * len(self.nodes)
        return self.ask(
            [messages.TrainOrder(exchange=self.exchange, arrays=a, **given) for a in each]
        )

    def model(self, party: int) -> Any:
        """A party's own, which the label holder does not see."""
        return between.resume(self.nodes[party]).party.learner.model

    def embeddings(self, party: int) -> Rows:
        """A party's, of its test rows, which the label holder does not see."""
        one = between.live[party, len(self.nodes)].party
        return one.learner.embeddings(one.inputs.block.test).numpy()

    def moved(self) -> None:
        """Every process has ended, and the next has the state that is left as bytes."""
        for node in self.nodes:
            node.state = state_from_bytes(state_to_bytes(node.state))
        between.live.clear()


def total(uploads: Sequence[messages.Arrays], name: str = "embedding", size: int = 3) -> Rows:
    """Return the sum that the label holder learns from masked uploads of this embedding size."""
    of_all = Sum(len(uploads))
    for party, each in enumerate(uploads):
        added = of_all.add(party, {name: each[name]}, (-1, size))
    assert added
    return added[name]


def gradient(scale: float, rows: int = 32, size: int = 3) -> messages.Arrays:
    """An answer to a mini-batch."""
    drawn = np.random.default_rng(5).standard_normal((rows, size), np.float32)
    return {"gradient": np.float32(scale) * drawn}
