"""Alignments that are used again: when they are, when they are not, and who can have it so."""

import shutil
import stat
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from flwr.app import ConfigRecord, Context, Message

from tests.aligning import IDS, NAME, STRANGE, LabelHolder, asked, in_a_later_run, node_in
from tests.organisations import ID, Organisations, change, cut, forget_alignments, small, write
from vfl_flower import client_app, train
from vfl_flower.alignment import reuse
from vfl_flower.alignment import store as files
from vfl_flower.alignment.store import StoredAlignment
from vfl_flower.config import logs
from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch.engines import Finished, run_local, run_supernodes
from vfl_flower.party.state import load_arrays
from vfl_flower.tools.cli import main
from vfl_flower.transport.early_messages import Reused, ReuseOrder
from vfl_flower.transport.flower_internals import lasting_home
from vfl_flower.transport.messages import DescribeOrder, Description
from vfl_flower.transport.wire import record_of

SHORT: dict[str, Any] = {
    **{"epochs": 1, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8, "noise-seed": 0},
    "batch-size": 16,
}
AGAIN, ANEW = ["query.recall"], ["query.align", "query.common", "query.confirm"]
DAY = 86400


class Orders:
    """The ClientApp, and the kinds of orders that came before the first description."""

    def __init__(self) -> None:
        self.kinds: list[str] = []

    def __call__(self, message: Message, context: Context) -> Message:
        kind = message.metadata.message_type
        if kind not in self.kinds:
            self.kinds.append(kind)
        return client_app.app(message, context)

    @property
    def of_alignment(self) -> list[str]:
        return [kind for kind in self.kinds if kind in (*AGAIN, *ANEW)]


@pytest.fixture
def organisations(tmp_path: Path) -> Organisations:
    return cut(tmp_path, small())


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Collect the label holder's notices."""
    said: list[str] = []
    monkeypatch.setattr(logs.notice, "info", lambda text, *words: said.append(text % words))
    return said


@pytest.fixture
def node(tmp_path: Path) -> Context:
    """A node before any message."""
    return node_in(tmp_path)


@pytest.fixture
def holder(node: Context) -> LabelHolder:
    """A label holder that has aligned all ids of the node, when a later run begins."""
    made = LabelHolder(node, IDS)
    made.all()
    made.node = in_a_later_run(node)
    return made


def ran(organisations: Organisations, out: str, **keys: Any) -> tuple[list[str], Finished]:
    """The orders by which a run was aligned, and the run."""
    orders: Any = Orders()
    finished = organisations.run(out, {**SHORT, **keys}, orders)
    return orders.of_alignment, finished


def aligned(organisations: Organisations) -> tuple[list[str], dict[str, Any]]:
    """The orders by which rows were aligned for later runs, and what came of it."""
    orders: Any = Orders()
    out = organisations.folder / f"aligned-{len(list(organisations.folder.iterdir()))}"
    keys = {**organisations.keys, "task": "align", "out": str(out)}
    each = organisations.node_configs
    finished = run_local(len(each), keys, orders, each)
    return orders.of_alignment, finished.summary


def figures(run: Finished) -> list[dict[str, Any]]:
    """Return the figures of a run, without times."""
    timed = ("seconds", "peak_memory_mb", "bytes_up", "bytes_down")
    return [{k: v for k, v in entry.items() if k not in timed} for entry in run.history]


def name_of(run: Finished) -> str:
    return str(checkpoint.load(run.folder).about_labels["alignment"])


def folder() -> Path:
    return lasting_home() / "alignments"


def party_file(party: int) -> Path:
    (found,) = folder().glob(f"*-party-{party}.npz")
    return found


def holders_file() -> Path:
    (found,) = folder().glob("of-*.npz")
    return found


# --- what is used again -------------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize("method", ["psi", "ids"])
def test_a_later_run_on_the_same_ids_is_not_aligned(tmp_path: Path, method: str) -> None:
    organisations = cut(tmp_path, small(), known=1 if method == "ids" else 0.9)
    first, one = ran(organisations, "one", align=method)
    again, two = ran(organisations, "two", align=method)
    other, three = ran(organisations, "three", align=method, strategy="vafl")
    assert first == [kind for kind in ANEW if method == "psi" or kind != "query.common"]
    assert again == other == AGAIN
    assert figures(one) == figures(two)
    assert name_of(one) == name_of(two) == name_of(three)
    forget_alignments()
    assert figures(ran(organisations, "four", align=method)[1]) == figures(two)


