"""Messages to Flower records and back, and what is refused on arrival."""

import pickle
from dataclasses import fields, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.common.serde import (
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
)
from flwr.supercore.task_identity import TaskIdentity
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from tests.conftest import ALL_ROWS, Start
from vfl_flower import client_app
from vfl_flower.config.errors import VflError
from vfl_flower.party.state import load_arrays, load_large, load_scalars, save_groups
from vfl_flower.transport import wire
from vfl_flower.transport.messages import (
    DescribeOrder,
    Description,
    EmbedOrder,
    EvaluateOrder,
    Order,
    Payload,
    RejoinOrder,
    TrainOrder,
    Upload,
    checked,
)

AnyArray = NDArray[Any]
ORDERS = [
    DescribeOrder(outputs=3),
    TrainOrder(exchange=2, epoch=1, first=4, steps=5, coordinated=True),
    EvaluateOrder(exchange=3),
    EmbedOrder(exchange=4),
    RejoinOrder(exchange=5, outputs=10),
]
ANSWERS = [
    Description(
        party=1,
        parties=2,
        train_rows=30,
        test_rows=10,
        columns=5,
        embedding_size=4,
        alignment="a",
        exchange=0,
    ),
    Upload(party=1, exchange=3, peak_memory_mb=12.5),
]

dtypes = st.one_of(
    hnp.boolean_dtypes(), hnp.integer_dtypes(), hnp.unsigned_integer_dtypes(), hnp.floating_dtypes()
)
arrays = dtypes.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, max_dims=4, min_side=0))
)
named_arrays = st.dictionaries(st.text("abc.-_09", min_size=1), arrays, max_size=3)


@pytest.fixture(autouse=True)
def a_task() -> None:
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 1, 1, 1


def over_the_wire(message: Message) -> Message:
    return message_from_proto(message_to_proto(message))


def sent(order: Order) -> Message:
    return over_the_wire(wire.to_message(order, 7, 60.0))


def answered(payload: Payload, order: Order = ORDERS[1]) -> Message:
    return over_the_wire(wire.to_reply(payload, sent(order)))


def reply_of(content: RecordDict) -> Message:
    return over_the_wire(Message(content, reply_to=sent(ORDERS[1])))


def named_for(payload: Payload, ours: dict[str, AnyArray]) -> dict[str, AnyArray]:
    """As many arrays as it can have, by the names that they can have."""
    names = ours if payload.names is None else payload.names
    return dict(zip(names, ours.values(), strict=False))


def assert_same(ours: dict[str, AnyArray], theirs: dict[str, AnyArray]) -> None:
    assert ours.keys() == theirs.keys()
    for name, array in ours.items():
        assert theirs[name].dtype == array.dtype
        assert theirs[name].shape == array.shape
        assert theirs[name].tobytes() == array.tobytes()


@given(arrays)
def test_arrays_that_are_not_contiguous_survive_packing(array: AnyArray) -> None:
    assert_same({"a": array.T}, wire.unpack(wire.pack({"a": array.T})))
    if array.ndim:
        assert_same({"a": array[::-2]}, wire.unpack(wire.pack({"a": array[::-2]})))


@given(st.sampled_from(ORDERS), named_arrays)
def test_orders_survive_a_message(order: Order, ours: dict[str, AnyArray]) -> None:
    ours = named_for(order, ours)
    message = sent(replace(order, arrays=ours))
    assert message.metadata.message_type == order.kind
    assert message.metadata.dst_node_id == 7
    received = wire.read_order(message, type(order))
    assert replace(received, arrays={}) == order
    assert_same(ours, received.arrays)


@given(st.sampled_from(ANSWERS), named_arrays)
def test_answers_survive_a_message(answer: Payload, ours: dict[str, AnyArray]) -> None:
    ours = named_for(answer, ours)
    received = wire.read_reply(answered(replace(answer, arrays=ours)), type(answer))
    assert replace(received, arrays={}) == answer
    assert_same(ours, received.arrays)


