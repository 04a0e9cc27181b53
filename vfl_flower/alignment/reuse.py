"""Reuse of alignments: align once, and train often while ids and rules stay.

1. After an alignment each side stores its half (`alignment.store`): its rows, a digest of all its
   ids, and the label holder's answer to the party's question (`ConfirmOrder`), a secret.
2. In a later run the label holder finds its half by its ids. It names the alignment to the parties
   (`ReuseOrder`), with a proof for each party: a hash of the name and of this run, keyed with that
   answer. A stranger gets nothing by the name, or by an order of another run.
3. A party says what became of the alignment (`Reused`). If all parties still have it, training
   begins. Otherwise the rows are aligned anew, and a notice says why.

So the label holder learns whether a party's ids have changed, and a party learns that the label
holder's have not. Without a proof, a party says that it has no such alignment.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import time
from pathlib import Path

import numpy as np
from flwr.app import Context

from vfl_flower.alignment import store
from vfl_flower.alignment.at_label_holder import RowOrder, align
from vfl_flower.alignment.psi import Places, Points
from vfl_flower.alignment.rule_figures import tables_of
from vfl_flower.alignment.store import StoredAlignment
from vfl_flower.config.errors import VflError
from vfl_flower.config.logs import log, notice
from vfl_flower.config.node_rules import Rules
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.keys import parse
from vfl_flower.data.normalised import VERSION
from vfl_flower.data.source import Source
from vfl_flower.data.split import Alignment, newest
from vfl_flower.data.tables import Table
from vfl_flower.transport.base import Transport
from vfl_flower.transport.early_messages import Reused, ReuseOrder
from vfl_flower.transport.gather import AvailableParties, gather_all
from vfl_flower.transport.messages import Arrays

_KEPT, _GONE, _CHANGED, _ENDED = "kept", "gone", "changed", "ended"  # values of `Reused.became`
_OF_PARTY = {"answer", "digest", "method", "name"}  # arrays of a party's half, besides rows
_SAID = {
    _GONE: "Party {} does not have the alignment of {} ago any more",
    _CHANGED: "Party {}'s {what} have changed since the alignment of {} ago",
    _ENDED: "Party {}'s rules no longer permit the alignment of {} ago",
}


# --- the label holder ---------------------------------------------------------------------------


def aligned(
    transport: Transport,
    config: RunConfig,
    own: Table,
    run: str,
    available: AvailableParties | None = None,
    order: RowOrder | None = None,
) -> Alignment:
    """Return the rows that every party has: by a stored alignment that all still have, or anew."""
    in_memory = config.data.dataset.startswith("memory:")  # parties end with this process
    if in_memory or available:
        return align(transport, config, own, run, available, not in_memory, order)
    folder, file = store.home("alignments"), own.digest(np.arange(len(own.ids)))
    stored = _last(folder, transport, config, own, file)
    found = _reused(transport, config, own, stored, run, order) if stored else None
    if found:
        return found
    new = align(transport, config, own, run, order=order)
    known = np.array(list(new.known.items()), np.int64).reshape(-1, 2)
    arrays: Arrays = {"rows": new.rows, "answers": new.answers, "known": known}
    arrays["held"] = np.array(new.held_out)
    if new.present is not None:
        arrays["present"] = new.present
    if new.rules:
        arrays["rules"] = np.frombuffer(json.dumps(new.rules).encode(), np.uint8)
    stored = StoredAlignment(new.name, len(new.answers), time.time(), file, arrays)
    path = store.of_label_holder(folder, own.whose, file, _method(config), stored.parties)
    try:
        store.save(path, stored, "of-*.npz")
    except VflError as error:
        notice.warning("The next run has to align anew: %s", error)
    return new


def _reused(
    transport: Transport,
    config: RunConfig,
    own: Table,
    stored: StoredAlignment,
    run: str,
    order: RowOrder | None,
) -> Alignment | None:
    """Return a stored alignment, if the parties have it too and its rows are in this order."""
    rows: Places = stored.arrays["rows"]
    if order and (np.diff(order(rows)) != 1).any():
        return None
    held_out = 0
    if config.data.split == "time":  # the column may have changed, or test-fraction
        at, held_out = newest(config.data, own.periods(rows))
        if (np.diff(at) != 1).any() or held_out != stored.arrays["held"]:
            return None
    answers = stored.arrays["answers"]
    proofs = b"".join(proof_of(answer, stored.name, run) for answer in answers)
    arrays = {"proofs": np.frombuffer(proofs, np.uint8).reshape(-1, 32)}
    about = json.dumps(config.values())
    question = ReuseOrder(alignment=stored.name, config=about, arrays=arrays)
    said = gather_all(transport, question, Reused, config.running)
    ago = store.in_words(store.age(stored))
    if len(said) != stored.parties:
        notice.info(
            "The alignment of %s ago had %d parties, and this run has %d: rows are aligned anew.",
            *(ago, stored.parties, len(said)),
        )
        return None
    if lost := next((each for each in said.values() if each.became != _KEPT), None):
        why = _SAID.get(lost.became, _SAID[_GONE]).format(lost.party, ago, what=_what(config))
        notice.info("%s: rows are aligned anew.", why)
        return None
    present = stored.arrays.get("present")
    whose = "are common to all" if present is None else "are used"
    notice.info("%d rows %s, by the alignment of %s ago.", len(rows), whose, ago)
    known = dict(stored.arrays.get("known", np.zeros((0, 2), np.int64)).tolist())
    rules = json.loads(stored.arrays["rules"].tobytes()) if "rules" in stored.arrays else []
    for line in tables_of(rules):
        notice.info("%s", line)
    return Alignment(stored.name, rows, present, {}, answers, known, rules, held_out)


def _last(
    folder: Path, transport: Transport, config: RunConfig, own: Source, file: str
) -> StoredAlignment | None:
    """Return the label holder's half of the last alignment of these ids, or None."""

    def newest(path: str, ids: str, parties: int | str) -> StoredAlignment | None:
        pattern = store.of_label_holder(Path(), path, ids, _method(config), parties).name
        found = store.newest_first(folder, pattern)
        return store.load(found[0], {"answers"}) if found else None

    nodes = config.running.parties or len(list(transport.get_node_ids()))
    stored = newest("*", file, nodes) or newest("*", file, "*")  # more nodes may still connect
    if stored and stored.file == file and _is_half(stored, config, own):
        return stored
    other = newest(own.whose, "*", "*")
    if other and other.file != file:
        notice.info(
            "The %s of %s have changed since the alignment of %s ago: rows are aligned anew.",
            *(_what(config), own.whose, store.in_words(store.age(other))),
        )
    return None


