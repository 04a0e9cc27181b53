"""Each page of `strategies.reference` and the strategy of that name take the same steps."""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from strategies.reference import asyrevel, cascaded, dpzv, ef_vfl, split_nn, vafl
from tests.conftest import ALL_ROWS, nightly, trained
from tests.pairwise import cases
from vfl_flower.config.options import CodecConfig
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_features
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.models.bottoms import build_bottom, embedding_size
from vfl_flower.models.tops import build_top
from vfl_flower.models.training import flat
from vfl_flower.protocol.codecs.top_k import TopK
from vfl_flower.protocol.directions.window import Directions
from vfl_flower.protocol.ends import Arrival
from vfl_flower.protocol.estimators.base import Estimator
from vfl_flower.protocol.estimators.first_order import FirstOrder
from vfl_flower.protocol.estimators.shared_labels import SharedLabels
from vfl_flower.protocol.estimators.zeroth_order import ZerothOrder
from vfl_flower.protocol.privacy.noise import ScalarNoise
from vfl_flower.protocol.systems import resolve

PARTIES = 3
SIZE = 4
KEYS = {
    "dataset": "digits",
    "bottom-hidden": 8,
    "embedding-size": SIZE,
    "bottom-model": "mlp",
    "top-model": "mlp",
    "top-hidden": 8,
    "epochs": 2,
    "batch-size": 256,
    "window": 1,
    "optimizer": "sgd",
    "noise-seed": 0,  # directions are drawn anew in every run otherwise
    **ALL_ROWS,
}
UNEQUAL: dict[str, Any] = {"delay": "exponential", "epochs": 1}
"""Delays by which no two uploads arrive at once, as a page's activations come one by one."""


class Recorded:
    """The random draws of a run of the engine, and every model after every step."""

    def __init__(self) -> None:
        self.groups: list[list[tuple[int, Tensor]]] = []  # uploads answered at once, and their rows
        self.tops: list[Tensor] = []  # after each group
        self.bottoms: dict[int, list[Tensor]] = defaultdict(list)  # by party, after each update
        self.directions: dict[int, list[Tensor]] = defaultdict(list)  # by party; -1: the top model
        self.noise: list[Tensor] = []  # on scalars
        self.top_noise: list[Tensor] = []

    def batches(self) -> list[Tensor]:
        """The rows of each group of a synchronous run, in which all parties have the same."""
        assert all(rows.equal(group[0][1]) for group in self.groups for _, rows in group)
        return [group[0][1] for group in self.groups]

    def activations(self) -> list[tuple[int, Tensor]]:
        """The uploads of an asynchronous run, which are answered one by one."""
        assert {len(group) for group in self.groups} == {1}
        return [group[0] for group in self.groups]


