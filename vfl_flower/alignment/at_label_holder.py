"""Which rows all have: the label holder's part of what `alignment.at_party` describes."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from vfl_flower.alignment import blinded_ids, psi
from vfl_flower.alignment.at_party import Order, by_id, of_all
from vfl_flower.alignment.blinded_ids import PartySet
from vfl_flower.alignment.psi import MANY, Blinding, Places, shuffled
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import lasting_secret
from vfl_flower.config.node_rules import Rules
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.row_mask import Alignment
from vfl_flower.data.source import Source
from vfl_flower.transport.base import Transport
from vfl_flower.transport.early_messages import (
    Aligned,
    AlignOrder,
    CommonOrder,
    ConfirmOrder,
    SetKept,
)
from vfl_flower.transport.flower_internals import lasting_home
from vfl_flower.transport.gather import AvailableParties, gather, gather_all
from vfl_flower.transport.messages import SMALL, Introduction, checked

notice = logging.getLogger("flwr.notice")  # which `vfl run` shows too


def align(
    transport: Transport,
    config: RunConfig,
    own: Source,
    run: str,
    there: AvailableParties | None = None,
    lasting: bool = True,
    order: Order | None = None,
) -> Alignment:
    """The label holder's rows that every party has too; parties know theirs.

    With align = 'any' those that `min-parties` have.

    Parameters
    ----------
    run : number of this Flower run.
    there : given to predict with align = 'any', by whoever is there. All rows are used, then.
    lasting : whether blinded ids are kept, and used again.
    order : what decides the order of rows that are found, besides chance or their ids.

    Raises
    ------
    ConfigError, PartyError
        If ids cannot be used or compared, if no row is common to all, or if a party refuses.
    """
    name, about = secrets.token_hex(16), json.dumps(config.values())
    present: NDArray[np.bool_] | None = None
    sets: dict[int, PartySet] = {}
    blinding = Blinding()  # by "ids" it answers questions, so that it has to be a fresh one
    if config.data.align == "ids":
        rows, asked = _all_rows(transport, config, own, blinding)
    else:
        blinding = _lasting_blinding() if lasting else blinding
        sets = _sets(transport, config, own, run, there, lasting)
        rows, present, asked = _common_rows(transport, config, own, blinding, there, sets, order)
    orders, answers = {}, {}
    for node, question in asked.items():
        party = sets[node].party if sets else question.party
        try:
            point = checked(question.arrays, "question", "uint8", (1, 32))
            if sets:
                mine = rows[_rows_asked(question, len(rows), present, party)]
                answer = psi.answer([own.ids[row] for row in mine.tolist()], point)
            else:
                answer = blinding.again(point)
        except VflError as error:
            raise ConfigError(
                f"Party {party} asked nothing that can be answered: {error}"
            ) from None
        orders[node] = ConfirmOrder(alignment=name, config=about, arrays={"answer": answer})
        answers[party] = answer[-1:]
    done = gather(transport, orders, Introduction, config.running.party_timeout, there is not None)
    none = np.zeros((0, 32), np.uint8)
    told = {sets[node].party if sets else each.party: node for node, each in done.items()}
    for node, each in sets.items():
        if lasting and (node in done or each.kept):
            each.keep(answers.get(each.party, none))
    shown = [answers[party] for party in sorted(answers)] or [none]
    return Alignment(name, rows, present, told, np.concatenate(shown))


def _lasting_blinding() -> Blinding:
    """Return the blinding that all alignments by "psi" share.

    So an id is the same point each time, and a party counts it once (`alignment.asked_ids`).
    """
    try:
        return Blinding(lasting_secret(lasting_home() / "blinding.key"))
    except VflError as error:
        notice.warning("Parties count the ids of this alignment as new ones: %s", error)
        return Blinding()


def _all_rows(
    transport: Transport, config: RunConfig, own: Source, blinding: Blinding
) -> tuple[Places, Mapping[int, Introduction]]:
    """All rows, and what the parties ask to see whether theirs are the same."""
    arrays = {"ids": blinding.of_ids([of_all(own.ids)])}
    about = json.dumps(config.values())
    order = AlignOrder(method="ids", id_kind=own.id_kind, config=about, arrays=arrays)
    return by_id(own.ids), gather_all(transport, order, Aligned, config.running)


def _rows_asked(
    question: Introduction, rows: int, present: NDArray[np.bool_] | None, party: int
) -> NDArray[np.int32]:
    """Which rows a party asks about: some that it was told."""
    asked = question.arrays.get("rows", np.zeros(0))
    if asked.dtype != np.int32 or asked.ndim != 1 or not len(asked):
        raise VflError("it names no rows.")
    if asked.min() < 0 or asked.max() >= rows or len(np.unique(asked)) < len(asked):
        raise VflError("it names rows that there are not.")
    if present is not None and not present[asked, party].all():
        raise VflError("it names rows that it does not have.")
    return asked


def _sets(
    transport: Transport,
    config: RunConfig,
    own: Source,
    run: str,
    there: AvailableParties | None,
    lasting: bool,
) -> dict[int, PartySet]:
    """What is known of each party's ids, by node, in the order of the parties."""
    kept = blinded_ids.kept_of(own.whose) if lasting else {}
    order = blinded_ids.naming(kept, run, json.dumps(config.values()))
    answers = gather_all(transport, order, SetKept, config.running, there)
    sets = {}
    for node, answer in answers.items():
        party = answer.party
        path, found = kept.get(party, (None, None))
        if path and found and blinded_ids.has_kept(answer, found, run):
            sets[node] = PartySet(party, own.ids, path, found)
        else:
            sets[node] = PartySet(party, own.ids, blinded_ids.path_of(own.whose, party), None)
    return sets


