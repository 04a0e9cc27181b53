"""The `vfl` command: what it prints and leaves, and that it answers nonsense by one line."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.conftest import Capsys, Patch
from vfl_flower import client_app, server_app
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.plugins import SYSTEMS
from vfl_flower.label_holder import checkpoint, results
from vfl_flower.label_holder.results import Results, check_free
from vfl_flower.launch.engines import Finished as Run
from vfl_flower.launch.engines import of_server, run_local
from vfl_flower.party.party import Party
from vfl_flower.protocol.batches import Window
from vfl_flower.protocol.privacy.journal import EMBED, Event, Journal
from vfl_flower.protocol.systems import resolve
from vfl_flower.tools.cli import main
from vfl_flower.transport.local import LocalGrid


def command(folder: Path, keys: str, parties: int = 2) -> list[str]:
    return ["run", "-c", keys, "--parties", str(parties), "--out", str(folder / "out")]


CASCADED, ZEROTH = "strategy='cascaded'", "expert='server-update=zeroth-order'"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ("server-lr=1e30 window=1", "no longer finite"),
        (f"{CASCADED} server-lr=9e37 party-lr=9e37 window=1 {ZEROTH}", "finite"),
        (f"{CASCADED} party-lr=1e30", "not finite. Lower the"),
        ("expert='top-hidden=2147483647'", "Choose a smaller top-hidden or"),
    ],
)
def test_command_that_cannot_be_is_answered_by_one_line(
    tmp_path: Path, capsys: Capsys, keys: str, sentence: str
) -> None:
    assert main(command(tmp_path, f"dataset='breast-cancer' {keys}", 2)) == 1
    printed = capsys.readouterr()
    assert printed.out == "" or printed.out.startswith("results: ")
    assert printed.err.startswith("vfl: ") and printed.err.count("\n") == 1
    assert sentence in printed.err


def test_command_trains_and_tells_what_it_reached(tmp_path: Path, capsys: Capsys) -> None:
    keys = "dataset='breast-cancer' epochs=2 window=15 privacy='perturbed-embedding'"
    assert main(command(tmp_path, keys)) == 0
    printed = capsys.readouterr()
    summary = Run(tmp_path / "out").summary
    first, of_epsilon, last = printed.out.splitlines()
    assert first.startswith(f"split-nn: test accuracy {summary['test_accuracy']:.4f}, AUC ")
    assert f"epsilon {summary['epsilon']:.3g} at delta 1e-05" in first
    assert f"{summary['exchanges']} exchanges" in first
    for name in ("protects", "relation", "adversary"):
        assert f"{name}: {summary[f'epsilon_{name}']}." in of_epsilon
    assert last == f"results: {tmp_path / 'out'}"


def test_interrupted_command_saves_what_was_trained(
    tmp_path: Path, capsys: Capsys, monkeypatch: Patch
) -> None:
    begin = Party.begin

    def interrupted(party: Party, order: Any) -> Window:
        if order.epoch == 2:
            raise KeyboardInterrupt
        return begin(party, order)

    monkeypatch.setattr(Party, "begin", interrupted)
    assert main(command(tmp_path, "dataset='breast-cancer' epochs=4 window=15")) == 130
    assert capsys.readouterr().err.endswith("\nvfl: stopped.\n")
    finished = Run(tmp_path / "out")
    assert finished.summary["failure"] == "Ctrl-C ended the run."
    assert [entry["epoch"] for entry in finished.history] == [1.0, 2.0]
    assert finished.parameters("top")


# --- results folders ----------------------------------------------------------------------------


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_results_of_another_run_are_not_written_over(tmp_path: Path, capsys: Capsys) -> None:
    arguments = command(tmp_path, "dataset='breast-cancer' epochs=1 window=15")
    assert main(arguments) == 0
    before = contents(tmp_path / "out")
    assert main(arguments) == 1
    said = "already holds a run. Name another folder, or move this one away."
    assert capsys.readouterr().err.endswith(f"{said}\n")
    assert contents(tmp_path / "out") == before
    resume = f"{said} Or set resume='{tmp_path / 'out'}' to continue it.\n"
    for text in ("{}", "[]", "{", None):
        if text is None:  # it was killed, or still runs
            (tmp_path / "out" / "summary.json").unlink()
        else:
            (tmp_path / "out" / "summary.json").write_text(text)
        before = contents(tmp_path / "out")
        assert main(arguments) == 1 and contents(tmp_path / "out") == before
        assert capsys.readouterr().err.endswith(resume)
    for name in before.keys() - {"history.jsonl"}:  # the history alone marks a run too
        (tmp_path / "out" / name).unlink()
    assert main(arguments) == 1 and contents(tmp_path / "out").keys() == {"history.jsonl"}


@pytest.mark.parametrize("seeds", [1, 2])
def test_a_run_that_failed_before_its_first_step_leaves_its_folder_to_the_next(
    tmp_path: Path, seeds: int, monkeypatch: Patch, capsys: Capsys
) -> None:
    arguments = [*command(tmp_path, "dataset='breast-cancer' epochs=1 window=15 patience=0")]
    arguments += ["--seeds", str(seeds)]
    folder = tmp_path / "out" / ("seed-0" if seeds > 1 else "")

    def fails(*_: Any) -> None:
        raise ConfigError("The party is not ready. Start it later.")

    with monkeypatch.context() as patched:
        patched.setattr(Party, "describe", fails)
        for _ in range(2):  # a second failure leaves it free, too
            assert main([*arguments, "--parties", "4"]) == 1
            assert "not ready" in capsys.readouterr().err
            assert "not ready" in Run(folder).summary["failure"]
    with monkeypatch.context() as patched:  # the control: a run that made a step keeps its folder
        patched.setattr(Party, "evaluate", fails)
        assert main(arguments) == 1
        assert Run(folder).summary["steps"] > 0 and not (folder / "history.jsonl").read_text()
        before = contents(folder)
        assert main(arguments) == 1
        assert "Name another folder" in capsys.readouterr().err or seeds > 1
        assert contents(folder) == before


FAILED = json.dumps({"failure": "The party is not ready.", "steps": 0})


@pytest.mark.parametrize("name", [checkpoint.JOURNAL, "predictions.journal"])
def test_a_run_that_released_something_before_its_first_step_keeps_its_folder(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "summary.json").write_text(FAILED)
    assert not [*Journal(tmp_path / name, "1").read()]
    Results(tmp_path)  # the control: a count of nothing holds no folder
    (tmp_path / "summary.json").write_text(FAILED)
    journal = Journal(tmp_path / name, "1")
    assert not [*journal.read()]
    journal.write(Event(EMBED, 0, rows=np.arange(3, dtype=np.int32)))
    before = contents(tmp_path)
    with pytest.raises(ConfigError, match="already holds a run"):
        Results(tmp_path)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("name", ["top.npz", "checkpoint.npz", "releases.journal"])
def test_a_file_in_a_folder_without_a_run_is_neither_deleted_nor_written_over(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "other").mkdir()
    Results(tmp_path / "other")  # the control: a name that no run uses
    (tmp_path / name).write_bytes(b"mine")
    with pytest.raises(ConfigError, match="already holds"):
        Results(tmp_path)
    assert (tmp_path / name).read_bytes() == b"mine"
    (tmp_path / "summary.json").write_text(FAILED)
    if name != "releases.journal":  # the control: a failed run's own file
        Results(tmp_path)
        assert not (tmp_path / name).exists()


def test_several_runs_get_a_folder_that_has_only_runs_without_a_step(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for name in ("seed-0", "vafl/seed-1"):
        (out / name).mkdir(parents=True)
        (out / name / "run.lock").touch()
        (out / name / "summary.json").write_text('{"failure": "It is not ready.", "steps": 0}')
    check_free(out)  # the control
    (out / "photos" / "2026").mkdir(parents=True)
    (out / "photos" / "2026" / "a.png").touch()
    with pytest.raises(ConfigError, match="already exists"):
        check_free(out)


def test_nothing_listens_before_the_results_folder_is_known_to_be_free(
    tmp_path: Path, monkeypatch: Patch
) -> None:
    class ListeningError(Exception):
        """Raised in place of opening a port."""

    def stream_grid(*_: Any) -> None:
        raise ListeningError

    class Remote(LocalGrid):
        medium = "messages"

    monkeypatch.setattr(server_app, "StreamGrid", stream_grid)
    keys = {"dataset": "breast-cancer", "epochs": 1, "out": str(tmp_path / "out")}
    for error in (ListeningError, ConfigError):
        if error is ConfigError:
            run_local(2, keys)  # which takes the folder
        with pytest.raises(error):
            grid = Remote(client_app.app, 2, keys, resolve(keys))
            server_app.app(grid, of_server(keys, grid.run_id))


def test_two_runs_of_the_same_second_have_different_folders(
    elsewhere: None, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(results, "time", SimpleNamespace(strftime=lambda layout: "now"))
    arguments = command(tmp_path, "dataset='breast-cancer' epochs=1 window=15")[:-2]
    assert [main(arguments), main(arguments)] == [0, 0]
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_parties_that_cannot_be_are_one_line_for_every_system(
    tmp_path: Path, capsys: Capsys
) -> None:
    for strategy in SYSTEMS.names:
        assert main(command(tmp_path, f"strategy='{strategy}'", 100)) == 1
        printed = capsys.readouterr()
        assert "among 100 parties" in printed.err and len(printed.err.splitlines()) == 1
        assert "failed" not in printed.err and not (tmp_path / "out").exists()
