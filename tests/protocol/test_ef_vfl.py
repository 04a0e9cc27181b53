"""EF-VFL by hand, its two copies of every surrogate, shared labels, and codecs on every system."""

import copy
import logging
import math
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message, RecordDict
from flwr.common.serde import recorddict_from_proto, recorddict_to_proto
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from tests.conftest import ALL_ROWS, FASTER, MANY, Start, assert_copies_agree, trained
from vfl_flower import client_app
from vfl_flower.config.errors import PartyError, VflError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_features
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.models.bottoms import build_bottom
from vfl_flower.models.tops import build_top
from vfl_flower.party import session as between
from vfl_flower.party.party import Party
from vfl_flower.party.state import load_arrays, load_large
from vfl_flower.protocol.batches import steps_per_epoch
from vfl_flower.protocol.codecs.channel import Links
from vfl_flower.protocol.estimators.shared_labels import SharedLabels
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.systems import resolve, sized
from vfl_flower.transport.local import LocalGrid
from vfl_flower.transport.messages import DescribeOrder, TrainOrder, Upload
from vfl_flower.transport.wire import read_reply, to_reply

# --- Algorithms 1 and 2 -------------------------------------------------------------------------


def top_k(v: Tensor, keep: float) -> Tensor:
    """The paper's section 5, of all entries as one vector; in the float16 that is sent."""
    flat = v.flatten()
    largest = flat.abs().argsort(descending=True, stable=True)[: math.ceil(keep * len(flat))]
    power = 2.0 ** math.frexp(flat.abs().max().item())[1]
    kept = torch.zeros_like(flat)
    kept[largest] = (flat[largest] / power).half().float() * power
    return kept.view_as(v)


def by_hand(
    config: RunConfig, parties: int
) -> tuple[list[nn.Module], list[nn.Module], Tensor, list[float]]:
    """EF-VFL or CVFL: models before and after, bottom ones first; surrogates; losses of steps."""
    labels, size = load_labels(config), config.models.embedding_size or 32
    y, rows = torch.from_numpy(labels.train), len(labels.train)
    x = [torch.from_numpy(load_features(config, m, parties).train) for m in range(parties)]
    models: list[nn.Module] = [build_bottom(config, m, x[m][0], size) for m in range(parties)]
    top = build_top(config, [size] * parties, labels.outputs)
    before = copy.deepcopy([*models, top])
    surrogates = [torch.zeros(rows, size) for _ in range(parties)]
    losses: list[float] = []

    def step(model: nn.Module, lr: float) -> None:
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(lr * p.grad)
                p.grad = None

    for epoch in range(config.training.epochs):
        steps = steps_per_epoch(config, rows)
        order = sampling_of(config, rows).window(None, epoch, 0, steps, b"").index
        for ids in order.split(config.training.batch_size):
            uploads = [bottom(x[m][ids]) for m, bottom in enumerate(models)]
            for surrogate, h in zip(surrogates, uploads, strict=True):
                feeds_back = config.uplink.compression == "error-feedback"
                known = surrogate[ids] if feeds_back else torch.zeros(())
                surrogate[ids] = known + top_k(h.detach() - known, config.uplink.keep or 0.1)
            g = [surrogate[ids].requires_grad_() for surrogate in surrogates]
            met = copy.deepcopy(top)
            for q in range(config.estimator.local_steps):  # x_0, at the surrogates
                loss = functional.cross_entropy(top(torch.cat(g, dim=1)), y[ids])
                if q == 0:
                    losses.append(loss.item())
                loss.backward()
                step(top, config.training.server_lr)
            for m, bottom in enumerate(models):
                if config.estimator.labels == "private":  # Eq. 5: the gradient at the surrogates
                    uploads[m].backward(g[m].grad)
                    step(bottom, config.training.party_lr)
                    continue
                for _ in range(config.estimator.local_steps):  # Eq. 4: at its own exact embedding
                    h = [each.detach() for each in g]
                    h[m] = bottom(x[m][ids])
                    functional.cross_entropy(met(torch.cat(h, dim=1)), y[ids]).backward()
                    step(bottom, config.training.party_lr)
    return before, [*models, top], torch.cat(surrogates, dim=1), losses


def flat(arrays: Mapping[str, Any]) -> NDArray[Any]:
    return np.concatenate([np.asarray(each).ravel() for each in arrays.values()])


