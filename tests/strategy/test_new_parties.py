"""Runs that begin by the models of an earlier one: new parties, and new rows."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Context, Message
from torch import Tensor, nn

from tests.conftest import ALL_ROWS, Start, nightly
from tests.organisations import (
    ID,
    Organisations,
    cancer,
    change,
    contents,
    cut,
    kept_state,
    read,
    write,
)
from tests.pairwise import pairwise
from tests.strategy.test_checkpoint import Cut, assert_equal_runs, cut_after
from vfl_flower import client_app
from vfl_flower.api.training import train
from vfl_flower.config.errors import ConfigError, PartyError, VflError
from vfl_flower.data.labels import as_known, encode_labels
from vfl_flower.data.split import divide, held_out_again, used_by
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch.engines import Finished as Run
from vfl_flower.launch.engines import run_local, run_supernodes
from vfl_flower.models.top_layers import TopModel
from vfl_flower.models.tops import build_top, grow_top
from vfl_flower.models.training import load_model, model_arrays
from vfl_flower.party import state_file
from vfl_flower.party.state import load_about
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.aggregation.partial import PartialTop
from vfl_flower.protocol.systems import resolve
from vfl_flower.tasks.inference.contribution import contribution

APP = client_app.app
HERE = str(Path(__file__).absolute())
TOWERS = str(Path(__file__).parents[1] / "towers.py")
KEYS: dict[str, Any] = {
    **{"strategy": "split-nn", "align": "any", "epochs": 3, "batch-size": 64, "noise-seed": 0},
    "combine": "concat",  # so that a new party begins without an effect
    **{"bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8, "party-lr": 0.5, "server-lr": 0.5},
}


def first(organisations: Organisations, parties: int) -> Organisations:
    words = organisations.words[:parties]
    return replace(organisations, files=organisations.files[:parties], words=words)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    """A label holder and three parties, of whom two have trained a model."""
    organisations = cut(tmp_path_factory.mktemp("trained"), cancer(), parties=3, known=0.6)
    first(organisations, 2).run("two", KEYS)
    return organisations


@pytest.fixture
def three(tmp_path: Path, trained: Organisations) -> Organisations:
    folder = Path(shutil.copytree(trained.folder, tmp_path / "copy"))
    files = [folder / path.name for path in trained.files]
    return Organisations(folder, folder / trained.labels.name, files)


def grown(organisations: Organisations, out: str, **keys: Any) -> Run:
    return organisations.run(out, {"grow": str(organisations.folder / "two"), **keys})


# --- the top model ------------------------------------------------------------------------------

SIZES, OUTPUTS, ROWS = [3, 3], 3, 40


def exact(model: nn.Module, generator: torch.Generator) -> None:
    """Set parameters whose sums are exact, in whatever order a processor adds them up."""
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randint(-4, 5, p.shape, generator=generator) / 4)


def rows_of(parties: int, own: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Embeddings, features of the label holder's own, and who is there."""
    present = torch.randint(0, 2, (ROWS, parties), generator=generator).float()
    h = torch.randint(-8, 9, (ROWS, 3 * parties), generator=generator) / 4
    features = torch.randint(-8, 9, (ROWS, own), generator=generator) / 4
    return h * present.repeat_interleave(3, 1), features, present


@pairwise(top_model=["mlp", "linear"], combine=["concat", "mean", "sum"], own=[0, 2])
def test_a_grown_top_model_says_the_same_without_new_parties(
    top_model: str, combine: str, own: int
) -> None:
    keys = {"bottom-model": "mlp", "embedding-size": 3}
    keys |= {"top-model": top_model, "combine": combine}
    config = resolve({**keys, "subsets": "sampled"})
    generator = torch.Generator().manual_seed(0)
    aggregation = aggregation_of(config)
    then, now = (aggregation.build_top(each, OUTPUTS, own) for each in (SIZES, [*SIZES, 3]))
    exact(then, generator)
    grow_top(config, now, model_arrays(then), SIZES, PartialTop)
    h, features, present = rows_of(2, own, generator)
    said = then(torch.cat([h, features, present], 1))
    news = torch.randint(-8, 9, (ROWS, 3), generator=generator) / 4

    def of_three(third: Tensor) -> Tensor:
        return now(torch.cat([h, news, features, present, third], 1))

    nobody, there = torch.zeros(ROWS, 1), torch.ones(ROWS, 1)
    assert torch.equal(of_three(nobody), said) and len(said.unique()) > ROWS
    if combine == "concat":  # of a new party's columns nothing is believed yet
        assert torch.equal(of_three(there), said)
        arrays = model_arrays(then)  # the control: as if new columns were the last
        arrays["layers.0.weight"] = np.pad(arrays["layers.0.weight"], ((0, 0), (0, 4)))
        load_model(now, arrays)
        assert not torch.equal(of_three(nobody), said)
    else:
        assert not torch.equal(of_three(there), said)


