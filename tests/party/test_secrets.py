"""A party's secret hides its first model, and its noise never repeats."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Context, RecordDict
from numpy.typing import NDArray

from tests.organisations import cut, kept_state, small
from tests.party.nodes import KEYS, Node, asked, begun, gradient, refused, restarted, train
from vfl_flower.label_holder import checkpoint
from vfl_flower.models.bottoms import build_bottom, seeded
from vfl_flower.party import session as between
from vfl_flower.party import state, state_file
from vfl_flower.party.party import Party
from vfl_flower.protocol.systems import resolve
from vfl_flower.transport import messages
from vfl_flower.transport.flower_internals import state_to_bytes
from vfl_flower.transport.stream import session
from vfl_flower.transport.stream.messages import SessionEnd, SessionOrder

# --- the first upload ---------------------------------------------------------------------------


def solved(embedding: NDArray[Any], **keys: Any) -> NDArray[Any]:
    """The features behind embeddings [R, 8], by the linear model that the public seed gives."""
    model = build_bottom(resolve({**KEYS, **keys}), 0, torch.zeros(2), 8)
    (layer,) = (each for each in model.modules() if isinstance(each, torch.nn.Linear))
    weight, bias = (each.detach().double().numpy() for each in (layer.weight, layer.bias))
    return np.linalg.lstsq(weight, (embedding - bias).T, rcond=None)[0].T


@pytest.mark.parametrize("permitted", [True, False])
def test_who_knows_the_seed_solves_a_first_upload_only_if_the_party_permits_it(
    node: Node, permitted: bool
) -> None:
    seed = {"noise-seed": 3} if permitted else {}
    explained = []
    for run in range(1, 16):  # a model of some secret is not far from that of the seed
        context = node({**seed, "columns": "f0,f1"}, run_id=run, **seed)
        asked(context, messages.DescribeOrder(outputs=1), messages.Description)
        sent = asked(context, train(1)).arrays["embedding"]
        party = between.live[0, 1].party
        assert party.pending
        rows = party.inputs.block.train[party.pending.rows.ids]
        features = np.asarray(rows, np.float64)
        found = solved(sent)
        if permitted:
            assert np.abs(found - features).max() < 1e-5
        explained.append(1 - np.square(features - found).sum() / np.square(features).sum())
    assert permitted or np.median(explained) < 0.5


def test_divided_data_and_permitted_seeds_give_the_models_that_the_seed_gives() -> None:
    config = resolve({"dataset": "breast-cancer", "bottom-model": "mlp"})
    first, second = (Party(config, 0, 2, 1).learner.model.state_dict() for _ in range(2))
    expected = build_bottom(config, 0, torch.zeros(15), 32).state_dict()
    for name, value in expected.items():
        assert torch.equal(first[name], value) and torch.equal(second[name], value)


def test_a_model_follows_from_every_word_of_its_secret() -> None:
    """Torch's own seed has 32 bits: the state of its generator is NumPy's MT19937."""
    config, drawn = resolve({}), []
    for secret in (b"", b"one", b"one", b"other"):
        with seeded(config, 0, secret):
            words = torch.get_rng_state().view(torch.int64)[3:627].numpy().astype(np.uint32)
            drawn.append(torch.empty(700, dtype=torch.int64).random_(0, 2**31).numpy())
        same = np.random.RandomState()
        same.set_state(("MT19937", words, 624, 0, 0.0))
        expected = same.randint(0, 2**32, 1400, np.uint32)[1::2]  # two words for each number
        np.testing.assert_array_equal(drawn[-1], expected & np.uint32(2**31 - 1))
    assert (drawn[1] == drawn[2]).all()
    assert not (drawn[1] == drawn[3]).any() and not (drawn[1] == drawn[0]).any()


# --- a state that is older than what was served -------------------------------------------------

PERTURBED = {"privacy": "perturbed-embedding", "embedding-noise": 3.0, "embedding-bound": 1.0}


def in_session(context: Context, orders: list[messages.Order], keep: bool = True) -> list[Any]:
    """Return a party's answers to orders that come over one stream."""
    replies: list[Any] = []

    def serve(app: Any, order: SessionOrder, context: Context, largest: Any) -> SessionEnd:
        replies.extend(asked(context, each) for each in orders)
        return SessionEnd(connected=True, served=len(orders), cause="")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "serve", serve)
        order = SessionOrder(address="x", certificate="", token="", keep=keep)
        asked(context, order, SessionEnd)
    return replies


def by_a_session(context: Context) -> messages.Arrays:
    """The SuperNode has lost its state too, and the last file is read."""
    restarted(context)
    return in_session(context, [train(3, gradient=gradient())])[0].arrays


