"""Counts stay, whatever ends a process or happens to a ledger."""

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Context, RecordDict

from tests.full_disk import full_after
from tests.ledgers import numbers_in
from vfl_flower.alignment import asked_ids
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.node_rules import Rules
from vfl_flower.party.label_sets import count_labels
from vfl_flower.party.limits import Limits, PredictionBudget
from vfl_flower.records.budget import Budget, Limit
from vfl_flower.records.ledger import opened
from vfl_flower.tasks.drift import party as drift
from vfl_flower.tasks.inference import told_figures
from vfl_flower.tasks.inference.party import explained_people

EARLIER = Path(__file__).parents[1] / "artefacts" / "ledgers"
DAY = 20_000
PEOPLE = np.arange(200, dtype=np.uint64)


def add(path: Path, more: int = 1) -> None:
    with opened(path) as ledger:
        ledger.add("n", more)


def number_in(path: Path) -> int:
    return numbers_in(path, "n").get(0, 0)


# --- threads, processes and kills -----------------------------------------------------------------

_IN_ANOTHER_PROCESS = """
import os, signal, sys
import numpy as np
from pathlib import Path
from vfl_flower.records.ledger import opened
path, how = Path(sys.argv[1]), sys.argv[2]
def kill():
    os.kill(os.getpid(), signal.SIGKILL)

print("ready", flush=True)
for _ in range(int(sys.argv[3])):
    with opened(path) as ledger:
        ledger.add("n", 1)
        if how == "killed before the end":
            ledger.put("m", np.arange(90000), 1)
            save = ledger._save

            def half(connection):
                connection.set_trace_callback(lambda line: line == "COMMIT" and kill())
                connection.execute("PRAGMA cache_size = 1")  # so it writes before the end
                save(connection)

            ledger._save = half
kill()
"""


def process(path: Path, how: str, times: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", _IN_ANOTHER_PROCESS, str(path), how, str(times)]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def test_threads_and_processes_at_once_lose_no_count_and_a_kill_loses_no_finished_one(
    tmp_path: Path,
) -> None:
    path = tmp_path / "new"  # all begin it at once
    others = [process(path, "", 25) for _ in range(2)]
    for other in others:
        assert other.stdout is not None and other.stdout.readline() == b"ready\n"
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: add(path), range(50)))
    assert [other.wait(60) for other in others] == [-signal.SIGKILL] * 2
    assert number_in(path) == 100
    assert process(path, "killed before the end", 1).wait(60) == -signal.SIGKILL
    journal, copy = path.with_name("new-journal"), tmp_path / "deleted"
    shutil.copy(journal, copy.with_name("deleted-journal"))
    add(copy)  # a ledger that the owner has deleted meanwhile
    assert number_in(copy) == 1
    copy.unlink()
    assert path.stat().st_size > 90000 and journal.exists()  # the control: half of it is there
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(journal.stat().st_mode) == 0o600
    assert number_in(path) == 100 and not numbers_in(path, "m")
    assert [each.name for each in tmp_path.iterdir()] == ["new"]


def test_a_kill_between_count_ahead_and_give_back_counts_no_less(tmp_path: Path) -> None:
    ahead = partial(opened, tmp_path / "n")
    for closed, counted in ((False, 100), (True, 101)):
        budget = Budget(ahead, [Limit("n", 10_000, "n = 10000")])
        assert budget.take_some(1) == (1, "")
        if closed:  # the control gives back what it has not spent
            budget.close()
        assert number_in(tmp_path / "n") == counted


def test_a_block_that_fails_changes_nothing(tmp_path: Path) -> None:
    add(tmp_path / "n", 3)
    with pytest.raises(KeyboardInterrupt), opened(tmp_path / "n") as ledger:
        ledger.add("n", 1)
        raise KeyboardInterrupt
    assert number_in(tmp_path / "n") == 3


# --- files ----------------------------------------------------------------------------------------


