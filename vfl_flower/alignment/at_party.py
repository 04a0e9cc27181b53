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

import secrets
import time

import numpy as np
from flwr.app import Context

from vfl_flower.alignment import asked_ids, blinded_ids, by_rules, pieces, psi, store
from vfl_flower.alignment.blinded_ids import IdSet
from vfl_flower.alignment.psi import Points
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.logs import log
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.ids import by_id, chosen, hint_of_forms
from vfl_flower.data.source import Source
from vfl_flower.transport import early_messages as early
from vfl_flower.transport.messages import Arrays, Introduction

_OF_SET = "set", "key", "at", "asked", "points"
_SAMPLE = 10_000  # most rows of a question; enough to find one stranger in a thousand rows


# --- step 0: find a set ---------------------------------------------------------------------------


def find_set(context: Context, own: Source, parties: int, order: early.SetOrder) -> early.SetKept:
    """Name the set of an earlier alignment, but only to its label holder, who proves it."""
    store.save_state(context)
    rules = store.rules_of(context, "psi")
    found = blinded_ids.find(context, own, order, rules) if rules.align == "psi" else None
    if not found:
        return early.SetKept(party=own.number, parties=parties)
    name = np.frombuffer(found.stored.name.encode(), np.uint8)
    store.save_state(
        context, set=name, known=np.array([found.known]), at=found.at, file=store.digest_of(own)
    )
    return early.SetKept(party=own.number, parties=parties, arrays={"proof": found.proof})


# --- step 2: blind the label holder's ids again, and the party's own ------------------------------


def blind(context: Context, own: Source, parties: int, order: early.AlignOrder) -> early.Aligned:
    """Answer with blinded ids, or with a question under method "ids"."""
    if order.rule:
        return by_rules.blind(context, own, parties, order)
    by_rules.check_ids(own)
    rules, theirs = store.rules_of(context, order.method), order.arrays.get("ids", np.zeros(0))
    store.check_method(rules, order.method)
    places = 0
    if order.method == "ids":
        store.check_fewest(rules, len(own.ids))
        with pieces.sent():
            psi.check_points(theirs)
            arrays = _ask_about_all(context, own, theirs)
    else:
        arrays, places = _blind(context, own, rules, order, theirs)
    return early.Aligned(party=own.number, parties=parties, places=places, arrays=arrays)


def _ask_about_all(context: Context, own: Source, theirs: Points) -> Arrays:
    """Return a question about all ids of the party at once."""
    if len(theirs) != 1:
        raise VflError(f"{len(theirs)} blinded digests instead of one. Start the run anew.")
    question, answer = psi.challenge([psi.digest_of_all(own.ids)], theirs)
    rows = by_id(own.ids)
    about = {
        "digest": store.digest_of(own, rows),
        "method": store.IDS,
        "file": store.digest_of(own),
    }
    store.save_state(context, told=rows, answer=answer, **about)
    return {"question": question}


def _blind(
    context: Context, own: Source, rules: Rules, order: early.AlignOrder, theirs: Points
) -> tuple[Arrays, int]:
    """Return a piece of ids blinded again, at last also own outputs, and the number of these."""
    kept, file = store.saved_state(context), store.digest_of(own)
    if not order.piece:
        if not order.anew and "known" not in kept:
            raise VflError(
                "was asked about new ids of a set, and has found no set. Start the run anew."
            )
        kept = ({"file": file} if order.anew else kept) | pieces.begun()
    changed = pieces.taken(kept, order, theirs)
    store.check_file(kept, file)
    asked, known, in_set = len(changed["sent"]), 0, "set" in kept
    if in_set:
        new, known = asked - len(kept["sent"]), int(kept["known"][0])
        asked_ids.count(context, rules, theirs)
        stored = blinded_ids.asked(context, own.number, store.text_of(kept["set"]), new, rules)
        asked = stored.asked
    if not order.more:
        store.check_fewest(rules, asked)
    if not in_set:
        asked_ids.count(context, rules, theirs)
        kept = kept if order.piece else kept | blinded_ids.fresh(own)
    key = (stored.arrays if in_set else kept)["key"]
    at = kept["at"]

    def outputs(part: slice) -> Points:
        if in_set:
            return stored.arrays["points"][known : len(at)][part]
        made = blinded_ids.own_outputs(own, key, at[part])
        changed[f"points.{part.start // pieces.PIECE}"] = made
        return made

    answer = pieces.answered(changed, theirs, key.tobytes(), len(at) - known, outputs)
    if "turn" not in changed:
        answer["gone"] = np.flatnonzero(at < 0).astype(np.int32)
    shown = stored.arrays["shown"][: len(at)] if in_set else np.zeros(len(at))
    more = {"shown": shown.astype(np.uint8), "asked": np.array([asked])}
    keeps = in_set or blinded_ids.lets(context, rules)
    kept = pieces.state_after(kept, changed, more, set() if keeps else {"key", "points"})
    store.save_state(context, **kept)
    return answer, (len(at) - known) * (not order.more)


