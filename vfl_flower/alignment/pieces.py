"""Ids in pieces: steps 1 to 3 of `alignment.psi`, with a bounded number of ids in a message.

A message of Flower or of a stream ends at 2 GB, and a party must answer within `party-timeout`. So
the party blinds one piece of the label holder's ids at a time. After the last piece, it sends its
own ids in pieces too, since its rule `min-rows` needs the number of all. Empty orders ask for the
rest of them. Each side shuffles all its ids before it divides them, so that a piece says nothing
about an id. The party refuses a piece out of turn, and an id that comes again counts once.
"""

import hashlib
import secrets
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vfl_flower.alignment import psi
from vfl_flower.alignment.psi import MOST, Blinding, Places, Points
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.logs import notice
from vfl_flower.transport.base import Transport
from vfl_flower.transport.early_messages import Aligned, AlignOrder
from vfl_flower.transport.gather import gather
from vfl_flower.transport.messages import SMALL, Arrays

PIECE = 2**18
"""Most ids of a side in a message: 8 MB of the label holder's, and 16 MB in the answer."""
_TELL = 30.0  # seconds between two lines of progress
_NONE = np.zeros((0, 32), np.uint8)

IdsOf = Callable[[Places], Sequence[bytes]]
"""Function from rows to their encoded ids, or to their keys."""


def outputs_of(ids_of: IdsOf, rows: Places, points: Points, *name: bytes) -> Points:
    """Return `psi.outputs` of these rows, [n, 32]. All encoded ids at once take much memory."""
    made = np.empty_like(points)
    for start in range(0, len(rows), PIECE):
        part = slice(start, start + PIECE)
        made[part] = psi.outputs(ids_of(rows[part]), points[part], *name)
    return made


def proof_of(tags: Points) -> Points:
    """Return a proof of one point, [1, 32], that a side knows these tags in their order."""
    return np.frombuffer(hashlib.blake2b(tags.tobytes(), digest_size=32).digest(), np.uint8)[None]


@contextmanager
def sent(by: int | None = None) -> Iterator[None]:
    """Say in a `VflError` that the party was sent something unusable, or which party sent it."""
    try:
        yield
    except ConfigError:
        raise
    except VflError as error:
        if by is None:
            raise VflError(f"was sent {error}") from None
        raise ConfigError(f"Party {by} sent {error}") from None


# --- the label holder -----------------------------------------------------------------------------


class Reply:
    """A party's answers about some rows, as far as they have come.

    first : the first answer. If it says why the party answers nothing, there are no points.
    rows, points : the rows in the order of sending, [n], and H(id)^b of each, [n, 32].
    own, gone : outputs of the party's new places, [m, 32], and its places without a row.
    order : the order to send, without ids. Its arrays go with the first piece.
    wanted, known : the rows to ask about, bool [N], and the number of places known already.
    """

    first: Aligned
    rows: Places
    points: Points
    gone: NDArray[Any]

    def __init__(
        self, party: int, order: AlignOrder, wanted: NDArray[np.bool_], known: int = 0
    ) -> None:
        self.party, self.order, self.wanted, self.known = party, order, wanted, known
        self.own, self.gone = _NONE, np.zeros(0, np.int32)
        self.sent = self._due = 0  # ids, and ids of the last order
        self.places = self.received = 0  # places that the party says it has, and that have come
        self.ended, self._pieces = False, [_NONE]

    def next(self, ids: Points) -> AlignOrder | None:
        """Return the next order, with these ids; None if there is nothing to ask."""
        if self.ended or (not len(ids) and self.sent < len(self.rows)):
            return None
        order, self._due, self.sent = self.order, len(ids), self.sent + len(ids)
        self.order = replace(order, piece=order.piece + 1, arrays={})
        arrays = {**order.arrays, "ids": ids}
        return replace(order, more=self.sent < len(self.rows), arrays=arrays)

    def read(self, answer: Aligned, blinding: Blinding) -> None:
        """Take the answer to the last order, or raise `ConfigError` if it does not fit."""
        party, due, begins = self.party, self._due, self.order.piece == 1
        self.first = answer if begins else self.first
        if answer.party != party:
            raise ConfigError(f"Party {party} answers as party {answer.party}. Start it anew.")
        if begins and (answer.missing or answer.why):
            self.ended = True
            return
        again = answer.arrays.get("again", np.zeros(0))
        if again.shape[:1] != (due,):
            raise ConfigError(
                f"Party {party} did not blind exactly the {due} ids that it was sent. Start it "
                "anew."
            )
        with sent(by=party):
            points = self.points[self.sent - due : self.sent] = blinding.undone(again)
            psi.check_distinct(points)
            self._read_own(answer)

    def _read_own(self, answer: Aligned) -> None:
        """Take a piece of the party's own ids, or raise `VflError`."""
        own, complete = answer.arrays.get("own", _NONE), self.sent == len(self.rows)
        places = answer.places if complete else 0
        psi.check_points(own)
        if self.known + places > MOST:
            raise VflError(f"{self.known + places} blinded ids, more than {MOST}. Split the data.")
        self.places = self.places if self.received else places
        due = min(PIECE, self.places - self.received)
        if len(own) != due or places != self.places:
            raise VflError(f"{len(own)} of {places} blinded ids, where {due} were due.")
        self._pieces.append(own)  # memory for what has come, not for what is claimed
        self.received += due
        if complete and self.received == places:
            self.ended, self.own, self._pieces = True, np.concatenate(self._pieces), []
        self.gone = answer.arrays.get("gone", self.gone)


