"""Runs in process that Ctrl-C, SIGTERM or a closed terminal ends: what they keep, say and count."""

import json
import logging
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from tests.conftest import ALL_ROWS
from tests.strategy.test_checkpoint import CANCER, log_of_run, resumed
from vfl_flower.api import training as api
from vfl_flower.api.model import load
from vfl_flower.config.errors import TERMINATING, ConfigError, Interrupted, Terminated, VflError
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.results import Results
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.protocol.privacy.journal import TRAIN
from vfl_flower.tools.cli import main
from vfl_flower.transport.messages import TrainOrder


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
def handlers() -> Any:
    """The signals would end the tests: as if nobody had handlers for them."""
    before = [signal.signal(each, signal.SIG_DFL) for each in TERMINATING]
    yield
    for each, handler in zip(TERMINATING, before, strict=True):
        assert signal.signal(each, handler) is signal.SIG_DFL


WHOLE = {**CANCER, "epochs": 3}


@pytest.mark.one_by_day
@pytest.mark.parametrize("number", [signal.SIGINT, *TERMINATING])
def test_a_run_that_is_interrupted_keeps_a_checkpoint(
    number: signal.Signals, tmp_path: Path, handlers: None, caplog: pytest.LogCaptureFixture
) -> None:
    by_user = number == signal.SIGINT
    error, words = (Interrupted, "Ctrl-C") if by_user else (Terminated, number.name)
    whole = run_local(2, {**WHOLE, "out": str(tmp_path / "whole")})
    folder = tmp_path / "run"
    with signalled(number, 1), pytest.raises(error) as raised:
        run_local(2, {**WHOLE, "out": str(folder)})
    said = json.loads((folder / "summary.json").read_text())["failure"]
    assert said == f"{words} ended the run after 1 epochs."
    assert str(raised.value) == f"{said} Set resume='{folder}' to continue."
    found = checkpoint.load(folder)
    assert not found.finished and len(found.strategy["history"]["entries"]) == 1
    with caplog.at_level(logging.WARNING, "flwr.notice"):
        predict_local({"model": str(folder)})
        run = resumed(folder, 2)
        predict_local({"model": str(folder), "out": str(tmp_path / "finished.csv")})
    (sentence,) = [each.message for each in caplog.records if each.name == "flwr.notice"]
    assert f"{folder} is unfinished: its model after 1 of 3 epochs is used." in sentence
    for name in ("top", "party-0", "party-1"):
        for key, value in whole.parameters(name).items():
            np.testing.assert_array_equal(run.parameters(name)[key], value)
    assert [each["test_loss"] for each in run.history] == [
        each["test_loss"] for each in whole.history
    ]


def test_an_unfinished_run_without_a_number_of_epochs_predicts(
    tmp_path: Path, handlers: None, caplog: pytest.LogCaptureFixture
) -> None:
    keys = {key: value for key, value in CANCER.items() if key != "epochs"}
    with signalled(signal.SIGINT, 1), pytest.raises(Interrupted):
        run_local(2, {**keys, "out": str(tmp_path / "run")})
    with caplog.at_level(logging.WARNING, "flwr.notice"):
        predict_local({"model": str(tmp_path / "run")})
    (sentence,) = [each.getMessage() for each in caplog.records if each.name == "flwr.notice"]
    assert re.search(r"is unfinished: its model after \S+ epochs is used", sentence)


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


def test_a_handler_of_the_callers_own_stays_and_an_ignored_signal_ends_no_run(
    tmp_path: Path,
) -> None:
    """The second as under nohup."""
    came: list[int] = []
    for number, handler in (
        (signal.SIGINT, lambda number, frame: came.append(number)),
        (signal.SIGHUP, signal.SIG_IGN),
    ):
        before = signal.signal(number, handler)
        try:
            with signalled(number, 1):
                run_local(2, {**WHOLE, "epochs": 1, "out": str(tmp_path / number.name)})
            assert signal.getsignal(number) is handler
        finally:
            signal.signal(number, before)
    assert came == [signal.SIGINT]


@pytest.mark.nightly
@pytest.mark.slow
def test_a_run_in_a_terminal_that_is_closed_keeps_a_checkpoint(tmp_path: Path) -> None:
    """Nothing can be written to that terminal any more."""
    folder, (ours, theirs) = tmp_path / "run", os.openpty()
    takes_it = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
    command = [sys.executable, "-c", f"{takes_it}; os.execvp(sys.argv[1], sys.argv[1:])"]
    command += [sys.executable, "-m", "vfl_flower.tools.cli", "run", "--out", str(folder), "-c"]
    command += ["dataset='breast-cancer' epochs=900 patience=0 window=13"]
    ends: Any = dict.fromkeys(("stdin", "stdout", "stderr"), theirs)
    process = subprocess.Popen(command, start_new_session=True, **ends)
    os.close(theirs)
    try:
        until, history = time.monotonic() + 120, folder / "history.jsonl"
        while not (history.exists() and history.stat().st_size):
            assert process.poll() is None and time.monotonic() < until
            if select.select([ours], [], [], 0.05)[0]:
                os.read(ours, 4096)
        os.close(ours)
        process.wait(120)
    finally:
        process.kill()
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["failure"].startswith("SIGHUP ended the run after ")
    assert not checkpoint.load(folder).finished


