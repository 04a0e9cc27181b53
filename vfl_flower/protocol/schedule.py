"""Schedule axis: the quorum, and how many steps a message carries.

A quorum of all parties is synchronous VFL, with coordinated mini-batches. A quorum of one is VAFL's
Algorithm 1. A quorum of t is its Algorithm 2. `vfl_flower.protocol.sampling` draws a step's rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.estimators.base import Estimator
from vfl_flower.protocol.system import Quorum

FEW_STEPS = 64
"""With no more steps in an epoch, windows do not depend on the runtime, unless messages are dear.

So an estimate in one process is what real nodes reach. More steps are worth longer windows.
"""
_LONGEST = 16  # steps of an adaptive window: embeddings of a longer window are too stale


@dataclass(frozen=True)
class Schedule:
    """The schedule of a run."""

    quorum: int  # uploads that the label holder waits for
    coordinated: bool  # whether all parties use one mini-batch, which both ends know
    window: int  # steps of a party that a message carries, or that the shortest message carries
    longest: int  # steps of the longest message
    measures: bool = False  # whether the window adapts to the time of exchanges

    @property
    def word(self) -> str:
        """Return the kind of schedule that the quorum makes: sync, t-sync or async."""
        return "sync" if self.coordinated else "async" if self.quorum == 1 else "t-sync"

    @property
    def windows(self) -> str:
        """Return the steps of a message, or their range if the window is adaptive, as text."""
        steps = str(self.window)
        return steps if self.window == self.longest else f"{steps} to {self.longest}"

    @classmethod
    def of(
        cls,
        config: RunConfig,
        rule: Quorum,
        parties: int,
        estimator: Estimator,
        secret_batches: bool,
        per_epoch: int,
        cost: str,
        measures: bool = False,
    ) -> Schedule:
        """Return the schedule of a run of ``per_epoch`` steps, over a transport of this cost."""
        quorum = config.schedule.quorum or rule.of(parties)
        if quorum > parties:
            raise ConfigError(f"quorum = {quorum} is more than the {parties} parties: lower it.")
        coordinated = quorum == parties
        if secret_batches:
            if coordinated and parties > 1:
                raise ConfigError(
                    "privacy = 'scalar' needs secret mini-batches, and in a synchronous system all "
                    f"{parties} parties know them: lower the quorum."
                )
            coordinated = False
        if not coordinated:
            _check_apart(config, estimator, parties)
        aggregation_of(config).check_schedule(parties, coordinated)
        if coordinated and config.running.on_party_failure == "continue":
            raise ConfigError(
                "on-party-failure = 'continue' needs a quorum below the number of parties, "
                f"{parties}: a synchronous system waits for every one of them."
            )
        free = estimator.windows["free"]
        few = per_epoch <= FEW_STEPS and cost != "dear"
        most = free if few else max(estimator.windows[cost], _LONGEST * measures)
        window, longest = _window(config, free), _window(config, most)
        return cls(quorum, coordinated, window, longest, measures)


def _check_apart(config: RunConfig, estimator: Estimator, parties: int) -> None:
    """Refuse options whose parties must step together."""
    if estimator.broadcasts:
        raise ConfigError(
            "labels = 'shared' sends every upload on to all parties, which then step together: "
            f"it needs a synchronous system, with a quorum of all {parties}."
        )
    if config.estimator.perturbs == "all":
        raise ConfigError(
            "perturbs = 'all' answers all parties' directions with one difference, so parties "
            f"step together: it needs a synchronous system, with a quorum of all {parties}."
        )


def _window(config: RunConfig, default: int) -> int:
    """Return the window; no embedding may grow older than the delay bound D."""
    window, bound = config.schedule.window, config.schedule.max_delay
    if window and bound and window > bound:
        raise ConfigError(
            f"window = {window} lets an embedding grow older than max-delay = {bound}: make the "
            "window smaller, or the delay larger."
        )
    return window or (min(default, bound) if bound else default)