def test_predictions_have_a_separate_alignment(organisations: Organisations) -> None:
    organisations.run("run", SHORT)
    new = organisations.folder / "new.csv"
    write(small().drop(columns="label")[5:], new)
    outs = [organisations.predict("run", new, out=str(new) + f"-{n}.csv") for n in range(2)]
    pd.testing.assert_frame_equal(*outs)
    names = {files.load(path, set()).name for path in folder().glob("of-*.npz")}  # type: ignore[union-attr]
    assert len(names) == 2  # of the second predictions there is none
    assert len(list(folder().glob("*-party-0.npz"))) == 2
    assert ran(organisations, "again")[0] == AGAIN


def test_other_values_in_other_columns_need_no_alignment(organisations: Organisations) -> None:
    ran(organisations, "one")
    change(organisations.files[0], lambda frame: frame.assign(f0=frame["f0"] ** 2))
    orders, changed = ran(organisations, "two")
    assert orders == AGAIN
    forget_alignments()
    orders, anew = ran(organisations, "three")
    assert orders == ANEW
    assert figures(changed) == figures(anew)


def test_each_number_of_parties_has_its_own_alignment(
    organisations: Organisations, lines: list[str]
) -> None:
    both = organisations.files
    turns = [(both, ANEW), (both[:1], AGAIN + ANEW), (both, AGAIN), (both[:1], AGAIN)]
    for files_of, orders in turns:
        organisations.files = files_of
        assert aligned(organisations)[0] == orders
        if orders == AGAIN + ANEW:
            assert "had 2 parties, and this run has 1: rows are aligned anew." in lines[-2]


def test_what_is_held_in_memory_is_not_kept() -> None:
    features, labels = np.random.default_rng(0).standard_normal((2, 60, 3)), np.arange(60) % 2
    train({"epochs": 1}, list(features), labels)
    assert not list(folder().glob("*")) and not list(files.home("sets").glob("*"))


# --- what is aligned anew -----------------------------------------------------------------------

CHANGES: dict[str, Callable[[pd.DataFrame], pd.DataFrame]] = {
    "another order": lambda frame: frame[::-1],
    "another id": lambda frame: frame.assign(**{ID: frame[ID].where(frame.index != 3, 7777)}),
    "one fewer": lambda frame: frame[1:],
    "one more": lambda frame: pd.concat([frame, frame[:1].assign(**{ID: 7777})]),
}


@pytest.mark.one_by_day
@pytest.mark.parametrize("how", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("whose", ["label holder", "party 1"])
def test_a_row_that_changes_is_noticed_and_said(
    organisations: Organisations, lines: list[str], how: Any, whose: str
) -> None:
    aligned(organisations)
    files_of = {"label holder": organisations.labels, "party 1": organisations.files[1]}
    change(files_of[whose], how)
    lines.clear()
    orders, changed = aligned(organisations)
    sentences = {
        "label holder": f"The ids of {organisations.labels} have changed since the alignment of "
        "less than a minute ago: rows are aligned anew.",
        "party 1": "Party 1's ids have changed since the alignment of less than a minute ago: rows "
        "are aligned anew.",
    }
    assert orders == (ANEW if whose == "label holder" else AGAIN + ANEW)
    assert lines[0] == sentences[whose]
    forget_alignments()
    assert changed["rows"] == aligned(organisations)[1]["rows"]


def test_other_ids_in_the_same_file_are_not_said_to_be_known(
    organisations: Organisations, lines: list[str]
) -> None:
    aligned(organisations)
    change(organisations.labels, lambda frame: frame[1:])
    aligned(organisations)
    assert not [line for line in lines if "1000" in line]  # the id of that row
    write(small().drop(columns=["f0", "f1", "f2", "f3"]), organisations.labels)
    assert aligned(organisations)[0] == AGAIN  # as it was at first


@pytest.mark.parametrize(("days", "again"), [(None, 29), (2, 1)])
def test_an_alignment_ends_by_a_partys_rule(
    organisations: Organisations,
    lines: list[str],
    monkeypatch: pytest.MonkeyPatch,
    days: int | None,
    again: int,
) -> None:
    if days is not None:
        organisations.words = [{}, {"alignment-days": days}]  # type: ignore[dict-item]
    aligned(organisations)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + again * DAY + DAY / 2)
    assert aligned(organisations)[0] == AGAIN
    assert f"by the alignment of {again} day{'s' * (again > 1)} ago" in lines[-1]
    path = party_file(1)
    monkeypatch.setattr(time, "time", lambda: now + (again + 1) * DAY + 1)
    assert aligned(organisations)[0] == AGAIN + ANEW
    who = 0 if days is None else 1
    said = f"Party {who}'s rules no longer permit the alignment of {again + 1} days ago"
    assert said in lines[-4]
    assert not path.exists()


