"""What a party remembers between two messages, in small groups."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.codecs.channel import Channel, Links
from vfl_flower.transport.messages import TrainOrder


@dataclass(frozen=True)
class PendingWindow:
    """A window that the party has uploaded, and whose feedback it awaits.

    secret : by which the window was drawn and embedded.
    rows : of the window, those that the party has.
    """

    order: TrainOrder
    secret: bytes
    rows: Window


@dataclass
class Origin:
    """The run that a party is in, and the model with which it began.

    run : name of the run, under which the party keeps its states.
    counted_since : Flower run since whose beginning uploads of each row are counted.
    checkpoint : number of the checkpoint of an earlier run that the model is from.
    exchange : number of messages that this earlier model had seen.
    """

    run: str = ""
    counted_since: str = ""
    checkpoint: int = 0
    exchange: int = 0


class PartyLinks:
    """A party's ends of its links.

    up : of uploads.
    down : of feedback.
    surrogates : of both, by the names under which they are saved.
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
    """What this process still has of a party's last message; any other process does without.

    model : record in ``Context.state`` over the model's own memory.
    scalars : record that the last message left; ``None`` after a message that failed.
    node_config : node configuration with which the state was taken up.
    stack : `stacked.Stack` in which the party last trained.
    kind : what the party has in common with the parties of a stack.
    """

    model: weakref.ref[Any] | None = None
    scalars: Any = None
    node_config: Mapping[str, Any] = field(default_factory=dict)
    stack: Any = None
    kind: Any = None
