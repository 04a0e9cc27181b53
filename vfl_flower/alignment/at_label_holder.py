"""The label holder's half of an alignment: steps 0, 1, 3, 4, 6 of `alignment.psi`.

The party's half is `at_party`. Its docstring says what each side learns.
"""

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from vfl_flower.alignment import blinded_ids, pieces, psi
from vfl_flower.alignment.blinded_ids import PartySet
from vfl_flower.alignment.by_rules import RuleSteps
from vfl_flower.alignment.psi import Blinding, Places, shuffled
from vfl_flower.alignment.rule_figures import lines_of
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import lasting_secret
from vfl_flower.config.logs import notice
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.ids import by_id, chosen, hint_of_forms
from vfl_flower.data.split import Alignment, newest
from vfl_flower.data.tables import Table
from vfl_flower.transport import early_messages as early
from vfl_flower.transport.base import Transport
from vfl_flower.transport.flower_internals import lasting_home
from vfl_flower.transport.gather import AvailableParties, gather, gather_all
from vfl_flower.transport.messages import Introduction, checked

RowOrder = Callable[[Places], Places]
"""Function from rows to a permutation: the position from which to take each row."""
Questions = Mapping[int, Introduction]  # node -> the party's question about its rows


def align(
    transport: Transport,
    config: RunConfig,
    own: Table,
    run: str,
    available: AvailableParties | None = None,
    lasting: bool = True,
    order: RowOrder | None = None,
    node: int | None = None,
) -> Alignment:
    """Align all parties; return the label holder's rows that all, or `min-parties`, have.

    available : the parties to predict with, by align = 'any': all rows are used, and a party that
        fails is left out. ``node`` is then the only one to align.
    lasting : whether to keep blinded ids and use them again.
    order : reorders the rows. Without it, their order is random, or the order of their ids.
    """
    steps = _Steps(transport, config, own, available)
    if config.data.match and config.data.align == "ids":
        raise ConfigError("match finds people by rules, not by ids. Set align = 'psi' or 'any'.")
    if config.data.align == "ids":
        questions = steps.ask_about_all()
    else:
        if lasting:
            steps.blinding = lasting_blinding()
        steps.find_sets(run, lasting and not config.data.match, node)
        places = steps.match_by_rules() if config.data.match else steps.match()
        steps.choose_rows(places, order)
        questions = steps.tell(places)
    return steps.confirm(questions, lasting)