@given(st.sampled_from(ORDERS), st.sampled_from(ANSWERS), named_arrays)
def test_a_call_brings_what_a_message_would(
    order: Order, answer: Payload, ours: dict[str, AnyArray]
) -> None:
    order = replace(order, arrays=named_for(order, ours))
    answer = replace(answer, arrays=named_for(answer, ours))
    message = wire.to_message(order, 7, 60.0, call=True)
    reply = wire.to_reply(answer, message)
    received = wire.read_order(message, type(order)), wire.read_reply(reply, type(answer))
    for payload, came in zip((order, answer), received, strict=True):
        assert replace(came, arrays={}) == replace(payload, arrays={})
        assert_same(payload.arrays, came.arrays)
        assert not any(array.flags.writeable for array in came.arrays.values())
        assert all(array.flags.writeable for array in payload.arrays.values())
    anew = (
        wire.read_order(over_the_wire(message), type(order)),
        wire.read_reply(reply, type(answer)),
    )
    assert_same(order.arrays, anew[0].arrays)  # and if it must leave, it can


def test_a_call_is_checked_as_a_message_is() -> None:
    order: Any = ORDERS[1]
    call = partial(wire.to_message, node_id=7, ttl=60.0, call=True)
    with pytest.raises(VflError, match="whose epoch must be a whole number"):
        wire.read_order(call(replace(order, epoch=1.5)), TrainOrder)
    with pytest.raises(VflError, match="whose steps must be at least 1"):
        wire.read_order(call(replace(order, steps=0)), TrainOrder)
    with pytest.raises(VflError, match="more than the 7 that it may have"):
        wire.read_order(call(replace(order, arrays={"a": np.zeros(1)})), TrainOrder, 7)
    with pytest.raises(VflError, match="whose number is missing"):
        wire.read_order(call(order), EvaluateOrder)
    with pytest.raises(VflError, match="an unknown array 'a'"):
        told = replace(ANSWERS[0], arrays={"a": np.zeros(1)})
        wire.read_reply(wire.to_reply(told, call(order)), Description)


def test_what_is_changed_in_the_records_of_a_call_is_what_it_says() -> None:
    message = wire.to_message(ORDERS[1], 7, 60.0, call=True)
    scalars = message.content["scalars"]
    assert isinstance(scalars, ConfigRecord)
    scalars["exchange"] = 77
    assert wire.read_order(message, TrainOrder).exchange == 77
    message = wire.to_message(ORDERS[1], 7, 60.0, call=True)
    message.content = RecordDict()
    with pytest.raises(VflError, match="scalars"):
        wire.read_order(message, TrainOrder)


def test_packing_is_the_file_format_of_numpy_and_what_is_received_is_read_only() -> None:
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    np.testing.assert_array_equal(wire.pack({"a": array})["a"].numpy(), array)
    received = wire.unpack(ArrayRecord({"a": Array(array)}))
    assert_same({"a": array}, received)
    with pytest.raises(ValueError, match="read-only"):
        received["a"][0] = 1.0


@given(named_arrays)
def test_state_survives_a_message(ours: dict[str, AnyArray]) -> None:
    state = RecordDict()
    assert not load_scalars(state)
    groups: dict[str, dict[str, Any]] = {
        "scalars": {"exchange": 3, "secret": b"\0\xff"},
        "model": ours,
    }
    save_groups(state, "about", groups)
    assert dict(load_scalars(state)) == {"exchange": 3, "secret": b"\0\xff"}
    assert_same(ours, load_arrays(state, "model"))


@given(named_arrays)
def test_large_state_is_the_memory_itself_until_it_leaves(ours: dict[str, AnyArray]) -> None:
    state = RecordDict()
    save_groups(state, "", {"large": ours})
    assert all(array is ours[name] for name, array in load_large(state).items())
    for left in (
        pickle.loads(pickle.dumps(state)),
        recorddict_from_proto(recorddict_to_proto(state)),
    ):
        found = load_large(left)
        assert_same(ours, found)
        assert all(array.flags.writeable for array in found.values())


def test_large_state_leaves_as_it_is_by_then() -> None:
    array, state = np.zeros(3), RecordDict()
    save_groups(state, "", {"large": {"a": array}})
    array[1] = 7
    copy = load_large(pickle.loads(pickle.dumps(state)))["a"]
    assert copy.tolist() == [0, 7, 0]
    copy[0] = 1
    assert array.tolist() == [0, 7, 0]