@pytest.mark.one_by_day
@pytest.mark.parametrize("batch", [10**6, 400], ids=["full batch", "mini-batches"])
@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "ef-vfl"},
        {"strategy": "ef-vfl", "labels": "shared"},
        {"strategy": "ef-vfl", "labels": "shared", "local-steps": 3},
        {"strategy": "ef-vfl", "labels": "shared", "top-model": "linear", "combine": "mean"},
        {"strategy": "cvfl"},
        {"strategy": "cvfl", "labels": "shared", "local-steps": 3},
    ],
    ids=str,
)
def test_a_run_is_the_algorithm_of_the_paper(keys: dict[str, Any], batch: int) -> None:
    keys = {"keep": 0.05, "embedding-size": 6, "embedding-activation": "tanh", **keys}
    keys |= {**ALL_ROWS, "batch-size": batch, "epochs": 12 if batch > 1437 else 3}
    keys |= {"eval-every": 100, "optimizer": "sgd"}
    strategy, grid = trained(3, keys)
    before, after, surrogates, losses = by_hand(strategy.config, 3)
    assert strategy.run.history.entries[-1]["train_loss"] == pytest.approx(
        np.mean(losses), rel=1e-4
    )
    found = [load_arrays(context.state, "model") for context in grid.contexts.values()]
    found.append(strategy.top_arrays())
    for arrays, model, at_first in zip(found, after, before, strict=True):
        expected = flat({name: p.detach() for name, p in model.named_parameters()})
        start = flat({name: p.detach() for name, p in at_first.named_parameters()})
        off = np.linalg.norm(flat(arrays) - expected) / np.linalg.norm(expected - start)
        assert off < 1e-4
    if strategy.config.uplink.compression == "error-feedback":  # else the table is a mini-batch's
        off = (strategy.run.holder.table.rows - surrogates).norm() / surrogates.norm()
        assert off < 1e-4


# --- both copies of every surrogate -------------------------------------------------------------

TOP_K = {"codec": "top-k", "compression": "error-feedback"}
QSGD = {"codec": "qsgd", "compression": "error-feedback"}
DOWNLINK = {"downlink-codec": "top-k", "downlink-compression": "error-feedback"}
QSGD_DOWNLINK = {**DOWNLINK, "downlink-codec": "qsgd"}
SHARED = {"strategy": "ef-vfl", "labels": "shared"}
VAFL = {"strategy": "vafl", "delay": "exponential"}
PRIVATE = {"noise-multiplier": 1.0, "noise-seed": 0}
ALL_OTHERS = "other-0", "other-1", "other-2"


def tampering(name: str, number: int) -> Callable[[Message, Context], Message]:
    """The ClientApp, where party 1 loses hold of a surrogate before its evaluation."""
    seen = 0

    def client(message: Message, context: Context) -> Message:
        nonlocal seen
        of_it = context.node_config["partition-id"] == 1
        if of_it and message.metadata.message_type == "evaluate":
            seen += 1
            if seen == number:
                load_large(context.state)[name][-1, -1] += 0.01
        return client_app.app(message, context)

    return client


OTHERS = "Party 1 has other surrogates than the label holder. Start the run again."


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("keys", "name"),
    [
        ({"strategy": "ef-vfl", **DOWNLINK}, "uplink"),
        ({"strategy": "ef-vfl", **DOWNLINK}, "gradient"),
        ({**SHARED, **DOWNLINK}, "uplink"),
        ({**SHARED, **DOWNLINK}, "other-0"),
        ({**SHARED, **DOWNLINK}, "top"),
        ({"strategy": "vafl", **QSGD}, "uplink"),
        ({"strategy": "cascaded", **TOP_K}, "uplink"),
    ],
    ids=str,
)
def test_a_copy_that_differs_in_one_number_is_found_by_the_next_evaluation(
    run: Start, keys: dict[str, Any], name: str
) -> None:
    client: Any = tampering(name, 2)
    keys = {**ALL_ROWS, "dataset": "breast-cancer", "epochs": 4, "window": 15, **keys}
    with pytest.raises(PartyError) as error:
        run(2, keys, client)
    assert str(error.value) == OTHERS


@pytest.mark.nightly
def test_an_asynchronous_run_goes_on_with_the_surrogates_of_the_label_holder() -> None:
    client: Any = tampering("uplink", 2)
    keys = {"strategy": "vafl", **TOP_K, "on-party-failure": "continue", "epochs": 6, "window": 15}
    strategy, grid = trained(2, {**keys, "dataset": "breast-cancer"}, client)
    assert strategy.figures()["failed_parties"] == []
    assert_copies_agree(strategy, grid, "uplink")


