"""Failures: parties that misbehave, are lost, or have lost their state."""

import logging
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict

from strategies.vertical import Vertical
from tests.conftest import ALL_ROWS, FASTER, Start, assert_copies_agree, trained
from vfl_flower import client_app, server_app
from vfl_flower.client_app import PartyApp
from vfl_flower.config import errors
from vfl_flower.launch.engines import Finished as Run
from vfl_flower.party import about, session
from vfl_flower.party.party import Party
from vfl_flower.protocol.codecs.bits import place_bits
from vfl_flower.protocol.estimators import first_order, zeroth_order
from vfl_flower.protocol.estimators.zeroth_order import ZerothOrder
from vfl_flower.transport import messages
from vfl_flower.transport.messages import DescribeOrder, Description, Upload
from vfl_flower.transport.wire import read_reply, to_message, to_reply

Fault = Callable[[Message, Context], Message]

# A window is an epoch.
KEYS = {**ALL_ROWS, "dataset": "breast-cancer", "window": 15, "epochs": 4, "optimizer": "sgd"}
VAFL = {**KEYS, "strategy": "vafl", "party-lr": 0.2, "server-lr": 0.2}
GOES_ON = {**VAFL, "on-party-failure": "continue"}
BAD, AT = 1, 3  # the party that misbehaves, and at which of its training messages


