"""The transcript of a run, for a rerun: the label holder's secrets, and all messages in order.

Windows and the order of answers may depend on measured time. A rerun takes both from the earlier
run. If noise of the label holder hides labels, it compares each order before it is sent, and each
answer before it is used. So the noise hides the same values again, and a rerun releases nothing
new. Parties compare all messages anyway (`vfl_flower.party.transcript`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
from flwr.app import Message
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.logs import notice
from vfl_flower.config.provenance import changed, environment
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.transport.messages import Arrays, TrainOrder, Turn, Upload
from vfl_flower.transport.wire import DIGEST, digest_of

Place = tuple[int, int]
"""Number of a party, and of a message to it."""

_ENTRY = np.dtype(
    [(name, "<u4") for name in ("party", "exchange", "group", "steps")]
    + [("order", f"V{DIGEST}"), ("answer", f"V{DIGEST}")]
)


class Transcript:
    """The messages of a run, and of the run that it repeats, if any.

    hides : whether the label holder's noise hides labels. Then it compares all messages too. Else
        the parties do, and they have more to hide.
    masked : whether answers have masks, which are new in each run.
    secrets : name -> secret of the label holder.
    whole : whether the run was neither interrupted nor left by a party, so that it can be repeated.
    """

    def __init__(
        self, hides: bool, masked: bool = False, then: NDArray[np.uint8] | None = None
    ) -> None:
        self.hides, self.masked, self.whole = hides, masked, True
        self.secrets: dict[str, str] = {}
        self._entries: dict[Place, list[Any]] = {}
        self._groups = 0
        self._then: dict[Place, Any] = {}
        self.repeats = then is not None  # whether the run repeats an earlier run
        self._due: list[list[Place]] = []
        self._early: dict[Place, Message] = {}
        if then is not None:
            rows = then.view(_ENTRY)
            self._then = {(int(each["party"]), int(each["exchange"])): each for each in rows}
            groups: dict[int, list[Place]] = {}
            for place, each in self._then.items():
                groups.setdefault(int(each["group"]), []).append(place)
            self._due = [groups[number] for number in sorted(groups, reverse=True)]

    @classmethod
    def of(cls, holder: LabelHolder, again: Checkpoint | None) -> Transcript:
        """Return a run's transcript; in a rerun, give the label holder its earlier secrets."""
        masked = holder.aggregation.agrees
        then = again.arrays["transcript"] if again else None
        found = cls(holder.noise is not None, masked, then)
        if again:
            if new := changed(again.strategy["transcript"].get("environment", "")):
                notice.warning("The label holder's environment has changed: %s.", new)
            of_then = again.strategy["transcript"]["secrets"]
            holder.secret = bytes.fromhex(of_then["directions"])
            if holder.noise:
                holder.noise.secret = bytes.fromhex(of_then["noise"])
        found.secrets["directions"] = holder.secret.hex()
        if holder.noise:
            found.secrets["noise"] = holder.noise.secret.hex()
        return found

    def steps(self, party: int, exchange: int) -> int:
        """Return the steps of this order in the run to repeat."""
        return int(self._of_then((party, exchange))["steps"])

    def ordered(self, party: int, order: Turn) -> None:
        """Note an order before it is sent. Raise `ConfigError` if it differs in a rerun."""
        place, digest = (party, order.exchange), bytes(DIGEST)
        if self.hides:
            digest = digest_of(self._key, order.arrays, order)
        steps = order.steps if isinstance(order, TrainOrder) else 0
        if self.repeats and digest != self._of_then(place)["order"].tobytes():
            raise _difference(place, "The label holder would send another message")
        self._entries[place] = [0, steps, digest, bytes(DIGEST)]

    def answered(self, party: int, upload: Upload) -> None:
        """Note an answer before it is used. Raise `ConfigError` if it differs in a rerun."""
        place = party, upload.exchange
        digest = bytes(DIGEST)
        if self.hides and not self.masked:
            digest = digest_of(self._key, upload.arrays)
        if self.repeats and digest != self._of_then(place)["answer"].tobytes():
            raise _difference(place, f"Party {party} has sent another answer")
        entry = self._entries.pop(place)  # entries are in the order of answers
        self._entries[place] = [self._groups, entry[1], entry[2], digest]

    def in_order(
        self, wait: Callable[[], list[Message]], record_of: Callable[[Message], Any]
    ) -> list[Message]:
        """Return the next answers: those that arrive, or in a rerun the ones that arrived then.

        ``wait`` returns no answers if no party answers in time. ``record_of`` returns
        the party that answers its order by a message, or None if the message came twice.
        """
        self._groups += 1
        if not self.repeats:
            return wait()
        due = self._due.pop() if self._due else []
        while not set(due) <= self._early.keys():
            arrived = wait()
            if not arrived:
                return []
            for message in arrived:
                if record := record_of(message):
                    self._early[record.party, record.exchange] = message
        return [self._early.pop(place) for place in due]

    @cached_property
    def _key(self) -> bytes:
        """Return the secret of digests, without which a party could send another answer."""
        return "|".join(self.secrets.values()).encode()

    def _of_then(self, place: Place) -> Any:
        if place not in self._then:
            raise _difference(place, "The run to repeat has no such message")
        return self._then[place]

    def state_dict(self) -> dict[str, Any]:
        """Return the secrets, and whether the run can be repeated."""
        return {"secrets": self.secrets, "whole": self.whole, "environment": environment()}

    def array(self) -> NDArray[np.uint8]:
        """Return all messages as bytes, for a checkpoint."""
        rows = [
            (*place, group, steps, order, answer)
            for place, (group, steps, order, answer) in self._entries.items()
        ]
        return np.array(rows, _ENTRY).view(np.uint8).reshape(-1)


def _difference(place: Place, what: str) -> ConfigError:
    party, exchange = place
    return ConfigError(
        f"The rerun differs from the run at message {exchange} of party {party}. {what}. Data, a "
        "processor, a secret or the version of a package has changed at that side."
    )


def verdict(arrays: Arrays, results: Mapping[str, Any], again: Checkpoint) -> dict[str, Any]:
    """Return the number of messages, and what differs from the run to repeat; empty if nothing.

    ``arrays`` are the last checkpoint's: all messages, tables and parameters. ``results`` are the
    test figures. A run of an earlier version may lack some of the arrays.
    """
    unequal = [
        name
        for name, array in arrays.items()
        if name in again.arrays and not np.array_equal(array, again.arrays[name])
    ]
    then = again.strategy["figures"]
    unequal += [name for name, figure in results.items() if figure != then[name]]
    messages = len(arrays["transcript"]) // _ENTRY.itemsize
    return {"messages": messages, "differs": sorted(unequal)}
