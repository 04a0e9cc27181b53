"""A label holder that would learn more than sums, and parties that fail: each with a control.

The label holder here sends any messages, and adds up the answers. The tests compare its sums with
secrets that they read from the parties' own processes.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from tests.conftest import Start, nightly
from tests.party.nodes import asked, refused
from tests.secure import CANCER, Parties, gradient, total
from tests.strategy.test_checkpoint import assert_equal_runs, resumed
from vfl_flower import client_app
from vfl_flower.config.errors import ConfigError, OutOfStepError, SumError, VflError
from vfl_flower.config.options import DataConfig
from vfl_flower.launch.engines import run_local
from vfl_flower.party import session as between
from vfl_flower.party import state_file
from vfl_flower.protocol.aggregation import keys as sum_keys
from vfl_flower.protocol.aggregation import masks, secure
from vfl_flower.protocol.aggregation import masks as masking
from vfl_flower.protocol.aggregation.masks import Offer, check_tags, place_of
from vfl_flower.transport.early_messages import Agreed, AgreeOrder, KeyMade, KeyOrder, SetOrder
from vfl_flower.transport.flower_internals import begin_task, state_from_bytes, state_to_bytes
from vfl_flower.transport.messages import (
    Arrays,
    CheckpointOrder,
    DescribeOrder,
    Description,
    EmbedOrder,
    EvaluateOrder,
    GrowOrder,
    Predicted,
    PredictOrder,
    RejoinOrder,
    RestoreOrder,
    ResumeOrder,
    TrainOrder,
    Upload,
)
from vfl_flower.transport.stream.messages import SessionOrder
from vfl_flower.transport.wire import read_reply, to_reply

NO_KEYS = "has not agreed with the other parties on keys"


@pytest.fixture(autouse=True)
def new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    begin_task()
    between.live.clear()


@pytest.fixture
def _keys_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parties make keys as often as they are asked: what else defends them is to do without."""
    monkeypatch.setattr(sum_keys, "refuse_second", lambda context: None)


@pytest.fixture
def parties(tmp_path: Path) -> Parties:
    """Three, who have agreed."""
    return Parties(tmp_path).ready()


def test_the_sum_is_that_of_the_embeddings(parties: Parties) -> None:
    uploads = parties.evaluated()
    expected = sum(parties.embeddings(party) for party in range(3))
    np.testing.assert_allclose(total(uploads), expected, atol=2e-5)
    for party in range(3):  # and of one, or of two, nothing
        seen = uploads[party]["embedding"][:-4].astype(np.float64)
        assert abs(np.corrcoef(seen, parties.embeddings(party).ravel())[0, 1]) < 0.3
    with pytest.raises(SumError):
        total([uploads[0], uploads[1]])


def test_who_has_all_other_parties_has_the_last(parties: Parties) -> None:
    """No sum hides this: a party that colludes with the label holder gives its embeddings away."""
    uploads = parties.evaluated()
    others = parties.embeddings(1) + parties.embeddings(2)
    np.testing.assert_allclose(total(uploads) - others, parties.embeddings(0), atol=2e-5)


# --- keys ---------------------------------------------------------------------------------------


def in_the_middle(parties: Parties, victim: int) -> Arrays:
    """Keys as the victim is to be sent them, where the label holder has put its own for others."""
    offers = parties.offers()
    for other in {0, 1, 2} - {victim}:
        private = X25519PrivateKey.generate()
        lasting = Ed25519PrivateKey.generate()
        forged = Offer.of(private, lasting, place_of(parties.nodes[0].run_id, other, 3)).arrays()
        for name in offers:
            offers[name][other] = forged[name][0]
    return offers


def public(parties: Parties, party: int) -> str:
    folder = Path(str(parties.nodes[party].node_config["states"]))
    return sum_keys.public_half(sum_keys.lasting_key(folder))


@pytest.mark.usefixtures("_keys_anew")
def test_a_key_that_another_has_signed_is_refused_once_a_party_was_seen(parties: Parties) -> None:
    order = AgreeOrder(arrays=in_the_middle(parties, 0))
    refused(parties.nodes[0], order, r"Party 0 refuses the key of party 1, .*sums-peers-of-0")


