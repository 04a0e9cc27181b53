"""Messages are bounded: numbers that would ruin a model, sizes, and texts."""

import ast
import logging
import math
import re
import tracemalloc
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

import vfl_flower
from strategies.turns import StepBudget
from tests.conftest import Start, of_words
from tests.party.nodes import asked, refused
from tests.results.test_report import Page
from tests.strategy.test_faults import (
    GOES_ON,
    KEYS,
    VAFL,
    ZEROTH,
    Misbehaving,
    array,
    failing,
    first,
)
from vfl_flower import client_app
from vfl_flower.config.errors import DivergedError, PoisonError, VflError
from vfl_flower.data import frames
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.protocol.batches import steps_per_epoch
from vfl_flower.protocol.estimators.first_order import FirstOrder
from vfl_flower.protocol.estimators.zeroth_order import ZerothOrder
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.systems import resolve
from vfl_flower.results.report import report
from vfl_flower.transport import messages
from vfl_flower.transport.explain_messages import ExplainOrder, FiguresOrder, PermuteOrder
from vfl_flower.transport.flower_internals import begin_task
from vfl_flower.transport.wire import (
    pack,
    read_order,
    read_reply,
    said,
    to_failure,
    to_message,
    to_reply,
)

# --- one upload ---------------------------------------------------------------------------------

misbehaving: Any = Misbehaving
BY_STEP = {**GOES_ON, "bottom-model": "mlp", "window": 1}  # each upload is answered before the next


@pytest.mark.one_by_day
@pytest.mark.parametrize("value", [1e30, 9e5], ids=["beyond all bounds", "beyond all before"])
@pytest.mark.parametrize(
    ("keys", "name"),
    [
        (BY_STEP, "embedding"),
        ({**GOES_ON, "bottom-model": "mlp", "codec": "identity"}, "embedding"),
        ({**ZEROTH, "on-party-failure": "continue"}, "perturbed"),
    ],
    ids=["step by step", "an epoch at once", "zeroth order"],
)
def test_one_upload_ends_no_run_and_names_its_party(
    run: Start, caplog: pytest.LogCaptureFixture, keys: dict[str, Any], name: str, value: float
) -> None:
    logging.getLogger("flwr").disabled = False
    try:
        number = 3 + 2 * (keys is BY_STEP)
        finished = run(3, keys, misbehaving(array(name, first(value)), number=number))
    finally:
        logging.getLogger("flwr").disabled = True
    assert finished.summary["failure"] is None and finished.summary["failed_parties"] == []
    assert finished.summary["test_accuracy"] > 0.9
    gone = [line for line in caplog.messages if line.endswith("with its last embeddings.")]
    assert len(gone) == 1 and gone[0].startswith("Party 1 sent ")


def test_who_takes_the_loss_beyond_all_numbers_with_a_first_upload_is_named(
    run: Start, tmp_path: Path
) -> None:
    client = Misbehaving(array("embedding", lambda h: np.full_like(h, 9e5)), number=1)
    _, sentence = failing(run, tmp_path / "out", VAFL, client)
    assert sentence == (
        "Party 1 sent embeddings of up to 900,000, which made the loss non-finite. Lower "
        "the learning rates, or check that party."
    )


def two_arrivals(**more: Any) -> tuple[LabelHolder, list[Any]]:
    """Two parties' first uploads. Party 1's embeddings are as large as can be."""
    config = resolve({**VAFL, "server-lr": 1.0, "window": 15, **more})
    holder = LabelHolder(config, load_labels(config), {0: 32, 1: 32})
    order = messages.TrainOrder(exchange=1, epoch=0, first=0, steps=15, coordinated=True)
    arrivals = []
    for party, value in ((0, 0.5), (1, messages.LARGEST)):
        arrays = {"embedding": np.full((455, 32), value, np.float32)}
        upload = messages.Upload(party=party, exchange=1, arrays=arrays)
        arrivals.append(holder.receive(party, order, upload))
    return holder, arrivals