@pytest.mark.one_by_day
@pytest.mark.parametrize("labels", ["private", "shared"])
def test_an_evaluation_may_come_later_than_the_next_upload_of_another_party(
    monkeypatch: pytest.MonkeyPatch, labels: str
) -> None:
    late: list[Message] = []
    pull = LocalGrid.pull_messages

    def others_first(grid: LocalGrid, wanted: Any) -> list[Message]:
        heard = [*late, *pull(grid, wanted)]
        late[:] = [
            message
            for message in heard
            if message.metadata.message_type == "evaluate" and message.metadata.src_node_id == 3
        ]
        if len(late) == len(heard):
            late.clear()
            return heard
        return [message for message in heard if message not in late]

    monkeypatch.setattr(LocalGrid, "pull_messages", others_first)
    keys = {**ALL_ROWS, "dataset": "breast-cancer", "epochs": 3, "window": 15, "labels": labels}
    strategy, _ = trained(3, {"strategy": "ef-vfl", **DOWNLINK, **keys})
    assert [entry["epoch"] for entry in strategy.run.history.entries] == [1, 2, 3]


# --- shared labels ------------------------------------------------------------------------------


class Listening:
    """The ClientApp, and the arrays of the messages of each kind that party 1 got."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, message: Message, context: Context) -> Message:
        if context.node_config["partition-id"] == 1:
            arrays = message.content.array_records["arrays"]
            numbers = {name: array.numpy() for name, array in arrays.items()}
            self.heard.append((message.metadata.message_type, numbers))
        return client_app.app(message, context)


def test_a_broadcast_is_the_uploads_of_the_others_and_the_top_model(run: Start) -> None:
    client: Any = Listening()
    parties, size, top_hidden = 4, 32, 64
    keys = {**ALL_ROWS, **SHARED, "dataset": "breast-cancer", "epochs": 2, "window": 5}
    summary = run(parties, keys, client).summary
    described, *heard = [(kind, set(arrays)) for kind, arrays in client.heard]
    assert described == ("query.describe", set())
    parts = "values", "exponents", "bits"
    names = {f"party-{other}/embedding.{part}" for other in (0, 2, 3) for part in parts}
    broadcast = names | {"top"}
    answered = [("train", broadcast), ("train", broadcast), ("evaluate", broadcast)]
    epochs = [("train", {"labels"}), *answered, ("train", set()), *answered]
    assert heard == [*epochs, ("query.checkpoint", set())]
    top = 4 * (parties * size * top_hidden + top_hidden + top_hidden + 1)
    labels = parties * 455  # a byte each
    passed_on = (parties - 1) * summary["bytes_up"]
    assert summary["bytes_down"] == labels + passed_on + parties * 2 * 15 * top


@pytest.mark.nightly
def test_a_top_model_without_parameters_is_not_sent(run: Start) -> None:
    client: Any = Listening()
    keys = {"top-model": "sum", "embedding-activation": "none", "codec": "qsgd"}
    summary = run(2, {**ALL_ROWS, **SHARED, **keys, "epochs": 8, "party-lr": 0.05}, client).summary
    assert summary["test_accuracy"] > 0.6
    assert summary["bytes_down"] == 2 * 1437 + summary["bytes_up"]
    assert not any("top" in arrays for _, arrays in client.heard)


def shared_party(**keys: Any) -> tuple[Party, TrainOrder]:
    config = resolve({**ALL_ROWS, "dataset": "breast-cancer", **SHARED, **keys})
    served = Party(config, 1, 2, 1)
    served.describe(DescribeOrder(outputs=1))
    return served, TrainOrder(exchange=1, epoch=0, first=0, steps=3, coordinated=True)


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        (np.zeros(455, np.int64), "was sent int64 labels .* for each of its 455 training rows"),
        (np.zeros(455, np.float32), "was sent float32 labels .* one unsigned integer for each"),
        (np.zeros(454, np.uint8), r"was sent uint8 labels of shape \(454,\): it needs one"),
        (np.zeros((455, 1), np.uint8), r"was sent uint8 labels of shape \(455, 1\): it needs one"),
        (np.full(455, 2, np.uint8), "was sent labels of more than 2 classes"),
    ],
)
def test_a_party_refuses_labels_that_it_cannot_use(labels: Any, sentence: str) -> None:
    served, order = shared_party()
    with pytest.raises(VflError, match=sentence):
        served.train(replace(order, arrays={"labels": labels}))


def test_a_party_does_not_learn_without_the_labels() -> None:
    served, order = shared_party()
    served.train(order)
    served.links.down = Links()  # without which only the labels are missed
    with pytest.raises(VflError, match="cannot use: the labels are missing, although labels"):
        served.train(replace(order, exchange=2, first=3))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("party-0/embedding.values", lambda array: array[:-1]),
        ("party-0/embedding.bits", lambda array: array * 0),
        ("top", lambda array: array[:, :-1]),
        ("top", lambda array: array * np.float32(np.nan)),
    ],
)
def test_a_party_refuses_a_broadcast_that_it_cannot_use(
    run: Start, monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Any], Any]
) -> None:
    broadcast = SharedLabels.encode

    def altered(*ends: Any) -> dict[int, dict[str, Any]]:
        feedback = broadcast(*ends)
        feedback[1][name] = change(feedback[1][name])
        return feedback

    monkeypatch.setattr(SharedLabels, "encode", altered)
    with pytest.raises(PartyError) as error:
        run(2, {**ALL_ROWS, **SHARED, "dataset": "breast-cancer", "epochs": 1})
    sentence = str(error.value)
    assert sentence.startswith("Party 1 failed: was sent feedback that it cannot use: ")
    assert name.removeprefix("party-0/").split(".")[0] in sentence


def test_arrays_that_no_codec_made_are_refused(run: Start) -> None:
    class Littering(Listening):
        def __call__(self, message: Message, context: Context) -> Message:
            reply = super().__call__(message, context)
            if message.metadata.message_type != "train":
                return reply
            upload = read_reply(reply, Upload)
            arrays = {**upload.arrays, "embedding.more": np.zeros(9)}
            return to_reply(replace(upload, arrays=arrays), message)

    client: Any = Littering()
    with pytest.raises(PartyError, match=r"Party . sent an array 'embedding.more', which nobody"):
        run(2, {**ALL_ROWS, **SHARED, "dataset": "breast-cancer", "epochs": 1, "window": 5}, client)
    assert not any("/" in name for _, arrays in client.heard for name in arrays)


def test_labels_of_many_classes_take_two_bytes() -> None:
    config = sized(resolve(SHARED), MANY)
    labels = load_labels(config)
    holder = LabelHolder(config, replace(labels, train=labels.train + 300), {0: 8})
    sent = holder.estimator.opening(holder, 0)["labels"]
    assert sent.dtype == np.uint16
    assert np.array_equal(sent, labels.train + 300)


# --- initial surrogates -------------------------------------------------------------------------

INITIAL = {"initial-surrogates": "embeddings"}


class Weighing:
    """The ClientApp; each party's messages of training, with bytes and array names of both ways."""

    def __init__(self) -> None:
        self.seen: dict[int, list[tuple[str, dict[str, int], int]]] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        kind = message.metadata.message_type
        arrays = message.content.array_records["arrays"].items()
        down = {name: array.numpy().nbytes for name, array in arrays}
        reply: Message = client_app.app(message, context)
        if kind in ("train", "query.embed"):
            up = read_reply(reply, Upload).nbytes
            party = int(context.node_config["partition-id"])
            self.seen.setdefault(party, []).append((kind, down, up))
        return reply


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"strategy": "ef-vfl"}, ["uplink"]),
        ({**SHARED, **QSGD, **DOWNLINK}, ["uplink", *ALL_OTHERS, "top"]),
        ({**VAFL, **TOP_K, "max-delay": 4}, ["uplink"]),
        ({"strategy": "cascaded", **QSGD}, ["uplink"]),
        ({"strategy": "ef-vfl", "presence": 0.5}, ["uplink"]),
        ({**FASTER, "strategy": "dpzv", **TOP_K, **PRIVATE}, ["uplink"]),
    ],
    ids=str,
)
def test_each_party_first_uploads_all_its_rows_compressed(
    keys: dict[str, Any], names: list[str]
) -> None:
    client: Any = Weighing()
    keys = {"epochs": 2, **ALL_ROWS, "dataset": "breast-cancer", **INITIAL, **keys}
    strategy, grid = trained(3, keys, client)
    assert_copies_agree(strategy, grid, *names)
    first = {party: seen[0] for party, seen in client.seen.items()}
    assert {kind for kind, _, _ in first.values()} == {"query.embed"}
    assert all(down == {} and up > 0 for _, down, up in first.values())
    for party, record in enumerate(strategy.run.records):
        assert record.traffic.bytes_up == sum(up for *_, up in client.seen[party])
        opening = client.seen[party][1][1]
        others = sum(size for name, size in opening.items() if name.startswith("party-"))
        passed_on = sum(up for other, (*_, up) in first.items() if other != party)
        assert others == (passed_on if keys.get("labels") == "shared" else 0)