# --- step 5: ask whether the label holder knows the ids of the rows -------------------------------


def take_common(
    context: Context, own: Source, parties: int, order: early.CommonOrder
) -> Introduction:
    """Answer with a question about the rows that the label holder names."""
    kept, places = store.saved_state(context), order.arrays.get("places", np.zeros(0))
    if "shown" not in kept or places.dtype != np.int32 or places.ndim != 1:
        raise VflError("was told rows that it was not asked about. Start the run anew.")
    store.check_file(kept, store.digest_of(own))
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
    if "by" not in kept and parties == 1:  # else others may lack the rows
        used = np.zeros(len(own.ids), bool)
        used[mine] = True
        if hint := hint_of_forms(own.ids, used):
            log.warning("Party %d, by its own ids: %s.", own.number, hint)
    store.check_fewest(store.rules_of(context, "psi"), len(mine))
    held = order.arrays.get("held", np.zeros(1, np.int32))
    if held.dtype != np.int32 or held.shape != (1,) or not 0 <= held[0] < len(places):
        raise VflError("was told a wrong number of test rows. Start the run anew.")
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
    of_set = {name: kept[name] for name in kept if name.partition(".")[0] in _OF_SET}
    if "key" in kept:
        of_set["marks"] = blinded_ids.keyed_hashes(own.ids, kept["key"])[at]
    about = {"digest": store.digest_of(own, mine), "method": store.PSI, "file": kept["file"]}
    about |= {"held": held} if held[0] else {}
    about |= {name: kept[name] for name in ("rules", "bits") if name in kept}
    proved_by = {"secret": np.frombuffer(secret, np.uint8), "places": named}
    store.save_state(context, told=rows, **proved_by, **about, **of_set)
    arrays: Arrays = {"question": question, "rows": has[some].astype(np.int32)}
    return Introduction(party=own.number, parties=parties, arrays=arrays)


# --- step 6: check the answer, and use the rows ---------------------------------------------------


def confirm(context: Context, party: int, parties: int, order: early.ConfirmOrder) -> Introduction:
    """Save the common rows, if the label holder has shown that it knows their ids."""
    kept = store.saved_state(context)
    if "told" not in kept:
        raise VflError("was told to use rows, but was told none. Start the run anew.")
    store.save_state(context)
    answer, by_psi = order.arrays.get("answer", np.zeros(0)), "secret" in kept

    def proves() -> bool:
        if by_psi:
            return psi.is_answer(kept["secret"].tobytes(), answer)
        return np.array_equal(answer, kept["answer"])

    if not asked_ids.judge(context, Rules.of(context.node_config), proves):
        if "set" in kept:
            blinded_ids.forget(context, party, store.text_of(kept["set"]))
        raise ConfigError(
            f"Party {party} has other ids than the label holder has shown to know. align = 'ids' "
            "needs the same ids on both sides. Set align = 'psi' to find the common ids."
        )
    store.check_name(order.alignment)
    name = np.frombuffer(order.alignment.encode(), np.uint8)
    lasting = "digest", "method", "file", "rules", "bits", "held"
    which = {name: kept[name] for name in lasting if name in kept}
    store.save_state(context, rows=kept["told"], name=name, answer=answer[-1:], **which)
    rules = store.rules_of(context, "psi")  # note in the party's set what the label holder knows
    if by_psi and "set" in kept:
        blinded_ids.shown(context, party, store.text_of(kept["set"]), kept["places"], rules)
    elif by_psi and "key" in kept:  # a new set
        shown = np.zeros(len(kept["at"]), bool)
        shown[kept["places"]] = True
        arrays = {"key": kept["key"], "marks": kept["marks"]}
        arrays["points"] = pieces.joined(kept, "points")
        arrays |= {"proof": answer[-1:], "lengths": np.array([len(shown)]), "shown": shown}
        blinded_ids.keep(context, party, IdSet(time.time(), int(kept["asked"][0]), arrays))
    return Introduction(party=party, parties=parties)
