"""The label holder's checkpoints of a run: what they hold, and how a run resumes."""

from collections.abc import Callable, Sequence

import numpy as np

from strategies.run import Run
from strategies.transcript import verdict
from strategies.turns import PartyRecord
from vfl_flower.config.errors import VflError
from vfl_flower.config.logs import log, notice
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data import withdrawn
from vfl_flower.data.ids import People
from vfl_flower.label_holder.checkpoint import Checkpoint, Keeper
from vfl_flower.label_holder.held_out import of_group
from vfl_flower.protocol.privacy.journal import Mark
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.privacy.release_log import ReleaseLog
from vfl_flower.records import second_count
from vfl_flower.results.figures import of_rerun as sentence
from vfl_flower.tasks.drift import label_holder as drift
from vfl_flower.transport.messages import Arrays, CheckpointOrder


class Checkpoints:
    """Writes a run's checkpoints, after resuming the run from a found one.

    ``drain`` waits until no message is out, and answers arrivals. ``wait_for`` only waits, for some
    parties. ``given`` is the configuration without values that its rows decide.
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
        if keeper.found:
            self._resume(keeper.found)
        elif earlier := keeper.earlier:
            run.transcript.whole = False
            run.holder.warm_start(earlier.config, earlier.strategy["holder"], earlier.arrays)
        if run.save_every and not keeper.found:
            self._write()  # before any release; the parties have saved theirs as number 0

    def _resume(self, found: Checkpoint) -> None:
        run, state = self.run, found.strategy
        run.transcript.whole = False
        for record, saved in zip(run.records, state["seats"], strict=True):
            record.load_state_dict(saved)
            record.checkpoint = found.number  # each has saved it again, under this run's name
        run.history.load_state_dict(state["history"])
        run.budget.load_state_dict(state["plan"])
        run.adaptive_window.load_state_dict(state.get("pace", {}))
        run.messenger.party_memory_mb = state["party_memory_mb"]
        if state["timing"]:
            run.transport.load_state_dict(state["timing"])
        run.holder.load_state_dict(state["holder"], found.arrays)
        if run.releases:
            self._keep(run.releases, state["journal"])
        again = run.accountant.released - run.budget.answered
        if again > 0:  # else the run would release more than its budget
            run.budget.allowed = run.budget.limit - again
            log.warning("%d steps were answered after the checkpoint, and count.", again)
        notice.info("The run goes on from its last checkpoint, after epoch %.3g.", found.epoch)

    def _keep(self, releases: ReleaseLog, mark: Mark | None = None) -> None:
        keeper, name = self.keeper, self.keeper.journal.name
        releases.keep(keeper.journal, keeper.run, mark, second_count.of_run(keeper.origin, name))

    def save(self, finished: bool = False) -> None:
        """Save a checkpoint: first the parties' states, then the label holder's.

        If either side is killed meanwhile, the last checkpoint stays valid: parties keep two.
        """
        run = self.run
        run.saving = False
        self._drain()
        self.keeper.number += 1
        alive = [record for record in run.records if record.alive]
        orders = (
            CheckpointOrder(
                exchange=record.exchange + 1, number=self.keeper.number, arrays=record.feedback
            )
            for record in alive
        )
        run.messenger.post(map(run.messenger.message, alive, orders))
        self._wait_for(alive)
        self._write(finished)
        run.tell("saved")

    def _tags(self, train: People, test: People) -> Arrays:
        """Return keyed hashes of the people of the run, and of runs that it began with."""
        try:
            listed = withdrawn.read(withdrawn.place(), begin=True)
        except VflError as error:
            log.warning("The checkpoint names nobody, so `vfl forget` empties all rows: %s", error)
            return {}
        tags = {"tags.train": listed.tags(train), "tags.test": listed.tags(test)}
        before = self.keeper.found or self.keeper.earlier
        then = of_group("tags", before.arrays) if before else {}
        of_then = [then[name] for name in ("train", "earlier")[bool(self.keeper.found) :] if then]
        earlier = np.concatenate([tags["tags.train"][:0], *of_then])
        if len(earlier):  # else copies of the tags of many rows would be the run's peak of memory
            earlier = earlier[~np.isin(earlier, tags["tags.train"])]
        return {**tags, "tags.earlier": earlier}  # 0 stands for a withdrawal

    def _write(self, finished: bool = False) -> None:
        """Write the label holder's half; the parties have written theirs."""
        run = self.run
        releases = run.releases
        if releases and not finished and releases.mark is None:  # the first checkpoint
            self._keep(releases)
        of_holder, arrays = run.holder.state_dict()
        arrays["transcript"] = run.transcript.array()
        if finished and self.keeper.again:
            run.rerun = verdict(arrays, run.results(), self.keeper.again)
            log.info("%s", sentence(run.rerun))
        people, hides_labels = run.labels.people, mechanism_of(self.given).hides_labels
        if hides_labels and people:  # to recognise them in any file
            assert run.labels.places is not None
            had_labels = people[0][: len(run.labels.places)]  # not those who taught a student
            arrays["people"] = np.concatenate([had_labels, people[1][: run.labels.validation]])
        if people:
            arrays |= self._tags(*people)
        state = {
            "seats": [record.state_dict() for record in run.records],
            "history": run.history.state_dict(),
            "plan": run.budget.state_dict(),
            "pace": run.adaptive_window.state_dict(),
            "party_memory_mb": run.messenger.party_memory_mb,
            "uploads": run.accountant.uploads(),
            "journal": releases.mark if releases else None,
            "origin": self.keeper.origin,
            "figures": run.figures() if finished else None,
            "drift": drift.shares(run.holder, run.labels.shares) if finished else None,
            "timing": run.transport.state_dict(),
            "holder": of_holder,
            "transcript": run.transcript.state_dict(),
        }
        Checkpoint(
            config=self.given,
            run=self.keeper.name,
            number=self.keeper.number,
            finished=finished,
            rows=self.keeper.rows,
            present=self.keeper.present,
            used=self.keeper.used,
            about_labels=run.labels.about(hides_labels) | {"coverage": run.labels.coverage},
            strategy=state,
            arrays=arrays,
        ).save(self.keeper.folder)
