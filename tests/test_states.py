"""States of parties and the checkpoint: of one run and moment, in folders of their owner's."""

from __future__ import annotations

import grp
import json
import os
import pwd
import secrets
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.conftest import ALL_ROWS
from tests.test_checkpoint import CANCER, Cut, cut_after, ledger, resumed
from vfl_flower import api, files
from vfl_flower.axes.privacy.embeddings import EmbeddingLedger
from vfl_flower.axes.privacy.ledger import ledger_of
from vfl_flower.axes.privacy.scalars import ScalarLedger
from vfl_flower.errors import ConfigError, Interrupted, Terminated, VflError
from vfl_flower.files import check_own
from vfl_flower.flower_internals import state_to_bytes
from vfl_flower.holder import checkpoint, results
from vfl_flower.holder.results import Results
from vfl_flower.messages import TrainOrder
from vfl_flower.party import state_file
from vfl_flower.start import predict_local, run_local
from vfl_flower.systems import resolve
from vfl_flower.tools.cli import main

KEYS: dict[str, Any] = {**CANCER, "epochs": 3, "checkpoint-every": 12, "strategy": "vafl"}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "draw_curves", lambda histories, path: None)


# --- states that are not of the checkpoint --------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that was cut short, one that was cut before its summary, and another run."""
    folder = tmp_path_factory.mktemp("made")
    with patch.object(results, "draw_curves", lambda histories, path: None):
        for name in ("cut", "another"):
            with cut_after(2), pytest.raises(Cut):
                run_local(2, {**KEYS, "out": str(folder / name)})
        run_local(2, {**KEYS, "out": str(folder / "finished")})
        (folder / "finished" / "summary.json").unlink()
    return {path.name: path for path in folder.iterdir()}


def state_of(folder: Path, party: int, before: int = 0) -> Path:
    """The file of a party's state, or of its state some checkpoints before."""
    found = checkpoint.load(folder)
    return folder / f"run-{found.run}-party-{party}-checkpoint-{found.number - before}.state"


def deleted(folder: Path, another: Path) -> None:
    state_of(folder, 0).unlink()


def all_deleted(folder: Path, another: Path) -> None:
    for path in folder.glob("run-*-party-0-*.state"):
        path.unlink()


def put_back(folder: Path, another: Path) -> None:
    state_of(folder, 0).write_bytes(state_of(folder, 0, 1).read_bytes())


def swapped(folder: Path, another: Path) -> None:
    """Of a divided data set, the columns of parties differ in their values alone."""
    first, second = state_of(folder, 0), state_of(folder, 1)
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def of_another_run(folder: Path, another: Path) -> None:
    """Of the same configuration, data and moment."""
    state_of(folder, 0).write_bytes(state_of(another, 0).read_bytes())


def unmarked(folder: Path, another: Path) -> None:
    """As an older version wrote it."""
    path = state_file.read(state_of(folder, 0))
    files.write_sealed(state_of(folder, 0), state_to_bytes(path))


def older_checkpoint(folder: Path, another: Path) -> None:
    """The label holder's half is put back from before the states that are kept."""
    found = checkpoint.load(folder)
    for party in range(2):
        state_of(folder, party, 1).unlink()
    checkpoint.Checkpoint(**{**vars(found), "number": found.number - 1}).save(folder)


def resume(folder: Path) -> None:
    resumed(folder, 2)


def predict(folder: Path) -> None:
    predict_local({"model": str(folder), "out": str(folder / "said.csv")})


def grow(folder: Path) -> None:
    found = checkpoint.load(folder)
    checkpoint.Checkpoint(**{**vars(found), "finished": True}).save(folder)
    run_local(2, {"grow": str(folder), "out": str(folder.with_name("grown"))})


HOW = [deleted, all_deleted, put_back, swapped, of_another_run, unmarked, older_checkpoint]
USES: dict[str, tuple[str, Callable[[Path], None]]] = {
    "resume": ("cut", resume),
    "write what it reached": ("finished", resume),
    "predict": ("finished", predict),
    "grow": ("finished", grow),
}


