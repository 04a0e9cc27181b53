"""Progress: what is shown of a run, where, and by which processes."""

import io
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import vfl_flower
from tests.conftest import nightly
from vfl_flower.label_holder import progress
from vfl_flower.label_holder.callbacks import Callback, RunState
from vfl_flower.label_holder.progress import Progress, Standing, from_elsewhere, of_run, shown
from vfl_flower.launch.engines import run_local
from vfl_flower.results.figures import validated
from vfl_flower.tools.cli import main

SMALLEST = "dataset='breast-cancer' epochs=1"
SMALL = "dataset='breast-cancer' epochs=3"
LAST = {"epoch": 12.0, "validation_loss": 0.25, "test_accuracy": 0.9467, "train_loss": 0.1}
BEST = {"epoch": 9.0, "validation_loss": 0.21}
STANDING = Standing(12.4, 20.0, LAST, BEST, rate=312.4, left=65.2, early=True)


class Terminal(io.StringIO):
    """A terminal; what it shows is what is left of each line after its carriage returns."""

    def isatty(self) -> bool:
        return True

    @property
    def drawn(self) -> list[str]:
        return [part.rstrip() for part in self.getvalue().split("\r") if part.strip()]

    @property
    def screen(self) -> str:
        """Return the screen at the end."""
        row: list[str] = []
        for part in self.getvalue().split("\n")[-1].split("\r"):
            row[: len(part)] = part
        return "".join(row).rstrip()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    found = Terminal()
    monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=found, modules=sys.modules))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(progress, "_APART", 0.0)  # each time that there is something to tell
    return found


# --- what is said -------------------------------------------------------------------------------


def test_a_line_says_epoch_figures_best_so_far_exchanges_and_time_left() -> None:
    assert ", ".join(STANDING.words()) == (
        "epoch 12.4 of 20, validation loss 0.2500 (best 0.2100 at epoch 9), "
        "test accuracy 0.9467, 312 exchanges/s, at most 1:05 left"
    )
    assert STANDING.line("", 79) == (
        "epoch 12/20  val loss 0.250 (best 0.210 @9)  test 0.947  312 ex/s  <1:05 left"
    )


@pytest.mark.parametrize("width", [20, 40, 60, 79, 100, 200])
@pytest.mark.parametrize("title", ["", "seed 3 (4/5)"])
def test_a_line_fits_and_keeps_the_time_left(title: str, width: int) -> None:
    line = STANDING.line(title, width)
    assert len(line) <= width and line.startswith(title)
    assert "1:05 left" in line or width < 45


def test_without_patience_or_validation_the_time_left_is_not_at_most() -> None:
    last = {"epoch": 1.0, "validation_loss": None, "train_loss": 0.5, "test_accuracy": 0.75}
    words = Standing(1.0, 4.0, last, left=3725.0).words()
    assert words == ["epoch 1 of 4", "test accuracy 0.7500", "1:02:05 left"]


