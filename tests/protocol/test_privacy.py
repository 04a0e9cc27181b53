"""Noise on embeddings, and what it is said to be worth."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from strategies.vertical import strategy_of
from tests.conftest import ALL_ROWS, MANY, Start, trained
from tests.protocol.test_accountants import delta_of_gaussian
from tests.releases import epsilon, log_of
from vfl_flower import client_app
from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.models.bottoms import build_bottom
from vfl_flower.models.optimizers import build_optimizer
from vfl_flower.party.party import Party
from vfl_flower.protocol.estimators.first_order import descend
from vfl_flower.protocol.privacy.embeddings import EmbeddingAccountant, epsilon_of_theorem_6
from vfl_flower.protocol.privacy.noise import Perturbation
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.systems import resolve, sized
from vfl_flower.transport.local import LocalGrid
from vfl_flower.transport.messages import (
    DescribeOrder,
    EmbedOrder,
    EvaluateOrder,
    RejoinOrder,
    TrainOrder,
    Upload,
)

PRIVATE = {**ALL_ROWS, "privacy": "perturbed-embedding", "noise-seed": 3}
SECRET = {**ALL_ROWS, "privacy": "perturbed-embedding"}
LENGTHS = (5, 5, 3)
ROWS = sum(LENGTHS)
GRID = 3e-4  # of the bound: what noise is added on
LAST = 1  # an mlp's second layer


def config_of(**keys: Any) -> RunConfig:
    return sized(
        resolve({**PRIVATE, **{key.replace("_", "-"): value for key, value in keys.items()}}), MANY
    )


def noise_of(config: RunConfig, lengths: tuple[int, ...] = LENGTHS, **changed: Any) -> Perturbation:
    return replace(Perturbation(config.privacy, b"secret", 7, lengths, LAST), **changed)


def drawn(perturb: Perturbation, layer: int = LAST, width: int = 4) -> Tensor:
    """The noise itself: what is added to zeros."""
    return perturb(layer, torch.zeros(sum(perturb.lengths), width))


# --- the noise ----------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, LAST])
def test_noise_is_repeated_for_the_whole_window_and_for_single_steps(layer: int) -> None:
    config = config_of(inner_noise=0.5)
    whole = drawn(noise_of(config), layer)
    assert torch.equal(whole, drawn(noise_of(config), layer))
    for step, rows in enumerate(whole.split(LENGTHS)):
        assert torch.equal(drawn(noise_of(config).of_step(step), layer), rows)


def test_noise_differs_between_steps_layers_exchanges_and_secrets() -> None:
    config = config_of(inner_noise=1 / math.sqrt(3), embedding_noise=1.0)
    both = (5, 5)
    changes: list[dict[str, Any]] = [{"exchange": 8}, {"secret": b"other"}]
    other = [
        *drawn(noise_of(config, both)).split(both),
        drawn(noise_of(config, (5,)), layer=0),
        drawn(noise_of(config, (5,)).of_pair()),
        *(drawn(noise_of(config, (5,), **each)) for each in changes),
    ]
    for one in range(len(other)):
        for two in range(one):
            assert not torch.isclose(other[one], other[two]).any()


def test_noise_has_more_than_32_bits_of_seed() -> None:
    # These two exchanges' seeds agree in the lowest 32 bits, all that torch's generator looks at.
    config = config_of()
    one, other = (Perturbation(config.privacy, b"secret", e, (1,), 1) for e in (46843, 126272))
    assert not torch.equal(drawn(one), drawn(other))


@pytest.mark.parametrize("deviation", [0.3, 2.0])
def test_noise_of_the_last_layer_is_gaussian_with_deviation_c(deviation: float) -> None:
    count = 400_000
    noise = drawn(noise_of(config_of(embedding_noise=deviation), (count // 10,)), width=10)
    noise /= deviation
    assert noise.mean().abs() < 5 / math.sqrt(count)
    assert (noise.square().mean() - 1).abs() < 5 * math.sqrt(2 / count)
    assert (noise.pow(4).mean() - 3).abs() < 5 * math.sqrt(96 / count)
    within = (noise.abs() < 1).float().mean()
    assert (within - math.erf(1 / math.sqrt(2))).abs() < 2.5 / math.sqrt(count)


@pytest.mark.parametrize("deviation", [0.3, 2.0])
def test_noise_of_inner_layers_is_uniform_with_its_deviation(deviation: float) -> None:
    count = 400_000
    noise = drawn(noise_of(config_of(inner_noise=deviation), (count // 10,)), 0, 10) / deviation
    assert noise.abs().max() <= math.sqrt(3) * (1 + 1e-6)
    assert noise.mean().abs() < 5 / math.sqrt(count)
    assert (noise.square().mean() - 1).abs() < 5 * math.sqrt(0.8 / count)
    assert ((noise.abs() < 1).float().mean() - 1 / math.sqrt(3)).abs() < 2.5 / math.sqrt(count)
    assert torch.equal(noise_of(config_of())(0, z := torch.randn(ROWS, 4)), z)  # without it


@pytest.mark.parametrize("bound", [0.5, 3.0])
def test_embedding_is_clipped_before_its_noise(bound: float) -> None:
    perturb = noise_of(config_of(embedding_bound=bound, embedding_noise=0.1))
    z = torch.cat([10 * torch.randn(6, 4), 0.01 * torch.randn(6, 4), torch.zeros(1, 4)])
    clipped = perturb(LAST, z) - drawn(perturb)
    norms = z.norm(dim=1)
    assert clipped.norm(dim=1).max() <= bound * (1 + GRID)
    torch.testing.assert_close(
        clipped[norms <= bound], z[norms <= bound], atol=GRID * bound, rtol=0
    )
    long = norms > bound
    expected = bound * z[long] / norms[long, None]
    torch.testing.assert_close(clipped[long], expected, atol=GRID * bound, rtol=0)


# --- in a party's steps -------------------------------------------------------------------------


def by_hand(model: BottomModel, x: Tensor, inner: Tensor, outer: Tensor, bound: float) -> Tensor:
    """The perturbed mlp, its noise given as constants."""
    first, last = model.layers
    z = last(torch.relu(first(x) + inner))
    clipped = z * (bound / z.norm(dim=1, keepdim=True)).clamp_max(1.0)
    return torch.tanh(clipped + outer)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_feedback_pass_repeats_the_noise_of_the_upload(optimizer: str) -> None:
    keys = {"bottom_model": "mlp", "embedding_activation": "tanh", "bottom_hidden": 6}
    config = config_of(optimizer=optimizer, inner_noise=0.5, **keys)
    perturb = noise_of(config)
    inner, outer = drawn(perturb, 0, 6), drawn(perturb, LAST, 4)
    model = build_bottom(config, 0, torch.zeros(5), 4)
    expected = copy.deepcopy(model)
    x, gradient_rows = torch.randn(ROWS, 5), torch.randn(ROWS, 4)

    h = by_hand(model, x, inner, outer, 1.0).detach()
    torch.testing.assert_close(model(x, perturb), h, atol=GRID, rtol=0)
    ours = build_optimizer(config, model, 0.1)
    descend(model, ours, x, None, gradient_rows, LENGTHS, config.training, perturb)
    theirs, uploaded_with = build_optimizer(config, expected, 0.1), copy.deepcopy(expected)
    for step in range(len(LENGTHS)):
        x_s, rows_s, inner_s, outer_s = (
            t.split(LENGTHS)[step] for t in (x, gradient_rows, inner, outer)
        )
        objective = (by_hand(uploaded_with, x_s, inner_s, outer_s, 1.0) * rows_s).sum()
        gradients = torch.autograd.grad(objective, list(uploaded_with.parameters()))
        for p, g in zip(expected.parameters(), gradients, strict=True):
            p.grad = g
        theirs.step()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-3, atol=1e-3)


EVERY_ROW = {"ids": np.arange(455, dtype=np.int32)}
UPLOADS: dict[str, Callable[[Party], Upload]] = {
    "train": lambda party: party.train(
        TrainOrder(exchange=party.exchange + 1, epoch=0, first=0, steps=15, coordinated=False)
    ),
    "embed": lambda party: party.embed(EmbedOrder(exchange=party.exchange + 1, arrays=EVERY_ROW)),
    "evaluate": lambda party: party.evaluate(EvaluateOrder(exchange=party.exchange + 1)),
}


def described(**keys: Any) -> Party:
    config = config_of(
        dataset="breast-cancer", embedding_activation="none", validation_fraction=0.0, **keys
    )
    party = Party(config, 0, 2, 1)
    party.describe(DescribeOrder(outputs=1))
    return party


@pytest.mark.parametrize("kind", UPLOADS)
def test_every_upload_of_a_party_is_clipped_and_noisy(kind: str) -> None:
    party = described(embedding_noise=0.2)
    arrays = UPLOADS[kind](party).arrays
    block = party.inputs.block
    x = block.test if kind == "evaluate" else block.train[arrays.get("ids", slice(None))]
    with torch.no_grad():
        clean = party.learner.model(torch.from_numpy(x))
    clean = clean * (1.0 / clean.norm(dim=1, keepdim=True)).clamp_max(1.0)
    noise = torch.tensor(arrays["embedding"]) - clean
    assert noise.std().item() == pytest.approx(0.2, rel=5 / math.sqrt(2 * noise.numel()))
    assert noise.norm(dim=1).min() > 0


def test_no_noise_is_used_twice() -> None:
    party = described(embedding_noise=1000.0)  # so that an upload is its noise
    one, two = (UPLOADS["embed"](party).arrays["embedding"] for _ in range(2))
    assert abs(np.corrcoef(one.ravel(), two.ravel())[0, 1]) < 5 / math.sqrt(one.size)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_party_is_not_asked_back_to_noise_that_it_has_used(number: int) -> None:
    party = described()
    for _ in range(2):
        UPLOADS["embed"](party)
    with pytest.raises(VflError, match="message"):
        party.rejoin(RejoinOrder(exchange=number, outputs=party.learner.outputs))
    party.rejoin(RejoinOrder(exchange=7, outputs=party.learner.outputs))  # it may have missed some
    assert UPLOADS["embed"](party).exchange == 8


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_party_learns_by_the_noise_of_the_upload_that_is_answered(optimizer: str) -> None:
    party = described(optimizer=optimizer, inner_noise=0.5, batch_size=20)
    expected = copy.deepcopy(party.learner.model)
    order = TrainOrder(exchange=1, epoch=0, first=0, steps=3, coordinated=True)
    party.train(order)
    UPLOADS["embed"](party)  # another message in between, with other noise
    rows = np.random.default_rng(0).normal(size=(60, party.learner.size)).astype(np.float32)
    party.train(replace(order, exchange=3, first=3, arrays={"gradient": rows}))

    ids = sampling_of(party.config, 455).window(None, 0, 0, 3, b"").ids
    x, lengths = torch.from_numpy(party.inputs.block.train[ids]), (20, 20, 20)
    noise = Perturbation(party.config.privacy, party.learner.secret, 1, lengths, LAST)
    theirs = build_optimizer(party.config, expected, party.config.training.party_lr)
    descend(
        expected, theirs, x, None, torch.from_numpy(rows), lengths, party.config.training, noise
    )
    for p, q in zip(party.learner.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_each_party_has_its_own_secret() -> None:
    config = config_of(noise_seed=-1)
    parties = [Party(config, index, 2, 10) for index in (0, 0, 1)]
    fixed = [Party(config_of(), index, 2, 10) for index in (0, 1)]
    for party in parties + fixed:
        party.describe(DescribeOrder(outputs=10))
    secrets = [party.learner.secret for party in parties + fixed]
    assert len(set(secrets)) == len(secrets)
    assert all(len(party.learner.secret) >= 16 for party in parties)


# --- what it is worth ---------------------------------------------------------------------------


def test_epsilon_is_exact_for_its_delta() -> None:
    config = config_of(embedding_noise=4.0, embedding_bound=2.0, delta=1e-6)
    eps = epsilon(config, 1000, 9)
    # Two embeddings of norm 2 can be 4 apart.
    assert delta_of_gaussian(eps, 2 * 2.0 * 3 / 4.0) == pytest.approx(1e-6, rel=1e-6)


def test_figure_of_the_paper_is_its_equation_15() -> None:
    config = config_of(embedding_noise=0.7, batch_size=20, delta=1e-4)
    mu = 20 * math.sqrt(5000) / (0.7 * 1000)
    eps = epsilon_of_theorem_6(config, rows=1000, samples=5000)
    assert delta_of_gaussian(eps, mu) == pytest.approx(1e-4, rel=1e-6)
    # It is of embeddings of norm 1: of larger ones, more noise is worth as much.
    larger = config.with_values({"embedding-bound": 3.0, "embedding-noise": 2.1})
    assert epsilon_of_theorem_6(larger, rows=1000, samples=5000) == pytest.approx(eps)


def test_a_record_changed_shifts_an_upload_by_twice_the_bound_at_most() -> None:
    """As far apart as they can be; one record's upload is its clipped output and noise."""
    perturb = noise_of(config_of(embedding_bound=1.5))
    one = torch.full((ROWS, 4), 100.0)
    apart = (perturb(LAST, one) - perturb(LAST, -one)).norm(dim=1)
    torch.testing.assert_close(apart, torch.full((ROWS,), 2 * 1.5))