def ask(
    transport: Transport,
    blinding: Blinding,
    ids_of: IdsOf,
    replies: dict[int, Reply],
    timeout: float,
    lenient: bool,
) -> dict[int, Reply]:
    """Ask parties about rows, piece by piece; return node -> reply, without failures if lenient."""
    rows = np.flatnonzero(np.any([each.wanted for each in replies.values()], axis=0))
    rows = rows[psi.shuffled(len(rows), secrets.token_bytes(16))]
    for each in replies.values():
        each.rows = rows[each.wanted[rows]]
        each.points = np.empty((len(each.rows), 32), np.uint8)
    known = max([each.known for each in replies.values()], default=0)
    transport.expect({AlignOrder.kind: SMALL + 64 * PIECE + 4 * known})
    start, began, told = 0, time.monotonic(), time.monotonic()
    while not all(each.ended for each in replies.values()):
        some = rows[start : start + PIECE]
        points, start = blinding.of_ids(ids_of(some)), start + PIECE
        asked = {node: each.next(points[each.wanted[some]]) for node, each in replies.items()}
        orders = {node: order for node, order in asked.items() if order}
        answers = gather(transport, orders, Aligned, timeout, lenient)
        failed = orders.keys() - answers.keys()
        replies = {node: each for node, each in replies.items() if node not in failed}
        for node, answer in answers.items():
            replies[node].read(answer, blinding)
        if (now := time.monotonic()) > told + _TELL:
            told = now
            _tell(list(replies.values()), now - began)
    return replies


def _tell(replies: Sequence[Reply], seconds: float) -> None:
    """Log how far an alignment has come, and how long the rest takes at the same pace."""
    from tqdm import tqdm

    done = sum(each.sent + each.received for each in replies)
    total = sum(len(each.rows) + (each.places or len(each.rows)) for each in replies)
    left = tqdm.format_interval(seconds * (total - done) / max(done, 1))
    notice.info("%d of about %d ids of all sides are blinded: about %s left.", done, total, left)


# --- a party --------------------------------------------------------------------------------------


def begun() -> Arrays:
    """Return the party's state before the first piece.

    "turn" has the number of pieces, whether the last ids have come, and the number of own places
    sent. "sent" has the first 8 bytes of each point, ascending.
    """
    return {"turn": np.zeros(3, np.int64), "sent": np.zeros(0, np.uint64)}


def taken(kept: Arrays, order: AlignOrder, ids: Points) -> Arrays:
    """Return "turn" and "sent" after an order's points [n, 32], or raise `VflError` out of turn."""
    turn, complete, own = kept["turn"].tolist() if "turn" in kept else (-1, 0, 0)
    with sent():
        if order.piece != turn or (complete and (order.more or len(ids))):
            raise VflError(f"piece {order.piece} of the ids out of turn. Start the run anew.")
        psi.check_points(ids)
        psi.check_distinct(ids)
        if len(ids) > PIECE:
            raise VflError(f"{len(ids)} ids at once, above the limit of {PIECE}.")
    first = np.ascontiguousarray(ids[:, :8]).view(np.uint64)[:, 0]
    numbers = np.array([turn + 1, not order.more, own], np.int64)
    return {"turn": numbers, "sent": np.union1d(kept["sent"], first)}


def answered(
    changed: Arrays, ids: Points, key: bytes, places: int, own: Callable[[slice], Points]
) -> Arrays:
    """Return the answer to an order; after the last ids, with the next of ``own`` places."""
    with sent():
        answer = {"again": Blinding(key).again(ids)}
    turn = changed["turn"]
    if turn[1]:
        start, turn[2] = int(turn[2]), min(int(turn[2]) + PIECE, places)
        answer["own"] = own(slice(start, int(turn[2])))
        if turn[2] == places:
            del changed["turn"], changed["sent"]
    return answer


def state_after(kept: Arrays, changed: Arrays, last: Arrays, gone: Collection[str]) -> Arrays:
    """Return a party's state after an order; after the last one, with ``last`` and not ``gone``."""
    if "turn" in changed:
        return {name: array for name, array in (kept | changed).items() if name != "shown"}
    gone = {"turn", "sent", *gone}
    both = (kept | changed | last).items()
    return {name: array for name, array in both if name.partition(".")[0] not in gone}


def joined(kept: Arrays, name: str) -> Points:
    """Return points [n, 32] that a party's state has in pieces: ``name.0``, ``name.1`` ..."""
    number = sum(each.startswith(f"{name}.") for each in kept)
    return np.concatenate([_NONE, *(kept[f"{name}.{at}"] for at in range(number))])
