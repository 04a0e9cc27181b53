"""The embedding table: the latest embedding of every (row, party), stale or not.

[N, E_1 + ... + E_M], side by side, and zero until the first upload. With error feedback it is the
label holder's copy of the parties' surrogates. The aggregation can lay the columns out otherwise.
To their right stand the label holder's own features, [N, F], if it has any. They are as a party
whose embedding is never sent and always fresh. Where parties may lack rows, row masks come last,
[N, M]: 1 for each party that has the row, and 0 for one that lacks it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import ConfigError, PoisonError, VflError
from vfl_flower.config.plugins import BOTTOMS
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import Labels
from vfl_flower.models.bottoms import has_gradient
from vfl_flower.protocol import estimators, server_update
from vfl_flower.protocol.batches import Window, put
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.transport.messages import Arrays

Ids = NDArray[np.int32]

USUAL = 1e3
"""Models that learn hardly reach this. A larger embedding may ruin the top model."""
_GROWTH = 10
"""How many times larger than all before an upload may be, if it is beyond `USUAL`."""


class Table:
    """Embeddings by row and party, and the steps at which they came.

    Parameters
    ----------
    columns : of each party's embeddings (`Aggregation.columns`).
    own : features of the label holder's own, [N, F].
    max_delay : bound D on the age of an embedding that is used, in label-holder steps; 0: none.
    present : which party has which row, [N, M], where any may lack some.
    """

    def __init__(
        self,
        columns: Mapping[int, slice],
        own: NDArray[Any],
        device: torch.device,
        max_delay: int = 0,
        present: NDArray[np.bool_] | None = None,
    ) -> None:
        self.columns = dict(columns)
        self.received = max((each.stop for each in columns.values()), default=0)  # of parties
        self.present = dict.fromkeys(columns)  # masks [N]; none of a party that has all rows
        if present is not None:
            self.present = dict(zip(columns, present.T, strict=True))
            own = np.concatenate([own, present.astype(np.float32)], axis=1)
        self.rows = torch.zeros(len(own), self.received + own.shape[1], device=device)
        self.rows[:, self.received :] = torch.from_numpy(own)
        self._of = {party: self.rows[:, mine] for party, mine in self.columns.items()}
        self.peaks: dict[int, float] = {}  # by party, the largest of all embeddings that it sent
        self.max_delay = max_delay
        # The step at which each row's entry was written, -1 for never.
        self.written = (
            {party: np.full(len(own), -1, np.int64) for party in columns} if max_delay else {}
        )

    def of(self, party: int) -> Tensor:
        """Return a party's columns, [N, E]."""
        return self._of[party]

    def write(
        self,
        party: int,
        window: Window,
        rows: Tensor,
        sent: Sequence[Tensor] = (),
        step: int = 0,
        held: bool = False,
    ) -> None:
        """Write a party's embeddings of a window, [R, E], if they are usual.

        Parameters
        ----------
        step : of the label holder, at which they came.
        held : whether they are here already, as the party's surrogates.

        Raises
        ------
        VflError
            If embeddings exceed all that the party has sent before, by far. One upload could else
            end the learning of all others, and nobody would know which party it came from.
        """
        peak, known = _peak(sent), self.peaks.get(party)
        if known is not None and peak > max(USUAL, _GROWTH * known):
            self.forget(party)
            raise VflError(
                f"sent embeddings of up to {peak:,.0f}, when its largest were {known:,.4g}: lower "
                "the learning rates, or see to that party."
            )
        self.peaks[party] = max(known or 0.0, peak)
        if not held:
            put(self._of[party], window, rows.to(self.rows.device))
        if self.max_delay:
            self.written[party][window.ids] = step

    def blame(self, sent: Mapping[int, Sequence[Tensor]]) -> None:
        """Raise `PoisonError` for the largest embeddings, if they are unusual.

        The table then holds no embedding of that party.

        Parameters
        ----------
        sent : party -> embeddings of its last upload.
        """
        peaks = {m: _peak([self.of(m), *sent.get(m, ())]) for m in self.columns}
        party, peak = max(peaks.items(), key=lambda each: each[1], default=(0, 0.0))
        if peak > USUAL:
            self.forget(party)
            raise PoisonError(
                party,
                f"sent embeddings of up to {peak:,.0f}, by which the loss is no longer finite: "
                "lower the learning rates, or see to that party.",
            ) from None

    def forget(self, party: int) -> None:
        """Hold nothing of a party, as before its first upload."""
        self.of(party).zero_()
        if self.max_delay:
            self.written[party][:] = -1

    def too_old(
        self, uploads: Sequence[tuple[int, Window]], parties: Sequence[int], step: int
    ) -> dict[int, Ids]:
        """Return rows with embeddings too old to answer uploads: party -> ids.

        Parameters
        ----------
        uploads : party and window of each upload that is to be answered.
        parties : whose embeddings can be asked for.
        step : of the label holder, now.
        """
        late: dict[int, list[Ids]] = {}
        for uploader, window in uploads if self.max_delay else ():
            used_at = step + np.repeat(np.arange(len(window.lengths)), window.lengths)
            for party in set(parties) - {uploader}:
                written = self.written[party][window.ids]
                old = (written < 0) | (used_at - written > self.max_delay)
                if (held := self.present[party]) is not None:
                    old &= held[window.ids]
                if old.any():
                    late.setdefault(party, []).append(window.ids[old])
        return {party: np.unique(np.concatenate(ids)) for party, ids in late.items()}

    def state_dict(self) -> Arrays:
        """Return the parties' embeddings, and the steps at which they came."""
        written = {f"written.{party}": steps for party, steps in self.written.items()}
        return {"rows": self.rows[:, : self.received].cpu().numpy(), **written}

    def load_state_dict(self, arrays: Arrays) -> None:
        """Take over what `state_dict` returned."""
        self.rows[:, : self.received] = torch.from_numpy(arrays["rows"]).to(self.rows.device)
        for party, steps in self.written.items():
            steps[:] = arrays[f"written.{party}"]


def _peak(blocks: Sequence[Tensor]) -> float:
    """Return the largest absolute number of all blocks."""
    ends = (each for h in blocks if h.numel() for each in h.aminmax())
    return max((abs(float(each)) for each in ends), default=0.0)


def own_features(config: RunConfig, labels: Labels) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the label holder's own columns, of training and held-out rows.

    Raises
    ------
    ConfigError
        If it has some, and the configuration does not go with them.
    """
    if labels.features is None:
        nothing = (np.zeros((len(part), 0), np.float32) for part in (labels.train, labels.test))
        return next(nothing), next(nothing)
    if estimators.choose(config).broadcasts:
        raise ConfigError(
            "labels = 'shared' sends the top model to the parties, and with it what the label "
            "holder's own columns have taught: set columns = 'none', or leave labels out."
        )
    by_gradient = not server_update.choose(config).by_differences
    if (
        by_gradient
        and config.models.bottom in BOTTOMS.known
        and not has_gradient(config.models.bottom)
    ):
        raise ConfigError(
            f"bottom-model = {config.models.bottom!r} has no gradient, which server-update = "
            "'first-order' needs of the label holder's own columns: set server-update = "
            "'zeroth-order', or columns = 'none'."
        )
    mechanism_of(config).check_own_columns()
    return labels.features