@pytest.mark.parametrize("combine", ["concat", "sum"])
def test_a_model_of_all_its_parties_becomes_one_of_any_subset(combine: str) -> None:
    keys = {"embedding-size": 3, "combine": combine}
    generator = torch.Generator().manual_seed(0)
    then = build_top(resolve(keys), SIZES, OUTPUTS, 2)
    config = resolve({**keys, "subsets": "sampled"})
    now = aggregation_of(config).build_top([*SIZES, 3], OUTPUTS, 2)
    exact(then, generator)
    grow_top(config, now, model_arrays(then), SIZES, TopModel)
    h, features, _ = rows_of(2, 2, generator)
    two = torch.tensor([1.0, 1.0, 0.0]).expand(ROWS, 3)
    given = torch.cat([h, torch.zeros(ROWS, 3), features, two], 1)
    assert torch.equal(now(given), then(torch.cat([h, features], 1)))


@pytest.mark.parametrize("combine", ["concat", nightly("mean"), nightly("sum")])
@pytest.mark.parametrize("own", [nightly(0), 3])
def test_a_run_first_measures_the_earlier_model(tmp_path: Path, combine: str, own: int) -> None:
    organisations = cut(tmp_path, cancer(), parties=3, known=0.6, own=own)
    two = first(organisations, 2)
    two.run("two", {**KEYS, "combine": combine})
    grown(organisations, "three", **{"party-lr": 0.0, "server-lr": 0.0, "epochs": 1})
    one, other = two.predict("two"), organisations.predict("three", without="2")
    assert one["parties"].equals(other["parties"])
    known = one["parties"].astype(str) != "none"  # unknown people get the labels' mean
    then, now = (each.filter(like="probability")[known] for each in (one, other))
    np.testing.assert_allclose(now, then, rtol=1e-6)  # rounding of other matrices
    assert then.nunique().min() > 100


# --- parties of then ----------------------------------------------------------------------------

SYSTEMS: list[Any] = [
    {},
    nightly({"optimizer": "adamw", "weight-decay": 0.1, "party-lr": 0.01, "window": 2}),
    nightly({"strategy": "vafl", "delay": "poisson"}),
    nightly({"strategy": "vafl-t", "quorum": 2, "max-delay": 3}),
    {"strategy": "ef-vfl", "downlink-codec": "top-k", "downlink-compression": "error-feedback"},
    {"strategy": "cascaded", "party-lr": 0.05, "server-lr": 0.05, "window": 3},
    nightly({"strategy": "cascaded", "codec": "qsgd", "compression": "error-feedback"}),
    nightly({"strategy": "syn-zoo", "perturbs": "all", "differences": "two-sided"}),
]


@pytest.mark.one_by_day
@pytest.mark.parametrize("system", SYSTEMS, ids=lambda each: "-".join(map(str, each.values())))
def test_frozen_parties_stay_and_others_learn(three: Organisations, system: dict[str, Any]) -> None:
    then = Run(three.folder / "two")
    for freeze in (True, False):
        keys = {"subsets": "sampled", "epochs": 1, **ALL_ROWS, **system, "freeze": freeze}
        found = grown(three, f"three-{freeze}", **keys)
        for party in range(3):
            traffic = found.summary["by_party"][party]
            if "max-delay" not in system:  # by which it is sent numbers of rows
                assert bool(traffic["bytes_down"]) == (not freeze or party == 2)
            if party < 2:
                was, now = (each.parameters(f"party-{party}") for each in (then, found))
                same = {name: np.array_equal(was[name], now[name]) for name in was}
                assert was.keys() == now.keys()
                assert all(each == (freeze or "edges" in name) for name, each in same.items())
        top = found.parameters("top")["layers.0.weight"]
        assert not np.array_equal(top[:, :8], then.parameters("top")["layers.0.weight"][:, :8])
        assert top[:, 8:12].any() and top[:, 14].any()  # the new party's, and its placeholder


