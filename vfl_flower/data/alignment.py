"""Which rows all have: private set intersection of ids, or a comparison of their digests.

``align = "psi"``, the messages of `vfl_flower.data.psi`, one round for all parties:

1. The label holder blinds its ids, and sends them to every party (`AlignOrder`).
2. A party blinds them again, and its own, in a secret order, and answers both (`Aligned`).
3. The label holder blinds the party's again, and sees which of its own ids the party has.
4. It tells each party which of its rows, by their places in that order, all have (`CommonOrder`).

So the label holder learns its intersection with each party, and how many rows the party has. A
party learns which of its ids all have, and how many the label holder has.

``align = "ids"``: all must have the same ids, in any order; parties answer a digest of theirs.

Either way rows are then in the order of their encoded ids, at every party and the label holder.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context
from numpy.typing import NDArray

from vfl_flower.config import RunConfig
from vfl_flower.data.psi import Blinding, match, shuffled
from vfl_flower.data.source import Source
from vfl_flower.errors import ConfigError, VflError
from vfl_flower.messages import SMALL, Aligned, AlignOrder, Arrays, CommonOrder, Introduction
from vfl_flower.party.rules import Rules
from vfl_flower.runtimes.carrier import Carrier, ask, ask_all
from vfl_flower.wire import pack, record_of, unpack

log = logging.getLogger("flwr")
notice = logging.getLogger("flwr.notice")  # which `vfl run` shows too

_KEPT = "aligned"  # the record of a party's state


# --- the label holder ---------------------------------------------------------------------------


def align(carrier: Carrier, config: RunConfig, own: Source) -> NDArray[np.int64]:
    """The label holder's rows that every party has too, in common order; parties know theirs.

    Raises
    ------
    ConfigError, PartyError
        If ids cannot be used or compared, or if no row is common to all.
    """
    rows = _sorted(own.ids)
    if config.data.align == "ids":
        question = AlignOrder(method="ids", id_kind=own.id_kind)
        for answer in ask_all(carrier, question, Aligned, config.running).values():
            if answer.digest != _digest(own.ids):
                raise ConfigError(
                    f"Party {answer.party} has other ids than {own.whose}, and align = 'ids' "
                    "demands the same: use align = 'psi', which finds those that all have."
                )
        return rows
    blinding, order = Blinding(), shuffled(len(own.ids), secrets.token_bytes(16))
    blinded = blinding.of_ids([own.ids[row] for row in order.tolist()])
    question = AlignOrder(method="psi", id_kind=own.id_kind, arrays={"ids": blinded})
    carrier.expect({AlignOrder.kind: SMALL + blinded.nbytes + 32 * Rules.max_ids})
    answers = ask_all(carrier, question, Aligned, config.running)
    # By party: where in its own order each of the label holder's rows is, -1 for nowhere.
    places = {node: np.full(len(own.ids), -1, np.int64) for node in answers}
    for node, answer in answers.items():
        here, there = _matched(blinding, answer, len(own.ids))
        places[node][order[here]] = there
        notice.info(
            "Party %d has %d of the label holder's %d ids.", answer.party, len(here), len(own.ids)
        )
        if not len(here):
            raise ConfigError(
                f"Party {answer.party} has none of the {len(own.ids)} ids of {own.whose}: are they "
                "the same kind of id, written alike?"
            )
    common = rows[np.all([each[rows] >= 0 for each in places.values()], axis=0)]
    if not len(common):
        raise ConfigError(f"No id of {own.whose} is at all {len(answers)} parties: nothing to do.")
    if len(answers) > 1:
        notice.info("All parties together have %d of them.", len(common))
    orders = {
        node: CommonOrder(arrays={"places": each[common].astype(np.int32)})
        for node, each in places.items()
    }
    ask(carrier, orders, Introduction, config.running.party_timeout)
    return common


def _matched(
    blinding: Blinding, answer: Aligned, rows: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places of common ids in the order of the label holder's, and of the party's."""
    try:
        again = answer.arrays.get("again", np.zeros(0))
        if again.shape[:1] != (rows,):
            raise VflError(f"did not blind again the {rows} ids that it was sent, and only these.")
        theirs = answer.arrays.get("own", again[:0])
        return match(again, blinding.again(theirs))
    except VflError as error:
        raise ConfigError(f"Party {answer.party} {error}") from None


# --- a party ------------------------------------------------------------------------------------


def blind(context: Context, own: Source, parties: int, order: AlignOrder) -> Aligned:
    """A party's answer: digest, or blinded ids; the secret order stays in its state.

    Raises
    ------
    ConfigError
        If its ids cannot be used, or are of another kind than the label holder's.
    """
    assert own.party is not None
    if own.id_kind != order.id_kind:
        raise ConfigError(
            f"Party {own.party}'s ids are {own.id_kind}, the label holder's {order.id_kind}: "
            "write both alike."
        )
    if order.method == "ids":
        _keep(context, rows=_sorted(own.ids))
        return Aligned(party=own.party, parties=parties, digest=_digest(own.ids))
    secret = secrets.token_bytes(16)
    _keep(context, secret=np.frombuffer(secret, np.uint8))
    blinding, rows = Blinding(), shuffled(len(own.ids), secret)
    arrays = {
        "again": blinding.again(order.arrays.get("ids", np.zeros(0))),
        "own": blinding.of_ids([own.ids[row] for row in rows.tolist()]),
    }
    return Aligned(party=own.party, parties=parties, digest="", arrays=arrays)


def take_common(context: Context, own: Source, parties: int, order: CommonOrder) -> Introduction:
    """Keep which rows are common, and their order."""
    assert own.party is not None
    secret = _kept(context).get("secret")
    places = order.arrays.get("places", np.zeros(0))
    if secret is None or places.dtype != np.int32 or places.ndim != 1:
        raise VflError("was told rows that it was not asked about.")
    if not len(places) or places.min() < 0 or places.max() >= len(own.ids):
        raise VflError("was told rows that it does not have.")
    if len(np.unique(places)) < len(places):
        raise VflError("was told a row more than once.")
    _keep(context, rows=shuffled(len(own.ids), secret.tobytes())[places])
    return Introduction(party=own.party, parties=parties)


def common_rows(context: Context) -> NDArray[np.int64]:
    """The rows of a party's file that all have, in common order.

    Raises
    ------
    VflError
        If it has not been told.
    """
    if not is_aligned(context):
        raise VflError("was not told which of its rows are common to all.")
    rows: NDArray[np.int64] = _kept(context)["rows"]
    return rows


def is_aligned(context: Context) -> bool:
    """Whether a party has been told."""
    return "rows" in _kept(context)


def _keep(context: Context, **arrays: NDArray[Any]) -> None:
    context.state[_KEPT] = pack(arrays)


def _kept(context: Context) -> Arrays:
    if _KEPT not in context.state:
        return {}
    return unpack(record_of(context.state, _KEPT, ArrayRecord))


def _sorted(ids: Sequence[bytes]) -> NDArray[np.int64]:
    return np.array(sorted(range(len(ids)), key=ids.__getitem__), np.int64)


def _digest(ids: Sequence[bytes]) -> str:
    return hashlib.sha256(b"\n".join(sorted(ids))).hexdigest()
