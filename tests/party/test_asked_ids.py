"""How many ids a party is asked about: a count that no order, run or restart makes less."""

import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context

from tests.aligning import IDS, ROWS, STRANGE, LabelHolder, asked, count_of, in_a_later_run, node_in
from tests.organisations import change, cut, forget_alignments, small
from tests.party.nodes import refused
from vfl_flower.alignment import asked_ids, at_label_holder, blinded_ids, psi
from vfl_flower.alignment.psi import Blinding, match
from vfl_flower.config.errors import VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.launch.engines import run_local
from vfl_flower.transport.early_messages import Aligned, AlignOrder
from vfl_flower.transport.flower_internals import lasting_home

DAY = 86400
MORE = "^failed: Party 0 refuses to be asked about {} more ids: its rule is max-ids = {}.$"


@pytest.fixture
def node(tmp_path: Path) -> Context:
    """A node with 60 ids, that aligns any number of rows."""
    made = node_in(tmp_path)
    made.node_config["min-rows"] = 1
    return made


@pytest.fixture
def uncounted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def take_away() -> None:
        monkeypatch.setattr(asked_ids, "_counts", lambda context: False)

    return take_away


def members(node: Context, ids: list[bytes], blinding: Blinding | None = None) -> set[bytes]:
    """Which of these ids the party has, by one order."""
    blinding = blinding or Blinding()
    sent = {"ids": blinding.of_ids(ids)}
    order = AlignOrder(method="psi", arrays=sent)
    answer = asked(node, order, Aligned).arrays
    mine, _ = match(psi.outputs(ids, blinding.undone(answer["again"])), answer["own"])
    return {ids[row] for row in mine}


def refused_ids(node: Context, why: str, *given: Any) -> str:
    """Return what a party says that may not be asked about ids."""
    with pytest.raises(VflError, match=why) as raised:
        members(node, *(given or (IDS,)))
    return str(raised.value)


def found_by(guesses: Iterable[list[bytes]], node: Context) -> set[bytes]:
    """Return the ids of a party that orders about made-up ids find, each in a new run."""
    found: set[bytes] = set()
    for number, guess in enumerate(guesses):
        later = in_a_later_run(node)
        later.run_id = 2 + number // 2
        try:
            found |= members(later, guess)
        except VflError as error:
            assert "its rule is max-ids = 20" in str(error)
    return found


@pytest.mark.parametrize("counted", [True, False])
def test_made_up_ids_are_bounded_over_all_orders_and_runs(
    node: Context, counted: bool, uncounted: Callable[[], None]
) -> None:
    node.node_config["max-ids"] = 20
    if not counted:
        uncounted()
    guesses = [[b"i:%d" % (970 + 10 * n + one) for one in range(10)] for n in range(12)]
    found = found_by(guesses[3:], node)
    assert len(found) == (20 if counted else 60)


def test_an_id_that_was_asked_about_before_is_free(node: Context) -> None:
    """A label holder keeps its secret; with another one the same ids count anew."""
    node.node_config["max-ids"] = 60
    lasting = Blinding()
    for _ in range(3):
        node = in_a_later_run(node)
        assert members(node, IDS, lasting) == set(IDS)
    assert members(node, IDS[:7], lasting) == set(IDS[:7])
    refused_ids(node, MORE.format(1, 60), [*IDS[:30], STRANGE[0]], lasting)
    refused_ids(node, MORE.format(60, 60), IDS, Blinding())
    assert count_of(node)["asked"] == 60 and count_of(node)["left"] == 0
    assert members(node, IDS, lasting) == set(IDS)


def test_an_id_is_asked_about_once_in_an_order(node: Context) -> None:
    """Else few ids would let many rows be named."""
    sent = {"ids": np.repeat(Blinding().of_ids(IDS[:30]), 2, 0)}
    order = AlignOrder(method="psi", arrays=sent)
    refused(node, order, "was sent a blinded id more than once")