def test_after_a_poisoned_answer_the_top_model_is_as_it_was() -> None:
    holder, arrivals = two_arrivals(**{"on-party-failure": "continue", "optimizer": "momentum"})
    holder.table.peaks[1] = messages.LARGEST
    before = holder.state_dict()[1]
    with pytest.raises(PoisonError, match=r"^Party 1 sent embeddings of up to 1,000,000, which"):
        holder.answer(arrivals)
    after = holder.state_dict()[1]
    for name in (each for each in before if each.startswith(("top.", "optimizer."))):
        np.testing.assert_array_equal(after[name], before[name])
    assert not holder.table.of(1).any() and holder.table.of(0).any()
    assert holder.answer(arrivals[:1]).keys() == {0}


def test_a_loss_that_no_party_has_taken_there_names_none() -> None:
    holder, arrivals = two_arrivals()
    holder.table.of(1).zero_()
    with torch.no_grad():
        next(holder.top.parameters()).fill_(1e38)
    with pytest.raises(DivergedError, match=r"^The loss is no longer finite\. Lower the learning"):
        holder.answer(arrivals[:1])


@pytest.mark.parametrize(
    "rows", [np.zeros((0, 3)), np.full((2, 2), messages.LARGEST), -np.ones(3) * messages.LARGEST]
)
def test_what_is_bounded_passes(rows: Any) -> None:
    largest = np.abs(rows).max(initial=0)
    assert messages.bounded("h", rows) == messages.bounded("h", torch.from_numpy(rows)) == largest


@pytest.mark.parametrize("value", [1.0001e6, -2e6, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_what_is_not_bounded_is_refused(value: float, dtype: str) -> None:
    rows = np.zeros((4, 6), dtype)[:, 1:4]  # a block of columns, as in an answer
    with np.errstate(over="ignore"):
        rows[1, 2] = value
    for each in (rows, torch.from_numpy(rows)):
        with pytest.raises(VflError, match=r"'h' has values beyond 1,000,000.*Lower the learning"):
            messages.bounded("h", each)
    finite = bool(np.isfinite(rows).all())
    said = "beyond 1,000,000" if finite else "not finite"
    with pytest.raises(VflError, match=f"'h' has values .*{said}"):
        messages.checked({"h": rows}, "h", dtype, (4, 3), messages.LARGEST)
    rows[1, 2] = -1e3  # the control: this value passes
    assert messages.checked({"h": rows}, "h", dtype, (4, 3), messages.LARGEST) is rows


# --- the answers --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("estimator", "keys", "name"),
    [(FirstOrder, KEYS, "gradient"), (ZerothOrder, ZEROTH, "difference")],
)
def test_a_party_refuses_an_answer_that_would_ruin_its_model(
    run: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    estimator: Any,
    keys: dict[str, Any],
    name: str,
) -> None:
    encode = estimator.encode

    def answered(*given: Any) -> dict[int, Any]:
        return {m: {name: first(1e30)(each[name].copy())} for m, each in encode(*given).items()}

    monkeypatch.setattr(estimator, "encode", answered)
    _, sentence = failing(run, tmp_path / "out", keys, client_app.app)
    said = f"failed: was sent feedback that it cannot use: {name!r} has values beyond 1,000,000"
    assert said in sentence


# --- orders -------------------------------------------------------------------------------------

RUN = {**KEYS, "batch-size": 32, "epochs": 4}
ORDERS: list[messages.Order] = [
    messages.DescribeOrder(outputs=1),
    messages.TrainOrder(exchange=1, epoch=0, first=0, steps=5, coordinated=True),
    messages.EvaluateOrder(exchange=1),
    messages.EmbedOrder(exchange=1, arrays={"ids": np.arange(9, dtype=np.int32)}),
    messages.RejoinOrder(exchange=1, outputs=1),
    messages.CheckpointOrder(exchange=1, number=1),
    messages.RestoreOrder(exchange=1, number=1),
    messages.ResumeOrder(run="7", number=1),
    messages.GrowOrder(outputs=1, run="7", number=1, parties=1, config='{"grow": "runs/then"}'),
    messages.PredictOrder(run="7", number=1),
    ExplainOrder(run="7", number=1, repeats=1),
    PermuteOrder(party=0, first=0, count=1, repeat=0, start=0, stop=1),
    FiguresOrder(metric="auc", grain=0.0, rows=1),
]
NUMBERS: list[Any] = [
    *(-1, 0, 2**31, 10**10, 2**53 + 1, 2**63 - 1, -(2**63), math.nan, math.inf, 1e300)
]


def described(folder: Path) -> Context:
    """Return a party that has described itself, as in a new process."""
    begin_task()
    node: dict[str, Any] = {"partition-id": 0, "num-partitions": 3, "states": str(folder)}
    keys: dict[str, Any] = {**RUN}
    context = Context(7, 2, node, RecordDict(), keys)
    asked(context, messages.DescribeOrder(outputs=1), messages.Description)
    return context


def numeric(order: messages.Order) -> list[str]:
    return [each.name for each in fields(order) if each.type == "int"]


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.kind)
def test_an_order_of_other_numbers_is_refused_before_it_costs_memory(
    order: messages.Order, tmp_path: Path
) -> None:
    context = described(tmp_path)
    kept = dict(context.state)
    tracemalloc.start()
    try:
        for name in numeric(order):
            for value in (each for each in NUMBERS if each != getattr(order, name)):
                message = to_message(order, 2, 60)
                scalars = message.content["scalars"]
                assert isinstance(scalars, ConfigRecord)
                scalars[name] = value
                reply = client_app.app(message, context)
                if "failure" in reply.content:
                    failure = reply.content["failure"]
                    assert isinstance(failure, ConfigRecord)
                    cause = str(failure["cause"])
                    assert "raised" not in cause and "\n" not in cause
                    continue
                # Numbers of checkpoints and evaluations, and of messages after a failure, are the
                # label holder's. So is whether a party was in an earlier run.
                free = name in ("number", "best", "last")
                free |= (type(order), name) == (messages.RejoinOrder, "exchange")
                free |= (type(order), name) == (messages.GrowOrder, "parties")
                assert free and 0 <= value <= 2**53
                context.state.clear()
                context.state.update(kept)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50e6