def test_a_party_that_keeps_none_is_aligned_with_every_time(organisations: Organisations) -> None:
    aligned(organisations)
    organisations.words = [{}, {"alignment-days": 0}]  # type: ignore[dict-item]
    assert aligned(organisations)[0] == AGAIN + ANEW
    assert not list(folder().glob("*-party-1.npz"))
    assert aligned(organisations)[0] == AGAIN + ANEW
    organisations.words = []
    aligned(organisations)
    assert aligned(organisations)[0] == AGAIN


def test_a_clock_that_was_set_back_ends_it(
    organisations: Organisations, monkeypatch: pytest.MonkeyPatch
) -> None:
    aligned(organisations)
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - DAY)
    assert aligned(organisations)[0] == AGAIN + ANEW


def test_stricter_rules_of_a_party_hold_for_what_was_kept(organisations: Organisations) -> None:
    aligned(organisations)
    organisations.words = [{"min-rows": 49}, {}]  # type: ignore[dict-item]
    orders: Any = Orders()
    with pytest.raises(PartyError, match="align 48 rows, and aligns no fewer than 49: its rule"):
        organisations.run("two", SHORT, orders)
    assert orders.of_alignment == [*AGAIN, *ANEW[:2]]
    organisations.words = [{"align": "ids"}, {}]
    with pytest.raises(PartyError, match="aligns only by 'ids'"):
        organisations.run("three", SHORT)
    organisations.words = [{"max-epochs": 0}, {}]  # type: ignore[dict-item]
    orders = Orders()
    with pytest.raises(PartyError, match="refuses epochs = 1"):
        organisations.run("four", SHORT, orders)
    assert orders.kinds == AGAIN  # before it says whether its ids have changed


def test_what_one_side_has_lost_is_aligned_anew(
    organisations: Organisations, lines: list[str]
) -> None:
    aligned(organisations)
    party_file(1).unlink()
    assert aligned(organisations)[0] == AGAIN + ANEW
    assert "Party 1 does not have the alignment of less than a minute ago any more" in lines[-4]
    holders_file().unlink()
    assert aligned(organisations)[0] == ANEW
    assert aligned(organisations)[0] == AGAIN


# --- files --------------------------------------------------------------------------------------


def test_files_are_their_owners_alone_and_hold_no_objects(organisations: Organisations) -> None:
    aligned(organisations)
    for name, number in (("alignments", 3), ("sets", 4)):
        where = files.home(name)
        assert len(list(where.iterdir())) == number
        assert stat.S_IMODE(where.stat().st_mode) == 0o700
        for path in where.iterdir():
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            with np.load(path, allow_pickle=False) as file:
                assert all(file[each].dtype.kind in "iub" for each in file.files)


def rewritten(path: Path, **changed: Any) -> None:
    """The same file with something else in it, and a checksum that is right."""
    kept = files.load(path, set())
    assert kept
    arrays = {**kept.arrays, **changed.pop("arrays", {})}
    arrays = {name: array for name, array in arrays.items() if array is not None}
    files.save(path, replace(kept, arrays=arrays, **changed), "*")