def test_at_first_sight_it_is_taken_and_shown(tmp_path: Path, own_log: list[str]) -> None:
    """The control: so the first keys are to be compared, or named."""
    parties = Parties(tmp_path)
    parties.begin()
    sent = in_the_middle(parties, 0)
    asked(parties.nodes[0], AgreeOrder(arrays=sent), Agreed)
    shown, log = sent["identities"][1].tobytes().hex(), "\n".join(own_log)
    assert f"Party 1's key, seen for the first time, is {shown}" in log
    assert f"Party 0's key for masked sums is {public(parties, 0)}" in log


@pytest.mark.parametrize("named", ["", "first-seen", "keys"])
def test_keys_of_puppets_unmask_a_party_that_trusts_the_first_keys(
    tmp_path: Path, named: str
) -> None:
    """The label holder passes two keys that it made to party 0, as the others'.

    The sum without these two embeddings is party 0's. With ``first-seen`` that is the control.
    """
    puppets = Parties(tmp_path / "puppets")
    others = Parties(tmp_path / "others")
    keys = " ".join(f"{party}:{public(others, party)}" for party in (1, 2))
    own = {"aggregation": "secure"}
    own |= {"sum-peers": keys if named == "keys" else named} if named else {}
    parties = Parties(tmp_path / "parties", own=own)
    parties.nodes[1:] = puppets.nodes[1:]
    if not named:
        session = SessionOrder(address="x", certificate="", token="", keep=False)
        for order in (SetOrder(), DescribeOrder(outputs=1), KeyOrder(), session):
            refused(parties.nodes[0], order, r"refuses every order: .* sum-peers is missing\. Gi")
        assert not list((tmp_path / "parties").glob("**/*"))  # it has made no key
        return
    parties.begin()
    if named == "keys":
        with pytest.raises(VflError, match="its sum-peers gives another key"):
            parties.agree()
        return
    parties.agree()
    left = total(parties.evaluated()) - parties.embeddings(1) - parties.embeddings(2)
    assert np.abs(left - parties.embeddings(0)).max() < 1e-5


@pytest.mark.usefixtures("_keys_anew")
def test_a_party_takes_the_keys_that_its_node_configuration_names(tmp_path: Path) -> None:
    first = Parties(tmp_path).ready()
    named = " ".join(f"{party}:{public(first, party)}" for party in range(3))
    for file in tmp_path.rglob("sums-peers-of-*"):
        file.unlink()
    parties = Parties(tmp_path, own={"sum-peers": named}, run=2).ready()
    order = AgreeOrder(arrays=in_the_middle(parties, 0))
    refused(parties.nodes[0], order, "its sum-peers gives another key")
    assert not list(tmp_path.rglob("sums-peers-of-*"))
    for run, peers, said in (
        (3, named.split()[0], "refuses party 1: its sum-peers has no key of that party"),
        (4, "1=abc", "Name the parties with their keys, as in"),
    ):
        other = Parties(tmp_path, own={"sum-peers": peers}, run=run)
        other.begin()
        refused(other.nodes[0], AgreeOrder(arrays=other.offers()), said)


@pytest.mark.usefixtures("_keys_anew")
def test_keys_of_another_run_place_or_signature_are_refused(parties: Parties) -> None:
    then = parties.offers()
    parties.nodes = [
        Context(2, each.node_id, each.node_config, type(each.state)(), each.run_config)
        for each in parties.nodes
    ]
    parties.begin()
    now = parties.offers()

    def sent(change: Callable[[Arrays], None]) -> None:
        arrays = {name: array.copy() for name, array in now.items()}
        change(arrays)
        order = AgreeOrder(arrays=arrays)
        refused(parties.nodes[0], order, "has not signed for this run|another key as its own")
        asked(parties.nodes[0], KeyOrder(), KeyMade)  # whoever is refused begins anew

    def replayed(arrays: Arrays) -> None:
        for name in arrays:
            arrays[name][1] = then[name][1]

    def swapped(arrays: Arrays) -> None:
        for name in arrays:
            arrays[name][[1, 2]] = arrays[name][[2, 1]]

    def forged(arrays: Arrays) -> None:
        arrays["keys"][1] = then["keys"][1]

    def reflected(arrays: Arrays) -> None:
        for name in arrays:
            arrays[name][1] = arrays[name][0]

    for change in (replayed, swapped, forged, reflected):
        sent(change)


