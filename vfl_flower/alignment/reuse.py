"""Align once, train often: an alignment is used again while ids and rules stay as they were.

1. After an alignment each side keeps its own half in a file (`alignment.store`): which of its
   rows all have, a digest of all ids of its file, and what shows to a party that this is the label
   holder with which it aligned: the answer to its question (`ConfirmOrder`), which is secret.
2. In a later run the label holder finds its half by its ids, and names that alignment to the
   parties (`ReuseOrder`), each with a proof: a code of the name and of this run, by that secret.
   So who knows the name alone, or has seen the order of another run, is given nothing.
3. A party says what became of it (`Reused`). If all still have it, training begins; else all is
   aligned anew, and a notice says why.

So the label holder learns whether a party's ids are the same as then, and a party that the label
holder's are. Neither learns more; to who shows no proof, a party says that it keeps no such thing.
"""

from __future__ import annotations

import hmac
import json
import logging
import time
from pathlib import Path

import numpy as np
from flwr.app import Context

from vfl_flower.alignment import at_party
from vfl_flower.alignment import store as files
from vfl_flower.alignment.at_label_holder import align
from vfl_flower.alignment.at_party import Order
from vfl_flower.alignment.psi import Places, Points
from vfl_flower.alignment.store import StoredAlignment
from vfl_flower.config.errors import VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.row_mask import Alignment
from vfl_flower.data.source import Source
from vfl_flower.transport.base import Transport
from vfl_flower.transport.early_messages import Reused, ReuseOrder
from vfl_flower.transport.gather import AvailableParties, gather_all

log = logging.getLogger("flwr")
notice = logging.getLogger("flwr.notice")  # which `vfl run` shows too

_DAY = 86400.0
_KEPT, _GONE, _CHANGED, _ENDED = "kept", "gone", "changed", "ended"  # what became of an alignment
_OF_PARTY = {"answer", "digest", "method", "name"}  # arrays of its half, besides rows
_SAID = {
    _GONE: "Party {} does not have the alignment of {} ago any more",
    _CHANGED: "Party {}'s ids have changed since the alignment of {} ago",
    _ENDED: "Party {}'s rules do not let the alignment of {} ago be used any more",
}


# --- the label holder ---------------------------------------------------------------------------


def aligned(
    transport: Transport,
    config: RunConfig,
    own: Source,
    run: str,
    there: AvailableParties | None = None,
    order: Order | None = None,
) -> Alignment:
    """The label holder's rows that every party has too: those of then, or else aligned anew.

    Parameters
    ----------
    run : number of this Flower run.
    there : as in `align`; who is there may change, and all is aligned anew then.
    order : as in `align`; rows of then that are not in such an order are not used again.

    Raises
    ------
    ConfigError, PartyError
        As `align`.
    """
    in_memory = config.data.dataset.startswith("memory:")  # parties are gone with this process
    if in_memory or there:
        return align(transport, config, own, run, there, not in_memory, order)
    file = own.digest(np.arange(len(own.ids)))
    found = _reused(transport, config, own, file, run, order)
    if found:
        return found
    new = align(transport, config, own, run, order=order)
    kept = StoredAlignment(
        name=new.name,
        parties=len(new.answers),
        made=time.time(),
        file=file,
        arrays={"rows": new.rows, "answers": new.answers},
    )
    if new.present is not None:
        kept.arrays["present"] = new.present
    path = files.of_label_holder(_folder(), own.whose, file, _method(config), kept.parties)
    try:
        files.save(path, kept, "of-*.npz")
    except VflError as error:
        notice.warning("The next run has to align anew: %s", error)
    return new


def _reused(
    transport: Transport,
    config: RunConfig,
    own: Source,
    file: str,
    run: str,
    order_of: Order | None,
) -> Alignment | None:
    """The rows of the last alignment of these ids, if the parties have it too."""
    kept = _last(transport, config, own, file)
    if not kept or (order_of and (np.diff(order_of(kept.arrays["rows"])) != 1).any()):
        return None
    codes = [proof_of(answer, kept.name, run) for answer in kept.arrays["answers"]]
    proofs = np.frombuffer(b"".join(codes), np.uint8).reshape(-1, 32)
    about = json.dumps(config.values())
    order = ReuseOrder(alignment=kept.name, config=about, arrays={"proofs": proofs})
    answers = gather_all(transport, order, Reused, config.running)
    ago = files.in_words(files.age(kept))
    if len(answers) != kept.parties:
        words = ago, kept.parties, len(answers)
        notice.info(
            "The alignment of %s ago had %d parties, and this run has %d: rows are aligned anew.",
            *words,
        )
        return None
    lost = [each for each in answers.values() if each.became != _KEPT]
    if lost:
        said = _SAID.get(lost[0].became, _SAID[_GONE]).format(lost[0].party, ago)
        notice.info("%s: rows are aligned anew.", said)
        return None
    rows: Places = kept.arrays["rows"]
    present = kept.arrays.get("present")
    whose = "are common to all" if present is None else "are used"
    notice.info("%d rows %s, by the alignment of %s ago.", len(rows), whose, ago)
    return Alignment(kept.name, rows, present, answers=kept.arrays["answers"])


