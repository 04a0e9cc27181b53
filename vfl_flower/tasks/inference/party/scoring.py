"""A party's half of the online service (the other: `vfl_flower.tasks.inference.serving`).

The party loads its model and its rows once (`load`), and then embeds some rows for each request
(`score`). It knows a row by its id. So its file may change while it serves: the party reads the
file again, and says which rows have gone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.alignment.seeking import OpenKeys, OpenSet
from vfl_flower.config.errors import ConfigError, OutOfStepError, VflError
from vfl_flower.config.logs import log
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.at_party import prepared
from vfl_flower.data.withdrawn import place, version
from vfl_flower.party import state_file
from vfl_flower.party.inputs import own_source
from vfl_flower.party.limits import PredictionBudget, refused_rows
from vfl_flower.tasks.inference.party import model as models
from vfl_flower.tasks.inference.party.model import LoadedModel
from vfl_flower.tasks.inference.party.reasons import Reasons
from vfl_flower.transport import messages
from vfl_flower.transport.early_messages import OpenSetOrder, SeekOrder, SetKept, Sought
from vfl_flower.transport.explain_messages import GivenReasons, ReasonsOrder

O = TypeVar("O", bound=messages.Order)  # noqa: E741
P = TypeVar("P", bound=messages.Payload)

_SINGLES = 10_000  # most samples of single rows in memory
_LOOK = 1.0  # seconds between two looks at the party's file

Places = NDArray[np.int64]

_readers = ThreadPoolExecutor(2, "reading")  # of files that have changed


class Served:
    """A loaded model that answers a service, with its rows in the order of the alignment.

    features, at : samples that the party's data have now, and each row's position there, or -1.
    ids, in_source : ids of all rows of own data, and each row's place there, or -1.
    """

    def __init__(self, model: LoadedModel) -> None:
        context = self._context = model.context
        self.model = model
        self.party, self.block = model.party, model.block
        self.features, self.at = self.block.test, model.places.astype(np.int64)
        self.source, self.in_source = model.source, model.in_source
        self.ids = [self.source.ids[row] for row in self.in_source.tolist()] if self.source else []
        self.budget = PredictionBudget(context, Rules.of(context.node_config))
        self.audit = state_file.audit_log(context)
        named = context.node_config.get("file")
        self._file = Path(str(named)).expanduser() if named else None
        self._version, self._looked = self._written(), 0.0
        self._singles: dict[int, NDArray[np.float32]] = {}  # rows outside the alignment, by place
        self.party.learner.model.eval()
        with suppress(VflError, OSError):  # the first request must not wait for torch to begin
            self.party.learner.fresh_embeddings(self.features, model.places[:1])
        self._reasons: Reasons | None = None
        self._opened: OpenSet | OpenKeys | None = None  # to find people outside the alignment
        self._reading: Future[Callable[[], None]] | None = None  # of the file, which has changed

    def close(self) -> None:
        """Give back what was counted ahead, and close the files."""
        self.budget.close()
        self.audit.close()
        if self._opened:
            self._opened.close()

    # --- orders ---------------------------------------------------------------------------------

    def score(self, order: messages.ScoreOrder) -> messages.Scored:
        """Embed some of the rows, and rows outside the alignment that the order proves."""
        asked, singles, ids = self._resolved(order)
        at = self.at[asked]
        there, seal = np.concatenate([at, singles]) >= 0, self.party.seal
        with self._recorded("score", len(ids), ids) as line:
            of_rows = self.block.test_rows, self.model.places[asked]
            refused, why = refused_rows(self.party.limits, self.budget, *of_rows, there, bool(seal))
            line |= {"refused": len(refused)} if why else {}
        arrays: messages.Arrays = {"refused": refused.astype(np.int32)} if why else {}
        if seal and why:
            return messages.Scored(arrays=arrays, why=why)
        if why:
            at[refused[refused < len(at)]] = -1
            singles[refused[refused >= len(at)] - len(at)] = -1
        embed = self.party.learner.fresh_embeddings
        embedding = np.zeros((len(there), self.party.learner.size), np.float32)
        if (at >= 0).any():
            embedding[: len(at)][at >= 0] = embed(self.features, at[at >= 0].astype(np.int32))
        if (singles >= 0).any():
            embedding[len(at) :][singles >= 0] = embed(self._samples(singles[singles >= 0]))
        arrays |= self.model.drift.of_scores(
            self.block, self.source, asked, at, self.in_source, singles
        )
        if not there.all():
            if seal:
                raise VflError("has lost rows of masked sums. Start the service anew.")
            arrays["gone"] = np.flatnonzero(~there).astype(np.int32)
        if seal:
            seal.bind(order)
        return messages.Scored(arrays=self.model.hide(embedding) | arrays, why=why)

    def _resolved(
        self, order: messages.ScoreOrder | ReasonsOrder
    ) -> tuple[Places, Places, list[bytes]]:
        """Return the rows of an order, its proven rows outside the alignment, and all their ids."""
        asked = order.arrays.get("rows", np.zeros(0, np.int32))
        places = order.arrays.get("places", np.zeros(0, np.int32))
        lists = all(each.dtype == np.int32 and each.ndim == 1 for each in (asked, places))
        if not lists or not len(asked) + len(places):
            raise VflError("was asked to score without a list of rows.")
        self._look()
        if len(asked) and (asked.min() < 0 or asked.max() >= len(self.at)):
            raise VflError("was asked to score rows that it does not serve.")
        singles = np.zeros(0, np.int64)
        ids = [self.ids[row] if self.ids else b"i:%d" % row for row in asked.tolist()]
        if len(places):
            opened = self._open_set
            proofs = order.arrays.get("proofs", np.zeros((0, 32), np.uint8))
            singles = opened.rows(places.astype(np.int64), proofs)
            ids += opened.ids(singles)
        return asked, singles, ids

    def give_reasons(self, order: ReasonsOrder) -> GivenReasons:
        """Split the party's contribution to one score; it counts as one more score of the row."""
        asked, singles, ids = self._resolved(order)
        at = np.concatenate([self.at[asked], singles])
        if len(at) != 1 or at[0] < 0:
            raise VflError("was asked for reasons without one row that it has.")
        with self._recorded("reasons", 1, ids):
            self._reasons = self._reasons or Reasons(self.model)
            of_rows = self.block.test_rows, self.model.places[asked]
            refused, why = refused_rows(self.party.limits, self.budget, *of_rows, at >= 0, True)
            if len(refused):
                raise ConfigError(why)
            sample = self.features[at] if len(asked) else self._samples(singles)
            return self._reasons.give(order, sample, self.audit.hashes(ids))

    def open_set(self, order: OpenSetOrder) -> SetKept:
        """Open the set that the order names and proves, or one rule, to find single people."""
        if self.source is None:
            raise VflError("has no ids.")
        if order.anew and self._opened:
            self._opened.close()
        self._finish_reading()  # else the new set would be of the earlier rows
        if order.anew and order.rule:
            self._opened = OpenKeys(self._context, self.source)
        elif order.anew:
            self._opened = OpenSet(self._context, self.source, order)
        opened = self._open_set
        if isinstance(opened, OpenKeys):
            arrays, why = opened.open(self.source, order.rule)
        else:
            arrays, why = ({} if opened.proof is None else {"proof": opened.proof}), ""
        return SetKept(party=self.model.index, parties=self.model.parties, arrays=arrays, why=why)

    def seek(self, order: SeekOrder) -> Sought:
        """Blind the label holder's ids again, for a set that was opened."""
        opened = self._open_set
        self._look()
        points = order.arrays.get("ids", np.zeros(0))
        with self._recorded("seek", len(points)) as line:
            line |= {"rule": order.rule} if order.rule else {}
            arrays, why = opened.again(points, order.known, order.rule)
            line |= {"refused": len(arrays["refused"])} if why else {}
        return Sought(arrays=arrays, why=why)

    @property
    def _open_set(self) -> OpenSet | OpenKeys:
        if self._opened is None:
            raise OutOfStepError("has opened no set of blinded ids.")
        return self._opened

    @contextmanager
    def _recorded(
        self, event: str, number: int, ids: Sequence[bytes] = ()
    ) -> Iterator[dict[str, Any]]:
        """Write an order about some ids to the audit log at the end of the block, also if refused.

        Yield further fields of the line, for the block to set.
        """
        outcome, more = "refused", dict[str, Any]()
        try:
            yield more
            outcome = "answered" if more.get("refused", 0) < number else "refused"
        finally:
            more |= {"ids": self.audit.hashes(ids)} if ids else {}
            run = self.party.origin.counted_since
            try:
                self.audit.write(event, run=run, number=number, outcome=outcome, **more)
            except VflError as error:
                log.warning("%s", error)
                raise VflError("cannot write its audit log: its own log says why.") from None

    # --- rows -----------------------------------------------------------------------------------

    def _samples(self, wanted: Places) -> Any:
        """Return samples of rows outside the alignment; keep samples of a table in memory."""
        kept, preparation = self._singles, self.block.preparation
        assert self.source is not None and preparation is not None
        new = np.array([row for row in wanted.tolist() if row not in kept], np.int64)
        if len(kept) + len(new) > _SINGLES:
            kept.clear()
            new = wanted
        samples = prepared(self.source, new, preparation) if len(new) else None
        if len(new) == len(wanted) and not isinstance(samples, np.ndarray):
            return samples
        if isinstance(samples, np.ndarray):
            kept |= dict(zip(new.tolist(), samples, strict=True))
        return np.stack([kept[row] for row in wanted.tolist()])

    def _written(self) -> int:
        """Return when the party's file or its withdrawals were last written; 0 without a file."""
        listed = version(place(self._context.node_config))
        try:
            return max(self._file.stat().st_mtime_ns, listed) if self._file else listed
        except OSError:
            return 0

    def _look(self) -> None:
        """If the party's file has changed, have another thread read it; use what it has read."""
        if self._reading and self._reading.done():
            self._finish_reading()
        now = time.monotonic()
        if self._reading or now < self._looked + _LOOK:
            return
        self._looked, version = now, self._written()
        if version not in (0, self._version):
            self._version = version
            self._reading = _readers.submit(self._read_again)

    def _finish_reading(self) -> None:
        if self._reading:
            use, self._reading = self._reading.result, None
            use()()

    def _read_again(self) -> Callable[[], None]:
        """Read the party's file; return what uses it from then on."""
        opened: OpenSet | OpenKeys | None = self._opened
        new_set: Any = None
        try:
            own = own_source(self._context)
            row_of = {one: row for row, one in enumerate(own.ids)}
        except (VflError, OSError) as error:  # it may be half written
            log.warning("The party serves the earlier rows, since its file has changed: %s", error)
            return lambda: None
        found = np.array([row_of.get(one, -1) for one in self.ids], np.int64)
        there = found >= 0
        try:
            assert self.block.preparation is not None
            features = prepared(own, found[there], self.block.preparation) if there.any() else None
            new_set = opened.found(own) if opened else None
            usable = True
        except (VflError, OSError) as error:
            log.warning(
                "The party serves the earlier columns, since its file has changed: %s", error
            )
            usable = False

        def use() -> None:
            if usable:
                if features is not None:
                    self.features = features
                    self.at = np.where(there, np.cumsum(there) - 1, -1)
                if opened:
                    opened.use(own, new_set)
                self.source, self._singles, self.in_source = own, {}, found
                self.model.drift.forget_waiting()
            # A removed row is not scored, even if the rest of the file cannot be used.
            self.at = np.where(there, self.at, -1)
            log.info("The party has read its file again: %d rows have gone.", (~there).sum())

        return use


def load(context: Context, order: messages.ServeOrder) -> messages.Serving:
    """Load a saved model and its rows: the rows just aligned, or the test rows."""
    model = LoadedModel(context, order)
    tags = model.agree(order)
    models.forget(context.run_id, model.index)  # two services cannot write one audit log
    models.in_use[context.run_id, model.index] = Served(model)
    return model.answer(messages.Serving, tags, rows=len(model.places))


def _by_served(method: Callable[[Served, O], P]) -> Callable[[Context, O], P]:
    """Return a function that has the loaded model answer; it must be loaded."""
    return lambda context, order: method(models.current(context, Served, "model to serve"), order)


score = _by_served(Served.score)
give_reasons = _by_served(Served.give_reasons)
open_set = _by_served(Served.open_set)
seek = _by_served(Served.seek)