def rows_of(path: Path) -> Any:
    kept = files.load(path, set())
    assert kept
    return kept.arrays["rows"]


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-40]),
    "empty": lambda path: path.write_bytes(b""),
    "edited": lambda path: path.write_bytes(path.read_bytes().replace(b"name", b"eman")),
    "another side's": lambda path: shutil.copy(
        next(each for each in folder().iterdir() if each != path and "0.npz" not in each.name), path
    ),
    "a row beyond": lambda path: rewritten(path, arrays={"rows": rows_of(path) + 10}),
    "a row before": lambda path: rewritten(path, arrays={"rows": rows_of(path) - 10}),
    "no rows": lambda path: rewritten(path, arrays={"rows": None}),
    "rows of another kind": lambda path: rewritten(path, arrays={"rows": rows_of(path) * 1.0}),
    "other ids": lambda path: rewritten(path, file="0" * 64),
    "no text": lambda path: rewritten(path, name=3),
    "another name": lambda path: rewritten(path, name="1" * 32),
    "no secret": lambda path: rewritten(path, arrays={"answer": None, "answers": None}),
    "a folder": lambda path: [do(path) for do in (Path.unlink, Path.mkdir)],
}


@pytest.mark.one_by_day
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("whose", [holders_file, lambda: party_file(0)], ids=["holder", "party"])
def test_a_file_that_is_not_as_it_was_written_is_not_used(
    organisations: Organisations, damage: Any, whose: Callable[[], Path]
) -> None:
    rows = aligned(organisations)[1]["rows"]
    shutil.copytree(folder(), organisations.folder / "sound")
    damage(whose())
    orders, summary = aligned(organisations)
    assert orders in (ANEW, AGAIN + ANEW)
    assert summary["rows"] == rows
    forget_alignments()
    shutil.copytree(organisations.folder / "sound", folder())
    assert aligned(organisations)[0] == AGAIN


def test_alignments_that_another_user_can_write_to_end_a_run(organisations: Organisations) -> None:
    """A file there could be another user's: its checksum is no signature."""
    aligned(organisations)
    folder().chmod(0o777)
    with pytest.raises(ConfigError, match=rf"Other users can change {folder()}"):
        aligned(organisations)
    folder().chmod(0o700)  # the control
    assert aligned(organisations)[0] == AGAIN


def test_a_party_reads_no_alignments_that_another_user_can_write_to(
    holder: LabelHolder, tmp_path: Path
) -> None:
    (tmp_path / "alignments").chmod(0o777)
    with pytest.raises(VflError, match="Party 0 keeps its alignments in a folder that") as raised:
        holder.reuse()
    assert str(tmp_path) not in str(raised.value)
    assert not holder.node.state
    (tmp_path / "alignments").chmod(0o700)  # the control
    assert holder.reuse() == "kept"


def test_a_full_disk_ends_no_run(
    organisations: Organisations, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise VflError("alignments cannot be written (No space left on device)")

    monkeypatch.setattr(files, "save", full)
    assert aligned(organisations)[0] == ANEW
    assert aligned(organisations)[0] == ANEW


def test_the_newest_alignments_are_kept(
    organisations: Organisations, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_MOST", 2)
    for _ in range(4):
        change(organisations.labels, lambda frame: frame[1:])
        aligned(organisations)
    assert len(list(folder().iterdir())) == 3 * 2
    assert aligned(organisations)[0] == AGAIN


def test_two_runs_that_write_the_same_file_leave_a_sound_one(tmp_path: Path) -> None:
    path, rows = tmp_path / "of-x.npz", np.arange(1000)
    halves = [StoredAlignment(str(n) * 32, 2, 0.0, "", {"rows": rows}) for n in range(2)]

    def write_often(kept: StoredAlignment) -> None:
        for _ in range(40):
            files.save(path, kept, "of-*")

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write_often, half) for half in halves]
        while not all(each.done() for each in writers):
            assert not path.exists() or files.load(path, set())
    assert [each.result() for each in writers] == [None, None] and files.load(path, set())


# --- a party and a label holder that does not keep to the protocol ------------------------------


def test_the_earlier_label_holder_gets_the_earlier_rows(node: Context) -> None:
    holder = LabelHolder(node, IDS[:55] + STRANGE[:5])
    holder.all()
    rows = load_arrays(node.state, "aligned")["rows"]
    holder.node = later = in_a_later_run(node)
    assert holder.reuse() == "kept"
    np.testing.assert_array_equal(load_arrays(later.state, "aligned")["rows"], rows)
    described = asked(later, DescribeOrder(outputs=1), Description)
    assert described.alignment == NAME
    assert described.train_rows + described.test_rows == 55