def by_a_session_of_the_same_supernode(context: Context) -> messages.Arrays:
    """The process alone was killed, in whose SuperNode the state is that of its beginning."""
    restarted(context, state_to_bytes(context.state))
    return in_session(context, [train(3, gradient=gradient())])[0].arrays


def by_a_rejoin(context: Context) -> messages.Arrays:
    restarted(context)
    # By who says that less was served than has been.
    refused(context, messages.RejoinOrder(exchange=2, outputs=1), "was asked to repeat message")
    restarted(context)
    state_file.place(context, 1).write_bytes(state_file.place(context, 0).read_bytes())
    asked(context, messages.RejoinOrder(exchange=2, outputs=1), messages.Description)
    return asked(context, train(3)).arrays


def by_a_resume(context: Context) -> messages.Arrays:
    context.state, context.run_id = RecordDict(), 2
    between.live.clear()
    asked(context, messages.ResumeOrder(run="1", number=1), messages.Description)
    return asked(context, train(3, gradient=gradient())).arrays


def as_it_was(context: Context) -> messages.Arrays:
    """The same state, as if nothing had happened: another process may serve it at once."""
    return asked(context, train(3, gradient=gradient())).arrays


@pytest.mark.parametrize(
    "back",
    [*(by_a_session, by_a_session_of_the_same_supernode, by_a_rejoin, by_a_resume), as_it_was],
)
def test_noise_comes_never_twice_when_a_message_is_served_again(
    node: Node, back: Callable[[Context], messages.Arrays]
) -> None:
    context = begun(node({"columns": "f0,f1"}, **PERTURBED))
    asked(context, train(2, gradient=gradient()))
    state_file.save(context, 1)
    saved = copy.deepcopy(context.state)
    first = asked(context, train(3, gradient=gradient())).arrays["embedding"]
    context.state = saved  # of the message before
    between.live.clear()
    second = back(context)["embedding"]
    # Learning rate 0: nothing but the noise is another.
    assert (second - first).std() == pytest.approx(3 * 2**0.5, rel=0.2)


def test_a_window_that_awaits_feedback_keeps_the_secret_of_its_upload(node: Node) -> None:
    """Else it would be learnt from directions that nobody has gone along."""
    keys = {"strategy": "syn-zoo", "party-lr": 0.1, "optimizer": "sgd", "columns": "f0,f1"}
    context = begun(node({"columns": keys.pop("columns")}, **keys))
    feedback = {"difference": np.arange(1.0, 7, dtype=np.float32)}
    untouched, another = copy.deepcopy(context), copy.deepcopy(context)
    order = messages.EvaluateOrder(exchange=2, arrays=feedback)
    expected = asked(untouched, order).arrays["embedding"]
    state_file.save(context)
    restarted(context)
    (answer,) = in_session(context, [order])
    np.testing.assert_array_equal(answer.arrays["embedding"], expected)
    scalars = another.state["scalars"]  # the control: by another secret it learns something else
    assert isinstance(scalars, ConfigRecord)
    scalars["pending-secret"] = bytes(16)
    between.live.clear()
    other = asked(another, order).arrays["embedding"]
    assert np.abs(other - expected).max() > 1e-4


def test_a_permitted_seed_stays(node: Node) -> None:
    context = begun(node({"noise-seed": 5}, **PERTURBED, **{"noise-seed": 5}))
    state_file.save(context, 1)
    first = asked(context, train(2, gradient=gradient())).arrays["embedding"]
    restarted(context)
    second = in_session(context, [train(2, gradient=gradient())])[0].arrays["embedding"]
    np.testing.assert_array_equal(first, second)


def test_a_run_on_files_goes_on_with_the_models_that_secrets_have_drawn(tmp_path: Path) -> None:
    organisations = cut(tmp_path, small(80))
    keys = {"epochs": 2, "bottom-model": "mlp", "embedding-size": 4, "party-lr": 0.0}
    run = organisations.run("run", keys)
    config = checkpoint.load(run.folder).config
    for party in range(2):
        kept = state_file.read(kept_state(run.folder, party))
        model = state.load_arrays(kept, "model")
        of_seed = build_bottom(config, party, torch.zeros(2), 4).state_dict()
        for name, parameters in model.items():
            assert not np.allclose(parameters, of_seed[name])
    assert len(organisations.predict("run")) == 64


@pytest.mark.parametrize("own", [{"min-rows": 1000}, {"align": "ids"}])
def test_a_rule_about_rows_holds_for_an_alignment_of_before(node: Node, own: Any) -> None:
    context = node()
    asked(context, messages.DescribeOrder(outputs=1), messages.Description)
    later = node(own)
    later.state = context.state
    between.live.clear()
    refused(later, train(1), r"min-rows|aligns only by .ids.")
