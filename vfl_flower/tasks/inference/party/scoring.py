"""A party's half of the online service (the other: `vfl_flower.tasks.inference.serving`).

The party loads its model and its rows once (`load`), and then embeds some rows for each request
(`score`). It knows a row by its id. So its file may change while it serves: the party reads the
file again, and says which rows have gone.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.alignment.party_rows import common_rows, is_aligned
from vfl_flower.alignment.seeking import OpenSet
from vfl_flower.config.audit_log import AuditLog
from vfl_flower.config.errors import OutOfStepError, VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.at_party import FeatureBlock, prepared
from vfl_flower.data.source import Compact, Preparation, Source
from vfl_flower.party import about, builder, state, state_file
from vfl_flower.party.drift import DriftReports
from vfl_flower.party.inputs import own_source
from vfl_flower.party.limits import PredictionBudget, refused_rows
from vfl_flower.party.party import Party
from vfl_flower.party.state_file import Saved
from vfl_flower.protocol.aggregation.masks import alike
from vfl_flower.transport.early_messages import OpenSetOrder, SeekOrder, SetKept, Sought
from vfl_flower.transport.messages import Arrays, Scored, ScoreOrder, ServeOrder, Serving
from vfl_flower.transport.node import index_and_parties

log = logging.getLogger("flwr")

_SINGLES = 10_000  # most samples of single rows in memory
_LOOK = 1.0  # seconds between two looks at the party's file

Places = NDArray[np.int64]


@dataclass
class _Rows:
    """The rows that a party serves, in the order of the alignment or of the test rows.

    features : samples of the rows that the party's data have now.
    at : position of each row in ``features``, or -1 if the data have lost it.
    ids : ids of all rows, if the party has own data.
    own : the party's data, if it has own data.
    file, version : the file that they come from, and when it was last written.
    places : place of each row in ``own``, or -1 if the data have lost it.
    single : samples of rows outside the alignment that were asked for, by row.
    """

    features: Any
    at: Places
    ids: list[bytes] = field(default_factory=list)
    own: Source | None = None
    file: Path | None = None
    version: int = 0
    places: Places = field(default_factory=lambda: np.zeros(0, np.int64))
    looked: float = 0.0
    single: dict[int, NDArray[np.float32]] = field(default_factory=dict)


@dataclass
class _Served:
    """A loaded model with its rows."""

    party: Party
    block: FeatureBlock
    rows: _Rows
    budget: PredictionBudget
    audit: AuditLog
    drift: DriftReports
    opened: OpenSet | None = None  # to find ids outside the alignment
    reading: Future[Callable[[], None]] | None = None  # of the file, which has changed


_readers = ThreadPoolExecutor(2, "reading")  # of files that have changed
_served: dict[tuple[int, int], _Served] = {}
"""(Flower run, party) -> what this process serves."""


def load(context: Context, saved: Saved, order: ServeOrder) -> Serving:
    """Load a saved model and its rows: the rows just aligned, or the test rows.

    Raises
    ------
    ConfigError, VflError
        If the party's columns, rows or model differ from training, or if a rule forbids it.
    """
    index, parties = index_and_parties(context)
    ids: list[bytes] = []
    mine: list[int] = []
    own = own_source(context) if about.read(state.load_about(saved.state)).preparation else None
    read = partial(_new_rows, context, own, ids, mine)
    party = builder.for_prediction(context, saved, order.run, read)
    block, scalars = party.inputs.block, state.load_scalars(saved.state)
    tags: Arrays = {}
    if party.seal:
        of_rows = alike(party.alike, block.ids_digest)
        tags = party.seal.serve(context, order, of_rows, scalars.get("lineage", b""))
    at = block.tested.astype(np.int64)
    file = _file_of(context)
    rows = _Rows(block.test, at, ids, own, file, _version(file), np.array(mine, np.int64))
    budget = PredictionBudget(context, Rules.of(context.node_config))
    perturbs = party.learner.mechanism.perturbs_uploads
    drift = DriftReports(context, saved, order.run, perturbs)
    if (earlier := _served.pop((context.run_id, index), None)) is not None:
        _close(earlier)
    audit = state_file.audit_log(context)
    _served[context.run_id, index] = _Served(party, block, rows, budget, audit, drift)
    return Serving(
        party=index,
        parties=parties,
        rows=len(at),
        exchange=scalars["exchange"],
        checkpoint=saved.number,
        alignment=block.alignment,
        arrays=tags,
    )


def score(context: Context, order: ScoreOrder) -> Scored:
    """Embed some of the loaded rows.

    Raises
    ------
    OutOfStepError
        If this process has loaded no model.
    ConfigError, VflError
        If the order names rows that do not exist, or if a rule forbids more predictions.
    """
    served = _of(context)
    asked = order.arrays.get("rows", np.zeros(0))
    places = order.arrays.get("places", np.zeros(0, np.int32))
    lists = all(each.dtype == np.int32 and each.ndim == 1 for each in (asked, places))
    if not lists or not len(asked) + len(places):
        raise VflError("was asked to score without a list of rows.")
    rows = _current(context, served)
    if len(asked) and (asked.min() < 0 or asked.max() >= len(rows.at)):
        raise VflError("was asked to score rows that it does not serve.")
    at, singles = rows.at[asked], _rows_of_places(served, places, order)
    there = np.concatenate([at, singles]) >= 0
    ids = [rows.ids[row] if rows.ids else b"i:%d" % row for row in asked.tolist()]
    ids += served.opened.ids(singles) if served.opened and len(singles) else []
    party, block, embed = served.party, served.block, served.party.learner.fresh_embeddings
    with _recorded(served, "score", len(ids), ids) as line:
        rows_of = block.test_rows, block.tested[asked]
        refused, why = refused_rows(party.limits, served.budget, *rows_of, there, bool(party.seal))
        line |= {"refused": len(refused)} if why else {}
    arrays: Arrays = {"refused": refused.astype(np.int32)} if why else {}
    seal = party.seal
    if seal and why:
        return Scored(arrays=arrays, why=why)
    if why:
        at[refused[refused < len(at)]] = -1
        singles[refused[refused >= len(at)] - len(at)] = -1
    embedding = np.zeros((len(there), party.learner.size), np.float32)
    if (at >= 0).any():
        places_in_memory = at[at >= 0].astype(np.int32)
        embedding[: len(at)][at >= 0] = embed(rows.features, places_in_memory)
    if (singles >= 0).any():
        embedding[len(at) :][singles >= 0] = embed(_singles(served, singles[singles >= 0]))
    arrays |= served.drift.of_scores(served.block, rows.own, asked, at, rows.places, singles)
    if seal:
        if not there.all():
            raise VflError("has lost rows of masked sums. Start the service anew.")
        seal.bind(order)
        return Scored(arrays=seal.hide({"embedding": embedding}) | arrays)
    arrays |= {"gone": np.flatnonzero(~there).astype(np.int32)} if not there.all() else {}
    return Scored(arrays={"embedding": embedding} | arrays, why=why)


def open_set(context: Context, order: OpenSetOrder) -> SetKept:
    """Open the set of blinded ids that the order names and proves, to find single ids.

    Raises
    ------
    OutOfStepError, ConfigError, VflError
        If this process has loaded no model, or a rule forbids it.
    """
    served, (index, parties) = _of(context), index_and_parties(context)
    if served.rows.own is None:
        raise VflError("has no ids.")
    if served.opened:
        served.opened.close()
    _finish_reading(served)  # else the new set would be of the earlier rows
    served.opened = OpenSet(context, served.rows.own, order)
    proof = served.opened.proof
    return SetKept(party=index, parties=parties, arrays={} if proof is None else {"proof": proof})


def seek(context: Context, order: SeekOrder) -> Sought:
    """Blind the label holder's ids again, for a set that was opened.

    Raises
    ------
    OutOfStepError, ConfigError, VflError
        If no set is open, a rule allows no more ids, or the ids cannot be used.
    """
    served = _of(context)
    if served.opened is None:
        raise OutOfStepError("has opened no set of blinded ids.")
    _current(context, served)
    points = order.arrays.get("ids", np.zeros(0))
    with _recorded(served, "seek", len(points)) as line:
        arrays, why = served.opened.again(points, order.known)
        line |= {"refused": len(arrays["refused"])} if why else {}
    return Sought(arrays=arrays, why=why)


def _of(context: Context) -> _Served:
    index, _ = index_and_parties(context)
    served = _served.get((context.run_id, index))
    if served is None:
        raise OutOfStepError("has loaded no model to serve.")
    return served


def forget(run: int, party: int | None = None) -> None:
    """Drop what a Flower run has loaded for one party, or for all in this process.

    The party gives back what it has counted ahead and not used.
    """
    for key in [each for each in list(_served) if each[0] == run and party in (None, each[1])]:
        _close(_served.pop(key))


def _close(served: _Served) -> None:
    served.budget.close()
    served.audit.close()
    if served.opened:
        served.opened.close()


# --- the audit log ------------------------------------------------------------------------------


@contextmanager
def _recorded(
    served: _Served, event: str, number: int, ids: Sequence[bytes] = ()
) -> Iterator[dict[str, Any]]:
    """Write an order to the audit log at the end of the block, also if the block refuses it.

    Yield further fields of the line, for the block to set.

    Parameters
    ----------
    number : number of ids that the order is about.
    ids : these ids, if the party knows them.
    """
    outcome, more = "refused", dict[str, Any]()
    try:
        yield more
        outcome = "answered" if more.get("refused", 0) < number else "refused"
    finally:
        more |= {"ids": served.audit.hashes(ids)} if ids else {}
        run = served.party.origin.counted_since
        try:
            served.audit.write(event, run=run, number=number, outcome=outcome, **more)
        except VflError as error:
            log.warning("%s", error)
            raise VflError("cannot write its audit log: its own log says why.") from None


# --- rows ---------------------------------------------------------------------------------------


def _new_rows(
    context: Context,
    own: Source | None,
    ids: list[bytes],
    places: list[int],
    preparation: Preparation,
) -> FeatureBlock:
    """Return the party's own features of the rows just aligned; add their ids and places."""
    assert own is not None
    if not is_aligned(context):  # its process has started anew since it was told its rows
        raise OutOfStepError("was not told its rows.")
    common = common_rows(context, own)
    mine = common.rows[common.rows >= 0]  # the party may lack some rows
    places += mine.tolist()
    ids += [own.ids[row] for row in places]
    digest, names = own.digest(mine), own.names(mine)
    features = prepared(own, mine, preparation)
    none = Compact(np.zeros(0, np.int64), lambda at: features[:0])
    return FeatureBlock(none, features, digest, preparation, common.name, names[:0], names)