@dataclass
class Misbehaving:
    """The ClientApp, but for one message of one party, and the next ones that it misses."""

    fault: Fault
    party: int = BAD
    number: int = AT
    kind: str = "train"
    misses: float = 0
    seen: int = 0  # messages of that kind that the party got, up to the fault
    later: list[str] = field(default_factory=list)  # kinds of those that it got afterwards

    def __call__(self, message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == self.party:
            kind = message.metadata.message_type
            if self.seen == self.number:
                self.later.append(kind)
                if len(self.later) <= self.misses:
                    return refuses(message, context)
            else:
                self.seen += kind == self.kind
                if self.seen == self.number:
                    return self.fault(message, context)
        return client_app.app(message, context)


@dataclass
class InTurn:
    """The ClientApp, but party `BAD` has one fault after the other, each in a training message."""

    faults: list[Fault]
    seen: int = 0

    def __call__(self, message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == BAD and message.metadata.message_type == "train":
            self.seen += 1
            if self.seen >= AT and self.faults:
                return self.faults.pop(0)(message, context)
        return client_app.app(message, context)


def gone(fault: Fault, **more: Any) -> Any:
    """A party that misbehaves, and from then on refuses every message."""
    return Misbehaving(fault, misses=math.inf, **more)


def raises(message: Message, context: Context) -> Message:
    raise ValueError("out of order")


def refuses(message: Message, context: Context) -> Message:
    return Message(Error(code=3, reason="node is\n gone"), reply_to=message)


def gets_it_twice(message: Message, context: Context) -> Message:
    client_app.app(message, context)
    return client_app.app(message, context)


def answers_in_vain(message: Message, context: Context) -> Message:
    client_app.app(message, context)
    return refuses(message, context)


def breaks_off(message: Message, context: Context) -> Message:
    """The party has done all that the message asks for, but not yet kept what it learned."""
    with patch.object(messages, "refuse_unused", side_effect=ValueError):
        reply: Message = client_app.app(message, context)
    return reply


def answers_nothing(message: Message, context: Context) -> Message:
    return Message(RecordDict(), reply_to=message)


def fails_without_a_cause(message: Message, context: Context) -> Message:
    return Message(RecordDict({"failure": ConfigRecord()}), reply_to=message)


def changed(**change: Any) -> Fault:
    """A fault that alters fields of the party's upload; functions alter what is there."""

    def fault(message: Message, context: Context) -> Message:
        upload = read_reply(client_app.app(message, context), Upload)
        values = {k: v(getattr(upload, k)) if callable(v) else v for k, v in change.items()}
        return to_reply(replace(upload, **values), message)

    return fault


def array(name: str, change: Callable[[Any], Any]) -> Fault:
    return changed(arrays=lambda arrays: {**arrays, name: change(arrays[name].copy())})


def narrower(rows: Any) -> Any:
    return rows[:, :-1].copy()


def to_float16(rows: Any) -> Any:
    return rows.astype(np.float16)


def with_nan(rows: Any) -> Any:
    rows[2, -1] = np.nan
    return rows


def first(value: float) -> Callable[[Any], Any]:
    def change(array: Any) -> Any:
        array[0] = value
        return array

    return change


def with_id(value: int) -> Callable[[Any], Any]:
    def change(ids: Any) -> Any:
        ids[-1] = value if value else ids[0]
        return ids

    return change


FAULTS: dict[str, tuple[Fault, str]] = {
    "raises": (raises, "out of order"),
    "error of Flower": (refuses, "node is gone"),
    "empty answer": (answers_nothing, "without the field 'scalars'"),
    "failure without cause": (fails_without_a_cause, "failed"),
    "wrong shape": (array("embedding", narrower), r"'embedding' .* shape \(455, 31"),
    "too few rows": (array("embedding", lambda h: h[:-1]), r"'embedding' .* shape \(454, 32"),
    "wrong dtype": (array("embedding", lambda h: h.astype(np.float64)), "'embedding' is float64"),
    "NaN": (array("embedding", with_nan), "'embedding' has values that are not finite"),
    "beyond all bounds": (array("embedding", first(1e30)), "'embedding' has values beyond 1,000,"),
    "far beyond all before": (
        array("embedding", first(-9e5)),
        r"embeddings of up to 900,000, when its largest were \d",
    ),
    "more than is due": (
        array("embedding", lambda h: np.zeros((10**5, 32), np.float32)),
        r"a Upload of 12,80\d,\d+ bytes, more than the \d+,\d+ that it may have",
    ),
    "an array more": (changed(arrays=lambda a: {**a, "more": a["embedding"]}), "'more', which"),
    "no embedding": (changed(arrays=lambda arrays: {}), "'embedding' is missing|'ids' is missing"),
    "another party": (changed(party=0), "answered as party 0"),
    "unknown party": (changed(party=99), "answered as party 99"),
    "old exchange": (changed(exchange=lambda n: n - 1), r"to message \d+, when message \d+"),
    "exchange of a wrong type": (changed(exchange="5"), "exchange must be a whole number"),
}
DIFFER = "ids that differ from its mini-batches"
FAULTS_OF_IDS: dict[str, tuple[Fault, str]] = {
    "id out of range": (array("ids", with_id(455)), DIFFER),
    "negative id": (array("ids", with_id(-1)), DIFFER),
    "ids of other mini-batches": (array("ids", lambda ids: ids[::-1].copy()), DIFFER),
    "repeated id": (array("ids", with_id(0)), DIFFER),
    "too few ids": (array("ids", lambda ids: ids[:-1]), r"'ids' .* shape \(454,\)"),
    "ids of a wrong dtype": (array("ids", lambda ids: ids.astype(np.int64)), "'ids' is int64"),
    "no ids": (changed(arrays=lambda a: {"embedding": a["embedding"]}), "'ids' is missing"),
}


ZEROTH = {**KEYS, "strategy": "cascaded", "noise-seed": 0}
ZEROTH_SYNC = {**ZEROTH, "strategy": "syn-zoo", "batch-size": 32}
POISSON = {**ZEROTH, "sampling": "poisson"}
DPZV = {**FASTER, **KEYS, "strategy": "dpzv", "noise-multiplier": 1.0, "noise-seed": 0}
DPZV |= {"sampling": "poisson", "calibration": "secret"}  # parties report the rows they drew


def without(name: str) -> Fault:
    return changed(arrays=lambda arrays: {k: v for k, v in arrays.items() if k != name})


def of_steps(change: Callable[[Any, Any], Any]) -> Fault:
    def both(arrays: dict[str, Any]) -> dict[str, Any]:
        ids, lengths = arrays["ids"].copy(), arrays["lengths"].copy()
        change(ids, lengths)
        return {**arrays, "ids": ids, "lengths": lengths}

    return changed(arrays=both)


def row_twice(ids: Any, lengths: Any) -> None:
    assert lengths[0] > 1
    ids[1] = ids[0]


def out_of_range(value: int) -> Callable[[Any, Any], None]:
    def change(ids: Any, lengths: Any) -> None:
        ids[-1] = value

    return change


def negative_length(ids: Any, lengths: Any) -> None:
    lengths[0], lengths[1] = -1, lengths[0] + lengths[1] + 1  # the sum stays


INFINITE, BEYOND = "has values that are not finite", "has values beyond 1,000,000"
FAULTS_OF_PAIRS: dict[str, tuple[Fault, str]] = {
    "no perturbed embedding": (without("perturbed"), "'perturbed' is missing"),
    "no embedding": (without("embedding"), "'embedding' is missing"),
    "perturbed, wrong shape": (
        array("perturbed", narrower),
        r"'perturbed' .* shape \(\d+, 31\)",
    ),
    "too few perturbed rows": (array("perturbed", lambda h: h[:-1]), "'perturbed' is float32 of"),
    "perturbed of a wrong dtype": (array("perturbed", to_float16), "'perturbed' is float16"),
    "perturbed beyond all bounds": (array("perturbed", first(1e30)), f"'perturbed' {BEYOND}"),
    "NaN in perturbed": (array("perturbed", with_nan), f"'perturbed' {INFINITE}"),
    "NaN in embedding": (array("embedding", with_nan), f"'embedding' {INFINITE}"),
}
FAULTS_OF_STEPS: dict[str, tuple[Fault, str]] = {  # test_batches.py has the others
    "no lengths": (without("lengths"), "'lengths' is missing"),
    "too few lengths": (array("lengths", lambda n: n[:-1]), r"'lengths' is int32 of shape \(14,\)"),
    "lengths that add up to more": (array("lengths", lambda n: n + 1), "'ids' is int32 of shape"),
    "negative length": (of_steps(negative_length), "mini-batches of -1 to"),
    "id out of range": (of_steps(out_of_range(455)), "sent sample ids out of range"),
    "row twice in a step": (of_steps(row_twice), "a row occurs more than once"),
}
FAULTS_OF_DPZV: dict[str, tuple[Fault, str]] = {
    "no plus": (without("plus"), "'plus' is missing"),
    "no minus": (without("minus"), "'minus' is missing"),
    "NaN in minus": (array("minus", with_nan), "'minus' has values that are not finite"),
    "minus of a wrong shape": (array("minus", narrower), "'minus' is float32 of"),
}
EF_VFL = {**KEYS, "strategy": "ef-vfl"}
SHARED = {**EF_VFL, "labels": "shared"}
QSGD = {"codec": "qsgd", "bits": 2, "compression": "error-feedback"}
TOP_K = {"codec": "top-k", "compression": "error-feedback"}


def first_places(arrays: dict[str, Any]) -> dict[str, Any]:
    """As many places of top-k as there should be, but not where they should be."""
    bits = place_bits(np.arange(len(arrays["embedding.values"])), 455 * 32)
    return {**arrays, "embedding.bits": np.packbits(bits)}


FAULTS_OF_TOP_K: dict[str, tuple[Fault, str]] = {  # test_codecs.py has the others
    "no values": (without("embedding.values"), "array 'embedding.values' is missing"),
    "truncated bits": (array("embedding.bits", lambda b: b[:-1]), "'embedding.bits' is too short"),
    "exponent beyond all bounds": (
        array("embedding.exponents", first(126)),
        f"'embedding' {BEYOND}",
    ),
    "places of other steps": (changed(arrays=first_places), "a wrong number of entries"),
}
FAULTS_OF_QSGD: dict[str, tuple[Fault, str]] = {
    "NaN norm": (array("embedding.norms", first(np.nan)), "values that are not finite"),
    "huge count": (array("embedding.counts", first(2**16 - 1)), "impossible counts"),
}
FAULTS_OF_CHANGES: dict[str, tuple[Fault, str]] = {
    "no change": (without("change.bits"), "array 'change.bits' is missing"),
    "NaN in change": (array("change.values", first(np.nan)), "'change.values' has"),
}
IN_TURN = {
    "vafl": (VAFL, FAULTS | FAULTS_OF_IDS),
    "cascaded": (ZEROTH, FAULTS_OF_PAIRS | {k: FAULTS_OF_IDS[k] for k in [*FAULTS_OF_IDS][:-1]}),
    "cascaded, Poisson": (POISSON, FAULTS_OF_PAIRS | FAULTS_OF_STEPS),
    "dpzv": (DPZV, FAULTS_OF_DPZV | FAULTS_OF_STEPS),
    "top-k": ({**VAFL, **TOP_K}, FAULTS_OF_TOP_K),
    "qsgd": ({**VAFL, **QSGD}, FAULTS_OF_QSGD),
    "cascaded, top-k": ({**ZEROTH, **TOP_K}, FAULTS_OF_CHANGES),
}


def failing(run: Start, folder: Path, keys: dict[str, Any], client: Any) -> tuple[Run, str]:
    """A run that fails, and the sentence that it fails with."""
    with pytest.raises(errors.PartyError) as error:
        run(3, {**keys, "out": str(folder)}, client)
    sentence = str(error.value)
    assert "\n" not in sentence
    assert "Traceback" not in sentence
    return Run(folder), sentence


# --- a party that misbehaves --------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize(("keys", "faults"), IN_TURN.values(), ids=list(IN_TURN))
def test_each_fault_is_told_in_a_sentence_and_the_run_goes_on_until_the_party_is_back(
    run: Start, own_log: list[str], keys: dict[str, Any], faults: dict[str, tuple[Fault, str]]
) -> None:
    client: Any = InTurn([fault for fault, _ in faults.values()])
    epochs = 4 + 2 * len(faults)
    finished = run(2, {**keys, "on-party-failure": "continue", "epochs": epochs}, client)
    assert client.faults == []
    told = [line for line in own_log if "The run continues without it" in line]
    for (name, (_, cause)), sentence in zip(faults.items(), told, strict=True):
        assert sentence.startswith("Party 1 ") and re.search(cause, sentence), (name, sentence)
        assert "\n" not in sentence and "Traceback" not in sentence
    assert finished.summary["failure"] is None and finished.summary["failed_parties"] == []
    for party in ("party-0", "party-1"):
        assert all(np.isfinite(each).all() for each in finished.parameters(party).values())


ENDING = {
    "split-nn raises": (KEYS, FAULTS["raises"]),
    "split-nn error of Flower": (KEYS, FAULTS["error of Flower"]),
    "split-nn NaN": (KEYS, FAULTS["NaN"]),
    "vafl id out of range": (VAFL, FAULTS_OF_IDS["id out of range"]),
    "syn-zoo NaN in perturbed": (ZEROTH_SYNC, FAULTS_OF_PAIRS["NaN in perturbed"]),
    "ef-vfl truncated bits": (EF_VFL, FAULTS_OF_TOP_K["truncated bits"]),
}


@pytest.mark.one_by_day
@pytest.mark.parametrize(("keys", "told"), ENDING.values(), ids=list(ENDING))
def test_a_misbehaving_party_ends_the_run_with_a_sentence_and_what_was_trained_is_saved(
    run: Start, tmp_path: Path, keys: dict[str, Any], told: tuple[Fault, str]
) -> None:
    fault, cause = told
    client = Misbehaving(fault)
    finished, sentence = failing(run, tmp_path / "out", keys, client)
    assert sentence.startswith("Party 1 ")
    assert re.search(cause, sentence), sentence
    assert finished.summary["failure"] == sentence
    assert finished.summary["failed_parties"] == [1]
    assert [entry["epoch"] for entry in finished.history] == [1.0, 2.0]  # nothing after
    assert finished.summary["test_accuracy"] == finished.history[-1]["test_accuracy"]
    for name in ("top", "party-0", "party-1", "party-2"):
        assert all(np.isfinite(each).all() for each in finished.parameters(name).values())
    assert finished.parameters("top")["layers.0.weight"].shape[1] == 3 * 32
    assert client.later == []


BAD_SCALARS: dict[str, Callable[[Any], Any]] = {
    **{"shape": lambda d: d[:-1], "dtype": lambda d: d.astype(np.float64)},
    **{"NaN": lambda d: np.full_like(d, np.nan), "axes": lambda d: d[:, None]},
}


@pytest.mark.parametrize("change", BAD_SCALARS.values(), ids=list(BAD_SCALARS))
def test_a_party_refuses_scalars_that_it_cannot_use(
    run: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any], Any]
) -> None:
    answer = ZerothOrder.encode

    def answered(*given: Any) -> dict[int, Any]:
        return {
            party: {"difference": change(arrays["difference"])}
            for party, arrays in answer(*given).items()
        }

    monkeypatch.setattr(ZerothOrder, "encode", answered)
    finished, sentence = failing(run, tmp_path / "out", ZEROTH, client_app.app)
    assert "was sent feedback that it cannot use: 'difference'" in sentence
    assert finished.summary["failure"] == sentence