@pytest.mark.nightly
@pytest.mark.slow
def test_ctrl_c_keeps_what_nodes_have_trained(tmp_path: Path) -> None:
    folder, home = tmp_path / "run", tmp_path / "home"
    command = [sys.executable, "-m", "vfl_flower.tools.cli", "run", "--out", str(folder)]
    command += ["--engine", "supernodes", "--parties", "2", "-c"]
    command += ["dataset='breast-cancer' epochs=9000 patience=0 window=1"]
    environment = {**os.environ, "FLWR_HOME": str(home)}
    process = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        until, history = time.monotonic() + 120, folder / "history.jsonl"
        while not (history.exists() and len(history.read_text().splitlines()) > 3):
            assert process.poll() is None and time.monotonic() < until
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(120) == 128 + signal.SIGINT
    finally:
        process.kill()
    summary, entries = json.loads((folder / "summary.json").read_text()), history.read_text()
    assert summary["failure"].startswith("`flwr stop` ended the run after ")
    assert checkpoint.load(folder).strategy["holder"]["steps"] >= 3 * 26
    assert json.loads(entries.splitlines()[-1])["epoch"] >= 3


@pytest.mark.one_by_day
@pytest.mark.parametrize("number", [signal.SIGINT, *TERMINATING])
def test_the_command_says_how_to_go_on(
    number: signal.Signals, tmp_path: Path, handlers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    command = ["run", "-c", "dataset='breast-cancer' epochs=3", "--out", str(folder)]
    with signalled(number, 1):
        try:
            ended = main(command)
        except SystemExit as error:
            ended = int(str(error.code))
    said = capsys.readouterr().err.splitlines()[-1]
    assert ended == 128 + number
    assert said.endswith(f"ended the run after 1 epochs. Set resume='{folder}' to continue.")
    assert main(["run", "-c", f"resume='{folder}'", "--out", str(tmp_path / "other")]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith("continues in its own folder: leave out --out and the option out.")
    assert main(["run", "-c", f"resume='{folder}'"]) == 0


def test_the_command_names_the_last_checkpoint_of_a_run_that_keeps_none_anew(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a run on nodes, whose parties Ctrl-C ends too."""
    for every, said in ((12, "Set resume='{}' to continue."), (0, "vfl: stopped.")):
        folder = tmp_path / str(every)
        keys = f"dataset='breast-cancer' epochs=3 checkpoint-every={every}"
        with signalled(signal.SIGINT, 2, again=True):
            assert main(["run", "-c", keys, "--out", str(folder)]) == 130
        assert capsys.readouterr().err.splitlines()[-1].endswith(said.format(folder))


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
        assert str(raised.value).endswith(f"Set resume='{folder}' to continue.")
        assert len(load(folder).predict(features)) == 120
        with pytest.raises(VflError, match=r"has other rows, classes|not have the data"):
            api.train({"resume": str(folder)}, [each + 1 for each in features][::-1], 1 - labels)
        model = api.train({"resume": str(folder)}, features, labels)
        assert model.summary["failure"] is None and len(model.history) == 3
        with pytest.raises(ConfigError, match=r"has finished\. Leave the option resume out"):
            api.train({"resume": str(folder)}, features, labels)
    finally:
        shutil.rmtree(folder.parent)


NOISY = {"strategy": "dpzv", "noise-multiplier": 1.5}
PERTURBED = {"privacy": "perturbed-embedding"}
COUNTED: dict[str, dict[str, Any]] = {
    "dpzv": {**NOISY, "window": 4},
    "in secret": {**NOISY, "calibration": "secret", "sampling": "poisson"},
    "perturbed": {**PERTURBED, "strategy": "vafl", "window": 1},
    "perturbed, Poisson": {**PERTURBED, "strategy": "vafl", "sampling": "poisson"},
    "perturbed, asked again": {
        **{**PERTURBED, "strategy": "vafl-t", "quorum": 2, "max-delay": 3, "delay": "exponential"}
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
    releases, accountant = log_of_run(keys)
    accountant.multiplier = 1.5
    releases.keep(folder / "releases.journal")
    figures = accountant.figures()
    assert all(before[name] == figures[name] for name in figures) and figures["epsilon"] > 0
    assert resumed(folder, 3).summary["epsilon"] > before["epsilon"]


@pytest.mark.parametrize("seed", [0, 1])
def test_uploads_so_far_are_told_by_few_events(seed: int) -> None:
    """Orders in any sequence, as by parties that come back, count the same by their events."""
    generator = np.random.default_rng(seed)
    keys = {**CANCER, **COUNTED["perturbed, asked again"]}
    (releases, counted), (_, told) = (log_of_run(keys) for _ in range(2))
    for _ in range(generator.integers(1, 40)):
        party, epoch, first = (int(generator.integers(0, most)) for most in (3, 5, 8))
        order = TrainOrder(exchange=0, epoch=epoch, first=first, steps=1, coordinated=False)
        releases.ordered(party, order)
    for event in counted.so_far():
        assert event.kind == TRAIN and not len(event.rows)
        told.count(event)
    for name in ("passes", "last", "steps", "unseen"):
        assert getattr(counted, name) == getattr(told, name)