@pytest.fixture(params=["shuffle", nightly("replacement")])
def play(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Callable[..., Recorded]:
    """Run a strategy in this process; what it drew and learned, step by step."""

    def start(strategy: str, **keys: Any) -> Recorded:
        of = Recorded()
        answer, directions = LabelHolder.answer, LabelHolder.directions
        added, added_to_top = ScalarNoise.added_to, ScalarNoise.added_to_gradients

        def answered(self: LabelHolder, arrivals: Sequence[Arrival]) -> Any:
            answers = answer(self, arrivals)
            of.groups.append([(each.party, each.window.index) for each in arrivals])
            of.tops.append(flat(self.top).clone())
            return answers

        def drawn(self: LabelHolder) -> Directions:
            found = directions(self)
            of.directions[-1].append(found.stack(1)[0].clone())
            return found

        def noised(self: ScalarNoise, scalars: Tensor, divisors: Sequence[int]) -> Tensor:
            sent = added(self, scalars, divisors)
            of.noise.append((sent - scalars).float())
            return sent

        def noised_top(self: ScalarNoise, gradients: Sequence[Tensor], divisor: int) -> Any:
            sent = added_to_top(self, gradients, divisor)
            vectors = [torch.cat([each.flatten() for each in all]) for all in (sent, gradients)]
            of.top_noise.append((vectors[0] - vectors[1]).float())
            return sent

        monkeypatch.setattr(LabelHolder, "answer", answered)
        monkeypatch.setattr(LabelHolder, "directions", drawn)
        monkeypatch.setattr(ScalarNoise, "added_to", noised)
        monkeypatch.setattr(ScalarNoise, "added_to_gradients", noised_top)
        for kind in (FirstOrder, SharedLabels, ZerothOrder):
            _watch(monkeypatch, kind, of)
        trained(PARTIES, {**KEYS, "sampling": request.param, "strategy": strategy, **keys})
        assert len(of.groups) > 8
        return of

    return start


def _watch(monkeypatch: pytest.MonkeyPatch, kind: type[Estimator], of: Recorded) -> None:
    """Record the directions of a party's upload, and its model after each update."""
    update, embed = kind.update, kind.embed

    @functools.wraps(update)
    def updated(self: Any, end: Any, arrays: Any, order: Any, window: Any) -> None:
        update(self, end, arrays, order, window)
        if type(self) is kind:
            of.bottoms[end.index].append(flat(end.model).clone())

    @functools.wraps(embed)
    def embedded(self: Any, end: Any, order: Any, window: Any) -> Any:
        if kind is ZerothOrder:
            of.directions[end.index].append(end.directions(order).stack(1)[0].clone())
        return embed(self, end, order, window)

    monkeypatch.setattr(kind, "update", updated)
    monkeypatch.setattr(kind, "embed", embedded)


def parts(**keys: Any) -> tuple[list[nn.Module], list[Tensor], nn.Module, Tensor]:
    """Bottom models, each party's columns, the top model and the labels that a run starts from.

    The models are plain layers of torch; of ours they have the first parameters alone.
    """
    config = resolve({**KEYS, **keys})
    labels = load_labels(config)
    x = [torch.from_numpy(load_features(config, m, PARTIES).train) for m in range(PARTIES)]
    size = embedding_size(config, labels.outputs)
    bottoms: list[nn.Module] = []
    for m in range(PARTIES):
        first, last = nn.Linear(x[m][0].numel(), 8), nn.Linear(8, SIZE)
        bottoms.append(nn.Sequential(nn.Flatten(), first, nn.ReLU(), last, nn.ReLU()))
        _take_over(bottoms[m], build_bottom(config, m, x[m][0], size))
    top = nn.Sequential(nn.Linear(PARTIES * SIZE, 8), nn.ReLU(), nn.Linear(8, labels.outputs))
    _take_over(top, build_top(config, [size] * PARTIES, labels.outputs))
    return bottoms, x, top, torch.from_numpy(labels.train)


def _take_over(model: nn.Module, ours: nn.Module) -> None:
    values = ours.state_dict().values()
    model.load_state_dict(dict(zip(model.state_dict(), values, strict=True)))


def assert_same_steps(
    of: Recorded,
    steps: Iterator[None],
    bottoms: Sequence[nn.Module],
    top: nn.Module,
    within: float = 1e-6,
) -> None:
    """Follow a page step by step; after each, its models equal the recorded run's.

    ``within``: of a parameter, or of its size if that is above one. Sums have another order.
    """
    first = parameters_to_vector(top.parameters()).detach()
    before = [parameters_to_vector(model.parameters()).detach() for model in bottoms]
    updates = {m: iter(of.bottoms[m]) for m in range(PARTIES)}
    same = functools.partial(torch.testing.assert_close, rtol=within, atol=within)
    for group, expected in zip(of.groups, of.tops, strict=True):
        next(steps)
        same(parameters_to_vector(top.parameters()).detach(), expected)
        for m, _ in group:
            same(parameters_to_vector(bottoms[m].parameters()).detach(), next(updates[m]))
    assert next(steps, "end") == "end"
    # Had nobody learned anything, all would be equal as well.
    assert (parameters_to_vector(top.parameters()) - first).norm() > 20 * within
    for model, start in zip(bottoms, before, strict=True):
        assert (parameters_to_vector(model.parameters()) - start).norm() > 20 * within


def test_split_nn(play: Callable[..., Recorded]) -> None:
    of = play("split-nn", **{"party-lr": 0.1, "server-lr": 0.2})
    bottoms, x, top, y = parts()
    parties = [split_nn.Party(*each, 0.1) for each in zip(bottoms, x, strict=True)]
    holder = split_nn.LabelHolder(top, y, 0.2)
    assert_same_steps(of, split_nn.train(parties, holder, of.batches()), bottoms, top)


@pytest.mark.parametrize(("strategy", "quorum"), [("vafl", 1), ("vafl-t", 2)])
def test_vafl(play: Callable[..., Recorded], strategy: str, quorum: int) -> None:
    of = play(strategy, **{"party-lr": 0.1, "server-lr": 0.2, **UNEQUAL})
    assert max(map(len, of.groups)) == quorum
    bottoms, x, top, y = parts()
    clients = [vafl.Client(*each, 0.1) for each in zip(bottoms, x, strict=True)]
    server = vafl.Server(top, y, PARTIES, SIZE, 0.2)
    if quorum == 1:
        steps = vafl.algorithm_1(clients, server, of.activations())
    else:
        steps = vafl.algorithm_2(clients, server, of.groups)
    assert_same_steps(of, steps, bottoms, top)


@pytest.mark.parametrize("directions", ["gaussian", "sphere"])
def test_asyrevel(play: Callable[..., Recorded], directions: str) -> None:
    rates = {"party-lr": 0.003, "server-lr": 0.003}
    of = play("asyrevel", directions=directions, **rates, **UNEQUAL, mu=0.1)
    bottoms, x, top, y = parts()

    def phi(model: nn.Module) -> float:
        size = sum(each.numel() for each in model.parameters())
        return size if directions == "sphere" else 1

    parties = [
        asyrevel.Party(model, x[m], 0.003, 0.1, iter(of.directions[m]).__next__, phi(model))
        for m, model in enumerate(bottoms)
    ]
    draw = iter(of.directions[-1]).__next__
    server = asyrevel.Server(top, y, PARTIES, SIZE, 0.003, 0.1, draw, phi(top))
    assert_same_steps(of, asyrevel.train(parties, server, of.activations()), bottoms, top, 2e-5)


@pytest.mark.parametrize("strategy", ["cascaded", "syn-zoo"])
def test_cascaded(play: Callable[..., Recorded], strategy: str) -> None:
    synchronous = strategy == "syn-zoo"
    server_lr = 0.003 if synchronous else 0.1
    rates = {"party-lr": 0.003, "server-lr": server_lr}
    of = play(strategy, **rates, **({} if synchronous else UNEQUAL), mu=0.1)
    bottoms, x, top, y = parts()
    clients = [
        cascaded.Client(model, x[m], 0.003, 0.1, iter(of.directions[m]).__next__)
        for m, model in enumerate(bottoms)
    ]
    draw = iter(of.directions[-1]).__next__
    server = cascaded.Server(top, y, PARTIES, SIZE, server_lr, 0.1, draw)
    if synchronous:
        steps = cascaded.algorithm_2(clients, server, of.batches())
    else:
        steps = cascaded.algorithm_1(clients, server, of.activations())
    assert_same_steps(of, steps, bottoms, top, 2e-5)


PAPERS = {"initial-surrogates": "embeddings"}


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    ("play", "labels", "bits", "surrogates"),
    [
        *(
            (*case, {})
            for case in cases(["shuffle", "replacement"], ["private", "shared"], [16, 32, None])
        ),
        *(
            (*case, PAPERS)
            for case in cases(["shuffle", "replacement"], ["private", "shared"], [16, 32])
        ),
    ],
    indirect=["play"],
)
def test_ef_vfl(
    play: Callable[..., Recorded], labels: str, bits: int | None, surrogates: dict[str, Any]
) -> None:
    top_k = {"codec": "top-k", "keep": 0.3, "bits": bits} if bits else {"codec": "identity"}
    keys = {"labels": labels, "party-lr": 0.1, "server-lr": 0.2, **top_k, **surrogates}
    of = play("ef-vfl", **keys)
    bottoms, x, top, y = parts()
    # The page's top-k of 32 bits, which sends values as they are
    compress = on_the_wire(0.3) if bits == 16 else ef_vfl.top_k(0.3 if bits else 1.0)
    clients = [ef_vfl.Client(*each, SIZE, 0.1, compress) for each in zip(bottoms, x, strict=True)]
    server = ef_vfl.Server(top, y, PARTIES, SIZE, 0.2)
    if surrogates:
        ef_vfl.initial_surrogates(clients, server)
    algorithm = ef_vfl.algorithm_2 if labels == "private" else ef_vfl.algorithm_1
    assert_same_steps(of, algorithm(clients, server, of.batches()), bottoms, top)