def _last(
    transport: Transport, config: RunConfig, own: Source, file: str
) -> StoredAlignment | None:
    """The label holder's half of the last alignment of these ids, with as many parties."""

    def newest(path: str, ids: str, parties: int | str) -> StoredAlignment | None:
        pattern = files.of_label_holder(Path(), path, ids, _method(config), parties).name
        found = files.newest_first(_folder(), pattern)
        return files.load(found[0], {"answers"}) if found else None

    nodes = config.running.parties or len(list(transport.get_node_ids()))
    kept = newest("*", file, nodes) or newest("*", file, "*")  # not all may be here yet
    if kept and kept.file == file and _is_half(kept, config, own):
        return kept
    other = newest(own.whose, "*", "*")
    if other and other.file != file:
        ago = files.in_words(files.age(other))
        notice.info(
            "The ids of %s have changed since the alignment of %s ago: rows are aligned anew.",
            *(own.whose, ago),
        )
    return None


def _is_half(kept: StoredAlignment, config: RunConfig, own: Source) -> bool:
    """Whether this can be the label holder's half of an alignment by this method."""
    rows, answers, present = (kept.arrays.get(name) for name in ("rows", "answers", "present"))
    assert rows is not None and answers is not None
    shape, any_party = (len(rows), kept.parties), config.data.align == "any"
    whole = present is None or (present.dtype == np.bool_ and present.shape == shape)
    shown = answers.dtype == np.uint8 and answers.shape == (kept.parties, 32)
    return whole and shown and (present is not None) == any_party and _are_places(rows, own)


def _method(config: RunConfig) -> str:
    """What decides which rows are used, as part of a file's name."""
    data = config.data
    return f"any{data.min_parties}" if data.align == "any" else data.align


# --- a party ------------------------------------------------------------------------------------


def store_rows(context: Context, party: int, parties: int) -> None:
    """Have a party keep the rows that were just confirmed, for later runs."""
    arrays = at_party.confirmed(context)
    rules, folder = Rules.of(context.node_config), _folder(context)
    _forget_old(folder, party, rules)
    if not rules.alignment_days or context.node_config.get("source") == "memory":
        return
    name, file = arrays["name"].tobytes().decode(), arrays["file"].tobytes().hex()
    kept = StoredAlignment(name=name, parties=parties, made=time.time(), file=file, arrays=arrays)
    path = files.of_party(folder, name, party)
    try:
        if not path.exists():  # nor does who has heard of a name take it from whose it is
            files.save(path, kept, _of_party(party))
    except (OSError, VflError) as error:
        log.warning("The party cannot keep this alignment for later runs: %s", error)


def reuse_rows(context: Context, own: Source, parties: int, order: ReuseOrder) -> Reused:
    """What became of an alignment; if nothing, the party uses its rows from now on.

    Raises
    ------
    ConfigError, VflError
        If the party's ids cannot be used, or the order is none.
    """
    assert own.party is not None
    files.check_name(order.alignment)
    proofs = order.arrays.get("proofs", np.zeros(0))
    if proofs.dtype != np.uint8 or proofs.ndim != 2 or proofs.shape[1] != 32:
        raise VflError("was sent no proofs of an alignment.")
    rules, folder = Rules.of(context.node_config), _folder(context)
    kept = files.load(files.of_party(folder, order.alignment, own.party), _OF_PARTY)
    _forget_old(folder, own.party, rules)
    became = _GONE
    if kept and (kept.name, kept.parties, len(proofs)) == (order.alignment, parties, parties):
        code = proof_of(kept.arrays["answer"], kept.name, str(context.run_id))
        if hmac.compare_digest(proofs[own.party].tobytes(), code):
            became = _used(context, own, rules, kept)
    return Reused(party=own.party, parties=parties, became=became)


def _used(context: Context, own: Source, rules: Rules, kept: StoredAlignment) -> str:
    """Have the party use its half, if it still can; what became of it."""
    if not 0 <= files.age(kept) < rules.alignment_days * _DAY:
        return _ENDED
    if kept.file != own.digest(np.arange(len(own.ids))):
        return _CHANGED
    if not _are_places(kept.arrays["rows"], own, least=-1):  # where it lacks a row
        return _GONE
    try:
        at_party.use(context, kept.arrays)
    except VflError as error:
        log.warning("The party %s", error)
        return _ENDED
    return _KEPT


def _forget_old(folder: Path, party: int, rules: Rules) -> None:
    files.forget(folder, _of_party(party), rules.alignment_days * _DAY)


def _of_party(party: int) -> str:
    return f"*-party-{party}.npz"


# --- both ---------------------------------------------------------------------------------------


def _folder(context: Context | None = None) -> Path:
    """Where a side keeps alignments."""
    return files.home("alignments", context)


def _are_places(rows: Places, own: Source, least: int = 0) -> bool:
    """Whether these can be rows of the file."""
    return bool(rows.min() >= least and 0 <= rows.max() < len(own.ids))


def proof_of(answer: Points, name: str, run: str) -> bytes:
    """What only who knows a party's answer can say of an alignment, in one run."""
    return hmac.digest(answer.tobytes(), f"vfl-flower recall|{name}|{run}".encode(), "sha256")