def test_the_loss_by_which_a_run_stops_is_told_and_logged_beside_the_least(
    own_log: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert validated(LAST, BEST) == "validation loss 0.2500 (best 0.2100 at epoch 9)"
    assert validated(BEST, BEST) == "validation loss 0.2100 (best)"
    assert validated({"epoch": 1.0, "validation_loss": None}, {}) == ""
    caplog.set_level(logging.INFO, "flwr")
    keys = {"dataset": "breast-cancer", "epochs": 2, "out": str(tmp_path / "run")}
    history = run_local(2, keys).history
    said = [line for line in own_log if line.startswith("Epoch ")]
    losses = [f"validation loss {entry['validation_loss']:.4f}" for entry in history]
    assert len(said) == 2 and all(loss in line for loss, line in zip(losses, said, strict=True))


# --- when ---------------------------------------------------------------------------------------


def test_time_left_is_by_the_share_that_is_done(now: list[float]) -> None:
    told = list[Standing]()
    telling = Progress(told.append)
    telling.run = a_run(per_epoch=10, may_stop_early=True)
    now[0] = 100.0
    telling.progressed(20, 100)  # resumed: 20 were done before
    assert told[-1].left is None
    now[0] = 104.0
    telling.progressed(40, 100)
    assert told[-1].left == pytest.approx(12.0) and told[-1].early
    assert (told[-1].epoch, told[-1].epochs) == (4.0, 10.0)
    telling.progressed(50, 50)  # it stops early
    now[0] = 105.0
    telling.progressed(50, 50)
    assert told[-1].left == 0.0 and told[-1].epochs == 5.0


def test_it_is_told_ten_times_a_second_at_most(now: list[float]) -> None:
    told = list[Standing]()
    telling = Progress(told.append)
    telling.run = a_run()
    for step in range(1000):
        now[0] = 1 + step / 1000
        telling.progressed(step, 1000)
    assert 8 <= len(told) <= 11


def a_run(per_epoch: int = 10, may_stop_early: bool = False) -> Any:
    """The parts of a run of 10 epochs that progress reads."""
    planned = 10 * per_epoch
    return SimpleNamespace(state=RunState(0, planned, per_epoch, may_stop_early=may_stop_early))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr("vfl_flower.label_holder.progress.time.monotonic", lambda: clock[0])
    return clock


# --- where --------------------------------------------------------------------------------------


def command(*words: str) -> Callable[[Path], list[str]]:
    return lambda folder: [*words, "--parties", "2", "--out", str(folder / "out")]


RUN = command("run", "-c", SMALL)


def test_a_terminal_has_one_line_that_is_gone_at_the_end_and_none_if_quiet(
    terminal: Terminal, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command("run", "-c", SMALLEST)(tmp_path / "quiet"), "--quiet"]) == 0
    printed = capsys.readouterr()
    assert printed.err == terminal.getvalue() == ""
    assert printed.out.startswith("split-nn: test accuracy")
    assert main(RUN(tmp_path)) == 0
    assert "\n" not in terminal.getvalue() and terminal.screen == ""
    assert any(line.startswith("epoch 2") and "val loss" in line for line in terminal.drawn)
    assert all(len(line) < 80 for line in terminal.drawn)


@pytest.mark.parametrize("quiet", [False, nightly(True)])
def test_elsewhere_there_is_one_line_an_epoch_and_none_if_quiet(
    quiet: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    often = [*RUN(tmp_path)[:2], f"{SMALL} expert='eval-every=0.25'", *RUN(tmp_path)[3:]]
    assert main([*often, *["--quiet"] * quiet]) == 0
    lines = capsys.readouterr().err.splitlines()
    said = [line.split(" of 3, ")[0] for line in lines]
    assert said == ([] if quiet else ["epoch 1", "epoch 2", "epoch 3"])
    assert all("validation loss" in line and "exchanges/s" in line for line in lines)


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("arguments", "titles"),
    [
        (["run", "-c", SMALLEST, "--seeds", "2"], ["seed 0 (1/2)", "seed 1 (2/2)"]),
        (
            ["compare", "vafl", "-c", SMALLEST],
            ["vafl (1/4)", "frozen (2/4)", "local-only (3/4)", "centralised (4/4)"],
        ),
    ],
)
def test_of_several_runs_each_says_which_it_is(
    arguments: list[str], titles: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command(*arguments)(tmp_path)) == 0
    said = [line.partition(": ")[0] for line in capsys.readouterr().err.splitlines()]
    assert list(dict.fromkeys(said)) == titles