def on_the_wire(keep: float) -> ef_vfl.Compressor:
    """The page's top-k, with values as messages have them: 2 bytes each."""
    codec = TopK(CodecConfig(codec="top-k", keep=keep))

    def compress(block: Tensor) -> Tensor:
        sizes = np.array([block.numel()])
        arrays = codec.encode("x", block.numpy(), sizes, "")
        sent = torch.from_numpy(codec.decode("x", arrays, (len(block), SIZE), sizes))
        torch.testing.assert_close(sent, ef_vfl.top_k(keep)(block), rtol=2**-11, atol=1e-7)
        return sent

    return compress


@pytest.mark.one_by_day
@pytest.mark.parametrize("play", ["of its calibration"], indirect=True)
@pytest.mark.parametrize("calibration", ["known", "paper"])
def test_dpzv(play: Callable[..., Recorded], calibration: str) -> None:
    sampling = "shuffle" if calibration == "known" else "poisson"
    keys = {"calibration": calibration, "sampling": sampling, "noise-multiplier": 2.0}
    rates = {"party-lr": 0.01, "server-lr": 0.1, "mu": 0.1, "clip": 0.5, "top-clip": 0.25}
    rates["epsilon"] = 1e6  # a budget that is not spent
    few: dict[str, Any] = {"test-fraction": 0.8, "batch-size": 64}  # a page clips row by row
    of = play("dpzv", **keys, **rates, **UNEQUAL, **few)
    bottoms, x, top, y = parts(**few)
    devices = [
        dpzv.Device(model, x[m], 0.01, 0.1, iter(of.directions[m]).__next__)
        for m, model in enumerate(bottoms)
    ]
    noise, top_noise = iter(of.noise).__next__, iter(of.top_noise).__next__
    server = dpzv.Server(
        top,
        y,
        PARTIES,
        SIZE,
        0.1,
        smoothing=0.1,
        clip=0.5,
        noise=lambda: noise()[0],
        top_clip=0.25,
        top_noise=top_noise if calibration == "known" else None,
    )
    steps = _of_each_size(devices, server, of, calibration == "paper")
    assert bool(of.top_noise) == (calibration == "known")
    assert_same_steps(of, steps, bottoms, top, 2e-5)


