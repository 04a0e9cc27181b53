"""The embedding table: the latest embedding of every (row, party), stale or not.

The embeddings stand side by side, [N, E_1 + ... + E_M], and are zero until the first upload. With
error feedback the table holds the label holder's copy of the parties' surrogates. The aggregation
can arrange the columns otherwise.

To their right stand the label holder's own features, [N, F], if it has any. They act like a party
whose embedding is never sent and always fresh. If parties may lack rows, the row mask comes last,
[N, M]: 1 where the party has the row, and 0 where it lacks the row.

If every answer uses fresh embeddings alone, `WindowTable` holds the embeddings of one window.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.arrays import peak
from vfl_flower.config.errors import ConfigError, PoisonError, VflError
from vfl_flower.config.plugins import BOTTOMS
from vfl_flower.config.provenance import free_memory
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import Labels
from vfl_flower.data.source import Rows
from vfl_flower.models.bottoms import has_gradient
from vfl_flower.protocol import estimators, server_update
from vfl_flower.protocol.batches import Window, put, take
from vfl_flower.protocol.codecs.channel import digest
from vfl_flower.protocol.ends import HolderEnd
from vfl_flower.protocol.estimators.base import Estimator
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.transport.messages import Arrays

Ids = NDArray[np.int32]

USUAL = 1e3
"""Bound of embeddings that models learn, with few exceptions. More may ruin the top model."""
_GROWTH = 10
"""Largest growth of an upload beyond all earlier ones, if it exceeds `USUAL`."""


class Table:
    """Embeddings by row and party, and the steps of their arrival.

    ``own`` has the label holder's features [N, F], and ``present`` the row mask [N, M]. Embeddings
    in use are at most ``max_delay`` label-holder steps old (D), if it is not 0.
    """

    def __init__(
        self,
        columns: Mapping[int, slice],
        own: NDArray[Any] | Rows,
        device: torch.device,
        max_delay: int = 0,
        present: NDArray[np.bool_] | None = None,
    ) -> None:
        self.columns = dict(columns)
        self.received = max((each.stop for each in columns.values()), default=0)  # width of uploads
        own = np.asarray(own[:])
        self.present = dict.fromkeys(columns)  # masks [N]; None for a party that has all rows
        if present is not None:
            self.present = dict(zip(columns, present.T, strict=True))
            own = np.concatenate([own, present.astype(np.float32)], axis=1)
        if device.type == "cpu" and columns:
            _check_memory(columns, 4 * len(own) * (self.received + own.shape[1]))
        self.rows = torch.zeros(len(own), self.received + own.shape[1], device=device)
        self.rows[:, self.received :] = torch.from_numpy(own)
        self._of = {party: self.rows[:, mine] for party, mine in self.columns.items()}
        self.peaks: dict[int, float] = {}  # party -> largest absolute embedding that it ever sent
        self.max_delay = max_delay
        # The step that wrote each row's entry, -1 for never.
        self.written = (
            {party: np.full(len(own), -1, np.int64) for party in columns} if max_delay else {}
        )

    def of(self, party: int) -> Tensor:
        """Return a party's columns, [N, E]."""
        return self._of[party]

    @property
    def own_part(self) -> Tensor:
        """Return the label holder's own features, and the row mask, [N, F + M] or [N, F]."""
        return self.rows[:, self.received :]

    def ids_of(self, party: int) -> Ids:
        """Return the ids of all rows that a party has."""
        held = self.present[party]
        return np.flatnonzero(np.ones(len(self.rows)) if held is None else held).astype(np.int32)

    def write(
        self,
        party: int,
        window: Window,
        rows: Tensor,
        largest: float = 0.0,
        step: int = 0,
        held: bool = False,
    ) -> None:
        """Write a party's embeddings of a window, [R, E], at a step, unless the table is ``held``.

        Refuse uploads whose ``largest`` number far exceeds all earlier ones: they could end
        training.
        """
        known = self.peaks.get(party)
        if known is not None and largest > max(USUAL, _GROWTH * known):
            self.forget(party)
            raise VflError(
                f"sent embeddings of up to {largest:,.0f}, when its largest were {known:,.4g}. "
                "Lower the learning rates, or check that party."
            )
        self.peaks[party] = max(known or 0.0, largest)
        if not held:
            self._put(party, window, rows.to(self.rows.device, non_blocking=True))
        if self.max_delay:
            self.written[party][window.ids] = step

    def _put(self, party: int, window: Window, rows: Tensor) -> None:
        put(self._of[party], window, rows)

    def take(self, window: Window) -> Tensor:
        """Return the window's rows as the top model reads them."""
        return take(self.rows, window)

    def blame(self, sent: Mapping[int, Sequence[Tensor]]) -> None:
        """Raise `PoisonError` for the largest last uploads, if they exceed `USUAL`; clear them."""
        peaks = {m: max(map(peak, [self.of(m), *sent.get(m, ())])) for m in self.columns}
        party, largest = max(peaks.items(), key=lambda each: each[1], default=(0, 0.0))
        if largest > USUAL:
            self.forget(party)
            raise PoisonError(
                party,
                f"sent embeddings of up to {largest:,.0f}, which made the loss non-finite. "
                "Lower the learning rates, or check that party.",
            ) from None

    def forget(self, party: int) -> None:
        """Clear a party's embeddings, as before its first upload."""
        self.of(party).zero_()
        if self.max_delay:
            self.written[party][:] = -1

    def too_old(
        self, uploads: Sequence[tuple[int, Window]], parties: Sequence[int], step: int
    ) -> dict[int, Ids]:
        """Return party -> ids of rows too old, at this step, to answer uploads."""
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
        """Return the parties' embeddings, and the steps of their arrival."""
        written = {f"written.{party}": steps for party, steps in self.written.items()}
        return {"rows": self.rows[:, : self.received].cpu().numpy(), **written}

    def load_state_dict(self, arrays: Arrays) -> None:
        """Restore what `state_dict` returned."""
        self.rows[:, : self.received] = torch.from_numpy(arrays["rows"]).to(self.rows.device)
        for party, steps in self.written.items():
            steps[:] = arrays[f"written.{party}"]