def test_the_first_uploads_are_the_compressed_embeddings_of_the_first_models() -> None:
    keys = {"strategy": "ef-vfl", "keep": 0.05, **ALL_ROWS, **INITIAL, "party-lr": 0.0}
    keys |= {"epochs": 1, "batch-size": 10**6}
    strategy, _ = trained(2, keys)
    for party in range(2):
        x = torch.from_numpy(load_features(strategy.config, party, 2).train)
        with torch.no_grad():
            h = build_bottom(strategy.config, party, x[0], 32)(x)
        initial = top_k(h, 0.05)
        found = initial + top_k(h - initial, 0.05)  # the first step's message
        torch.testing.assert_close(strategy.run.holder.table.of(party), found)


def test_a_first_upload_of_noisy_embeddings_counts() -> None:
    noisy = {"privacy": "perturbed-embedding", "strategy": "ef-vfl", "dataset": "breast-cancer"}
    keys = {**ALL_ROWS, **noisy, "epochs": 1, "window": 15}
    counts = [trained(2, {**keys, **more})[0].run.accountant.uploads() for more in ({}, INITIAL)]
    assert counts[1] == counts[0] + 1


# --- any process may serve any message ----------------------------------------------------------


def pickled(state: RecordDict) -> RecordDict:
    """As Ray passes it on."""
    return pickle.loads(pickle.dumps(state))


