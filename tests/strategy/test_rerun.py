"""A finished run is repeated to the last bit, and a rerun releases nothing new."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import pytest
from flwr.app import Message

import vfl_flower
from strategies.transcript import verdict
from tests.alignment.test_matching import World, people
from tests.conftest import nightly
from tests.organisations import ID, Organisations, cancer, change, cut
from tests.strategy.test_checkpoint import CANCER
from vfl_flower import client_app
from vfl_flower.config import provenance
from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch.engines import Finished, run_local, run_supernodes
from vfl_flower.party import state, state_file
from vfl_flower.party.party import Party
from vfl_flower.party.transcript import Transcript
from vfl_flower.results.figures import headline
from vfl_flower.tools import cli
from vfl_flower.tools.compare import compare
from vfl_flower.tools.seeds import repeated
from vfl_flower.transport.messages import (
    CheckpointOrder,
    EmbedOrder,
    EvaluateOrder,
    RestoreOrder,
    TrainOrder,
    Turn,
    Upload,
)
from vfl_flower.transport.wire import Call, digest_of

EPOCHS = {"epochs": 2, "bottom-hidden": 8, "top-hidden": 8}
PAIRS: dict[str, dict[str, Any]] = {
    "split-nn": {},
    "vafl-t": {"strategy": "vafl-t", "quorum": 1},
    "vafl": {"strategy": "vafl"},
    "ef-vfl": {"strategy": "ef-vfl"},
    "cascaded": {"strategy": "cascaded"},
    "asyrevel": {"strategy": "asyrevel"},
    "dpzv": {"strategy": "dpzv"},
    "noise": {"privacy": "perturbed-embedding"},
    "noise, asynchronous": {"strategy": "vafl-t", "privacy": "perturbed-embedding"},
    "noise on labels": {"privacy": "labels", "epsilon": 2.0},
    "masks": {"aggregation": "secure", "combine": "mean"},
    "partial rows": {"align": "any"},
    "partial rows, noise": {"align": "any", "privacy": "perturbed-embedding"},
    "checkpoints": {"checkpoint-every": 5},
    "frozen": {"strategy": "frozen"},
    "bounded delay": {"strategy": "vafl", "max-delay": 3},
    "shared labels": {"strategy": "ef-vfl", "labels": "shared"},
    "first embeddings": {"strategy": "ef-vfl", "initial-surrogates": "embeddings"},
    "secret mini-batches": {"strategy": "cascaded", "sampling": "poisson"},
    "early stop": {"patience": 1, "epochs": 8},
    "subsets": {"align": "any", "subsets": "sampled"},
}


def rerun(organisations: Organisations, of: str, out: str, **keys: Any) -> Finished:
    given = {"rerun": str(organisations.folder / of), "out": str(organisations.folder / out)}
    nodes = organisations.node_configs
    return run_local(len(organisations.files), {**given, **keys}, node_configs=nodes)


def is_equal(run: Finished) -> bool:
    found = run.summary["rerun"]
    return bool(found["messages"] > 5 and not found["differs"])


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    """Organisations and their run "a", which no test changes."""
    parties = cut(tmp_path_factory.mktemp("ran"), cancer(6), suffixes=(".csv", ".csv"))
    parties.run("a", EPOCHS)
    return parties


def same(one: Finished, other: Finished, model: str) -> bool:
    mine, others = one.parameters(model), other.parameters(model)
    return all(np.array_equal(mine[key], others[key]) for key in mine)


@pytest.mark.parametrize(
    "name",
    [each if each in ("vafl-t", "dpzv", "noise", "masks") else nightly(each) for each in PAIRS],
)
def test_a_rerun_equals_the_run_to_the_last_bit(name: str, tmp_path: Path) -> None:
    parties = cut(tmp_path, cancer(6, 200))
    keys = {**EPOCHS, **PAIRS[name]}
    first = parties.run("a", keys)
    again = rerun(parties, "a", "b")
    assert is_equal(again) and "to the last bit" in headline(again.summary)
    for key in ("test_loss", "test_auc", "epsilon", "steps", "bytes_up"):
        assert again.summary[key] == first.summary[key]
    for model in ("top", "party-0"):
        assert same(first, again, model)
    if name == "vafl-t":  # the control: an equal configuration alone gives another model
        assert not same(first, parties.run("c", keys), "top")


def test_a_rerun_can_be_repeated_and_its_model_predicts(ran: Organisations) -> None:
    shutil.copytree(ran.folder / "a", ran.folder / "moved")
    assert is_equal(rerun(ran, "moved", "again")) and is_equal(rerun(ran, "again", "third"))
    pd.testing.assert_frame_equal(*(ran.predict(each) for each in ("moved", "third")))


def test_people_matched_by_rules_and_several_rows_of_a_person_are_repeated(tmp_path: Path) -> None:
    table = people(300, few=300)
    world = World(tmp_path, table, pd.concat([table, table[:60]]))
    nodes = [{**world.nodes[0], "rows": "last"}]
    run_local(1, {**world.keys, "epochs": 2, "out": str(tmp_path / "a")}, node_configs=nodes)
    given = {"rerun": str(tmp_path / "a"), "out": str(tmp_path / "b")}
    again = run_local(1, given, node_configs=nodes)
    assert is_equal(again) and again.summary["coverage"]["aligned"] == 300


def test_a_run_without_files_is_repeated_and_what_trains_anew_is_refused(tmp_path: Path) -> None:
    run_local(2, {**CANCER, "epochs": 1, "strategy": "dpzv", "out": str(tmp_path / "a")})
    keys = {"rerun": str(tmp_path / "a")}
    assert is_equal(run_local(2, {**keys, "out": str(tmp_path / "b")}))
    common = {"out": str(tmp_path / "compared")}
    with pytest.raises(ConfigError, match="trains every run anew: leave task, model, resume, grow"):
        compare(2, common, [{"strategy": "split-nn"}, {"strategy": "split-nn", **keys}], 0.9)
    with pytest.raises(ConfigError, match="--seeds trains every run anew"):
        repeated(run_local, 2, {**keys, "out": str(tmp_path / "seeds")}, [], 2)
    assert not (tmp_path / "compared").exists() and not (tmp_path / "seeds").exists()
    x = cancer(4)
    frames = [x[["f0", "f1"]], x[["f2", "f3"]]]
    vfl_flower.train(frames, x["label"], epochs=1, out=tmp_path / "frames")
    with pytest.raises(ConfigError, match="had frames of a Python process, which have ended"):
        run_local(2, {"rerun": str(tmp_path / "frames")})


def swapped(table: pd.DataFrame) -> pd.DataFrame:
    """Swap two values of a column, whose mean and deviation stay."""
    name = next(each for each in table if each.startswith("f"))
    values = table[name].to_numpy().copy()
    values[[3, 7]] = values[[7, 3]]
    return table.assign(**{name: values})


@pytest.mark.parametrize("version", ["", "0.1"])
def test_a_side_names_its_new_versions_or_that_only_its_data_can_have_changed(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    parties = cut(tmp_path, cancer(6, 200), known=1.0, suffixes=(".csv", ".csv"))
    parties.run("a", EPOCHS)
    now = json.loads(provenance.environment())
    assert {"torch", "numpy", "processor", "code"} <= now.keys()
    other = json.dumps(now | ({"torch": version} if version else {}))
    monkeypatch.setattr(provenance, "environment", lambda: other)
    new = f"torch {now['torch']} is now 0.1"
    assert is_equal(rerun(parties, "a", "b"))  # a version that changes nothing is no difference
    assert (f"environment has changed: {new}." in caplog.text) == bool(version)
    change(parties.files[1], swapped)
    with pytest.raises(PartyError, match=r"Party 1 .*repeat, and sends nothing\.") as said:
        rerun(parties, "a", "c")
    mine = ["--node-config", f"file='{parties.files[0]}' id='{ID}'"]
    mine += ["--node-config", f"file='{parties.files[1]}' id='{ID}'"]
    for folder, there in ((tmp_path / "d", False), (tmp_path / "a", True)):
        assert cli.main(["rerun", str(tmp_path / "a"), "--out", str(folder), *mine]) != 0
        assert folder.exists() == there  # a failed rerun removes its own folder, and no other
    same = "Its versions and processor are the same, so its data have probably changed."
    assert str(said.value).endswith(f" {new}." if version else f" {same}")


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"epochs": 3}, "holds a run with epochs = 2, not 3. Leave the option out to rerun"),
        ({"checkpoint-every": 7}, "holds a run with checkpoint-every"),
    ],
)
def test_a_rerun_takes_no_other_options(
    keys: dict[str, Any], words: str, ran: Organisations
) -> None:
    with pytest.raises(ConfigError, match=words):
        rerun(ran, "a", "other", **keys)


def test_a_run_that_was_resumed_or_grew_is_not_repeated(ran: Organisations) -> None:
    ran.run("grown", {**EPOCHS, "grow": str(ran.folder / "a")})
    with pytest.raises(ConfigError, match="cannot be repeated: it was resumed, began with"):
        rerun(ran, "grown", "b")


def test_changed_ids_are_named(ran: Organisations, tmp_path: Path) -> None:
    file = tmp_path / "fewer.csv"
    pd.read_csv(ran.files[0])[5:].to_csv(file, index=False)
    nodes = [{**ran.node_configs[0], "file": str(file)}, ran.node_configs[1]]
    given = {"rerun": str(ran.folder / "a"), "out": str(tmp_path / "b")}
    with pytest.raises(ConfigError, match="A rerun needs the alignment of the run to repeat"):
        run_local(2, given, node_configs=nodes)


# --- a hostile label holder ---------------------------------------------------------------------


class _Altered:
    """The ClientApp behind a label holder that changes an order of the rerun."""

    def __init__(self, alters: int = 0) -> None:
        self.alters, self.sent = alters, list[np.ndarray[Any, Any]]()

    def __call__(self, message: Message, context: Any) -> Message:
        order = message.payload if isinstance(message, Call) else None
        if isinstance(order, TrainOrder) and order.arrays and self.alters:
            for name, array in order.arrays.items():
                order.arrays[name] = array + np.float32(1e-3)
                self.alters -= 1
        reply = client_app.app(message, context)
        answer = reply.payload if isinstance(reply, Call) else None
        if isinstance(answer, Upload) and isinstance(order, TrainOrder):
            self.sent += [each.copy() for each in answer.arrays.values()]
        return reply


@pytest.mark.one_by_day
@pytest.mark.parametrize("altered", [True, False])
def test_a_party_sends_no_new_embedding_with_old_noise(altered: bool, tmp_path: Path) -> None:
    """Two embeddings of a row with one noise would show their difference, without any noise."""
    parties = cut(tmp_path, cancer(6))
    first: Any = _Altered()
    second: Any = _Altered(int(altered))
    keys = {**EPOCHS, "privacy": "perturbed-embedding"}
    parties.run("a", keys, first)
    given = {"rerun": str(tmp_path / "a"), "out": str(tmp_path / "b")}
    if altered:
        with pytest.raises(PartyError, match="was sent another message"):
            run_local(2, given, second, parties.node_configs)
    else:
        run_local(2, given, second, parties.node_configs)
    assert second.sent  # all that was sent had been sent before
    before = {each.tobytes() for each in first.sent}
    assert {each.tobytes() for each in second.sent} <= before
    assert altered == (len(second.sent) < len(first.sent))


@pytest.mark.one_by_day
@pytest.mark.parametrize("altered", [True, False])
def test_the_label_holder_hides_nothing_new_with_old_noise(altered: bool, tmp_path: Path) -> None:
    """Two scalars of one noise would show their difference, and so labels, without any noise."""
    parties = cut(tmp_path, cancer(6))
    parties.run("a", {**EPOCHS, "strategy": "dpzv"})
    left, scalars = [altered], list[int]()

    def client(message: Message, context: Any) -> Message:
        order = message.payload if isinstance(message, Call) else None
        if isinstance(order, Turn) and order.arrays:
            scalars.append(order.exchange)
        reply = client_app.app(message, context)
        if isinstance(order, TrainOrder) and isinstance(reply, Call) and left[0]:
            assert isinstance(reply.payload, Upload)
            left[0] = False
            arrays = reply.payload.arrays
            arrays |= {name: array * 1.001 for name, array in arrays.items() if name != "ids"}
        return reply

    hostile: Any = client
    given = {"rerun": str(tmp_path / "a"), "out": str(tmp_path / "b")}
    if not altered:
        assert is_equal(run_local(2, given, hostile, parties.node_configs)) and scalars
        return
    with pytest.raises(VflError, match=r"Party \d has sent another answer"):
        run_local(2, given, hostile, parties.node_configs)
    assert not scalars  # the label holder has answered nothing


def test_a_rerun_spends_no_uploads_of_a_party(tmp_path: Path) -> None:
    parties = cut(tmp_path, cancer(6))
    words: Any = [{"max-uploads": 3, "max-epochs": 2}] * 2
    parties.words = words
    parties.run("a", EPOCHS)
    assert is_equal(rerun(parties, "a", "b"))


def order(exchange: int, gradient: float = 1.0, first: int = 0) -> TrainOrder:
    arrays = {"gradient": np.full(3, gradient, np.float32)}
    about: dict[str, Any] = {"epoch": 0, "first": first, "steps": 1, "coordinated": True}
    return TrainOrder(exchange=exchange, arrays=arrays, **about)


def test_a_transcript_keeps_secrets_and_compares_orders_and_answers() -> None:
    x = {"embedding": np.ones((2, 3), np.float32)[:, 1:2]}  # no neighbours in memory
    first = Transcript()
    drawn = [first.secret(), first.secret(order(1)), first.secret(order(2))]
    first.answered(2, x)
    again = Transcript.of({**first.state_dict(), "again": np.frombuffer(first.entries, np.uint8)})
    assert again.repeats
    assert [again.secret(), again.secret(order(1)), again.secret(order(2))] == drawn
    again.answered(2, x)
    for other in ({"embedding": x["embedding"][:1]}, {"embeddings": x["embedding"]}, {}):
        with pytest.raises(VflError, match="sends nothing"):
            again.answered(2, other)
    for changed in (order(2, gradient=1.5), order(2, first=1)):
        with pytest.raises(VflError, match="was sent another message 2 than in the run to repeat"):
            again.secret(changed)
    with pytest.raises(VflError, match="was asked for message 3, which"):
        again.secret(order(3))
    assert len(set(drawn)) == 3 and not Transcript.of({}).repeats


def test_a_failed_message_leaves_no_entry(tmp_path: Path) -> None:
    """A rerun would send what the failed message has never sent."""
    parties = cut(tmp_path, cancer(6))
    failures, answer = [VflError("failed after it had computed.")], Party._answer

    def fail(party: Party, arrays: Any) -> Any:
        upload = answer(party, arrays)
        if failures and (party.learner.index, party.exchange) == (0, 2):
            raise failures.pop()
        return upload

    with patch.object(Party, "_answer", fail):
        parties.run("a", {**EPOCHS, "strategy": "vafl", "on-party-failure": "continue"})
    assert not failures
    found = state_file.read(next((tmp_path / "a").glob("*party-0-checkpoint-1.state")))
    entries = state.load_arrays(found, "transcript")["entries"].reshape(-1, 44)
    numbers = entries[entries[:, 32:].any(1), 0].tolist()
    assert len(numbers) > 3 and 2 not in numbers
    with pytest.raises(ConfigError, match="cannot be repeated"):
        rerun(parties, "a", "b")


def test_an_older_checkpoint_is_named(ran: Organisations) -> None:
    shutil.copytree(ran.folder / "a", ran.folder / "older")
    found = checkpoint.load(ran.folder / "older")
    del found.strategy["transcript"]
    found.save(ran.folder / "older")
    with pytest.raises(ConfigError, match="kept no transcript"):
        rerun(ran, "older", "b")


@pytest.mark.nightly
def test_another_processor_is_named_at_the_first_message_that_differs(tmp_path: Path) -> None:
    """Other instructions of this processor stand for another machine."""
    parties = cut(tmp_path, cancer(6), known=1.0)
    parties.run("a", EPOCHS)
    nodes = [f"file='{each}' id='{ID}'" for each in parties.files]
    told = ["rerun", str(tmp_path / "a"), "--node-config", nodes[0], "--node-config", nodes[1]]
    said = {}
    for kind, more in (
        ("another", {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}),
        ("same", {}),
    ):
        words = [*told, "--out", str(tmp_path / kind)]
        called = [sys.executable, "-c", f"from vfl_flower.tools.cli import main; main({words})"]
        with_more = {**os.environ, **more}
        done = subprocess.run(called, env=with_more, capture_output=True, text=True, timeout=300)
        said[kind] = done.stdout + done.stderr
    assert "are the same to the last bit" in said["same"].replace("\n", " ")
    here = json.loads(provenance.environment())["processor"]
    match = r"Party \d failed: would answer message (\d+) otherwise .* sends nothing\. processor "
    first = re.search(match + re.escape(here) + r" is now \w+ DEFAULT\.", said["another"])
    assert first and int(first[1]) < 10, said["another"]


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["split-nn", "vafl-t", "noise", "masks"])
def test_a_rerun_on_nodes_equals_the_run(name: str, tmp_path: Path) -> None:
    """Answers come in another order each time, and the rerun uses them in the earlier order."""
    parties = cut(tmp_path, cancer())
    keys = {**parties.keys, **EPOCHS, **PAIRS[name], "out": str(tmp_path / "a")}
    run_supernodes(2, keys, node_configs=parties.node_configs)
    given = {"rerun": str(tmp_path / "a"), "out": str(tmp_path / "b")}
    assert is_equal(run_supernodes(2, given, node_configs=parties.node_configs))


@pytest.mark.parametrize(
    ("earlier", "differs"), [({"a": 1}, []), ({}, []), ({"a": 2}, ["a"]), ({"auc": 0.6}, ["auc"])]
)
def test_a_verdict_names_what_differs_of_what_the_earlier_run_saved(
    earlier: dict[str, float], differs: list[str]
) -> None:
    saved = {name: np.array(value) for name, value in earlier.items() if name != "auc"}
    again: Any = SimpleNamespace(
        arrays=saved, strategy={"figures": {"auc": earlier.get("auc", 0.5)}}
    )
    arrays = {"a": np.array(1), "transcript": np.zeros(0, np.uint8)}
    assert verdict(arrays, {"auc": 0.5}, again)["differs"] == differs


def test_digests_differ_between_all_that_messages_say() -> None:
    a, order = np.arange(4.0), EvaluateOrder(exchange=1)
    said: list[tuple[dict[str, Any], Turn | None]] = [
        *(({"a": a}, None), ({"b": a}, None), ({"a": a + 1}, None), ({"a": a.reshape(2, 2)}, None)),
        *(({"a": a.view(np.int64)}, None), ({"a": a}, order), ({"a": a}, EmbedOrder(exchange=1))),
        *(({"a": a}, EvaluateOrder(exchange=1, number=1)), ({"a": a}, EmbedOrder(exchange=2))),
        *(({"a": a}, kind(exchange=2, number=1)) for kind in (CheckpointOrder, RestoreOrder)),
    ]
    found = {digest_of(b"secret", arrays, of) for arrays, of in said}
    assert len(found) == len(said) and digest_of(b"other", {"a": a}) not in found
    assert digest_of(b"secret", {"a": a.copy()}, replace(order, of_parties=9)) in found
