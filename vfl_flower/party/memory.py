"""A party's memory between two messages, in small groups."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.codecs.channel import Links
from vfl_flower.transport.messages import TrainOrder


@dataclass(frozen=True)
class PendingWindow:
    """A window that the party has uploaded, and that awaits feedback."""

    order: TrainOrder
    secret: bytes  # seed of the window's rows and embeddings
    rows: Window  # rows of the window that the party has


@dataclass
class Origin:
    """The run of a party, and the model that it began with."""

    run: str = ""  # name under which the party saves its states
    counted_since: str = ""  # Flower run in which the counts of uploads began
    checkpoint: int = 0  # checkpoint number of the earlier run that the model comes from
    exchange: int = 0  # number of messages that this earlier model had seen
    began: str = ""  # in UTC
    sent: int = 0  # bytes of its answers
    fresh: int = 0  # uploads of rows apart from training windows


class PartyLinks:
    """A party's uplinks and downlinks, and the surrogates of both by their names in states."""

    def __init__(self, up: Links, down: Links) -> None:
        self.up, self.down = up, down
        self.surrogates: dict[str, Tensor] = dict([*up.with_surrogates(), *down.with_surrogates()])

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Use these arrays as surrogates, without a copy."""
        for channel in (*self.up.values(), *self.down.values()):
            if channel.surrogate is not None:
                channel.surrogate = torch.from_numpy(arrays[channel.saved])
                self.surrogates[channel.saved] = channel.surrogate


@dataclass
class InProcess:
    """Data of a party's last message in this process. Others work without them."""

    model: weakref.ref[Any] | None = None  # record of the state that shares the model's memory
    stack: Any = None  # `stacked.Stack` in which the party trained last
    kind: Any = None  # common features of this party and the others of its stack
