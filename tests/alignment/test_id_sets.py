"""Blinded ids that are kept: what is asked about again, that nothing is missed, and who may ask."""

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context, Message
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import aligning
from tests.aligning import IDS, STRANGE, LabelHolder, asked, count_of, in_a_later_run, node_in
from tests.conftest import nightly
from tests.organisations import ID, Organisations, change, cut, small, write
from vfl_flower import client_app
from vfl_flower.alignment import blinded_ids, psi
from vfl_flower.alignment import store as files
from vfl_flower.alignment.at_label_holder import align
from vfl_flower.alignment.psi import Blinding
from vfl_flower.config.errors import VflError
from vfl_flower.data.at_label_holder import own_table
from vfl_flower.data.ids import encode_ids
from vfl_flower.launch.engines import run_local
from vfl_flower.party.state import load_arrays
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport.early_messages import Aligned, AlignOrder, SetKept, SetOrder
from vfl_flower.transport.flower_internals import lasting_home
from vfl_flower.transport.gather import AvailableParties
from vfl_flower.transport.local import LocalGrid
from vfl_flower.transport.wire import to_reply

SHORT: dict[str, Any] = {"epochs": 1, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8}
DAY = 86400


@pytest.fixture
def organisations(tmp_path: Path) -> Organisations:
    return cut(tmp_path, small())


@pytest.fixture
def node(tmp_path: Path) -> Context:
    return node_in(tmp_path)


