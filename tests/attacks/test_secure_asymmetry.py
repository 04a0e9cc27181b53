"""Attacks by equal orders to all parties, which act differently at some of them.

As in `tests.attacks.test_secure_attacks`, each attack works where its defence is not.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.aligning import IDS, LabelHolder
from tests.organisations import ID, small, write
from tests.party.nodes import asked, refused
from tests.secure import Parties, Rows, gradient, total
from vfl_flower.config.errors import ConfigError, SumError, VflError
from vfl_flower.data import at_party
from vfl_flower.data.at_party import prepared
from vfl_flower.data.split import divide
from vfl_flower.party import session as between
from vfl_flower.party.inputs import own_source
from vfl_flower.party.party import Party
from vfl_flower.protocol.aggregation import keys as sum_keys
from vfl_flower.protocol.aggregation import masks
from vfl_flower.protocol.aggregation.masks import Masks, check_tags
from vfl_flower.transport.early_messages import KeyMade, KeyOrder
from vfl_flower.transport.flower_internals import begin_task
from vfl_flower.transport.messages import (
    Arrays,
    CheckpointOrder,
    DescribeOrder,
    Description,
    EvaluateOrder,
    Order,
    Predicted,
    PredictOrder,
    ResumeOrder,
    TrainOrder,
)


@pytest.fixture(autouse=True)
def new_process() -> None:
    begin_task()
    between.live.clear()


def embedded(parties: Parties, kind: type[Order], steps: int = 1) -> list[Rows]:
    """Return each party's embeddings, of its test rows or of its first mini-batches."""
    found: list[Rows] = []
    for number in range(len(parties.nodes)):
        one = between.live[number, len(parties.nodes)].party
        ids = one._draw(replace(PASS, steps=steps), b"").ids if kind is TrainOrder else None
        rows = one.inputs.block.test if ids is None else one.inputs.block.train
        found.append(one.learner.embeddings(rows, ids).numpy())
    return found


# --- messages that fail at some parties alone ---------------------------------------------------

PASS = TrainOrder(exchange=1, epoch=0, first=0, steps=1, coordinated=True)
FIRST: dict[str, Any] = {"epoch": 0, "first": 0, "steps": 1, "coordinated": True}
FEEDBACK = {1: gradient(1.0), 15: gradient(1.0, 455)}  # for so many mini-batches


class Alike:
    """A label holder that tells all parties the same, whoever of them fails."""

    def __init__(self, parties: Parties) -> None:
        self.nodes = parties.nodes
        self.served = [0] * len(parties.nodes)

    def tell(self, kind: Any, failing: Collection[int] = (), **order: Any) -> list[Arrays]:
        """Return the answers of the parties that do not fail."""
        answers, failed = [], set()
        for party, node in enumerate(self.nodes):
            try:
                answers.append(asked(node, kind(exchange=self.served[party] + 1, **order)).arrays)
                self.served[party] += 1
            except VflError:
                failed.add(party)
        assert failed == set(failing)
        return answers


