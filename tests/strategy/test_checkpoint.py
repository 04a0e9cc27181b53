"""Runs that are cut short and gone on with: they end as if they had never stopped."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from flwr.app import Context, Error, Message, RecordDict

from strategies.vertical import Vertical
from tests.organisations import change, contents, cut, small
from tests.pairwise import pairwise
from tests.releases import log_of
from vfl_flower import client_app
from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.config.files import whole
from vfl_flower.config.run_config import KEYS
from vfl_flower.data import labels, source, tables
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.label_holder.results import Results
from vfl_flower.launch.engines import Finished as Run
from vfl_flower.launch.engines import run_local
from vfl_flower.party import builder
from vfl_flower.protocol.privacy.journal import Event, Journal
from vfl_flower.protocol.privacy.release_log import ReleaseLog
from vfl_flower.protocol.systems import resolve
from vfl_flower.tools.cli import main

CANCER = {
    **{"dataset": "breast-cancer", "bottom-hidden": 8, "batch-size": 64},
    **{"embedding-size": 4, "top-hidden": 8},
}


class Cut(BaseException):
    """Somebody stops the run."""


def cut_after(evaluations: int) -> Any:
    """While this is patched in, a run ends at that evaluation."""
    evaluated, seen = Results.evaluated, []

    def stop(self: Results, entry: dict[str, Any]) -> None:
        evaluated(self, entry)
        seen.append(entry)
        if len(seen) == evaluations:
            raise Cut

    return patch.object(Results, "evaluated", stop)


def interrupted(folder: Path, keys: Mapping[str, Any], after: int, parties: int = 3) -> Path:
    """The folder of a run that was cut short at an evaluation."""
    with cut_after(after), pytest.raises(Cut):
        run_local(parties, {**keys, "out": str(folder)})
    return folder


def resumed(folder: Path, parties: int = 3, **keys: Any) -> Run:
    """The rest of that run, by processes that have just been started."""
    return run_local(parties, {"resume": str(folder), **keys})


def assert_equal_runs(one: Run, other: Run, parties: int = 3) -> None:
    """All parameters, figures and histories are the same, apart from seconds of this machine."""
    for name in ["top", *(f"party-{number}" for number in range(parties))]:
        if not (one.folder / f"{name}.npz").exists():
            assert name == "top"
            assert not (other.folder / f"{name}.npz").exists()
            continue
        mine, others = one.parameters(name), other.parameters(name)
        assert list(mine) == list(others)
        for key in mine:
            np.testing.assert_array_equal(mine[key], others[key], err_msg=f"{name}.{key}")

    def figures(entry: dict[str, Any]) -> dict[str, Any]:
        times = ("seconds", "reply_seconds", "began", "ended")
        changing = (*times, "peak_memory_mb", "by_party", "config")
        return {key: value for key, value in entry.items() if key not in changing}

    assert list(map(figures, one.history)) == list(map(figures, other.history))
    assert figures(one.summary) == figures(other.summary)
    for mine, others in zip(one.summary["by_party"], other.summary["by_party"], strict=True):
        assert figures(mine) == figures(others)


def ends_the_same(tmp_path: Path, keys: dict[str, Any]) -> tuple[int, Path]:
    """Cut a run and go on: it equals one that is not cut. The checkpoint's number, and the folder.

    An epoch has 8 steps, so that checkpoints are within one.
    """
    every = 5 if keys.get("window") else 20
    keys = {**CANCER, **keys, "epochs": 3, "checkpoint-every": every}
    whole = run_local(3, {**keys, "out": str(tmp_path / "whole")})
    folder = interrupted(tmp_path / "cut", keys, 2)
    number = checkpoint.load(folder).number
    assert 0 < len(checkpoint.load(folder).strategy["history"]["entries"]) < 2
    # Exchanges are numbered, and decide noise: both runs must keep checkpoints alike.
    assert_equal_runs(resumed(folder, **{"checkpoint-every": every}), whole)
    return number, folder


SYSTEMS_TO_CUT: dict[str, dict[str, Any]] = {
    "split-nn with Adam": {"optimizer": "adam", "party-lr": 0.01, "server-lr": 0.01},
    "momentum and windows": {"optimizer": "momentum", "window": 4},
    "adamw, one cycle, clipped, in bfloat16": {
        **{"optimizer": "adamw", "lr-schedule": "one-cycle", "weight-decay": 0.1},
        **{"party-lr": 0.01, "server-lr": 0.01, "clip-gradient": 0.1, "precision": "bfloat16"},
        **{"codec": "bfloat16", "downlink-codec": "float16", "compression": "error-feedback"},
    },
    "sum as top model": {"top-model": "sum", "embedding-size": "auto"},
    "ef-vfl, qsgd both ways": {
        **{"strategy": "ef-vfl", "codec": "qsgd", "downlink-codec": "qsgd"},
        **{"downlink-compression": "error-feedback", "delay": "poisson"},
    },
    "ef-vfl, top-k both ways, direct": {
        **{"strategy": "cvfl", "codec": "top-k", "downlink-codec": "top-k"}
    },
    "ef-vfl, shared labels": {
        **{"strategy": "ef-vfl", "labels": "shared", "local-steps": 2},
        **{"downlink-codec": "top-k", "downlink-compression": "error-feedback"},
    },
    "syn-zoo": {"strategy": "syn-zoo", "noise-seed": 0, "window": 4},
    "synrevel": {"strategy": "synrevel", "noise-seed": 0, "window": 4},
    "syn-zoo, compressed changes": {
        **{"strategy": "syn-zoo", "noise-seed": 0, "codec": "qsgd"},
        **{"compression": "error-feedback", "window": 4},
    },
    "perturbed": {"privacy": "perturbed-embedding", "noise-seed": 0},
    "partial rows": {"presence": 0.5, "window": 2},
    "ef-vfl, partial rows": {"strategy": "ef-vfl", "presence": 0.5},
    "ef-vfl, initial surrogates": {
        **{"strategy": "ef-vfl", "labels": "shared", "initial-surrogates": "embeddings"},
        **{"downlink-codec": "top-k", "downlink-compression": "error-feedback"},
    },
}


@pytest.mark.one_by_day
@pytest.mark.parametrize("keys", SYSTEMS_TO_CUT.values(), ids=list(SYSTEMS_TO_CUT))
def test_a_synchronous_run_ends_as_if_it_had_never_stopped(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    number, folder = ends_the_same(tmp_path, keys)
    assert checkpoint.load(folder).finished and checkpoint.load(folder).number > number


@pytest.mark.one_by_day
@pytest.mark.parametrize("labels", ["private", "shared"])
def test_a_run_cut_before_its_first_step_begins_its_surrogates_again(
    tmp_path: Path, labels: str
) -> None:
    keys = {**CANCER, "strategy": "ef-vfl", "labels": labels, "epochs": 2, "checkpoint-every": 20}
    keys["initial-surrogates"] = "embeddings"
    whole = run_local(3, {**keys, "out": str(tmp_path / "whole")})
    with patch.object(Vertical, "train", side_effect=Cut), pytest.raises(Cut):
        run_local(3, {**keys, "out": str(tmp_path / "cut")})
    assert checkpoint.load(tmp_path / "cut").number == 0
    assert_equal_runs(resumed(tmp_path / "cut", **{"checkpoint-every": 20}), whole)


def test_it_ends_so_however_it_was_kept(tmp_path: Path) -> None:
    keys = {**CANCER, "epochs": 3}
    whole = run_local(2, {**keys, "out": str(tmp_path / "whole")})
    folder = interrupted(tmp_path / "cut", {**keys, "checkpoint-every": 13}, 2, 2)
    with cut_after(1), pytest.raises(Cut):  # the second evaluation, again
        resumed(folder, 2, **{"checkpoint-every": 7})
    run = resumed(folder, 2)
    assert run.history[-1]["test_loss"] == whole.history[-1]["test_loss"]
    assert len(run.history) == 3
    for name in ("top", "party-0", "party-1"):
        for key, value in whole.parameters(name).items():
            np.testing.assert_array_equal(run.parameters(name)[key], value)


ASYNCHRONOUS: dict[str, dict[str, Any]] = {
    "vafl": {"strategy": "vafl"},
    "vafl with delays": {"strategy": "vafl", "delay": "exponential"},
    "vafl, Nesterov, cosine": {
        **{"strategy": "vafl", "optimizer": "nesterov", "lr-schedule": "cosine", "window": 4},
        **{"warm-up": 0.5, "party-lr": 0.05, "delay": "poisson"},
    },
    "vafl-t, bounded delay": {
        **{"strategy": "vafl-t", "quorum": 2, "max-delay": 5, "window": 4},
        **{"delay": "exponential"},
    },
    "asyrevel": {"strategy": "asyrevel", "noise-seed": 0, "window": 4},
    "cascaded": {"strategy": "cascaded", "noise-seed": 0, "window": 4, "delay": "straggler"},
    "compressed": {
        **{"strategy": "vafl", "codec": "qsgd", "compression": "error-feedback"},
        **{"downlink-codec": "qsgd", "downlink-compression": "error-feedback"},
    },
    "poisson": {"strategy": "vafl", "sampling": "poisson", "noise-seed": 0},
    "dpzv": {"strategy": "dpzv", "noise-multiplier": 1.0, "noise-seed": 0, "window": 4},
    "perturbed": {"strategy": "vafl", "privacy": "perturbed-embedding", "noise-seed": 0},
}


@pytest.mark.one_by_day
@pytest.mark.parametrize("keys", ASYNCHRONOUS.values(), ids=list(ASYNCHRONOUS))
def test_an_asynchronous_run_goes_on_from_its_last_checkpoint(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    ends_the_same(tmp_path, keys)


@pytest.mark.one_by_day
@pairwise(
    target=["classification", "regression"], strategy=["split-nn", "vafl"], align=["psi", "any"]
)
def test_a_run_on_files_goes_on_with_its_rows(
    tmp_path: Path, target: str, strategy: str, align: str
) -> None:
    table = small(80)
    if target == "regression":
        table["label"] = 100 + 10 * table["f0"] - 5 * table["f3"]
    organisations = cut(tmp_path, table, own=1)
    keys = {"epochs": 4, "target": target, "checkpoint-every": 6, "strategy": strategy}
    keys["align"] = align
    keys["noise-seed"] = 0  # else parties draw other models in each of the two runs
    whole = organisations.run("whole", keys)
    with cut_after(3), pytest.raises(Cut):
        organisations.run("cut", keys)
    rows = checkpoint.load(tmp_path / "cut").rows
    run = organisations.resume("cut", **{"checkpoint-every": 6})
    assert_equal_runs(run, whole, 2)
    np.testing.assert_array_equal(checkpoint.load(tmp_path / "cut").rows, rows)


# --- what is kept, and how ----------------------------------------------------------------------


def test_in_process_only_the_last_checkpoint_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_local(2, {**CANCER, "epochs": 1, "out": str(folder)})
    found = checkpoint.load(folder)
    assert found.finished and found.number == 1
    states = {f"run-{found.run}-party-{number}-checkpoint-1.state" for number in range(2)}
    assert {path.name for path in folder.glob("*.state")} == states
    assert not (folder / "releases.journal").exists()
    short = interrupted(tmp_path / "short", {**CANCER, "epochs": 2}, 1)
    assert not (short / checkpoint.FILE).exists() and not list(short.glob("*.state"))


def test_parties_keep_the_last_two_checkpoints(tmp_path: Path) -> None:
    run_local(2, {**CANCER, "epochs": 2, "checkpoint-every": 8, "out": str(tmp_path / "run")})
    last = checkpoint.load(tmp_path / "run").number
    assert last > 3
    numbers = [int(path.stem.rsplit("-")[-1]) for path in (tmp_path / "run").glob("*-0-*.state")]
    assert sorted(numbers) == [last - 1, last]


class Away:
    """The ClientApp, but that one party is away from one of its messages on, for so many."""

    def __init__(self, party: int, first: int, misses: int) -> None:
        self.party, self.first, self.misses = party, first, misses
        self.seen = 0

    def __call__(self, message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == self.party:
            self.seen += 1
            if self.first <= self.seen < self.first + self.misses:
                return Message(Error(code=3, reason="node is gone"), reply_to=message)
        return client_app.app(message, context)


def test_a_run_goes_on_from_a_checkpoint_at_which_a_party_was_away(tmp_path: Path) -> None:
    keys = {**CANCER, "strategy": "vafl", "on-party-failure": "continue", "epochs": 6}
    keys |= {"party-lr": 0.2, "server-lr": 0.2}
    keys |= {"checkpoint-every": 12, "out": str(tmp_path / "run")}
    client: Any = Away(1, 8, 10**9)
    with cut_after(3), pytest.raises(Cut):
        run_local(3, keys, client)
    seats = checkpoint.load(tmp_path / "run").strategy["seats"]
    assert [seat["alive"] for seat in seats] == [True, False, True]
    kept = {path.name for path in (tmp_path / "run").glob("*party-1-*.state")}
    found = checkpoint.load(tmp_path / "run")
    assert kept and f"run-{found.run}-party-1-checkpoint-{found.number}.state" not in kept
    still: dict[str, Any] = {"on-party-failure": "continue"}
    run = resumed(tmp_path / "run", **still)
    assert run.summary["failed_parties"] == []  # it was asked back
    assert run.summary["test_accuracy"] > 0.85
    counts = [each["exchanges"] for each in run.summary["by_party"]]
    assert counts[1] > 8


# --- privacy ------------------------------------------------------------------------------------


def log_of_run(keys: Mapping[str, Any]) -> tuple[ReleaseLog, Any]:
    """The log of such a run, before there is anything in it, and its accountant."""
    found = log_of(resolve(keys), 455)
    return found, found.accountant


def released(folder: Path) -> list[Event]:
    return list(Journal(folder / "releases.journal").read())


def shorten(folder: Path, count: int) -> None:
    """Keep the first events of a journal, as an older one has them."""
    events, path = released(folder)[:count], folder / "releases.journal"
    path.unlink()
    journal = Journal(path, checkpoint.load(folder).run.partition("-")[0])
    assert list(journal.read()) == []
    for event in events:
        journal.write(event)


DPZV = {**CANCER, "strategy": "dpzv", "epochs": 3, "window": 4, "noise-multiplier": 1.5}


COUNTED = {**DPZV, "delta": 1e-3, "checkpoint-every": 5}


@pytest.fixture(scope="module")
def counted_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that was cut short at its second evaluation, and the memory beside it."""
    made = tmp_path_factory.mktemp("counted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(made / "state"))
        interrupted(made / "cut", COUNTED, 2, 2)
    return made


@pytest.fixture
def counted(counted_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of that run, whose memory is a copy too."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    shutil.copytree(counted_run, tmp_path, dirs_exist_ok=True)
    return tmp_path / "cut"


def test_scalars_that_are_sent_again_stay_counted(tmp_path: Path, counted: Path) -> None:
    whole, folder = run_local(2, {**COUNTED, "out": str(tmp_path / "whole")}), counted
    planned = 3 * 8 * 2  # epochs, steps and parties
    assert sum(event[2] for event in released(tmp_path / "whole")) == planned
    before = sum(event[2] for event in released(folder))
    again = before - checkpoint.load(folder).strategy["plan"]["answered"]
    assert again > 0
    run = resumed(folder, 2)
    assert sum(event[2] for event in released(folder)) == planned  # and not more
    assert checkpoint.load(folder).strategy["plan"]["answered"] == planned - again
    # As many scalars; but rows that were answered twice have had their part in more than others.
    assert run.summary["epsilon"] > whole.summary["epsilon"]
    assert run.summary["epochs"] == pytest.approx((planned - again) / 16, abs=1e-3)


@pytest.mark.one_by_day
@pytest.mark.parametrize("cuts", [1, 2])
def test_a_journal_counts_through_several_interruptions(tmp_path: Path, cuts: int) -> None:
    folder = interrupted(tmp_path / "cut", {**DPZV, "checkpoint-every": 3}, 1, 2)
    for _ in range(cuts - 1):
        with cut_after(1), pytest.raises(Cut):
            resumed(folder, 2, **{"checkpoint-every": 3})
    run = resumed(folder, 2)
    releases, accountant = log_of_run({**DPZV, "noise-multiplier": 1.5})
    accountant.multiplier = 1.5
    releases.keep(folder / "releases.journal")
    assert accountant.released == 3 * 8 * 2
    assert run.summary["epsilon"] == pytest.approx(accountant.figures()["epsilon"])


def test_a_run_that_goes_on_gives_no_answer_beyond_its_budget(tmp_path: Path) -> None:
    """Rows of windows that were answered twice are paid for, and have fewer answers left."""
    keys = {**CANCER, "strategy": "dpzv", "epochs": 3, "window": 4, "epsilon": 1.0}
    folder = interrupted(tmp_path / "cut", {**keys, "checkpoint-every": 5}, 2, 2)
    before = sum(event[2] for event in released(folder))
    again = before - checkpoint.load(folder).strategy["plan"]["answered"]
    assert again > 0
    run = resumed(folder, 2)
    assert run.summary["epsilon"] == pytest.approx(1.0, rel=1e-6)
    taken = np.zeros(455, int)
    for event in released(folder):
        np.add.at(taken, event[5], event[3])
    assert taken.max() == 3 * 2 * 2  # scalars, and as many steps of the top model
    answered = sum(event[2] for event in released(folder))
    assert before < answered < 3 * 8 * 2  # the others were answers that say nothing
    assert run.summary["epochs"] == pytest.approx((3 * 8 * 2 - again) / 16, abs=1e-3)


@pytest.mark.one_by_day
@pytest.mark.parametrize("torn", [1, 4, 23, 30, 120])
def test_an_event_of_a_journal_may_be_torn_while_it_is_written(
    counted: Path, tmp_path: Path, torn: int
) -> None:
    """It is written before what it counts is sent, so that was not sent."""
    folder = counted
    journal = folder / "releases.journal"
    whole, events = journal.read_bytes(), released(folder)
    next_one = Journal(Path(shutil.copy(journal, tmp_path)))
    assert len(list(next_one.read())) == len(events)
    next_one.write(Event(4, 0, 4, 0, 0, np.arange(30, dtype=np.int32)))
    journal.write_bytes(whole + next_one.path.read_bytes()[len(whole) : -torn])
    releases, accountant = log_of_run(COUNTED)
    releases.keep(journal)
    assert accountant.released == sum(event[2] for event in events)
    resumed(folder, 2)
    assert sum(event[2] for event in released(folder)) == 3 * 8 * 2


@pytest.mark.one_by_day
@pytest.mark.parametrize("how", ["gone", "cut", "empty", "older", "flipped", "of another run"])
def test_a_run_whose_journal_is_not_as_it_was_is_not_gone_on_with(
    counted: Path, tmp_path: Path, how: str
) -> None:
    folder = counted
    journal = folder / "releases.journal"
    whole = journal.read_bytes()
    if how == "gone":
        journal.unlink()
    elif how == "older":  # than the checkpoint
        shorten(folder, checkpoint.load(folder).strategy["journal"][0] - 1)
    elif how == "of another run":
        another = interrupted(tmp_path / "another", COUNTED, 2, 2) / journal.name
        journal.write_bytes(another.read_bytes())
    else:
        flipped = whole[:99] + b"x" + whole[100:]
        journal.write_bytes({"cut": whole[:-200], "empty": b"", "flipped": flipped}[how])
    fails(folder, r"releases.journal is .*, and without it nobody knows what this run has released")


@pytest.mark.parametrize("second", ["kept", "lost"])
@pytest.mark.parametrize("how", ["the journal is from before the end", "all of the folder is"])
def test_a_run_that_is_restored_to_an_earlier_time_is_not_gone_on_with(
    counted: Path, tmp_path: Path, how: str, second: str
) -> None:
    folder = counted
    if how == "all of the folder is":
        earlier = shutil.copytree(folder, tmp_path / "earlier")
        with cut_after(1), pytest.raises(Cut):
            resumed(folder, 2)
        shutil.rmtree(folder)
        shutil.copytree(earlier, folder)
    else:
        of_checkpoint = checkpoint.load(folder).strategy["journal"][0]
        assert of_checkpoint < len(released(folder))
        shorten(folder, of_checkpoint)
    if second == "lost":  # the control
        shutil.rmtree(tmp_path / "state")
        resumed(folder, 2)
    else:
        fails(folder, r"releases.journal is older than .*, or a copy of the run went on, and with")


def test_one_copy_of_a_run_is_gone_on_with_and_no_other(counted: Path, tmp_path: Path) -> None:
    folder = counted
    copy = Path(shutil.copytree(folder, tmp_path / "copy"))
    renamed = folder.rename(tmp_path / "renamed")
    resumed(renamed, 2)
    fails(copy, "or a copy of the run went on, and without it nobody knows")


@pytest.mark.one_by_day
@pytest.mark.parametrize("keys", [{}, {"sampling": "poisson"}, {"estimator": "zeroth-order"}])
def test_uploads_that_are_made_again_stay_counted(tmp_path: Path, keys: dict[str, Any]) -> None:
    keys = {**CANCER, "strategy": "vafl", "privacy": "perturbed-embedding", "epochs": 3, **keys}
    keys |= {"checkpoint-every": 10, "window": 1}
    whole = run_local(2, {**keys, "out": str(tmp_path / "whole")})
    folder = interrupted(tmp_path / "cut", keys, 2, 2)
    run = resumed(folder, 2)
    releases, accountant = log_of_run(keys)
    releases.keep(folder / "releases.journal")
    assert run.summary["epsilon"] == accountant.figures()["epsilon"]
    if not {"sampling"} & keys.keys():  # where uploads of a row do not depend on chance
        assert run.summary["epsilon"] > whole.summary["epsilon"]


@pytest.mark.one_by_day
@pytest.mark.parametrize("noise_seed", [-1, 0])
def test_a_label_holder_draws_a_secret_anew_unless_noise_is_to_be_repeatable(
    tmp_path: Path, noise_seed: int
) -> None:
    keys = {**DPZV, "noise-seed": noise_seed, "checkpoint-every": 3}
    holders: list[Any] = []
    begin = LabelHolder.__init__

    def keep(self: LabelHolder, *given: Any) -> None:
        begin(self, *given)
        holders.append(self)

    with patch.object(LabelHolder, "__init__", keep):
        resumed(interrupted(tmp_path / "cut", keys, 1, 2), 2)
    first, second = (holder.noise.secret for holder in holders)
    assert (first == second) == (noise_seed >= 0)


# --- what cannot be gone on with ----------------------------------------------------------------


def untouched(folder: Path) -> dict[str, Any]:
    """Return everything that must be unchanged if no run has begun.

    In process a party's model is saved beside its state, if it was read from there. The party
    keeps that state for the new run too.
    """
    kept = contents(folder)
    states = {path.name for path in folder.glob("*.state")}
    try:
        run = checkpoint.load(folder).run
    except ConfigError:
        run = ""
    new = {name for name in states if not name.startswith(f"run-{run}-")}  # of the new attempt
    return {name: kept[name] for name in kept.keys() - new if not name.startswith("party-")}


def assert_untouched(before: Mapping[str, Any], folder: Path) -> None:
    after = untouched(folder)
    assert [name for name in after.keys() - before.keys() if not name.startswith("run-")] == []
    assert [name for name in before if before[name] != after.get(name)] == []


def fails(folder: Path, sentence: str, parties: int = 2, **keys: Any) -> None:
    """Resuming ends with this sentence, and leaves every file as it was."""
    before = untouched(folder)
    with pytest.raises(VflError, match=sentence) as raised:
        resumed(folder, parties, **keys)
    message = str(raised.value)
    assert message.endswith(".") and "\n" not in message and "raised" not in message
    assert_untouched(before, folder)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two parties that was cut short."""
    keys = {**CANCER, "epochs": 3, "checkpoint-every": 12}
    return interrupted(tmp_path_factory.mktemp("kept") / "run", keys, 2, 2)


@pytest.fixture
def folder(tmp_path: Path, kept: Path) -> Path:
    return Path(shutil.copytree(kept, tmp_path / "run"))


def test_without_a_checkpoint(tmp_path: Path) -> None:
    sentence = r"has no checkpoint.npz. Name the results folder of a run that saved a checkpoint\."
    fails(interrupted(tmp_path / "cut", {**CANCER, "epochs": 2}, 1, 2), sentence)
    with pytest.raises(ConfigError, match=r"nowhere is not a folder\. Name the results folder"):
        resumed(tmp_path / "nowhere", 2)
    assert not (tmp_path / "nowhere").exists()


class Shell:
    """Code that a pickle would run."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("was-unpickled",)


@pytest.mark.parametrize(
    "kind", ["cut", "empty", "text", "pickle", "object array", "other", "json"]
)
def test_a_damaged_checkpoint(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    import pickle

    path = folder / checkpoint.FILE
    monkeypatch.chdir(tmp_path)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:-1000])
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        with whole(path, sealed=True) as file:  # so that what is in it is looked at
            if kind == "pickle":
                file.write(pickle.dumps(Shell()))
            elif kind == "object array":
                np.savez(file, text=np.array([Shell()], object), rows=np.zeros(0, np.int64))
            elif kind == "other":
                np.savez(file, weights=np.zeros(3))
            elif kind == "json":
                np.savez(file, text=np.frombuffer(b'{"config": {"epochs": 3}}', np.uint8))
            else:
                file.write(b"no checkpoint")
    fails(folder, r"checkpoint.npz is damaged, or another version wrote it")
    assert not (tmp_path / "was-unpickled").exists()


def test_a_finished_run(folder: Path) -> None:
    resumed(folder, 2)
    fails(folder, r"^The run in .* has finished\. Leave the option resume out\.")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("epochs", 7), ("party-lr", 0.5), ("window", 3), ("seed", 1), ("strategy", "vafl")),
        *((key, KEYS[key].default) for key in ("epochs", "batch-size")),
    ],
)
def test_a_contradicting_key(folder: Path, key: str, value: Any) -> None:
    fails(folder, rf"holds a run with {key} = .*, not .*\. Leave the option out", **{key: value})