def over_the_wire(state: RecordDict) -> RecordDict:
    """As a SuperNode passes it on."""
    return recorddict_from_proto(recorddict_to_proto(state))


@pytest.mark.one_by_day
@pytest.mark.parametrize("passed_on", [pickled, over_the_wire])
@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "ef-vfl", **QSGD, **DOWNLINK},
        {**SHARED, **DOWNLINK, "local-steps": 2, "optimizer": "momentum"},
        {**VAFL, **TOP_K, **QSGD_DOWNLINK, "optimizer": "adam", "max-delay": 10},
        {"strategy": "dpzv", **TOP_K, **PRIVATE},
    ],
    ids=lambda keys: f"{keys['strategy']} {keys.get('labels', 'private')}",
)
def test_a_party_goes_on_in_another_process(
    monkeypatch: pytest.MonkeyPatch,
    keys: dict[str, Any],
    passed_on: Callable[[RecordDict], RecordDict],
) -> None:
    def elsewhere(message: Message, context: Context) -> Message:
        monkeypatch.setattr(between, "live", {})
        context.state = passed_on(context.state)
        return client_app.app(message, context)

    client: Any = elsewhere
    keys = {**ALL_ROWS, "dataset": "breast-cancer", "epochs": 1, "window": 4, **keys}
    (one, nodes), (other, nodes_elsewhere) = trained(2, keys), trained(2, keys, client)
    for name, values in one.top_arrays().items():
        np.testing.assert_array_equal(other.top_arrays()[name], values)
    assert torch.equal(one.run.holder.table.rows, other.run.holder.table.rows)
    assert torch.equal(one.run.holder.held_out.table.rows, other.run.holder.held_out.table.rows)
    for here, there in zip(nodes.contexts.values(), nodes_elsewhere.contexts.values(), strict=True):
        kept, kept_elsewhere = load_large(here.state), load_large(there.state)
        assert kept.keys() == kept_elsewhere.keys()
        for name, values in kept.items():
            np.testing.assert_array_equal(kept_elsewhere[name], values)


def test_small_surrogates_are_logged_in_kilobytes(
    run: Start, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "flwr.notice"):
        run(2, {"strategy": "ef-vfl", "embedding-size": 4, "epochs": 1, "window": 15})
    assert re.search(r"surrogates of .*: [1-9][0-9.]+ kB a party, [1-9][0-9.]+ kB at", caplog.text)