@pytest.fixture
def blinded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many points were blinded, or had a blinding taken away, in each call."""
    counts: list[int] = []
    rows = psi._blinded_rows

    def counting(blind: Any, n: int) -> Any:
        if n > 1:  # else a question, or its answer
            counts.append(n)
        return rows(blind, n)

    monkeypatch.setattr(psi, "_blinded_rows", counting)
    yield counts


def aligned(organisations: Organisations, client: Any = client_app.app, **keys: Any) -> Any:
    out = tempfile.mkdtemp(dir=organisations.folder)
    run_config = {**organisations.keys, "task": "align", "out": f"{out}/run", **keys}
    each = organisations.node_configs
    return run_local(len(each), run_config, client, each).summary["rows"]


def sets(pattern: str = "*") -> list[Path]:
    return sorted((lasting_home() / "sets").glob(pattern))


def with_ids(*numbers: int) -> Callable[[pd.DataFrame], pd.DataFrame]:
    def added(frame: pd.DataFrame) -> pd.DataFrame:
        more = [frame[:1].assign(**{ID: number}) for number in numbers]
        return pd.concat([*more, frame])

    return added


# --- what is blinded ----------------------------------------------------------------------------


def test_only_new_ids_are_blinded(organisations: Organisations, blinded: list[int]) -> None:
    assert aligned(organisations) == 48
    assert sum(blinded) == 60 + 2 * (60 + 54 + 60)
    blinded.clear()
    change(organisations.labels, with_ids(7001, 7002, 7003))
    assert aligned(organisations) == 48
    assert blinded == [3] + 2 * [3] + 2 * [3]  # at the label holder, and with each party
    blinded.clear()
    for file in organisations.files:
        change(file, lambda frame: with_ids(7002, 7003, 8001)(frame[2:]))
    assert aligned(organisations) == 46
    assert blinded == 2 * [3]
    blinded.clear()
    change(organisations.files[0], lambda frame: frame[::-1])
    change(organisations.labels, lambda frame: frame[2:])
    assert aligned(organisations) < 46
    assert blinded == []


def test_predictions_ask_about_new_people(organisations: Organisations, blinded: list[int]) -> None:
    organisations.run("run", {**SHORT, "align": "any"})
    new = organisations.folder / "new.csv"
    more = pd.DataFrame({ID: [*range(1000, 1020), *range(9000, 9010)]})
    write(more, new)
    change(organisations.files[1], with_ids(9001, 9002))
    blinded.clear()
    outs = []
    for number in range(2):
        out = str(new.with_name(f"{number}.csv"))
        outs.append(organisations.predict("run", new, out=out))
    assert blinded == [2, 10] + 2 * [10] + 2 * [10]
    pd.testing.assert_frame_equal(*outs)
    assert outs[0]["parties"][21] == outs[0]["parties"][22] == "1"
    assert (outs[0]["parties"][23:] == "none").all()


def test_a_party_that_was_left_out_has_its_own_set(
    organisations: Organisations, blinded: list[int]
) -> None:
    organisations.run("run", {**SHORT, "align": "any"})
    new = organisations.folder / "new.csv"
    write(pd.DataFrame({ID: [*range(1000, 1020), *range(9000, 9010)]}), new)
    for without, due in (("1", [10, 10, 10]), ("", [10, 10, 10]), ("0", [])):
        blinded.clear()
        out = str(new.with_name(f"without-{without}.csv"))
        organisations.predict("run", new, out=out, without=without)
        assert blinded == due


def test_a_party_that_has_lost_its_set_is_asked_anew(
    organisations: Organisations, blinded: list[int]
) -> None:
    aligned(organisations)
    change(organisations.labels, with_ids(7001, 7002))
    sets("*-party-1.npz")[0].unlink()
    blinded.clear()
    assert aligned(organisations) == 48
    assert blinded == [62, 2, 62, 54, 2, 62]


# --- that nothing is missed ---------------------------------------------------------------------

CORE = frozenset(range(3))
people = st.frozensets(st.integers(3, 16), max_size=14).map(lambda each: each | CORE)


methods = st.sampled_from(["psi", "any", "there"])


@settings(max_examples=5)
@given(st.lists(st.tuples(people, people, people), min_size=2, max_size=4), methods)
def test_rows_equal_a_fresh_alignment(steps: list[tuple[frozenset[int], ...]], method: str) -> None:
    """Files of these ids align one after another; each alignment must find what all have."""
    shutil.rmtree(lasting_home() / "sets", ignore_errors=True)
    with tempfile.TemporaryDirectory() as place:
        for holder, *parties in steps:
            ids = np.array(sorted(holder, reverse=True))
            present = [np.isin(ids, sorted(party)) for party in parties]
            used = np.all(present, axis=0)
            if method != "psi":
                used = np.any(present, axis=0) | (method == "there")
            assert found(Path(place), holder, parties, method) == {
                int(one): tuple(bool(each[row]) for each in present)
                for row, one in enumerate(ids)
                if used[row]
            }


def found(
    folder: Path, holder: frozenset[int], parties: list[frozenset[int]], method: str
) -> dict[int, tuple[bool, ...]]:
    """By id who has the row, as the label holder has it; parties have the same."""
    paths = [folder / "labels.csv", *(folder / f"{n}.csv" for n in range(len(parties)))]
    generator = np.random.default_rng(len(holder))
    for path, ids in zip(paths, (holder, *parties), strict=True):
        order = generator.permutation(sorted(ids))
        write(pd.DataFrame({"id": order, "label": order % 2, "f": order}), path)
    keys = {"dataset": f"files:{paths[0]}", "align": "psi" if method == "psi" else "any"}
    config = resolve(keys)
    given: list[dict[str, Any]] = [{"file": str(path)} for path in paths[1:]]
    grid = LocalGrid(client_app.app, len(parties), keys, config, given)
    own = own_table(config.data)
    there = AvailableParties(len(parties)) if method == "there" else None
    common = align(grid, config, own, str(grid.run_id), there)
    ids_used = [own.ids[row] for row in common.rows]
    present = common.present
    if present is None:
        present = np.ones((len(ids_used), len(parties)), bool)
    for party, context in enumerate(grid.contexts.values()):
        rows = load_arrays(context.state, "aligned")["rows"]
        theirs = encode_ids(pd.read_csv(paths[1 + party])["id"], "It")
        expected = [
            one if has else None for one, has in zip(ids_used, present[:, party], strict=True)
        ]
        assert [theirs[row] if row >= 0 else None for row in rows] == expected
    return {int(one[2:]): tuple(map(bool, has)) for one, has in zip(ids_used, present, strict=True)}


def test_a_set_from_before_is_not_used(organisations: Organisations, blinded: list[int]) -> None:
    """Else a place would be of one id at the party and of another at the label holder."""
    aligned(organisations)
    (kept,) = sets("*-party-0.npz")
    before = kept.read_bytes()
    change(organisations.files[0], with_ids(7001))
    aligned(organisations)
    kept.write_bytes(before)
    change(organisations.labels, with_ids(7001, 7002))
    change(organisations.files[0], with_ids(7002))
    change(organisations.files[1], with_ids(7001, 7002))
    blinded.clear()
    assert aligned(organisations) == 50
    assert 56 in blinded and 54 not in blinded  # all of party 0's, and not party 1's


def test_two_runs_at_once_use_one_set(node: Context) -> None:
    holder = LabelHolder(node, IDS[:55] + STRANGE[:5])
    holder.all()
    kept = holder.kept
    runs = [LabelHolder(in_a_later_run(node), []) for _ in range(2)]
    assert all(run.finds(kept) for run in runs)
    change(Path(str(node.node_config["file"])), with_ids(5000))
    with pytest.raises(VflError, match="has other ids than a moment ago"):
        runs[0].blinded_by_party(Blinding().of_ids(STRANGE[:1]))
    assert all(run.finds(kept) for run in runs)
    points = [run.blinded_by_party(Blinding().of_ids(STRANGE[5:7])) for run in runs]
    assert len(points) == 2
    own = [run.answer.arrays["own"] for run in runs]
    assert own[0].shape == (1, 32) and (own[0] == own[1]).all()
    assert count_of(node)["asked"] == 64  # each has blinded the two ids by its own secret


# --- when all is asked about again --------------------------------------------------------------


@pytest.mark.parametrize("gone", [27, 28])
def test_a_file_of_mostly_new_rows_aligns_anew(
    organisations: Organisations, blinded: list[int], gone: int
) -> None:
    aligned(organisations)
    change(organisations.files[0], lambda frame: with_ids(*range(8000, 8040))(frame[gone:]))
    blinded.clear()
    aligned(organisations)
    anew = [60, 60, 40 + 54 - gone, 60]
    assert sorted(blinded) == ([40] if gone == 27 else sorted(anew))


@pytest.mark.parametrize("days", [2, nightly(0)])
def test_a_set_ends_by_a_partys_rule(
    organisations: Organisations, blinded: list[int], monkeypatch: pytest.MonkeyPatch, days: int
) -> None:
    organisations.words = [{}, {"alignment-days": days}]  # type: ignore[dict-item]
    now = time.time()
    for later, anew in ((0, True), (1.5, False), (1.9, False), (2.1, True), (3.9, False)):
        monkeypatch.setattr(time, "time", lambda later=later: now + later * DAY)
        change(organisations.labels, lambda frame: frame[1:])
        blinded.clear()
        aligned(organisations)
        assert (54 in blinded) == (anew or not days)  # party 1's points
        assert bool(sets("*-party-1.npz")) == bool(days)
    monkeypatch.setattr(time, "time", lambda: now - DAY)
    change(organisations.labels, lambda frame: frame[1:])
    blinded.clear()
    aligned(organisations)
    assert 54 in blinded


def test_the_fewest_rows_are_of_all_that_are_used(node: Context) -> None:
    holder = LabelHolder(node, IDS)
    holder.all()
    for named in (50, 49):
        later = LabelHolder(in_a_later_run(node), IDS)
        later.find(holder.kept)
        later.blinded_by_party(np.zeros((0, 32), np.uint8))
        if named == 49:
            with pytest.raises(VflError, match="align 49 rows, and aligns no fewer than 50"):
                later.tell(holder.places[:named], holder.sent[:named])
        else:
            later.tell(holder.places[:named], holder.sent[:named])
            assert len(later.about) == 1  # rows that were shown before are not asked about
            later.confirm()


# --- files --------------------------------------------------------------------------------------


def rewritten(path: Path, **changed: Any) -> None:
    """The same set with something else in it, and a checksum that is right."""
    kept = blinded_ids.load(path)
    assert kept
    arrays = {**kept.arrays, **changed.pop("arrays", {})}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    files.save(path, replace(kept, arrays=arrays, **changed), "*-0.npz")


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "edited": lambda path: path.write_bytes(path.read_bytes().replace(b"made", b"edam")),
    "another side's": lambda path: shutil.copy(sets("*-1.npz")[0], path),
    "another secret": lambda path: rewritten(path, arrays={"proof": np.zeros((1, 32), np.uint8)}),
    "other points": lambda path: rewritten(path, arrays={"points": np.zeros((54, 32), np.uint8)}),
    "no marks": lambda path: rewritten(path, arrays={"marks": None}),
    "a flat key": lambda path: rewritten(path, arrays={"key": np.zeros(32, np.uint8)}),
    "no time": lambda path: rewritten(path, made="yesterday"),
}


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "damage",
    [each if name in ("cut", "another side's") else nightly(each) for name, each in DAMAGE.items()],
    ids=DAMAGE,
)
@pytest.mark.parametrize("pattern", ["of-*-0.npz", "*-party-0.npz"], ids=["holder", "party"])
def test_a_set_that_is_not_as_it_was_written_is_not_used(
    organisations: Organisations, blinded: list[int], damage: Any, pattern: str
) -> None:
    aligned(organisations)
    change(organisations.labels, with_ids(7001, 7002))
    (path,) = sets(pattern)
    damage(path)
    blinded.clear()
    assert aligned(organisations) == 48
    assert sorted(blinded) == sorted([62, 2, 54, 62, 2, 62])
    change(organisations.labels, lambda frame: frame[1:])
    blinded.clear()
    aligned(organisations)
    assert not blinded


def test_a_full_disk_leaves_no_set_and_ends_no_run(
    organisations: Organisations, blinded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise VflError("sets cannot be written (No space left on device)")

    aligned(organisations)
    with monkeypatch.context() as patch:
        patch.setattr(files, "write", full)
        change(organisations.labels, with_ids(7001))
        change(organisations.files[0], with_ids(7001))
        change(organisations.files[1], with_ids(7001))
        assert aligned(organisations) == 49
        assert not sets("*-party-*.npz")
    assert aligned(organisations) == 49
    assert len(sets("*-party-*.npz")) == 2


# --- those who do not keep to the protocol ------------------------------------------------------


def named_with_strangers(node: Context) -> LabelHolder:
    """A label holder that knew 55 of the party's ids, and in a later run names all its rows."""
    holder = LabelHolder(node, IDS[:55] + STRANGE[:5])
    holder.all()
    later = LabelHolder(in_a_later_run(node), IDS[:55] + STRANGE[:5])
    assert later.finds(holder.kept)
    later.blinded_by_party(Blinding().of_ids(STRANGE[5:10]))
    others = np.setdiff1d(np.arange(60), holder.places)
    places, sent = np.concatenate([holder.places, others]), np.concatenate([holder.sent, others])
    later.tell(places, np.concatenate([holder.sent, np.setdiff1d(np.arange(60), holder.sent)]))
    assert len(sent) == 60
    later.own = holder.answer.arrays["own"][others]  # type: ignore[attr-defined]
    later.first = holder.kept  # type: ignore[attr-defined]
    return later


