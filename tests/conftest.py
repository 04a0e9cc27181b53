"""What all tests share: short runs in this process, without logs and without network."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, Protocol

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
from vfl_flower.data.blocks import load_labels
from vfl_flower.holder import results
from vfl_flower.party.state import load_large
from vfl_flower.runtimes.local import LocalGrid
from vfl_flower.start import Finished as Run
from vfl_flower.start import run_local
from vfl_flower.systems import resolve

logging.getLogger("flwr").disabled = True
torch.set_num_threads(1)

ALL_ROWS = {"validation-fraction": 0.0}
"""For what is compared with the same on all training rows: none are held out to choose by."""
FASTER = {"batch-size": 32, "epochs": 20, "party-lr": 0.01, "server-lr": 0.1}
"""For DPZV without much noise, whose own defaults are mini-batches of 1,024 rows for 200 epochs."""

# No limit on time, since other work may share the machine; new examples every night only.
UNTIMED: Any = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("repeatable", derandomize=True, **UNTIMED)
settings.register_profile("nightly", print_blob=True, **UNTIMED)
settings.load_profile("repeatable")


BUT_ONE_NIGHTLY = {
    "test_a_party_that_comes_back_goes_on_with_what_the_label_holder_knows",
    "test_a_party_that_has_lost_all_its_state_begins_anew",
    "test_a_party_that_misbehaves_under_zeroth_order_or_codecs_ends_the_run_with_a_sentence",
    "test_a_run_on_files_goes_on_with_its_rows",
    "test_an_asynchronous_run_goes_on_without_the_party",
    "test_a_growing_run_that_is_cut_short_goes_on",
    "test_a_run_that_is_cut_short_ends_with_the_same_best_model",
    "test_a_synchronous_run_ends_as_if_it_had_never_stopped",
    "test_an_asynchronous_run_goes_on_from_its_last_checkpoint",
    "test_asking_whether_a_budget_would_be_exceeded_spends_nothing",
    "test_both_copies_of_a_surrogate_are_equal_after_200_steps",
    "test_calibrated_noise_spends_the_budget_and_hardly_less",
    "test_combinations_that_no_paper_has_learn",
    "test_compression_hides_no_labels",
    "test_every_system_learns_from_partial_rows",
    "test_every_system_learns_through_every_codec_and_uploads_less",
    "test_poisson_mini_batches_may_have_no_rows",
    "test_poisson_sampling_of_more_rows_than_there_are_is_a_full_batch",
    "test_scalars_hide_labels_from_an_eavesdropper",
    "test_scikit_learns_own_checks",
    "test_steps_may_have_none_of_a_partys_rows",
    "test_the_same_seed_gives_the_same_run",
    "test_zeroth_order_systems_learn",
}
"""Tests whose runs take long: by day with their first parameters, every night with all."""


@pytest.hookimpl(tryfirst=True)  # before xdist looks for groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow tests first, those of a module in one process, so that they share what they start."""
    seen = set()
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        name = getattr(item, "originalname", item.name)
        if name in BUT_ONE_NIGHTLY and name in seen:
            item.add_marker(pytest.mark.nightly)
        elif not item.get_closest_marker("nightly"):
            seen.add(name)
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


class Start(Protocol):
    """The fixture `run`: a run in this process, into a results folder of its own."""

    def __call__(
        self, parties: int, keys: Mapping[str, Any] | None = None, client: ClientApp = ...
    ) -> Run: ...


@pytest.fixture(scope="session", autouse=True)
def states_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Parties keep their states in a folder of the tests, not in the home of who runs them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLWR_HOME", str(tmp_path_factory.mktemp("flwr-home")))
        yield


@pytest.fixture(autouse=True)
def no_alignments(states_elsewhere: None) -> None:
    """None is kept from another test, whose files may have the same ids."""
    forget_alignments()


def nightly(*values: Any) -> Any:
    """Parameters of a test, for every night only."""
    return pytest.param(*values, marks=pytest.mark.nightly)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    monkeypatch.setattr(results, "draw_curves", lambda histories, path: None)  # half of the time
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
    """A run in this process of which the label holder and the parties' states are left."""
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
        links = {**holder.links[party], **holder.estimator.links_of_all(holder)}
        here |= {name: link.surrogate for name, link in links.items() if name != "uplink"}
        kept = load_large(context.state)
        kept.pop("labels", None)
        assert sorted(kept) == sorted({*names} - {f"other-{party}"})
        for name, surrogate in kept.items():
            assert surrogate.any()
            np.testing.assert_array_equal(surrogate, here[name].numpy(), err_msg=name)


@pytest.fixture
def own_log() -> Iterator[list[str]]:
    """What a party's process logs."""
    lines: list[str] = []
    logger = logging.getLogger("flwr")

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler, disabled = Keep(), logger.disabled
    logger.addHandler(handler)
    logger.disabled = False
    yield lines
    logger.disabled = disabled
    logger.removeHandler(handler)
