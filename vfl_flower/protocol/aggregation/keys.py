"""A party's half of masked sums: its keys, and the keys of the other parties.

The party keeps its lasting key in a file. The party's owner gives the public half to the other
parties. A record in ``Context.state`` has the keys of a run, and how far the party has used them.
The party writes this record to no file. A process that reads the record from bytes first notes on
the disk how far the keys have been used. So nobody uses a state twice, even if it comes twice after
a process or its SuperNode was killed.

python -m vfl_flower.protocol.aggregation.keys FOLDER: print the public half of the key in a folder
of states. Make the key if the folder has none.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import ConfigRecord, Context

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import lasting_secret, unsealed, write_whole
from vfl_flower.config.logs import log
from vfl_flower.config.node_rules import Rules
from vfl_flower.protocol.aggregation import masks as masking
from vfl_flower.protocol.aggregation.masks import Masks, Offer, place_of
from vfl_flower.records.ledger import Value, opened_by_party
from vfl_flower.transport.early_messages import KeyMade, KeyOrder
from vfl_flower.transport.messages import Arrays
from vfl_flower.transport.node import index_and_parties, refused, simulated, states_folder

RECORD = "sums"  # name of the record in ``Context.state`` that is written to no file

_FIRST_SEEN = "first-seen"
_LASTING = "sums.key"
_PEER = re.compile(r"(\d+):([0-9a-f]{64})")


# --- the lasting key ----------------------------------------------------------------------------


def lasting_key(folder: Path) -> Ed25519PrivateKey:
    """Return the key of a folder; make the key if the folder has none."""
    path = folder / _LASTING
    try:
        return Ed25519PrivateKey.from_private_bytes(lasting_secret(path))
    except (ValueError, VflError) as error:
        log.warning("The party cannot use its key in %s: %s", path, error)
        raise VflError("cannot use its key for masked sums: its own log says why.") from None


def public_half(lasting: Ed25519PrivateKey) -> str:
    """Return the public half of a lasting key, as 64 hexadecimal digits."""
    return lasting.public_key().public_bytes_raw().hex()


def make_key(context: Context, order: KeyOrder) -> KeyMade:
    """Make a fresh key for this run, and sign it.

    Refuse after an agreement: two sums of one model under different keys could be subtracted.
    """
    party, parties = index_and_parties(context)
    refuse_second(context)
    private = X25519PrivateKey.generate()
    if simulated(context):
        lasting = Ed25519PrivateKey.generate()
    else:
        lasting = lasting_key(states_folder(context))
        log.info("Party %d's key for masked sums is %s", party, public_half(lasting))
    offer = Offer.of(private, lasting, place_of(context.run_id, party, parties))
    context.state[RECORD] = ConfigRecord(
        {"private": private.private_bytes_raw(), "offer": offer.key, "number": 1}
    )
    _note(context, offer.key, 0)
    return KeyMade(party=party, parties=parties, arrays=offer.arrays())


def refuse_second(context: Context) -> None:
    """Raise `VflError` if a party has agreed on keys since it began or resumed."""
    record = context.state.get(RECORD)
    if isinstance(record, ConfigRecord) and "keys" in record:
        raise VflError("has agreed on keys for masked sums already. Resume the run for new keys.")


# --- the keys of the other parties --------------------------------------------------------------


def agree(context: Context, arrays: Arrays, about: bytes) -> tuple[Masks, Arrays]:
    """Agree with the parties of these offers, and of equal ``about``; return masks, and tags."""
    party, parties = index_and_parties(context)
    if parties < 2:
        raise VflError("is the only party, so the sum would be its embedding. Add a party.")
    record = _taken(context)
    private = record.get("private")
    if not isinstance(private, bytes):
        raise VflError("was asked to agree on keys before it made its key. Start the run anew.")
    offers = masking.read_offers(arrays, parties)
    for other, offer in enumerate(offers):
        offer.check(place_of(context.run_id, other, parties))
    if offers[party].key != record["offer"]:
        raise VflError("was sent another key as its own. Start the run anew.")
    if not simulated(context):
        _check_peers(context, party, offers)
    own = X25519PrivateKey.from_private_bytes(private)
    transcript, keys, tags = masking.agreed(own, party, offers, [about])
    del record["private"]
    record["keys"], record["transcript"], record["number"] = keys, transcript, 2
    masks = Masks(party, keys, transcript)
    masks.record = record
    return masks, tags


def _check_peers(context: Context, party: int, offers: list[Offer]) -> None:
    """Raise `ConfigError` if a lasting key differs from its party's known or first seen key."""
    named = peers_of(context)
    known, path = named, states_folder(context) / f"sums-peers-of-{party}.json"
    if not named and path.exists():
        try:
            known = {int(number): key for number, key in json.loads(path.read_text()).items()}
        except (ValueError, AttributeError, OSError):
            raise refused(
                context,
                f"the keys of all other parties: it cannot read {path.name}. Repair it",
            ) from None
    for other, offer in enumerate(offers):
        if other == party:
            continue
        if named and other not in named:
            raise refused(
                context, f"party {other}: its sum-peers has no key of that party. Add its key"
            )
        if known.get(other, offer.identity.hex()) != offer.identity.hex():
            where = "its sum-peers gives" if named else f"its {path.name} gives"
            raise refused(
                context,
                f"the key of party {other}, {offer.identity.hex()}: {where} another key. "
                "Ask that party for its key",
            )
    if not named:
        found = {other: each.identity.hex() for other, each in enumerate(offers) if other != party}
        if known != {**known, **found}:
            for other in found.keys() - known.keys():
                log.warning("Party %d's key, seen for the first time, is %s", other, found[other])
            write_whole(path, json.dumps({**known, **found}).encode())


