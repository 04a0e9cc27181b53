"""Which rows all have: private set intersection of ids, or whether all have the same; a party.

What the label holder does stands in `vfl_flower.alignment.at_label_holder`.

``align = "psi"``, the messages of `vfl_flower.alignment.psi`, one round for all parties:

1. Each party says whether it keeps the blinded ids of an alignment before (`SetOrder`). If so, what
   follows is about ids that are new at either side, else about all (`alignment.blinded_ids`).
2. The label holder blinds its ids, and sends them to the party (`AlignOrder`).
3. A party blinds them again, and its own, in a secret order, and answers both (`Aligned`).
4. The label holder sees which of its own ids the party has, and tells each which of its rows, by
   their places in that order, all have (`CommonOrder`).
5. The party asks it to show that it knows their ids, if they are used for the first time, or of
   many a sample, and then uses them (`ConfirmOrder`).

So the label holder learns its intersection with each party, and how many rows the party has. A
party learns which of its ids all have, and how many the label holder has. Where a set was kept, the
former also learns how many ids have come to the party's file and gone from it, and whether one that
it asks about now came or went since; the party how many the label holder had not asked about.

``align = "ids"``: all must have the same ids, in any order. The party asks the label holder to show
that it knows a digest of them all, and else gives no rows. So each learns whether the other has the
same ids, and of others nothing.

``align = "any"``: as psi, but a row is used that enough parties have, and a party is told where it
lacks one. So it learns which of its ids the label holder has, and how many rows there are; not who
else has them, and for that rows are in an order that the label holder draws.

Else rows are in the order of their encoded ids, at every party and the label holder. No digest of
ids leaves a party, since whoever guesses ids would find them by it: parties name the alignment
instead (`Description`), and each sees to it itself that its ids stay as they were.

What comes of it is kept, and used again while ids stay as they are (`vfl_flower.alignment.reuse`).
A party's node configuration fixes the method, the fewest rows to align and the most ids that it is
asked about in all (`vfl_flower.alignment.asked_ids`).
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context
from numpy.typing import NDArray

from vfl_flower.alignment import asked_ids, blinded_ids, psi
from vfl_flower.alignment.blinded_ids import IdSet
from vfl_flower.alignment.psi import Blinding, Places, Points, challenge, check_points, shuffled
from vfl_flower.alignment.store import check_name
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.row_mask import Alignment
from vfl_flower.data.source import Source
from vfl_flower.transport.early_messages import (
    Aligned,
    AlignOrder,
    CommonOrder,
    ConfirmOrder,
    SetKept,
    SetOrder,
)
from vfl_flower.transport.messages import Arrays, Introduction
from vfl_flower.transport.node import simulated
from vfl_flower.transport.wire import pack, record_of, unpack

_KEPT = "aligned"  # the record of a party's state
_IDS, _PSI = np.zeros(1, np.uint8), np.ones(1, np.uint8)  # methods, in that record
_OF_LATER_RUNS = "file", "answer"  # arrays in that record: digest of all ids; what proves who asks
_OF_SET = "set", "key", "points", "at", "asked"  # arrays in that record until it is confirmed
_SAMPLE = 10_000  # rows whose ids a party asks about; of more, it finds one stranger in a thousand


Order = Callable[[Places], Places]
"""From rows in some order, where each is to be taken from."""


# --- a party ------------------------------------------------------------------------------------


def find_set(context: Context, own: Source, parties: int, order: SetOrder) -> SetKept:
    """Whether the party still has the blinded ids of an earlier alignment with this label holder.

    Raises
    ------
    ConfigError, VflError
        If its ids cannot be used, or the order is none.
    """
    assert own.party is not None
    _keep(context)
    rules = _rules(context, "psi")
    found = blinded_ids.find(context, own, order, rules) if rules.align == "psi" else None
    if not found:
        return SetKept(party=own.party, parties=parties)
    name = np.frombuffer(found.kept.name.encode(), np.uint8)
    known, file = np.array([found.known]), _digest(own, np.arange(len(own.ids)))
    _keep(context, set=name, known=known, at=found.at, file=file)
    return SetKept(party=own.party, parties=parties, arrays={"proof": found.proof})


def blind(context: Context, own: Source, parties: int, order: AlignOrder) -> Aligned:
    """A party's answer: blinded ids, or a question; what it needs next stays in its state.

    Raises
    ------
    ConfigError, VflError
        If its rules forbid it; or if its ids cannot be used, or are of another kind than the label
        holder's.
    """
    assert own.party is not None
    rules = _rules(context, order.method)
    _check_method(rules, order.method)
    if own.id_kind != order.id_kind:
        raise ConfigError(
            f"Party {own.party}'s ids are {own.id_kind}, the label holder's {order.id_kind}: "
            "write both alike."
        )
    theirs = order.arrays.get("ids", np.zeros(0))
    with _subject("was sent"):
        check_points(theirs)
    if order.method == "ids":
        _check_fewest(rules, len(own.ids))
        with _subject("was sent"):
            arrays = _ask_about_all(context, own, theirs)
    else:
        arrays = _blind(context, own, rules, theirs, order.anew)
    return Aligned(party=own.party, parties=parties, arrays=arrays)


def _ask_about_all(context: Context, own: Source, theirs: Points) -> Arrays:
    """A question about all ids of the party at once."""
    if len(theirs) != 1:
        raise VflError(f"{len(theirs)} blinded digests, where one is due.")
    question, answer = challenge([of_all(own.ids)], theirs)
    rows, file = by_id(own.ids), _digest(own, np.arange(len(own.ids)))
    _keep(context, told=rows, digest=_digest(own, rows), answer=answer, method=_IDS, file=file)
    return {"question": question}


def _blind(context: Context, own: Source, rules: Rules, theirs: Points, anew: bool) -> Arrays:
    """The label holder's ids blinded again, and the party's in a secret order, as far as new."""
    assert own.party is not None
    kept, file = _kept(context), _digest(own, np.arange(len(own.ids)))
    with _subject("was sent"):
        psi.check_distinct(theirs)
    if anew:
        _check_fewest(rules, len(theirs))
        asked_ids.count(context, rules, theirs)
        made = blinded_ids.fresh(own)
        key, points, at, known = made["key"], made["points"], made["at"], 0
        asked = len(theirs)
        made["shown"] = np.zeros(len(at), np.uint8)
        if not blinded_ids.lets(context, rules):
            made = {name: made[name] for name in ("at", "shown")}
    elif "known" not in kept:
        raise VflError("was asked about new ids, and has found no set that they could be new to.")
    else:
        _check_file(kept, file)
        name = kept["set"].tobytes().decode()
        asked_ids.count(context, rules, theirs)
        found = blinded_ids.asked(context, own.party, name, len(theirs), rules)
        _check_fewest(rules, found.asked)
        key, at, known = found.arrays["key"], kept["at"], int(kept["known"][0])
        points, asked = found.arrays["points"][: len(at)], found.asked
        shown = found.arrays["shown"][: len(at)].astype(np.uint8)
        made = {"set": kept["set"], "at": at, "shown": shown}
    with _subject("was sent"):
        again = Blinding(key.tobytes()).again(theirs)
    _keep(context, **made, asked=np.array([asked]), file=file)
    gone = np.flatnonzero(at < 0).astype(np.int32)
    return {"again": again, "own": points[known:], "gone": gone}


def take_common(context: Context, own: Source, parties: int, order: CommonOrder) -> Introduction:
    """A party's question about the rows that it is told.

    Raises
    ------
    VflError
        If its rules forbid it; or if all cannot have these rows in common, by what it knows.
    """
    assert own.party is not None
    kept = _kept(context)
    places = order.arrays.get("places", np.zeros(0))
    if "shown" not in kept or places.dtype != np.int32 or places.ndim != 1:
        raise VflError("was told rows that it was not asked about.")
    _check_file(kept, _digest(own, np.arange(len(own.ids))))
    at, asked, has = kept["at"], int(kept["asked"][0]), np.flatnonzero(places != -1)
    named = places[has]
    _check_distinct(named, len(at), "rows that it does not have", "a row")
    mine = at[named]
    if mine.min() < 0:
        raise VflError("was told rows that it does not have.")
    if len(places) > asked:
        raise VflError(f"was told {len(places)} rows, and had been sent {asked} ids.")
    _check_fewest(_rules(context, "psi"), len(mine))
    # Of those whose ids the label holder has not yet shown to know all, or many; at least one.
    first = shuffled(len(mine), secrets.token_bytes(16))
    first = first[np.argsort(kept["shown"][named[first]], kind="stable")]
    new = len(mine) - int(kept["shown"][named].sum())
    some = np.sort(first[: min(max(1, new), _SAMPLE)])
    question, secret = psi.question([own.ids[row] for row in mine[some].tolist()])
    rows = np.full(len(places), -1, np.int64)
    rows[has] = mine
    of_set = {name: kept[name] for name in kept if name in _OF_SET}
    if "key" in kept:
        of_set["marks"] = blinded_ids.keyed_hashes(
            [own.ids[row] for row in at.tolist()], kept["key"]
        )
    about = {"digest": _digest(own, mine), "method": _PSI, "file": kept["file"]}
    judged = {"secret": np.frombuffer(secret, np.uint8), "places": named}
    _keep(context, told=rows, **judged, **about, **of_set)
    arrays: Arrays = {"question": question, "rows": has[some].astype(np.int32)}
    return Introduction(party=own.party, parties=parties, arrays=arrays)


def confirm(context: Context, party: int, parties: int, order: ConfirmOrder) -> Introduction:
    """Keep which rows are common, if the label holder has shown that it knows their ids.

    Raises
    ------
    ConfigError, VflError
        If it has not; it is then to begin anew.
    """
    kept = _kept(context)
    if "told" not in kept:
        raise VflError("was told to use rows that it was not told.")
    _keep(context)
    answer, by_psi = order.arrays.get("answer", np.zeros(0)), "secret" in kept

    def proves() -> bool:
        if by_psi:
            return psi.is_answer(kept["secret"].tobytes(), answer)
        return np.array_equal(answer, kept["answer"])

    if not asked_ids.judge(context, Rules.of(context.node_config), proves):
        if "set" in kept:
            blinded_ids.forget(context, party, kept["set"].tobytes().decode())
        raise ConfigError(
            f"Party {party} has other ids than the label holder has shown to know: align = 'ids' "
            "demands the same ids, and align = 'psi' finds those that all have."
        )
    check_name(order.alignment)
    name = np.frombuffer(order.alignment.encode(), np.uint8)
    which = {each: kept[each] for each in ("digest", "method", "file")}
    _keep(context, rows=kept["told"], name=name, answer=answer[-1:], **which)
    if by_psi:
        _keep_set(context, party, kept, answer[-1:])
    return Introduction(party=party, parties=parties)


def _keep_set(context: Context, party: int, kept: Arrays, proof: Points) -> None:
    """Note in the party's set that the label holder knows the ids of these rows; it may be new."""
    rules, places = _rules(context, "psi"), kept["places"]
    if "set" in kept:
        blinded_ids.shown(context, party, kept["set"].tobytes().decode(), places, rules)
    elif "key" in kept:
        shown = np.zeros(len(kept["at"]), bool)
        shown[places] = True
        arrays = {each: kept[each] for each in ("key", "points", "marks")}
        arrays |= {"proof": proof, "lengths": np.array([len(shown)]), "shown": shown}
        blinded_ids.keep(context, party, IdSet(time.time(), int(kept["asked"][0]), arrays))


