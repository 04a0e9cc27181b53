"""The label holder: labels, top model, and the table of the parties' embeddings.

Read from top to bottom: the label holder receives uploads, answers a quorum of them, steps its top
model, and evaluates. The strategy sends messages and waits for answers. The estimator
(`protocol.estimators`) defines the content of uploads and answers. The aggregation
(`protocol.aggregation`) defines how to combine embeddings.
"""

import math
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.arrays import peak
from vfl_flower.config.errors import DivergedError, VflError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import Labels
from vfl_flower.data.source import signs_in
from vfl_flower.data.split import background_rows
from vfl_flower.label_holder.held_out import Evaluated, HeldOut, of_group
from vfl_flower.label_holder.table import HolderLinks, Table, WindowTable, own_features
from vfl_flower.models import losses, rebuilt
from vfl_flower.models.bottoms import learn_bins
from vfl_flower.models.losses import loss_of
from vfl_flower.models.optimizers import build_optimizer
from vfl_flower.models.tops import grow_top, load_top
from vfl_flower.models.training import (
    arrays_of,
    choose_device,
    flat,
    load_optimizer,
    model_tensors,
    optimizer_tensors,
    trained,
)
from vfl_flower.protocol import estimators, server_update, subsets
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.batches import Window, among, take
from vfl_flower.protocol.directions.window import Directions
from vfl_flower.protocol.ends import Arrival
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.privacy.noise import ScalarNoise
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.server_update.base import TopBatches
from vfl_flower.protocol.subsets import Copies
from vfl_flower.protocol.systems import sized
from vfl_flower.transport.messages import LARGEST, Arrays, TrainOrder, Upload