@pytest.mark.nightly
def test_what_a_frozen_model_keeps_besides_parameters_stays_too(tmp_path: Path) -> None:
    organisations = cut(tmp_path, cancer(), parties=3, known=0.9)
    tower = {"bottom-model": f"{TOWERS}:Normal", "model-args": "drop=0.2"}
    keys = {**KEYS, **tower, "align": "psi", "subsets": "sampled", "batch-size": 50, "epochs": 1}
    then = first(organisations, 2).run("two", keys)
    for freeze in (True, False):
        found = grown(organisations, f"three-{freeze}", freeze=freeze)
        for party in range(2):
            was, now = (each.parameters(f"party-{party}") for each in (then, found))
            assert any("running_mean" in name for name in was)
            same = [np.array_equal(was[name], now[name]) for name in was]
            assert all(same) if freeze else not any(same)


@pytest.mark.nightly
def test_new_rows_are_prepared_as_before_and_have_the_earlier_classes(tmp_path: Path) -> None:
    table = cancer()
    table["label"] = np.where(table["label"] == 1, "good", "bad")
    table.loc[table.index % 9 == 0, "label"] = "ugly"
    organisations = cut(tmp_path, table, parties=2, own=4, known=0.9)
    everyone = {path: read(path) for path in (organisations.labels, *organisations.files)}
    early = set(table[ID][:300])
    for path in everyone:
        change(path, lambda frame: frame[frame[ID].isin(early)])
    then = organisations.run("two", {**KEYS, "min-parties": 0})
    for path, frame in everyone.items():  # other people, of other sizes, and none of a class
        later = frame[~frame[ID].isin(early)].copy()
        numbers = [name for name in later if str(name).startswith("f")]
        later[numbers] = 5 * later[numbers] + 3
        write(later[later["label"] != "ugly"] if "label" in later else later, path)
    found = grown(organisations, "more", epochs=2)
    was, now = checkpoint.load(then.folder), checkpoint.load(found.folder)
    for name in ("classes", "mean", "deviation", "preparation"):
        assert was.about_labels[name] == now.about_labels[name]
    assert was.about_labels["classes"] == ["bad", "good", "ugly"]
    said = organisations.predict("more")
    assert "probability_ugly" in said and len(said) > 200
    prepared = [
        json.loads(load_about(state_file.read(kept_state(run.folder, 1))))["preparation"]
        for run in (then, found)
    ]
    assert prepared[0] == prepared[1]


def test_labels_have_the_earlier_model_s_names() -> None:
    data = resolve({}).data
    new = encode_labels(data, np.array(["c", "a", "c", "a"]), np.array(["a", "c"]), "")
    found = as_known(data, new, {"classes": ["a", "b", "c"]})
    assert found.classes == ("a", "b", "c") and found.outputs == 3
    assert found.train.tolist() == [2, 0, 2, 0] and found.test.tolist() == [0, 2]
    with pytest.raises(
        ConfigError, match="have 1 values, such as 'c', that the earlier run's model"
    ):
        as_known(data, new, {"classes": ["a", "b"]})
    data = resolve({"target": "regression"}).data
    new = encode_labels(data, np.array([10.0, 20, 30]), np.array([5.0, 40]), "")
    found = as_known(data, new, {"classes": [], "mean": 8.0, "deviation": 4.0})
    np.testing.assert_allclose(found.train, [0.5, 3, 5.5], rtol=1e-6)
    np.testing.assert_allclose(found.test, [-0.75, 8], rtol=1e-6)
    assert (found.mean, found.deviation) == (8, 4)


# --- whom is learnt from ------------------------------------------------------------------------


def test_rows_that_were_held_out_are_again() -> None:
    data = resolve(ALL_ROWS).data
    generator = np.random.default_rng(0)
    known = generator.permutation(200)[:150]
    train, test = (set(known[part]) for part in divide(data, 150)[:2])
    used = used_by(data, known, (known[:0], known[:0]))
    for rows in (known, generator.permutation(200), generator.permutation(known[:90])):
        at = held_out_again(data, known, used, rows)
        assert sorted(at) == list(range(len(rows)))
        now = rows[at][divide(data, len(rows))[1]]
        assert len(train & set(now)) == max(0, len(now) - len({*rows} - train)) < 6
        assert len(set(now) & test) == min(len(now), len(test & set(rows)))
        again = held_out_again(data, known, used, rows[at])
        assert again.tolist() == list(range(len(rows)))  # so it may be used again
    # Where fewer are left than are to be held out, the others are.
    rows = np.array([*sorted(train)[:40], *sorted(test)[:4]])
    now = rows[held_out_again(data, known, used, rows)][divide(data, 44)[1]]
    assert set(sorted(test)[:4]) < set(now)