def confirmed(context: Context) -> Arrays:
    """What `use` needs in another run: rows that were just confirmed, and what is asked for then.

    The latter does not stay in the party's state.
    """
    kept = _kept(context)
    use(context, kept)
    return kept


def use(context: Context, arrays: Arrays) -> None:
    """Have a party use rows as if they had just been confirmed.

    Raises
    ------
    VflError
        If its rules forbid it.
    """
    _check_rules(context, arrays)
    _keep(context, **{name: arrays[name] for name in arrays if name not in _OF_LATER_RUNS})


def common_rows(context: Context, own: Source) -> Alignment:
    """The rows of a party's own data that a run is of; -1 for one that it lacks.

    Raises
    ------
    VflError
        If it has not been told, or its ids are not what they were then.
    """
    if not is_aligned(context):
        raise VflError("was not told which of its rows are common to all.")
    kept = _kept(context)
    rows: Places = kept["rows"]
    _check_rules(context, kept)  # which may be stricter than they were when it was told
    mine = rows[rows >= 0]
    if mine.max() >= len(own.ids) or not np.array_equal(kept["digest"], _digest(own, mine)):
        raise VflError("has lost rows of its file, or has others, since they were aligned.")
    return Alignment(kept["name"].tobytes().decode(), rows)


def _check_rules(context: Context, kept: Arrays) -> None:
    method = "psi" if kept["method"].any() else "ids"
    rules = _rules(context, method)
    _check_method(rules, method)
    _check_fewest(rules, int((kept["rows"] >= 0).sum()))