def test_rows_of_strangers_are_refused_and_the_set_is_forgotten(node: Context) -> None:
    later: Any = named_with_strangers(node)
    assert set(later.about) == set(STRANGE[:5])  # it is asked about those alone
    with pytest.raises(VflError, match="other ids than the label holder has shown to know"):
        later.confirm()
    assert "rows" not in load_arrays(later.node.state, "aligned")
    assert not later.finds(later.first)


@pytest.mark.parametrize("same", [False, True], ids=["another hash", "the same hash"])
def test_a_party_that_blinds_what_it_is_sent_does_not_answer_its_own_question(
    node: Context, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    """The secret of a set lasts, and the party raises to it whatever it is sent: its question too.

    If the question were about H(id), whose power is known, that would answer it; the control.
    """
    for where in (blinded_ids, psi, aligning):  # without the hash, the points themselves
        monkeypatch.setattr(where, "outputs", lambda ids, points: points)
    if same:
        digest = psi._digest
        monkeypatch.setattr(psi, "_digest", lambda encoded, of=b"id": digest(encoded))
    later: Any = named_with_strangers(node)
    beside = LabelHolder(in_a_later_run(node), [])
    beside.find(later.first)
    of_question = beside.blinded_by_party(later.question)
    sum_of_points = added(later.own)
    forged = np.concatenate([sum_of_points, of_question])
    if same:
        later.confirm(forged)
        assert len(load_arrays(later.node.state, "aligned")["rows"]) == 60
    else:
        with pytest.raises(VflError, match="has shown to know"):
            later.confirm(forged)


def added(points: Any) -> Any:
    _, _, add = psi._libsodium()
    total = np.zeros((1, 32), np.uint8)
    for point in points:
        add(total.ctypes.data, total.ctypes.data, point.tobytes())
    return total


def test_who_cannot_prove_it_is_not_told_whether_a_set_is_kept(node: Context) -> None:
    holder = LabelHolder(node, IDS)
    holder.all()
    kept, later = holder.kept, LabelHolder(in_a_later_run(node), IDS)
    assert later.finds(kept)
    zeros = np.zeros((1, 32), np.uint8)
    without = replace(kept, arrays={**kept.arrays, "proof": zeros})
    fewer = replace(kept, arrays={**kept.arrays, "points": kept.arrays["points"][1:]})
    answers = [
        *(later.find(each) for each in (without, fewer)),
        later.find(kept, run=later.node.run_id + 1),
    ]
    assert not any(each.arrays for each in answers)
    assert not load_arrays(later.node.state, "aligned")
    with pytest.raises(VflError, match="has found no set"):
        later.blinded_by_party(Blinding().of_ids(IDS))
    later.align()  # as anybody may
    with pytest.raises(VflError, match="has found no set"):
        later.blinded_by_party(Blinding().of_ids(IDS))


def test_a_set_is_of_one_party(node: Context) -> None:
    holder = LabelHolder(node, IDS)
    holder.all()
    other = in_a_later_run(node, **{"partition-id": 1, "num-partitions": 2})
    assert not LabelHolder(other, IDS).finds(holder.kept)
    more = in_a_later_run(node, **{"num-partitions": 2})  # the same, with others beside it
    assert LabelHolder(more, IDS).finds(holder.kept)


@pytest.mark.parametrize("many", [0, 29, 31])
def test_sets_are_asked_for_by_thirty_names(node: Context, many: int) -> None:
    arrays = {"names": np.zeros((many, 16), np.uint8), "proofs": np.zeros((many, 32), np.uint8)}
    with pytest.raises(VflError, match="was sent no names and proofs of sets"):
        asked(node, SetOrder(arrays=arrays), SetKept)


def test_an_order_says_nothing_of_sets_with_others(organisations: Organisations) -> None:
    orders = [blinded_ids.set_order(blinded_ids.stored_sets("x"), "1")]
    aligned(organisations)
    kept = blinded_ids.stored_sets("x")
    orders.append(blinded_ids.set_order(kept, "1"))
    assert [len(kept), *(orders[n].nbytes for n in range(2))] == [2, 1440, 1440]
    names = [bytes(name) for name in orders[1].arrays["names"]]
    assert {bytes.fromhex(each.name) for _, each in kept.values()} <= set(names)
    assert len(set(names)) == 30


class Claiming:
    def __call__(self, message: Message, context: Context) -> Message:
        if (
            message.metadata.message_type == "query.set"
            and context.node_config["partition-id"] == 0
        ):
            proof = {"proof": np.zeros((1, 32), np.uint8)}
            return to_reply(SetKept(party=0, parties=2, arrays=proof), message)
        return client_app.app(message, context)


def test_another_node_is_asked_about_all_ids(
    organisations: Organisations, blinded: list[int]
) -> None:
    aligned(organisations)
    change(organisations.labels, with_ids(7001, 7002))
    blinded.clear()
    assert aligned(organisations, Claiming()) == 48
    assert sorted(blinded) == sorted([62, 2, 54, 62, 2, 62])


def test_a_fresh_order_after_a_set_was_found_has_a_new_secret(node: Context) -> None:
    holder = LabelHolder(node, IDS)
    holder.all()
    later = LabelHolder(in_a_later_run(node), IDS)
    later.find(holder.kept)
    points = Blinding().of_ids(IDS)
    first = later.blinded_by_party(points)
    order = AlignOrder(method="psi", arrays={"ids": points})
    fresh = asked(later.node, order, Aligned).arrays["again"]
    assert (first != fresh).any(1).all()
