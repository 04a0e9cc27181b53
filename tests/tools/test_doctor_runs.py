"""`vfl doctor RUN`: whether a run can be resumed, and predict."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.organisations import contents, kept_state
from vfl_flower.config.errors import VflError
from vfl_flower.config.files import locked
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.tools.cli import main
from vfl_flower.tools.doctor import runs
from vfl_flower.tools.doctor.examine import examine
from vfl_flower.tools.doctor.finding import OK, PROBLEM, UNKNOWN, WARNING, Finding

PARTIES = 2
KEYS: dict[str, Any] = {"dataset": "breast-cancer", "epochs": 1}


def made(folder: Path, **keys: Any) -> Path:
    run_local(PARTIES, {**KEYS, **keys, "out": str(folder)})
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("doctor") / "run")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy that a test may harm."""
    return shutil.copytree(finished, tmp_path / "run")


def found(run: Path, *states: Path) -> dict[str, Finding]:
    return {each.check: each for each in runs.about(run, states)}


def harmed(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_a_whole_run_has_all_and_predicts(run: Path) -> None:
    before = contents(run)
    every = examine([run], "", "9500", None)
    mine = [each for each in every if each.check in {"run", "checkpoint", "party states"}]
    assert [each.result for each in mine] == [OK] * 3
    assert mine[-1].said == "The states of parties 0, 1 fit the checkpoint."
    assert contents(run) == before
    predict_local({"model": str(run)})


@pytest.mark.parametrize("how", ["damaged", "cut", "missing", "another party's"])
@pytest.mark.parametrize("check", ["checkpoint", "party states"])
def test_a_run_without_a_whole_checkpoint_or_the_states_of_its_parties_is_a_problem(
    run: Path, check: str, how: str
) -> None:
    file = run / checkpoint.FILE if check == "checkpoint" else kept_state(run, 1)
    if how == "damaged":
        harmed(file)
    elif how == "cut":
        file.write_bytes(file.read_bytes()[:-10])
    elif how == "missing":
        file.unlink()
    else:
        shutil.copy(kept_state(run, 0), file)
    finding = found(run)[check]
    said = "has no checkpoint.npz" if how == "missing" else "is damaged"
    assert finding.result == PROBLEM
    assert (said if check == "checkpoint" else "Party 1") in finding.said
    with pytest.raises(VflError):
        predict_local({"model": str(run)})


def test_a_label_holder_has_no_states_and_each_party_its_own(run: Path, tmp_path: Path) -> None:
    states = tmp_path / "states"
    states.mkdir(0o700)
    for party in range(PARTIES):
        shutil.move(kept_state(run, party), states)
    assert found(run)["party states"].result == UNKNOWN
    assert found(run, states)["party states"].result == OK
    (kept,) = (states / kept_state(run, 0).name,)
    kept.unlink()
    finding = found(run, states)["party states"]  # party 0 is on another machine
    assert finding.result == OK and finding.said.startswith("The states of parties 1 ")
    harmed(states / kept_state(run, 1).name)
    assert found(run, states)["party states"].result == PROBLEM


def test_the_states_of_an_older_checkpoint_are_a_problem(tmp_path: Path) -> None:
    run = made(tmp_path / "run", **{"checkpoint-every": 10})
    found_at = checkpoint.load(run)
    older = kept_state(run, 0).with_name(
        f"run-{found_at.run}-party-0-checkpoint-{found_at.number - 1}.state"
    )
    assert older.exists() and found(run)["party states"].result == OK
    kept_state(run, 0).unlink()
    finding = found(run)["party states"]
    assert finding.result == PROBLEM and "Restore its file" in finding.said


def test_a_run_that_was_cut_off_or_failed_is_a_warning(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "summary.json"
    summary = json.loads(file.read_text())
    assert found(run)["run"].result == OK
    file.write_text(json.dumps({**summary, "failure": "Party 1 did not answer."}))
    assert found(run)["run"].result == WARNING
    assert found(run)["run"].said.endswith("ended early: Party 1 did not answer.")
    file.write_text(json.dumps({**summary, "failure": "Party 1\x1b[2J\nleft."}))
    assert main(["doctor", str(run)]) == 1
    assert "ended early: Party 1?[2J?left." in capsys.readouterr().out
    file.write_text("{")
    assert found(run)["run"].result == PROBLEM
    file.unlink()
    assert found(run)["run"].result == WARNING
    with locked(run / "run.lock", ""):
        assert found(run)["run"].said == f"A run uses {run} now."
    (run / "run.lock").touch()  # a run was killed
    assert found(run)["run"].result == WARNING


def test_others_may_not_read_the_tokens_of_a_service(run: Path) -> None:
    token = run / "serve.token"
    for mode, result in ((0o600, OK), (0o644, PROBLEM)):
        token.touch()
        token.chmod(mode)
        (finding,) = [each for each in examine([run], "", "9500", None) if each.check == "secrets"]
        assert finding.result == result and token.name in finding.said


def test_a_private_run_has_the_journal_of_its_releases(tmp_path: Path) -> None:
    keys = {"strategy": "dpzv", "epsilon": 8.0, "delta": 1e-3}
    run = made(tmp_path / "run", **keys, **{"batch-size": 64, "checkpoint-every": 4})
    file = run / checkpoint.JOURNAL
    content = file.read_bytes()
    for how in ("whole", "damaged", "short", "missing"):
        file.write_bytes(content[:-40] if how == "short" else content)
        if how == "damaged":
            harmed(file)
        elif how == "missing":
            file.unlink()
        before = contents(run)
        finding = found(run)["journal"]
        assert finding.result == (OK if how == "whole" else PROBLEM)
        assert str(file) in finding.said and contents(run) == before


def test_a_run_whose_data_are_gone_is_a_problem(tmp_path: Path) -> None:
    table = tmp_path / "table.npz"
    generator = np.random.default_rng(0)
    np.savez(table, X=generator.normal(size=(200, 6)), y=generator.integers(0, 2, 200))
    run = made(tmp_path / "run", dataset=f"npz:{table}")
    assert found(run)["data"].result == OK
    table.unlink()
    assert found(run)["data"].result == PROBLEM
    with pytest.raises(VflError):
        predict_local({"model": str(run)})