def _rows_of_places(served: _Served, places: NDArray[np.int32], order: ScoreOrder) -> Places:
    """Return the rows of places outside the alignment, or -1 for a row that has gone."""
    if not len(places):
        return np.zeros(0, np.int64)
    if served.opened is None:
        raise OutOfStepError("has opened no set of blinded ids.")
    proofs = order.arrays.get("proofs", np.zeros((0, 32), np.uint8))
    return served.opened.rows(places.astype(np.int64), proofs)


def _singles(served: _Served, wanted: Places) -> Any:
    """Return samples of rows outside the alignment; keep samples of a table in memory."""
    rows, preparation = served.rows, served.block.preparation
    assert rows.own is not None and preparation is not None
    new = np.array([row for row in wanted.tolist() if row not in rows.single], np.int64)
    if len(rows.single) + len(new) > _SINGLES:
        rows.single.clear()
        new = wanted
    samples = prepared(rows.own, new, preparation) if len(new) else None
    if len(new) == len(wanted) and not isinstance(samples, np.ndarray):
        return samples
    if isinstance(samples, np.ndarray):
        rows.single |= dict(zip(new.tolist(), samples, strict=True))
    return np.stack([rows.single[row] for row in wanted.tolist()])


def _file_of(context: Context) -> Path | None:
    named = context.node_config.get("file")
    return Path(str(named)).expanduser() if named else None


