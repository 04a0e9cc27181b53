"""Which rows all have: private set intersection of ids, or whether all have the same.

``align = "psi"``, the messages of `vfl_flower.data.psi`, one round for all parties:

1. The label holder blinds its ids, and sends them to every party (`AlignOrder`).
2. A party blinds them again, and its own, in a secret order, and answers both (`Aligned`).
3. The label holder blinds the party's again, and sees which of its own ids the party has.
4. It tells each party which of its rows, by their places in that order, all have (`CommonOrder`).
5. The party asks it to show that it knows their ids, or of many a sample, and then uses them
   (`ConfirmOrder`).

So the label holder learns its intersection with each party, and how many rows the party has. A
party learns which of its ids all have, and how many the label holder has.

``align = "ids"``: all must have the same ids, in any order. The party asks the label holder to show
that it knows a digest of them all, and else gives no rows. So each learns whether the other has the
same ids, and of others nothing.

``align = "any"``: as psi, but a row is used that enough parties have, and a party is told where it
lacks one. So it learns which of its ids the label holder has, and how many rows there are; not who
else has them, and for that rows are in an order that the label holder draws.

Else rows are in the order of their encoded ids, at every party and the label holder. No digest of
ids leaves a party, since whoever guesses ids would find them by it: parties name the alignment
instead (`Description`), and each sees to it itself that its ids stay as they were.

What comes of it is kept, and used again while ids stay as they are (`vfl_flower.data.recall`).
A party's node configuration fixes the method, the fewest rows to align and the most ids to be sent.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, Context
from numpy.typing import NDArray

from vfl_flower.config import RunConfig
from vfl_flower.data.alignment_file import check_name
from vfl_flower.data.psi import (
    MANY,
    Blinding,
    Places,
    Points,
    challenge,
    check_points,
    match,
    shuffled,
)
from vfl_flower.data.source import Source
from vfl_flower.errors import ConfigError, VflError
from vfl_flower.messages import (
    SMALL,
    Aligned,
    AlignOrder,
    Arrays,
    CommonOrder,
    ConfirmOrder,
    Introduction,
    checked,
)
from vfl_flower.party.rules import Rules, simulated
from vfl_flower.runtimes.carrier import Carrier, There, ask, ask_all, ask_present
from vfl_flower.wire import pack, record_of, unpack

notice = logging.getLogger("flwr.notice")  # which `vfl run` shows too

_KEPT = "aligned"  # the record of a party's state
_IDS, _PSI = np.zeros(1, np.uint8), np.ones(1, np.uint8)  # methods, in that record
_OF_LATER_RUNS = "file", "answer"  # arrays in that record: digest of all ids; what proves who asks
_SAMPLE = 10_000  # rows whose ids a party asks about; of more, it finds one stranger in a thousand


Order = Callable[[Places], Places]
"""From rows in some order, where each is to be taken from."""


@dataclass(frozen=True)
class Alignment:
    """Rows of one's own data that a run is of, in common order, and the name of their alignment.

    The label holder draws the name; it says nothing of the rows. A party has -1 for a row that it
    lacks, and only the label holder knows who has which, ``present`` [N, M]; none where all have
    all. ``nodes`` are those that were told, by party. ``answers`` are those by which the label
    holder has shown to each party that it knows their ids, [parties, 32]; nobody else has seen
    them.
    """

    name: str
    rows: Places
    present: NDArray[np.bool_] | None = None
    nodes: Mapping[int, int] = field(default_factory=dict)
    answers: Points = field(default_factory=lambda: np.zeros((0, 32), np.uint8))


# --- the label holder ---------------------------------------------------------------------------


def align(
    carrier: Carrier,
    config: RunConfig,
    own: Source,
    there: There | None = None,
    order: Order | None = None,
) -> Alignment:
    """The label holder's rows that every party has too; parties know theirs.

    With align = 'any' those that `min-parties` have.

    Parameters
    ----------
    there : given to predict with align = 'any', by whoever is there. All rows are used, then.
    order : what decides the order of rows that are found, besides chance or their ids.

    Raises
    ------
    ConfigError, PartyError
        If ids cannot be used or compared, if no row is common to all, or if a party refuses.
    """
    blinding, name = Blinding(), secrets.token_hex(16)
    present: NDArray[np.bool_] | None = None
    if config.data.align == "ids":
        rows, asked = _all_rows(carrier, config, own, blinding)
    else:
        rows, present, asked = _common_rows(carrier, config, own, blinding, there, order)
    orders, answers = {}, {}
    for node, question in asked.items():
        try:
            point = checked(question.arrays, "question", "uint8", (1, 32))
            answer = {"answer": blinding.again(point)}
        except VflError as error:
            raise ConfigError(
                f"Party {question.party} asked nothing that can be answered: {error}"
            ) from None
        orders[node] = ConfirmOrder(alignment=name, arrays=answer)
        answers[question.party] = answer["answer"]
    done = ask(carrier, orders, Introduction, config.running.party_timeout, there is not None)
    asked = {node: each for node, each in asked.items() if node in done}
    told = {each.party: node for node, each in asked.items()}
    shown = [answers[party] for party in sorted(answers)] or [np.zeros((0, 32), np.uint8)]
    return Alignment(name, rows, present, told, np.concatenate(shown))


def _all_rows(
    carrier: Carrier, config: RunConfig, own: Source, blinding: Blinding
) -> tuple[Places, Mapping[int, Introduction]]:
    """All rows, and what the parties ask to see whether theirs are the same."""
    arrays = {"ids": blinding.of_ids([_of_all(own.ids)])}
    order = AlignOrder(method="ids", id_kind=own.id_kind, arrays=arrays)
    return _sorted(own.ids), ask_all(carrier, order, Aligned, config.running)


def _common_rows(
    carrier: Carrier,
    config: RunConfig,
    own: Source,
    blinding: Blinding,
    there: There | None,
    in_order: Order | None,
) -> tuple[Places, NDArray[np.bool_] | None, Mapping[int, Introduction]]:
    """The rows that all have, or so many parties, and who; and what they ask about theirs."""
    any_party = config.data.align == "any"
    order = shuffled(len(own.ids), secrets.token_bytes(16))
    arrays = {"ids": blinding.of_ids(own.ids, order)}
    question = AlignOrder(method="psi", id_kind=own.id_kind, arrays=arrays)
    carrier.expect({AlignOrder.kind: SMALL + arrays["ids"].nbytes + 32 * Rules.max_ids})
    if len(own.ids) >= MANY:  # no bar shows what parties do
        notice.info("%d ids are sent blinded; parties now blind them and their own.", len(own.ids))
    if there is None:
        answers = ask_all(carrier, question, Aligned, config.running)
    else:
        answers = ask_present(carrier, question, Aligned, config.running, there)
    del arrays, question  # here and below: large
    parties = {node: answer.party for node, answer in answers.items()}
    of_all = there.parties if there else len(answers)
    places = {}  # by node: where in the party's order each of the label holder's rows is, or -1
    for node in list(answers):
        answer = answers.pop(node)
        here, theirs = _matched(blinding, answer, len(own.ids))
        places[node] = np.full(len(own.ids), -1, np.int32)
        places[node][order[here]] = theirs
        notice.info(
            "Party %d has %d of the label holder's %d ids.", answer.party, len(here), len(own.ids)
        )
        if not len(here) and there is None:
            raise ConfigError(
                f"Party {answer.party} has none of the {len(own.ids)} ids of {own.whose}: are they "
                "the same kind of id, written alike?"
            )
    rows = _sorted(own.ids)
    present = np.zeros((len(rows), of_all), bool)
    for node, party in parties.items():
        present[:, party] = places[node][rows] >= 0
    wanted = config.data.min_parties if any_party else len(places)
    wanted = 0 if there else wanted
    used = present.sum(1) >= wanted
    common, present = rows[used], present[used]
    if any_party:  # in the order of ids, the gaps between its own would tell a party of others
        seed = config.privacy.noise_seed
        secret = secrets.token_bytes(16) if seed < 0 else f"{seed} order of rows".encode()
        at = shuffled(len(common), secret)
        common, present = common[at], present[at]
    if in_order and len(common):
        at = in_order(common)
        common, present = common[at], present[at]
    if not len(common):
        where = f"{wanted} or more of the" if any_party else "all"
        raise ConfigError(f"No id of {own.whose} is at {where} {len(places)} parties: none to use.")
    if any_party and there is None:
        notice.info("%d of them are used, which %d or more parties have.", len(common), wanted)
    elif len(places) > 1 and not any_party:
        notice.info("All parties together have %d of them.", len(common))
    sent = np.argsort(order)[common].astype(np.int32)
    told = {}
    for node, each in places.items():
        has = present[:, parties[node]]
        if there is None and not has.any():
            raise ConfigError(
                f"Party {parties[node]} has none of the {len(common)} rows that are used: lower "
                "min-parties, or leave it out."
            )
        if has.any():  # else there is nothing that it could be told
            arrays = {"places": each[common], "sent": sent[has]}
            told[node] = CommonOrder(arrays=arrays)
    timeout, lenient = config.running.party_timeout, there is not None
    asked = ask(carrier, told, Introduction, timeout, lenient)
    return common, present if any_party else None, asked


def _matched(blinding: Blinding, answer: Aligned, rows: int) -> tuple[Places, Places]:
    """Places of common ids in the order of the label holder's, and of the party's."""
    again = answer.arrays.get("again", np.zeros(0))
    if again.shape[:1] != (rows,):
        raise ConfigError(
            f"Party {answer.party} did not blind again the {rows} ids that it was sent, and only "
            "these."
        )
    theirs = answer.arrays.get("own", again[:0])
    try:
        check_points(theirs)
        if len(theirs) > Rules.max_ids:
            raise VflError(f"{len(theirs)} blinded ids, and at most {Rules.max_ids} may be.")
        return match(again, blinding.again(theirs))
    except VflError as error:
        raise ConfigError(f"Party {answer.party} sent {error}") from None


# --- a party ------------------------------------------------------------------------------------


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
    _check_fewest(rules, len(own.ids) if order.method == "ids" else len(theirs))
    with _subject("was sent"):
        by = _ask_about_all if order.method == "ids" else _blind_all
        return Aligned(party=own.party, parties=parties, arrays=by(context, own, rules, theirs))


def _ask_about_all(context: Context, own: Source, rules: Rules, theirs: Points) -> Arrays:
    """A question about all ids of the party at once."""
    if len(theirs) != 1:
        raise VflError(f"{len(theirs)} blinded digests, where one is due.")
    question, answer = challenge([_of_all(own.ids)], theirs)
    rows, file = _sorted(own.ids), _digest(own, np.arange(len(own.ids)))
    _keep(context, told=rows, digest=_digest(own, rows), answer=answer, method=_IDS, file=file)
    return {"question": question}


def _blind_all(context: Context, own: Source, rules: Rules, theirs: Points) -> Arrays:
    """The label holder's ids blinded again, and the party's, in a secret order."""
    if len(theirs) > rules.max_ids:
        raise VflError(
            f"{len(theirs)} ids, and takes at most {rules.max_ids}: max-ids in its node "
            "configuration."
        )
    blinding, secret = Blinding(), secrets.token_bytes(16)
    again = blinding.again(theirs)
    mine = blinding.of_ids(own.ids, shuffled(len(own.ids), secret))
    file = _digest(own, np.arange(len(own.ids)))
    _keep(context, sent=theirs, secret=np.frombuffer(secret, np.uint8), file=file)
    return {"again": again, "own": mine}


def take_common(context: Context, own: Source, parties: int, order: CommonOrder) -> Introduction:
    """A party's question about the rows that it is told; it forgets what would serve for others.

    Raises
    ------
    VflError
        If its rules forbid it; or if all cannot have these rows in common, by what it knows.
    """
    assert own.party is not None
    kept = _kept(context)
    places, sent = (order.arrays.get(name, np.zeros(0)) for name in ("places", "sent"))
    if "secret" not in kept or places.dtype != np.int32 or places.ndim != 1:
        raise VflError("was told rows that it was not asked about.")
    if not np.array_equal(kept["file"], _digest(own, np.arange(len(own.ids)))):
        raise VflError("has other ids than a moment ago: its file has changed.")
    has = places != -1
    _check_distinct(places[has], len(own.ids), "rows that it does not have", "a row")
    if len(places) > len(kept["sent"]):
        raise VflError(f"was told {len(places)} rows, and had been sent {len(kept['sent'])} ids.")
    if sent.dtype != np.int32 or sent.shape != (has.sum(),):
        raise VflError("was not told which ids the rows are to have.")
    _check_distinct(sent, len(kept["sent"]), "ids that it had not been sent", "an id")
    _check_fewest(_rules(context, "psi"), len(sent))
    mine = shuffled(len(own.ids), kept["secret"].tobytes())[places[has]]
    some = np.arange(len(mine))
    if len(mine) > _SAMPLE:
        some = shuffled(len(mine), secrets.token_bytes(16))[:_SAMPLE]
    with _subject("was sent"):
        ids = [own.ids[row] for row in mine[some].tolist()]
        question, answer = challenge(ids, kept["sent"][sent[some]])
    rows = np.full(len(places), -1, np.int64)
    rows[has] = mine
    about = {"digest": _digest(own, mine), "method": _PSI, "file": kept["file"]}
    _keep(context, told=rows, answer=answer, **about)
    return Introduction(party=own.party, parties=parties, arrays={"question": question})


def confirm(context: Context, party: int, parties: int, order: ConfirmOrder) -> Introduction:
    """Keep which rows are common, if the label holder has shown that it knows their ids.

    Raises
    ------
    ConfigError, VflError
        If it has not; it is then to begin anew.
    """
    kept = _kept(context)
    if "answer" not in kept:
        raise VflError("was told to use rows that it was not told.")
    _keep(context)
    if not np.array_equal(order.arrays.get("answer", np.zeros(0)), kept["answer"]):
        raise ConfigError(
            f"Party {party} has other ids than the label holder has shown to know: align = 'ids' "
            "demands the same ids, and align = 'psi' finds those that all have."
        )
    check_name(order.alignment)
    name = np.frombuffer(order.alignment.encode(), np.uint8)
    which = {each: kept[each] for each in ("digest", "method", "file", "answer")}
    _keep(context, rows=kept["told"], name=name, **which)
    return Introduction(party=party, parties=parties)


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


def _digest(own: Source, rows: Places) -> NDArray[np.uint8]:
    """Of these rows' ids, for the party's own state alone."""
    return np.frombuffer(bytes.fromhex(own.digest(rows)), np.uint8)


def _keep(context: Context, **arrays: NDArray[Any]) -> None:
    context.state[_KEPT] = pack(arrays)


def _kept(context: Context) -> Arrays:
    if _KEPT not in context.state:
        return {}
    return unpack(record_of(context.state, _KEPT, ArrayRecord))


# --- both ---------------------------------------------------------------------------------------


def _sorted(ids: Sequence[bytes]) -> Places:
    return np.array(sorted(range(len(ids)), key=ids.__getitem__), np.int64)


def _of_all(ids: Sequence[bytes]) -> bytes:
    """A digest of all ids, in any order; it is never sent but blinded."""
    digest = hashlib.sha256()
    for encoded in sorted(ids):  # one by one, since to join millions takes much memory
        digest.update(encoded + b"\n")
    return b"all:" + digest.digest()