def test_equal_keys_do_not_contradict(folder: Path) -> None:
    assert resumed(folder, 2, epochs=3, dataset="breast-cancer").summary["failure"] is None


@pytest.mark.parametrize("parties", [1, 3])
def test_another_number_of_parties(folder: Path, parties: int) -> None:
    fails(folder, rf"^The run in .* has 2 parties, not {parties}\.", parties)


def test_the_command_goes_on_with_the_parties_of_the_run(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["run", "-c", f"resume='{folder}'"]
    assert main([*command, "--parties", "3"]) == 1
    assert "has 2 parties, not 3." in capsys.readouterr().err
    assert main(command) == 0  # where the default is another number
    assert checkpoint.load(folder).finished


@pytest.fixture
def on_files(tmp_path: Path) -> Any:
    organisations = cut(tmp_path / "files", small(), own=1, known=1)
    with cut_after(2), pytest.raises(Cut):
        organisations.run("run", {"epochs": 3, "checkpoint-every": 4})
    return organisations


def other_labels(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(label=frame["label"].map({0: "no", 1: "yes"}))


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (lambda frame: frame[:-1], "has lost rows|has other rows, classes"),
        (lambda frame: frame[::-1], "has other rows, classes or values"),
        (lambda frame: frame.assign(who=frame["who"] + 1), "has other rows, classes or values"),
        (other_labels, "has other rows, classes or values than"),
        (lambda frame: frame.assign(f0=2 * frame["f0"]), "has other rows, classes or values than"),
    ],
    ids=["fewer rows", "another order", "other ids", "other labels", "other values"],
)
def test_another_file_of_labels(on_files: Any, how: Any, sentence: str) -> None:
    change(on_files.labels, how)
    before = untouched(on_files.folder / "run")
    with pytest.raises(ConfigError, match=sentence) as raised:
        on_files.resume("run")
    assert str(raised.value).endswith(".")
    assert_untouched(before, on_files.folder / "run")