@pytest.mark.one_by_day
@pytest.mark.parametrize("window", [1, 4, 100])
def test_synchronous_run_uploads_each_row_once_an_epoch(window: int) -> None:
    keys = {**PRIVATE, "dataset": "breast-cancer", "epochs": 3, "window": window}
    counted = trained(3, keys)[0].run.accountant
    assert isinstance(counted, EmbeddingAccountant)
    assert counted.passes == counted.evaluations == {0: 3, 1: 3, 2: 3}
    assert [counted.most_uploads(party) for party in range(3)] == [3, 3, 3]


def test_an_order_given_anew_counts_again() -> None:
    releases = log_of(resolve(PRIVATE), 455)
    order = TrainOrder(exchange=1, epoch=0, first=0, steps=2, coordinated=True)
    for given in (order, replace(order, exchange=3), replace(order, exchange=4, first=2)):
        releases.ordered(0, given)
    counted = releases.accountant
    assert isinstance(counted, EmbeddingAccountant) and counted.most_uploads(0) == 2


def test_uploads_of_test_rows_count_too() -> None:
    private = {**PRIVATE, "dataset": "breast-cancer", "strategy": "frozen"}
    run = trained(2, private)[0].run
    counted = run.accountant
    assert isinstance(counted, EmbeddingAccountant) and run.releases
    assert counted.most_uploads(1) == 1
    run.releases.ordered(1, EvaluateOrder(exchange=3))
    assert counted.most_uploads(1) == 2


