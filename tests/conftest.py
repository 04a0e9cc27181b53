"""Fixtures of all tests: short runs in this process, without logs and without network."""
# ruff: noqa: E402

import gc
import logging
import os
import shutil
import signal
from collections.abc import Generator, Iterator, Mapping, Sequence
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, Protocol

gc.disable()  # until all tests are collected: of what is imported, nothing is garbage
os.environ["HF_HUB_OFFLINE"] = "1"  # before the datasets library is imported
# Before torch is: another number of threads rounds otherwise, and near a tie top-k keeps another
# entry then, from where on two runs differ. Processes that a test starts inherit it.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
import torch
from flwr.clientapp import ClientApp
from hypothesis import HealthCheck, settings

from strategies.vertical import Vertical, strategy_of
from tests.organisations import forget_alignments
from vfl_flower import client_app
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.launch.descendants import ending_with_this_process
from vfl_flower.launch.engines import Finished as Run
from vfl_flower.launch.engines import run_local
from vfl_flower.party.state import load_large
from vfl_flower.protocol.systems import resolve
from vfl_flower.results import model_card, page
from vfl_flower.results.charts import Line
from vfl_flower.transport.flower_internals import begin_task
from vfl_flower.transport.local import LocalGrid

Capsys = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

logging.getLogger("flwr").disabled = True
LEVEL = logging.getLogger("flwr").level
torch.set_num_threads(1)
# Tests in a shell's background would ignore Ctrl-C, and so would all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores

ALL_ROWS = {"validation-fraction": 0.0}
"""For what is compared with the same on all training rows: none are held out to choose by."""
MANY = 10**6  # stands for a large data set, where a test has no rows
FASTER = {"batch-size": 32, "epochs": 20, "party-lr": 0.01, "server-lr": 0.1}
"""For DPZV without much noise, whose own defaults are mini-batches of 1,024 rows for 200 epochs."""

# No limit on time, since other work may share the machine; new and more examples every night only.
UNTIMED: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, max_examples=50, **UNTIMED)
settings.register_profile("nightly", print_blob=True, **UNTIMED)
settings.load_profile("repeatable")


def pytest_configure() -> None:
    """Keep temporary folders in memory where there is room: tests write many states durably."""
    shared = Path("/dev/shm")
    room = os.access(shared, os.W_OK) and shutil.disk_usage(shared).free > 4e9
    if room and not os.statvfs(shared).f_flag & os.ST_NOEXEC:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(shared))


def pytest_xdist_setupnodes() -> None:
    """Collect garbage in the process that collects no tests."""
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Let one of two processes read the files from the last on: each then compiles half of them."""
    report = yield
    if os.environ.get("PYTEST_XDIST_WORKER") == "gw1" and isinstance(collector, pytest.Directory):
        report.result = report.result[::-1]
    return report


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put slow tests first, and then those that share a fixture of their module.

    Both run in one process by module, so that two processes do not start or train the same.
    Of tests that are marked ``one_by_day`` all but the first parameters are for every night.
    """
    gc.enable()
    gc.freeze()  # otherwise each collection of all objects reads the ones of torch, too
    gc.set_threshold(50_000, 20, 100)
    items.sort(key=lambda item: item.path)  # one order in all processes
    seen = set()
    for item in items:
        if item.get_closest_marker("slow") or _shares_a_fixture(item):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        test = item.nodeid.partition("[")[0]
        if item.get_closest_marker("one_by_day") and not item.get_closest_marker("nightly"):
            if test in seen:
                item.add_marker(pytest.mark.nightly)
            seen.add(test)
    items.sort(key=lambda item: 0 if item.get_closest_marker("slow") else 2 - _is_grouped(item))


def _shares_a_fixture(item: pytest.Item) -> bool:
    """Return whether a test uses a fixture of its whole module."""
    about = getattr(item, "_fixtureinfo", None)  # a test of another kind than a function has none
    fixtures = about.name2fixturedefs.values() if about else ()
    return any(found[-1].scope == "module" for found in fixtures)


def _is_grouped(item: pytest.Item) -> bool:
    return item.get_closest_marker("xdist_group") is not None


