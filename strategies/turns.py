"""The label holder's record of each party, the step budget, and the quorums of uploads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from typing import Any

from vfl_flower.protocol.ends import Arrival
from vfl_flower.transport.messages import Arrays, TrainOrder, Turn

FINAL = 1 << 30
"""Number of the evaluation after the last step."""


class State(Enum):
    """State of a party in its turns."""

    IDLE = auto()  # it is its turn
    IN_FLIGHT = auto()  # it has not answered its last message
    AWAITS_QUORUM = auto()  # its window is in the table, and not answered yet
    DONE = auto()  # it has answered its last message
    FAILED = auto()
    ASKED_BACK = auto()  # failed, and asked to come back


@dataclass
class Traffic:
    """Exchanges and array bytes of training, as sent, and of evaluations apart."""

    exchanges: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    evaluation_bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        mine, others = asdict(self), asdict(other)
        return Traffic(**{key: mine[key] + others[key] for key in mine})


@dataclass
class Spread:
    """Mean and maximum of numbers that come one by one, none below zero."""

    mean: float = 0.0
    most: float = 0.0
    count: int = 0

    def add(self, number: float) -> None:
        """Count one more number."""
        self.count += 1
        self.mean += (number - self.mean) / self.count
        self.most = max(self.most, number)

    def figures(self) -> dict[str, float]:
        """Return mean and maximum, for a summary."""
        return {"mean": round(self.mean, 6), "most": round(self.most, 6)}


@dataclass
class PartyRecord:
    """One party, as the strategy sees it."""

    party: int
    node_id: int
    columns: int = 0  # feature columns in training
    name: str = ""
    state: State = State.IDLE
    rests: State = State.IDLE  # its state before the message in flight
    order: Turn | None = None  # the message in flight
    exchange: int = 0  # number of the last message sent
    sent_at: float = 0.0
    sent_at_clock: float = 0.0  # virtual seconds
    ordered_at_step: int = 0  # of the label holder, when it ordered the last window
    feedback: Arrays = field(default_factory=dict)  # for its last window; goes with its next turn
    steps: int = 0  # ordered so far
    evaluation_sent: int = 0  # number of the last evaluation ordered
    surrogates: str = ""  # digest of its surrogates at that evaluation
    evaluation: int = 0  # number of the last evaluation answered
    best_evaluation: int = 0  # number of the evaluation of the best model; 0 without a copy of it
    remembers: bool = True  # whether it has a copy of its model at the last evaluation answered
    checkpoint: int = 0  # number of the last checkpoint for which it saved its state
    asked_back: int = 0  # number of the evaluation due when it was last asked back
    unserved: Turn | None = None  # the order that it lacked the state for, to be sent again
    out_of_step: int = 0  # times out of step since it last served a message
    traffic: Traffic = field(default_factory=Traffic)
    reply_seconds: Spread = field(default_factory=Spread)  # from order to reply, evaluations apart
    reply_virtual_seconds: Spread = field(default_factory=Spread)
    staleness: Spread = field(default_factory=Spread)  # label-holder steps from order to answer

    @property
    def alive(self) -> bool:
        """Whether it has not failed."""
        return self.state not in (State.FAILED, State.ASKED_BACK)

    @property
    def in_flight(self) -> bool:
        """Whether it has not answered its last message."""
        return self.state in (State.IN_FLIGHT, State.ASKED_BACK)

    @property
    def awaits_quorum(self) -> bool:
        """Whether its window awaits its quorum; another message may be in flight."""
        state = self.rests if self.state is State.IN_FLIGHT else self.state
        return state is State.AWAITS_QUORUM

    def send(self, order: Turn) -> None:
        """Note that an order is in flight to the party."""
        self.exchange += 1
        self.order = order
        if self.state is State.FAILED:
            self.state = State.ASKED_BACK
        elif self.state is not State.IN_FLIGHT:
            self.state, self.rests = State.IN_FLIGHT, self.state

    def rest(self, state: State | None = None) -> None:
        """Note its answer: take this state, or the state before the message."""
        self.order, self.state = None, state or self.rests

    def take_feedback(self, feedback: Arrays) -> None:
        """Keep the feedback for its window, which goes with its next turn."""
        self.feedback = feedback
        if self.state is State.AWAITS_QUORUM:
            self.state = State.IDLE

    def evaluated(self) -> None:
        """Note that it has answered its evaluation."""
        self.evaluation, self.remembers = self.evaluation_sent, True
        if self.state is State.IDLE and self.evaluation == FINAL:
            self.state = State.DONE

    # Checkpoints are made when nothing is in flight.

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to resume, in JSON."""
        counted = {name: asdict(getattr(self, name)) for name in _COUNTED}
        named = {"name": self.name} if self.name else {}
        saved = {each: getattr(self, each) for each in _SAVED}
        return {**saved, **named, "alive": self.alive, **counted}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name in state.keys() & set(_SAVED):
            setattr(self, name, state[name])
        for name, kind in _COUNTED.items():
            setattr(self, name, kind(**state[name]))
        self.state = State.DONE if self.evaluation == FINAL else State.IDLE
        if not state["alive"]:
            self.state = State.FAILED

    def figures(self) -> dict[str, Any]:
        """Return traffic, reply times and staleness, for a summary."""
        spreads = ("reply_seconds", "reply_virtual_seconds", "staleness")
        return {
            "party": self.party,
            **({"name": self.name} if self.name else {}),
            **asdict(self.traffic),
            **{name: getattr(self, name).figures() for name in spreads},
        }