def test_no_changed_bit_counts_less(tmp_path: Path) -> None:
    """The control: SQLite itself reads a smaller count from some of these files."""
    path, copy = tmp_path / "n", tmp_path / "copy"
    with opened(path) as ledger:
        for key in range(2000, 2040):
            ledger.write("n", 200, key)
        ledger.put("table", np.arange(8), 3)
    content = path.read_bytes()
    less = refused = 0
    for at in range(0, len(content), 13):
        copy.write_bytes(content[:at] + bytes([content[at] ^ 8]) + content[at + 1 :])
        try:
            assert list(numbers_in(copy, "n").values()) == [200] * 40
            assert list(numbers_in(copy, "table").values()) == [3] * 8
        except VflError as error:
            assert str(error).startswith(str(copy)) and str(error).endswith(".")
            refused += 1
        try:
            plain = sqlite3.connect(copy)
            found = plain.execute("SELECT sum(value) FROM entries WHERE name = 'n'").fetchone()
            less += found[0] != 40 * 200
        except (sqlite3.DatabaseError, TypeError):
            pass
        finally:
            plain.close()
    assert less > 10 and refused > less
    with closing(sqlite3.connect(path)) as plain, plain:
        plain.execute("DELETE FROM entries WHERE key = 2000")
    with pytest.raises(VflError, match="is damaged"):
        numbers_in(path, "n")


def test_a_file_that_no_ledger_wrote_is_refused_and_stays(tmp_path: Path) -> None:
    other = sqlite3.connect(tmp_path / "n")  # another program's
    other.execute("CREATE TABLE entries (name)")
    other.close()
    contents = (b"", b"no ledger", b"SQLite format 3\0" + bytes(4080))
    for content in ((tmp_path / "n").read_bytes(), *contents):
        (tmp_path / "n").write_bytes(content)
        with pytest.raises(VflError, match=r"/n is damaged, or another version wrote it\. Restore"):
            add(tmp_path / "n")
        assert (tmp_path / "n").read_bytes() == content


def test_a_deleted_ledger_is_another_one_and_an_older_copy_counts_what_it_has(
    tmp_path: Path,
) -> None:
    """So a budget gives nothing back to a ledger that it did not count in."""
    path = tmp_path / "n"
    budget = Budget(partial(opened, path), [Limit("n", 10_000, "n = 10000")])
    budget.take_some(1)
    older = path.read_bytes()
    path.unlink()
    add(path, 60)
    budget.close()
    assert number_in(path) == 60
    path.write_bytes(older)
    path.chmod(0o644)  # as a backup may restore it
    budget = Budget(partial(opened, path), [Limit("n", 10_000, "n = 10000")])
    budget.take_some(1)
    budget.close()
    assert number_in(path) == 101  # the control, which gives back
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("begun", [True, False])
def test_a_full_disk_counts_nothing_and_leaves_the_ledger(tmp_path: Path, begun: bool) -> None:
    path = tmp_path / "n"
    if begun:
        add(path)
    with full_after(100), pytest.raises(VflError, match=r"/n cannot be written \(.*\)\. Fix that"):
        add(path)
    add(path)
    assert number_in(path) == 1 + begun
    budget = Budget(partial(opened, path), [Limit("n", 10_000, "n = 10000")])
    with full_after(100), pytest.raises(VflError, match="cannot be written"):
        budget.take_some(1)
    assert budget.take_some(1)[0] == 1  # which is counted now
    assert number_in(path) == 101 + begun


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write to every folder")
def test_a_folder_that_cannot_be_written_counts_nothing(tmp_path: Path) -> None:
    add(tmp_path / "n")
    tmp_path.chmod(0o500)
    for name in ("n", "new"):
        with pytest.raises(VflError, match="cannot be written"):
            add(tmp_path / name)
    tmp_path.chmod(0o700)
    assert number_in(tmp_path / "n") == 1


# --- files of the earlier version -----------------------------------------------------------------


@pytest.fixture
def earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Context:
    """A node with files that the earlier version wrote, at noon of `DAY`."""
    shutil.copytree(EARLIER, tmp_path / "states")
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "states"))
    (tmp_path / "states").chmod(0o700)
    monkeypatch.setattr(time, "time", lambda: (DAY + 0.5) * 86400)
    config: dict[str, bool | float | int | str] = {
        **{"partition-id": 0, "num-partitions": 1, "states": str(tmp_path / "states")},
        **{"max-ids": 20, "max-predictions": 10, "max-predictions-per-day": 10},
    }
    return Context(1, 2, config, RecordDict(), {})