def test_ids_that_are_new_to_a_kept_set_count_too(node: Context) -> None:
    node.node_config["max-ids"] = 62
    holder = LabelHolder(node, IDS)
    holder.all()
    later = LabelHolder(in_a_later_run(node), [])
    assert later.finds(holder.kept)
    with pytest.raises(VflError, match=MORE.format(3, 62)):
        later.blinded_by_party(holder.a.of_ids(STRANGE[:3]))
    assert later.finds(holder.kept)
    later.blinded_by_party(holder.a.of_ids(STRANGE[:2]))
    assert count_of(node)["left"] == 0
    assert later.finds(holder.kept)
    later.blinded_by_party(holder.a.of_ids(STRANGE[:2]))


def plus(one: Any, two: Any) -> Any:
    total = np.zeros_like(one)
    _, _, add = psi._libsodium()
    for at in range(len(one)):
        add(total[at].ctypes.data, one[at].tobytes(), two[at].tobytes())
    return total


@pytest.mark.parametrize("bare", [False, True])
def test_a_point_tells_of_one_id(
    node: Context, bare: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A label holder sends sums of two ids' points, and looks for sums of the party's points.

    So each point would tell of two ids, with bare points of the party as the control.
    """
    if bare:
        monkeypatch.setattr(blinded_ids, "outputs", lambda ids, points: points)
    one, two = Blinding(), Blinding()
    sent = {"ids": plus(one.of_ids(IDS[:5]), two.of_ids(IDS[5:10]))}
    order = AlignOrder(method="psi", arrays=sent)
    answer = asked(node, order, Aligned).arrays
    own = answer["own"]
    if not bare:
        with pytest.raises(VflError, match="not an element"):
            one.again(own)
        return
    places = np.arange(len(own))
    mine, theirs = (each.ravel() for each in np.meshgrid(places, places))
    sums = {each.tobytes() for each in plus(one.again(own)[mine], two.again(own)[theirs])}
    assert all(each.tobytes() in sums for each in answer["again"])


@pytest.mark.parametrize("counted", [True, False])
def test_wrong_proofs_are_guesses_and_count(
    node: Context, counted: bool, uncounted: Callable[[], None]
) -> None:
    """A label holder names a row that it did not ask about, and guesses its id by a proof.

    To ask about the same ids again is free. So without a count of proofs it would guess for ever.
    """
    node.node_config["max-ids"] = 62
    holder = LabelHolder(node, IDS[:59])
    holder.align()
    stranger = np.setdiff1d(ROWS, holder.places)
    if not counted:
        uncounted()

    def guess(one: bytes) -> None:
        holder.node, holder.ids = in_a_later_run(holder.node), IDS[:59]
        holder.align()
        places = np.setdiff1d(ROWS, holder.places)
        holder.ids = [*IDS[:59], one]
        holder.tell(places, np.array([59]))
        holder.confirm()

    assert len(stranger) == 1
    wrong = "has shown to know"
    for number in range(3):
        with pytest.raises(VflError, match=wrong):
            guess(STRANGE[number])
    if not counted:
        guess(IDS[59])  # the control: it is found in the end
        return
    assert count_of(node) == {**count_of(node), "asked": 62, "wrong": 3, "left": 0}
    with pytest.raises(VflError, match=wrong):  # one beyond what was left
        guess(STRANGE[3])
    with pytest.raises(VflError, match=r"about 0 more ids: its rule is max-ids = 62"):
        guess(IDS[59])


def test_the_rate_of_a_day(node: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    node.node_config["max-ids-per-day"] = 40
    noon = time.time() // DAY * DAY + DAY / 2
    rate = "more ids: its rule is max-ids-per-day = 40"
    lasting = Blinding()

    def at(days: float) -> None:
        monkeypatch.setattr(time, "time", lambda: noon + days * DAY)

    at(0)
    members(node, IDS[:30], lasting)
    for days in (0.4, -0.4, -3.0):  # nor does a clock that goes back begin a day
        at(days)
        refused_ids(node, f"about 20 {rate}", IDS[20:50], lasting)
    at(0.6)
    members(node, IDS[20:50], lasting)
    assert count_of(node) == {**count_of(node), "asked": 50, "that day": 20, "left that day": 20}
    refused_ids(node, f"about 30 {rate}", STRANGE[:30], lasting)
    members(node, IDS[:40], lasting)


def test_the_file_says_what_is_left_and_no_id(node: Context, tmp_path: Path) -> None:
    holder = LabelHolder(node, IDS[:55] + STRANGE[:5])
    holder.all()
    path = tmp_path / "party-0.ids"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert count_of(node) == {
        **{"asked": 60, "wrong": 0, "left": Rules.max_ids - 60, "left that day": None},
        **{"day": int(time.time()) // DAY, "that day": 60, "served": 0, "served that day": 0},
    }
    content = path.read_bytes()
    points = holder.a.of_ids(holder.ids)
    assert not any(point.tobytes()[:8] in content for point in points)
    assert not any(one in content for one in holder.ids)


def test_a_count_that_is_damaged_lets_nothing_pass(node: Context, tmp_path: Path) -> None:
    members(node, IDS)
    path = tmp_path / "party-0.ids"
    whole = path.read_bytes()
    asked = whole.index(b"asked")  # the name in an entry, and the total soon after it
    for content in (b"", whole[:-8], whole[:asked] + whole[asked:].replace(b"\x3c", b"\x0a", 1)):
        path.write_bytes(content)
        refused_ids(node, "cannot count the ids that it is asked about")


@pytest.mark.parametrize(
    ("loop", "sentence"),
    [
        (False, "in a folder that other users can change"),
        (True, "cannot read the folder of its alignments"),
    ],
)
def test_a_folder_of_counts_that_nobody_can_trust_lets_nothing_pass(
    node: Context, tmp_path: Path, loop: bool, sentence: str
) -> None:
    if loop:
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        node.node_config["states"] = str(tmp_path / "loop" / "states")
    else:
        tmp_path.chmod(0o777)
    assert str(tmp_path) not in refused_ids(node, sentence)


def test_ids_are_counted_before_they_are_blinded(
    node: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So whatever is killed then, the count is not too low."""

    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(blinded_ids, "fresh", killed)
        with pytest.raises(KeyboardInterrupt):
            members(node, IDS)
    assert count_of(node)["asked"] == 60


@pytest.mark.parametrize("lasting", [True, False])
def test_an_honest_label_holder_aligns_the_same_ids_again_and_again(
    tmp_path: Path, lasting: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where nothing else is kept. The control: with a secret for each run it cannot."""
    organisations = cut(tmp_path, small())
    words: dict[str, Any] = {"max-ids": 61, "alignment-days": 0}
    organisations.words = [words, words]
    keys = {**organisations.keys, "task": "align"}

    def rows(number: int) -> int:
        forget_alignments()
        given = {**keys, "out": str(tmp_path / f"run-{number}")}
        return int(run_local(2, given, node_configs=organisations.node_configs).summary["rows"])

    assert rows(0) == 48
    if not lasting:
        monkeypatch.setattr(at_label_holder, "lasting_blinding", Blinding)
        with pytest.raises(VflError, match="60 more ids: its rule is max-ids = 61"):
            rows(1)
        return
    secret = lasting_home() / "blinding.key"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert rows(1) == rows(2) == 48
    change(organisations.labels, lambda frame: pd.concat([frame, frame[:1].assign(who=7001)]))
    assert rows(3) == 48
    change(organisations.labels, lambda frame: pd.concat([frame, frame[:1].assign(who=7002)]))
    with pytest.raises(VflError, match="about 1 more ids: its rule is max-ids = 61"):
        rows(4)


def test_a_question_is_answered_by_no_secret_that_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By "ids" the label holder raises what a party sends to its secret: another one each time."""
    organisations = cut(tmp_path, small(), known=1.0)
    organisations.words = [{"align": "ids"}, {"align": "ids"}]
    used: list[bytes] = []
    again = psi.Blinding.again

    def seen(self: Blinding, points: Any) -> Any:
        used.append(self.secret)
        return again(self, points)

    monkeypatch.setattr(psi.Blinding, "again", seen)
    out = str(tmp_path / "run")
    keys = {**organisations.keys, "task": "align", "align": "ids", "out": out}
    run_local(2, keys, node_configs=organisations.node_configs)
    secret = lasting_home() / "blinding.key"
    assert used and not (secret.exists() and secret.read_bytes()[:32] in used)