@pytest.mark.parametrize(
    "keys",
    [
        EF_VFL,
        {**EF_VFL, "strategy": "cvfl", "codec": "qsgd"},
        SHARED,
        {**VAFL, **QSGD},
        {**ZEROTH, **TOP_K},
    ],
    ids=str,
)
def test_embeddings_that_diverge_are_told_by_their_party(
    run: Start, tmp_path: Path, keys: dict[str, Any]
) -> None:
    finished, sentence = failing(
        run, tmp_path / "out", {**keys, "window": 1, "party-lr": 1e30}, client_app.app
    )
    what = "'(embedding|change)(.norms)?' has values that are not finite. Lower the learning rates"
    assert re.fullmatch(
        rf"Party \d (failed|sent an upload that cannot be used): {what}\.", sentence
    )
    assert finished.summary["failure"] == sentence


CANNOT_BE_USED = "Party 1 sent an upload that cannot be used: 'embedding' "
LATE = {**VAFL, "max-delay": 3, "window": 1, "delay": "exponential"}
Case = tuple[dict[str, Any], Fault, str, int, str, int | None]
OTHER_MESSAGES: list[Case] = [
    # options, fault, in the how many-th message of a kind, what is said, evaluations before it
    (KEYS, array("embedding", with_nan), "evaluate", 1, f"{CANNOT_BE_USED}has values", 0),
    (KEYS, array("embedding", with_nan), "evaluate", 2, f"{CANNOT_BE_USED}has values", 1),
    (LATE, array("embedding", lambda h: h[:-1]), "query.embed", 2, f"{CANNOT_BE_USED}is fl", None),
    (KEYS, raises, "query.describe", 1, "Party 1 failed: ", 0),
    ({**KEYS, "strategy": "local-only"}, refuses, "train", 1, "Party 1 failed: node is gone", 0),
    ({**KEYS, "strategy": "frozen"}, refuses, "query.embed", 1, "Party 1 failed: node is gone", 0),
]


