"""A party: one feature holder, between the messages that reach it.

`vfl_flower.client_app` serves each message by a method of `Party`. Read `Party.train` first. An
order comes in, and the party draws the rows of its next window. It learns from the feedback in the
order, embeds the rows, and uploads the embeddings. `vfl_flower.party.builder` builds a party, and
`vfl_flower.party.state` keeps it between two messages.
"""

import json
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import OutOfStepError, VflError
from vfl_flower.config.provenance import peak_memory_mb, utc_now
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_party import FeatureBlock, load_partition
from vfl_flower.data.source import signs_in
from vfl_flower.models.training import load_model
from vfl_flower.party import about
from vfl_flower.party.inputs import Inputs
from vfl_flower.party.learner import Learner
from vfl_flower.party.limits import Limits
from vfl_flower.party.transcript import Transcript
from vfl_flower.protocol import estimators
from vfl_flower.protocol.aggregation.masks import alike
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.codecs.channel import Blocks, Links, check_memory, digest, zeros
from vfl_flower.transport import messages
from vfl_flower.transport.messages import Arrays


@dataclass(frozen=True)
class PendingWindow:
    """A window that the party has uploaded, and that awaits feedback."""

    order: messages.TrainOrder
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


class Party:
    """One party of a run, with number ``index``, its features and its own model and training.

    By default it has its columns of the partitioned data set, and the run's model.
    """

    def __init__(
        self,
        config: RunConfig,
        index: int,
        parties: int,
        outputs: int,
        block: FeatureBlock | None = None,
        own: RunConfig | None = None,
        grown: bool = False,
        transcript: Transcript | None = None,
    ) -> None:
        own, frozen = own or config, grown and config.training.freeze
        self.inputs = inputs = Inputs.of(block or load_partition(config, index, parties))
        self.transcript = transcript or Transcript()
        self.learner = learner = Learner(
            *(config, own, index, parties, outputs, inputs, frozen, self.transcript.secret())
        )
        self.about = about.write(
            *(config, own, parties, outputs, inputs.block, inputs.rows, learner.model, grown)
        )
        self.config = learner.config
        self.estimator = estimators.choose(self.config)(self.config)
        tables = self.estimator.party_tables(parties)
        check_memory("this party's", 4 * tables * inputs.rows * learner.size)
        table = zeros((inputs.rows, learner.size))
        self.links = PartyLinks(self.estimator.uplinks(table), self.estimator.downlinks_of(learner))
        self.seal = self.estimator.aggregation.seal(index, parties)  # None for plain uploads
        self.limits: Limits | None = None  # None without such rules
        self.origin = Origin(began=utc_now())
        self.exchange = 0  # number of the last message served
        self.sampling = learner.sampling
        self.steps = 0  # mini-batches of training, including the pending window
        self.pending: PendingWindow | None = None
        self.in_process = InProcess()

    # --- a turn ---------------------------------------------------------------------------------

    def train(self, order: messages.TrainOrder) -> messages.Upload:
        """Learn from the last feedback; upload the next window (VAFL Alg. 1 lines 3-7)."""
        window = self.begin(order)
        self.learn(order.arrays)
        return self.upload_window(order, window)

    def begin(self, order: messages.TrainOrder) -> Window:
        """Count the steps of an order, and draw their rows."""
        self.sampling.check(order, self.learner.parties)
        if self.seal and not order.coordinated:
            self.seal.refuse_alone()
        self._count(order)
        self.steps += 0 if self.learner.frozen else order.steps
        window = self._draw(order, self.learner.secret)
        if self.limits:
            rows, places = self.inputs.block.train_rows, self.inputs.places_of(window.ids)
            self.limits.check_steps(self.steps, self.sampling.per_epoch)
            self.limits.count(rows, places, self.estimator.uploads_per_row)
        return window

    def _draw(self, order: messages.TrainOrder, secret: bytes) -> Window:
        """Draw the rows of a window, shared by all parties or the party's own."""
        owner = None if order.coordinated else self.learner.index
        if owner is None or not self.sampling.secret:
            secret = b""  # the label holder draws the same window
        window = self.sampling.window(owner, order.epoch, order.first, order.steps, secret)
        return window if self.inputs.mask is None else self.inputs.held(window)

    def learn(self, arrays: Arrays) -> None:
        """Apply feedback for the pending window, at the parameters that made its upload."""
        learner, pending, self.pending = self.learner, self.pending, None
        self.in_process.stack = None
        present = learner.secret, learner.exchange
        try:
            if pending and not learner.frozen:  # a frozen model gets no feedback
                learner.secret, learner.exchange = pending.secret, pending.order.exchange
                blocks = self.links.down.decode(arrays, pending.rows)
                self.estimator.update(learner, blocks, pending.order, pending.rows)
        except VflError as error:
            raise VflError(f"was sent feedback that it cannot use: {error}") from None
        finally:  # use feedback once, even if the update fails halfway
            learner.secret, learner.exchange = present
            learner.trace = None

    def forget_window(self) -> None:
        """Stop waiting for feedback."""
        self.pending = self.learner.trace = None

    def upload_window(
        self, order: messages.TrainOrder, window: Window, blocks: Blocks | None = None
    ) -> messages.Upload:
        """Upload a window's embeddings, perhaps from a stack; keep it until feedback comes."""
        self.pending = PendingWindow(order, self.learner.secret, window)
        if blocks is None:
            with torch.set_grad_enabled(not self.learner.frozen):
                blocks = self.estimator.embed(self.learner, order, window)
        upload = self._upload(self.links.up, blocks, window)
        if not order.coordinated:
            upload.arrays["ids"] = window.ids
            if self.sampling.secret:
                upload.arrays["lengths"] = window.lengths
        return upload

    def _upload(self, links: Links, blocks: Blocks, window: Window) -> messages.Upload:
        """Return the answer with a window's blocks. The message decides a codec's random draws."""
        key = f"{self.config.training.seed}|up|{self.learner.index}|{self.exchange}"
        return self._answer(links.encode(blocks, window, key))

    def _answer(self, arrays: Arrays) -> messages.Upload:
        """Return an answer. Note its arrays, if any, and mask them if the run has masks."""
        if arrays:
            self.transcript.answered(self.exchange, arrays)
            self.origin.sent += sum([each.nbytes for each in arrays.values()])
            arrays = self.seal.hide(arrays) if self.seal else arrays
        index = self.learner.index
        return messages.Upload(party=index, exchange=self.exchange, arrays=arrays)

    def _count(self, order: messages.Turn) -> None:
        """Check the number of a message, and draw its random secret."""
        if order.exchange != self.exchange + 1:
            raise OutOfStepError(f"got message {order.exchange} after message {self.exchange}.")
        secret = self.transcript.secret(order)
        self.exchange = self.learner.exchange = order.exchange
        self.origin.fresh += isinstance(order, messages.EmbedOrder | messages.EvaluateOrder)
        if self.seal:
            self.seal.bind(order)
        if self.config.privacy.noise_seed < 0:
            # An older state or two processes may serve a message twice. Each time needs its own
            # noise and directions.
            self.learner.secret = secret

    # --- other messages -------------------------------------------------------------------------

    def describe(self, order: messages.Order) -> messages.Description:
        """Describe what the label holder must check before this party may train."""
        if self.seal and isinstance(order, messages.ResumeOrder):
            self.seal.resume(order)
        return messages.Description(
            party=self.learner.index,
            parties=self.learner.parties,
            train_rows=self.inputs.rows,
            test_rows=self.inputs.test_rows,
            columns=self.inputs.columns,
            embedding_size=self.learner.size,
            alignment=self.inputs.block.alignment,
            monotone=bool(signs_in(self.inputs.block.preparation)),
            exchange=self.exchange or self.origin.exchange,
            checkpoint=self.origin.checkpoint,
        )

    def evaluate(self, order: messages.EvaluateOrder) -> messages.Upload:
        """Learn from the feedback, if any; upload uncompressed embeddings of test rows."""
        self.begin_evaluation(order)
        self.learn(order.arrays)
        return self.upload_test_rows(peak_memory_mb())

    def begin_evaluation(self, order: messages.EvaluateOrder) -> None:
        """Count an order to evaluate, and its rows."""
        self._count(order)
        if self.limits:
            self.limits.count(self.inputs.block.test_rows)

    def count_uploads(self, places: NDArray[np.int32], times: int = 1) -> None:
        """Count uploads of rows to predict, or raise `ConfigError` if the rule allows no more."""
        if self.limits:
            self.limits.count(self.inputs.block.test_rows, places, times)

    def upload_test_rows(self, memory_mb: float) -> messages.Upload:
        """Upload uncompressed embeddings of test rows, and this process's peak memory."""
        arrays = {"embedding": self.learner.embeddings(self.inputs.block.test).cpu().numpy()}
        self.learner.check()
        return replace(
            self._answer(arrays),
            surrogates=digest(self.links.surrogates.values()),
            peak_memory_mb=memory_mb,
        )

    def embed(self, order: messages.EmbedOrder) -> messages.Upload:
        """Upload fresh embeddings of rows that the label holder lacks or has too old."""
        self._count(order)
        if self.seal:
            self.seal.refuse_alone()
        ids = order.arrays.get("ids")
        ids = self.inputs.ids if ids is None else ids
        if not self.inputs.check_ids(ids):
            raise VflError("was asked for rows that it does not have.")
        if len(np.unique(ids)) < len(ids):
            raise VflError("was asked twice for a row in one message, which would reuse its noise.")
        block, places = self.inputs.block, self.inputs.places_of(ids)
        if self.limits:
            self.limits.count(block.train_rows, places)
        if order.arrays.keys() - {"ids"}:
            self.learn(order.arrays)
        blocks = {"embedding": self.learner.embeddings(block.train, places)}
        window = Window(ids, np.array([len(ids)], np.int32), distinct=True)
        table = zeros((self.inputs.rows, self.learner.size))
        links = self.estimator.fresh_links(self.links.up, table)
        return self._upload(links, blocks, window)

    def restore(self, order: messages.RestoreOrder, model: Arrays) -> messages.Upload:
        """Load the model of an earlier evaluation. It trains no more."""
        self._count(order)
        self.forget_window()
        load_model(self.learner.model, model)
        return self._answer({})

    def checkpoint(self, order: messages.CheckpointOrder) -> messages.Upload:
        """Learn from the feedback, if any. `state_file` then writes the state."""
        self._count(order)
        self.learn(order.arrays)
        self.learner.check()
        return self._answer({})

    def rejoin(self, order: messages.RejoinOrder) -> messages.Description:
        """Return after a failure, with the label holder's count and copy of the surrogate."""
        if self.seal:
            self.seal.refuse_alone()
        if self.transcript.repeats:
            raise VflError("was asked to rejoin a rerun, which ends at the first failure.")
        if order.exchange <= self.exchange:  # with a seed, it decides noise and directions
            raise VflError(f"was asked to repeat message {order.exchange}, which it has served.")
        self.exchange = self.learner.exchange = order.exchange
        self.forget_window()
        for name, surrogate in self.links.surrogates.items():
            if name == "uplink":
                shape = tuple(surrogate.shape)
                known = messages.checked(
                    order.arrays, "embedding", "float32", shape, messages.LARGEST
                )
                surrogate.copy_(torch.from_numpy(known))
            else:
                surrogate.zero_()
        return self.describe(order)

    # --- between messages -----------------------------------------------------------------------

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the scalars and the large arrays that the next message needs.

        `Learner.state_dict` has the model and its optimizer.
        """
        scalars: dict[str, Any] = {
            "exchange": self.exchange,
            "steps": self.steps,
            "epochs": self.steps / self.sampling.per_epoch,
            "origin": self.origin.counted_since,
            "run": self.origin.run,
            "released": [self.origin.sent, self.origin.fresh],
            "began": self.origin.began,
            "pending-secret": self.pending.secret if self.pending else b"",
            "largest": self.largest_order,
            "pending": [],
        }
        if order := self.pending.order if self.pending else None:
            where = order.exchange, order.epoch, order.first, order.steps, int(order.coordinated)
            scalars["pending"] = [*where]
        if self.seal:
            scalars |= self.seal.scalars
        large = {**self.links.surrogates, **self.learner.arrays}
        return {"scalars": scalars, "large": large, "transcript": self.transcript.state_dict()}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore what `state_dict` returned."""
        scalars, arrays = state["scalars"], state["large"]
        self.transcript = Transcript.of(state["transcript"])
        self.links.load(arrays)
        own = arrays.keys() - self.links.surrogates
        self.learner.arrays = {name: arrays[name] for name in own}
        self.origin.run, self.origin.counted_since = scalars["run"], scalars["origin"]
        self.origin.sent, self.origin.fresh = scalars.get("released", (0, 0))
        self.origin.began = scalars.get("began", "")
        self.exchange = self.learner.exchange = scalars["exchange"]
        self.steps = scalars["steps"]
        self.pending = None
        if scalars["pending"]:
            exchange, epoch, first, steps, coordinated = scalars["pending"]
            about = {"exchange": exchange, "epoch": epoch, "first": first, "steps": steps}
            order = messages.TrainOrder(**about, coordinated=bool(coordinated))
            secret = scalars["pending-secret"]
            self.pending = PendingWindow(order, secret, self._draw(order, secret))

    @property
    def alike(self) -> bytes:
        """Return a hash of settings that parties with shared session keys must agree on."""
        learner = self.learner
        run = [self.config.values(), learner.parties, learner.outputs, learner.size]
        return alike(json.dumps(run), self.same_rows)

    @property
    def same_rows(self) -> str:
        """Return what parties with masked sums must agree on about their rows.

        People matched by rules have no common ids to compare.
        """
        block = self.inputs.block
        if not self.config.data.match:
            return block.ids_digest
        return f"{block.alignment}|{len(block.train)}|{len(block.test)}"

    @cached_property
    def largest_order(self) -> int:
        """Return the most bytes of an order's arrays: an epoch's feedback or surrogates."""
        steps = self.sampling.per_epoch
        rows = self.sampling.most_rows(steps)
        keys = self.estimator.aggregation.order_bytes(self.learner.parties)
        return messages.SMALL + keys + self.estimator.answer_bytes(self.learner, rows, steps)
