"""Processes end with the process that has started them, even if it is killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.fleet import evaluations, is_running, until
from vfl_flower.launch import descendants
from vfl_flower.launch.descendants import MARK, ending_with_this_process
from vfl_flower.launch.engines import Finished as Run
from vfl_flower.launch.processes import SuperLink
from vfl_flower.tools import runner, sweep

CHECKOUT = Path(__file__).parents[2]
SOON = 30.0  # seconds; the watcher itself needs one or two
# A child, and two grandchildren: one has left its session, the other has no environment, as if a
# title were written over it. Each writes its number to a file.
FAMILY = 'setsid sh -c \'echo $$ > "$1/grandchild"; exec sleep 600\' sh "$1" & '
FAMILY += 'sh -c \'echo $$ > "$1/covered"; exec env -i sleep 600\' sh "$1" & '
FAMILY += 'echo $$ > "$1/child"; wait'
MEMBERS = "child", "grandchild", "covered"
STARTER = """\
import os, subprocess, sys, time
from vfl_flower.launch.descendants import ending_with_this_process
if os.fork() == 0:  # before the block: it is no part of it
    time.sleep(600)
with ending_with_this_process(sys.argv[1] + "/home") as mark:
    fork = os.fork()  # holds all that its parent has opened
    if fork == 0:
        time.sleep(600)
    mark = mark if sys.argv[2] == "marked" else {}
    command = ["sh", "-c", sys.argv[3], "sh", sys.argv[1]]
    subprocess.Popen(command, env={**os.environ, **mark}, start_new_session=True).wait()
"""


def number_in(file: Path) -> psutil.Process:
    until(lambda: file.exists() and file.read_text().strip())
    return psutil.Process(int(file.read_text()))


def kill(processes: list[psutil.Process]) -> None:
    for each in processes:
        if is_running(each):
            each.kill()


def watchers_of(pid: int) -> list[psutil.Process]:
    return [
        each
        for each in psutil.Process(pid).children()
        if is_running(each) and descendants.__file__ in each.cmdline()
    ]


@pytest.mark.parametrize("mark", ["marked", "unmarked"])  # the second is the control
def test_a_killed_process_ends_its_children_and_theirs(mark: str, tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    words = [str(tmp_path), mark, FAMILY]
    starter = subprocess.Popen([sys.executable, "-c", STARTER, *words], cwd=CHECKOUT)
    family = [number_in(tmp_path / name) for name in MEMBERS]
    [watcher] = watchers_of(starter.pid)
    rest = [each for each in psutil.Process(starter.pid).children() if each != watcher]
    try:
        assert all(map(is_running, family)) and (tmp_path / "home").exists()
        starter.kill()
        starter.wait()
        until(lambda: not is_running(watcher), SOON)
        assert not (tmp_path / "home").exists()
        assert [is_running(each) for each in family] == [mark == "unmarked"] * 3
        assert sum(map(is_running, rest)) >= 2  # its forks, which it has not marked
    finally:
        kill([*family, *rest])


def test_a_thread_that_ends_does_not_end_what_it_has_started() -> None:
    started: list[subprocess.Popen[bytes]] = []
    with ending_with_this_process() as mark:
        command, environment = ["sleep", "600"], {**os.environ, **mark}
        thread = Thread(target=lambda: started.append(subprocess.Popen(command, env=environment)))
        thread.start()
        thread.join()
        other = subprocess.Popen(command)
        assert started[0].poll() is None
    assert started[0].wait(SOON) == -signal.SIGTERM
    assert other.poll() is None  # a process of somebody else
    other.kill()
    other.wait()


def test_a_process_that_ignores_the_order_to_end_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(descendants, "_GRACE", 0.2)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # this process still ends by them
    code = f"trap '' TERM; touch {tmp_path}/ready; while :; do sleep 0.05; done"
    stubborn = subprocess.Popen(["sh", "-c", code], env={**os.environ, MARK: "stubborn"})
    until((tmp_path / "ready").exists)
    descendants._watch(0, "stubborn", "")  # its parent is gone before it begins to watch
    assert stubborn.wait(SOON) == -signal.SIGKILL


@pytest.mark.parametrize("marked", [True, False])
def test_what_a_superlink_has_started_ends_with_it(
    marked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SuperLink, "_serve", lambda self, stack: None)
    with SuperLink(simulation=False) as superlink:
        if not marked:
            superlink._mark = {}
        child = superlink.start(["/bin/sleep", "600"], tmp_path / "log")
        assert child.poll() is None
    if marked:
        assert child.wait(SOON) == -signal.SIGTERM
    else:
        assert child.poll() is None
        child.kill()
        child.wait()
    assert not superlink.home.exists()


def test_workers_of_a_sweep_end_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environments: list[dict[str, str]] = []

    def started(*command: Any, env: dict[str, str], **more: Any) -> subprocess.Popen[bytes]:
        def marks() -> list[str]:
            return [each.cmdline()[4] for each in watchers_of(os.getpid())]

        environments.append(env)
        until(lambda: env[MARK] in marks(), SOON)  # the watcher may not have begun
        return subprocess.Popen(["true"], stdin=subprocess.PIPE)

    class OfSweep:
        PIPE, TimeoutExpired, Popen = subprocess.PIPE, subprocess.TimeoutExpired, started

    monkeypatch.setattr(runner, "subprocess", OfSweep)
    study: Any = SimpleNamespace(tried=[])
    sweep._side_by_side(study, {"trials": 1}, 1, (tmp_path / "log").open("wb"))
    assert os.environ[MARK] != environments[0][MARK]


def test_all_that_tests_start_ends_with_their_process() -> None:
    child = subprocess.Popen(["sleep", "600"])
    # A new process has no environment for a moment.
    until(lambda: bool(psutil.Process(child.pid).environ()), SOON)
    mark = psutil.Process(child.pid).environ()[MARK]
    assert mark in [each.cmdline()[4] for each in watchers_of(os.getpid())]
    child.kill()
    child.wait()


@pytest.mark.parametrize("argument", ["-m", "-c"])  # the second is the control
def test_what_a_benchmark_starts_ends_with_it(argument: str, tmp_path: Path) -> None:
    code = f"import sys; sys.argv[0] = {argument!r}; import benchmarks, subprocess; "
    code += f"subprocess.run(['sh', '-c', {FAMILY!r}, 'sh', {str(tmp_path)!r}])"
    # As from a shell, and not from a test.
    environment = {name: value for name, value in os.environ.items() if name != MARK}
    benchmark = subprocess.Popen([sys.executable, "-c", code], cwd=CHECKOUT, env=environment)
    family = [number_in(tmp_path / name) for name in MEMBERS]
    watchers = watchers_of(benchmark.pid)
    benchmark.kill()
    benchmark.wait()
    assert len(watchers) == (argument == "-m")
    until(lambda: not any(map(is_running, watchers)), SOON)
    assert [is_running(each) for each in family] == [argument == "-c"] * 3
    kill(family)


# --- whole ----------------------------------------------------------------------------------------

RUN = """\
import sys
from contextlib import nullcontext
from vfl_flower.launch import processes
from vfl_flower.tools.cli import app
if sys.argv.pop(1) == "unmarked":
    processes.ending_with_this_process = lambda folder: nullcontext({})
