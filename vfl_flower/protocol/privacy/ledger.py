"""What a run releases, counted before it leaves, and kept on disk through interruptions.

A `Ledger` is told of every order, upload and answer, at the label holder, whose honesty in counting
is assumed. This one is for runs without noise; `embeddings` and `scalars` have those that count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.plugins import LEDGERS
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import Labels
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.privacy.journal import Event, Journal, Mark, refused
from vfl_flower.protocol.privacy.noise import ScalarNoise
from vfl_flower.transport.messages import EmbedOrder, EvaluateOrder, Order, TrainOrder

TRAIN, EMBED, EVALUATE, RECEIVED, ANSWERED = range(5)
"""Kinds of a journal's events."""

_NO_ROWS = np.zeros(0, np.int32)

EVERYONE = "all parties together, the network, and whoever gets the model"
"""The adversary of what protects labels."""


@dataclass(frozen=True)
class Guarantee:
    """What an epsilon is of, in words that stand beside it wherever it is shown.

    protects : what.
    relation : what is the difference that nobody can tell.
    adversary : who cannot, whatever they do.
    """

    protects: str
    relation: str
    adversary: str

    def figures(self) -> dict[str, str]:
        """For ``summary.json``."""
        return {f"epsilon_{name}": value for name, value in asdict(self).items()}


class Released(Protocol):
    """What a ledger asks of an estimator: what an upload shows of a row, and to whom."""

    uploads_per_row: ClassVar[int]
    uploads_reach: ClassVar[str]
    answers_by_scalars: ClassVar[bool]