def test_who_knows_the_name_alone_is_given_nothing(node: Context) -> None:
    LabelHolder(node, IDS).all()
    other = LabelHolder(in_a_later_run(node), IDS)  # it has the ids, and has aligned elsewhere
    for guess in (np.zeros(32, np.uint8), other.a.of_ids([IDS[0]])[0]):
        other.shown = guess[None]
        assert other.reuse() == "gone" == other.reuse("f" * 32)
    assert not other.node.state
    with pytest.raises(VflError, match="was not told which of its rows"):
        asked(other.node, DescribeOrder(outputs=1), Description)


def test_an_order_of_another_run_is_worth_nothing(holder: LabelHolder) -> None:
    then = holder.node
    sent = reuse.proof_of(holder.shown, NAME, str(then.run_id))  # which all parties are sent
    order = ReuseOrder(alignment=NAME, arrays={"proofs": np.frombuffer(sent, np.uint8)[None]})
    assert asked(then, order, Reused).became == "kept"
    assert asked(in_a_later_run(then), order, Reused).became == "gone"


def test_only_the_earlier_party_has_it(holder: LabelHolder, node: Context) -> None:
    for words in ({"partition-id": 1, "num-partitions": 2}, {"num-partitions": 2}):
        order = proofs_of(holder, 2)
        assert asked(in_a_later_run(node, **words), order, Reused).became == "gone"


def proofs_of(holder: LabelHolder, many: int) -> ReuseOrder:
    """Return the order of a later run, with the proof as often as this."""
    code = reuse.proof_of(holder.shown, NAME, str(holder.node.run_id))
    proofs = np.frombuffer(many * code, np.uint8).reshape(many, 32)
    return ReuseOrder(alignment=NAME, arrays={"proofs": proofs})


def test_who_has_heard_of_a_name_cannot_have_its_file_replaced(node: Context) -> None:
    holder = LabelHolder(node, IDS[:55])
    holder.all()
    other = LabelHolder(in_a_later_run(node), IDS)
    other.all()  # by the same name
    assert len(load_arrays(other.node.state, "aligned")["rows"]) == 60
    holder.node = in_a_later_run(other.node)
    assert holder.reuse() == "kept"
    assert len(load_arrays(holder.node.state, "aligned")["rows"]) == 55


@pytest.mark.parametrize("proofs", [None, np.zeros((1, 31)), np.zeros(32), np.zeros((1, 32, 1))])
@pytest.mark.parametrize("name", [NAME, "f" * 32])
def test_proofs_that_are_none_tell_nothing_of_a_name(
    holder: LabelHolder, proofs: Any, name: str
) -> None:
    given = {} if proofs is None else {"proofs": proofs.astype(np.uint8)}
    with pytest.raises(VflError, match="was sent no proofs of an alignment"):
        asked(holder.node, ReuseOrder(alignment=name, arrays=given), Reused)


@pytest.mark.parametrize("many", [0, 2, 1000])
def test_another_number_of_proofs_is_of_another_alignment(holder: LabelHolder, many: int) -> None:
    assert asked(holder.node, proofs_of(holder, many), Reused).became == "gone"
    assert asked(holder.node, proofs_of(holder, 1), Reused).became == "kept"  # the control


def test_a_name_leads_to_no_other_folder(holder: LabelHolder, tmp_path: Path) -> None:
    beside, name = tmp_path / ("e" * 29 + "-party-0.npz"), "../" + "e" * 29
    shutil.copy(tmp_path / "alignments" / f"{NAME}-party-0.npz", beside)
    rewritten(beside, name=name)
    assert (tmp_path / "alignments" / f"{name}-party-0.npz").exists()  # the control
    with pytest.raises(VflError, match="by an alignment without a valid name"):
        holder.reuse(name)
    assert holder.reuse() == "kept"


def test_a_party_that_is_recalled_to_rows_of_another_file_uses_none(
    holder: LabelHolder, node: Context
) -> None:
    change(Path(str(node.node_config["file"])), lambda frame: frame[1:])
    assert holder.reuse() == "changed"
    assert not holder.node.state
    holder.node = in_a_later_run(node, **{"alignment-days": 0})
    assert holder.reuse() == "ended"
    assert holder.reuse() == "gone"


