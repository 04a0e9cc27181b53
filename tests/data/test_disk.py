"""Runs on a disk that is full, that damages files, or that others write to at once."""

import errno
import json
import os
import shutil
import signal
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from tests import organisations
from tests.conftest import nightly, of_words
from tests.full_disk import full_after
from tests.organisations import cancer, contents
from tests.serving import served
from tests.strategy.test_checkpoint import (
    CANCER,
    DPZV,
    Cut,
    assert_equal_runs,
    cut_after,
    interrupted,
    released,
    resumed,
)
from vfl_flower import client_app
from vfl_flower.config.audit_chain import verify
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import (
    append,
    locked,
    make_folder,
    opened_to_append,
    whole,
    write_whole,
)
from vfl_flower.config.options import RunningConfig
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.results import Results, in_use
from vfl_flower.launch import engines
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.party import state_file
from vfl_flower.results.report import write_report
from vfl_flower.tools.cli import main
from vfl_flower.transport.flower_internals import state_from_bytes, state_to_bytes
from vfl_flower.transport.messages import DescribeOrder, Description
from vfl_flower.transport.wire import read_reply, to_message


def there(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def sound(folder: Path) -> None:
    """All files are whole: a run's results, its checkpoint, journal and states."""
    for path in folder.iterdir():
        if path.name == "checkpoint.npz":
            checkpoint.load(folder)
        elif path.suffix == ".npz":
            with np.load(path) as file:
                assert all(np.isfinite(file[name]).all() for name in file.files)
        elif path.name.endswith(".jsonl"):
            assert all(json.loads(line) for line in path.read_text().splitlines())
        elif path.suffix == ".json":
            assert json.loads(path.read_text())
        elif path.suffix == ".state":
            assert state_file.read(path)
        elif path.name == "releases.journal":
            released(folder)
        else:
            assert path.suffix in (".csv", ".parquet", ".html", ".md"), path


# --- one file -----------------------------------------------------------------------------------


@pytest.mark.parametrize("before", [None, b"as it was"])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, before: bytes | None) -> None:
    path = tmp_path / "file"
    if before:
        path.write_bytes(before)
    for size in range(0, 100, 9):
        with full_after(size), pytest.raises(VflError) as raised:
            write_whole(path, b"x" * 100)
        sentence = rf"{path} cannot be written (File too large). Fix that, and try again."
        assert str(raised.value) == sentence
        assert there(tmp_path) == ({"file": before} if before else {})
    with pytest.raises(VflError, match=r"\(No such file or directory\). Name a path that you can"):
        make_file = tmp_path / "none" / "file"
        write_whole(make_file, b"")
    with pytest.raises(Cut), whole(path) as file:
        file.write(b"x")
        raise Cut
    assert there(tmp_path) == ({"file": before} if before else {})
    with full_after(100):
        write_whole(path, b"x" * 100)
    assert there(tmp_path) == {"file": b"x" * 100}


def test_what_is_added_is_added_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "file"
    append(path, b"first")
    for size in range(5, 14):
        with full_after(size), pytest.raises(VflError, match="cannot be written"):
            append(path, b"the second")
        assert path.read_bytes() == b"first"
    append(path, b"the second")
    assert path.read_bytes() == b"firstthe second"