def test_rows_that_are_training_rows_and_test_rows_are_uploaded_as_both(run: Start) -> None:
    keys = {**SECRET, "dataset": "breast-cancer", "window": 15, "epochs": 1}
    apart = run(2, keys).summary["epsilon"]
    assert apart == epsilon(resolve(keys), 455, 1)
    both = run(2, {**keys, "test-fraction": 0.0}).summary["epsilon"]
    assert both == epsilon(resolve(keys), 455, 1 + 1)


class Counting:
    """The ClientApp, and how often each party uploaded each training row."""

    def __init__(self, parties: int, rows: int) -> None:
        self.uploads = np.zeros((parties, rows), int)

    def __call__(self, message: Any, context: Any) -> Any:
        reply = client_app.app(message, context)
        arrays: Any = reply.content.array_records.get("arrays", {})
        sent: Any = message.content.array_records["arrays"]
        where = arrays if message.metadata.message_type == "train" else sent
        if "ids" in where:
            self.uploads[context.node_config["partition-id"], where["ids"].numpy()] += 1
        return reply


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "more", [{}, {"strategy": "vafl-t", "quorum": 2}, {"max-delay": 6}], ids=str
)
def test_asynchronous_run_counts_what_was_sent(run: Start, more: dict[str, Any]) -> None:
    keys = {"dataset": "breast-cancer", "strategy": "vafl", "window": 4, "epochs": 3}
    keys = {**SECRET, **keys, "delay": "exponential", "eval-every": 3, **more}
    counting: Any = Counting(3, 455)
    summary = run(3, keys, counting).summary
    most = int(counting.uploads.max())
    assert most > 3  # the fastest party's rows
    # With queries it may be more than was sent, never less.
    assert summary["epsilon"] >= epsilon(resolve(keys), 455, most)
    if "max-delay" not in more:
        assert summary["epsilon"] == epsilon(resolve(keys), 455, most)