def _common_rows(
    transport: Transport,
    config: RunConfig,
    own: Source,
    blinding: Blinding,
    there: AvailableParties | None,
    sets: dict[int, PartySet],
    in_order: Order | None,
) -> tuple[Places, NDArray[np.bool_] | None, Mapping[int, Introduction]]:
    """The rows that all have, or so many parties, and who; and what they ask about theirs."""
    any_party, about = config.data.align == "any", json.dumps(config.values())
    timeout, lenient = config.running.party_timeout, there is not None
    of_all = there.parties if there else len(sets)
    order = shuffled(len(own.ids), secrets.token_bytes(16))
    new = [each.new for each in sets.values()] or [np.zeros(len(order), bool)]
    order = order[np.any(new, axis=0)[order]]  # those that are new to any party
    blinded = blinding.of_ids(own.ids, order)
    transport.expect({AlignOrder.kind: SMALL + blinded.nbytes + 36 * Rules.max_ids})
    if len(order) >= MANY:  # no bar shows what parties do
        notice.info("%d ids are sent blinded; parties now blind them and their own.", len(order))
    order_of, orders = AlignOrder(method="psi", id_kind=own.id_kind, config=about), {}
    for node, each in sets.items():
        arrays = {"ids": blinded[each.new[order]]}
        anew = each.kept is None
        orders[node] = replace(order_of, anew=anew, arrays=arrays)
    answers = gather(transport, orders, Aligned, timeout, lenient)
    del blinded, orders  # here and below: large
    places = {}  # by node: where in the party's order each of the label holder's rows is, or -1
    for node in [node for node in sets if node in answers]:
        each = sets[node]
        sent = order[each.new[order]]
        places[node] = _matched(blinding, own.ids, answers.pop(node), each, sent)
        found, asked = int((places[node] >= 0).sum()), int(each.new.sum())
        said = "" if asked == len(own.ids) else f", {asked} of which are new to it"
        notice.info(
            "Party %d has %d of the label holder's %d ids%s.",
            *(each.party, found, len(own.ids), said),
        )
        if not found and there is None:
            raise ConfigError(
                f"Party {each.party} has none of the {len(own.ids)} ids of {own.whose}: are they "
                "the same kind of id, written alike?"
            )
    rows = by_id(own.ids)
    present = np.zeros((len(rows), of_all), bool)
    for node, each_place in places.items():
        present[:, sets[node].party] = each_place[rows] >= 0
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
    told = {}
    for node, each_place in places.items():
        has = present[:, sets[node].party]
        if there is None and not has.any():
            raise ConfigError(
                f"Party {sets[node].party} has none of the {len(common)} rows that are used: lower "
                "min-parties, or leave it out."
            )
        if has.any():  # else there is nothing that it could be told
            told[node] = CommonOrder(config=about, arrays={"places": each_place[common]})
    asked_about = gather(transport, told, Introduction, timeout, lenient)
    return common, present if any_party else None, asked_about


def _matched(
    blinding: Blinding, ids: Sequence[bytes], answer: Aligned, known: PartySet, sent: Places
) -> NDArray[np.int32]:
    """The place of each of the label holder's rows in the party's order, or -1."""
    if answer.party != known.party:
        raise ConfigError(f"Party {known.party} answers as party {answer.party}: start it anew.")
    again = answer.arrays.get("again", np.zeros(0))
    if again.shape[:1] != sent.shape:
        raise ConfigError(
            f"Party {known.party} did not blind again the {len(sent)} ids that it was sent, and "
            "only these."
        )
    theirs, gone = answer.arrays.get("own", again[:0]), answer.arrays.get("gone")
    gone = np.zeros(0, np.int32) if gone is None else gone
    try:
        blinded_ids.check_answer(theirs, gone, len(known.arrays["points"]))
        points = blinding.undone(again)
        psi.check_distinct(points)
        known.learn(sent, psi.outputs([ids[row] for row in sent.tolist()], points), theirs)
        return known.places(gone)
    except VflError as error:
        raise ConfigError(f"Party {known.party} sent {error}") from None