def test_steps_beyond_all_epochs_would_else_be_drawn(tmp_path: Path) -> None:
    """The control: `draw_window` itself takes any number of them."""
    order = messages.TrainOrder(exchange=1, epoch=0, first=0, steps=10**10, coordinated=True)
    said = "steps 1 to 10000000000 of epoch 1, but the run has at most 12 epochs of 15"
    refused(described(tmp_path), order, said)


def test_want_of_memory_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def embeddings(*given: Any) -> Any:
        return np.zeros(2**62, np.int8)  # more than any address

    context = described(tmp_path)
    monkeypatch.setattr("vfl_flower.party.learner.Learner.embeddings", embeddings)
    said = r"^failed: has not enough memory for what it was asked\.$"
    refused(context, messages.EvaluateOrder(exchange=1), said)


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 20), st.integers(1, 60))
def test_every_window_of_a_plan_is_a_possible_order(
    epochs: int, parties: int, longest: int, batch: int
) -> None:
    config = resolve({"epochs": epochs, "batch-size": batch})
    plan, done = StepBudget(epochs, steps_per_epoch(config, 100), parties), 0
    while plan.left > 0:  # by one party, which is quicker than all others
        epoch, at, steps = plan.window(done, longest)
        done += steps
        place: dict[str, Any] = {"epoch": epoch, "first": at, "steps": steps}
        order = messages.TrainOrder(exchange=1, coordinated=False, **place)
        sampling_of(config, 100).check(order, parties)
    with pytest.raises(VflError, match="the run has at most"):
        sampling_of(config, 100).check(replace(order, epoch=epoch + 1), parties)


# --- fields and arrays that none has ------------------------------------------------------------