def test_rows_that_trained_a_model_choose_the_next_rather_than_test_it() -> None:
    data, known, new = resolve({}).data, np.arange(1000), range(1000, 1060)
    learnt = divide(data, len(known))[0]
    rows = np.random.default_rng(0).permutation([*learnt[:250], *new])
    _, held_out, validation = divide(data, len(rows))
    assert len(held_out) > len(new)  # so some rows that trained the model are held out
    used = used_by(data, known, (known[:0], known[:0]))
    now = rows[held_out_again(data, known, used, rows)]
    assert set(new) <= set(now[held_out[validation:]])


def test_rows_that_chose_a_model_choose_again_rather_than_test_it() -> None:
    data = resolve({}).data
    generator = np.random.default_rng(0)
    known = generator.permutation(1300)[:1000]
    rows = generator.permutation(np.concatenate([known, np.arange(1300, 1500)]))
    then = known[divide(data, 1000)[1]]
    chose, tested = set(then[: divide(data, 1000)[2]]), set(then[divide(data, 1000)[2] :])
    _, held_out, validation = divide(data, len(rows))
    without = set(rows[held_out[validation:]])
    assert chose & without and not tested <= without  # as the rows were drawn
    used = used_by(data, known, (known[:0], known[:0]))
    now = rows[held_out_again(data, known, used, rows)]
    assert sorted(now) == sorted(rows)
    assert not chose & set(now[held_out[validation:]]) and tested <= set(now[held_out[validation:]])
    assert not set(now[held_out]) & (set(known) - set(then))


@pytest.mark.nightly
@pytest.mark.parametrize("align", ["any", "psi"])
def test_no_row_that_then_was_learnt_from_is_held_out(tmp_path: Path, align: str) -> None:
    organisations = cut(tmp_path, cancer(), parties=3, known=0.8)
    keys = {**KEYS, "noise-seed": -1, "align": align, "epochs": 1, "subsets": "sampled"}
    first(organisations, 2).run("two", keys)
    organisations.run("anew", keys)
    for out in ("three", "once more"):  # the second by the alignment of the first
        grown(organisations, out, **{"batch-size": 1000})

    def of(out: str, part: int) -> set[int]:
        found = checkpoint.load(tmp_path / out)
        return set(found.rows[divide(found.config.data, len(found.rows))[part]])

    learnt = of("two", 0)
    for out in ("three", "once more"):
        wrong = len(learnt & of(out, 1))
        assert wrong == 0 if align == "any" else wrong < 15
    assert len(learnt & of("anew", 1)) > 40  # the control
    assert of("three", 1) == of("once more", 1)


def test_rows_that_a_model_before_learnt_from_are_not_new() -> None:
    data = resolve({}).data
    generator = np.random.default_rng(1)
    first, second, rows = (generator.permutation(n) for n in (1000, 200, 1000))
    none = first[:0]
    before = used_by(data, first, (none, none))
    second = second[held_out_again(data, first, before, second)]

    def tested(used: tuple[Any, Any]) -> set[int]:
        _, held_out, validation = divide(data, 1000)
        return set(rows[held_out_again(data, second, used, rows)][held_out[validation:]])

    learnt = set(before[0]) | set(second[divide(data, 200)[0]])
    assert not tested(used_by(data, second, before)) & learnt
    assert len(tested(used_by(data, second, (none, none))) & learnt) > 20  # the control


def test_test_rows_that_then_was_learnt_from_are_told(tmp_path: Path, own_log: list[str]) -> None:
    organisations = cut(tmp_path, cancer(), parties=2, known=1.0)
    organisations.run("two", {**KEYS, "align": "ids", "epochs": 1})
    said = "test rows helped to train or choose the model with which the run begins"
    grown(organisations, "as then", epochs=1)
    assert not any(said in line for line in own_log)
    found = grown(organisations, "three", epochs=1, **{"test-fraction": 0.4})
    assert found.summary["config"]["align"] == "ids"
    assert any(said in line for line in own_log)