def test_a_file_that_changes_after_it_was_recalled_is_refused(holder: LabelHolder) -> None:
    assert holder.reuse() == "kept"
    change(Path(str(holder.node.node_config["file"])), lambda frame: frame[::-1])
    with pytest.raises(VflError, match="has lost or changed rows of its file"):
        asked(holder.node, DescribeOrder(outputs=1), Description)


def test_rows_that_were_aligned_anew_take_the_place_of_those_recalled(holder: LabelHolder) -> None:
    assert holder.reuse() == "kept"
    holder.align()
    with pytest.raises(VflError, match="was not told which of its rows"):
        asked(holder.node, DescribeOrder(outputs=1), Description)
    holder.tell(holder.places[:50], holder.sent[:50])
    holder.confirm()
    assert len(load_arrays(holder.node.state, "aligned")["rows"]) == 50


class Claiming:
    """Party 0 says that an alignment became this, whatever it did."""

    def __init__(self, became: str) -> None:
        self.became = became

    def __call__(self, message: Message, context: Context) -> Message:
        recalls = message.metadata.message_type == "query.recall"
        if recalls and context.node_config["partition-id"] == 0:
            context.node_config["alignment-days"] = 0
        reply = client_app.app(message, context)
        if recalls and context.node_config["partition-id"] == 0:
            record_of(reply.content, "scalars", ConfigRecord)["became"] = self.became
        return reply


def test_a_party_that_claims_to_have_an_alignment_ends_the_run(
    organisations: Organisations,
) -> None:
    aligned(organisations)
    client: Any = Claiming("kept")
    with pytest.raises(PartyError, match="was not told which of its rows are common to all"):
        organisations.run("two", SHORT, client)


def test_a_word_that_none_says_is_no_yes(organisations: Organisations, lines: list[str]) -> None:
    aligned(organisations)
    client: Any = Claiming("yes\\x1b[31m")
    organisations.run("two", SHORT, client)
    assert lines[-4].startswith("Party 0 does not have the alignment of")


# --- the command --------------------------------------------------------------------------------


def words(organisations: Organisations) -> list[str]:
    given = ["-c", f"dataset='files:{organisations.labels}' id='{ID}' out='elsewhere'"]
    for file in organisations.files:
        given += ["--node-config", f"file='{file}' id='{ID}'"]
    return given


def test_vfl_align_only_aligns(
    organisations: Organisations, capsys: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    monkeypatch.chdir(organisations.folder)
    change(organisations.labels, lambda frame: frame.drop(columns="label"))
    before = set(organisations.folder.iterdir())
    assert main(["align", *words(organisations)]) == 0
    said = capsys.readouterr().out
    assert set(organisations.folder.iterdir()) == before
    write(small()[[ID, "label"]], organisations.labels)
    orders, finished = ran(organisations, "run")
    assert orders == AGAIN
    assert said == f"48 rows are common to all, by alignment {name_of(finished)}.\n"
    assert main(["align", *words(organisations)]) == 0
    assert capsys.readouterr().out == said


def test_vfl_align_is_for_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["align", "-c", "dataset='digits'", "--node-config", "missing='refuse'"]) == 1
    assert "dataset = 'digits' is divided, and has no ids to align" in capsys.readouterr().err


# --- real nodes ---------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("transport", ["stream", "messages"])
def test_nodes_are_aligned_once(organisations: Organisations, transport: str) -> None:
    def on_nodes(out: str) -> tuple[Finished, str]:
        given = {**organisations.keys, **SHORT, "transport": transport}
        given["out"] = str(organisations.folder / out)
        configs = [{**each, "min-rows": 1, "noise-seed": 0} for each in organisations.node_configs]
        run = run_supernodes(2, given, configs)
        return run, (run.folder / "flower.log").read_text()

    one, log = on_nodes("one")
    assert "All parties together have 48 of them" in log
    two, log = on_nodes("two")
    assert "48 rows are common to all, by the alignment of" in log
    assert "of the label holder's" not in log  # no order to align
    assert name_of(one) == name_of(two)
    assert figures(one) == figures(two)
    if transport == "messages":  # each message takes seconds
        return
    change(organisations.files[1], lambda frame: frame[1:])
    three, log = on_nodes("three")
    assert "Party 1's ids have changed since the alignment of" in log
    assert name_of(three) != name_of(one)
