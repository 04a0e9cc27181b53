"""A party's part in masked sums, between messages: its keys, and whom it takes for the others.

The lasting key is in a file of the party's own, and its owner gives the public half to the others.
Keys of a run, and how far they have been used, are in ``Context.state``, in a record that no file
of the party's gets. Whoever reads that record from bytes first notes on the disk how far it is: so
a state that comes twice, since a process or its SuperNode was killed, is not used twice.

python -m vfl_flower.party.masked_sums FOLDER: the public half of the key in a folder of states,
which is made if it is not there.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import ConfigRecord, Context

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import (
    alone_in,
    lasting_secret,
    make_folder,
    unsealed,
    write_sealed,
    write_whole,
)
from vfl_flower.config.node_rules import Rules
from vfl_flower.party import state_file
from vfl_flower.party.state_file import KEYS_OF_SUMS
from vfl_flower.protocol import secure_sum
from vfl_flower.protocol.secure_sum import Masks, Offer, place_of
from vfl_flower.transport.messages import Arrays, KeyMade, KeyOrder
from vfl_flower.transport.node import refused, seat, simulated

log = logging.getLogger("flwr")

_FIRST_SEEN = "first-seen"
_LASTING = "sums.key"
_PEER = re.compile(r"(\d+):([0-9a-f]{64})")


def _folder(context: Context) -> Path:
    return state_file.place(context).parent


# --- the lasting key ----------------------------------------------------------------------------


def lasting_key(folder: Path) -> Ed25519PrivateKey:
    """The key of a folder, which is made if it is not there.

    Raises
    ------
    VflError
        If it cannot be read or written.
    """
    path = folder / _LASTING
    try:
        return Ed25519PrivateKey.from_private_bytes(lasting_secret(path))
    except (ValueError, VflError) as error:
        log.warning("The party's key in %s cannot be used: %s", path, error)
        raise VflError("cannot use its key for masked sums: its own log says why.") from None


def public_half(lasting: Ed25519PrivateKey) -> str:
    """What others are to know of a lasting key, in 64 hexadecimal digits."""
    return lasting.public_key().public_bytes_raw().hex()


def make_key(context: Context, order: KeyOrder) -> KeyMade:
    """A fresh key for this run, signed.

    Raises
    ------
    VflError
        If it has agreed on keys: two sums of one model by different ones could be subtracted.
    """
    party, parties = seat(context)
    refuse_second(context)
    private = X25519PrivateKey.generate()
    if simulated(context):
        lasting = Ed25519PrivateKey.generate()
    else:
        lasting = lasting_key(_folder(context))
        log.info("Party %d's key for masked sums is %s", party, public_half(lasting))
    offer = Offer.of(private, lasting, place_of(context.run_id, party, parties))
    context.state[KEYS_OF_SUMS] = ConfigRecord(
        {"private": private.private_bytes_raw(), "offer": offer.key, "number": 1}
    )
    _note(context, offer.key, 0)
    return KeyMade(party=party, parties=parties, arrays=offer.arrays())


def refuse_second(context: Context) -> None:
    """Raise `VflError` if a party has agreed on keys since it began, or went on."""
    record = context.state.get(KEYS_OF_SUMS)
    if isinstance(record, ConfigRecord) and "keys" in record:
        raise VflError("has agreed on keys for masked sums already: resume the run to have others.")


# --- whom it takes for the others ---------------------------------------------------------------


def agree(context: Context, arrays: Arrays, alike: bytes) -> tuple[Masks, Arrays]:
    """Agree with the others whose keys these are; what uploads are masked by, and tags.

    Parameters
    ----------
    alike : what must be the same at all parties.

    Raises
    ------
    ConfigError, VflError
        If a key is not signed, or by another than this party takes for that one.
    """
    party, parties = seat(context)
    if parties < 2:
        raise VflError("is the only one, of whom a sum is the embedding itself.")
    record = _taken(context)
    private = record.get("private")
    if not isinstance(private, bytes):
        raise VflError("was asked to agree on keys before it had made its own.")
    offers = secure_sum.read_offers(arrays, parties)
    for other, offer in enumerate(offers):
        offer.check(place_of(context.run_id, other, parties))
    if offers[party].key != record["offer"]:
        raise VflError("was sent another key as its own.")
    if not simulated(context):
        _check_peers(context, party, offers)
    found = secure_sum.agreed(X25519PrivateKey.from_private_bytes(private), party, offers, [alike])
    transcript, keys, tags = found
    del record["private"]
    record["keys"], record["transcript"], record["number"] = keys, transcript, 2
    masks = Masks(party, keys, transcript)
    masks.record = record
    return masks, tags


def _check_peers(context: Context, party: int, offers: list[Offer]) -> None:
    """Refuse, by `ConfigError`, keys of others than the node configuration names, or were here."""
    named = peers_of(context)
    known, path = named, _folder(context) / f"sums-peers-of-{party}.json"
    if not named and path.exists():
        try:
            known = {int(number): key for number, key in json.loads(path.read_text()).items()}
        except (ValueError, AttributeError, OSError):
            raise refused(context, f"others' keys, since it cannot read {path.name}") from None
    for other, offer in enumerate(offers):
        if other == party:
            continue
        if named and other not in named:
            raise refused(context, f"party {other}: its sum-peers has no key of that one")
        if known.get(other, offer.identity.hex()) != offer.identity.hex():
            where = "its sum-peers gives" if named else f"it had, by its {path.name}"
            raise refused(
                context,
                f"the key of party {other}, {offer.identity.hex()}: another is what {where}",
            )
    if not named:
        found = {other: each.identity.hex() for other, each in enumerate(offers) if other != party}
        if known != {**known, **found}:
            for other in found.keys() - known.keys():
                log.warning("Party %d's key, seen for the first time, is %s", other, found[other])
            write_whole(path, json.dumps({**known, **found}).encode())


def peers_of(context: Context) -> dict[int, str]:
    """Return the public keys of other parties by the rule ``sum-peers``.

    They are none without that rule, and with ``first-seen``.

    Raises
    ------
    ConfigError
        If it cannot be read.
    """
    text = Rules.of(context.node_config).sum_peers
    if text == _FIRST_SEEN:
        return {}
    found = [_PEER.fullmatch(word) for word in text.replace(",", " ").split()]
    if not all(found):
        raise ConfigError(
            f"Party {seat(context)[0]}'s node configuration gives sum-peers = {text!r}, where "
            "numbers of parties with their keys are due, as in '1:HEX 2:HEX', or 'first-seen'."
        )
    return {int(each[1]): each[2] for each in found if each}


# --- between messages ---------------------------------------------------------------------------


def load(context: Context, live: Masks | None) -> Masks | None:
    """What uploads are masked by, as the last message left it; none before there is agreement.

    Parameters
    ----------
    live : what this process still has of it.

    Raises
    ------
    VflError
        If the state is one that has been used.
    """
    record = context.state.get(KEYS_OF_SUMS)
    if not isinstance(record, ConfigRecord) or "keys" not in record:
        return None
    if live is not None and live.record is record:
        return live
    _taken(context)
    keys, transcript = record["keys"], record["transcript"]
    assert isinstance(keys, bytes) and isinstance(transcript, bytes)
    masks = Masks(seat(context)[0], keys, transcript)
    masks.record = record
    return masks


def forget(context: Context) -> None:
    """Have no keys any more: a model that is another's, or of then, is in no sum with theirs."""
    context.state.pop(KEYS_OF_SUMS, None)