def test_a_file_in_another_order_holds_out_others(three: Organisations, own_log: list[str]) -> None:
    change(three.labels, lambda frame: frame.iloc[::-1])
    grown(three, "three", epochs=1)
    assert any("may have trained on rows that are held out now" in line for line in own_log)


# --- later --------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_a_grown_model_predicts_and_says_what_parties_are_worth(three: Organisations) -> None:
    found = grown(three, "three", epochs=6)
    said = three.predict("three").set_index(ID)
    labels = read(three.labels).set_index(ID)["label"]
    known = said[said["parties"].astype(str) != "none"]
    assert "2" in set("+".join(known["parties"].astype(str)).split("+"))
    assert (known["prediction"] == labels.loc[known.index]).mean() > 0.75
    worth = contribution(found.folder)
    assert len(worth["parties"]) == 3 and worth["parties"][2]["value"] > 0.02
    assert worth["all"] == pytest.approx(found.summary["test_auc"], abs=1e-6)


@pytest.mark.nightly
def test_a_grown_run_is_grown_from_again(three: Organisations) -> None:
    grown(three, "three", epochs=1, freeze=True)
    before = contents(three.folder / "three")
    found = three.run("again", {"grow": str(three.folder / "three"), "epochs": 2})
    assert contents(three.folder / "three") == before
    for party in range(3):
        was, now = (
            Run(three.folder / out).parameters(f"party-{party}") for out in ("three", "again")
        )
        same = {name: np.array_equal(was[name], now[name]) for name in was}
        assert same and all(each == ("edges" in name) for name, each in same.items())
    assert found.summary["test_auc"] > 0.8


@pytest.mark.nightly
@pytest.mark.parametrize(
    "keys",
    [
        nightly({"freeze": True}),
        nightly({"strategy": "ef-vfl", "downlink-codec": "top-k"}),
        nightly({"strategy": "vafl", "freeze": True, "delay": "exponential"}),
        {"strategy": "cascaded", "window": 2, "freeze": True},
    ],
    ids=lambda each: "-".join(map(str, each.values())),
)
def test_a_growing_run_that_is_cut_short_goes_on(
    three: Organisations, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**keys, "subsets": "sampled", "epochs": 3, "checkpoint-every": 9, "noise-seed": 0}
    whole = grown(three, "whole", **keys)
    with cut_after(2), pytest.raises(Cut):
        grown(three, "cut", **keys)
    shutil.rmtree(three.folder / "two")  # it is not needed any more
    found = three.resume("cut", **{"checkpoint-every": 9})
    assert_equal_runs(found, whole)


def test_another_optimizer_begins_with_its_default_rates(run: Start, tmp_path: Path) -> None:
    keys = {"dataset": "breast-cancer", "epochs": 1, "batch-size": 64, "party-lr": 0.3}
    then = str(run(2, keys).folder)
    same, other = (
        run(2, {"grow": then, **more}).summary["config"] for more in ({}, {"optimizer": "adam"})
    )
    assert same["party-lr"] == 0.3
    assert other["party-lr"] == other["server-lr"] == 5e-4  # of adam on few rows


def test_rows_of_a_divided_data_set_are_trained_on_for_longer(run: Start, tmp_path: Path) -> None:
    keys = {"dataset": "breast-cancer", "epochs": 2, "combine": "mean", "batch-size": 64}
    then = run(2, keys)
    longer = run(2, {"grow": str(then.folder), "epochs": 5})
    assert longer.summary["config"]["combine"] == "mean"
    assert longer.history[0]["test_loss"] == then.summary["test_loss"]  # the earlier models
    assert longer.history[1]["test_loss"] < then.summary["test_loss"]
    with pytest.raises(ConfigError, match=r"^breast-cancer is partitioned: 3 parties would"):
        run(3, {"grow": str(then.folder)})


@pytest.mark.nightly
def test_frames_that_are_handed_over_grow_a_model_too() -> None:
    table = cancer()
    frames = [
        table[[ID, *(f"f{n}" for n in range(10 * m, 10 * m + 10))]].sample(frac=0.6, random_state=m)
        for m in range(3)
    ]
    keys = {"align": "any", "epochs": 3, "party-lr": 0.5, "server-lr": 0.5}
    labels = table[[ID, "label"]]
    model = train(keys, frames[:2], labels, id=ID)
    grown_one = train({"grow": str(model.folder), "freeze": True}, frames, labels, id=ID)
    assert grown_one.summary["parties"] == 3 and grown_one.summary["config"]["align"] == "any"
    assert len(grown_one.predict(frames, id=ID)) > 500  # everyone whom a party knows