@pytest.mark.parametrize("named", [True, False])
def test_a_baseline_of_several_runs_says_each_epoch_of_each_party_once(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The control: the progress of the whole ends with an equal line for each epoch."""
    if not named:
        monkeypatch.setattr(Progress, "of_part", lambda self, part: Callback())
    assert main(command("run", "-c", f"{SMALL} strategy='local-only'")(tmp_path)) == 0
    said = [line.split(",")[0] for line in capsys.readouterr().err.splitlines()]
    each = [f"party {n} alone: epoch {epoch} of 3" for n in (0, 1) for epoch in (1, 2, 3)]
    assert said == (each if named else ["epoch 3 of 3"] * 3)


def test_a_log_line_takes_the_place_of_the_live_one(terminal: Terminal) -> None:
    logger = logging.getLogger("flwr")
    handler = logging.StreamHandler(terminal)
    logger.addHandler(handler)
    try:
        with shown(True):
            shows = progress._shown.get()
            assert shows
            shows.show(STANDING)
            assert terminal.screen.startswith("epoch 12")
            handler.handle(logging.makeLogRecord({"msg": "Party 1 is back."}))
            assert terminal.getvalue().endswith("\rParty 1 is back.\n")
    finally:
        logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("asked", "live", "lines"),
    [(None, False, 0), (True, False, 1), (False, True, 0), (None, True, 0)],
)
def test_from_python_it_is_shown_where_it_is_asked_for_or_seen(
    asked: bool | None,
    live: bool,
    lines: int,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    drawn = request.getfixturevalue("terminal") if live else None
    rows = np.random.default_rng(0).standard_normal((60, 4))
    vfl_flower.train({"epochs": 1}, [rows[:, :2], rows[:, 2:]], rows[:, 0] > 0, progress=asked)
    assert len(capsys.readouterr().err.splitlines()) == lines
    assert drawn is None or (bool(drawn.drawn), drawn.screen) == (asked is None, "")


def test_a_notebook_has_one_display_that_is_empty_at_the_end(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    from IPython import display as ipython

    class Handle:
        def __init__(self, shown: dict[str, str]) -> None:
            self.said = [shown]

        def update(self, shown: dict[str, str], raw: bool) -> None:
            self.said.append(shown)

    handles: list[Handle] = []

    def display(shown: dict[str, str], raw: bool, display_id: bool) -> Handle:
        handles.append(Handle(shown))
        return handles[-1]

    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    monkeypatch.setattr(ipython, "display", display)
    with shown(None):
        shows = progress._shown.get()
        assert shows
        shows.show(STANDING)
        shows.show(STANDING)
    (handle,) = handles
    assert handle.said[0]["text/plain"].startswith("epoch 12") and handle.said[-1] == {}
    assert terminal.getvalue() == ""


# --- between processes --------------------------------------------------------------------------


def test_another_process_tells_by_a_file_that_is_there_if_somebody_reads_it(
    tmp_path: Path, terminal: Terminal
) -> None:
    assert of_run(tmp_path) is None  # nobody does
    with shown(True), from_elsewhere(tmp_path) as look:
        token = progress._shown.set(None)  # in the other process
        telling = of_run(tmp_path)
        assert telling
        telling.run = a_run()
        telling.progressed(30, 100)
        progress._shown.reset(token)
        look()
        assert terminal.screen.startswith("epoch 3 of 10")
        before = terminal.getvalue()
        look()  # nothing is new
        assert terminal.getvalue() == before
        assert {each.stat().st_mode & 0o77 for each in tmp_path.iterdir()} == {0}
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written_ends_no_run(tmp_path: Path) -> None:
    (tmp_path / ".progress").touch()
    telling = of_run(tmp_path)
    assert telling
    telling.run = a_run()
    (tmp_path / ".progress").unlink()
    tmp_path.rmdir()
    telling.progressed(30, 100)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("engine", ["ray", "supernodes"])
def test_runs_of_flowers_processes_are_shown_too(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = "dataset='breast-cancer' epochs=6 window=4"
    assert main(command("run", "-c", keys, "--engine", engine)(tmp_path)) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("epoch ")]
    assert lines and all("validation loss" in line for line in lines)
    assert not (tmp_path / "out" / ".progress").exists()