def keep(context: Context, masks: Masks) -> None:
    """Leave in the state how far the masks have been used, whatever became of the message."""
    record = context.state[KEYS_OF_SUMS]
    assert isinstance(record, ConfigRecord)
    if record["transcript"] != masks.transcript:
        record["transcript"] = masks.transcript
        record["number"] = int(str(record["number"])) + 1
    masks.record = record


def part(context: Context, masks: Masks) -> None:
    """As `keep`, after a message that failed: if it was bound, masks vanish in no sum any more.

    All may have been sent it alike, and others may have learned from it where this party did not.
    """
    record = context.state[KEYS_OF_SUMS]
    assert isinstance(record, ConfigRecord)
    if record["transcript"] != masks.transcript:
        masks.part()
    keep(context, masks)


def _taken(context: Context) -> ConfigRecord:
    """The record, which has been noted to be in use from where it stands.

    Raises
    ------
    VflError
        If there is none, or it was in use from there, or from further on.
    """
    record = context.state.get(KEYS_OF_SUMS)
    if not isinstance(record, ConfigRecord):
        raise VflError("has no keys for masked sums: resume the run from its last checkpoint.")
    number, offer = record["number"], record["offer"]
    assert isinstance(number, int) and isinstance(offer, bytes)
    _note(context, offer, number)
    return record


def _note(context: Context, offer: bytes, number: int) -> None:
    """Note on the disk how far the keys of this offer have been used, if that is further than was.

    An offer is noted first with number 0. In a simulation, where all are one's own, nothing is.
    """
    if simulated(context):
        return
    path = state_file.place(context, run=str(context.run_id)).with_suffix(".sums")
    try:
        make_folder(path.parent)
        with alone_in(path.parent):
            before = unsealed(path) if path.exists() else b""
            is_older = before[:32] != offer or int.from_bytes(before[32:]) >= number
            if number == 0 or not is_older:
                write_sealed(path, offer + number.to_bytes(8))
    except (OSError, VflError) as error:
        log.warning("The party cannot note how far its keys are used in %s: %s", path, error)
        raise VflError("cannot note how far its keys are used: its own log says why.") from None
    if number and is_older:
        raise VflError(
            "has an older state of its masked sums, by which it would mask twice alike: resume the "
            "run from its last checkpoint."
        )


if __name__ == "__main__":
    print(public_half(lasting_key(Path(sys.argv[1]))))