@contextmanager
def another_machine() -> Iterator[None]:
    """While this is patched in, means and deviations have other last bits."""
    nudge, scaling, standardised = np.nextafter, source.scaling, labels._standardised

    def otherwise(train: Any, per_column: bool) -> tuple[Any, ...]:
        return tuple(nudge(each, np.inf) for each in scaling(train, per_column))

    def labels_otherwise(*given: Any) -> labels.Labels:
        found = standardised(*given)
        mean, deviation = (float(nudge(x, np.inf)) for x in (found.mean, found.deviation))
        return replace(found, mean=mean, deviation=deviation)

    with (
        patch.object(tables, "scaling", otherwise),
        patch.object(labels, "_standardised", labels_otherwise),
    ):
        yield


def test_a_run_resumes_on_a_machine_that_rounds_otherwise(tmp_path: Path) -> None:
    table = small().assign(label=lambda frame: frame["f0"] + 0.1 * frame["f1"])
    organisations = cut(tmp_path / "files", table, own=1, known=1)
    keys = {"epochs": 3, "checkpoint-every": 4, "target": "regression"}
    with cut_after(2), pytest.raises(Cut):
        organisations.run("run", keys)
    with another_machine():
        for module, sentence in (
            (labels, "has other rows, classes or values than"),
            (builder, "does not have the data that this run began with"),
        ):
            with (  # the control
                patch.object(module, "alike", lambda one, other: one == other),
                pytest.raises(VflError, match=sentence),
            ):
                organisations.resume("run")
        assert organisations.resume("run").summary["failure"] is None


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "how",
    [
        lambda frame: frame[:-1],
        lambda frame: frame[::-1],
        lambda frame: frame.assign(who=frame["who"] + 1),
        lambda frame: frame.drop(columns=["f1"]),
        lambda frame: frame.assign(f1=2 * frame["f1"] + 3),
        lambda frame: frame.rename(columns={"f1": "f9"}),
    ],
    ids=["fewer rows", "another order", "other ids", "a column gone", "other values", "renamed"],
)
def test_another_file_of_a_party(on_files: Any, how: Any) -> None:
    change(on_files.files[0], how)
    before = untouched(on_files.folder / "run")
    sentence = "does not have the data that this run began with|has lost or changed rows"
    with pytest.raises(PartyError, match=sentence) as raised:
        on_files.resume("run")
    assert str(raised.value).endswith(".")
    assert "f1" not in str(raised.value) and "f9" not in str(raised.value)
    assert_untouched(before, on_files.folder / "run")


def test_a_party_that_loses_its_state_after_a_resume_goes_on_from_what_it_resumed(
    folder: Path,
) -> None:
    served: list[int] = []

    def forgetful(message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 0 and message.metadata.message_type == "train":
            served.append(0)
            if len(served) == 2:  # its process and its SuperNode are started again
                context.state = RecordDict()
        return client_app.app(message, context)

    client: Any = forgetful
    finished = run_local(2, {"resume": str(folder)}, client)
    assert len(served) > 2
    assert finished.summary["failure"] is None and finished.summary["epochs"] == 3
    assert finished.summary["failed_parties"] == []