def answer_of(content: dict[str, Any]) -> Message:
    begin_task()
    message = to_message(messages.EvaluateOrder(exchange=1), 2, 60)
    upload: dict[str, Any] = {"party": 1, "exchange": 1, "peak_memory_mb": 1.0, "surrogates": ""}
    arrays, more = content.get("arrays", {}), content.get("scalars", {})
    arrays = arrays if isinstance(arrays, ArrayRecord) else pack(arrays)
    records = {**content, "scalars": ConfigRecord({**upload, **more}), "arrays": arrays}
    return Message(RecordDict(records), reply_to=message)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"scalars": {"more": 1}}, "has an unknown field"),
        ({"more": ConfigRecord({"a": 1})}, "with unknown records"),
        ({"scalars": {"peak_memory_mb": math.inf}}, "peak_memory_mb must be a finite number"),
        ({"scalars": {"peak_memory_mb": math.nan}}, "peak_memory_mb must be a finite number"),
        ({"scalars": {"peak_memory_mb": -1.0}}, "peak_memory_mb must be at least 0"),
        ({"scalars": {"exchange": -1}}, "exchange must be at least 0"),
        ({"scalars": {"surrogates": "x" * 129}}, "surrogates must have at most 128 letters"),
        ({"scalars": {"surrogates": "a\nb"}}, "surrogates must be plain text in one line"),
        ({"arrays": {f"{n}": np.zeros(1) for n in range(1025)}}, "too many arrays, or too long"),
        ({"arrays": {"x" * 129: np.zeros(1)}}, "too many arrays, or too long names"),
        ({"arrays": {"a": np.zeros(20_000)}}, "a Upload of 160,128 bytes, more than the 150,000"),
        (
            {"arrays": ArrayRecord({"a": Array("int8", (1,) * 9, "numpy.ndarray", b"")})},
            "'a' whose bytes do not decode",
        ),
    ],
)
def test_what_no_upload_has_is_refused(content: dict[str, Any], said: str) -> None:
    with pytest.raises(VflError, match=said) as error:
        read_reply(answer_of(content), messages.Upload, 150_000)
    assert "\n" not in str(error.value)


def test_an_order_with_an_array_of_another_name_is_refused() -> None:
    begin_task()
    message = to_message(messages.DescribeOrder(outputs=1, arrays={"more": np.zeros(3)}), 2, 60)
    with pytest.raises(VflError, match=r"^was sent a DescribeOrder with an unknown array 'more'"):
        read_order(message, messages.DescribeOrder)


def test_an_order_with_an_array_that_nobody_uses_changes_nothing(tmp_path: Path) -> None:
    context = described(tmp_path)
    before = context.state["scalars"]
    order = messages.EvaluateOrder(exchange=1, arrays={"more": np.zeros(3)})
    refused(context, order, "^failed: was sent an array 'more', which nobody uses")
    assert context.state["scalars"] is before


# --- texts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\n lines\tand\r more", "two lines and more"),
        ("\x1b[31mred\x1b[0m \x9b2Jgone \x1b]0;title\x07 \x1bc", "red gone"),
        ("a\u202eb\u200bc\x00d\x7f", "a b c d"),
        ("é 漢字 🙂", "é 漢字 🙂"),
        ("x" * 1000, "x" * 300 + " ..."),
        (7, ""),
        (None, ""),
        (b"bytes", ""),
    ],
    ids=repr,
)
def test_what_a_party_says_is_one_line_that_can_be_shown(text: Any, shown: str) -> None:
    assert said(text) == shown


def failure_of(cause: Any) -> Message:
    begin_task()
    message = to_message(messages.EvaluateOrder(exchange=1), 2, 60)
    return Message(RecordDict({"failure": ConfigRecord({"cause": cause})}), reply_to=message)


@pytest.mark.parametrize(
    ("cause", "shown"),
    [
        ("broke.\n\x1b[2Jall is well", "failed: broke. all is well"),
        (17, "failed: it did not say why"),
        ([1, 2], "failed: it did not say why"),
        ("", "failed: it did not say why"),
    ],
)
def test_a_party_s_cause_is_shown_so(cause: Any, shown: str) -> None:
    with pytest.raises(VflError) as error:
        read_reply(failure_of(cause), messages.Upload)
    assert str(error.value) == shown


@of_words
def test_a_party_s_cause_is_no_part_of_the_page_or_the_log(run: Start, tmp_path: Path) -> None:
    hostile = "<script>alert('1')</script>\n\x1b[2J$\\frac$ " + "x" * 10_000

    def fault(message: Message, context: Context) -> Message:
        return to_failure(hostile, message)

    finished, sentence = failing(run, tmp_path / "out", KEYS, Misbehaving(fault))
    assert sentence.isprintable() and len(sentence) < 400
    assert finished.summary["failure"] == sentence
    html = report([finished.folder])
    page = Page(html)
    assert "<script" not in html and "\x1b" not in html and not page.all("script")
    assert "<script>alert('1')</script> $\\frac$ xxx" in page.text


