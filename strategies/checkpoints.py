"""Checkpoints of a run: what the strategy keeps to go on, and when."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from strategies.party_record import PartyRecord
from strategies.run import Run
from strategies.signals import Held, signals_held
from vfl_flower.config.run_config import RunConfig
from vfl_flower.label_holder.checkpoint import Checkpoint, Keeper
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.transport.messages import CheckpointOrder

log = logging.getLogger("flwr")


class Checkpoints:
    """Keeps a run's checkpoints, from the one on that was found, if there is one.

    Parameters
    ----------
    keeper : where they are kept.
    run : of which they are; its parties have been enrolled.
    given : its configuration without what its rows decide.
    drain : waits until nothing is in flight, and answers all that has come.
    wait_for : waits until nothing is in flight to these parties.
    """

    def __init__(
        self,
        keeper: Keeper,
        run: Run,
        given: RunConfig,
        drain: Callable[[], None],
        wait_for: Callable[[Sequence[PartyRecord]], None],
    ) -> None:
        self.keeper = keeper
        self.run = run
        self.given = given
        self._drain = drain
        self._wait_for = wait_for
        self._held: Held | None = None
        self.every = run.config.running.exchanges_apart(run.transport.simulated)
        if keeper.found:
            self._go_on_from(keeper.found)
        elif earlier := keeper.earlier:
            run.holder.warm_start(earlier.config, earlier.strategy["holder"], earlier.arrays)
        self._kept_at = self._exchanges  # at the last
        if keeper.found:
            if run.releases:
                run.releases.keep(keeper.journal, keeper.run, keeper.found.strategy["journal"])
            again = run.accountant.released - run.budget.answered
            if again > 0:  # else the run would release more than its budget
                run.budget.allowed = run.budget.limit - again
                log.warning("%d steps were answered after the checkpoint, and count.", again)
        elif self.every:  # before anything is released; parties have kept theirs of this number
            self._save()

    @property
    def _exchanges(self) -> int:
        return sum(record.traffic.exchanges for record in self.run.records)

    def _go_on_from(self, found: Checkpoint) -> None:
        run, state = self.run, found.strategy
        for record, kept in zip(run.records, state["seats"], strict=True):
            record.go_on_from(kept)
            record.checkpoint = found.number  # each has kept it anew, under this run's name
        run.history.go_on_from(state["history"])
        run.budget.go_on_from(state["plan"])
        run.adaptive_window.go_on_from(state.get("pace", {}))
        run.messenger.party_memory_mb = state["party_memory_mb"]
        if state["timing"]:
            run.transport.go_on_from(state["timing"])
        run.holder.load_state_dict(state["holder"], found.arrays)

    @contextmanager
    def held(self, can_resume: bool) -> Iterator[None]:
        """Hold Ctrl-C and SIGTERM until a checkpoint is kept, if a run ``can_resume`` from it."""
        if not can_resume:
            yield
            return
        with signals_held() as self._held:
            yield
            self._end_if_told(lambda: None)

    def _end_if_told(self, keep: Callable[[], None]) -> None:
        if self._held:
            self._held.end(keep, self.run.budget.epochs, self.keeper.folder)

    def keep_if_due(self) -> None:
        """Keep one, if so many exchanges have passed; keep one and end, if a signal has come."""
        self._end_if_told(self.keep)
        if self.every and self._exchanges >= self._kept_at + self.every:
            self.keep()

    def keep(self, finished: bool = False) -> None:
        """Wait until nothing is in flight; have the parties keep their states, and keep this one.

        Whoever is killed meanwhile has the last checkpoint left: parties keep two.
        """
        run = self.run
        self._drain()
        self.keeper.number += 1
        alive = [record for record in run.records if record.alive]
        run.messenger.post(
            run.messenger.message(
                record,
                CheckpointOrder(
                    exchange=record.exchange + 1, number=self.keeper.number, arrays=record.feedback
                ),
            )
            for record in alive
        )
        self._wait_for(alive)
        self._kept_at = self._exchanges
        self._save(finished)

    def _save(self, finished: bool = False) -> None:
        """Write the label holder's half."""
        run = self.run
        releases = run.releases
        if releases and not finished and releases.mark is None:  # nobody expected this checkpoint
            releases.keep(self.keeper.journal, self.keeper.run)
        of_holder, arrays = run.holder.state_dict()
        state = {
            "seats": [record.kept() for record in run.records],
            "history": run.history.kept(),
            "plan": run.budget.kept(),
            "pace": run.adaptive_window.kept(),
            "party_memory_mb": run.messenger.party_memory_mb,
            "uploads": run.accountant.uploads(),
            "journal": releases.mark if releases else None,
            "figures": run.figures() if finished else None,
            "timing": run.transport.timing,
            "holder": of_holder,
        }
        Checkpoint(
            config=self.given,
            run=self.keeper.name,
            number=self.keeper.number,
            finished=finished,
            rows=self.keeper.rows,
            present=self.keeper.present,
            used=self.keeper.used,
            about_labels=run.labels.about(mechanism_of(run.config).hides_labels),
            strategy=state,
            arrays=arrays,
        ).save(self.keeper.folder)