def test_files_and_then_their_folders_are_on_the_disk(tmp_path: Path) -> None:
    synced: list[str] = []

    def fsync(file: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{file}"))

    with patch("os.fsync", fsync):
        write_whole(tmp_path / "file", b"x")
    assert synced == [str(tmp_path / "file.new"), str(tmp_path)]


@pytest.mark.parametrize("umask", [0, 0o22, 0o77])
def test_files_and_folders_are_their_owners_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    folder = tmp_path / "one" / "in" / "another"
    before = os.umask(umask)
    try:
        make_folder(folder)
        write_whole(folder / "whole", b"x")
        append(folder / "added", b"x")
    finally:
        os.umask(before)
    of_folders = [each.stat().st_mode for each in (folder, *folder.parents[:2])]
    assert [stat.S_IMODE(each) for each in of_folders] == [0o700] * 3
    assert [stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()] == [0o600] * 2


@of_words
def test_only_their_owner_reads_what_a_run_leaves(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        out = tmp_path / "above" / "run"
        keys = {**CANCER, "strategy": "vafl", "privacy": "perturbed-embedding", "epochs": 2}
        run_local(2, {**keys, "checkpoint-every": 4, "out": str(out)})
        predict_local({"model": str(out)})
        predict_local({"model": str(out), "out": str(out / "deep" / "er" / "said.parquet")})
        assert main(["report", str(out)]) == 0
        with opened_to_append(out / "flower.log") as log:
            log.write(b"a line")
    finally:
        os.umask(before)
    left = [out.parent, *out.parent.rglob("*")]
    names = {path.name for path in left}
    assert names > {"history.jsonl", "summary.json", "top.npz", "party-0.npz", "checkpoint.npz"}
    assert names > {"releases.journal", "predictions.journal", "predictions.csv", "said.parquet"}
    assert names > {"predictions.json", "said.json", "report.html", "flower.log"}
    due = {path: 0o600 if path.is_file() else 0o700 for path in left}
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in left} == due


# --- a disk that is full ------------------------------------------------------------------------


def test_a_full_disk_ends_a_run_by_a_sentence_and_leaves_no_half_file(tmp_path: Path) -> None:
    keys = {**DPZV, "epochs": 2, "checkpoint-every": 6, "noise-seed": 0}
    done = run_local(2, {**keys, "out": str(tmp_path / "whole")})
    sizes = sorted({path.stat().st_size for path in done.folder.iterdir()})
    ended = []
    for number, size in enumerate([0, 100, *(each - 100 for each in sizes), sizes[-1] + 2000]):
        out = tmp_path / str(number)
        try:
            with full_after(size):
                run_local(2, {**keys, "out": str(out)})
        except VflError as error:
            ended.append(str(error))
            assert str(error).endswith(".") and "\n" not in str(error)
        sound(out)
    assert len(ended) == len(sizes) + 2  # all but the last
    assert all("(File too large)" in each or "cannot save its state" in each for each in ended)


FILES = {
    "history.jsonl": r"history.jsonl cannot be written \(No space left on device\)",
    "releases.journal": r"A release cannot be written to .* \(No space left on device\)",
    "releases.journal.new": r"releases.journal cannot be written",
    "checkpoint.npz.new": r"checkpoint.npz cannot be written",
    "party-1-checkpoint-0.state.new": r"Party 1 failed: cannot save its state. See its own log",
    "party-1-checkpoint-1.state.new": r"Party 1 failed: cannot save its state. See its own log",
    "top.npz.new": r"top.npz cannot be written",
    "summary.json.new": r"summary.json cannot be written",
    "party-1.npz.new": r"party-1.npz cannot be written",
}


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", FILES)
def test_each_file_that_the_disk_refuses_is_told(tmp_path: Path, name: str) -> None:
    keys = {**DPZV, "epochs": 2, "checkpoint-every": 6, "noise-seed": 0}
    keys["out"] = str(tmp_path / "run")
    sync = os.fsync

    def fsync(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").endswith(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(file)

    with patch("os.fsync", fsync), pytest.raises(VflError, match=FILES[name]) as raised:
        run_local(2, keys)
    assert str(raised.value).endswith(".") and "\n" not in str(raised.value)
    sound(tmp_path / "run")
    left = there(tmp_path / "run")
    assert not any(each.endswith(".new") for each in left)
    if "checkpoint.npz" in left and not name.startswith("party-1.npz"):  # now there is room again
        assert resumed(tmp_path / "run", 2).summary["failure"] is None


def test_a_full_disk_elsewhere_is_a_sentence(tmp_path: Path, capsys: Any) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/tmp/vfl-flower")
    with patch.object(engines, "SuperLink", side_effect=full):  # its folder is a temporary one
        assert main(["run", "--engine", "ray", "--out", str(tmp_path / "run")]) == 1
    said = "vfl: /tmp/vfl-flower is out of space: make some, and try again.\n"
    assert capsys.readouterr().err == said


@pytest.mark.one_by_day
@pytest.mark.parametrize("name", ["said.csv", "said.parquet"])
def test_a_full_disk_leaves_no_half_predictions(tmp_path: Path, name: str) -> None:
    run_local(2, {**CANCER, "epochs": 1, "out": str(tmp_path / "run")})
    keys = {"model": str(tmp_path / "run"), "out": str(tmp_path / name)}
    for size in (10, 300, 1000):
        with full_after(size), pytest.raises(VflError, match=r"said.* \(File too large\)\. Fix"):
            predict_local(keys)
        assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with (
        locked(tmp_path / f"{name}.lock", ""),  # as who writes it just now has it
        pytest.raises(ConfigError, match=rf"^Another process writes {tmp_path / name}\. Name"),
    ):
        predict_local(keys)
    predict_local(keys)
    assert {path.name for path in tmp_path.iterdir()} == {"run", name, "said.json"}
    (page := tmp_path / "run" / "report.html").write_text("an earlier page")
    with full_after(1000), pytest.raises(VflError, match=rf"^{page} cannot .* large\).* --out\.$"):
        write_report([page.parent])
    assert page.read_text() == "an earlier page"


@contextmanager
def full_below(folder: Path) -> Iterator[None]:
    """Let no file in a folder be written, as on a full disk."""
    write, sync = os.write, os.fsync

    def check(file: int) -> None:
        if os.readlink(f"/proc/self/fd/{file}").startswith(str(folder)):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def writes(file: int, content: bytes) -> int:
        check(file)
        return write(file, content)

    def syncs(file: int) -> None:
        check(file)
        sync(file)

    with patch("os.write", writes), patch("os.fsync", syncs):
        yield


@pytest.mark.one_by_day
@pytest.mark.parametrize("subsets", ["sampled", ""])
def test_a_full_disk_of_a_party_costs_its_scores_for_so_long(tmp_path: Path, subsets: str) -> None:
    made = organisations.cut(tmp_path, cancer(columns=6, rows=200), known=1.0)
    (full := tmp_path / "states-1").mkdir(0o700)
    made.words = [{"states": str(tmp_path / "states-0")}, {"states": str(full)}]
    keys = {"epochs": 1, "bottom-hidden": 4, "batch-size": 64}
    with (
        full_below(full),
        pytest.raises(VflError, match=r"^Party 1 failed: cannot save its state\. See its own log"),
    ):
        made.run("run", keys)
    run = made.run("run", keys | ({"subsets": subsets} if subsets else {})).folder
    nodes = made.node_configs
    with served(run, tmp_path, {"dataset": f"files:{made.labels}"}, nodes) as found:
        one = int(found.loaded.rows.ids[0])

        def asked() -> tuple[int, Any]:
            reply = found.http.post("/v1/predict", json={"ids": [one]})
            said = reply.json()
            return reply.status_code, said.get("error") or said["predictions"][0]["missing"]

        assert asked() == (200, {})  # the control
        with full_below(full):
            said = asked()
            assert asked() == said  # the first one was no accident
        named = "The model needs all its parties, and these do not answer: party 1 (refused)."
        assert said == ((200, {"1": "refused"}) if subsets else (503, named))
        assert asked() == (200, {})
    for party, lines in ((0, 4), (1, 2)):  # nothing was scored without a line
        log = tmp_path / f"states-{party}" / f"party-{party}-audit.jsonl"
        events = [json.loads(line)["event"] for line in log.read_text().splitlines()]
        assert events.count("score") == lines
        verify(log)


SIDES = {"label holder": ("out", "home"), "party 0": ("states-0",), "party 1": ("states-1",)}


@pytest.mark.one_by_day
@pytest.mark.parametrize("restored", [(), ("party 0",), ("label holder",), tuple(SIDES)])
def test_backups_of_one_night_fit_and_of_two_nights_are_refused_or_fit(
    tmp_path: Path, restored: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VFL_HOME", str(tmp_path / "home"))
    made = organisations.cut(tmp_path, cancer(columns=6, rows=200), known=1.0)
    made.words = [{"states": str(tmp_path / f"states-{party}")} for party in range(2)]
    folders = [each for side in SIDES.values() for each in side]
    keys = {"epochs": 3, "patience": 0.0, "bottom-hidden": 4, "batch-size": 32}
    keys["checkpoint-every"] = 8

    def back_up(night: str) -> None:
        for each in folders:
            shutil.copytree(tmp_path / each, tmp_path / night / each)

    with cut_after(2), pytest.raises(Cut):
        made.run("out", keys)
    back_up("first")
    made.resume("out")
    back_up("second")
    for side in restored:
        for each in SIDES[side]:
            shutil.rmtree(tmp_path / each)
            shutil.copytree(tmp_path / "first" / each, tmp_path / each)
    given, nodes = {"dataset": f"files:{made.labels}"}, made.node_configs
    if restored == ("party 0",):
        with (
            pytest.raises(VflError, match=r"^Party 0 does not have checkpoint"),
            served(tmp_path / "out", tmp_path, given, nodes),
        ):
            pass
        return
    with served(tmp_path / "out", tmp_path, given, nodes) as found:
        assert found.service.about()["finished"] == (not restored)
        assert found.ask(int(found.loaded.rows.ids[0]))[0]["missing"] == {}
    if restored:
        assert made.resume("out").summary["failure"] is None


# --- damage -------------------------------------------------------------------------------------


def flips(content: bytes, cases: int) -> Iterator[bytes]:
    """So many damages, spread over the content: bytes changed, and cut off there."""
    for number in range(cases):
        at = number * len(content) // cases
        if number % 5 == 4:
            yield content[:at]
        else:
            change = (1, 2, 0x40, 0x80)[number % 4]
            yield content[:at] + bytes([content[at] ^ change]) + content[at + 1 :]


def of_party(folder: Path, run: int = 7) -> Context:
    node: dict[str, Any] = {"partition-id": 0, "states": str(folder)}
    state = RecordDict()
    state["scalars"] = ConfigRecord({"exchange": 5, "secret": b"secret"})
    state["model"] = ArrayRecord([np.arange(24.0).reshape(4, 6), np.ones(6)])
    return Context(run, 1, node, state, {})


@pytest.mark.parametrize("cases", [200, nightly(4_000)])
def test_no_damaged_state_of_a_party_is_used(tmp_path: Path, cases: int) -> None:
    context = of_party(tmp_path)
    state_file.save(context, 5)
    path = state_file.place(context, 5)
    content = path.read_bytes()
    seen = 0
    for each in flips(content, cases):
        path.write_bytes(each)
        with pytest.raises(ConfigError, match=r"Party 0 does not have checkpoint 5 of that run"):
            state_file.load(context, "7", 5)
        anew = Context(7, 1, context.node_config, RecordDict(), {})
        state_file.load_latest(anew, "7")
        assert not anew.state
        try:  # the control: without its checksum
            state = state_from_bytes(each[: len(content) - 32])
            kept = RecordDict({name: state[name] for name in state if name != "mark"})
            seen += kept.keys() == context.state.keys() and kept != context.state
        except VflError:
            pass
    assert seen > cases / 10  # another model, and nobody would have known
    path.write_bytes(content)
    assert state_file.load(context, "7", 5).state == context.state


def test_a_party_goes_on_from_the_last_state_that_is_sound(tmp_path: Path) -> None:
    context = of_party(tmp_path)
    for number, exchange in ((1, 5), (2, 9)):
        context.state["scalars"] = ConfigRecord({"exchange": exchange, "secret": b"secret"})
        state_file.save(context, number)
        os.utime(state_file.place(context, number), (number, number))
    last = state_file.place(context, 2)
    last.write_bytes(last.read_bytes()[:-1] + b"x")
    anew = Context(7, 1, context.node_config, RecordDict(), {})
    state_file.load_latest(anew, "7")
    assert anew.state["scalars"] == ConfigRecord({"exchange": 5, "secret": b"secret"})


@pytest.fixture
def cut(tmp_path: Path) -> Path:
    return interrupted(tmp_path / "cut", {**DPZV, "checkpoint-every": 5, "noise-seed": 0}, 2, 2)


@pytest.mark.parametrize("cases", [200, nightly(4_000)])
def test_no_damaged_checkpoint_is_used(cut: Path, cases: int) -> None:
    path = cut / checkpoint.FILE
    content = path.read_bytes()
    for each in flips(content, cases):
        path.write_bytes(each)
        with pytest.raises(ConfigError, match=r"is damaged, or another version wrote it"):
            checkpoint.load(cut)
    path.write_bytes(content)
    assert checkpoint.load(cut).number > 0


# --- killed anywhere ----------------------------------------------------------------------------


def test_a_party_keeps_its_newest_two_states_whatever_their_numbers(tmp_path: Path) -> None:
    context = of_party(tmp_path)
    others = [state_file.place(of_party(tmp_path, 8), 3), state_file.place(context)]
    for path in others:
        path.write_bytes(b"of another run, and of the end of a session")
    kept = {0: [0], 10: [0, 10], 20: [10, 20], 25: [20, 25], 7: [7, 25], 26: [25, 26]}
    for number, numbers in kept.items():
        state_file.save(context, number)
        left = {state_file.place(context, each) for each in numbers}
        assert set(tmp_path.iterdir()) == {*left, *others}


def test_a_run_that_is_killed_before_its_first_checkpoint_begins_anew(tmp_path: Path) -> None:
    keys = {**CANCER, "epochs": 3, "checkpoint-every": 1000}
    whole_run = run_local(2, {**keys, "out": str(tmp_path / "whole")})
    folder = interrupted(tmp_path / "cut", keys, 2, 2)
    assert checkpoint.load(folder).number == 0
    assert_equal_runs(resumed(folder, 2), whole_run, 2)
    assert RunningConfig().exchanges_apart(False) == 1000  # as on nodes, unless it is said


@pytest.mark.parametrize(("keys", "numbers"), [({}, ["0"]), ({"checkpoint-every": 0}, [])])
def test_on_nodes_parties_keep_their_beginning(
    tmp_path: Path, keys: dict[str, Any], numbers: list[str]
) -> None:
    given: dict[str, Any] = {**CANCER, **keys}
    node: dict[str, Any] = {"partition-id": 0, "num-partitions": 2, "states": str(tmp_path)}
    context = Context(7, 2, node, RecordDict(), given)
    reply = client_app.app(to_message(DescribeOrder(outputs=1), 2, 60.0), context)
    assert read_reply(reply, Description).exchange == 0
    assert [path.stem.rsplit("-")[-1] for path in tmp_path.iterdir()] == numbers
    if numbers:
        kept = state_file.load(context, "7", 0).state
        assert state_to_bytes(kept) == state_to_bytes(context.state)


def test_what_was_released_before_the_first_checkpoint_stays_counted(tmp_path: Path) -> None:
    keys = {**DPZV, "delta": 1e-3, "checkpoint-every": 1000}
    whole_run = run_local(2, {**keys, "out": str(tmp_path / "whole")})
    folder = interrupted(tmp_path / "cut", keys, 2, 2)
    before = sum(event[2] for event in released(folder))
    assert before > 16 and checkpoint.load(folder).strategy["plan"]["answered"] == 0
    run = resumed(folder, 2)
    assert sum(event[2] for event in released(folder)) == 48  # which is all that was planned
    assert run.summary["epsilon"] == pytest.approx(whole_run.summary["epsilon"])


@contextmanager
def killed_before_the_results() -> Iterator[None]:
    with patch.object(Results, "finish", side_effect=Cut), pytest.raises(Cut):
        yield


@pytest.mark.one_by_day
@pytest.mark.parametrize("every", [0, 7])
@pytest.mark.parametrize("failed_before", [False, True])
def test_unwritten_results_need_no_training(
    tmp_path: Path, every: int, failed_before: bool
) -> None:
    keys = {**CANCER, "strategy": "vafl", "privacy": "perturbed-embedding", "noise-seed": 0}
    keys |= {"epochs": 2, "checkpoint-every": every}
    whole_run = run_local(3, {**keys, "out": str(tmp_path / "whole")})
    folder = tmp_path / "cut"
    with killed_before_the_results():
        run_local(3, {**keys, "out": str(folder)})
    for path in folder.glob("party-*.npz"):  # which in process are written last
        path.unlink()
    if failed_before:
        (folder / "summary.json").write_text('{"failure": "the disk was full"}')
    before = contents(folder)
    assert "top.npz" not in before and checkpoint.load(folder).finished

    def silent(message: Message, context: Context) -> Message:
        raise AssertionError("a party is asked for something")

    client: Any = silent
    run = run_local(3, {"resume": str(folder)}, client)
    assert_equal_runs(run, whole_run)
    after = contents(folder)
    written = {"summary.json", "history.jsonl", "top.npz", "model_card.md", "model_card.html"}
    written |= {f"party-{n}.npz" for n in range(3)}
    assert {name for name in after if after[name] != before.get(name)} <= written
    with pytest.raises(ConfigError, match=r"has finished\. Leave the option resume out\."):
        resumed(folder, 3)


# --- several at once ----------------------------------------------------------------------------


class Meanwhile:
    """The ClientApp; as it serves its third training message, something else is tried."""

    def __init__(self, what: Any) -> None:
        self.what = what
        self.served = 0

    def __call__(self, message: Message, context: Context) -> Message:
        self.served += message.metadata.message_type == "train"
        if self.served == 3:
            self.served += 1
            with pytest.raises(ConfigError) as raised:
                self.what()
            self.refused = str(raised.value)
        return client_app.app(message, context)


def test_a_run_is_resumed_once_at_a_time(cut: Path) -> None:
    """Else both would release what one was allowed to: epsilon would be of one, and true of two."""
    client: Any = Meanwhile(lambda: resumed(cut, 2))
    run = run_local(2, {"resume": str(cut)}, client)
    assert client.refused == f"Another run uses {cut}. Wait until it ends, or name another folder."
    assert run.summary["failure"] is None
    assert sum(event[2] for event in released(cut)) == 48
    assert "run.lock" not in contents(cut)


def test_two_runs_are_not_in_one_folder_at_once(tmp_path: Path) -> None:
    keys = {**CANCER, "epochs": 2, "out": str(tmp_path / "run")}
    whole_run = run_local(2, {**keys, "out": str(tmp_path / "whole")})

    def beside() -> None:
        for name in ("history.jsonl", "checkpoint.npz"):  # by which it would be seen to be there
            (tmp_path / "run" / name).unlink(missing_ok=True)
        run_local(2, keys)

    client: Any = Meanwhile(beside)
    run = run_local(2, keys, client)
    assert client.refused.startswith(f"Another run uses {tmp_path / 'run'}. ")
    assert_equal_runs(run, whole_run, 2)


def test_a_run_is_submitted_once_at_a_time_and_not_beside_another(tmp_path: Path) -> None:
    run_config = {"out": str(tmp_path / "run")}
    with engines._submitting(run_config):
        with in_use(tmp_path / "run"):  # as its ServerApp has it
            pass
        with pytest.raises(ConfigError, match="Another run uses"), engines._submitting(run_config):
            pass
    with patch.object(engines, "SuperLink", side_effect=AssertionError), in_use(tmp_path / "run"):
        with pytest.raises(ConfigError, match="Another run uses"), engines._submitting(run_config):
            pass
        for engine in (engines.run_ray, engines.run_supernodes):  # nothing is started
            with pytest.raises(ConfigError, match="Another run uses"):
                engine(2, {**CANCER, **run_config})
    assert there(tmp_path / "run") == {}


def test_the_folder_of_a_run_that_was_killed_is_free(tmp_path: Path) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        with in_use(tmp_path):
            os.write(writing, b"x")
            signal.pause()
        os._exit(0)
    try:
        assert os.read(reading, 1) == b"x"
        with pytest.raises(ConfigError, match="Another run uses"), in_use(tmp_path):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with in_use(tmp_path):
        assert (tmp_path / "run.lock").exists()
    assert there(tmp_path) == {}


def test_of_many_one_holds_a_lock_that_is_removed_and_made_anew(tmp_path: Path) -> None:
    path, inside, turns = tmp_path / "lock", [], []

    def take() -> None:
        for _ in range(300):
            try:
                with locked(path, "Somebody holds it."):
                    inside.append(1)
                    assert len(inside) == 1
                    turns.append(1)
                    inside.pop()
            except ConfigError as error:
                assert str(error) == "Somebody holds it."

    with ThreadPoolExecutor(4) as threads:
        for each in [threads.submit(take) for _ in range(4)]:
            each.result()
    assert len(turns) > 300 and not path.exists()