# --- regular expressions ------------------------------------------------------------------------

PUMPED = [
    *(*" a1'=.-/`@|:x\n\x1b\x9b", "\x1b[", "\x1b[0", "\x1b]", "_party1-2", "x_party1_", "1:", "=x"),
    *("failed: ", "failed: Party 1", "In party 1", "The model in ", " is served at ", "INFO: "),
    *("a..", "vfl_flower.api.own_code:a", "__in_process_", "='", "#1", "a@", "x.y", "//"),
]
APART = (  # for texts of the command line or of this project, or matched at one place only
    r"""[\w.-]+=('[^']*'|"[^"]*"|\S+)""",
    r"([a-z]+)=",
    r"[\w-]+=(?:",
    r"(\d+):([0-9a-f]{64})",
    r"(?P<low>[^:|]+?)\.\.",
    r"\s|(ERROR *: *)?(",
)


def expressions() -> Iterator[re.Pattern[str]]:
    """Yield the regular expressions of the product that are written as texts."""
    product = Path(vfl_flower.__file__).parent
    for path in (*product.rglob("*.py"), *(product.parent / "strategies").rglob("*.py")):
        content = path.read_text()
        if not re.search(r"\bre\.[a-z]", content):
            continue
        calls = [each for each in ast.walk(ast.parse(content)) if isinstance(each, ast.Call)]
        for call in calls:
            of_re = re.match(r"re\.[a-z]+$", ast.unparse(call.func))
            if of_re and isinstance(call.args[0], ast.Constant):
                flags = set(re.findall(r"re\.([A-Z]+)", ast.unparse(call)))
                yield re.compile(str(call.args[0].value), sum(getattr(re, one) for one in flags))


def slowest(pattern: re.Pattern[str], pumped: list[str] = PUMPED, letters: int = 10_000) -> float:
    """Return the longest time that an expression takes for a long text, in seconds."""
    took, letters = [], 250 if "_party" in pattern.pattern else letters  # that one reads file names
    for each in pumped:
        text, begun = (each * letters)[:letters] + "\0", process_time()
        pattern.sub("", text)
        pattern.fullmatch(text)
        took.append(process_time() - begun)
    return max(took)


def test_no_regular_expression_takes_long_for_a_text_of_another_side() -> None:
    found = {each.pattern: each for each in expressions()}
    slow = {text: slowest(each) for text, each in found.items() if not text.startswith(APART)}
    assert 20 < len(slow) == len(found) - len(APART)
    assert max(slow.values()) < 0.05, max(slow, key=slow.__getitem__)
    assert slowest(re.compile(r"([^\s|]*@[^\s|]*)"), ["a"]) > 0.05  # the control


@pytest.mark.parametrize("name", ["_DATE", "_DECIMAL_COMMA", "_THOUSANDS"])
def test_no_cell_of_a_table_takes_a_regular_expression_long(name: str) -> None:
    pattern = re.compile(getattr(frames, name))
    assert pattern.fullmatch({"_DATE": "1.2.2024"}.get(name, "1,000"))
    cells = [*PUMPED, *("1,111", "1.111", "1 111", ",111", "+1", "2024-01-01", "1.1.2024 ")]
    begun = process_time()
    for each in cells:
        pattern.fullmatch((each * 20_000)[:20_000] + "\0")
    assert process_time() - begun < 0.1
    assert slowest(pattern, [" "], 4000) > 0.05  # the control: as a search it would


def test_replies_that_are_as_they_should_be_pass() -> None:
    arrays = {"embedding": np.ones((2, 3))}
    upload = messages.Upload(party=1, exchange=1, peak_memory_mb=5e3, arrays=arrays)
    begin_task()
    reply = to_reply(upload, to_message(messages.EvaluateOrder(exchange=1), 2, 60))
    found = read_reply(reply, messages.Upload, 200)
    assert found.peak_memory_mb == 5e3 and found.nbytes == 48