@pytest.mark.parametrize("case", OTHER_MESSAGES)
def test_a_party_may_fail_in_any_message(run: Start, tmp_path: Path, case: Case) -> None:
    keys, fault, kind, number, said, entries = case
    client = Misbehaving(fault, kind=kind, number=number)
    finished, sentence = failing(run, tmp_path / "out", keys, client)
    assert sentence.startswith(said) and finished.summary["failure"] == sentence
    assert entries is None or len(finished.history) == entries


# --- what a party may tell ----------------------------------------------------------------------


@pytest.mark.parametrize("method", ["describe", "begin", "evaluate"])
def test_the_text_of_an_unexpected_exception_stays_with_the_party(
    run: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, method: str
) -> None:
    def broken(party: Party, order: Any) -> Any:
        raise ValueError("could not convert 'patient 17'")

    monkeypatch.setattr(Party, method, broken)
    _, sentence = failing(run, tmp_path / "out", KEYS, client_app.app)
    assert "raised ValueError in broken, test_faults.py:" in sentence
    for file in (tmp_path / "out").iterdir():
        assert b"patient 17" not in file.read_bytes()
    assert "ValueError: could not convert 'patient 17'" in capsys.readouterr().err  # its owner's


@pytest.mark.parametrize("where", ["party", "mod", "package"])
def test_a_node_sends_no_text_of_an_error_and_logs_that_of_own_code(
    where: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A party's own log is for the owner of its code. An error of this package may quote rows."""
    found: dict[str, Any] = {}
    file = about.__file__ if where == "package" else __file__
    source = "def broken(*_):\n    raise ValueError(\"could not convert 'patient 17'\")"
    exec(compile(source, file, "exec"), found)  # a frame of that file
    app = PartyApp(mods=[found["broken"]] if where == "mod" else [])
    order = to_message(DescribeOrder(outputs=1), 1, ttl=60)
    words: dict[str, Any] = {"partition-id": 0, "num-partitions": 2, "dataset": "breast-cancer"}
    context = Context(1, 1, words, RecordDict(), {"dataset": "breast-cancer"})
    monkeypatch.setattr(logging.getLogger("flwr"), "disabled", False)
    monkeypatch.setattr(Party, "describe", found["broken"])
    reply = app(order, context)
    with pytest.raises(errors.VflError, match=r"raised ValueError in broken, \w+.py:2\. Its text"):
        read_reply(reply, Description)
    assert "ValueError\n" in caplog.text and Path(file).name in caplog.text
    assert ("patient 17" in caplog.text) == (where != "package")
    assert "patient 17" not in str(reply)


def test_an_error_in_a_library_is_placed_where_it_was_called() -> None:
    layer = torch.nn.Linear(2, 3)
    with pytest.raises(RuntimeError, match="shapes") as told:
        layer(torch.zeros(1, 5))
    assert "/torch/" in str(told.traceback[-1].path)  # the control
    assert re.fullmatch(
        r"RuntimeError in test_an_error_\w+, test_faults.py:\d+", errors.place(told.value)
    )


@pytest.mark.parametrize(
    ("file", "own"),
    [
        ("/usr/lib/python3/dist-packages/lib/a.py", False),
        ("/home/a/.local/lib/python3.11/site-packages/lib/a.py", False),
        ("/home/a/model.py", True),  # the control
    ],
)
def test_a_folder_of_libraries_anywhere_is_no_own_code(file: str, own: bool) -> None:
    found: dict[str, Any] = {}
    exec(compile("def broken():\n    raise ValueError", file, "exec"), found)
    with pytest.raises(ValueError) as told:
        found["broken"]()
    error = told.value.with_traceback(told.value.__traceback__.tb_next)  # type: ignore[union-attr]
    assert errors.in_own_code(error) == own
    with pytest.raises(ValueError) as told:
        found["broken"]()
    assert ("broken, model.py:2" in errors.place(told.value)) == own


try:
    raise KeyError("x")
except KeyError as told:
    FAILED = told


@pytest.mark.parametrize(
    "error",
    [
        *(errors.Terminated(15, "It ended.", "run"), errors.Interrupted("It ended.", "run")),
        *(errors.SumError(), errors.DivergedError(), errors.PoisonError(1, "failed.")),
        errors.PartyError("Party 1", "failed."),
        *(errors.SharedError("a", "b", "is open", "700"), errors.CodeError("It fails", FAILED)),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_in_another_process(error: BaseException) -> None:
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert again.__dict__ == error.__dict__ and again.args == error.args
    assert getattr(again, "code", None) == getattr(error, "code", None)


@pytest.mark.parametrize("engine", ["supernodes", "local"])
@pytest.mark.parametrize("kind", ["own code", "unexpected"])
def test_a_label_holder_on_nodes_gives_flower_no_text_of_an_error(
    kind: str, engine: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Flower sends the text to its SuperLink. In this process (the control) the caller gets it."""

    def fails(*_: Any) -> None:
        error = ValueError("a label is 'ill'")
        try:
            raise error
        except ValueError:
            if kind == "unexpected":
                raise
            raise errors.CodeError("loss = 'own' cannot read outputs", error) from error

    monkeypatch.setattr(logging.getLogger("flwr"), "disabled", False)
    monkeypatch.setattr(server_app, "serve", fails)
    monkeypatch.setattr(server_app, "transport_of", lambda grid: SimpleNamespace(engine=engine))
    with pytest.raises(Exception, match=r".") as told:
        server_app.main(cast(Any, None), Context(1, 1, {}, RecordDict(), {}))
    assert ("'ill'" in str(told.value)) is (engine == "local")
    assert "ValueError in fails, test_faults.py:" in str(told.value) or engine == "local"
    assert "'ill'" not in caplog.text


def test_gradients_that_diverge_are_not_the_fault_of_the_party(run: Start, tmp_path: Path) -> None:
    keys = {**KEYS, "window": 1, "server-lr": 1e30, "party-lr": 0.0}
    with pytest.raises(errors.VflError) as error:
        run(3, {**keys, "out": str(tmp_path / "out")})
    assert "no longer finite" in str(error.value)
    assert "Party 0 failed: sent 'gradient'" not in str(error.value)  # the label holder sent it


# --- going on without it ------------------------------------------------------------------------


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        (VAFL, raises),
        (VAFL, FAULTS["NaN"][0]),
        (ZEROTH, FAULTS_OF_PAIRS["NaN in perturbed"][0]),
        (POISSON, FAULTS_OF_STEPS["row twice in a step"][0]),
        (DPZV, FAULTS_OF_STEPS["negative length"][0]),
    ],
    ids=["raises", "NaN", "cascaded", "cascaded Poisson", "dpzv"],
)
def test_an_asynchronous_run_goes_on_without_the_party(
    run: Start, keys: dict[str, Any], fault: Fault
) -> None:
    client = gone(fault)
    finished = run(3, {**keys, "on-party-failure": "continue"}, client)
    assert finished.summary["failure"] is None
    assert finished.summary["failed_parties"] == [1]
    assert set(client.later) == {"query.rejoin"}
    # The others finish their 4 epochs; of the third, the 2 that were answered count.
    assert finished.summary["epochs"] == pytest.approx((4 + 4 + 2) / 3, abs=1e-3)
    assert finished.history[-1]["epoch"] == finished.summary["epochs"]
    assert finished.summary["test_accuracy"] > (0.85 if keys is VAFL else 0.3)


ADAM = {"optimizer": "adam", "party-lr": 0.01, "server-lr": 0.01}
ERROR_FEEDBACK: list[dict[str, Any]] = [
    {**VAFL, **TOP_K, "downlink-codec": "qsgd", "downlink-compression": "error-feedback"},
    {**VAFL, **QSGD},
    {**VAFL, **TOP_K, "strategy": "vafl-t", "quorum": 2, **ADAM},
    {**ZEROTH, **TOP_K},
    {**DPZV, **QSGD},
]


def came_back(keys: dict[str, Any], client: Any) -> float:
    """A run with a party that fails and comes back; the epochs that were answered."""
    keys = {**keys, "on-party-failure": "continue"}
    strategy, grid = trained(3, keys, client)
    names = ["uplink"] + ["gradient"] * ("downlink-codec" in keys)
    assert_copies_agree(strategy, grid, *names)
    figures = strategy.figures()
    assert figures["failed_parties"] == []
    assert client.later[0] == "query.rejoin" and client.later[-1] == "evaluate"
    assert figures["test_accuracy"] > (0.65 if keys["strategy"] == "dpzv" else 0.8)
    return float(figures["epochs"])


LOST: dict[str, Fault] = {
    **{"message lost": refuses, "answer lost": answers_in_vain, "party breaks off": breaks_off}
}
RETURNS = {f"{name}, top-k both ways": (fault, ERROR_FEEDBACK[0]) for name, fault in LOST.items()}
RETURNS |= {  # each codec and estimator with one of the faults
    f"{name}, {keys['strategy']}": (fault, keys)
    for (name, fault), keys in zip(2 * [*LOST.items()], ERROR_FEEDBACK[1:], strict=False)
}


@pytest.mark.one_by_day
@pytest.mark.parametrize(("fault", "keys"), RETURNS.values(), ids=list(RETURNS))
def test_a_party_that_comes_back_goes_on_with_what_the_label_holder_knows(
    fault: Fault, keys: dict[str, Any]
) -> None:
    client = Misbehaving(fault, number=2)
    epochs = came_back({**keys, "epochs": 8}, client)
    assert client.later.count("query.rejoin") == 1
    assert client.later.count("train") >= 2
    assert epochs == pytest.approx((3 * 8 - 1) / 3, abs=1e-3)  # less the window that was lost


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("kind", "more"),
    [("evaluate", {}), ("query.embed", {"max-delay": 3, "window": 3, "delay": "exponential"})],
)
@pytest.mark.parametrize("fault", [refuses, answers_in_vain])
def test_a_party_comes_back_after_another_message_was_lost(
    fault: Fault, kind: str, more: dict[str, Any]
) -> None:
    client = Misbehaving(fault, kind=kind, number=2)
    assert came_back({**ERROR_FEEDBACK[0], "epochs": 6, **more}, client) == pytest.approx(6)


def test_a_party_that_comes_back_while_the_others_end_takes_the_steps_that_it_has_left() -> None:
    client = Misbehaving(refuses, number=3)
    assert came_back({**VAFL, **TOP_K, "epochs": 4}, client) == pytest.approx(11 / 3, abs=1e-3)


# --- brought into step --------------------------------------------------------------------------


def loses_its_state(message: Message, context: Context) -> Message:
    context.state.clear()
    return client_app.app(message, context)


def is_ahead(message: Message, context: Context) -> Message:
    session.hand_over(context)
    session.live.clear()
    scalars: Any = context.state["scalars"]
    scalars["exchange"] = 100
    return client_app.app(message, context)


DOWNLINK = {"downlink-codec": "qsgd", "downlink-compression": "error-feedback"}
BROUGHT_INTO_STEP = [
    (keys, ("train", "evaluate")[number % 2])
    for number, keys in enumerate([KEYS, {**EF_VFL, **DOWNLINK}, *ERROR_FEEDBACK, KEYS])
]
in_step_again = pytest.mark.parametrize(("keys", "kind"), BROUGHT_INTO_STEP)


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each feedback that any party has learned from."""
    seen: list[None] = []
    for module in (first_order, zeroth_order):

        def counted(*args: Any, descend: Any = module.descend, **more: Any) -> None:
            seen.append(None)
            descend(*args, **more)

        monkeypatch.setattr(module, "descend", counted)
    return seen


def brought_into_step(keys: dict[str, Any], client: Any) -> Vertical:
    """A run that goes on to its end, with surrogates that agree.

    An evaluation every second epoch, so that training messages bring feedback too.
    """
    strategy, grid = trained(3, {**keys, "epochs": 8, "eval-every": 2.0}, client)
    names = ["uplink"] * ("compression" in keys or keys.get("strategy") == "ef-vfl")
    assert_copies_agree(strategy, grid, *names, *["gradient"] * ("downlink-codec" in keys))
    figures = strategy.figures()
    assert figures["failed_parties"] == []
    assert figures["epochs"] == pytest.approx(8, abs=1e-3)
    assert len(strategy.run.history.entries) == 4
    assert figures["test_accuracy"] > (0.65 if keys.get("strategy") == "dpzv" else 0.8)
    return strategy


@pytest.mark.one_by_day
@in_step_again
def test_a_message_that_comes_twice_is_served_once(
    keys: dict[str, Any], kind: str, updates: list[None], caplog: pytest.LogCaptureFixture
) -> None:
    expected = brought_into_step(keys, client_app.app)
    learned = len(updates)
    assert learned == 3 * 8
    client = Misbehaving(gets_it_twice, kind=kind, number=2)
    caplog.clear()
    found = brought_into_step(keys, client)
    assert len(updates) - learned == learned  # the feedback that came with it was applied once
    for name in ("steps", "exchanges"):
        assert found.figures()[name] == expected.figures()[name]
    if keys == KEYS:  # in a synchronous run it changes nothing
        for name, values in found.top_arrays().items():
            np.testing.assert_array_equal(values, expected.top_arrays()[name], err_msg=name)
    assert client.later[:2] == ["query.rejoin", kind]
    assert client.later.count("query.rejoin") == 1
    (told,) = (each.getMessage() for each in caplog.records if "after" in each.getMessage())
    assert re.match(r"Party 1 has an older state \(got message (\d+) after message \1\)\.", told)


@pytest.mark.one_by_day
@in_step_again
def test_a_party_that_has_lost_all_its_state_begins_anew(
    keys: dict[str, Any], kind: str, updates: list[None], caplog: pytest.LogCaptureFixture
) -> None:
    client = Misbehaving(loses_its_state, kind=kind, number=2)
    brought_into_step(keys, client)
    assert len(updates) == 3 * 8 - 1  # the feedback that was on its way is lost with the state
    assert client.later[:2] == ["query.rejoin", kind]
    (told,) = (each.getMessage() for each in caplog.records if "state" in each.getMessage())
    assert told.startswith("Party 1 has an older state (has no state of this run).")


AGAIN_AND_AGAIN: dict[str, tuple[dict[str, Any], Fault, float, str]] = {
    "twice": (KEYS, gets_it_twice, 4, "got message 11 after message 11."),
    "lost": (KEYS, loses_its_state, 4, "has no state of this run."),
    "asynchronous, twice": (VAFL, gets_it_twice, 4, "got message 11 after message 11."),
    "ahead": (KEYS, is_ahead, 1, "was asked to repeat message 6, which it has served."),
    "shared labels": (SHARED, loses_its_state, 1, "has no state of this"),
    "shared labels, twice": (SHARED, gets_it_twice, 1, "got message 5 after message 5."),
}


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("keys", "fault", "times", "cause"), AGAIN_AND_AGAIN.values(), ids=list(AGAIN_AND_AGAIN)
)
def test_a_party_that_cannot_be_brought_into_step_ends_the_run_with_a_sentence(
    run: Start, tmp_path: Path, keys: dict[str, Any], fault: Fault, times: int, cause: str
) -> None:
    served = 0

    def client(message: Message, context: Context) -> Message:
        nonlocal served
        bad = context.node_config["partition-id"] == BAD
        if bad and message.metadata.message_type == "train":
            served += 1
            if AT <= served < AT + times:
                return fault(message, context)
        return client_app.app(message, context)

    finished, sentence = failing(run, tmp_path / "out", keys, client)
    assert sentence.startswith("Party 1 ") and cause in sentence
    assert finished.summary["failure"] == sentence
    assert finished.summary["failed_parties"] == [1]
    assert served == AT + times - 1


def test_a_run_with_a_quorum_of_two_goes_on_with_the_one_that_is_left(run: Start) -> None:
    keys = {**GOES_ON, "strategy": "vafl-t"}
    assert run(2, {**keys, "quorum": 1}, gone(raises)).summary["failed_parties"] == [1]
    summary = run(3, {**keys, "quorum": 2}, gone(raises, number=2)).summary
    assert summary["failed_parties"] == [1]
    assert summary["epochs"] == pytest.approx((4 + 4 + 1) / 3, abs=1e-3)


def test_the_last_evaluation_is_recorded_when_the_last_party_at_work_fails(run: Start) -> None:
    keys = {**GOES_ON, "delay": "exponential", "eval-every": 100}
    order: list[tuple[int, str]] = []

    def watch(message: Message, context: Context) -> Message:
        order.append((int(context.node_config["partition-id"]), message.metadata.message_type))
        return client_app.app(message, context)

    watching: Any = watch
    assert run(2, keys, watching).summary["test_accuracy"] is not None
    last = order[-1][0]
    count = order.count((last, "train"))
    finished = run(2, keys, gone(raises, party=last, number=count))
    assert finished.summary["failed_parties"] == [last]
    assert finished.summary["test_accuracy"] is not None
    assert finished.history[-1]["epoch"] == finished.summary["epochs"]


@pytest.mark.parametrize("more", [{}, {"strategy": "vafl-t", "quorum": 3}], ids=str)
def test_a_synchronous_run_cannot_go_on_without_a_party(run: Start, more: dict[str, Any]) -> None:
    with pytest.raises(errors.ConfigError, match=r"'continue' needs a quorum below .* parties, 3"):
        run(3, {**KEYS, **more, "on-party-failure": "continue"})


@pytest.mark.parametrize(
    ("who", "cause", "sentence"),
    [
        ("Party 1", "failed: Party 1's file is gone.", "Party 1's file is gone."),
        ("The party on node 7", "failed: Party 1's file is gone.", "Party 1's file is gone."),
        ("The party on node 7", "failed: In party 1's rules.", "In party 1's rules."),
        ("Party 1", "failed: raised ValueError.", "Party 1 failed: raised ValueError."),
        ("Party 1", "sent no key.", "Party 1 sent no key."),
        # Nobody is blamed by the word of another party alone.
        ("Party 2", "failed: Party 1's file is gone.", "Party 2 failed: Party 1's file is gone."),
        ("Party 1", "failed: Party 12's file.", "Party 1 failed: Party 12's file."),
    ],
)
def test_a_party_that_failed_is_named_once(who: str, cause: str, sentence: str) -> None:
    assert str(errors.PartyError(who, cause)) == sentence