@pytest.mark.usefixtures("_keys_anew")
def test_an_invalid_key_and_offers_of_other_shapes_are_refused(parties: Parties) -> None:
    offers = parties.offers()
    short = {**offers, "keys": offers["keys"][:2]}
    refused(parties.nodes[0], AgreeOrder(arrays=short), "'keys' is uint8 of shape")
    private = X25519PrivateKey.generate()
    lasting = Ed25519PrivateKey.generate()
    own = Offer.of(private, lasting, b"")
    with pytest.raises(VflError, match="another party's key, which is not a valid key"):
        masking.agreed(private, 0, [own, Offer(bytes(32), own.identity, b"")], [])


# --- what is not told alike ---------------------------------------------------------------------


def test_feedback_to_one_party_alone_tells_nothing_of_it(parties: Parties) -> None:
    """By the difference of two sums a label holder would see how its gradient moved one party."""
    total(parties.evaluated())
    total(parties.trained())
    uploads = parties.evaluated([gradient(1.0), gradient(0.0), gradient(0.0)])
    with pytest.raises(SumError):
        total(uploads)
    with pytest.raises(SumError):  # nor by any later one
        total(parties.evaluated())


def test_without_the_transcript_it_would(parties: Parties, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the change of one party's embeddings, to the last digit."""
    monkeypatch.setattr(masking, "told", lambda order: str(order.exchange).encode())
    first, embeddings = total(parties.evaluated()), parties.embeddings(0)
    total(parties.trained())
    change = total(parties.evaluated([gradient(1.0), gradient(0.0), gradient(0.0)])) - first
    np.testing.assert_allclose(change, parties.embeddings(0) - embeddings, atol=2e-5)
    assert np.abs(change).max() > 0.01


@pytest.mark.parametrize(
    "orders",
    [
        [TrainOrder(exchange=1, epoch=0, first=n, steps=1, coordinated=True) for n in (0, 0, 1)],
        [EvaluateOrder(exchange=1, number=n) for n in (0, 0, 1)],
    ],
)
def test_other_rows_or_evaluations_make_no_sum(parties: Parties, orders: list[Any]) -> None:
    with pytest.raises(SumError):
        total(parties.ask(orders))


@pytest.mark.parametrize(
    "keys", [{"seed": 1}, {"batch-size": 31}, {"party-lr": 0.0}, {"test-fraction": 0.21}]
)
def test_who_has_another_configuration_has_no_keys_in_common(
    tmp_path: Path, keys: dict[str, Any]
) -> None:
    """Such as by another order of rows, by which a sum would be of other rows at each party."""
    parties = Parties(tmp_path, keys=[{}, {}, keys])
    parties.begin()
    with pytest.raises(ConfigError, match="Parties 0 and 2 have no key for masked sums in common"):
        parties.agree()


@pytest.mark.usefixtures("_keys_anew")
def test_so_has_who_has_other_rows(parties: Parties) -> None:
    """Each sum is of one person: others' ids, or the same in another order, make none."""
    one = between.live[2, 3].party
    object.__setattr__(one.inputs.block, "ids_digest", "of another order")
    with pytest.raises(ConfigError, match="Parties 0 and 2 have no key"):
        parties.agree()


@pytest.mark.usefixtures("_keys_anew")
@pytest.mark.parametrize("how", ["begun anew", "of then"])
def test_nor_is_a_model_that_is_another_since_in_a_sum(parties: Parties, how: str) -> None:
    """One party's new sum, less its old sum, would show that party's change."""
    parties.exchange += 1
    parties.ask([CheckpointOrder(exchange=1, number=1)] * 3)
    total(parties.evaluated())
    order = DescribeOrder(outputs=1) if how == "begun anew" else ResumeOrder(run="1", number=1)
    served = asked(parties.nodes[0], order, Description).exchange
    refused(parties.nodes[0], EvaluateOrder(exchange=served + 1), NO_KEYS)
    with pytest.raises(ConfigError, match="Parties 0 and 1 have no key"):
        parties.agree()


def test_models_of_another_checkpoint_neither_go_on_nor_predict(tmp_path: Path) -> None:
    parties = Parties(tmp_path).ready()
    total(parties.trained())
    parties.exchange += 1
    exchange = parties.exchange
    parties.ask([CheckpointOrder(exchange=exchange, number=1, arrays=gradient(1.0))] * 3)
    total(parties.trained(first=1))
    parties.exchange += 1
    one, none = gradient(1.0), gradient(0.0)
    later = [CheckpointOrder(exchange=exchange + 2, number=2, arrays=a) for a in (one, none, none)]
    parties.ask(later)

    def later_run(number: int) -> Parties:
        begin_task()
        return Parties(tmp_path, run=number)

    def resume(run: int, numbers: tuple[int, ...]) -> Parties:
        again = later_run(run)
        for node, number in zip(again.nodes, numbers, strict=True):
            asked(node, ResumeOrder(run="1", number=number), Description)
        again.agree()
        again.exchange = exchange
        return again

    total(resume(2, (1, 1, 1)).evaluated())  # all from there: as it should be
    for run, numbers in enumerate([(1, 1, 2), (2, 2, 2)], 3):  # the last of each differs
        with pytest.raises(ConfigError, match="have no key"):
            resume(run, numbers)

    def predicted(run: int, numbers: tuple[int, ...]) -> list[Arrays]:
        again = later_run(run)
        offers = again.offers()
        orders = [PredictOrder(run="1", number=number, arrays=offers) for number in numbers]
        told = zip(again.nodes, orders, strict=True)
        answers = [asked(node, order, Predicted).arrays for node, order in told]
        check_tags(answers)
        return answers

    assert total(predicted(7, (1, 1, 1))).any()
    for run, numbers in enumerate([(1, 2, 1), (2, 2, 2)], 8):
        with pytest.raises(ConfigError, match="have no key"):
            predicted(run, numbers)


# --- what would come twice ----------------------------------------------------------------------


def test_a_message_that_comes_twice_is_not_served_twice(parties: Parties) -> None:
    uploads = parties.evaluated()
    for exchange in (parties.exchange, parties.exchange - 1, parties.exchange + 2):
        with pytest.raises(OutOfStepError):
            asked(parties.nodes[0], EvaluateOrder(exchange=exchange))
    assert total(uploads).any()


def test_the_same_rows_are_masked_by_other_streams(parties: Parties) -> None:
    first, second = parties.evaluated(), parties.evaluated()
    np.testing.assert_array_equal(total(first), total(second))
    for one, other in zip(first, second, strict=True):
        apart = (one["embedding"] - other["embedding"]).view(np.uint8)
        assert abs(np.unpackbits(apart).mean() - 0.5) < 0.03


def test_an_older_state_masks_nothing(parties: Parties) -> None:
    """As when a process, or its SuperNode, was killed: its streams may have served already."""
    total(parties.evaluated())
    parties.moved()
    older = state_to_bytes(parties.nodes[0].state)
    total(parties.evaluated())
    parties.nodes[0].state = state_from_bytes(older)
    between.live.clear()
    order = TrainOrder(exchange=2, epoch=0, first=0, steps=1, coordinated=True)
    refused(parties.nodes[0], order, "older state of its masked sums, and would use masks twice")


def test_who_forgot_how_far_it_was_would_mask_twice_alike(
    parties: Parties, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: where what is random in an upload has changed, its difference is bare."""
    monkeypatch.setattr(sum_keys, "_note", lambda context, offer, number: None)
    parties.moved()
    older = state_to_bytes(parties.nodes[0].state)
    uploads = []
    for shift in (0.0, 1.0):
        parties.nodes[0].state = state_from_bytes(older)
        between.live.clear()
        one = between.resume(parties.nodes[0]).party
        for parameter in one.learner.model.parameters():
            parameter.data += shift
        sent = asked(parties.nodes[0], EvaluateOrder(exchange=1)).arrays["embedding"]
        uploads.append((sent, parties.embeddings(0)))
    (first, h), (second, shifted) = uploads
    found = (second - first)[:-4] / 2.0 ** masks.places(3)
    np.testing.assert_allclose(found, (shifted - h).ravel(), atol=1e-5)


def test_a_state_that_moves_from_process_to_process_goes_on(parties: Parties) -> None:
    """As on nodes, where each message may be another process."""
    for _ in range(3):
        parties.moved()
        total(parties.evaluated())
    parties.moved()
    total(parties.trained())
    parties.moved()
    total(parties.trained([gradient(1.0)] * 3, first=1))


def test_a_key_serves_one_agreement(tmp_path: Path) -> None:
    parties = Parties(tmp_path)
    parties.begin()
    offers = parties.offers()
    parties.moved()
    before = [state_to_bytes(node.state) for node in parties.nodes]
    parties.agree(offers)
    refused(parties.nodes[0], AgreeOrder(arrays=offers), "before it made its key")
    parties.nodes[0].state = state_from_bytes(before[0])
    between.live.clear()
    refused(parties.nodes[0], AgreeOrder(arrays=offers), "older state")


# --- what one party would do alone --------------------------------------------------------------


@pytest.mark.parametrize(
    "order",
    [
        EmbedOrder(exchange=1, arrays={"ids": np.zeros(1, np.int32)}),
        RejoinOrder(exchange=5, outputs=1),
        TrainOrder(exchange=1, epoch=0, first=0, steps=1, coordinated=False),
    ],
)
def test_a_single_row_or_an_order_to_one_party_is_refused(parties: Parties, order: Any) -> None:
    refused(parties.nodes[0], order, "does not act without the other parties")


def test_nothing_is_uploaded_before_there_are_keys(tmp_path: Path) -> None:
    parties = Parties(tmp_path)
    parties.begin()
    refused(parties.nodes[0], EvaluateOrder(exchange=1), NO_KEYS)
    lonely = Parties(tmp_path / "lonely", count=1)
    lonely.begin()
    with pytest.raises(VflError, match="is the only party"):
        lonely.agree()


def test_a_model_of_an_earlier_run_is_not_begun_by(parties: Parties) -> None:
    config = '{"combine": "mean", "aggregation": "secure", "dataset": "breast-cancer"}'
    order = GrowOrder(outputs=1, run="1", number=0, parties=3, config=config)
    refused(parties.nodes[0], order, "asked to begin aggregation = 'secure' with an earlier model")


def test_a_party_insists_on_masks_by_its_own_rule(tmp_path: Path) -> None:
    own = {"aggregation": "secure", "sum-peers": "first-seen"}
    plain = Parties(tmp_path, own=own, keys=[{"aggregation": "plain"}] * 3)
    with pytest.raises(VflError, match="Party 0 refuses aggregation = 'plain': its rule is"):
        plain.begin()
    secure = Parties(tmp_path, own=own, run=2).ready()
    assert total(secure.evaluated()).any()


# --- parties that fail --------------------------------------------------------------------------

SHORT: dict[str, Any] = {**CANCER, "epochs": 2, "checkpoint-every": 12, "noise-seed": 0}


class Failing(ClientApp):
    """Fails at an upload of party 1."""

    def __init__(self, at: int, how: Callable[[Upload, Message, Context], Message]) -> None:
        super().__init__()
        self.at, self.how, self.uploads = at, how, 0

    def __call__(self, message: Message, context: Context) -> Message:
        before = state_to_bytes(context.state)
        reply: Message = client_app.app(message, context)
        trains = message.metadata.message_type == TrainOrder.kind
        if trains and context.node_config["partition-id"] == 1:
            self.uploads += 1
            if self.uploads == self.at:
                if self.how is lost:
                    context.state = state_from_bytes(before)
                return self.how(read_reply(reply, Upload), message, context)
        return reply


def with_arrays(change: Callable[[Any], Any]) -> Callable[[Upload, Message, Context], Message]:
    def how(upload: Upload, message: Message, context: Context) -> Message:
        arrays = {name: change(array) for name, array in upload.arrays.items()}
        return to_reply(Upload(party=1, exchange=upload.exchange, arrays=arrays), message)

    return how


def garbage(array: Any) -> Any:
    drawn = np.random.default_rng(0).integers(0, 2**32, array.shape)
    return drawn.astype(np.uint32).view(np.int32)


def lost(upload: Upload, message: Message, context: Context) -> Message:
    """Its process dies after it has served a message, and another has the state of before."""
    between.live.clear()
    return client_app.app(message, context)


def out_of_step(upload: Upload, message: Message, context: Context) -> Message:
    between.live.clear()
    context.state.clear()
    return client_app.app(message, context)


@pytest.mark.parametrize(
    ("how", "sentence"),
    [
        (with_arrays(garbage), "masked embeddings cannot be added"),
        nightly(with_arrays(np.float32), "'embedding' is float32 of shape .*, not int32"),
        (out_of_step, "has no state of this run. Resume the run: all parties then go back"),
    ],
)
def test_a_party_that_fails_ends_the_run_and_all_go_on_from_a_checkpoint(
    tmp_path: Path, how: Any, sentence: str
) -> None:
    """The step is asked anew from all, and no sum lacks a party; it ends as if nothing had been."""
    whole = run_local(3, {**SHORT, "out": str(tmp_path / "whole")})
    folder = tmp_path / "failed"
    with pytest.raises(VflError, match=sentence):
        run_local(3, {**SHORT, "out": str(folder)}, Failing(20, how))
    again = resumed(folder)
    assert_equal_runs(again, whole)


@pytest.mark.nightly
def test_a_party_that_is_asked_again_is_served_by_all(tmp_path: Path, run: Start) -> None:
    """A party whose answer is lost keeps its earlier state, in a simulation with one owner."""
    whole = run_local(3, {**SHORT, "out": str(tmp_path / "whole")})
    assert_equal_runs(run_local(3, {**SHORT, "out": str(tmp_path / "b")}, Failing(20, lost)), whole)


def test_restoring_is_told_to_all(parties: Parties) -> None:
    parties.ask([EvaluateOrder(exchange=1, number=n) for n in (1, 1, 1)])
    parties.ask([RestoreOrder(exchange=2, number=n) for n in (1, 1, 1)])
    parties.exchange = 2
    assert total(parties.evaluated()).any()


# --- what a difference of two sums would tell ----------------------------------------------------

# Real feedback to party 0 and none to the others: the next sum less the last is its own change.
ONE_SIDED = [gradient(scale) for scale in (1.0, 0.0, 0.0)]


def change_of_party_0(parties: Parties, before: list[Any], sums_of: list[Any]) -> bool:
    """Whether two sums, one after the other, differ by what party 0 alone has changed."""
    moved = [parties.embeddings(party) - each for party, each in enumerate(before)]
    own = float(np.abs(moved[0]).max())
    assert own > 0.1 and max(float(np.abs(each).max()) for each in moved[1:]) < 1e-6
    return bool(np.allclose(sums_of[1] - sums_of[0], moved[0], atol=1e-4 * own + 1e-4))


def seen(parties: Parties) -> tuple[list[Any], Any]:
    """The parties' embeddings, and their sum, as one evaluation gives it."""
    first = total(parties.evaluated())
    return [parties.embeddings(party) for party in range(3)], first


def told_apart(parties: Parties, before: list[Any], first: Any, agree: bool = True) -> bool:
    """Whether the label holder learns the change of party 0 by another evaluation."""
    try:
        if agree:
            parties.agree()
        second = total(parties.evaluated())
    except VflError:  # also a sum in which masks are left
        return False
    return change_of_party_0(parties, before, [first, second])


def no_defence(monkeypatch: pytest.MonkeyPatch, *places: str) -> None:
    """Take these defences away, for a control."""
    for place in places:
        monkeypatch.setattr(place, lambda *given: None)


@pytest.mark.one_by_day
@pytest.mark.parametrize("moved", [False, True], ids=["", "moved"])
@pytest.mark.parametrize("defence", ["both", "lineage", "keys", "none"])
def test_feedback_in_a_message_that_fails_parts_a_party_from_the_others(
    parties: Parties, moved: bool, defence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if defence in ("lineage", "none"):
        no_defence(monkeypatch, "vfl_flower.protocol.aggregation.keys.refuse_second")
    if defence in ("keys", "none"):  # as if its model had come about as it was left before
        monkeypatch.setattr(secure, "token_bytes", bytes)
    before, first = seen(parties)
    total(parties.trained())
    for node, feedback in zip(parties.nodes, ONE_SIDED, strict=True):
        arrays = {**feedback, "junk": np.zeros(1, np.float32)}
        order = EvaluateOrder(exchange=parties.exchange + 1, arrays=arrays)
        refused(node, order, "junk")
    if moved:
        parties.moved()
    assert told_apart(parties, before, first) == (defence == "none")


def checkpointed(parties: Parties, number: int, feedback: Arrays | None = None) -> None:
    parties.exchange += 1
    arrays = gradient(0.0) if feedback is None else feedback
    parties.ask([CheckpointOrder(exchange=parties.exchange, number=number, arrays=arrays)] * 3)


def predicted(parties: Parties, number: int) -> None:
    """A prediction of the test rows by all, by a checkpoint of the first run."""
    offers = parties.offers()
    order = PredictOrder(run="1", number=number, arrays=offers)
    sent = [asked(node, order, Predicted).arrays for node in parties.nodes]
    check_tags(sent)
    total(sent)


@pytest.mark.usefixtures("_keys_anew")
@pytest.mark.parametrize("defended", [True, False])
def test_keys_of_a_prediction_serve_nothing_else(
    parties: Parties, defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    total(parties.trained())
    checkpointed(parties, 1)
    before, first = seen(parties)
    total(parties.trained(first=1))
    parties.exchange += 1
    parties.ask([EvaluateOrder(exchange=parties.exchange, arrays=each) for each in ONE_SIDED])
    if not defended:
        no_defence(monkeypatch, "vfl_flower.protocol.aggregation.keys.forget")
    predicted(parties, 1)
    assert told_apart(parties, before, first, agree=False) is not defended


@pytest.mark.parametrize("defended", [True, False])
def test_nor_after_parties_have_gone_on_from_different_checkpoints(
    parties: Parties, defended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    total(parties.trained())
    checkpointed(parties, 1, gradient(1.0))
    before, first = seen(parties)
    total(parties.trained(first=1))
    parties.exchange += 1
    order = CheckpointOrder(exchange=parties.exchange, number=2, arrays=gradient(1.0))
    parties.ask([order] * 3)
    begin_task()
    later = Parties(tmp_path, run=2)
    at = [
        asked(node, ResumeOrder(run="1", number=number), Description).exchange
        for node, number in zip(later.nodes, (2, 1, 1), strict=True)
    ]
    if not defended:
        no_defence(monkeypatch, "vfl_flower.protocol.aggregation.keys.forget")
    predicted(later, 1)
    orders = [EvaluateOrder(exchange=each + 1) for each in at]
    try:
        second = total(later.ask(orders))
    except VflError:
        assert defended
    else:
        assert not defended and change_of_party_0(later, before, [first, second])


@pytest.mark.one_by_day
@pytest.mark.usefixtures("_keys_anew")
@pytest.mark.parametrize("defended", [True, False])
@pytest.mark.parametrize("way", ["gone on", "begun anew"])
def test_copies_of_models_do_not_outlive_what_they_are_of(
    parties: Parties, way: str, defended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not defended:
        no_defence(monkeypatch, "vfl_flower.party.state.forget_copies")
    total(parties.trained())
    checkpointed(parties, 1)
    at = parties.exchange
    total(parties.trained(first=1))
    parties.exchange += 1
    here = parties.exchange
    parties.ask([EvaluateOrder(exchange=here, number=7, arrays=each) for each in ONE_SIDED])
    if way == "gone on":
        for node in parties.nodes:
            asked(node, ResumeOrder(run="1", number=1), Description)
        parties.exchange = at
    else:
        parties.begin()
        parties.exchange = 0
    parties.agree()
    before, first = seen(parties)
    parties.exchange += 1
    back = [RestoreOrder(exchange=parties.exchange, number=7)] * 3
    if defended:
        with pytest.raises(VflError, match="has no copy of the model at evaluation 7"):
            parties.ask(back)
        return
    parties.ask(back)
    assert change_of_party_0(parties, before, [first, total(parties.evaluated())])


@pytest.mark.parametrize("defended", [True, False])
def test_who_begins_anew_alone_does_not_change_what_all_go_back_to(
    defended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If parties have their own files, each draws its initial model in secret."""
    monkeypatch.setattr(DataConfig, "apart", property(lambda self: True))
    parties = Parties(tmp_path, keys=[{"checkpoint-every": 12}] * 3)
    parties.begin()
    if not defended:  # they keep their first state at the beginning, as without masks
        monkeypatch.setattr(between, "is_new", lambda context: False)
        for node in parties.nodes:
            state_file.save(node, 0)
    parties.agree()
    before, first = seen(parties)
    asked(parties.nodes[0], DescribeOrder(outputs=1), Description)
    if not defended:
        state_file.save(parties.nodes[0], 0)
    for node in parties.nodes:
        asked(node, ResumeOrder(run="1", number=0), Description)
    parties.exchange = 0
    if not defended:
        assert told_apart(parties, before, first)
        return
    parties.agree()
    np.testing.assert_allclose(total(parties.evaluated()), first, atol=1e-4)  # all as they were


@pytest.mark.usefixtures("_keys_anew")
def test_so_has_who_begins_by_another_model(parties: Parties, tmp_path: Path) -> None:
    """One party's new sum, less its old sum, would show that party's change."""
    total(parties.evaluated())
    asked(parties.nodes[0], DescribeOrder(outputs=1), Description)
    with pytest.raises(ConfigError, match="Parties 0 and 1 have no key"):
        parties.agree()