@pytest.mark.parametrize("defended", [True, False])
@pytest.mark.parametrize("rule", ["max-epochs", "max-uploads"])
def test_who_refuses_feedback_that_another_learns_from_is_in_no_sum_any_more(
    tmp_path: Path, rule: str, defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parties 1 and 2 have a rule by which they refuse a message, and party 0 has none."""
    if not defended:
        monkeypatch.setattr(sum_keys, "part", sum_keys.keep)
    parties = Parties(tmp_path, keys=[{"epochs": 1}] * 3)
    for node in parties.nodes[1:]:
        node.node_config[rule] = {"max-epochs": 1, "max-uploads": 2}[rule]
    parties.ready()
    all_of_them = Alike(parties)
    tell, some, every = all_of_them.tell, {1, 2}, {0, 1, 2}
    kind: type[Order] = EvaluateOrder if rule == "max-epochs" else TrainOrder
    order = {} if rule == "max-epochs" else FIRST
    if rule == "max-uploads":
        tell(EvaluateOrder)
        tell(EvaluateOrder)
    first, before = total(tell(kind, **order)), embedded(parties, kind)
    if rule == "max-epochs":
        tell(TrainOrder, **{**FIRST, "steps": 15})
        tell(TrainOrder, some, **{**FIRST, "epoch": 1}, arrays=FEEDBACK[15])
        tell(CheckpointOrder, every, number=1)  # feedback that is missing is not awaited any more
    else:
        tell(EvaluateOrder, some, arrays=FEEDBACK[1])
        tell(CheckpointOrder, some, number=1)
    uploads = tell(kind, **order)
    if defended:
        with pytest.raises(SumError):
            total(uploads)
        return
    change = [after - then for after, then in zip(embedded(parties, kind), before, strict=True)]
    assert np.abs(change[0]).max() > 0.1 and not change[1].any() and not change[2].any()
    np.testing.assert_allclose(total(uploads) - first, change[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attempt", ["to begin anew", "to predict", ""])
def test_who_refuses_an_order_does_not_let_go_of_its_keys(tmp_path: Path, attempt: str) -> None:
    """By which it would have others, with the model that it has."""
    parties = Parties(tmp_path).ready()
    parties.exchange = 1
    parties.ask([CheckpointOrder(exchange=1, number=1)] * 3)
    node = parties.nodes[0]
    if attempt == "to begin anew":
        node.run_config["embedding-size"] = "three"
        refused(node, DescribeOrder(outputs=1), "must be a whole number")
        del node.run_config["embedding-size"]
    elif attempt == "to predict":
        refused(node, PredictOrder(run="1", number=1), "has agreed on keys for masked sums already")
    else:  # the control: who begins anew does
        asked(node, DescribeOrder(outputs=1), Description)
        assert asked(node, KeyOrder(), KeyMade)
        return
    refused(node, KeyOrder(), "has agreed on keys for masked sums already")
    assert total(parties.evaluated()).any()


# --- rows that are not the same at all ----------------------------------------------------------


def with_files(
    folder: Path,
    run: int,
    gaps: Sequence[int] = (-1, -1, -1),
    first: Sequence[int] = (),
    sizes: Sequence[int] = (3, 3, 3),
) -> Parties:
    """Parties whose files have equal ids, told 59 ids in one order, each with another gap.

    Parameters
    ----------
    gaps : the place where each is told that it lacks a row; below 0 nowhere.
    first : rows that come before others.
    sizes : embedding sizes, set in each node configuration.
    """
    begin_task()
    parties = Parties(folder, run=run)
    order = [*first, *(row for row in range(59) if row not in first)]
    for number, (node, gap) in enumerate(zip(parties.nodes, gaps, strict=True)):
        file, table = folder / f"{number}.csv", small().drop(columns="label")
        features = [name for name in table if name != ID]
        table[features] = np.roll(table[features], number, axis=0)
        write(table, file)
        node.node_config |= {"file": str(file), "id": ID, "embedding-size": sizes[number]}
        node.run_config |= {"dataset": "files:elsewhere.csv"}
        told = LabelHolder(node, IDS)
        told.align()
        places = told.places[np.argsort(told.sent)][order]
        told.tell(np.insert(places, gap, -1) if gap >= 0 else places, np.array(order))
        told.confirm()
    return parties


def predicted(parties: Parties) -> list[Arrays]:
    """Return all answers to a prediction of those rows, by the first run's initial models."""
    order = PredictOrder(run="1", number=0, arrays=parties.offers())
    sent = [asked(node, order, Predicted).arrays for node in parties.nodes]
    check_tags(sent)
    return sent


def own(party: Party, parties: Parties, rows: Any) -> Rows:
    """A party's embeddings of rows of its file, which the label holder does not see."""
    source = own_source(parties.nodes[party.learner.index])
    preparation = party.inputs.block.preparation
    assert preparation
    return party.learner.embeddings(prepared(source, np.array(rows), preparation)).numpy()


@pytest.mark.parametrize("defended", [True, False])
def test_a_row_that_one_party_is_told_to_lack_does_not_shift_its_others(
    tmp_path: Path, defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a sum were of one person at party 0 and of the next at the others, of the same ids."""
    if not defended:
        monkeypatch.setattr(at_party, "_check_has_all", lambda own, common: None)
    parties = with_files(tmp_path, 1, gaps=(3, 40, 40))
    if defended:
        with pytest.raises(VflError, match="lacks rows that all parties need"):
            parties.begin()
        return
    parties.ready()
    shifted, one = total(parties.evaluated()), between.live[0, 3].party
    test = divide(one.config.data, 60)[1]
    here, there = (np.insert(np.arange(59), gap, -1)[test] for gap in (3, 40))
    together = total(predicted(with_files(tmp_path, 2)))  # by the same models
    apart: Rows = own(one, parties, here) - own(one, parties, there)  # of two persons, at one party
    assert np.abs(apart).max() > 0.1
    np.testing.assert_allclose(shifted - together[there], apart, atol=1e-4)


@pytest.mark.one_by_day
@pytest.mark.parametrize("defended", [True, False])
def test_embeddings_of_another_size_are_in_no_sum(
    tmp_path: Path, defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one row of party 0, whose embeddings are shorter, would be beside another of others."""
    sizes = 3, 6, 6
    parties = with_files(tmp_path, 1, sizes=sizes)
    parties.begin()
    if defended:
        with pytest.raises(ConfigError, match="Parties 0 and 1 have no key"):
            parties.agree()
        return
    monkeypatch.setattr(Party, "alike", property(lambda party: b""))
    parties.agree()
    one, seen = between.live[0, 3].party, []
    for run, first in enumerate([(0, 1), (0, 9)], 2):
        sent = predicted(with_files(tmp_path, run, first=first, sizes=sizes))
        flat = [
            {"embedding": np.append(each["embedding"][3:6], np.zeros(4, "i4"))} for each in sent
        ]
        seen.append(total(flat))
    apart = own(one, parties, [9]) - own(one, parties, [1])
    assert np.abs(apart).max() > 0.1
    np.testing.assert_allclose(seen[1] - seen[0], apart, atol=1e-4)


# --- what a refusal would tell ------------------------------------------------------------------


@pytest.mark.parametrize("defended", [True, False])
def test_whose_embeddings_are_too_large_is_not_told(
    tmp_path: Path, defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else, by feedback that is scaled until a party refuses, a product of two of its rows is."""
    keys = {"batch-size": 1, "party-lr": 0.1, "embedding-activation": "none"}
    parties = Parties(tmp_path, keys=[keys] * 3).ready()
    parties.exchange = 1
    parties.ask([CheckpointOrder(exchange=1, number=1)] * 3)

    def pushed(scale: float) -> list[Arrays]:
        """Uploads of the second row, from the checkpoint on, after feedback for the first."""
        for node in parties.nodes:
            asked(node, ResumeOrder(run="1", number=1), Description)
        parties.agree()
        parties.exchange = 1
        parties.trained()
        return parties.trained([{"gradient": np.array([[scale, 0, 0]], np.float32)}] * 3, first=1)

    if defended:
        with pytest.raises(SumError):
            total(pushed(1e6))
        with pytest.raises(SumError):  # nor by any later order
            total(parties.evaluated([{"gradient": np.zeros((1, 3), np.float32)}] * 3))
        assert total(pushed(1.0)).any()
        return

    def refuse(self: Masks) -> None:
        raise VflError(f"of number {self.party} has embeddings that are too large.")

    monkeypatch.setattr(Masks, "part", refuse)
    monkeypatch.setattr(sum_keys, "part", sum_keys.keep)
    least, most = 1.0, 1e6
    for _ in range(12):
        scale = (least * most) ** 0.5
        try:
            pushed(scale)
        except VflError as error:
            assert "of number 0 " in str(error)  # the first that is asked
            most = scale
        else:
            least = scale
    one = between.live[0, 3].party
    window = [one._draw(replace(PASS, first=at), b"").ids[0] for at in (0, 1)]
    x = np.asarray(one.inputs.block.train[window])
    assert masks.BOUND / (0.1 * most) == pytest.approx(abs(x[0] @ x[1] + 1), rel=0.02)


# --- what remains -------------------------------------------------------------------------------


def moved_by(parties: Parties, feedback: Arrays) -> tuple[Rows, list[Rows]]:
    """Return the change of the sum, and of each party, after equal feedback to all."""
    then, first = embedded(parties, EvaluateOrder), total(parties.evaluated())
    total(parties.trained())
    second, now = (total(parties.evaluated([feedback] * 3)), embedded(parties, EvaluateOrder))
    return second - first, [after - before for after, before in zip(now, then, strict=True)]


@pytest.mark.parametrize("keys", [{"embedding-activation": "relu"}, {}], ids=["relu", "default"])
def test_where_units_are_dead_at_all_others_one_party_alone_learns(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    """No sum hides this under relu: with three parties, in a third of rows and units."""
    parties = Parties(tmp_path, own=keys, keys=[keys] * 3).ready()
    alive = np.stack([each > 0 for each in embedded(parties, TrainOrder)])
    places = np.argwhere(alive[0] & ~alive[1] & ~alive[2])
    assert len(places) > alive[0].size / 20
    feedback = gradient(0.0)
    feedback["gradient"][tuple(places[0])] = 100.0
    change, of_each = moved_by(parties, feedback)
    assert np.abs(of_each[0]).max() > 0.1
    others = max(float(np.abs(each).max()) for each in of_each[1:])
    if not keys:  # each learns from each row
        assert others > 0.1
        return
    assert others == 0
    np.testing.assert_allclose(change, of_each[0], atol=1e-3)


RULES = {"aggregation": "secure", "sum-peers": "first-seen"}


def kill_units_of_others(parties: Parties, unit: int) -> None:
    """Send all the same feedback, by which this unit dies at all parties but party 0.

    Feedback pushes the unit down on rows where it is alive at others, and up where at party 0
    alone. A label holder finds these rows by trials from a checkpoint; here they are read.
    """
    for _ in range(6):
        parties.trained(steps=15)
        alive = np.stack(embedded(parties, TrainOrder, 15))[:, :, unit] > 0
        feedback = gradient(0.0, alive.shape[1])
        feedback["gradient"][alive[1:].any(0), unit] = 0.3
        feedback["gradient"][alive[0] & ~alive[1:].any(0), unit] = -0.1
        parties.evaluated([feedback] * 3)


@pytest.mark.parametrize("permitted", [True, False])
def test_the_label_holder_cannot_have_units_die_at_all_parties_but_one(
    tmp_path: Path, permitted: bool
) -> None:
    """So a sum would become one party's embedding: the control, where parties permit relu."""
    relu = {"embedding-activation": "relu"}
    seed = {"noise-seed": 0}  # so that the same units are alive in each run of this test
    own = {**RULES, **seed, **(relu if permitted else {})}
    parties = Parties(tmp_path, own=own, keys=[{**relu, **seed}] * 3)
    if not permitted:
        with pytest.raises(VflError, match="refuses embedding-activation = 'relu' in masked sums"):
            parties.begin()
        for other in ("sigmoid", "tanh"):  # their units stop learning, too
            parties.nodes[0].run_config["embedding-activation"] = other
            with pytest.raises(VflError, match=f"{other}' .* gives no embedding-activation"):
                parties.begin()
        return
    parties.ready()
    kill_units_of_others(parties, unit=0)
    of_sum, of_party = total(parties.evaluated())[:, 0], parties.embeddings(0)[:, 0]
    assert of_party.max() > 1 and np.abs(of_sum - of_party).max() < 1e-5


def test_a_party_goes_on_with_no_activation_that_it_does_not_permit_any_more(
    tmp_path: Path,
) -> None:
    relu = {"embedding-activation": "relu"}
    parties = Parties(tmp_path, own={**RULES, **relu}, keys=[relu] * 3).ready()
    for node in parties.nodes:
        del node.node_config["embedding-activation"]
    with pytest.raises(VflError, match="refuses embedding-activation = 'relu' in masked sums"):
        parties.evaluated()


@pytest.mark.parametrize("own", [{"weight-decay": 0.1}, {}], ids=["own", "as all"])
def test_who_learns_without_feedback_where_others_do_not_is_seen(
    tmp_path: Path, own: dict[str, Any]
) -> None:
    """No sum hides this: feedback of zeros shows a party that is trained differently."""
    parties = Parties(tmp_path)
    parties.nodes[0].node_config |= own
    parties.ready()
    change, of_each = moved_by(parties, gradient(0.0))
    assert not of_each[1].any() and not of_each[2].any()
    assert bool(np.abs(of_each[0]).max() > 0.01) == bool(own)
    np.testing.assert_allclose(change, of_each[0], atol=2e-5)