_SAVED = (
    *("party", "exchange", "steps", "evaluation_sent", "evaluation", "best_evaluation"),
    *("remembers", "surrogates", "asked_back", "checkpoint", "columns"),
)
_COUNTED = {
    "traffic": Traffic,
    "reply_seconds": Spread,
    "reply_virtual_seconds": Spread,
    "staleness": Spread,
}
_OF_BUDGET = ("planned", "ordered", "answered", "stopped")


class StepBudget:
    """Steps over all parties; each party gets ``epochs`` passes over its rows, of K steps.

    ``abreast``: all parties must get the same steps, or none. ``eval_every`` may be parts of an
    epoch.
    """

    def __init__(
        self,
        epochs: int,
        per_epoch: int,
        parties: int,
        abreast: bool = False,
        eval_every: float = 1.0,
        eval_first: bool = False,
    ) -> None:
        self._eval_every = eval_every
        self._eval_first = eval_first
        self._abreast = parties if abreast else 1
        self._asked = 0  # windows, over all parties
        self.per_epoch = per_epoch
        self.of_epoch = per_epoch * max(1, parties)
        self._of_party = epochs * per_epoch
        self.planned = epochs * self.of_epoch
        self.allowed = self.planned  # by the privacy budget
        self.ordered = 0
        self.answered = 0
        self.stopped = False  # before all were ordered

    @property
    def left(self) -> int:
        """Steps still to order, as far as the privacy budget allows."""
        if self.stopped:
            return 0
        return min(self.planned, self.allowed) // self._abreast * self._abreast - self.ordered

    @property
    def limit(self) -> int:
        """All steps, ordered or still to order."""
        return self.ordered + self.left

    @property
    def epochs(self) -> float:
        """Epochs completed, on average over the parties."""
        return self.answered / self.of_epoch

    @property
    def evaluation(self) -> int:
        """Number of the last evaluation that the answered steps call for."""
        epochs = self.answered / self.of_epoch
        return int(epochs / self._eval_every * (1 + 1e-12)) + self._eval_first

    def evaluates_after(self, epoch: int, last: int) -> bool:
        """Return whether to evaluate after this epoch, where training is by whole epochs."""
        before, now = (int(each / self._eval_every * (1 + 1e-12)) for each in (epoch - 1, epoch))
        return now > before or epoch == last or self.stopped

    def window(self, done: int, longest: int) -> tuple[int, int, int]:
        """Order a party's next window after ``done`` steps; return epoch, first step and number."""
        epoch, first = divmod(done, self.per_epoch)
        share = self._abreast - self._asked % self._abreast
        steps = min(longest, self.per_epoch - first, self.left // share)
        self.ordered += steps
        self._asked += 1
        return epoch, first, steps

    def without(self, done: int) -> None:
        """Remove a failed party's remaining steps; ``done`` were ordered from it."""
        self.planned -= max(0, self._of_party - done)

    def with_again(self, done: int) -> None:
        """Add a returned party's remaining steps; ``done`` were ordered from it."""
        self.planned += max(0, self._of_party - done)

    def state_dict(self) -> dict[str, Any]:
        """Return what is needed to resume, in JSON."""
        return {name: getattr(self, name) for name in _OF_BUDGET}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        for name in _OF_BUDGET:
            setattr(self, name, state[name])


class UnansweredUploads:
    """Arrivals in their order, which await a quorum. It blocks nothing: `Messenger.gather` does."""

    def __init__(self, quorum: int, records: Sequence[PartyRecord], budget: StepBudget) -> None:
        self.arrivals: list[Arrival] = []
        self.held = False  # whether to answer none for now
        self.draining = False  # whether parties wait for their next turns
        self._quorum = quorum
        self._records = records
        self._budget = budget
        self._group: list[Arrival] = []  # the quorum that is being answered

    def drop(self, party: int) -> None:
        """Drop the window of a party that has lost the state for its feedback."""
        for arrivals in (self.arrivals, self._group):
            arrivals[:] = [arrival for arrival in arrivals if arrival.party != party]

    def groups(self) -> Iterator[list[Arrival]]:
        """Yield each quorum of arrivals, sorted by party.

        Near the end or after failures, fewer arrivals can still come: these are then enough.
        """
        while not self.held and self.arrivals:
            count = len(self.arrivals)  # while draining, answer all that are in
            if not self.draining:
                any_left = self._budget.left > 0
                count = sum(
                    record.alive
                    and (any_left or record.awaits_quorum or isinstance(record.order, TrainOrder))
                    for record in self._records
                )
            count = max(1, min(self._quorum, count))
            if len(self.arrivals) < count:
                break
            self._group, self.arrivals = self.arrivals[:count], self.arrivals[count:]
            self._group.sort(key=lambda arrival: arrival.party)
            yield self._group
            self._group = []