WHOLE = wire.pack({"a": np.arange(6, dtype=np.float32).reshape(2, 3)})["a"]
DIRTY = {
    "one byte short": Array(WHOLE.dtype, WHOLE.shape, WHOLE.stype, WHOLE.data[:-1]),
    "one byte more": Array(WHOLE.dtype, WHOLE.shape, WHOLE.stype, WHOLE.data + b"\0"),
    "one value short": Array(WHOLE.dtype, WHOLE.shape, WHOLE.stype, WHOLE.data[:-4]),
    "cut in the header": Array(WHOLE.dtype, WHOLE.shape, WHOLE.stype, WHOLE.data[:20]),
    "no bytes": Array(WHOLE.dtype, WHOLE.shape, WHOLE.stype, b""),
    "another shape": Array(WHOLE.dtype, (3, 2), WHOLE.stype, WHOLE.data),
    "negative shape": Array(WHOLE.dtype, (2, -1), WHOLE.stype, WHOLE.data),
    "enormous shape": Array(WHOLE.dtype, (2**31 - 1, 2**31 - 1), WHOLE.stype, WHOLE.data),
    "another dtype": Array("int32", WHOLE.shape, WHOLE.stype, WHOLE.data),
    "object dtype": Array("object", WHOLE.shape, WHOLE.stype, WHOLE.data),
    "complex dtype": Array("complex64", (3,), WHOLE.stype, WHOLE.data),
    "text dtype": Array("<U6", (1,), WHOLE.stype, WHOLE.data),
    "structured dtype": Array("f4,f4", (3,), WHOLE.stype, WHOLE.data),
    "unknown dtype": Array("float33", WHOLE.shape, WHOLE.stype, WHOLE.data),
    "another format": Array(WHOLE.dtype, WHOLE.shape, "pickle", WHOLE.data),
}


@pytest.mark.parametrize("array", DIRTY.values(), ids=DIRTY.keys())
def test_corrupted_array_is_refused(array: Array) -> None:
    with pytest.raises(VflError, match="'a' whose bytes do not decode"):
        wire.unpack(ArrayRecord({"a": array}))
    content = RecordDict(
        {
            "scalars": ConfigRecord(
                {"party": 1, "exchange": 3, "peak_memory_mb": 1.0, "surrogates": ""}
            ),
            "arrays": ArrayRecord({"a": array}),
        }
    )
    with pytest.raises(VflError, match="'a' whose bytes do not decode"):
        wire.read_reply(reply_of(content), Upload)


@given(st.text(), st.lists(st.integers(-3, 2**40), max_size=3).map(tuple), st.binary())
def test_nonsense_for_an_array_is_refused(dtype: str, shape: tuple[int, ...], data: bytes) -> None:
    with pytest.raises(VflError):
        wire.unpack(ArrayRecord({"a": Array(dtype, shape, "numpy.ndarray", data)}))


@pytest.mark.parametrize(
    "field", [f.name for f in fields(TrainOrder) if f.name not in ("arrays", "version")]
)
@pytest.mark.parametrize("wrong", [None, "text", 1.5, b"", [1], True], ids=repr)
def test_scalar_that_is_missing_or_of_a_wrong_type_is_refused(field: str, wrong: Any) -> None:
    if wrong is True and field == "coordinated":
        return
    message = sent(ORDERS[1])
    scalars = message.content["scalars"]
    assert isinstance(scalars, ConfigRecord)
    if wrong is None:
        del scalars[field]
    else:
        scalars[field] = wrong
    with pytest.raises(VflError, match=field):
        wire.read_order(message, TrainOrder)


RECORDS = {
    "nothing": RecordDict(),
    "scalars only": RecordDict({"scalars": ConfigRecord({"party": 1})}),
    "arrays only": RecordDict({"arrays": ArrayRecord()}),
    "exchanged": RecordDict({"arrays": ConfigRecord(), "scalars": ArrayRecord()}),
    "failure without a cause": RecordDict({"failure": ConfigRecord()}),
    "failure of arrays": RecordDict({"failure": ArrayRecord()}),
}


@pytest.mark.parametrize("content", RECORDS.values(), ids=RECORDS.keys())
def test_answer_of_other_records_is_refused(content: RecordDict) -> None:
    with pytest.raises(VflError):
        wire.read_reply(reply_of(content), Upload)


def test_answer_to_another_order_is_refused() -> None:
    with pytest.raises(VflError, match="Description"):
        wire.read_reply(answered(ANSWERS[1]), Description)