@pytest.mark.parametrize("how", HOW, ids=[each.__name__ for each in HOW])
@pytest.mark.parametrize("use", USES)
def test_a_state_that_is_not_of_the_checkpoint_is_refused(
    made: dict[str, Path], tmp_path: Path, use: str, how: Callable[[Path, Path], None]
) -> None:
    name, uses = USES[use]
    folder = Path(shutil.copytree(made[name], tmp_path / "run"))
    how(folder, made["another"] if name == "cut" else made["cut"])
    before = {path.name: path.read_bytes() for path in folder.glob("party-*.npz")}
    said = r"Party [01] (does not have|has not the state that) checkpoint \d+ (of that run|is of)"
    with pytest.raises(VflError, match=said) as raised:
        uses(folder)
    assert str(raised.value).endswith(".") and "\n" not in str(raised.value)
    assert not (folder / "said.csv").exists()
    assert use == "resume" or before == {
        path.name: path.read_bytes() for path in folder.glob("party-*.npz")
    }


@pytest.mark.parametrize("use", USES)
def test_states_of_the_checkpoint_are_used(made: dict[str, Path], tmp_path: Path, use: str) -> None:
    name, uses = USES[use]
    uses(Path(shutil.copytree(made[name], tmp_path / "run")))


@pytest.mark.parametrize("how", [deleted, swapped, of_another_run])
def test_without_marks_such_states_would_be_used(
    made: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: Any
) -> None:
    """The control: the exchange alone is compared, and where a run has ended not even that."""
    folder = Path(shutil.copytree(made["finished"], tmp_path / "run"))
    with np.load(folder / "party-0.npz") as file:
        right = dict(file)
    another = made["cut"] if how is not of_another_run else _alike(tmp_path)
    how(folder, another)
    monkeypatch.setattr(state_file, "_mark", lambda *_: None)
    monkeypatch.setattr(checkpoint, "check_states", lambda *_: None)
    resumed(folder, 2)
    with np.load(folder / "party-0.npz") as file:
        assert any(not np.array_equal(right[name], file[name]) for name in right)


def _alike(tmp_path: Path) -> Path:
    """Another run, of other data, to its end."""
    return run_local(2, {**KEYS, "seed": 1, "out": str(tmp_path / "other")}).folder


def test_a_party_that_was_away_may_have_the_state_that_it_told_of_and_no_older(
    made: dict[str, Path], tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made["cut"], tmp_path / "run"))
    found = checkpoint.load(folder)
    seat = found.strategy["seats"][0]
    state_of(folder, 0).unlink()
    seat |= {"alive": False, "checkpoint": found.number - 1}
    found.save(folder)
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    resumed(folder, 2, **{"on-party-failure": "continue"})
    seat["checkpoint"] = found.number  # and its file of that is gone
    found.save(copy)
    with pytest.raises(ConfigError, match=r"Party 0 has not the state that checkpoint"):
        resumed(copy, 2, **{"on-party-failure": "continue"})


# --- a run id that comes again --------------------------------------------------------------------


def test_a_run_id_that_comes_again_names_no_old_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs keep their states in one folder, as parties on nodes do."""
    monkeypatch.setattr(secrets, "randbits", lambda bits: 7)
    states = [{"states": str(tmp_path / "states")}] * 2
    for name, keys in {"first": KEYS, "second": {**KEYS, "seed": 1}}.items():
        with cut_after(2), pytest.raises(Cut):
            run_local(2, {**keys, "out": str(tmp_path / name)}, node_configs=states)
    kept = {checkpoint.load(tmp_path / name).run for name in ("first", "second")}
    assert len(kept) == 2 and all(name.startswith("7-") for name in kept)
    for name in ("first", "second"):  # neither has pruned or written over the other's
        finished = run_local(2, {"resume": str(tmp_path / name)}, node_configs=states)
        assert finished.summary["failure"] is None


# --- folders --------------------------------------------------------------------------------------


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder of this user's in one that a test may open to others."""
    folder = tmp_path / "shared" / "mine"
    folder.mkdir(0o700, parents=True)
    folder.parent.chmod(0o755)
    return folder