def uploads(node: Context, path: Path) -> None:
    """Row 7 was uploaded twice, and rows 3 and 2^63 + 9 once."""
    counted = Limits(Rules(max_uploads=2), path=path / "run-1-party-0.uploads")
    counted.go_on()
    rows = np.array([3, 7, 2**63 + 9, 4], np.uint64)
    assert counted.count_each(rows, False).tolist() == [True, False, True, True]


def predictions(node: Context, path: Path) -> None:
    """Four rows were predicted, on this day."""
    budget = PredictionBudget(node, Rules.of(node.node_config))
    assert budget.take_some(10)[0] == 6
    assert numbers_in(path / "party-0.predictions", "rows") == {0: 10, DAY: 10}


def ids(node: Context, path: Path) -> None:
    """16 ids count, 12 of them by services. Among them are 0 to 4, a wrong proof, and 10 ahead."""
    points = np.repeat(np.arange(9, dtype="<u8")[:, None], 4, 1).view(np.uint8)
    service = asked_ids.ServiceCount(node, Rules.of(node.node_config))
    allowed, why = service.count(points)
    assert allowed.tolist() == [True] * 5 + [False] * 4 and "half of it for services" in why
    rules = Rules.of(node.node_config)
    asked_ids.count(node, rules, points)
    with pytest.raises(ConfigError, match="max-ids = 20"):
        asked_ids.count(node, rules, points + np.uint8(50))
    counts = {name: numbers_in(path / "party-0.ids", name) for name in ("asked", "served", "wrong")}
    assert counts == {"asked": {0: 20, DAY: 20}, "served": {0: 12, DAY: 12}, "wrong": {0: 1}}


def labels(node: Context, path: Path) -> None:
    """One set of labels was answered."""
    answered = (PEOPLE % 2).astype(np.uint8)
    count_labels(node, PEOPLE, answered, b"q" * 32, 1)
    answered[0] = 1
    with pytest.raises(ConfigError, match="labels that differ in too few rows"):
        count_labels(node, PEOPLE, answered, b"r" * 32, 1)


def explained(node: Context, path: Path) -> None:
    """These people were explained, with this secret."""
    with explained_people.claimed(node, PEOPLE, 1) as secret:
        assert secret == (path / "secret-of-set").read_bytes()
    with (
        pytest.raises(ConfigError, match="people of an explanation of the last 30 days"),
        explained_people.claimed(node, np.arange(1, 202, dtype=np.uint64), 1),
    ):
        pass


def told(node: Context, path: Path) -> None:
    """Parties were told about these people."""
    fresh = told_figures.fresh(np.arange(202, dtype=np.uint64))
    assert fresh.tolist() == [False] * 200 + [True] * 2
    assert not told_figures.claim(PEOPLE)


FILES: dict[str, Callable[[Context, Path], None]] = {
    "run-1-party-0.uploads": uploads,
    "party-0.predictions": predictions,
    "party-0.ids": ids,
    "party-0.information": labels,
    "party-0.explained": explained,
    "explained-labels": told,
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_the_earlier_version_is_refused_if_damaged_and_read_once(
    earlier: Context, tmp_path: Path, name: str
) -> None:
    path = tmp_path / "states" / name
    content = path.read_bytes()
    path.write_bytes(content[:40] + bytes([content[40] ^ 1]) + content[41:])
    with pytest.raises(VflError, match=r"damaged|cannot count|cannot be read"):
        FILES[name](earlier, path.parent)
    assert len(path.read_bytes()) == len(content)
    path.write_bytes(content)
    FILES[name](earlier, path.parent)
    assert path.read_bytes().startswith(b"SQLite format 3")


def test_the_last_day_of_drift_in_an_earlier_version_is_read(
    earlier: Context, tmp_path: Path
) -> None:
    with opened(tmp_path / "states" / "party-0.drift-rows", drift._earlier_rows) as ledger:
        assert ledger.numbers("day", PEOPLE).tolist() == [DAY] * 200