class _Steps:
    """The steps of one alignment, and the label holder's knowledge after each step.

    blinding : the label holder's secret a; fresh with method "ids", where it answers questions.
    sets : node -> what is known of the party's ids; empty with method "ids".
    rows, present : the rows to use, all rows until step 4, and their row mask [N, M].
    known : party -> number of the label holder's ids that it has.
    """

    def __init__(
        self,
        transport: Transport,
        config: RunConfig,
        own: Table,
        available: AvailableParties | None,
    ) -> None:
        self.transport, self.config, self.own, self.available = transport, config, own, available
        self.any = config.data.align == "any"
        self.about = json.dumps(config.values())
        self.timeout, self.lenient = config.running.party_timeout, available is not None
        self.blinding = Blinding()
        self.sets: dict[int, PartySet] = {}
        self.rows = by_id(own.ids)
        self.present: NDArray[np.bool_] | None = None
        self.known: dict[int, int] = {}
        self.held_out = 0
        self.by_rules: RuleSteps | None = None

    # --- method "ids" ---------------------------------------------------------------------------

    def ask_about_all(self) -> Questions:
        """Send one blinded digest of all ids; return the parties' questions about theirs."""
        arrays = {"ids": self.blinding.of_ids([psi.digest_of_all(self.own.ids)])}
        order = early.AlignOrder(method="ids", config=self.about, arrays=arrays)
        return gather_all(self.transport, order, early.Aligned, self.config.running)

    # --- step 0: find the sets that parties keep ------------------------------------------------

    def find_sets(self, run: str, lasting: bool, node: int | None) -> None:
        """Ask each party whether it keeps the set that the label holder keeps; or one node."""
        stored = blinded_ids.stored_sets(self.own.whose) if lasting else {}
        order = blinded_ids.set_order(stored, run, self.about)
        running = self.config.running
        if self.available and node is not None:
            asked = gather(self.transport, {node: order}, early.SetKept, self.timeout, self.lenient)
            new = set(range(self.available.parties)) - self.available.without
            answers = {node: answer for node, answer in asked.items() if answer.party in new}
        else:
            answers = gather_all(self.transport, order, early.SetKept, running, self.available)
        for node, answer in answers.items():
            path, found = stored.get(answer.party, (None, None))
            if not path or not found or not blinded_ids.is_proved(answer, found, run):
                path, found = blinded_ids.path_of(self.own.whose, answer.party), None
            self.sets[node] = PartySet(answer.party, self.own.ids, path, found)

    # --- steps 1 to 3: blind the ids, and find them in the parties' answers ---------------------

    def match(self) -> dict[int, NDArray[np.int32]]:
        """Return node -> the place of each row in the party's order, or -1, [N]."""
        ids, order = self.own.ids, early.AlignOrder(method="psi", config=self.about)
        replies = {}
        for node, each in self.sets.items():
            of_party, known = replace(order, anew=each.stored is None), len(each.arrays["points"])
            replies[node] = pieces.Reply(each.party, of_party, each.new, known)
        replies = pieces.ask(
            *(self.transport, self.blinding, partial(chosen, ids), replies),
            *(self.timeout, self.lenient),
        )
        places = {}
        for node in list(replies):
            each, reply = self.sets[node], replies.pop(node)
            reply.points = pieces.outputs_of(partial(chosen, ids), reply.rows, reply.points)
            with pieces.sent(by=each.party):
                blinded_ids.check_answer(reply.own, reply.gone, len(each.arrays["points"]))
                each.learn(reply.rows, reply.points, reply.own)
                places[node] = each.places(reply.gone)
            del reply  # its points take much memory
            found, new = int((places[node] >= 0).sum()), int(each.new.sum())
            self.known[each.party] = found
            said = "" if new == len(ids) else f", {new} of them new to it"
            notice.info(
                "Party %d has %d of the label holder's %d ids%s.",
                *(each.party, found, len(ids), said),
            )
            if hint := hint_of_forms(ids, places[node] >= 0):
                notice.info("Party %d, by your own ids: %s.", each.party, hint)
            if not found and not self.available:
                raise ConfigError(
                    f"Party {each.party} has none of the {len(ids)} ids of {self.own.whose}. Use "
                    "the same kind of id at both, written the same way."
                )
        return places

    def match_by_rules(self) -> dict[int, NDArray[np.int32]]:
        """Return node -> the place of each row in the party's order, or -1, [N]."""
        parties = {node: each.party for node, each in self.sets.items()}
        order = early.AlignOrder(method="psi", config=self.about)
        self.by_rules = RuleSteps(
            self.transport, self.config, self.own.keys, parties, self.blinding, order, self.lenient
        )
        self.by_rules.match()
        for each in self.by_rules.matches.values():
            found = self.known[each.party] = int((each.places >= 0).sum())
            notice.info(
                "Party %d has %d of the label holder's %d people.",
                *(each.party, found, len(each.places)),
            )
            lines = [*lines_of(each.figures), *filter(None, [each.hint()])]
            for line in lines:
                notice.info("  %s", line)
            if not found and not self.available:
                unused = (" ".join(line.split()) for line in lines if "not used" in line)
                why = "; ".join(line.rstrip(".") for line in unused) or "No key is equal at both"
                raise ConfigError(
                    f"Party {each.party} has none of the {len(each.places)} people of "
                    f"{self.own.whose}. {why}. {each.hint() or 'Check match-columns.'}"
                )
        return {node: each.places for node, each in self.by_rules.matches.items()}

    # --- step 4: choose the rows, and tell the parties ------------------------------------------

    def choose_rows(self, places: Mapping[int, NDArray[np.int32]], order: RowOrder | None) -> None:
        """Keep the rows that all parties have, or enough parties with align = 'any'."""
        parties = self.available.parties if self.available else len(self.sets)
        present = np.zeros((len(self.rows), parties), bool)
        for node, of_party in places.items():
            present[:, self.sets[node].party] = of_party[self.rows] >= 0
        wanted = self.config.data.min_parties if self.any else len(places)
        used = present.sum(1) >= (0 if self.available else wanted)
        self.rows, present = self.rows[used], present[used]
        # In id order, the gaps between a party's own rows would tell it about others.
        if self.any or self.by_rules:
            seed = self.config.privacy.noise_seed
            secret = secrets.token_bytes(16) if seed < 0 else f"{seed} order of rows".encode()
            at = shuffled(len(self.rows), secret)
            self.rows, present = self.rows[at], present[at]
        if order and len(self.rows):
            at = order(self.rows)
            self.rows, present = self.rows[at], present[at]
        if not len(self.rows):
            where = f"{wanted} or more of the" if self.any else "all"
            if self.by_rules:
                raise ConfigError(
                    f"Nobody in {self.own.whose} is at {where} {len(places)} parties."
                )
            raise ConfigError(
                f"No id of {self.own.whose} is at {where} {len(places)} parties. Check that all "
                "use the same ids. Ids are compared as texts: 007 and 7 are two people."
            )
        if self.config.data.split == "time":
            at, self.held_out = newest(self.config.data, self.own.periods(self.rows))
            self.rows, present = self.rows[at], present[at]
        if self.any and not self.available:
            said = "The run uses %d of them, which %d or more parties have."
            notice.info(said, len(self.rows), wanted)
        elif len(places) > 1 and not self.any:
            notice.info("All parties together have %d of them.", len(self.rows))
        self.present = present if self.any else None

    def tell(self, places: Mapping[int, NDArray[np.int32]]) -> Questions:
        """Tell each party the places of the rows; return its question about their ids."""
        orders = {}
        held = {"held": np.array([self.held_out], np.int32)} if self.held_out else {}
        for node, of_party in places.items():
            mine = of_party[self.rows]
            if (mine >= 0).any():
                orders[node] = early.CommonOrder(config=self.about, arrays={"places": mine, **held})
            elif not self.available:
                raise ConfigError(
                    f"Party {self.sets[node].party} has none of the {len(mine)} rows in use. Lower "
                    "min-parties."
                )
        return gather(self.transport, orders, Introduction, self.timeout, self.lenient)

    # --- step 6: answer the parties' questions --------------------------------------------------

    def confirm(self, questions: Questions, lasting: bool) -> Alignment:
        """Show each party that the label holder knows the ids; return the alignment."""
        name, orders, answers = secrets.token_hex(16), {}, {}
        for node, question in questions.items():
            party = self.sets[node].party if self.sets else question.party
            try:
                answer = self._answer(question, party, node)
            except VflError as error:
                raise ConfigError(
                    f"Party {party} asked an invalid question: {error} Start it anew."
                ) from None
            arrays = {"answer": answer}
            orders[node] = early.ConfirmOrder(alignment=name, config=self.about, arrays=arrays)
            answers[party] = answer[-1:]
        done = gather(self.transport, orders, Introduction, self.timeout, self.lenient)
        none = np.zeros((0, 32), np.uint8)
        for node, each in self.sets.items():
            if lasting and not self.by_rules and (node in done or each.stored):
                each.keep(answers.get(each.party, none))
        told = {(self.sets or done)[node].party: node for node in done}
        agreed = [answers[party] for party in sorted(answers) if party in told]
        shown = np.concatenate(agreed or [none])
        known = self.known if self.sets else dict.fromkeys(told, len(self.rows))
        rules = self.by_rules.figures() if self.by_rules else []
        about = told, shown, known, rules, self.held_out
        return Alignment(name, self.rows, self.present, *about)

    def _answer(self, question: Introduction, party: int, node: int) -> psi.Points:
        point = checked(question.arrays, "question", "uint8", (1, 32))
        if not self.sets:
            return self.blinding.again(point)
        asked = question.arrays.get("rows", np.zeros(0))
        if asked.dtype != np.int32 or asked.ndim != 1 or not len(asked):
            raise VflError("it names no rows.")
        if asked.min() < 0 or asked.max() >= len(self.rows) or len(np.unique(asked)) < len(asked):
            raise VflError("it names rows that do not exist, or a row twice.")
        if self.present is not None and not self.present[asked, party].all():
            raise VflError("it names rows that the party lacks.")
        rows, rules = self.rows[asked], self.by_rules
        return psi.answer(rules.keys_of(node, rows) if rules else chosen(self.own.ids, rows), point)


def lasting_blinding() -> Blinding:
    """Return the blinding of all alignments by "psi", so that parties count an id once."""
    try:
        return Blinding(lasting_secret(lasting_home() / "blinding.key"))
    except ConfigError:  # the folder is another user's too
        raise
    except VflError as error:
        notice.warning("Parties count all ids of this alignment as new: %s", error)
        return Blinding()
