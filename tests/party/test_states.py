"""States of parties and the checkpoint: of one run and moment, in folders of their owner's."""

import grp
import os
import pickle
import pwd
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import RecordDict
from torch import nn

from tests.strategy.test_checkpoint import CANCER, Cut, cut_after, resumed
from vfl_flower.config import files
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.files import check_own
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.earlier_run import PartyState, check_states
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.models import training
from vfl_flower.party import state, state_file
from vfl_flower.tools.cli import main
from vfl_flower.transport.flower_internals import state_to_bytes

KEYS: dict[str, Any] = {**CANCER, "epochs": 3, "checkpoint-every": 12, "strategy": "vafl"}


@pytest.mark.parametrize("how", ["in place", "new", "grown"])
def test_a_state_has_the_tensor_that_a_module_has_now(how: str) -> None:
    """The control: a tensor that changes in place, which the state has anyway."""
    model, kept = nn.BatchNorm1d(3), RecordDict()
    state.save_group(kept, "model", training.kept(model))
    assert model.running_mean is not None
    if how == "in place":
        model.running_mean.fill_(7)
    elif how == "new":
        model.running_mean = torch.full((3,), 7.0)
    else:
        model.running_mean.data = torch.full((5,), 7.0)
    shares = state.shares_memory(kept["model"], training.kept(model))
    assert shares == (how == "in place")
    if not shares:
        state.save_group(kept, "model", training.kept(model))
    found = state.load_arrays(pickle.loads(pickle.dumps(kept)), "model")["running_mean"]
    assert (found == 7).all() and found.shape == tuple(model.running_mean.shape)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A run that was cut short, one that was cut before its summary, and another run."""
    folder = tmp_path_factory.mktemp("made")
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


def swapped(folder: Path, another: Path) -> None:
    """Of a divided data set, the columns of parties differ in their values alone."""
    first, second = state_of(folder, 0), state_of(folder, 1)
    kept = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(kept)


def older_checkpoint(folder: Path, another: Path) -> None:
    """The label holder's half is put back from before the states that are kept."""
    found = checkpoint.load(folder)
    for party in range(2):
        state_of(folder, party, 1).unlink()
    checkpoint.Checkpoint(**{**vars(found), "number": found.number - 1}).save(folder)


def grow(folder: Path) -> None:
    found = checkpoint.load(folder)
    checkpoint.Checkpoint(**{**vars(found), "finished": True}).save(folder)
    run_local(2, {"grow": str(folder), "out": str(folder.with_name("grown"))})


HOW: dict[str, Callable[[Path, Path], Any]] = {
    "deleted": lambda run, _: state_of(run, 0).unlink(),
    "all deleted": lambda run, _: list(map(Path.unlink, run.glob("run-*-party-0-*.state"))),
    "put back": lambda run, _: shutil.copyfile(state_of(run, 0, 1), state_of(run, 0)),
    "swapped": swapped,
    "of the same moment": lambda run, other: shutil.copyfile(state_of(other, 0), state_of(run, 0)),
    "unmarked": lambda run, _: files.write_sealed(  # as an older version wrote it
        state_of(run, 0), state_to_bytes(state_file.read(state_of(run, 0)))
    ),
    "older checkpoint": older_checkpoint,
}
USES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "resume": ("cut", lambda run: resumed(run, 2)),
    "write what it reached": ("finished", lambda run: resumed(run, 2)),
    "predict": (
        "finished",
        lambda run: predict_local({"model": f"{run}", "out": f"{run}/said.csv"}),
    ),
    "grow": ("finished", grow),
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("use", USES)
def test_a_state_that_is_not_of_the_checkpoint_is_refused(
    made: dict[str, Path], tmp_path: Path, use: str, how: str
) -> None:
    name, uses = USES[use]
    folder = Path(shutil.copytree(made[name], tmp_path / "run"))
    HOW[how](folder, made["another"] if name == "cut" else made["cut"])
    before = {path.name: path.read_bytes() for path in folder.glob("party-*.npz")}
    said = r"Party [01] (does not have checkpoint \d+ of|has the state of checkpoint \d+, not)"
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