class WindowTable(Table):
    """The embeddings of one window, where all parties upload the same rows before each answer.

    No answer then reads an older embedding. So the memory and the time of a step do not grow with
    the N rows, and checkpoints hold no embeddings. The first R of ``rows`` are the latest window's.
    """

    def __init__(
        self,
        columns: Mapping[int, slice],
        own: NDArray[Any] | Rows,
        device: torch.device,
        most: int,
    ) -> None:
        self._own, self._width = own, np.asarray(own[:0]).shape[1]
        self._ids: Ids = np.zeros(0, np.int32)  # rows of the latest window
        self._parties: set[int] = set()  # those that have uploaded it
        super().__init__(columns, np.zeros((most, self._width), np.float32), device)

    def take(self, window: Window) -> Tensor:
        """Return the rows of the latest window, if every party has uploaded them."""
        there = len(self._parties) == len(self.columns)
        if not there or not np.array_equal(self._ids, window.ids):
            raise VflError(
                "A synchronous run answers a window that all parties have uploaded, and this one "
                "has other rows. Gather the window of the arrivals, whole."
            )
        rows = self.rows[: len(window.ids)]
        if self._width:
            own = torch.from_numpy(np.asarray(self._own[window.ids]))
            rows[:, self.received :] = own.to(rows.device)
        return rows

    def _put(self, party: int, window: Window, rows: Tensor) -> None:
        mine, count = self._of[party], rows.shape[0]
        if count > mine.shape[0]:
            raise VflError(
                f"has a window of {count} rows, and `most_rows` of the sampling promises at "
                f"most {mine.shape[0]}. Correct `most_rows`."
            )
        if self._ids is not window.ids and not np.array_equal(self._ids, window.ids):
            self._parties.clear()
        self._ids = window.ids
        self._parties.add(party)
        (mine if count == mine.shape[0] else mine[:count]).copy_(rows)

    def ids_of(self, party: int) -> Ids:
        """Return the ids of all rows, which every party has."""
        return np.arange(len(self._own), dtype=np.int32)

    def forget(self, party: int) -> None:
        """Clear a party's embeddings, as before its upload of this window."""
        super().forget(party)
        self._parties.discard(party)

    def state_dict(self) -> Arrays:
        """Return the N rows without embeddings: the next answer needs no earlier one."""
        return {"rows": np.zeros((len(self._own), 0), np.float32)}

    def load_state_dict(self, arrays: Arrays) -> None:
        """Do nothing: the table has no state."""


