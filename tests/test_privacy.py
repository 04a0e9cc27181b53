"""Noise on embeddings and on scalars, and what the accountants say of it."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import (
    DpEvent,
    GaussianDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    calibrate_dp_mechanism,
    get_epsilon_gaussian,
)
from dp_accounting.pld import PLDAccountant
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import (
    GaussianPrivacyEvent,
    PrivacyAccountant,
    PrivacySpent,
    RdpAccountant,
)
from flwr.serverapp.exception import PrivacyBudgetExhausted
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg
from torch import Tensor

from strategies.vertical import strategy_of
from tests.conftest import Start, trained
from vfl_flower import client_app
from vfl_flower.axes import estimators
from vfl_flower.axes.batches import Window, draw_window, expected_rows
from vfl_flower.axes.estimators.first_order import descend
from vfl_flower.axes.privacy.accountants import (
    GdpAccountant,
    calibrated,
    known,
    most_steps,
    sampled,
)
from vfl_flower.axes.privacy.embeddings import EmbeddingLedger, epsilon
from vfl_flower.axes.privacy.ledger import Ledger, ledger_of
from vfl_flower.axes.privacy.noise import Perturbation, ScalarNoise
from vfl_flower.axes.privacy.paper import (
    calibrated_by_theorem_vi5,
    delta_of,
    epsilon_of_theorem_6,
    epsilon_of_theorem_vi5,
)
from vfl_flower.axes.privacy.scalars import ScalarLedger
from vfl_flower.config import RunConfig
from vfl_flower.data.blocks import load_labels
from vfl_flower.errors import ConfigError, PartyError, VflError
from vfl_flower.messages import (
    DescribeOrder,
    EmbedOrder,
    EvaluateOrder,
    RejoinOrder,
    TrainOrder,
    Upload,
)
from vfl_flower.models.bottoms import BottomModel, build_bottom
from vfl_flower.models.training import build_optimizer
from vfl_flower.party.party import Party
from vfl_flower.runtimes.local import LocalGrid
from vfl_flower.systems import resolve

PRIVATE = {"privacy": "perturbed-embedding", "noise-seed": 3}
SECRET = {"privacy": "perturbed-embedding"}
LENGTHS = (5, 5, 3)
ROWS = sum(LENGTHS)
LAST = 1  # an mlp's second layer


def config_of(**keys: Any) -> RunConfig:
    return resolve({**PRIVATE, **{key.replace("_", "-"): value for key, value in keys.items()}})


def noise_of(config: RunConfig, lengths: tuple[int, ...] = LENGTHS, **changed: Any) -> Perturbation:
    return replace(Perturbation(config.privacy, b"secret", 7, lengths, LAST), **changed)


def ledger(config: RunConfig, rows: int) -> Ledger:
    """What counts the releases of a run on so many training rows."""
    estimator = estimators.choose(config)(config)
    return ledger_of(config)(config, rows, estimator)


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
    steps = drawn(noise_of(config, both)).split(both)
    other = [
        steps[0],
        steps[1],
        drawn(noise_of(config, (5,)), layer=0),
        drawn(noise_of(config, (5,), exchange=8)),
        drawn(noise_of(config, (5,), secret=b"other")),
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
    noise = (
        drawn(noise_of(config_of(embedding_noise=deviation), (count // 10,)), width=10) / deviation
    )
    assert noise.mean().abs() < 5 / math.sqrt(count)
    assert (noise.square().mean() - 1).abs() < 5 * math.sqrt(2 / count)
    assert (noise.pow(4).mean() - 3).abs() < 5 * math.sqrt(96 / count)
    assert ((noise.abs() < 1).float().mean() - math.erf(1 / math.sqrt(2))).abs() < 2.5 / math.sqrt(
        count
    )


@pytest.mark.parametrize("deviation", [0.3, 2.0])
def test_noise_of_inner_layers_is_uniform_with_its_deviation(deviation: float) -> None:
    count = 400_000
    noise = drawn(noise_of(config_of(inner_noise=deviation), (count // 10,)), 0, 10) / deviation
    assert noise.abs().max() <= math.sqrt(3) * (1 + 1e-6)
    assert noise.mean().abs() < 5 / math.sqrt(count)
    assert (noise.square().mean() - 1).abs() < 5 * math.sqrt(0.8 / count)
    assert ((noise.abs() < 1).float().mean() - 1 / math.sqrt(3)).abs() < 2.5 / math.sqrt(count)


def test_without_inner_noise_inner_layers_are_as_they_were() -> None:
    z = torch.randn(ROWS, 4)
    assert torch.equal(noise_of(config_of())(0, z), z)


@pytest.mark.parametrize("bound", [0.5, 3.0])
def test_embedding_is_clipped_before_its_noise(bound: float) -> None:
    perturb = noise_of(config_of(embedding_bound=bound, embedding_noise=0.1))
    z = torch.cat([10 * torch.randn(6, 4), 0.01 * torch.randn(6, 4), torch.zeros(1, 4)])
    clipped = perturb(LAST, z) - drawn(perturb)
    norms = z.norm(dim=1)
    assert clipped.norm(dim=1).max() <= bound * (1 + 1e-5)
    torch.testing.assert_close(clipped[norms <= bound], z[norms <= bound], atol=1e-6, rtol=1e-5)
    long = norms > bound
    expected = bound * z[long] / norms[long, None]
    torch.testing.assert_close(clipped[long], expected, atol=1e-6, rtol=1e-5)


# --- in a party's steps -------------------------------------------------------------------------


def by_hand(model: BottomModel, x: Tensor, inner: Tensor, outer: Tensor, bound: float) -> Tensor:
    """The perturbed mlp, its noise given as constants."""
    first, last = model.layers
    z = last(torch.relu(first(x) + inner))
    clipped = z * (bound / z.norm(dim=1, keepdim=True)).clamp_max(1.0)
    return torch.tanh(clipped + outer)


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam"])
def test_feedback_pass_repeats_the_noise_of_the_upload(optimizer: str) -> None:
    config = config_of(
        optimizer=optimizer, inner_noise=0.5, embedding_activation="tanh", bottom_hidden=6
    )
    perturb = noise_of(config)
    inner, outer = drawn(perturb, 0, 6), drawn(perturb, LAST, 4)
    model = build_bottom(config, 0, (5,), 4)
    expected = copy.deepcopy(model)
    x, gradient_rows = torch.randn(ROWS, 5), torch.randn(ROWS, 4)

    h = by_hand(model, x, inner, outer, 1.0).detach()
    torch.testing.assert_close(model(x, perturb), h)
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
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


ALL_ROWS = {"ids": np.arange(455, dtype=np.int32)}
UPLOADS: dict[str, Callable[[Party], Upload]] = {
    "train": lambda party: party.train(
        TrainOrder(exchange=party.exchange + 1, epoch=0, first=0, steps=15, coordinated=False)
    ),
    "embed": lambda party: party.embed(EmbedOrder(exchange=party.exchange + 1, arrays=ALL_ROWS)),
    "evaluate": lambda party: party.evaluate(EvaluateOrder(exchange=party.exchange + 1)),
}


def described(**keys: Any) -> Party:
    config = config_of(dataset="breast-cancer", embedding_activation="none", **keys)
    party = Party(config, 0, 2, 1)
    party.describe(DescribeOrder(outputs=1))
    return party


@pytest.mark.parametrize("kind", UPLOADS)
def test_every_upload_of_a_party_is_clipped_and_noisy(kind: str) -> None:
    party = described(embedding_noise=0.2)
    arrays = UPLOADS[kind](party).arrays
    x = (
        party.block.test
        if kind == "evaluate"
        else party.block.train[arrays.get("ids", slice(None))]
    )
    with torch.no_grad():
        clean = party.model(torch.from_numpy(x))
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
        party.rejoin(RejoinOrder(exchange=number, outputs=party.outputs))
    party.rejoin(RejoinOrder(exchange=7, outputs=party.outputs))  # it may have missed some
    assert UPLOADS["embed"](party).exchange == 8


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_party_learns_by_the_noise_of_the_upload_that_is_answered(optimizer: str) -> None:
    party = described(optimizer=optimizer, inner_noise=0.5, batch_size=20)
    expected = copy.deepcopy(party.model)
    order = TrainOrder(exchange=1, epoch=0, first=0, steps=3, coordinated=True)
    party.train(order)
    UPLOADS["embed"](party)  # another message in between, with noise of its own
    rows = np.random.default_rng(0).normal(size=(60, party.size)).astype(np.float32)
    party.train(replace(order, exchange=3, first=3, arrays={"gradient": rows}))

    ids = draw_window(party.config, 455, None, 0, 0, 3).ids
    x, lengths = torch.from_numpy(party.block.train[ids]), (20, 20, 20)
    noise = Perturbation(party.config.privacy, party.secret, 1, lengths, LAST)
    theirs = build_optimizer(party.config, expected, party.config.training.party_lr)
    descend(
        expected, theirs, x, None, torch.from_numpy(rows), lengths, party.config.training, noise
    )
    for p, q in zip(party.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_parties_have_secrets_of_their_own() -> None:
    config = config_of(noise_seed=-1)
    parties = [Party(config, index, 2, 10) for index in (0, 0, 1)]
    fixed = [Party(config_of(), index, 2, 10) for index in (0, 1)]
    for party in parties + fixed:
        party.describe(DescribeOrder(outputs=10))
    secrets = [party.secret for party in parties + fixed]
    assert len(set(secrets)) == len(secrets)
    assert all(len(party.secret) >= 16 for party in parties)


# --- what it is worth ---------------------------------------------------------------------------


def delta_of_gaussian(eps: float, mu: float) -> float:
    """Balle and Wang (2018): delta of a mu-GDP mechanism at epsilon."""

    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    return phi(mu / 2 - eps / mu) - math.exp(eps) * phi(-mu / 2 - eps / mu)


@pytest.mark.parametrize(("noise", "bound"), [(1.0, 1.0), (8.0, 1.0), (8.0, 4.0), (0.5, 0.1)])
@pytest.mark.parametrize("uploads", [1, 3, 40])
def test_epsilon_is_that_of_composed_gaussian_mechanisms(
    noise: float, bound: float, uploads: int
) -> None:
    config = config_of(embedding_noise=noise, embedding_bound=bound)
    theirs = PLDAccountant().compose(GaussianDpEvent(noise / bound), uploads)
    assert epsilon(config, uploads) == pytest.approx(theirs.get_epsilon(1e-5), rel=0.01)


def test_epsilon_is_exact_for_its_delta() -> None:
    config = config_of(embedding_noise=4.0, embedding_bound=2.0, delta=1e-6)
    eps = epsilon(config, 9)
    assert delta_of_gaussian(eps, 2.0 * 3 / 4.0) == pytest.approx(1e-6, rel=1e-6)


def test_epsilon_of_no_upload_is_zero_and_grows_with_each() -> None:
    values = [epsilon(config_of(), uploads) for uploads in range(5)]
    assert values[0] == 0
    assert values == sorted(set(values))


def test_figure_of_the_paper_is_its_equation_15() -> None:
    config = config_of(embedding_noise=0.7, batch_size=20, delta=1e-4)
    mu = 20 * math.sqrt(5000) / (0.7 * 1000)
    eps = epsilon_of_theorem_6(config, rows=1000, samples=5000)
    assert delta_of_gaussian(eps, mu) == pytest.approx(1e-4, rel=1e-6)


@pytest.mark.parametrize("window", [1, 4, 100])
def test_synchronous_run_uploads_each_row_once_an_epoch(window: int) -> None:
    keys = {**PRIVATE, "epochs": 3, "window": window, "batch-size": 100}
    counted = trained(3, keys)[0].run.ledger
    assert isinstance(counted, EmbeddingLedger)
    assert counted.passes == counted.evaluations == {0: 3, 1: 3, 2: 3}
    assert [counted.most_uploads(party) for party in range(3)] == [3, 3, 3]


def test_an_order_given_anew_counts_again() -> None:
    counted = ledger(resolve(PRIVATE), 455)
    order = TrainOrder(exchange=1, epoch=0, first=0, steps=2, coordinated=True)
    for given in (order, replace(order, exchange=3), replace(order, exchange=4, first=2)):
        counted.ordered(0, given)
    assert isinstance(counted, EmbeddingLedger) and counted.most_uploads(0) == 2


def test_uploads_of_test_rows_count_too() -> None:
    private = {**PRIVATE, "strategy": "frozen", "epochs": 3}
    counted = trained(2, private)[0].run.ledger
    assert isinstance(counted, EmbeddingLedger)
    assert counted.most_uploads(1) == 1
    counted.ordered(1, EvaluateOrder(exchange=3))
    assert counted.most_uploads(1) == 2


def test_rows_that_are_training_rows_and_test_rows_are_uploaded_as_both(run: Start) -> None:
    keys = {**SECRET, "dataset": "breast-cancer", "window": 15, "epochs": 3, "eval-every": 1}
    apart = run(2, keys).summary["epsilon"]
    assert apart == epsilon(resolve(keys), 3)
    both = run(2, {**keys, "test-fraction": 0.0}).summary["epsilon"]
    assert both == epsilon(resolve(keys), 3 + 3)


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
    assert summary["epsilon"] >= epsilon(resolve(keys), most)
    if "max-delay" not in more:
        assert summary["epsilon"] == epsilon(resolve(keys), most)


@pytest.mark.parametrize("strategy", ["cascaded", "syn-zoo"])
def test_a_pair_of_embeddings_counts_as_two_uploads(run: Start, strategy: str) -> None:
    keys = {**SECRET, "dataset": "breast-cancer", "window": 15, "epochs": 3, "strategy": strategy}
    assert run(2, keys).summary["epsilon"] == epsilon(resolve(keys), 6)


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
                place = (order[name] for name in ("epoch", "first", "steps"))
                window = draw_window(resolve(context.run_config), 455, None, *place)
                ids[party] += window.ids.tolist()
            else:
                # Rows that a window has twice are twice in it.
                ids[party] += arrays["ids"].numpy().tolist()
        return reply

    watching: Any = watched
    summary = run(2, keys, watching).summary
    most = max(int(np.bincount(rows).max()) for rows in ids.values())
    assert most > 3
    assert summary["epsilon"] == epsilon(resolve(keys), each * most)


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
    assert strategy.figures()["epsilon"] >= epsilon(config, 1)


def test_summary_reports_epsilon_delta_and_the_figure_of_the_paper(run: Start) -> None:
    keys = {**SECRET, "epochs": 3, "window": 45, "embedding-noise": 2.0, "delta": 1e-4}
    summary, config = run(2, keys).summary, resolve(keys)
    assert summary["epsilon"] == epsilon(config, 3)
    assert summary["delta"] == 1e-4
    of_paper = epsilon_of_theorem_6(config, rows=1437, samples=3 * 1437)
    assert summary["epsilon_of_paper"] == pytest.approx(of_paper, rel=0.01)


def test_noise_that_anyone_can_repeat_is_worth_no_epsilon(run: Start) -> None:
    assert run(2, {**PRIVATE, "epochs": 1, "window": 45}).summary["epsilon"] is None


def test_a_party_refuses_to_upload_a_row_twice_at_once() -> None:
    party = described(batch_size=20)
    twice = EmbedOrder(exchange=1, arrays={"ids": np.array([4, 7, 4], np.int32)})
    with pytest.raises(VflError, match="a row more than once"):
        party.embed(twice)


def test_run_without_privacy_claims_none(run: Start) -> None:
    summary = run(2, {"epochs": 1, "window": 45}).summary
    assert (summary["epsilon"], summary["delta"], summary["epsilon_of_paper"]) == (None,) * 3


def test_joined_training_is_not_called_private(run: Start) -> None:
    with pytest.raises(ConfigError, match="privacy"):
        run(2, {**PRIVATE, "strategy": "joined", "epochs": 1})


def test_noise_seed_makes_a_run_repeatable_and_a_secret_one_does_not(run: Start) -> None:
    keys = {**PRIVATE, "dataset": "breast-cancer", "epochs": 1, "window": 15}

    def parameters(noise_seed: int) -> np.ndarray[Any, Any]:
        finished = run(2, {**keys, "noise-seed": noise_seed})
        models = [finished.parameters(name) for name in ("top", "party-0", "party-1")]
        return np.concatenate([array.ravel() for model in models for array in model.values()])

    assert np.array_equal(parameters(3), parameters(3))
    assert not np.allclose(parameters(3), parameters(4), atol=1e-3)
    assert not np.allclose(parameters(-1), parameters(-1), atol=1e-3)


# --- accountants, by Flower's protocol ----------------------------------------------------------

POPULATION, DELTA = 1000, 1e-5
SOME = [
    (GaussianPrivacyEvent(0.8, 50, POPULATION), 30),
    (GaussianPrivacyEvent(3.0, POPULATION, POPULATION), 7),
    (GaussianPrivacyEvent(0.8, 50, POPULATION), 4),
]


def fresh(kind: str, budget: float | None = None) -> PrivacyAccountant:
    """An accountant of ours, as Flower knows them; that they are is checked by mypy too."""
    if kind == "pld":
        return sampled(DELTA, POPULATION, budget)
    return GdpAccountant(replace(known(DELTA, POPULATION).config, max_epsilon=budget))


def with_some(kind: str, budget: float | None = None) -> PrivacyAccountant:
    accountant = fresh(kind, budget)
    for release, count in SOME:
        accountant.compose(release, count)
    return accountant


@pytest.mark.parametrize("kind", ["pld", "gdp"])
def test_an_accountant_takes_what_flowers_protocol_says(kind: str) -> None:
    accountant = fresh(kind)
    names = [name for name in vars(PrivacyAccountant) if not name.startswith("_")]
    assert {"config", "compose", "get_epsilon", "would_exceed", "load_state_dict"} < set(names)
    for name in names:
        protocol, ours = getattr(PrivacyAccountant, name), getattr(type(accountant), name)
        assert isinstance(ours, property) == isinstance(protocol, property), name
        if not isinstance(protocol, property):
            found, asked = (signature(each, eval_str=True) for each in (ours, protocol))
            assert found == asked, name


def test_releases_of_several_kinds_are_what_dp_accounting_says_of_them_together() -> None:
    theirs = PLDAccountant()
    for release, count in SOME:
        rate = release.sample_size / POPULATION
        theirs.compose(event(rate, release.noise_multiplier, count))
    found = with_some("pld").get_epsilon(DELTA)
    assert found == pytest.approx(theirs.get_epsilon(DELTA), rel=1e-3)


def test_known_releases_of_several_kinds_are_one_gaussian_mechanism() -> None:
    mu = math.sqrt((30 + 4) / 0.8**2 + 7 / 3.0**2)  # what is known of sampling is worth nothing
    accountant = with_some("gdp")
    assert delta_of_gaussian(accountant.get_epsilon(DELTA), mu) == pytest.approx(DELTA, rel=1e-6)
    for eps in (0.0, 1.0, 20.0, 60.0):
        assert accountant.get_delta(eps) == pytest.approx(delta_of_gaussian(eps, mu), rel=1e-6)


@pytest.mark.parametrize("kind", ["pld", "gdp"])
def test_an_accountant_spends_less_than_flowers_own_and_not_much(kind: str) -> None:
    ours = with_some(kind)
    bound = RdpAccountant(ours.config)  # by Renyi divergences, which lose a little
    for release, count in SOME:
        bound.compose(release, count)
    assert ours.num_releases == bound.num_releases == 41
    ratio = ours.get_epsilon(DELTA) / bound.get_epsilon(DELTA)
    assert 0.8 < ratio <= 1


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2, 0.3])
@pytest.mark.parametrize("kind", ["pld", "gdp"])
def test_delta_is_the_inverse_of_epsilon(kind: str, delta: float) -> None:
    accountant = with_some(kind)
    assert accountant.get_delta(accountant.get_epsilon(delta)) == pytest.approx(delta, rel=1e-4)


def test_delta_is_the_inverse_of_an_epsilon_whose_exponential_is_no_number() -> None:
    accountant = known(DELTA, POPULATION)
    accountant.compose(GaussianPrivacyEvent(0.02, 1, POPULATION))
    spent = accountant.get_epsilon(DELTA)
    assert spent > 1000
    assert accountant.get_delta(spent) == pytest.approx(DELTA, rel=1e-4)


@pytest.mark.parametrize("kind", ["pld", "gdp"])
def test_nothing_released_is_nothing_spent(kind: str) -> None:
    accountant = fresh(kind)
    assert (accountant.num_releases, accountant.get_epsilon(DELTA)) == (0, 0.0)
    assert accountant.get_delta(0.5) == 0.0
    assert accountant.get_privacy_spent() == PrivacySpent(0.0, DELTA, 0, kind)


@pytest.mark.parametrize("kind", ["pld", "gdp"])
def test_what_is_spent_is_at_the_configured_delta_unless_another_is_given(kind: str) -> None:
    accountant = with_some(kind)
    spent = PrivacySpent(accountant.get_epsilon(DELTA), DELTA, 41, kind)
    assert accountant.get_privacy_spent() == spent
    at_another = accountant.get_privacy_spent(0.01)
    assert at_another == PrivacySpent(accountant.get_epsilon(0.01), 0.01, 41, kind)
    assert 0 < at_another.epsilon < spent.epsilon


@pytest.mark.parametrize("kind", ["pld", "gdp"])
def test_an_accountant_goes_on_from_its_state_as_json(kind: str) -> None:
    accountant, again = with_some(kind), fresh(kind)
    state = json.loads(json.dumps(accountant.state_dict()))
    again.compose(GaussianPrivacyEvent(0.1, 1, POPULATION))  # which is forgotten
    again.load_state_dict(state)
    assert again.get_privacy_spent() == accountant.get_privacy_spent()
    assert again.state_dict() == accountant.state_dict()
    again.compose(*SOME[1])
    assert again.num_releases == accountant.num_releases + 7
    assert again.get_epsilon(DELTA) > accountant.get_epsilon(DELTA)
    accountant.compose(*SOME[1])
    assert again.get_privacy_spent() == accountant.get_privacy_spent()


@pytest.mark.parametrize(("kind", "other"), [("pld", "gdp"), ("gdp", "pld")])
def test_an_accountant_refuses_the_state_of_another(kind: str, other: str) -> None:
    with pytest.raises(ValueError, match="another accountant"):
        fresh(kind).load_state_dict(with_some(other).state_dict())
    with pytest.raises(ValueError, match="another accountant"):
        fresh(kind).load_state_dict({"method": kind})
    of_others = sampled(DELTA, 2 * POPULATION) if kind == "pld" else known(DELTA, 2 * POPULATION)
    with pytest.raises(ValueError, match="another accountant"):
        of_others.load_state_dict(with_some(kind).state_dict())


@pytest.mark.parametrize("kind", ["pld", "gdp"])
def test_a_release_is_of_the_population_and_counted_at_least_once(kind: str) -> None:
    accountant = fresh(kind)
    for release, count in ((GaussianPrivacyEvent(1.0, 1, 2), 1), (SOME[0][0], 0), (SOME[0][0], -1)):
        with pytest.raises(ValueError, match="of one population, and at least one at a time"):
            accountant.compose(release, count)
    assert accountant.num_releases == 0


@pytest.mark.parametrize("kind", ["pld", "gdp"])
def test_asking_whether_a_budget_would_be_exceeded_spends_nothing(kind: str) -> None:
    (release, _), more = SOME[0], with_some(kind)
    more.compose(release, 5)
    after = more.get_epsilon(DELTA)
    accountant = with_some(kind, budget=after)
    before, spent = accountant.state_dict(), accountant.get_privacy_spent()
    assert spent.epsilon < after
    answers = [accountant.would_exceed(release, count=count) for count in (1, 5, 6, 50)]
    assert answers == [False, False, True, True]  # exactly the budget is not beyond it
    assert accountant.would_exceed(release, max_epsilon=0.99 * after, count=5)
    assert not accountant.would_exceed(release, max_epsilon=1.01 * after, count=5)
    assert accountant.state_dict() == before
    assert accountant.get_privacy_spent() == spent
    with pytest.raises(ValueError, match="no budget"):
        fresh(kind).would_exceed(release)


def in_flowers_strategy(
    accountant: PrivacyAccountant,
) -> DifferentialPrivacyServerSideFixedClipping:
    plain = FedAvg(fraction_evaluate=0.0)
    return DifferentialPrivacyServerSideFixedClipping(plain, 2.0, 1.0, 2, accountant=accountant)


def test_flowers_own_strategy_stops_at_the_budget_that_our_accountant_keeps() -> None:
    client = ClientApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        learnt = [
            array + 1 for array in message.content.array_records["arrays"].to_numpy_ndarrays()
        ]
        content = RecordDict(
            {"arrays": ArrayRecord(learnt), "metrics": MetricRecord({"num-examples": 1})}
        )
        return Message(content, reply_to=message)

    budget = 6.0
    accountant = GdpAccountant(replace(known(DELTA, 2).config, max_epsilon=budget))
    strategy = in_flowers_strategy(accountant)
    grid = LocalGrid(client, 2, {}, resolve({}))
    with pytest.raises(PrivacyBudgetExhausted, match="would exceed max_epsilon"):
        strategy.start(grid, ArrayRecord([np.zeros(3, np.float32)]), num_rounds=100)
    rounds = accountant.num_releases
    assert 1 < rounds < 100
    deltas = [delta_of_gaussian(budget, math.sqrt(many) / 2.0) for many in (rounds, rounds + 1)]
    assert deltas[0] <= DELTA < deltas[1]
    spent = strategy.privacy_spent()
    assert spent == accountant.get_privacy_spent() and 0 < spent.epsilon <= budget


def test_flowers_own_strategy_refuses_an_accountant_that_relies_on_secret_sampling() -> None:
    with pytest.raises(ValueError, match="no-amplification"):
        in_flowers_strategy(sampled(DELTA, 2))


# --- scalar noise -------------------------------------------------------------------------------

DPZV = {"strategy": "dpzv", "dataset": "breast-cancer", "batch-size": 64, "window": 8}


def budget_of(eps: float, delta: float, batch: int, **more: Any) -> RunConfig:
    keys = {"strategy": "dpzv", "epsilon": eps, "delta": delta, "batch-size": batch, **more}
    return resolve(keys)


def epsilon_of_scalars(config: RunConfig, rows: int, multiplier: float, steps: int) -> float:
    """Epsilon of so many noisy scalars of a run on so many training rows."""
    accountant = sampled(delta_of(config), rows)
    if steps:
        release = GaussianPrivacyEvent(multiplier, expected_rows(config, rows), rows)
        accountant.compose(release, steps)
    return accountant.get_epsilon(delta_of(config))


def event(rate: float, multiplier: float, steps: int) -> DpEvent:
    one = PoissonSampledDpEvent(rate, GaussianDpEvent(multiplier))
    return SelfComposedDpEvent(one, steps)


@pytest.mark.parametrize(
    ("rows", "batch", "multiplier", "steps", "delta"),
    [(1000, 50, 1.5, 300, 1e-4), (1000, 10, 0.8, 1000, 1e-5), (60_000, 64, 1.07, 93_700, 1e-3)],
)
def test_epsilon_of_scalars_is_that_of_dp_accounting(
    rows: int, batch: int, multiplier: float, steps: int, delta: float
) -> None:
    theirs = PLDAccountant().compose(event(batch / rows, multiplier, steps)).get_epsilon(delta)
    config = budget_of(1.0, delta, batch)
    assert epsilon_of_scalars(config, rows, multiplier, steps) == pytest.approx(theirs, rel=1e-4)


@pytest.mark.parametrize("batch", [100, 500])
def test_scalars_over_all_rows_are_composed_gaussian_mechanisms(batch: int) -> None:
    eps = epsilon_of_scalars(budget_of(1.0, 1e-5, batch), 100, 30.0, 400)
    assert delta_of_gaussian(eps, 20 / 30) == pytest.approx(1e-5, rel=0.02)


def test_no_scalar_costs_nothing_and_each_costs_more() -> None:
    config = budget_of(1.0, 1e-3, 50)
    costs = [epsilon_of_scalars(config, 1000, 2.0, steps) for steps in (0, 1, 10, 100)]
    assert costs[0] == 0.0
    assert costs == sorted(set(costs))


@pytest.mark.parametrize(
    ("eps", "delta", "rows", "batch", "steps"),
    [
        (1.0, 1e-3, 60_000, 64, 93_700),
        (0.1, 1e-3, 1437, 32, 540),
        (0.3, 1e-6, 455, 455, 10),
    ],
)
def test_calibrated_noise_spends_the_budget_and_hardly_less(
    eps: float, delta: float, rows: int, batch: int, steps: int
) -> None:
    multiplier = calibrated(eps, delta, batch, rows, steps)
    theirs = PLDAccountant().compose(event(batch / rows, multiplier, steps)).get_epsilon(delta)
    assert 0.995 * eps <= theirs <= eps


def test_calibrated_noise_is_that_of_dp_accounting() -> None:
    theirs = calibrate_dp_mechanism(
        PLDAccountant, lambda sigma: event(32 / 1437, sigma, 540), 0.1, 1e-4, tol=1e-3
    )
    ours = calibrated(0.1, 1e-4, 32, 1437, 540)
    assert ours == pytest.approx(theirs, rel=2e-3)


@pytest.mark.parametrize(("eps", "multiplier"), [(0.1, 8.0), (0.3, 4.0)])
def test_most_steps_is_the_most_that_fit(eps: float, multiplier: float) -> None:
    config = budget_of(eps, 1e-3, 50)
    steps = most_steps(eps, 1e-3, multiplier, 50, 1000, 2000)
    assert 0 < steps < 2000
    spent = [epsilon_of_scalars(config, 1000, multiplier, steps + more) for more in (0, 1)]
    assert spent[0] <= eps < spent[1]
    assert most_steps(eps, 1e-3, multiplier, 50, 1000, steps // 2) == steps // 2


def test_without_noise_no_step_fits() -> None:
    assert most_steps(1.0, 1e-3, 0.0, 50, 1000, 10) == 0


@pytest.mark.parametrize(
    ("claimed", "spent", "digits"), [(0.5, 0.23, 2), (1.0, 0.49, 2), (5.0, 15.9, 1), (10.0, 234, 0)]
)
def test_what_the_noise_of_the_paper_is_worth(claimed: float, spent: float, digits: int) -> None:
    config = budget_of(claimed, 1e-3, 64)
    multiplier = calibrated_by_theorem_vi5(config, 60_000, 93_700)
    assert round(epsilon_of_scalars(config, 60_000, multiplier, 93_700), digits) == spent
    claim = epsilon_of_theorem_vi5(config, 60_000, multiplier, 93_700)
    assert claim == pytest.approx(claimed, rel=1e-6)


def test_noise_of_the_paper_is_its_formula() -> None:
    # sigma = 2 C sqrt(T) / (D mu) on a mean over B rows, where mu-GDP is (epsilon, delta)-DP.
    config = budget_of(2.0, 1e-4, 50, clip=0.3)
    sigma = calibrated_by_theorem_vi5(config, 1000, 400) * 0.3 / 50
    mu = 2 * 0.3 * 20 / (1000 * sigma)
    assert delta_of_gaussian(2.0, mu) == pytest.approx(1e-4, rel=1e-4)


@pytest.mark.parametrize(("multiplier", "clip", "batch"), [(1.5, 0.2, 32), (0.3, 4.0, 5)])
def test_scalars_get_gaussian_noise_of_the_calibrated_deviation(
    multiplier: float, clip: float, batch: int
) -> None:
    config = budget_of(1.0, 1e-3, batch, clip=clip)
    noise, count = ScalarNoise(config, multiplier, 1000), 200_000
    drawn = torch.cat([noise.added_to(torch.full((count // 10,), 7.0)) for _ in range(10)]) - 7.0
    unit = drawn / (multiplier * clip / batch)
    assert noise.clip == clip
    assert unit.mean().abs() < 5 / math.sqrt(count)
    assert (unit.square().mean() - 1).abs() < 5 * math.sqrt(2 / count)
    assert (unit.pow(4).mean() - 3).abs() < 5 * math.sqrt(96 / count)
    assert (unit[1:] * unit[:-1]).mean().abs() < 5 / math.sqrt(count)


def test_noise_on_scalars_is_secret_unless_a_seed_is_given() -> None:
    zeros = torch.zeros(5)

    def drawn(noise_seed: int) -> list[float]:
        config = budget_of(1.0, 1e-3, 32, **{"noise-seed": noise_seed})
        values: list[float] = ScalarNoise(config, 1.0, 1000).added_to(zeros).tolist()
        return values

    assert drawn(-1) != drawn(-1)
    assert drawn(3) == drawn(3) != drawn(4)


def test_the_accountant_is_that_of_the_privacy() -> None:
    kinds = {"none": Ledger, "perturbed-embedding": EmbeddingLedger}
    for privacy, kind in kinds.items():
        assert type(ledger(resolve({"privacy": privacy}), 10)) is kind
    scalar = ledger(budget_of(1.0, 1e-3, 5), 10)
    assert type(scalar) is ScalarLedger
    assert ledger(resolve({}), 10).steps_allowed(77) == 77
    assert ledger(resolve({}), 10).noise() is None


@pytest.mark.parametrize("eps", [0.1])
def test_noise_is_calibrated_to_the_scalars_of_all_parties(run: Start, eps: float) -> None:
    keys = {**DPZV, "epochs": 2, "epsilon": eps, "delta": 1e-3}
    summary, config = run(3, keys).summary, resolve(keys)
    steps = 2 * 3 * 8
    assert summary["epochs"] == 2.0
    assert summary["noise_multiplier"] == calibrated(eps, 1e-3, 64, 455, steps)
    assert 0.995 * eps <= summary["epsilon"] <= eps
    assert summary["delta"] == 1e-3
    of_paper = epsilon_of_theorem_vi5(config, 455, summary["noise_multiplier"], steps)
    assert summary["epsilon_of_paper"] == of_paper


def test_noise_of_the_paper_is_reported_with_what_it_spends(run: Start) -> None:
    keys = {**DPZV, "epochs": 3, "epsilon": 5.0, "delta": 1e-3, "calibration": "paper"}
    summary, config = run(3, keys).summary, resolve(keys)
    assert summary["noise_multiplier"] == calibrated_by_theorem_vi5(config, 455, 72)
    assert summary["epsilon_of_paper"] == pytest.approx(5.0)
    spent = epsilon_of_scalars(config, 455, summary["noise_multiplier"], 72)
    assert summary["epsilon"] == spent != pytest.approx(5.0, rel=0.1)


@pytest.mark.parametrize("window", [1, 5])
def test_a_run_stops_before_it_goes_past_its_budget(run: Start, window: int) -> None:
    budget = {"epsilon": 0.2, "delta": 1e-3, "noise-multiplier": 8.0}
    keys = {**DPZV, **budget, "epochs": 10, "window": window}
    scalars = [0]

    def counting(message: Any, context: Any) -> Any:
        sent = message.content.array_records["arrays"]
        if "difference" in sent:
            scalars[0] += len(sent["difference"].numpy())
        return client_app.app(message, context)

    client: Any = counting
    finished = run(2, keys, client)
    summary, config = finished.summary, resolve(keys)
    allowed = most_steps(0.2, 1e-3, 8.0, 64, 455, 2 * 10 * 8)
    assert 0 < allowed < 2 * 10 * 8
    assert scalars[0] == summary["steps"] == allowed
    assert summary["epochs"] == pytest.approx(allowed / 16, abs=1e-3)
    assert summary["epsilon"] == epsilon_of_scalars(config, 455, 8.0, allowed) <= 0.2
    assert epsilon_of_scalars(config, 455, 8.0, allowed + 1) > 0.2
    assert summary["failure"] is None
    assert finished.history[-1]["epoch"] == summary["epochs"]


@pytest.mark.parametrize(("multiplier", "noise_seed"), [(2.0, 0), (0.0, -1), (0.0, 0)])
def test_noise_that_is_known_or_none_is_worth_no_epsilon(
    run: Start, multiplier: float, noise_seed: int
) -> None:
    given = {"noise-multiplier": multiplier, "noise-seed": noise_seed}
    summary = run(2, {**DPZV, **given, "epochs": 1}).summary
    assert (summary["epsilon"], summary["delta"], summary["epsilon_of_paper"]) == (None,) * 3
    assert summary.get("epsilon_known_batches") is None
    assert summary["noise_multiplier"] == multiplier


def test_epsilon_for_who_knows_the_mini_batches() -> None:
    counted = ledger(budget_of(1.0, 1e-4, 2), 4)
    assert isinstance(counted, ScalarLedger)
    counted.multiplier = 3.0
    assert counted.figures()["epsilon_known_batches"] == 0.0
    lengths = np.array([2, 0, 1], np.int32)
    for party, ids in enumerate(([0, 3, 3], [3, 1, 3])):
        counted.answered(party, Window(np.array(ids, np.int32), lengths))
    figures = counted.figures()
    # Row 3 was in four scalars, of both parties; all six count for those who do not know that.
    assert figures["epsilon_known_batches"] == get_epsilon_gaussian(3.0 / 2, 1e-4)
    assert figures["epsilon"] == epsilon_of_scalars(counted.config, 4, 3.0, 6)
    assert "not from the label holder" in figures["epsilon_protects"]


def test_a_run_counts_the_scalars_that_each_row_was_in(run: Start) -> None:
    keys = {**DPZV, "epochs": 3, "noise-multiplier": 5.0, "delta": 1e-3}
    taken = np.zeros(455, int)

    def watched(message: Any, context: Any) -> Any:
        reply = client_app.app(message, context)
        arrays: Any = reply.content.array_records.get("arrays", {})
        if "ids" in arrays:
            np.add.at(taken, arrays["ids"].numpy(), 1)
        return reply

    client: Any = watched
    summary = run(2, keys, client).summary
    assert taken.max() > 3
    of_batches = get_epsilon_gaussian(5.0 / math.sqrt(taken.max()), 1e-3)
    assert summary["epsilon_known_batches"] == of_batches
    assert summary["epsilon"] == epsilon_of_scalars(resolve(keys), 455, 5.0, 2 * 3 * 8)


def test_scalar_noise_leaves_embeddings_as_they_are() -> None:
    keys = {**DPZV, "noise-seed": 0, "embedding-activation": "none"}
    config = resolve(keys)
    party = Party(config, 0, 2, 1)
    party.describe(DescribeOrder(outputs=1))
    test = party.evaluate(EvaluateOrder(exchange=1)).arrays["embedding"]
    with torch.no_grad():
        clean = party.model(torch.from_numpy(party.block.test))
    np.testing.assert_allclose(test, clean.numpy(), atol=1e-6)
    order = TrainOrder(exchange=2, epoch=0, first=0, steps=8, coordinated=False)
    pair = party.train(order).arrays
    assert np.abs(pair["plus"] - pair["minus"]).max() < 1.0  # two mu along one direction


# --- Poisson mini-batches of more rows than there are --------------------------------------------

ROWS_OF_CANCER = 455


@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "split-nn"},
        {"strategy": "vafl"},
        {"strategy": "ef-vfl", "codec": "identity", "labels": "shared"},
        {"strategy": "frozen"},
        {"strategy": "joined"},
        {"strategy": "cascaded", "noise-seed": 0, "party-lr": 0.02},
        {"strategy": "syn-zoo", "noise-seed": 0, "party-lr": 0.02, "server-lr": 0.02},
    ],
    ids=str,
)
def test_poisson_sampling_of_more_rows_than_there_are_is_a_full_batch(
    run: Start, keys: dict[str, Any]
) -> None:
    keys = {"dataset": "breast-cancer", "epochs": 60, "window": 1, **keys}
    full = run(2, {**keys, "batch-size": ROWS_OF_CANCER})
    assert full.summary["test_accuracy"] > 0.85
    for batch in (ROWS_OF_CANCER, 100 * ROWS_OF_CANCER):
        sampled_all = run(2, {**keys, "sampling": "poisson", "batch-size": batch})
        for figure in ("test_accuracy", "test_loss", "steps"):
            expected = pytest.approx(full.summary[figure], rel=1e-4)
            assert sampled_all.summary[figure] == expected, figure
        for key, values in full.parameters("top").items():
            np.testing.assert_allclose(sampled_all.parameters("top")[key], values, atol=1e-4)


def test_scalar_noise_is_scaled_by_the_rows_where_more_are_asked_for(run: Start) -> None:
    def noise(batch: int) -> tuple[float, list[float]]:
        config = budget_of(1.0, 1e-3, batch, clip=0.3, **{"noise-seed": 1})
        added = ScalarNoise(config, 2.0, ROWS_OF_CANCER)
        values: list[float] = added.added_to(torch.zeros(5)).tolist()
        return added.deviation, values

    assert noise(ROWS_OF_CANCER)[0] == pytest.approx(2.0 * 0.3 / ROWS_OF_CANCER)
    assert noise(ROWS_OF_CANCER) == noise(100 * ROWS_OF_CANCER) != noise(ROWS_OF_CANCER - 1)

    more: list[dict[str, Any]] = [{}, {"calibration": "paper"}, {"noise-multiplier": 40.0}]
    for given in more:
        keys = {**DPZV, "window": 1, "epochs": 3, "epsilon": 2.0, "delta": 1e-3, **given}
        one, other = (
            run(2, {**keys, "batch-size": batch}).summary
            for batch in (ROWS_OF_CANCER, 100 * ROWS_OF_CANCER)
        )
        figures = ("noise_multiplier", "epsilon", "epsilon_of_paper", "epsilon_known_batches")
        assert [one[figure] for figure in figures] == [other[figure] for figure in figures]
        # All rows are in every scalar, so that nothing is secret.
        assert one["epsilon"] == pytest.approx(one["epsilon_known_batches"], rel=0.01)


def test_a_private_run_of_more_rows_than_there_are_is_one_of_all_rows(run: Start) -> None:
    keys = {**DPZV, "window": 1, "epochs": 40, "noise-multiplier": 1.0, "noise-seed": 0}
    full, more = (
        run(2, {**keys, "batch-size": batch}) for batch in (ROWS_OF_CANCER, 100 * ROWS_OF_CANCER)
    )
    assert full.summary["test_accuracy"] == more.summary["test_accuracy"]
    for name in ("top", "party-0", "party-1"):
        for key, values in full.parameters(name).items():
            np.testing.assert_array_equal(more.parameters(name)[key], values)


def test_mini_batches_may_all_have_been_empty() -> None:
    counted = ledger(budget_of(1.0, 1e-4, 1), 4)
    assert isinstance(counted, ScalarLedger)
    counted.multiplier = 3.0
    counted.answered(0, Window(np.zeros(0, np.int32), np.zeros(2, np.int32)))
    figures = counted.figures()
    assert figures["epsilon_known_batches"] == 0.0  # it is known that no row was in them
    assert figures["epsilon"] == epsilon_of_scalars(counted.config, 4, 3.0, 2) > 0