class LabelHolder:
    """The label holder's data and models.

    ``window_rows`` is the largest window's if all parties upload each answer's rows anew, else 0.
    """

    def __init__(
        self,
        config: RunConfig,
        labels: Labels,
        sizes: Mapping[int, int],
        noise: ScalarNoise | None = None,
        per_epoch: float = 1,
        window_rows: int = 0,
        monotone: Collection[int] = (),
    ) -> None:
        self.config = config = sized(config, len(labels.train))
        self.sampling = sampling_of(config, len(labels.train))
        self.device, self.parties = choose_device(config), len(sizes)
        self.labels = torch.from_numpy(labels.train).to(self.device)  # training rows only
        mechanism = mechanism_of(config)
        kept = mechanism.kept(len(labels.classes))
        self.loss = loss_of(config, labels.train, len(labels.classes), kept, self.device)
        alone = noise is not None
        losses.try_out(self.loss, config.models.loss, labels.outputs, self.labels[:8], alone)
        self.noise, self._tells_losses = noise, not mechanism.hides_figures
        self._noise_of_top = noise if noise and noise.of_top else None
        # Outputs for a row that no party has. Under noise on scalars they would leak the labels.
        self.prior = None if noise else labels.prior(kept)
        # Tables of embeddings, and the links that carry them.
        self.aggregation, self.estimator = aggregation_of(config), estimators.choose(config)(config)
        self.columns = self.aggregation.columns(sizes)
        own, own_held_out = own_features(config, labels)
        self._compared = labels.compared
        masks, held_masks = self.aggregation.row_masks(labels, list(sizes)) or (None, None)
        self._background = own_held_out[background_rows(len(own_held_out))]
        self._in_table = config.uplink.surrogates  # decoding an upload writes the table
        max_delay = config.schedule.max_delay
        keeps = self._in_table or max_delay or self.aggregation.waits
        if window_rows and masks is None and not keeps:
            self.table: Table = WindowTable(self.columns, own, self.device, window_rows)
        else:
            self.table = Table(self.columns, own, self.device, max_delay, masks)
        self.held_out = HeldOut(config, labels, self.columns, own_held_out, held_masks, self.device)
        self.links = HolderLinks(self, self.estimator, self.table)
        self.uplinks, self.downlinks = self.links.up, self.links.down
        blocks = [at for at, party in enumerate(sizes) if party in monotone]
        self._monotone = blocks, signs_in(labels.preparation)
        about = list(sizes.values()), labels.outputs, own_held_out.shape[1], alone, self._monotone
        self._build_top = lambda: self.aggregation.build_top(*about).to(self.device)
        self._make_top(own, per_epoch)
        self.threshold: float | None = None  # of two classes, once the model is trained
        self.steps = 0  # label-holder steps so far: VAFL's counter k
        self.losses: list[Tensor] = []  # of the steps since the last evaluation, if told
        self.frozen: Collection[int] = ()  # parties whose models do not train
        self.first_uploads: dict[int, Arrays] = {}

    def _make_top(self, own: Any, per_epoch: float) -> None:
        """Make the top model; raise `ConfigError` if a user's cannot be saved or rebuilt."""
        self.top = self._build_top()
        if self.top.by_step:
            rows = self.held_out.table.rows[: rebuilt.ROWS].clone()
            h = torch.randn(rows.shape, generator=torch.Generator().manual_seed(0))
            rows[:, : self.top.received] = h[:, : self.top.received].to(self.device)
            said = f"top-model = {self.config.models.top!r}"
            rebuilt.try_out(said, self._build_top(), self._build_top, rows)
        learn_bins(self.top, own)
        self.server_update = server_update.choose(self.config)(self.config)
        self.subsets = self.config.subsets  # which subsets of the parties train the top model
        self.secret = secrets.token_bytes(16)  # seeds zeroth-order directions of the top model
        if self.config.privacy.noise_seed >= 0:
            self.secret = f"{self.config.privacy.noise_seed} top model".encode()
        self.drawn = 0  # number of draws of directions
        rate, learns = self.config.training.server_lr, bool(trained(self.top))
        self.optimizer = build_optimizer(self.config, self.top, rate, per_epoch) if learns else None

    # --- uploads --------------------------------------------------------------------------------

    def receive(self, party: int, order: TrainOrder, upload: Upload) -> Arrival:
        """Check the upload that answers an order, and write it into the table."""
        present = self.table.present[party]
        batches, window = self.sampling.uploaded(party, order, upload.arrays, present)
        try:
            reading = self.aggregation.read(self, party, window, upload.arrays)
        except VflError as error:
            raise VflError(f"sent an upload that cannot be used: {error}") from None
        sent = self.uplinks[party].select(upload.arrays) if self.estimator.broadcasts else {}
        if not self.aggregation.waits:
            about = self.uplinks[party].peak, self.steps, self._in_table
            self.table.write(party, window, reading.fresh, *about)
        return Arrival(party, window, order.coordinated, reading, batches, sent)

    def refresh(self, party: int, ids: NDArray[np.int32] | None, upload: Upload) -> None:
        """Write a party's fresh embeddings of these rows into the table; None for all its rows."""
        ids = self.table.ids_of(party) if ids is None else ids
        window = Window(ids, np.array([len(ids)], np.int32), distinct=True)
        try:
            links = self.estimator.fresh_links(self.uplinks[party], self.table.of(party))
            rows = links.decode(upload.arrays, window)["embedding"]
        except VflError as error:
            raise VflError(f"sent an upload that cannot be used: {error}") from None
        self.table.write(party, window, rows, links.peak, self.steps, self._in_table)
        if self.estimator.broadcasts:
            self.first_uploads[party] = links.select(upload.arrays)

    # --- answers --------------------------------------------------------------------------------

    def answer(self, arrivals: Sequence[Arrival]) -> dict[int, Arrays]:
        """Answer the windows of one quorum, and step the top model.

        Step j takes the j-th mini-batch of every arrival. Coordinated arrivals share one batch
        (split learning). Else the parties' own batches follow each other (VAFL Alg. 2; with one
        arrival, Alg. 1).

        Raise `PoisonError`, or `DivergedError` without a culprit. If a run can continue without a
        party, an error leaves the top model unchanged.
        """
        if self.aggregation.waits:
            arrivals = self.aggregation.complete(self, arrivals)
        coordinated = arrivals[0].coordinated
        batches = [each.batches for each in arrivals[: 1 if coordinated else None]]
        joint = self.sampling.join(batches)
        if coordinated and any(each.window is not each.batches for each in arrivals):
            places = [among(each.window, each.batches) for each in arrivals]
            joint = replace(joint, places=places)
        before: dict[str, dict[str, Tensor]] = {}
        if self.config.running.on_party_failure == "continue":
            groups = _groups(self.top, self.optimizer).items()
            before = {group: {k: v.clone() for k, v in of.items()} for group, of in groups}
        try:
            answers = self.estimator.answer(self, arrivals, joint)
            return self.estimator.encode(self, arrivals, answers)
        except DivergedError:
            if before:
                _load(self, {group: arrays_of(of) for group, of in before.items()})
            if not self.aggregation.waits:  # a sum does not show which party sent the largest
                self.table.blame({m.party: m.reading.embeddings for m in arrivals})
            raise

    def silent(self, arrivals: Sequence[Arrival]) -> dict[int, Arrays]:
        """Return answers without content, from which no party learns."""
        answers = {arrival.party: self.estimator.silence(arrival) for arrival in arrivals}
        return self.estimator.encode(self, arrivals, answers)

    # --- interface for estimators ---------------------------------------------------------------

    def gather(self, window: Window) -> tuple[Tensor, Tensor]:
        """Return the window's rows of the table, and its labels."""
        return self.table.take(window), take(self.labels, window)

    def step(
        self, h: Tensor, labels: Tensor, lengths: list[int], divisors: list[int], gradients: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Step the top model once a mini-batch; return gradient rows, and losses [S]."""
        batches = TopBatches(
            *(self.top, self.optimizer, h, labels, lengths, divisors),
            *(self.loss, self._noise_of_top, self.key, self.steps),
            self.copies(h, lengths, self.steps),
            self.directions,
        )
        rows, losses = self.server_update.step(batches, gradients)
        if rows is not None and not peak(rows) <= LARGEST:  # NaN is not
            raise DivergedError
        return rows, losses

    @property
    def key(self) -> bytes:
        """Return the key of all randomness in the top model's next passes."""
        return f"{self.config.training.seed}|top model|{self.steps}".encode()

    def copies(self, h: Tensor, lengths: Sequence[int], step: int) -> Copies | None:
        """Return rows with subsets of their parties, drawn by the step, if training has any."""
        if self.subsets == "off":
            return None
        least = int(self.top.own is None)
        key = [self.config.training.seed, 8, step]
        return subsets.copies(self.subsets, h, lengths, self.parties, least, key)

    def directions(self) -> Directions:
        """Draw new directions of the top model."""
        self.drawn += 1
        key = self.secret + f"|{self.drawn}".encode()
        return Directions(self.config.estimator, key, self.top)

    def count(self, losses: Tensor) -> None:
        """Count steps of the top model, whose losses must be finite.

        If noise hides labels, the model must be: no label may decide whether the run continues.
        """
        if not math.isfinite(peak(flat(self.top) if self.noise else losses)):
            raise DivergedError
        self.steps += len(losses)
        self.losses += [losses] * self._tells_losses

    # --- evaluation -----------------------------------------------------------------------------

    @torch.no_grad()
    def evaluate(self) -> Evaluated:
        """Return figures of the model on the latest embeddings of every party."""
        train_loss = torch.cat(self.losses).mean().item() if self.losses else None
        self.losses.clear()
        self.top.eval()
        rows = self.held_out.validation_rows
        copies = self.copies(rows, [len(rows)], 0) if len(rows) else None
        validation, test = self.held_out.metrics(self.top, self.loss, copies)
        self.top.train()
        self._check()
        return Evaluated(train_loss, validation, test)

    def calibrate(self) -> None:
        """Fit the configured calibration to the model as it is."""
        method = self.config.training.calibrate
        if method != "none":
            self.held_out.calibrate(self.top, method)

    def _check(self) -> None:
        """Raise `VflError` if your own top model would predict otherwise than here."""
        if self.top.by_step:
            said, rows = f"top-model = {self.config.models.top!r}", self.held_out.table.rows
            rebuilt.check(said, self.top, self._build_top, rows[: rebuilt.ROWS])

    # --- checkpoints ----------------------------------------------------------------------------

    def state_dict(self) -> tuple[dict[str, Any], Arrays]:
        """Return the state for a checkpoint: scalars, and arrays. It has no secrets."""
        self._check()
        scalars = {
            "steps": self.steps,
            "drawn": self.drawn,
            "noises": self.noise.drawn if self.noise else 0,
            "sizes": [each.stop - each.start for each in self.columns.values()],
            "monotone": self._monotone,
            "prior": self.prior,
            "calibration": self.held_out.calibration,
            "threshold": self.threshold,
            "frozen": sorted(self.frozen),
        }
        losses = torch.cat([torch.zeros(0), *(each.cpu() for each in self.losses)])
        groups = {
            "table": self.table.state_dict(),
            "test_table": self.held_out.table.state_dict(),
            **{name: arrays_of(of) for name, of in _groups(self.top, self.optimizer).items()},
            "link": self.links.state_dict(),
            "best": self.held_out.best,
            "compared": {"rows": self.held_out.table.own_part[: self._compared].cpu().numpy()},
            "background": {"own": self._background} if self._background.shape[1] else {},
        }
        arrays = {
            f"{group}.{name}": each for group, of in groups.items() for name, each in of.items()
        }
        return scalars, {"losses": losses.numpy(), **arrays}

    def load_state_dict(self, scalars: dict[str, Any], arrays: Arrays) -> None:
        """Restore what `state_dict` returned."""
        self.steps, self.drawn = scalars["steps"], scalars["drawn"]
        self.threshold = scalars.get("threshold")
        self.frozen = scalars["frozen"]
        if self.noise:
            self.noise.drawn = scalars["noises"]
        self.losses = [torch.from_numpy(arrays["losses"]).to(self.device)] * self._tells_losses
        self.table.load_state_dict(of_group("table", arrays))
        self.held_out.table.load_state_dict(of_group("test_table", arrays))
        _load(self, {group: of_group(group, arrays) for group in ("top", "optimizer")})
        self.links.load_state_dict(of_group("link", arrays))
        self.held_out.best = of_group("best", arrays)

    def warm_start(self, config: RunConfig, scalars: dict[str, Any], arrays: Arrays) -> None:
        """Start with an earlier run's top model, from its configuration and `state_dict`."""
        sizes: list[int] = scalars["sizes"]
        then = aggregation_of(config).tops[0]
        grow_top(self.config, self.top, of_group("top", arrays), sizes, then)
        if self.config.training.freeze:
            self.frozen = range(len(sizes))


def _groups(
    top: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> dict[str, dict[str, Tensor]]:
    """Return the live tensors of a top model and its optimizer."""
    return {
        "top": model_tensors(top),
        "optimizer": optimizer_tensors(optimizer) if optimizer else {},
    }


def _load(holder: LabelHolder, groups: Mapping[str, Arrays]) -> None:
    """Restore the arrays of the tensors that `_groups` returned."""
    load_top(holder.config, holder.top, groups["top"])
    if holder.optimizer:
        load_optimizer(holder.optimizer, groups["optimizer"])