class Ledger:
    """What a run has released, and what that is worth; here nothing is claimed."""

    noise_on: ClassVar[str] = "nothing"
    """What its mechanism adds noise to: nothing, labels, scalars or embeddings."""

    journaled: ClassVar[tuple[int, ...]] = ()  # kinds of events that it counts

    def __init__(self, config: RunConfig, rows: int, estimator: Released) -> None:
        self.config = config
        self.rows = rows
        self.estimator = estimator
        self._journal: Journal | None = None

    @classmethod
    def check(cls, config: RunConfig, estimator: Released) -> None:
        """Raise `ConfigError` if keys of privacy contradict each other, or the estimator."""
        if config.privacy.epsilon is not None or config.privacy.noise_multiplier is not None:
            raise ConfigError(
                "epsilon is the budget of privacy = 'labels' or 'scalar', and noise-multiplier is "
                "for the latter: add it, or leave them out (a perturbed embedding's epsilon "
                "follows from embedding-noise)."
            )

    @property
    def secret_batches(self) -> bool:
        """Whether mini-batches must be secret, which those of a synchronous system are not."""
        return False

    def steps_allowed(self, planned: int, parties: int, quorum: int, top_learns: bool) -> int:
        """How many of the planned steps, over all parties, the budget allows."""
        return planned

    def labels(self, labels: Labels) -> Labels:
        """The labels that the label holder learns from."""
        return labels

    def noise(self) -> ScalarNoise | None:
        """What the label holder does to scalars before it sends them."""
        return None

    def ordered(self, party: int, order: Order) -> None:
        """Count what an order asks a party to upload, before it is sent."""
        if isinstance(order, TrainOrder):
            self._write(TRAIN, party, order.epoch, order.first, order.steps)
        elif isinstance(order, EmbedOrder):
            self._write(EMBED, party, ids=order.arrays["ids"])
        elif isinstance(order, EvaluateOrder):
            self._write(EVALUATE, party)
        self._ordered(party, order)

    def received(self, party: int, window: Window) -> None:
        """Count the rows that a party has uploaded."""
        self._write(RECEIVED, party, len(window.lengths), ids=window.ids)
        self._received(party, window)

    def answered(self, group: Sequence[tuple[int, Window]]) -> bool:
        """Count the answers to the windows of a quorum, by party, before they are sent.

        False if they are not to be sent: parties then get answers that say nothing.
        """
        return True

    def _ordered(self, party: int, order: Order) -> None:
        pass

    def _received(self, party: int, window: Window) -> None:
        pass

    def _answered(self, party: int, window: Window, weight: int) -> None:
        pass

    def keep_journal(self, path: Path, run: str = "", mark: Mark | None = None) -> None:
        """From now on write to disk what is about to be released, before it is counted.

        What stands there already is counted first: all that a run has released before it was cut
        short, also what came after its last checkpoint and will be released again. A new file
        begins with what this ledger has counted until now.

        Parameters
        ----------
        run : the Flower run that begins the file.
        mark : `journal_mark` at the checkpoint that a run goes on from.

        Raises
        ------
        ConfigError
            If it is not what the run has written, at least until that checkpoint.
        """
        if not self.journaled:
            return
        if mark is not None and not path.exists():
            raise refused(path, "not there")
        is_new = not path.exists()
        self._journal = Journal(path, run)
        if is_new:
            list(self._journal.read())
            for event in self.so_far():
                self._journal.write(event[:5], event[5])
            return
        for kind, party, first, second, third, ids in self._journal.read(mark):
            if kind == TRAIN:
                order = TrainOrder(
                    exchange=0, epoch=first, first=second, steps=third, coordinated=False
                )
                self._ordered(party, order)
            elif kind == EMBED:
                self._ordered(party, EmbedOrder(exchange=0, arrays={"ids": ids}))
            elif kind == EVALUATE:
                self._ordered(party, EvaluateOrder(exchange=0))
            elif kind == RECEIVED:
                self._received(party, Window(ids, np.zeros(first, np.int32)))
            else:
                self._answered(party, Window(ids, np.zeros(first, np.int32)), second)

    def so_far(self) -> Iterator[Event]:
        """Events by which another ledger counts what this one has counted, few as they are."""
        return iter(())

    def journal_mark(self) -> Mark | None:
        """How far the journal is, for a checkpoint; none where nothing is kept or counted."""
        return self._journal.mark if self._journal else None

    def _write(
        self,
        kind: int,
        party: int,
        first: int = 0,
        second: int = 0,
        third: int = 0,
        ids: NDArray[np.int32] = _NO_ROWS,
    ) -> None:
        if self._journal and kind in self.journaled:
            self._journal.write((kind, party, first, second, third), ids)

    def released_steps(self) -> int:
        """Steps that count towards `steps_allowed`."""
        return 0

    def uploads(self) -> int:
        """Uploads of the most uploaded record of any party, where they are counted."""
        return 0

    def figures(self) -> dict[str, Any]:
        """The privacy part of ``summary.json``; empty epsilons where noise can be repeated.

        ``gaussian_mu`` is in it where all releases are one Gaussian mechanism (`together`).
        """
        return {"epsilon": None, "delta": None, "epsilon_of_paper": None}


def check_range(config: RunConfig) -> None:
    """Raise `ConfigError` if what noise on numbers is measured by would follow from them."""
    if config.data.target == "regression" and not config.data.label_range:
        raise ConfigError(
            f"privacy = {config.privacy.mechanism!r} with target = 'regression' needs the lowest "
            "and the highest label that can be, which is public: give label-range, such as '0,120'."
        )


def ledger_of(config: RunConfig) -> type[Ledger]:
    """What counts the releases of the configured mechanism."""
    found: type[Ledger] = LEDGERS.load(config.privacy.mechanism)
    return found


def check_validation(config: RunConfig) -> RunConfig:
    """The configuration, without validation where epsilon would not cover its labels.

    Raises
    ------
    ConfigError
        If it was asked for there.
    """
    if ledger_of(config).noise_on != "scalars" or config.data.validation_fraction == 0:
        return config
    if config.data.validation_fraction is None:
        return config.with_values({"validation-fraction": 0.0})
    raise ConfigError(
        "privacy = 'scalar' does not cover the labels of validation rows, which decide when "
        "training stops: leave validation-fraction out."
    )


def hides_labels(config: RunConfig) -> bool:
    """Whether labels are protected, so that no digest of them is kept with the model."""
    return ledger_of(config).noise_on in ("labels", "scalars")
