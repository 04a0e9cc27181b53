"""A party's memory between two messages, in small groups."""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.codecs.channel import Channel, Links
from vfl_flower.transport.messages import TrainOrder


@dataclass(frozen=True)
class PendingWindow:
    """A window that the party has uploaded, and that awaits feedback.

    secret : seed of the window's rows and embeddings.
    rows : rows of the window that the party has.
    """

    order: TrainOrder
    secret: bytes
    rows: Window


@dataclass
class Origin:
    """The run of a party, and the model that it began with.

    run : name of the run, under which the party saves its states.
    counted_since : Flower run in which the counts of uploads began.
    checkpoint : checkpoint number of the earlier run that the model comes from.
    exchange : number of messages that this earlier model had seen.
    began : when the run began, in UTC.
    sent, fresh : bytes of its answers, and uploads of rows apart from training windows.
    """

    run: str = ""
    counted_since: str = ""
    checkpoint: int = 0
    exchange: int = 0
    began: str = ""
    sent: int = 0
    fresh: int = 0


class PartyLinks:
    """A party's ends of its links.

    up : uplinks.
    down : downlinks.
    surrogates : surrogates of both, by their names in a checkpoint.
    """

    def __init__(self, up: Links, down: Links) -> None:
        self.up, self.down = up, down
        self._channels: list[Channel] = [*up.values(), *down.values()]
        self.surrogates: dict[str, Tensor] = dict([*up.with_surrogates(), *down.with_surrogates()])

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Use these arrays as surrogates, without a copy."""
        for channel in self._channels:
            if channel.surrogate is not None:
                channel.surrogate = torch.from_numpy(arrays[channel.saved])
                self.surrogates[channel.saved] = channel.surrogate


@dataclass
class InProcess:
    """Data of a party's last message in this process. Others work without them.

    model : record in ``Context.state`` that shares the model's memory.
    stack : `stacked.Stack` in which the party trained last.
    kind : what the party has in common with the parties of a stack.
    """

    model: weakref.ref[Any] | None = None
    stack: Any = None
    kind: Any = None