def _is_half(stored: StoredAlignment, config: RunConfig, own: Source) -> bool:
    """Return whether this is a valid label holder's half for the configured method."""
    rows, answers = stored.arrays["rows"], stored.arrays["answers"]
    present = stored.arrays.get("present")
    shape = len(rows), stored.parties
    whole = present is None or (present.dtype == np.bool_ and present.shape == shape)
    shown = answers.dtype == np.uint8 and answers.shape == (stored.parties, 32)
    by_any = config.data.align == "any"
    return whole and shown and (present is not None) == by_any and _are_places(rows, own)


def _what(config: RunConfig) -> str:
    return "people" if config.data.match else "ids"


def _method(config: RunConfig) -> str:
    """Return the method that chooses the rows, as a part of a file's name."""
    data = config.data
    method = f"any{data.min_parties}" if data.align == "any" else data.align
    if data.match:
        text = f"{VERSION}|{data.match_error}|{';'.join(map(str, parse(data.match)))}"
        method += hashlib.sha256(text.encode()).hexdigest()[:16]
    if data.split == "time":
        method += hashlib.sha256(f"time|{data.time}".encode()).hexdigest()[:16]
    return method


# --- a party ------------------------------------------------------------------------------------


def store_rows(context: Context, party: int, parties: int) -> None:
    """Store a party's confirmed rows for later runs."""
    arrays, rules = store.confirmed(context), Rules.of(context.node_config)
    if context.node_config.get("source") == "memory":
        return
    folder = store.home("alignments", context)
    store.forget_old(folder, party, rules)
    if not rules.alignment_days:
        return
    name, file = store.text_of(arrays["name"]), arrays["file"].tobytes().hex()
    path = store.of_party(folder, name, party)
    try:
        if not path.exists():  # a label holder who knows a name must not replace its alignment
            stored = StoredAlignment(name, parties, time.time(), file, arrays)
            store.save(path, stored, store.every_of_party(party))
    except (OSError, VflError) as error:
        log.warning("The party cannot keep this alignment for later runs: %s", error)


def reuse_rows(context: Context, own: Source, parties: int, order: ReuseOrder) -> Reused:
    """Say what became of an alignment; if it is still valid, use its rows."""
    store.check_name(order.alignment)
    proofs = order.arrays.get("proofs", np.zeros(0))
    if proofs.dtype != np.uint8 or proofs.ndim != 2 or proofs.shape[1] != 32:
        raise VflError("was sent no proofs of an alignment. Start the run anew.")
    rules, folder = Rules.of(context.node_config), store.home("alignments", context)
    stored = store.load(store.of_party(folder, order.alignment, own.number), _OF_PARTY)
    store.forget_old(folder, own.number, rules)
    became, said = _GONE, (order.alignment, parties, parties)
    if stored and (stored.name, stored.parties, len(proofs)) == said:
        proof = proof_of(stored.arrays["answer"], stored.name, str(context.run_id))
        if hmac.compare_digest(proofs[own.number].tobytes(), proof):
            became = _used(context, own, rules, stored)
    return Reused(party=own.number, parties=parties, became=became)


def _used(context: Context, own: Source, rules: Rules, stored: StoredAlignment) -> str:
    """Use the party's half, if it is still valid; return what became of it."""
    if not store.is_valid(stored, rules):
        return _ENDED
    if stored.file != own.digest(np.arange(len(own.ids))):
        return _CHANGED
    if not _are_places(stored.arrays["rows"], own, least=-1):  # -1 for a row that it lacks
        return _GONE
    try:
        store.use(context, stored.arrays)
    except VflError as error:
        log.warning("The party %s", error)
        return _ENDED
    return _KEPT


# --- both ---------------------------------------------------------------------------------------


def _are_places(rows: Places, own: Source, least: int = 0) -> bool:
    """Return whether all rows are from ``least`` to the last row of the file."""
    return bool(rows.min() >= least and 0 <= rows.max() < len(own.ids))


def proof_of(answer: Points, name: str, run: str) -> bytes:
    """Return the proof of an alignment for one run, 32 bytes, from the secret answer."""
    return hmac.digest(answer.tobytes(), f"vfl-flower recall|{name}|{run}".encode(), "sha256")