def peers_of(context: Context) -> dict[int, str]:
    """Return the public keys in the rule ``sum-peers``; none without it, or with ``first-seen``."""
    text = Rules.of(context.node_config).sum_peers
    if text == _FIRST_SEEN:
        return {}
    found = [_PEER.fullmatch(word) for word in text.replace(",", " ").split()]
    if not all(found):
        index, _ = index_and_parties(context)
        raise ConfigError(
            f"Party {index}'s node configuration gives an invalid sum-peers: {text!r}. Name the "
            "parties with their keys, as in '1:HEX 2:HEX', or give 'first-seen'."
        )
    return {int(each[1]): each[2] for each in found if each}


# --- between messages ---------------------------------------------------------------------------


def load(context: Context, live: Masks | None) -> Masks | None:
    """Return the masks after the last message, live or saved; None before the parties agree."""
    record = context.state.get(RECORD)
    if not isinstance(record, ConfigRecord) or "keys" not in record:
        return None
    if live is not None and live.record is record:
        return live
    _taken(context)
    keys, transcript = record["keys"], record["transcript"]
    assert isinstance(keys, bytes) and isinstance(transcript, bytes)
    masks = Masks(index_and_parties(context)[0], keys, transcript)
    masks.record = record
    return masks


def forget(context: Context) -> None:
    """Discard session keys, so that a replaced model cannot reuse its masks."""
    context.state.pop(RECORD, None)


def keep(context: Context, masks: Masks) -> None:
    """Save in the state how far the masks have been used."""
    record = context.state[RECORD]
    assert isinstance(record, ConfigRecord)
    if record["transcript"] != masks.transcript:
        record["transcript"] = masks.transcript
        record["number"] = int(str(record["number"])) + 1
    masks.record = record


def part(context: Context, masks: Masks) -> None:
    """Do as `keep`, after a message that failed; bound masks cancel in no sum from now on.

    Other parties may have learned from the same message, and this party did not.
    """
    record = context.state[RECORD]
    assert isinstance(record, ConfigRecord)
    if record["transcript"] != masks.transcript:
        masks.part()
    keep(context, masks)


def _taken(context: Context) -> ConfigRecord:
    """Return the record, and note on the disk that it is in use. Refuse one that was in use."""
    record = context.state.get(RECORD)
    if not isinstance(record, ConfigRecord):
        raise VflError("has no keys for masked sums. Resume the run from its last checkpoint.")
    number, offer = record["number"], record["offer"]
    assert isinstance(number, int) and isinstance(offer, bytes)
    _note(context, offer, number)
    return record


def _note(context: Context, offer: bytes, number: int) -> None:
    """Note on the disk how far an offer's keys have been used; 0 begins a new offer."""
    if simulated(context):  # its parties have one owner
        return
    name = f"run-{context.run_id}-party-{context.node_config.get('partition-id')}.sums"
    path = states_folder(context) / name
    sentence = "cannot note how far its keys are used: its own log says why."
    with opened_by_party(path, sentence, _earlier_note) as ledger:
        is_older = ledger.content("offer") != offer or ledger.count("number") >= number
        if number == 0 or not is_older:
            ledger.write("offer", offer)
            ledger.write("number", number)
    if number and is_older:
        raise VflError(
            "has an older state of its masked sums, and would use masks twice. Resume the run from "
            "its last checkpoint."
        )


def _earlier_note(path: Path) -> Iterator[tuple[str, int, Value]]:
    """Read the file of an earlier version: an offer and a number."""
    if path.exists():
        content = unsealed(path)
        yield from (("offer", 0, content[:32]), ("number", 0, int.from_bytes(content[32:])))


if __name__ == "__main__":
    print(public_half(lasting_key(Path(sys.argv[1]))))