def _version(file: Path | None) -> int:
    try:
        return file.stat().st_mtime_ns if file else 0
    except OSError:
        return 0


def _current(context: Context, served: _Served) -> _Rows:
    """Return the rows. If the party's file has changed, another thread reads it meanwhile."""
    rows, now = served.rows, time.monotonic()
    if served.reading and served.reading.done():
        _finish_reading(served)
    if served.reading or now < rows.looked + _LOOK:
        return rows
    rows.looked, version = now, _version(rows.file)
    if version not in (0, rows.version):
        rows.version = version
        served.reading = _readers.submit(_read_again, context, served)
    return rows


def _finish_reading(served: _Served) -> None:
    if served.reading:
        use, served.reading = served.reading.result, None
        use()()


def _read_again(context: Context, served: _Served) -> Callable[[], None]:
    """Read the party's file; return what uses it from then on."""
    rows, opened, new_set = served.rows, served.opened, None
    try:
        own = own_source(context)
        row_of = {one: row for row, one in enumerate(own.ids)}
    except (VflError, OSError) as error:  # it may be half written
        log.warning("The party serves the earlier rows, since its file has changed: %s", error)
        return lambda: None
    found = np.array([row_of.get(one, -1) for one in rows.ids], np.int64)
    there = found >= 0
    try:
        assert served.block.preparation is not None
        features = prepared(own, found[there], served.block.preparation) if there.any() else None
        new_set = opened.found(own) if opened else None
        usable = True
    except (VflError, OSError) as error:
        log.warning("The party serves the earlier columns, since its file has changed: %s", error)
        usable = False

    def use() -> None:
        if usable:
            if features is not None:
                rows.features = features
                rows.at = np.where(there, np.cumsum(there) - 1, -1)
            if opened:
                opened.use(own, new_set)
            rows.own, rows.single, rows.places = own, {}, found
            served.drift.forget_waiting()
        # A removed row is not scored, even if the rest of the file cannot be used.
        rows.at = np.where(there, rows.at, -1)
        log.info("The party has read its file again: %d rows have gone.", (~there).sum())

    return use