def other_owner(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if another user had made this file or folder."""
    lstat = Path.lstat

    def of_other(self: Path) -> os.stat_result:
        found = lstat(self)
        values = list(found)
        values[4] = 4242 if self == path else found.st_uid
        return os.stat_result(values)

    monkeypatch.setattr(Path, "lstat", of_other)


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o775])
@pytest.mark.parametrize("above", [True, False])
def test_a_folder_that_others_can_write_to_is_refused(
    shared: Path, mode: int, above: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_is_private", lambda folder, group: False)
    check_own(shared)
    open_to_others = shared.parent if above else shared
    open_to_others.chmod(mode)
    for folder in (shared, shared / "new"):
        with pytest.raises(ConfigError, match=rf"since {open_to_others} can be written to by"):
            check_own(folder)
    open_to_others.chmod(0o1777)
    if above:  # as the system's temporary folder is
        check_own(shared)
    else:
        with pytest.raises(ConfigError, match="by every user"):
            check_own(shared)
        check_own(shared / "new")


def test_a_group_of_this_user_alone_may_write(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared.parent.chmod(0o775)
    me = pwd.getpwuid(os.geteuid())
    own = (me.pw_name, "x", me.pw_gid)
    for group, private in {
        (*own, ()): True,
        (*own, (me.pw_name,)): True,
        (*own, ("mallory",)): False,
        ("staff" if me.pw_gid else "wheel", "x", me.pw_gid, ("mallory",)): False,
    }.items():
        found = grp.struct_group(group)
        monkeypatch.setattr(grp, "getgrgid", lambda number, found=found: found)
        monkeypatch.setattr(Path, "lstat", _with_group(me.pw_gid))
        if private:
            check_own(shared)
        else:
            with pytest.raises(ConfigError, match=r"by its group: .* or run `chmod g-w"):
                check_own(shared)
        monkeypatch.undo()
    monkeypatch.setattr(files, "_attributes", lambda folder: ["system.posix_acl_access"])
    with pytest.raises(ConfigError, match="by its group"):  # an access list may name others
        check_own(shared)


def _with_group(group: int) -> Callable[[Path], os.stat_result]:
    lstat = Path.lstat
    return lambda self: os.stat_result([*lstat(self)[:5], group, *lstat(self)[6:]])


def test_another_users_folder_and_another_users_link_are_refused(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = shared.parent / "link"
    link.symlink_to(shared)
    check_own(link / "run")
    for strange in (shared, link):
        with monkeypatch.context() as patched:
            other_owner(strange, patched)
            with pytest.raises(ConfigError, match=f"since {strange} belongs to user 4242"):
                check_own(link / "run")
    # A link of one's own into a folder that is open to others; and a link in such a folder.
    shared.chmod(0o777)
    with pytest.raises(ConfigError, match=f"since {shared} can be written to"):
        check_own(link / "run")
    shared.chmod(0o700)
    shared.parent.chmod(0o777)
    away = shared.parent.parent / "away"
    away.mkdir(0o700)
    away_link = shared.parent / "away"
    away_link.symlink_to(Path("..", "away"))
    with pytest.raises(ConfigError, match=f"since {shared.parent} can be written to"):
        check_own(away_link / "run")
    loop = away / "loop"
    loop.symlink_to("loop")
    with pytest.raises(OSError, match="symbolic links"):
        check_own(loop / "run")


def test_a_run_refuses_a_shared_results_folder_and_makes_nothing_there(
    shared: Path, made: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    kept = Path(shutil.copytree(made["finished"], shared / "kept"))
    shared.parent.chmod(0o777)
    said = f"since {shared.parent} can be written to by every user"
    for command in (
        ["run", "-c", "dataset='breast-cancer' epochs=1", "--out", str(shared / "run")],
        ["run", "-c", f"resume='{kept}'"],
        ["predict", str(kept)],
    ):
        assert main(command) == 1
        assert said in capsys.readouterr().err
    assert [path.name for path in shared.iterdir()] == ["kept"]
    shared.parent.chmod(0o755)  # the control
    assert main(["predict", str(kept)]) == 0


def test_a_party_refuses_a_shared_folder_of_states_and_does_not_name_it(
    shared: Path, tmp_path: Path, own_log: list[str]
) -> None:
    states = [{"states": str(shared)}, {"states": str(tmp_path / "states")}]
    shared.chmod(0o777)
    with pytest.raises(VflError, match="Party 0 keeps its states in a folder that other") as raised:
        run_local(2, {**KEYS, "out": str(tmp_path / "run")}, node_configs=states)
    assert str(shared) not in str(raised.value) and "\n" not in str(raised.value)
    assert any(f"chmod o-w {shared}" in line for line in own_log)
    assert not list(shared.iterdir())


# --- Ctrl-C and SIGTERM ---------------------------------------------------------------------------


def signalled(number: signal.Signals, evaluation: int, again: bool = False) -> Any:
    """While this is patched in, a signal comes at an evaluation; or two do."""
    evaluated = Results.evaluated

    def send(self: Results, entry: dict[str, Any]) -> None:
        evaluated(self, entry)
        if len(self.history) == evaluation:
            signal.raise_signal(number)
            if again:
                signal.raise_signal(number)

    return patch.object(Results, "evaluated", send)


@pytest.fixture
def sigterm() -> Any:
    """SIGTERM would end the tests: as if nobody had a handler for it, and none was needed."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    assert signal.getsignal(signal.SIGTERM) is before


WHOLE = {**CANCER, "epochs": 3}


@pytest.mark.parametrize(
    ("number", "error", "words"),
    [(signal.SIGINT, Interrupted, "Ctrl-C"), (signal.SIGTERM, Terminated, "SIGTERM")],
)
def test_a_run_that_is_interrupted_keeps_a_checkpoint(
    number: signal.Signals, error: type[BaseException], words: str, tmp_path: Path, sigterm: None
) -> None:
    whole = run_local(2, {**WHOLE, "out": str(tmp_path / "whole")})
    folder = tmp_path / "run"
    with signalled(number, 1), pytest.raises(error) as raised:
        run_local(2, {**WHOLE, "out": str(folder)})
    said = json.loads((folder / "summary.json").read_text())["failure"]
    assert said == f"{words} ended the run after 1 epochs."
    assert str(raised.value) == f"{said[:-1]}: resume='{folder}' goes on with it."
    found = checkpoint.load(folder)
    assert not found.finished and len(found.strategy["history"]["entries"]) == 1
    predict_local({"model": str(folder)})
    run = resumed(folder, 2)
    for name in ("top", "party-0", "party-1"):
        for key, value in whole.parameters(name).items():
            np.testing.assert_array_equal(run.parameters(name)[key], value)
    assert [each["test_loss"] for each in run.history] == [
        each["test_loss"] for each in whole.history
    ]


def test_the_second_ctrl_c_ends_a_run_at_once(tmp_path: Path) -> None:
    with signalled(signal.SIGINT, 1, again=True), pytest.raises(KeyboardInterrupt) as raised:
        run_local(2, {**WHOLE, "out": str(tmp_path / "run")})
    assert not isinstance(raised.value, Interrupted)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["failure"] == "Ctrl-C ended the run."
    assert not (tmp_path / "run" / checkpoint.FILE).exists()  # the control: as it always was
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_the_last_exchange_ends_a_run_that_is_kept_whole(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with signalled(signal.SIGINT, 3), pytest.raises(Interrupted):
        run_local(2, {**WHOLE, "out": str(folder)})
    resumed(folder, 2)
    assert checkpoint.load(folder).finished
    assert json.loads((folder / "summary.json").read_text())["failure"] is None


def test_a_handler_of_the_callers_own_stays(tmp_path: Path) -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        with signalled(signal.SIGINT, 1):
            run_local(2, {**WHOLE, "out": str(tmp_path / "run")})
    finally:
        signal.signal(signal.SIGINT, before)
    assert came == [signal.SIGINT]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_the_command_says_how_to_go_on(
    number: signal.Signals, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    command = ["run", "-c", "dataset='breast-cancer' epochs=3", "--out", str(folder)]
    with signalled(number, 1):
        try:
            ended = main(command)
        except SystemExit as error:
            ended = int(str(error.code))
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended == code
    assert said.endswith(f"ended the run after 1 epochs: resume='{folder}' goes on with it.")
    assert main(["run", "-c", f"resume='{folder}'"]) == 0


def test_train_in_python_keeps_what_was_trained_and_goes_on_with_it() -> None:
    generator = np.random.default_rng(0)
    features = [generator.standard_normal((120, 3)) for _ in range(2)]
    labels = (features[0][:, 0] > 0).astype(int)
    keys = {"epochs": 3, "bottom-hidden": 4, "embedding-size": 2}
    with signalled(signal.SIGINT, 1), pytest.raises(KeyboardInterrupt) as raised:
        api.train(keys, features, labels)
    assert isinstance(raised.value, Interrupted)
    folder = Path(raised.value.folder)
    try:
        assert str(raised.value).endswith(f"resume='{folder}' goes on with it.")
        assert len(api.load(folder).predict(features)) == 120
        with pytest.raises(VflError, match=r"has other rows, classes or values|has not the data"):
            api.train({"resume": str(folder)}, [each + 1 for each in features][::-1], 1 - labels)
        model = api.train({"resume": str(folder)}, features, labels)
        assert model.summary["failure"] is None and len(model.history) == 3
        with pytest.raises(ConfigError, match="has finished: there is nothing to resume"):
            api.train({"resume": str(folder)}, features, labels)
    finally:
        shutil.rmtree(folder.parent)


COUNTED: dict[str, dict[str, Any]] = {
    "dpzv": {"strategy": "dpzv", "window": 4, "noise-multiplier": 1.5},
    "in secret": {
        **{"strategy": "dpzv", "noise-multiplier": 1.5, "calibration": "secret"},
        **{"sampling": "poisson"},
    },
    "perturbed": {"strategy": "vafl", "privacy": "perturbed-embedding", "window": 1},
    "perturbed, Poisson": {
        **{"strategy": "vafl", "privacy": "perturbed-embedding", "sampling": "poisson"},
    },
    "perturbed, asked again": {
        **{"strategy": "vafl-t", "quorum": 2, "max-delay": 3, "delay": "exponential"},
        **{"privacy": "perturbed-embedding"},
    },
}


@pytest.mark.one_by_day
@pytest.mark.parametrize("keys", COUNTED.values(), ids=list(COUNTED))
def test_what_was_released_before_ctrl_c_counts_after_it(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    folder, keys = tmp_path / "run", {**CANCER, **ALL_ROWS, "epochs": 3, **keys}
    with signalled(signal.SIGINT, 2), pytest.raises(Interrupted):
        run_local(3, {**keys, "out": str(folder)})
    before = json.loads((folder / "summary.json").read_text())
    accountant = ledger(ledger_of(resolve(keys)), keys)
    accountant.multiplier = 1.5  # type: ignore[attr-defined]
    accountant.keep_journal(folder / "releases.journal")
    figures = accountant.figures()
    assert all(before[name] == figures[name] for name in figures) and figures["epsilon"] > 0
    assert resumed(folder, 3).summary["epsilon"] > before["epsilon"]


@pytest.mark.nightly
@pytest.mark.parametrize("again", range(20))
def test_uploads_so_far_are_told_by_few_events(again: int) -> None:
    """Orders in any sequence, as by parties that come back, count the same by their events."""
    generator = np.random.default_rng(again)
    keys = {**CANCER, **COUNTED["perturbed, asked again"]}
    counted, told = (ledger(EmbeddingLedger, keys) for _ in range(2))
    for _ in range(generator.integers(1, 40)):
        party, epoch, first = (int(generator.integers(0, most)) for most in (3, 5, 8))
        order = TrainOrder(exchange=0, epoch=epoch, first=first, steps=1, coordinated=False)
        counted._ordered(party, order)
    for kind, party, *place, ids in counted.so_far():
        assert kind == 0 and not len(ids)
        epoch, first, steps = place
        order = TrainOrder(exchange=0, epoch=epoch, first=first, steps=steps, coordinated=False)
        told._ordered(party, order)
    for name in ("passes", "last", "steps", "unseen"):
        assert getattr(counted, name) == getattr(told, name)


def test_without_those_counts_less_would_be_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScalarLedger, "so_far", lambda self: iter(()))
    folder = tmp_path / "run"
    keys = {**CANCER, "epochs": 3, **COUNTED["dpzv"]}
    with signalled(signal.SIGINT, 2), pytest.raises(Interrupted):
        run_local(3, {**keys, "out": str(folder)})
    before = json.loads((folder / "summary.json").read_text())
    assert resumed(folder, 3).summary["epsilon"] < before["epsilon"]