@pytest.mark.parametrize("strategy", ["cascaded", "syn-zoo"])
def test_a_pair_of_embeddings_counts_as_two_uploads(run: Start, strategy: str) -> None:
    keys = {**SECRET, "dataset": "breast-cancer", "window": 15, "epochs": 3, "strategy": strategy}
    assert run(2, keys).summary["epsilon"] == epsilon(resolve(keys), 455, 6)


@pytest.mark.one_by_day
@pytest.mark.parametrize(("strategy", "each"), [("vafl", 1), ("split-nn", 1), ("cascaded", 2)])
def test_uploads_of_poisson_batches_are_counted_row_by_row(
    run: Start, strategy: str, each: int
) -> None:
    keys = {**SECRET, "dataset": "breast-cancer", "window": 5, "epochs": 3, "sampling": "poisson"}
    keys["strategy"] = strategy
    ids: dict[int, list[int]] = {0: [], 1: []}

    def watched(message: Any, context: Any) -> Any:
        reply = client_app.app(message, context)
        if message.metadata.message_type == "train":
            order = message.content["scalars"]
            arrays = reply.content.array_records["arrays"]
            party = context.node_config["partition-id"]
            if order["coordinated"]:
                epoch, first, steps = (order[name] for name in ("epoch", "first", "steps"))
                sampling = sampling_of(sized(resolve(context.run_config), 455), 455)
                window = sampling.window(None, epoch, first, steps, b"")
                ids[party] += window.ids.tolist()
            else:
                # Rows that a window has twice are twice in it.
                ids[party] += arrays["ids"].numpy().tolist()
        return reply

    watching: Any = watched
    summary = run(2, keys, watching).summary
    most = max(int(np.bincount(rows).max()) for rows in ids.values())
    assert most > 3
    assert summary["epsilon"] == epsilon(resolve(keys), 455, each * most)