def undrawn(lines: Sequence[Line], *_: Any) -> tuple[str, list[list[tuple[float, float]]]]:
    """Return an empty chart, since matplotlib takes most of a page's time."""
    return "", [[(0.0, 0.0)] * len(line.points) for line in lines]


@pytest.fixture
def no_drawings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave charts of reports empty."""
    from vfl_flower.results.report import curves

    monkeypatch.setattr(curves, "svg", undrawn)


of_words = pytest.mark.usefixtures("no_drawings")
"""For a test that reads a report's words and tables alone."""


class Start(Protocol):
    """The fixture `run`: a run in this process, into a new results folder."""

    def __call__(
        self, parties: int, keys: Mapping[str, Any] | None = None, client: ClientApp = ...
    ) -> Run: ...


@pytest.fixture(scope="session", autouse=True)
def states_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Parties keep their states in a folder of the tests, not in the home of who runs them.

    Processes that tests start end with this process, even if it is killed.
    """
    with ending_with_this_process() as mark, pytest.MonkeyPatch.context() as patch:
        for name, value in mark.items():
            patch.setenv(name, value)
        patch.setenv("FLWR_HOME", str(tmp_path_factory.mktemp("flwr-home")))
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state-home")))
        # A run writes a model card, which has the words of the last one.
        patch.setattr(page, "_marked", cache(page._marked))
        # Each run writes a card of each party. `cards_in_html` is for tests that read such a page.
        patch.setattr(model_card, "html", lambda page: "")
        yield


@pytest.fixture(scope="module")
def cards_in_html(states_elsewhere: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_card, "html", page.html)
        yield


@pytest.fixture(autouse=True)
def no_alignments(states_elsewhere: None) -> None:
    """None is kept from another test, whose files may have the same ids."""
    forget_alignments()


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a new folder, where runs without ``out`` leave their results."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def a_task() -> None:
    """Messages name their sender, whichever test of a process comes first. All loggers log."""
    begin_task()
    logging.getLogger("flwr").setLevel(LEVEL)  # which `vfl doctor` raises


def nightly(*values: Any) -> Any:
    """Parameters of a test, for every night only."""
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    numbers = count()

    def start(
        parties: int, keys: Mapping[str, Any] | None = None, client: ClientApp = client_app.app
    ) -> Run:
        out = str(tmp_path / f"run-{next(numbers)}")
        return run_local(parties, {"out": out, **(keys or {})}, client)

    return start


def trained(
    parties: int, keys: Mapping[str, Any], client: ClientApp = client_app.app
) -> tuple[Vertical, LocalGrid]:
    """Run in this process, and return the label holder and the parties' states."""
    config = resolve(keys)
    strategy = strategy_of(config)(config, load_labels(config))
    grid = LocalGrid(client, parties, keys, config)
    strategy.start(grid)
    return strategy, grid


def assert_copies_agree(strategy: Vertical, grid: LocalGrid, *names: str) -> None:
    """Every party keeps surrogates of these names, and the same numbers as the label holder."""
    holder = strategy.run.holder
    for party, context in enumerate(grid.contexts.values()):
        here: dict[str, Any] = {f"other-{m}": holder.table.of(m) for m in holder.columns}
        here["uplink"] = here.pop(f"other-{party}")
        for links in (holder.downlinks[party], holder.estimator.links_of_all(holder)):
            here |= links.with_surrogates()
        kept = load_large(context.state)
        kept.pop("labels", None)
        assert sorted(kept) == sorted({*names} - {f"other-{party}"})
        for name, surrogate in kept.items():
            assert surrogate.any()
            np.testing.assert_array_equal(surrogate, here[name].numpy(), err_msg=name)


@pytest.fixture
def own_log() -> Iterator[list[str]]:
    """Collect the log lines of a party's process."""
    lines: list[str] = []
    logger = logging.getLogger("flwr")

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, disabled, level = Keep(), logger.disabled, logger.level
    logger.addHandler(handler)
    logger.disabled = False
    logger.setLevel(logging.INFO)  # a command of an earlier test may have set another
    yield lines
    logger.disabled = disabled
    logger.setLevel(level)
    logger.removeHandler(handler)
