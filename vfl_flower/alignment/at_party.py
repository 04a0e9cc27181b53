"""A party's half of an alignment: steps 0, 2, 5 and 6 of `alignment.psi`.

The label holder's half, `at_label_holder`, has the other steps. ``align`` decides what each side
learns:

psi : The label holder learns its intersection with each party, and how many rows the party has. A
    party learns which of its ids all have, and how many ids the label holder has. If step 0 finds a
    set, the party also learns how many ids the label holder had not asked about. The label holder
    then learns how many ids have come to the party's file, and how many have gone from it. It also
    learns whether an id that it asks about now is one of these.
any : As psi, but a row is used if enough parties have it, and a party is told which rows it lacks.
    So a party learns which of its ids the label holder has, and the number of all rows. It does
    not learn which other parties have them. The label holder draws a random order of rows, since
    the order of ids would tell it.
ids : All must have the same ids, in any order. In step 1 the label holder sends one blinded digest
    of all its ids, and the party asks at once (step 5). Each side learns whether the other has the
    same ids, and nothing else.

With psi and ids, every party and the label holder have the rows in the order of their encoded ids.
No digest of ids leaves a party, since it would confirm a guess of the ids. Parties name the
alignment instead (`Description`), and each party checks that its ids have not changed.

`alignment.reuse` stores the result. A party's node configuration fixes the method, the fewest rows
to align, and the most ids that it may be asked about in total (`asked_ids`).
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
from flwr.app import Context
from numpy.typing import NDArray

from vfl_flower.alignment import asked_ids, blinded_ids, by_rules, psi
from vfl_flower.alignment.blinded_ids import IdSet
from vfl_flower.alignment.party_rows import (
    IDS,
    PSI,
    check_fewest,
    check_method,
    digest_of,
    rules_of,
    save_state,
    saved_state,
    text_of,
)
from vfl_flower.alignment.psi import Blinding, Points
from vfl_flower.alignment.store import check_name
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.ids import by_id, chosen, hint_of_forms
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

log = logging.getLogger("flwr")

_OF_SET = "set", "key", "points", "at", "asked"
_SAMPLE = 10_000  # most rows of a question; enough to find one stranger in a thousand rows


# --- step 0: find a set ---------------------------------------------------------------------------


def find_set(context: Context, own: Source, parties: int, order: SetOrder) -> SetKept:
    """Say whether the party keeps a set from an earlier alignment.

    The party says so only to the label holder of that alignment, who proves it.

    Raises
    ------
    ConfigError, VflError
        If the party's ids cannot be used, or the order has no names and proofs.
    """
    assert own.party is not None
    save_state(context)
    rules = rules_of(context, "psi")
    found = blinded_ids.find(context, own, order, rules) if rules.align == "psi" else None
    if not found:
        return SetKept(party=own.party, parties=parties)
    name = np.frombuffer(found.stored.name.encode(), np.uint8)
    save_state(context, set=name, known=np.array([found.known]), at=found.at, file=digest_of(own))
    return SetKept(party=own.party, parties=parties, arrays={"proof": found.proof})


# --- step 2: blind the label holder's ids again, and the party's own ------------------------------


def blind(context: Context, own: Source, parties: int, order: AlignOrder) -> Aligned:
    """Answer with blinded ids, or with a question under method "ids".

    Raises
    ------
    ConfigError, VflError
        If the party's rules forbid it, or its ids cannot be used.
    """
    assert own.party is not None
    if order.rule:
        return by_rules.blind(context, own, parties, order)
    by_rules.check_ids(own)
    rules, theirs = rules_of(context, order.method), order.arrays.get("ids", np.zeros(0))
    check_method(rules, order.method)
    with _subject("was sent"):
        psi.check_points(theirs)
    if order.method == "ids":
        check_fewest(rules, len(own.ids))
        with _subject("was sent"):
            arrays = _ask_about_all(context, own, theirs)
    else:
        arrays = _blind(context, own, rules, theirs, order.anew)
    return Aligned(party=own.party, parties=parties, arrays=arrays)


def _ask_about_all(context: Context, own: Source, theirs: Points) -> Arrays:
    """Return a question about all ids of the party at once."""
    if len(theirs) != 1:
        raise VflError(f"{len(theirs)} blinded digests instead of one. Start the run anew.")
    question, answer = psi.challenge([psi.digest_of_all(own.ids)], theirs)
    rows = by_id(own.ids)
    about = {"digest": digest_of(own, rows), "method": IDS, "file": digest_of(own)}
    save_state(context, told=rows, answer=answer, **about)
    return {"question": question}


def _blind(context: Context, own: Source, rules: Rules, theirs: Points, anew: bool) -> Arrays:
    """Return the label holder's ids blinded again, and the party's new outputs."""
    assert own.party is not None
    kept, file = saved_state(context), digest_of(own)
    with _subject("was sent"):
        psi.check_distinct(theirs)
    if anew:
        check_fewest(rules, len(theirs))
        asked_ids.count(context, rules, theirs)
        made = blinded_ids.fresh(own)
        key, points, at, known = made["key"], made["points"], made["at"], 0
        asked = len(theirs)
        made["shown"] = np.zeros(len(at), np.uint8)
        if not blinded_ids.lets(context, rules):
            made = {name: made[name] for name in ("at", "shown")}
    elif "known" not in kept:
        raise VflError(
            "was asked about new ids of a set, and has found no set. Start the run anew."
        )
    else:
        _check_file(kept, file)
        asked_ids.count(context, rules, theirs)
        stored = blinded_ids.asked(context, own.party, text_of(kept["set"]), len(theirs), rules)
        check_fewest(rules, stored.asked)
        key, at, known = stored.arrays["key"], kept["at"], int(kept["known"][0])
        points, asked = stored.arrays["points"][: len(at)], stored.asked
        shown = stored.arrays["shown"][: len(at)].astype(np.uint8)
        made = {"set": kept["set"], "at": at, "shown": shown}
    with _subject("was sent"):
        again = Blinding(key.tobytes()).again(theirs)
    save_state(context, **made, asked=np.array([asked]), file=file)
    gone = np.flatnonzero(at < 0).astype(np.int32)
    return {"again": again, "own": points[known:], "gone": gone}


# --- step 5: ask whether the label holder knows the ids of the rows -------------------------------


def take_common(context: Context, own: Source, parties: int, order: CommonOrder) -> Introduction:
    """Answer with a question about the rows that the label holder names.

    Raises
    ------
    VflError
        If the party's rules forbid it, or if the party knows that these rows cannot be common.
    """
    assert own.party is not None
    kept, places = saved_state(context), order.arrays.get("places", np.zeros(0))
    if "shown" not in kept or places.dtype != np.int32 or places.ndim != 1:
        raise VflError("was told rows that it was not asked about. Start the run anew.")
    _check_file(kept, digest_of(own))
    at, asked, has = kept["at"], int(kept["asked"][0]), np.flatnonzero(places != -1)
    named = places[has]
    if not len(named) or named.min() < 0 or named.max() >= len(at) or at[named].min() < 0:
        raise VflError("was told rows that it does not have. Start the run anew.")
    if len(np.unique(at[named])) < len(named):
        raise VflError("was told a row more than once. Start the run anew.")
    if len(places) > asked:
        raise VflError(
            f"was told {len(places)} rows, but was sent only {asked} ids. Start the run anew."
        )
    mine = at[named]
    if "by" not in kept:
        used = np.zeros(len(own.ids), bool)
        used[mine] = True
        if hint := hint_of_forms(own.ids, used):
            log.warning("Party %d, by its own ids: %s.", own.party, hint)
    check_fewest(rules_of(context, "psi"), len(mine))
    # The question is about rows whose ids the label holder has not yet shown to know: all of them,
    # or a sample. If it has shown all, the question is about one row.
    first = psi.shuffled(len(mine), secrets.token_bytes(16))
    first = first[np.argsort(kept["shown"][named[first]], kind="stable")]
    new = len(mine) - int(kept["shown"][named].sum())
    some = np.sort(first[: min(max(1, new), _SAMPLE)])
    ids = by_rules.keys_at(own, kept, named[some]) if "by" in kept else chosen(own.ids, mine[some])
    question, secret = psi.question(ids)
    rows = np.full(len(places), -1, np.int64)
    rows[has] = mine
    of_set = {name: kept[name] for name in kept if name in _OF_SET}
    if "key" in kept:
        of_set["marks"] = blinded_ids.keyed_hashes(own.ids, kept["key"])[at]
    about = {"digest": digest_of(own, mine), "method": PSI, "file": kept["file"]}
    about |= {"rules": kept["rules"]} if "rules" in kept else {}
    proved_by = {"secret": np.frombuffer(secret, np.uint8), "places": named}
    save_state(context, told=rows, **proved_by, **about, **of_set)
    arrays: Arrays = {"question": question, "rows": has[some].astype(np.int32)}
    return Introduction(party=own.party, parties=parties, arrays=arrays)


# --- step 6: check the answer, and use the rows ---------------------------------------------------


def confirm(context: Context, party: int, parties: int, order: ConfirmOrder) -> Introduction:
    """Save the common rows, if the label holder has shown that it knows their ids.

    Raises
    ------
    ConfigError, VflError
        If the label holder has not shown it. It must then begin anew.
    """
    kept = saved_state(context)
    if "told" not in kept:
        raise VflError("was told to use rows, but was told none. Start the run anew.")
    save_state(context)
    answer, by_psi = order.arrays.get("answer", np.zeros(0)), "secret" in kept

    def proves() -> bool:
        if by_psi:
            return psi.is_answer(kept["secret"].tobytes(), answer)
        return np.array_equal(answer, kept["answer"])

    if not asked_ids.judge(context, Rules.of(context.node_config), proves):
        if "set" in kept:
            blinded_ids.forget(context, party, text_of(kept["set"]))
        raise ConfigError(
            f"Party {party} has other ids than the label holder has shown to know. align = 'ids' "
            "needs the same ids on both sides. Set align = 'psi' to find the common ids."
        )
    check_name(order.alignment)
    name = np.frombuffer(order.alignment.encode(), np.uint8)
    which = {name: kept[name] for name in ("digest", "method", "file", "rules") if name in kept}
    save_state(context, rows=kept["told"], name=name, answer=answer[-1:], **which)
    if by_psi:
        _keep_set(context, party, kept, answer[-1:])
    return Introduction(party=party, parties=parties)


def _keep_set(context: Context, party: int, kept: Arrays, proof: Points) -> None:
    """Note in the party's set that the label holder knows the ids of these rows."""
    rules, places = rules_of(context, "psi"), kept["places"]
    if "set" in kept:
        blinded_ids.shown(context, party, text_of(kept["set"]), places, rules)
    elif "key" in kept:  # a new set
        shown = np.zeros(len(kept["at"]), bool)
        shown[places] = True
        arrays = {each: kept[each] for each in ("key", "points", "marks")}
        arrays |= {"proof": proof, "lengths": np.array([len(shown)]), "shown": shown}
        blinded_ids.keep(context, party, IdSet(time.time(), int(kept["asked"][0]), arrays))


# --- what several steps check ---------------------------------------------------------------------


def _check_file(kept: Arrays, file: NDArray[np.uint8]) -> None:
    if not np.array_equal(kept["file"], file):
        raise VflError("has other ids than a moment ago: its file has changed. Start the run anew.")


@contextmanager
def _subject(words: str) -> Iterator[None]:
    """Put these words before the message of a `VflError`."""
    try:
        yield
    except ConfigError:
        raise
    except VflError as error:
        raise VflError(f"{words} {error}") from None