def test_a_party_that_was_away_has_the_state_that_it_told_of(
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
    with pytest.raises(
        ConfigError, match=r"Party 0 has the state of checkpoint \d+, not of checkpoint"
    ):
        resumed(copy, 2, **{"on-party-failure": "continue"})


def checkpoint_of(*parties: tuple[bool, int, int]) -> Any:
    """Checkpoint 5 of a run, with each party's presence, last exchange and last checkpoint."""
    seats = [
        {"party": party, "alive": alive, "exchange": exchange, "checkpoint": number}
        for party, (alive, exchange, number) in enumerate(parties)
    ]
    return SimpleNamespace(run="7-abc", number=5, strategy={"seats": seats})


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *(((39, 5), (40, 3)), ((41, 5), (40, 3)), ((40, 4), (40, 3)), ((40, 6), (40, 3))),
        *(((40, 5), (40, 2)), ((40, 5), (40, 6)), ((0, 5), (40, 3)), ((40, 0), (40, 3))),
    ],
)
def test_a_state_of_another_moment_is_refused(
    first: tuple[int, int], second: tuple[int, int]
) -> None:
    """Party 0 was there at the checkpoint. Party 1 was away, and had told of its checkpoint 3."""
    found = checkpoint_of((True, 40, 4), (False, 12, 3))
    for away in ((12, 3), (99, 4), (12, 5)):  # an absent party may have served more
        check_states(found, [PartyState(0, 40, 5), PartyState(1, *away)])
    wrong = 0 if first != (40, 5) else 1
    with pytest.raises(ConfigError, match=f"^Party {wrong} has the state of checkpoint"):
        check_states(found, [PartyState(0, *first), PartyState(1, *second)])


def test_only_parties_of_the_run_are_there_and_all_unless_some_may_be_missing() -> None:
    found = checkpoint_of((True, 40, 5), (True, 40, 5), (True, 40, 5))
    state = {party: PartyState(party, 40, 5) for party in range(4)}
    check_states(found, [state[0], state[1], state[2]])
    check_states(found, [state[0], state[2]], whole=False)
    for there, whole in (((0, 2), True), ((0, 1, 2, 3), True), ((0, 3), False)):
        with pytest.raises(ConfigError, match=f"has 3 parties, but {len(there)} are here"):
            check_states(found, [state[party] for party in there], whole)


@pytest.mark.nightly
def test_a_repeated_id_names_no_old_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder of this user's in one that a test may open to others."""
    folder = tmp_path / "shared" / "mine"
    folder.mkdir(0o700, parents=True)
    folder.parent.chmod(0o755)
    return folder


def other_owner(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lstat = Path.lstat

    def of_other(self: Path) -> os.stat_result:
        found = lstat(self)
        values = list(found)
        values[4] = 4242 if self == path else found.st_uid
        return os.stat_result(values)

    monkeypatch.setattr(Path, "lstat", of_other)


@pytest.mark.parametrize("mode", [0o777, 0o757, 0o775])
@pytest.mark.parametrize("above", [True, False])
def test_a_folder_that_others_write_to_is_refused(
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


def test_a_group_of_this_user_may_write(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
            with pytest.raises(ConfigError, match=r"by its group. .* or run `chmod g-w"):
                check_own(shared)
        monkeypatch.undo()
    monkeypatch.setattr("os.listxattr", lambda folder: ["system.posix_acl_access"])
    with pytest.raises(ConfigError, match="by its group"):  # an access list may name others
        check_own(shared)


def _with_group(group: int) -> Callable[[Path], os.stat_result]:
    lstat = Path.lstat
    return lambda self: os.stat_result([*lstat(self)[:5], group, *lstat(self)[6:]])


def test_links_of_others_are_refused(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = shared.parent / "link"
    link.symlink_to(shared)
    check_own(link / "run")
    for strange in (shared, link):
        with monkeypatch.context() as patched:
            other_owner(strange, patched)
            with pytest.raises(ConfigError, match=f"since {strange} belongs to user 4242"):
                check_own(link / "run")
    # The user's link into a folder that is open to others; and a link in such a folder.
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


def test_a_party_refuses_a_shared_folder_and_names_it_to_none(
    shared: Path, tmp_path: Path, own_log: list[str]
) -> None:
    states = [{"states": str(shared)}, {"states": str(tmp_path / "states")}]
    shared.chmod(0o777)
    with pytest.raises(VflError, match="Party 0 keeps its states in a folder that other") as raised:
        run_local(2, {**KEYS, "out": str(tmp_path / "run")}, node_configs=states)
    assert str(shared) not in str(raised.value) and "\n" not in str(raised.value)
    assert any(f"chmod o-w {shared}" in line for line in own_log)
    assert not list(shared.iterdir())