class HolderLinks:
    """Uplinks and downlinks by party, with the surrogates that the table holds for uploads."""

    def __init__(self, end: HolderEnd, estimator: Estimator, table: Table) -> None:
        blocks = {party: table.of(party) for party in table.columns}
        self.up = {party: estimator.uplinks(block) for party, block in blocks.items()}
        self.down = {
            party: estimator.downlinks(end.sampling.rows, block.shape[1])
            for party, block in blocks.items()
        }
        self._end, self._estimator, self._table = end, estimator, table

    def digest(self, party: int) -> str:
        """Return the digest of all surrogates that a party must hold now."""
        return digest(self._estimator.compared(self._end, party))

    def surrogate(self, party: int) -> Arrays:
        """Return a party's surrogate, if uploads have any, to send when it returns."""
        if not self._end.config.uplink.surrogates:
            return {}
        return {"embedding": self._table.of(party).cpu().contiguous().numpy()}

    def begin_again(self, party: int) -> None:
        """Reset a party's downlink surrogates, after the party came back without them."""
        for _, surrogate in self.down[party].with_surrogates():
            surrogate.zero_()

    def state_dict(self) -> Arrays:
        """Return the surrogates that are not in the embedding table."""
        return {name: each.cpu().numpy() for name, each in self._beside_table()}

    def load_state_dict(self, arrays: Arrays) -> None:
        """Restore what `state_dict` returned."""
        for name, surrogate in self._beside_table():
            surrogate.copy_(torch.from_numpy(arrays[name]))

    def _beside_table(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each surrogate outside the table, with its name in a checkpoint."""
        yield from self._estimator.links_of_all(self._end).with_surrogates()
        for party, links in self.down.items():
            for name, surrogate in links.with_surrogates():
                yield f"{name}.{party}", surrogate


def _check_memory(columns: Mapping[int, slice], needed: int) -> None:
    """Refuse a table of so many bytes that does not fit into memory."""
    if needed > free_memory():
        sizes = {party: each.stop - each.start for party, each in columns.items()}
        largest = max(sizes, key=lambda party: sizes[party])
        raise ConfigError(
            f"The table of embeddings needs {needed / 1e9:.1f} GB of memory, which are not free. "
            f"Party {largest} has the largest, of size {sizes[largest]}: give it a smaller "
            "embedding-size."
        )


def own_features(config: RunConfig, labels: Labels) -> tuple[NDArray[Any] | Rows, NDArray[Any]]:
    """Return the label holder's own columns of training and held-out rows, if permitted."""
    if labels.features is None:
        nothing = (np.zeros((len(part), 0), np.float32) for part in (labels.train, labels.test))
        return next(nothing), next(nothing)
    if estimators.choose(config).broadcasts:
        raise ConfigError(
            "labels = 'shared' sends the top model to the parties, and with it what the label "
            "holder's own columns have taught. Set columns = 'none', or leave labels out."
        )
    by_gradient = not server_update.choose(config).by_differences
    if (
        by_gradient
        and config.models.bottom in BOTTOMS.known
        and not has_gradient(config.models.bottom)
    ):
        raise ConfigError(
            f"bottom-model = {config.models.bottom!r} has no gradient, but server-update = "
            "'first-order' needs one for the label holder's own columns. Set server-update = "
            "'zeroth-order', or columns = 'none'."
        )
    mechanism_of(config).check_own_columns()
    return labels.features
