"""The label holder: labels, top model, and the embedding table.

The table holds the latest embedding that the label holder knows of every (training row, party),
stale or not, side by side: [N, E_1 + ... + E_M]; zero until the first upload. Messages and waiting
are the strategy's; this module is what the label holder computes between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower import first_order
from vfl_flower.batches import Window, draw_window
from vfl_flower.codecs import Identity
from vfl_flower.config import RunConfig
from vfl_flower.data import Labels
from vfl_flower.errors import VflError
from vfl_flower.models import build_optimizer, build_top, choose_device, mean_loss
from vfl_flower.records import Arrays, TrainOrder, Upload, checked


@dataclass(frozen=True)
class Arrival:
    """A party's upload of one window, now in the table."""

    party: int
    window: Window
    coordinated: bool


@dataclass(frozen=True)
class Metrics:
    """How the model does on the test rows; ``auc`` only with two classes."""

    loss: float
    accuracy: float
    auc: float | None


class LabelHolder:
    """What the label holder knows and learns.

    Parameters
    ----------
    sizes : party -> embedding size.
    """

    def __init__(self, config: RunConfig, labels: Labels, sizes: Mapping[int, int]) -> None:
        self.config = config
        self.device = choose_device(config)
        self.train_labels = torch.from_numpy(labels.train).to(self.device)
        self.test_labels = torch.from_numpy(labels.test).to(self.device)
        ends = np.cumsum(list(sizes.values())).tolist()
        self.columns = {
            party: slice(end - size, end)
            for (party, size), end in zip(sizes.items(), ends, strict=True)
        }
        self.table = torch.zeros(len(labels.train), ends[-1], device=self.device)
        self.test_table = torch.zeros(len(labels.test), ends[-1], device=self.device)
        self.top = build_top(config, list(sizes.values()), labels.outputs).to(self.device)
        trainable = any(True for _ in self.top.parameters())
        self.optimizer = build_optimizer(config, self.top, config.server_lr) if trainable else None
        self.codec = Identity()
        self.steps = 0  # label-holder steps so far: VAFL's counter k
        self.losses: list[Tensor] = []  # of steps, since the last `train_loss`
        rows = len(labels.train)
        # By party: the step at which each row's entry was written, -1 for never (delay bound).
        self.written = (
            {party: np.full(rows, -1, np.int64) for party in sizes} if config.max_delay else {}
        )

    # --- training -------------------------------------------------------------------------------

    def receive(self, party: int, order: TrainOrder, upload: Upload) -> Arrival:
        """Check the upload that answers an order, and write it into the table.

        Raises
        ------
        VflError
            If its ids or embeddings are not what the order asked for.
        """
        owner = None if order.coordinated else party
        rows = len(self.train_labels)
        window = draw_window(self.config, rows, owner, order.epoch, order.first, order.steps)
        if not order.coordinated:
            self._check_ids(upload, window.ids)
        self.refresh(party, window.ids, upload)
        return Arrival(party, window, order.coordinated)

    def refresh(self, party: int, ids: NDArray[np.int32], upload: Upload) -> None:
        """Write a party's fresh embeddings of these rows into the table."""
        rows = torch.from_numpy(ids).to(self.device)
        embeddings = self._decoded(party, upload, len(ids))
        self.table[:, self.columns[party]].index_copy_(0, rows.long(), embeddings)
        if self.config.max_delay:
            self.written[party][ids] = self.steps

    def too_old(
        self, arrivals: Sequence[Arrival], parties: Sequence[int]
    ) -> dict[int, NDArray[np.int32]]:
        """Rows of these arrivals whose embeddings of other parties exceed the delay bound D."""
        if not self.config.max_delay or arrivals[0].coordinated:
            return {}
        late: dict[int, list[NDArray[np.int32]]] = {}
        for arrival in arrivals:
            ids, lengths = arrival.window.ids, arrival.window.lengths
            used_at = self.steps + np.repeat(np.arange(len(lengths)), lengths)
            for party in set(parties) - {arrival.party}:
                written = self.written[party][ids]
                old = (written < 0) | (used_at - written > self.config.max_delay)
                if old.any():
                    late.setdefault(party, []).append(ids[old])
        return {party: np.unique(np.concatenate(ids)) for party, ids in late.items()}

    def answer(self, arrivals: Sequence[Arrival]) -> dict[int, Arrays]:
        """Evaluate the windows of one quorum, step the top model, and return each party's feedback.

        Step j takes the j-th mini-batch of every arrival: one shared batch when they are
        coordinated (split learning), else the parties' own, one after the other (VAFL Alg. 2; with
        one arrival, Alg. 1). A party's feedback is the gradient of the mean loss of its own batch.
        """
        windows = [arrivals[0].window] if arrivals[0].coordinated else [a.window for a in arrivals]
        step_of = np.concatenate([np.repeat(np.arange(len(w.lengths)), w.lengths) for w in windows])
        by_step = np.argsort(step_of, kind="stable")  # all rows of step 0 first
        lengths = np.bincount(step_of)
        ids = np.concatenate([window.ids for window in windows])
        rows = torch.from_numpy(ids[by_step]).to(self.device)
        gradients, losses = first_order.answer(
            self.top,
            self.optimizer,
            self.table.index_select(0, rows),
            self.train_labels.index_select(0, rows),
            lengths.tolist(),
        )
        if not torch.isfinite(losses).all():
            raise VflError("The loss is no longer finite: lower the learning rates.")
        self.steps += len(lengths)
        self.losses.append(losses)

        feedback: dict[int, Arrays] = {}
        starts = np.cumsum([0, *(len(window.ids) for window in windows)])
        for number, arrival in enumerate(arrivals):
            mine = gradients[:, self.columns[arrival.party]]
            if len(windows) > 1:  # its own rows, in its own order; a mean over its own batch
                own_lengths = windows[number].lengths
                scale = np.repeat(lengths[: len(own_lengths)] / own_lengths, own_lengths)
                places = np.argsort(by_step)[starts[number] : starts[number + 1]]
                mine = mine[torch.from_numpy(places).to(self.device)]
                mine = mine * torch.from_numpy(scale.astype(np.float32)).to(self.device)[:, None]
            feedback[arrival.party] = self.codec.encode("gradient", mine)
        return feedback

    def train_loss(self) -> float | None:
        """Mean loss of the steps since the last call, if there were any."""
        if not self.losses:
            return None
        mean = torch.cat(self.losses).mean().item()
        self.losses.clear()
        return mean

    # --- evaluation -----------------------------------------------------------------------------

    def receive_test(self, party: int, upload: Upload) -> None:
        """Check a party's embeddings of the test rows, and write them into the test table."""
        rows = len(self.test_labels)
        self.test_table[:, self.columns[party]] = self._decoded(party, upload, rows)

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        """The model on the test rows, by the latest embeddings of every party."""
        outputs = self.top(self.test_table)
        loss = mean_loss(outputs, self.test_labels).item()
        if outputs.shape[1] > 1:
            hits = outputs.argmax(1) == self.test_labels
            return Metrics(loss, hits.float().mean().item(), None)
        hits = (outputs[:, 0] > 0).long() == self.test_labels
        from sklearn.metrics import roc_auc_score  # here, since a party imports this module too

        both = 0 < self.test_labels.sum() < len(self.test_labels)
        auc = roc_auc_score(self.test_labels.cpu(), outputs[:, 0].cpu()) if both else None
        return Metrics(loss, hits.float().mean().item(), auc)

    # --- checks ---------------------------------------------------------------------------------

    def _decoded(self, party: int, upload: Upload, rows: int) -> Tensor:
        columns = self.columns[party]
        shape = (rows, columns.stop - columns.start)
        try:
            return self.codec.decode("embedding", upload.arrays, shape).to(self.device)
        except VflError as error:
            raise VflError(f"sent an upload that cannot be used: {error}") from None

    def _check_ids(self, upload: Upload, expected: NDArray[np.int32]) -> None:
        try:
            ids = checked(upload.arrays, "ids", "int32", expected.shape)
        except VflError as error:
            raise VflError(f"sent an upload that cannot be used: {error}") from None
        if not np.array_equal(ids, expected):
            raise VflError(
                "sent sample ids that are not those of its mini-batches: another party's, or "
                "another run's."
            )
