"""The bottom model of tables: its encoding, its members, and where `auto` chooses it."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Context, Message
from sklearn.datasets import load_breast_cancer

from tests.conftest import ALL_ROWS, Start
from tests.models.test_models import config_of
from vfl_flower import client_app
from vfl_flower.data.at_party import load_features
from vfl_flower.models.bottoms import build_bottom, learn_bins
from vfl_flower.models.layers import PiecewiseLinear
from vfl_flower.party import stacked
from vfl_flower.protocol.systems import resolve

X, Y = load_breast_cancer(return_X_y=True)
EDGES = "layers.0.1.edges"


def encoder_of(rows: Any) -> PiecewiseLinear:
    """An encoder that has learnt from these rows."""
    x = torch.as_tensor(rows, dtype=torch.float32)
    encoder = PiecewiseLinear(x.shape[1])
    encoder.learn(x)
    return encoder


def expected_bins(numbers: np.ndarray[Any, Any], x: float) -> list[float]:
    """The encoding of one number, as Gorishniy et al. (2022) define it for bins inside a range."""
    edges = np.unique(np.quantile(numbers, np.linspace(0, 1, 33)).astype(np.float32))
    found = [
        0.0 if x < low else 1.0 if x >= high else (x - low) / (high - low)
        for low, high in pairwise(edges)
    ]
    return found + [0.0] * (32 - len(found))


@pytest.mark.parametrize(
    "numbers",
    [
        np.random.default_rng(0).normal(size=200),
        np.random.default_rng(1).integers(0, 5, 100),
        np.arange(2).repeat([99, 1]),
        np.full(7, 3.0),
    ],
    ids=["distinct", "five values", "rare value", "constant"],
)
def test_each_bin_rises_from_0_to_1_inside_itself(numbers: np.ndarray[Any, Any]) -> None:
    encoder = encoder_of(numbers[:, None])
    for x in [*np.linspace(numbers.min() - 1, numbers.max() + 1, 41), *numbers[:5]]:
        encoded = encoder(torch.tensor([[x]], dtype=torch.float32))[0].tolist()
        assert encoded == pytest.approx([x, *expected_bins(numbers, x)], abs=1e-4)


def test_numbers_are_encoded_column_by_column() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 3))
    x = torch.from_numpy(rows[:4]).float()
    apart = [encoder_of(rows[:, [at]])(x[:, [at]])[:, 1:] for at in range(3)]
    torch.testing.assert_close(encoder_of(rows)(x), torch.cat([x, *apart], 1))


@pytest.mark.parametrize("bias", [True, False])
def test_before_training_a_tabular_model_is_the_mlp_of_its_seed(bias: bool) -> None:
    x = torch.randn(30, 5)
    models = []
    for kind in ("tabular", "mlp"):
        config = config_of(bottom_model=kind, bottom_bias=bias, embedding_activation="none")
        models.append(build_bottom(config, 0, torch.zeros(5), 7))
        learn_bins(models[-1], x.numpy())
    torch.testing.assert_close(models[0](x), models[1](x))


def test_each_member_scales_the_shared_layer_by_its_factors() -> None:
    generator = torch.Generator().manual_seed(0)
    model = build_bottom(config_of(bottom_model="tabular"), 0, torch.zeros(3), 4)
    weights = dict(model.named_parameters())
    for weight in weights.values():
        if weight.requires_grad:
            weight.data = torch.randn(weight.shape, generator=generator)
    x = torch.randn(6, 3, generator=generator)
    learn_bins(model, x.numpy())
    encoded = encoder_of(x)(x)
    of_first = [weights[f"layers.0.2.{name}"] for name in ("into", "out_of", "bias")]
    of_last = weights["layers.1.weight"].split(64, 1)
    embeddings = []
    for into, out_of, bias, last in zip(*of_first, of_last, strict=True):
        hidden = (encoded * into) @ weights["layers.0.2.shared"].T * out_of
        embeddings.append((hidden + bias).relu() @ last.T)
    expected = torch.stack(embeddings).mean(0) + weights["layers.1.bias"]
    torch.testing.assert_close(model(x), expected.relu())


@pytest.mark.parametrize(
    ("keys", "shape", "tabular"),
    [
        ({}, (10,), True),
        ({"strategy": "vafl"}, (128,), True),
        ({}, (129,), False),
        ({}, (4, 4), False),
        ({"bottom-model": "mlp"}, (10,), False),
        ({"strategy": "cascaded"}, (10,), False),
        ({"server-update": "zeroth-order"}, (10,), False),
        ({"strategy": "dpzv"}, (10,), False),
        ({"strategy": "cascaded", "bottom-model": "tabular"}, (10,), True),
    ],
    ids=str,
)
def test_auto_is_tabular_for_tables(
    keys: dict[str, Any], shape: tuple[int, ...], tabular: bool
) -> None:
    model = build_bottom(resolve(keys), 0, torch.zeros(shape), 4)
    assert any(isinstance(each, PiecewiseLinear) for each in model.modules()) == tabular


def test_many_rows_without_gradients_are_embedded_in_parts() -> None:
    model = build_bottom(config_of(bottom_model="tabular"), 0, torch.zeros(30), 4)
    numbers = 8 * (30 * 33 + 64)
    assert model.rows_at_once == 2**22 // numbers < 1200
    x, sizes = torch.randn(1200, 30), []
    learn_bins(model, x.numpy())
    model.layers[0].register_forward_hook(lambda _, given, made: sizes.append(len(made)))
    whole = model(x)
    with torch.no_grad():
        torch.testing.assert_close(model(x), whole)
    assert sizes[0] == 1200 and max(sizes[1:]) == model.rows_at_once and sum(sizes[1:]) == 1200


def test_a_model_without_learnt_bins_embeds_nothing() -> None:
    """Else a forgotten `learn_bins` would train, as a worse model."""
    model = build_bottom(config_of(bottom_model="tabular"), 0, torch.zeros(5), 4)
    assert model(torch.ones(3, 5)).isnan().all()
    learn_bins(model, np.zeros((0, 5), np.float32))  # a party without training rows
    assert model(torch.ones(3, 5)).isfinite().all()


@pytest.mark.one_by_day
@pytest.mark.parametrize("keys", [{}, {"strategy": "ef-vfl", "labels": "shared"}], ids=str)
def test_bins_stay_at_the_party(run: Start, keys: dict[str, Any]) -> None:
    sent: list[bytes] = []
    kept: list[bytes] = []

    def listening(message: Message, context: Context) -> Message:
        reply: Message = client_app.app(message, context)
        for found, records in ((sent, reply.content), (kept, context.state)):
            arrays = [each for record in records.array_records.values() for each in record.values()]
            found.extend(each.data for each in arrays)
        return reply

    common = {"dataset": "breast-cancer", "bottom-model": "tabular", "checkpoint-every": 1}
    ended = run(2, {**common, "epochs": 2, **keys}, listening)  # type: ignore[arg-type]
    edges = [each.tobytes() for each in ended.parameters("party-0")[EDGES][:, :3]]
    assert len(sent) > 20 and not any(each in data for each in edges for data in sent)
    assert all(any(each in data for data in kept) for each in edges)  # the control


@pytest.mark.parametrize("strategy", ["split-nn", "cascaded"])
def test_bins_come_from_training_rows_and_do_not_train(run: Start, strategy: str) -> None:
    keys = {"dataset": "breast-cancer", "bottom-model": "tabular", "strategy": strategy}
    ended = run(2, {**ALL_ROWS, **keys, "epochs": 2})
    block = load_features(resolve(keys | ALL_ROWS), 1, 2)
    edges = ended.parameters("party-1")[EDGES]
    for found, column in zip(edges, block.train.T, strict=True):
        distinct = np.unique(np.quantile(column, np.linspace(0, 1, 33)).astype(np.float32))
        np.testing.assert_array_equal(found[: len(distinct)], distinct)
        assert (found[len(distinct) :] == distinct[-1]).all()
    every_row = np.concatenate([block.train, block.test])
    assert (edges[:, -1] < every_row.max(0)).any()  # a control: some test rows lie outside


@pytest.mark.nightly
def test_stacked_parties_keep_their_own_bins(run: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    keys: dict[str, Any] = {"dataset": "breast-cancer", "bottom-model": "tabular", "epochs": 2}
    keys |= ALL_ROWS
    parties = stacked.FEWEST
    together = run(parties, keys)
    monkeypatch.setattr(stacked, "FEWEST", parties + 1)
    apart = run(parties, keys)
    for number in range(parties):
        ours, theirs = (each.parameters(f"party-{number}") for each in (together, apart))
        np.testing.assert_array_equal(ours[EDGES], theirs[EDGES])
        for name, values in theirs.items():
            np.testing.assert_allclose(ours[name], values, atol=1e-4)