def _of_each_size(
    devices: list[dpzv.Device], server: dpzv.Server, of: Recorded, poisson: bool
) -> Iterator[None]:
    """Steps of DPZV: the last mini-batch of a shuffled epoch is smaller, and B is its size."""
    for activation in of.activations():
        rows = activation[1]
        yield from dpzv.train(devices, server, [activation], 64 if poisson else len(rows))


@pytest.mark.parametrize("play", ["shuffle"], indirect=True)
def test_a_page_with_another_rate_is_not_the_same(play: Callable[..., Recorded]) -> None:
    of = play("split-nn", **{"party-lr": 0.1, "server-lr": 0.2})
    bottoms, x, top, y = parts()
    parties = [split_nn.Party(*each, 0.1001) for each in zip(bottoms, x, strict=True)]
    holder = split_nn.LabelHolder(top, y, 0.2)
    with pytest.raises(AssertionError):
        assert_same_steps(of, split_nn.train(parties, holder, of.batches()), bottoms, top)


def test_directions_of_dpzv_are_on_the_sphere_of_radius_root_d() -> None:
    model = nn.Linear(3, 2)
    drawn = [dpzv.on_sphere(model)() for _ in itertools.repeat(None, 3)]
    assert all(abs(float(each.norm()) - 8**0.5) < 1e-5 for each in drawn)