def is_aligned(context: Context) -> bool:
    """Whether a party has been told."""
    return "rows" in _kept(context)


@contextmanager
def _subject(words: str) -> Iterator[None]:
    """Put these words before what is raised within."""
    try:
        yield
    except ConfigError:
        raise
    except VflError as error:
        raise VflError(f"{words} {error}") from None


def _rules(context: Context, method: str) -> Rules:
    """The party's rules; in a simulation of one owner those that it names."""
    rules = Rules.of(context.node_config)
    if simulated(context) and "align" not in context.node_config:
        rules = replace(rules, align=method)
    if simulated(context) and "min-rows" not in context.node_config:
        rules = replace(rules, min_rows=1)
    return rules


def _check_method(rules: Rules, method: str) -> None:
    if method != rules.align or method not in ("psi", "ids"):
        raise VflError(
            f"aligns by {rules.align!r} alone, as its node configuration has it, and was asked to "
            f"by {method!r}: give align = {rules.align!r}, or have it changed there."
        )


def _check_fewest(rules: Rules, rows: int) -> None:
    if rows < rules.min_rows:
        raise VflError(
            f"was asked to align {rows} rows, and aligns no fewer than {rules.min_rows}: min-rows "
            "in its node configuration."
        )


def _check_distinct(numbers: NDArray[np.int32], end: int, beyond: str, one: str) -> None:
    if not len(numbers) or numbers.min() < 0 or numbers.max() >= end:
        raise VflError(f"was told {beyond}.")
    if len(np.unique(numbers)) < len(numbers):
        raise VflError(f"was told {one} more than once.")


def _check_file(kept: Arrays, file: NDArray[np.uint8]) -> None:
    if not np.array_equal(kept["file"], file):
        raise VflError("has other ids than a moment ago: its file has changed.")


def _digest(own: Source, rows: Places) -> NDArray[np.uint8]:
    """Of these rows' ids, for the party's own state alone."""
    return np.frombuffer(bytes.fromhex(own.digest(rows)), np.uint8)


def _keep(context: Context, **arrays: NDArray[Any]) -> None:
    context.state[_KEPT] = pack(arrays)


def _kept(context: Context) -> Arrays:
    if _KEPT not in context.state:
        return {}
    return unpack(record_of(context.state, _KEPT, ArrayRecord))


# --- both sides ---------------------------------------------------------------------------------


def by_id(ids: Sequence[bytes]) -> Places:
    """All rows, in the order of their ids."""
    return np.array(sorted(range(len(ids)), key=ids.__getitem__), np.int64)


def of_all(ids: Sequence[bytes]) -> bytes:
    """A digest of all ids, in any order; it is never sent but blinded."""
    digest = hashlib.sha256()
    for encoded in sorted(ids):  # one by one, since to join millions takes much memory
        digest.update(encoded + b"\n")
    return b"all:" + digest.digest()