@pytest.mark.parametrize(
    ("reason", "told"), [("two\n lines", "failed: two lines"), (None, "failed: Flower error 3")]
)
def test_error_of_flower_is_told_in_one_line(reason: str | None, told: str) -> None:
    message = Message(Error(code=3, reason=reason), reply_to=sent(ORDERS[1]))
    with pytest.raises(VflError) as error:
        wire.read_reply(message, Upload)
    assert str(error.value) == told


ONES = np.ones((2, 3), np.float32)


@pytest.mark.parametrize(
    ("array", "sentence"),
    [
        (ONES.astype(np.float64), "'a' is float64 .* not float32"),
        (ONES.astype(">f4"), "'a' is >f4 .* not float32"),
        (ONES.T, r"shape \(3, 2\), not .* shape \(2, 3\)"),
        (ONES.ravel(), r"shape \(6,\)"),
        (ONES * np.nan, "not finite"),
        (ONES * -np.inf, "not finite"),
        (None, "'a' is missing"),
    ],
)
def test_checked_refuses_another_array(array: AnyArray | None, sentence: str) -> None:
    assert checked({"a": ONES}, "a", "float32", (2, 3)) is ONES  # the control
    with pytest.raises(VflError, match=sentence):
        checked({"b": ONES} if array is None else {"a": array}, "a", "float32", (2, 3))


@given(named_arrays)
def test_bytes_are_the_arrays_bytes(ours: dict[str, AnyArray]) -> None:
    upload = replace(ANSWERS[1], arrays=ours)
    assert upload.nbytes == sum(array.nbytes for array in ours.values())
    assert wire.read_reply(answered(upload), Upload).nbytes == upload.nbytes


class Scales:
    """The ClientApp, and the bytes of the arrays in its messages."""

    def __init__(self) -> None:
        self.exchanges = self.up = self.down = self.evaluation = 0

    def __call__(self, message: Message, context: Context) -> Message:
        self.down += array_bytes(message)
        reply: Message = client_app.app(message, context)
        if message.metadata.message_type in ("evaluate", "query.checkpoint"):
            self.evaluation += array_bytes(reply)
        elif message.metadata.message_type != "query.describe":
            self.up += array_bytes(reply)
            self.exchanges += 1
        return reply


def array_bytes(message: Message) -> int:
    record = message.content.array_records["arrays"]
    return sum(array.numpy().nbytes for array in record.values())


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"strategy": "vafl"},
        {"strategy": "vafl", "max-delay": 5, "delay": "exponential"},
        {"strategy": "frozen"},
        {"strategy": "ef-vfl", "downlink-codec": "qsgd"},
        {"strategy": "ef-vfl", "labels": "shared", "downlink-codec": "top-k"},
        {"strategy": "cascaded", "codec": "qsgd", "compression": "error-feedback"},
    ],
    ids=str,
)
def test_a_run_reports_the_bytes_that_were_sent(run: Start, keys: dict[str, Any]) -> None:
    scales: Any = Scales()
    keys = {**ALL_ROWS, "dataset": "breast-cancer", "epochs": 2, "window": 4, **keys}
    summary = run(3, keys, scales).summary
    assert summary["exchanges"] == scales.exchanges
    assert summary["bytes_up"] == scales.up
    assert summary["bytes_down"] == scales.down
    assert summary["evaluation_bytes"] == scales.evaluation


@pytest.mark.one_by_day
@pytest.mark.parametrize(("strategy", "ids"), [("split-nn", 0), ("vafl", 4)])
def test_bytes_of_a_run_follow_from_its_size(run: Start, strategy: str, ids: int) -> None:
    keys = {**ALL_ROWS, "dataset": "breast-cancer", "epochs": 2, "window": 8, "embedding-size": 6}
    summary = run(3, {**keys, "strategy": strategy}).summary
    rows = 3 * 2 * 455  # parties, epochs, training rows
    assert summary["bytes_down"] == rows * 6 * 4
    assert summary["bytes_up"] == rows * (6 * 4 + ids)
    assert summary["evaluation_bytes"] == 3 * 2 * 114 * 6 * 4
    assert summary["exchanges"] == 3 * 2 * 2  # of 15 steps each, in windows of 8