@pytest.mark.nightly
@pytest.mark.parametrize("freeze", [True, False])
def test_on_supernodes_it_is_as_in_process(three: Organisations, freeze: bool) -> None:
    keys = {**three.keys, "grow": str(three.folder / "two"), "freeze": freeze, "window": 4}
    runs = [
        start(3, {**keys, "out": str(three.folder / name)}, node_configs=three.node_configs)
        for name, start in (("local", run_local), ("nodes", run_supernodes))
    ]
    assert [each.summary["engine"] for each in runs] == ["local", "supernodes"]
    assert runs[1].summary["transport"] == "stream"
    for name, values in runs[0].parameters("top").items():
        np.testing.assert_allclose(runs[1].parameters("top")[name], values, atol=1e-5)
    for name in ("steps", "exchanges", "bytes_up", "bytes_down", "evaluation_bytes"):
        assert runs[0].summary[name] == runs[1].summary[name]
    assert runs[0].summary["test_auc"] == pytest.approx(runs[1].summary["test_auc"], abs=1e-6)
    said = [three.predict(name).set_index(ID) for name in ("local", "nodes")]
    one, other = (each.filter(like="prob") for each in said)
    np.testing.assert_allclose(one, other, atol=1e-5)


def knows_of_two(message: Message, context: Context) -> Message:
    """The earlier parties' SuperNodes, which were started for two parties, at each message."""
    if context.node_config["partition-id"] in (0, 1):
        context.node_config = {**context.node_config, "num-partitions": 2}
    return APP(message, context)