app()
"""


@pytest.fixture
def probe(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A variable of all processes that a test starts; the test ends what is left."""
    monkeypatch.setenv("VFL_PROBE", str(time.time_ns()))
    yield os.environ["VFL_PROBE"]
    for each in psutil.process_iter():
        try:
            if each.environ().get("VFL_PROBE") == os.environ["VFL_PROBE"]:
                each.kill()
        except psutil.Error:
            continue


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize(
    ("engine", "mark"), [("supernodes", "marked"), ("ray", "marked"), ("supernodes", "unmarked")]
)
def test_a_run_ends_with_its_command(engine: str, mark: str, probe: str, tmp_path: Path) -> None:
    out = Run(tmp_path / "out")
    keys = f"dataset='breast-cancer' epochs=1000000 patience=0 out='{out.folder}'"
    words = ["run", "--engine", engine, "--parties", "2", "-c", keys]
    command = subprocess.Popen([sys.executable, "-c", RUN, mark, *words], cwd=CHECKOUT)
    until(lambda: evaluations(out) > 1 or command.poll() is not None)
    family = psutil.Process(command.pid).children(recursive=True)
    assert len(family) >= 9
    watchers = watchers_of(command.pid)
    command.kill()
    command.wait()
    if mark == "marked":
        assert watchers
        until(lambda: not any(map(is_running, watchers)))  # they wait for all others
        assert not any(map(is_running, family))
        return
    before = evaluations(out)
    until(lambda: evaluations(out) > before + 1)  # nobody waits for it, and it goes on
    assert sum(map(is_running, family)) >= 9