@pytest.mark.parametrize("sampling", ["shuffle", "poisson"])
def test_uploads_count_though_the_run_ends_before_their_answer(sampling: str) -> None:
    keys = {**SECRET, "dataset": "breast-cancer", "window": 5, "sampling": sampling}

    def client(message: Any, context: Any) -> Any:
        if context.node_config["partition-id"] == 2 and message.metadata.message_type == "train":
            raise ValueError
        return client_app.app(message, context)

    app: Any = client
    config = resolve(keys)
    strategy = strategy_of(config)(config, load_labels(config))
    with pytest.raises(PartyError):
        strategy.start(LocalGrid(app, 3, keys, config))
    assert strategy.figures()["epsilon"] >= epsilon(config, 455, 1)


def test_summary_reports_epsilon_delta_and_the_figure_of_the_paper(run: Start) -> None:
    keys = {**SECRET, "dataset": "breast-cancer", "epochs": 2, "window": 15, "delta": 1e-4}
    summary, config = run(2, keys).summary, sized(resolve(keys), 455)
    assert summary["epsilon"] == epsilon(config, 455, 2)
    assert summary["delta"] == 1e-4
    of_paper = epsilon_of_theorem_6(config, rows=455, samples=2 * 15 * 32)
    assert summary["epsilon_of_paper"] == pytest.approx(of_paper, rel=0.01)


def test_noise_that_anyone_can_repeat_is_worth_no_epsilon(run: Start) -> None:
    keys = {**PRIVATE, "dataset": "breast-cancer", "epochs": 1}
    assert run(2, keys).summary["epsilon"] is None


def test_a_party_refuses_to_upload_a_row_twice_at_once() -> None:
    party = described(batch_size=20)
    twice = EmbedOrder(exchange=1, arrays={"ids": np.array([4, 7, 4], np.int32)})
    with pytest.raises(VflError, match="asked twice for a row"):
        party.embed(twice)


def test_run_without_privacy_claims_none(run: Start) -> None:
    summary = run(2, {"dataset": "breast-cancer", "epochs": 1}).summary
    assert (summary["epsilon"], summary["delta"], summary["epsilon_of_paper"]) == (None,) * 3


def test_joined_training_is_not_called_private(run: Start) -> None:
    with pytest.raises(ConfigError, match="privacy"):
        run(2, {**PRIVATE, "strategy": "centralised", "epochs": 1})


def test_noise_seed_makes_a_run_repeatable_and_a_secret_one_does_not(run: Start) -> None:
    keys = {**PRIVATE, "dataset": "breast-cancer", "epochs": 1, "window": 15}

    def parameters(noise_seed: int) -> np.ndarray[Any, Any]:
        finished = run(2, {**keys, "noise-seed": noise_seed})
        models = [finished.parameters(name) for name in ("top", "party-0", "party-1")]
        return np.concatenate([array.ravel() for model in models for array in model.values()])

    assert np.array_equal(parameters(3), parameters(3))
    assert not np.allclose(parameters(3), parameters(4), atol=1e-3)
    assert not np.allclose(parameters(-1), parameters(-1), atol=1e-3)