@pytest.mark.parametrize("more", [{}, nightly({"freeze": True})])
def test_earlier_supernodes_need_no_other_number_of_parties(
    three: Organisations, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {**three.keys, **KEYS, "grow": str(three.folder / "two"), "epochs": 1, **more}

    def ran(out: str, client: Any = knows_of_two) -> Run:
        given = {**keys, "out": str(three.folder / out)}
        return run_local(3, given, client, node_configs=three.node_configs)

    expected, found = ran("expected", APP), ran("three")
    assert found.summary["parties"] == 3
    for name, values in expected.parameters("top").items():
        np.testing.assert_array_equal(found.parameters("top")[name], values)
    with monkeypatch.context() as patched:
        patched.setattr(client_app, "app", knows_of_two)
        said = [three.predict(name) for name in ("expected", "three")]
    pd.testing.assert_frame_equal(*said)
    # The control: a party that is not told counts two.
    monkeypatch.setattr("vfl_flower.transport.wire.replace", lambda order, of_parties: order)
    with pytest.raises((ConfigError, PartyError)):
        ran("not-told")


# --- bad input ----------------------------------------------------------------------------------


class Flat(nn.Module):
    def __init__(self, sizes: list[int], outputs: int) -> None:
        super().__init__()
        self.last = nn.Linear(sum(sizes), outputs)

    def forward(self, h: Tensor, present: Tensor) -> Tensor:
        return self.last(h)


class Average(nn.Module):
    """One whose parameters do not depend on how many parties there are."""

    def __init__(self, sizes: list[int], outputs: int) -> None:
        super().__init__()
        self.last = nn.Linear(sizes[0], outputs)

    def forward(self, h: Tensor, present: Tensor) -> Tensor:
        total = h.view(len(h), present.shape[1], -1).sum(1)
        return self.last(total / present.sum(1, keepdim=True).clamp_min(1))


@pytest.mark.nightly
def test_a_top_model_of_ones_own_grows_if_its_parameters_stay_alike(tmp_path: Path) -> None:
    organisations = cut(tmp_path, cancer(), parties=3, known=0.6)
    for name, top in (("two", "Flat"), ("average", "Average")):
        first(organisations, 2).run(name, {**KEYS, "epochs": 1, "top-model": f"{HERE}:{top}"})
    with pytest.raises(ConfigError, match="has other parameters for 3 parties than for 2"):
        grown(organisations, "three")
    organisations.run("three-average", {"grow": str(tmp_path / "average")})


def loses_state(three: Organisations) -> None:
    for path in (three.folder / "two").glob("*party-1*.state"):
        path.unlink()


def has_an_older_state(three: Organisations) -> None:
    folder = three.folder / "two"
    found = checkpoint.load(folder)
    state = f"run-{found.run}-party-0-checkpoint-"
    (folder / f"{state}{found.number}.state").unlink()
    first(three, 2).run("early", {**KEYS, "epochs": 1})
    early = checkpoint.load(three.folder / "early")
    name = f"run-{early.run}-party-0-checkpoint-{early.number}.state"
    shutil.copy(three.folder / "early" / name, folder / f"{state}{found.number}.state")


def has_other_columns(three: Organisations) -> None:
    change(three.files[0], lambda frame: frame.rename(columns={"f3": "secret"}))


def labels_have(**columns: Callable[[pd.DataFrame], Any]) -> Callable[[Organisations], None]:
    return lambda three: change(three.labels, lambda frame: frame.assign(**columns))


HAS_A_CLASS_MORE = labels_have(label=lambda frame: frame["label"] + (frame.index % 50 == 0))
HAS_COLUMNS = labels_have(age=lambda frame: range(len(frame)))
BAD: dict[str, tuple[Callable[[Organisations], None] | None, dict[str, Any], str]] = {
    "no run": (None, {"grow": "/nowhere"}, r"^/nowhere is not a folder\. Name the results"),
    "a party without its state": (loses_state, {}, "Party 1 does not have checkpoint 1 of that"),
    "an older state": (
        has_an_older_state,
        {},
        r"^Party 0 does not have checkpoint 1 of that run\.",
    ),
    "other columns": (has_other_columns, {}, "Party 0's file has other columns than its model was"),
    "other classes": (HAS_A_CLASS_MORE, {}, "have 1 values, such as 2, that the earlier run's mo"),
    "columns of its own": (HAS_COLUMNS, {}, "only one of them has feature columns"),
    "another model": (
        None,
        {"embedding-size": 8},
        r"a model with embedding-size = 4, not 8\. Leav",
    ),
    "another loss": (None, {"target": "regression"}, "holds a model with target = 'classificat"),
    "all parties needed": (None, {"align": "psi", "subsets": "off"}, "two holds a model"),
    "another kind of data": (None, {"dataset": "digits", "align": "psi"}, "holds a model with da"),
    "noise": (None, {"privacy": "labels", "epsilon": 1.0}, "^privacy = 'labels' counts"),
    "a baseline": (None, {"strategy": "centralised", "subsets": "sampled"}, "^strategy = 'centr"),
}


@pytest.mark.one_by_day
@pytest.mark.parametrize("case", BAD)
def test_what_cannot_begin_so_is_one_sentence(three: Organisations, case: str) -> None:
    spoil, keys, sentence = BAD[case]
    if spoil:
        spoil(three)
    with pytest.raises(VflError, match=sentence) as raised:
        grown(three, "three", **keys)
    assert isinstance(raised.value, ConfigError | PartyError)
    assert "secret" not in str(raised.value) and "\n" not in str(raised.value)
    history = three.folder / "three" / "history.jsonl"
    assert not history.exists() or not history.read_text()


def test_unfit_runs_do_not_grow(three: Organisations, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"has 2 parties, but only 1 are here\. Start all of them"
    ):
        grown(first(three, 1), "one")
    with cut_after(2), pytest.raises(Cut):
        three.run("short", {**KEYS, "checkpoint-every": 4})
    with pytest.raises(ConfigError, match=r"short was interrupted\. Resume it first, by resume\.$"):
        three.run("three", {"grow": str(three.folder / "short")})
    whole = {**KEYS, "align": "psi"}
    first(three, 2).run("whole", whole)
    with pytest.raises(ConfigError, match=r"needs all its parties, .*subsets = 'sampled'"):
        three.run("three", {"grow": str(three.folder / "whole")})


@pytest.mark.parametrize("strategy", ["vafl", "split-nn"])
def test_a_run_with_privacy_does_not_grow(run: Start, tmp_path: Path, strategy: str) -> None:
    then = {"strategy": "vafl", "dataset": "breast-cancer", "epochs": 1, "out": str(tmp_path / "a")}
    run(2, {**then, "privacy": "labels", "epsilon": 1.0})
    grown = {"strategy": strategy, "grow": str(tmp_path / "a"), "out": str(tmp_path / "b")}
    with pytest.raises(ConfigError, match=r"a has privacy = 'labels', whose epsilon counts that"):
        run(2, grown)
