"""Rows that some parties lack: top models of any subset, training, alignment, predictions."""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn
from torch.nn import functional

from tests.conftest import MANY, Start, nightly, of_words
from tests.label_holder.test_label_holder import assert_is_centralised
from tests.organisations import ID, Organisations, cancer, change, cut, read, small
from tests.pairwise import pairwise
from tests.stepping import by_gradient
from vfl_flower.config import names
from vfl_flower.config.errors import ConfigError
from vfl_flower.data.at_label_holder import load_labels, with_row_masks
from vfl_flower.data.split import draw_row_masks
from vfl_flower.label_holder import checkpoint
from vfl_flower.launch.engines import predict_local
from vfl_flower.models import top_layers
from vfl_flower.models.optimizers import build_optimizer
from vfl_flower.models.training import trained
from vfl_flower.protocol import subsets
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.batches import Window, among, kept
from vfl_flower.protocol.systems import resolve, sized
from vfl_flower.results.report import report
from vfl_flower.tools.compare import compare, table
from vfl_flower.transport.early_messages import AlignOrder
from vfl_flower.transport.flower_internals import set_message_id
from vfl_flower.transport.gather import AvailableParties, gather_all
from vfl_flower.transport.local import LocalGrid
from vfl_flower.transport.messages import Introduction, Payload
from vfl_flower.transport.wire import to_failure, to_message, to_reply

SIZES, OUTPUTS, ROWS = [3, 3, 3], 4, 12
HERE = str(Path(__file__).absolute())


class Average(nn.Module):
    """A user's top model, which is told which parties have a row."""

    def __init__(self, sizes: list[int], outputs: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.last = nn.Linear(sizes[0], outputs)

    def forward(self, h: Tensor, present: Tensor) -> Tensor:
        blocks = h.view(len(h), len(self.sizes), -1)
        mean = blocks.sum(1) / present.sum(1, keepdim=True).clamp_min(1)
        return self.last(mean)


class MeanOfAll(Average):
    def forward(self, h: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(h, torch.ones(len(h), len(self.sizes)))


def rows_of(own: int = 0) -> tuple[Tensor, Tensor]:
    """Embeddings, features of the label holder's own, and who is there; labels."""
    generator = torch.Generator().manual_seed(1)
    present = (torch.rand(ROWS, len(SIZES), generator=generator) < 0.6).float()
    present[0], present[1] = 0, 1
    h = torch.randn(ROWS, sum(SIZES), generator=generator)
    h *= present.repeat_interleave(3, 1)
    features = torch.randn(ROWS, own, generator=generator)
    labels = torch.randint(0, OUTPUTS, (ROWS,), generator=generator)
    return torch.cat([h, features, present], dim=1), labels


MODELS: list[dict[str, Any]] = [
    *({"top-model": top, "combine": how} for top in ("linear", "mlp") for how in ("mean", "sum")),
    *({"top-model": top, "combine": "concat"} for top in ("linear", "mlp")),
    {"top-model": f"{HERE}:Average"},
]


# --- top models of any subset -------------------------------------------------------------------


def test_a_mean_is_over_the_present_parties_and_the_label_holders_own_block() -> None:
    keys = {"presence": 0.5, "bottom-model": "mlp", "embedding-size": 3, "combine": "mean"}
    top = aggregation_of(resolve(keys)).build_top(SIZES, OUTPUTS, 2)
    h, _ = rows_of(2)
    present = torch.cat([h[:, -len(SIZES) :], torch.ones(ROWS, 1)], dim=1)
    with torch.no_grad():
        blocks = top.embedded(h)
        apart = blocks.view(ROWS, len(SIZES) + 1, 3) * present[:, :, None]
        expected = apart.sum(1) / present.sum(1, keepdim=True)
        torch.testing.assert_close(top.combined(blocks, h), expected)


@pytest.mark.parametrize("own", [0, 2])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(model.values()).split("/")[-1])
def test_an_absent_party_has_no_part_and_no_gradient(model: dict[str, Any], own: int) -> None:
    keys = {"presence": 0.5, "bottom-model": "mlp", "embedding-size": 3, "server-lr": 0.0}
    config = resolve({**keys, **model})
    top = aggregation_of(config).build_top(SIZES, OUTPUTS, own)
    h, labels = rows_of(own)
    junk = h.clone()
    junk[:, : sum(SIZES)] += 5 * (1 - h[:, -3:]).repeat_interleave(3, 1)
    assert torch.equal(top(h), top(junk))
    assert not torch.allclose(top(h), top(torch.cat([junk[:, :-3], torch.ones(ROWS, 3)], 1)))

    wanted = h.clone().requires_grad_()
    loss = functional.cross_entropy(top(wanted), labels)
    (due,) = torch.autograd.grad(loss, wanted)
    rows, losses = by_gradient(top, None, h, labels, [ROWS], [ROWS])
    assert rows is not None
    torch.testing.assert_close(rows, due[:, : sum(SIZES)], rtol=1e-4, atol=1e-7)
    assert not rows[h[:, -3:].repeat_interleave(3, 1) == 0].any()
    assert losses.item() == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(model.values()).split("/")[-1])
def test_parameters_learn_as_by_autograd(model: dict[str, Any]) -> None:
    keys = {"presence": 0.5, "embedding-size": 3, "optimizer": "sgd", **model}
    config = sized(resolve(keys), MANY)
    tops = [aggregation_of(config).build_top(SIZES, OUTPUTS) for _ in range(2)]
    h, labels = rows_of()
    optimizers = [torch.optim.SGD(trained(top).values(), 0.5) for top in tops]
    functional.cross_entropy(tops[0](h), labels).backward()
    optimizers[0].step()
    by_gradient(tops[1], build_optimizer(config, tops[1], 0.5), h, labels, [ROWS], [ROWS])
    for ours, theirs in zip(tops[1].parameters(), tops[0].parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


@pairwise(model=MODELS, known=[True, False], presence=[0.5, 1.0], own=[0, 2])
def test_pairs_of_many_parties_are_evaluated_as_each_case_alone(
    model: dict[str, Any], known: bool, presence: float, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``known``: the table already has the second embedding of each pair, as one-sided."""
    if presence == 1:
        model = {**model, "top-model": model["top-model"].replace(":Average", ":MeanOfAll")}
    keys = {"presence": presence, "embedding-size": 3, "bottom-model": "mlp", "top-hidden": 8}
    top = aggregation_of(resolve({**keys, **model})).build_top(SIZES, OUTPUTS, own)
    width = 8 if model["top-model"] == "mlp" else OUTPUTS
    monkeypatch.setattr(top_layers, "_AT_ONCE", 2 * ROWS * width)
    h = rows_of(own)[0][:, : None if presence < 1 else sum(SIZES) + own]
    blocks = []
    for start in (0, 3, 6):
        at = slice(start, start + 3)
        blocks.append((at, torch.randn(ROWS, 3), h[:, at] if known else torch.randn(ROWS, 3)))
    with torch.no_grad():
        parts = list(top.pairs(h, blocks, [ROWS], b""))
        at_once = [1, 1, 1] if "/" in model["top-model"] else [2, 1]
        assert [len(first) for first, _ in parts] == at_once
        pairs = [torch.cat(each) for each in zip(*parts, strict=True)]
        for party, (at, *pair) in enumerate(blocks):
            for outputs, block in zip(pairs, pair, strict=True):
                replaced = h.clone()
                replaced[:, at] = block
                torch.testing.assert_close(outputs[party], top(replaced), rtol=1e-4, atol=2e-6)
            if presence < 1:
                absent = h[:, party - 3] == 0
                assert absent.any()
                assert torch.equal(pairs[0][party][absent], pairs[1][party][absent])


# --- subsets ------------------------------------------------------------------------------------


def test_subsets_are_of_who_is_there_and_of_uniform_size() -> None:
    present = np.zeros((6000, 4), np.float32)
    present[:, :3] = 1
    h = torch.from_numpy(np.concatenate([np.ones((6000, 2), np.float32), present], axis=1))
    found = subsets.copies("sampled", h, [2000, 4000], 4, 1, [0])
    assert found.lengths == [4000, 8000] and torch.equal(found.weights, torch.full((12000,), 0.5))
    assert torch.equal(found.rows, torch.arange(6000).repeat_interleave(2))
    whole, drawn_ones = found.h[::2], found.h[1::2]
    assert torch.equal(whole, h) and not drawn_ones[:, -1].any()
    sizes = Counter(drawn_ones[:, -4:].sum(1).int().tolist())
    assert set(sizes) == {1, 2, 3} and all(abs(n - 2000) < 200 for n in sizes.values())
    assert all(abs(float(n) - 4000) < 200 for n in drawn_ones[:, -4:-1].sum(0))
    again = subsets.copies("sampled", h, [2000, 4000], 4, 1, [0])
    assert torch.equal(again.h, found.h)
    assert not torch.equal(subsets.copies("sampled", h, [6000], 4, 1, [1]).h, found.h)
    least_0 = subsets.copies("sampled", h, [6000], 4, 0, [0]).h[1::2, -4:]
    assert (least_0.sum(1) == 0).float().mean().item() == pytest.approx(0.25, abs=0.03)


def test_laser_weights_give_the_mean_over_all_subsets() -> None:
    """An estimate is unbiased: over many draws it is the mean of a value over all subsets."""
    value = torch.tensor([1.0, 10.0, 100.0])
    h = torch.ones(20_000, 3)
    h[10_000:, 0] = 0
    found = subsets.copies("laser", h, [20_000], 3, 1, [0])
    means = found.mean((found.h * value).sum(1) ** 2)
    for rows, parties in ((means[:10_000], [1.0, 10, 100]), (means[10_000:], [10.0, 100])):
        many = [
            sum(each for bit, each in enumerate(parties) if which >> bit & 1) ** 2
            for which in range(1, 2 ** len(parties))
        ]
        assert rows.mean().item() == pytest.approx(np.mean(many), rel=0.03)
    ones = found.total(found.weights)
    assert torch.allclose(ones, torch.ones(20_000))


def test_gradients_of_copies_are_gradients_of_their_mean_loss() -> None:
    config = resolve({"presence": 0.5, "embedding-size": 3, "combine": "mean"})
    top = aggregation_of(config).build_top(SIZES, OUTPUTS)
    h, labels = rows_of()
    found = subsets.copies("sampled", h, [5, 7], 3, 1, [3])
    rows, losses = by_gradient(*(top, None, h, labels, [5, 7], [5, 7]), copies=found)
    assert rows is not None
    wanted = h[:, :9].clone().requires_grad_()
    of_copies = torch.cat([wanted[found.rows], found.h[:, 9:]], 1)
    each = functional.cross_entropy(top(of_copies), labels[found.rows], reduction="none")
    by_row = found.mean(each)
    steps = [by_row[:5].mean(), by_row[5:].mean()]
    (due,) = torch.autograd.grad(steps[0] + steps[1], wanted)
    torch.testing.assert_close(rows, due, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(losses, torch.stack(steps), rtol=1e-4, atol=1e-6)


# --- windows ------------------------------------------------------------------------------------


def test_a_window_keeps_the_rows_that_a_party_has() -> None:
    window = Window(np.array([4, 0, 3, 1, 2], np.int32), np.array([2, 1, 2], np.int32), False, True)
    mask = np.array([True, False, True, False, True])
    found = kept(window, mask)
    assert found.ids.tolist() == [4, 0, 2] and found.lengths.tolist() == [2, 0, 1]
    assert among(found, window).tolist() == [0, 1, 4]
    assert kept(window, None) is window and kept(window, np.ones(5, bool)) is window


def test_presence_is_drawn_by_seed_and_leaves_no_row_to_nobody() -> None:
    config = resolve({"presence": 0.3, "seed": 5})
    has = draw_row_masks(config, 4000, 3)
    assert has.any(1).all() and np.array_equal(has, draw_row_masks(config, 4000, 3))
    # One that nobody would have is one of three's.
    assert has.mean() == pytest.approx(0.3 + 0.7**3 / 3, abs=0.02)
    assert not np.array_equal(has, draw_row_masks(resolve({"presence": 0.3}), 4000, 3))


# --- runs ---------------------------------------------------------------------------------------

QUICK: dict[str, Any] = {
    **{"dataset": "breast-cancer", "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8},
    **{"batch-size": 64, "noise-seed": 0, "presence": 0.5},
}


@pytest.mark.one_by_day
@pytest.mark.parametrize("combine", ["concat", "mean"])
def test_split_learning_of_partial_rows_is_centralised_training(run: Start, combine: str) -> None:
    keys = {**QUICK, "combine": combine, "subsets": "off", "window": 1, "epochs": 8}
    keys |= {"party-lr": 0.1, "server-lr": 0.1, "bottom-model": "mlp"}
    config = resolve(keys)
    assert_is_centralised(run, keys, 3, with_row_masks(load_labels(config), config, 3))


SYSTEMS: list[Any] = [
    {"strategy": "split-nn", "epochs": 6},
    {"strategy": "split-nn", "optimizer": "adam", "window": 4, "party-lr": 0.01, "server-lr": 0.01},
    nightly({"strategy": "split-nn", "subsets": "laser", "combine": "mean"}),
    nightly({"strategy": "split-nn", "sampling": "poisson"}),
    {"strategy": "split-nn", "privacy": "labels", "epsilon": 4.0},
    {"strategy": "vafl"},
    nightly({"strategy": "vafl", "max-delay": 3}),
    nightly({"strategy": "vafl-t", "quorum": 2, "sampling": "poisson"}),
    {"strategy": "ef-vfl"},
    {"strategy": "ef-vfl", "downlink-codec": "top-k", "downlink-compression": "error-feedback"},
    {"strategy": "cascaded", "party-lr": 0.02},
    {"strategy": "syn-zoo", "perturbs": "all", "party-lr": 0.03, "server-lr": 0.03, "epochs": 40},
    nightly({"strategy": "syn-zoo", "top-model": "sum", "embedding-size": "auto"}),
    {"strategy": "dpzv", "epsilon": 8.0, "party-lr": 0.01, "server-lr": 0.01},
    nightly({"strategy": "frozen"}),
    {"strategy": "local-only"},
    {"strategy": "centralised"},
]


@pytest.mark.one_by_day
@pytest.mark.parametrize("system", SYSTEMS, ids=lambda each: "-".join(map(str, each.values())))
def test_every_system_learns_from_partial_rows(run: Start, system: dict[str, Any]) -> None:
    rates = {"party-lr": 0.5, "server-lr": 0.5, "epochs": 15, "combine": "concat"}
    found = run(3, {**QUICK, **rates, **system})
    floor = 0.6 if system["strategy"] in ("dpzv", "frozen") else 0.8
    assert found.summary["test_auc"] > floor
    if system["strategy"] not in ("local-only", "centralised"):
        by = found.summary["test_by_parties"]
        assert sum(each["rows"] for each in by.values()) == 114 and set(by) == {"1", "2", "3"}
        assert set(found.summary["test_by_party"]) == {"0", "1", "2"}


def test_a_party_uploads_its_own_rows_alone_and_with_all_rows_all_is_as_ever(run: Start) -> None:
    keys = {**QUICK, "epochs": 1}
    whole, partial = (run(3, {**keys, "presence": share}).summary for share in (1.0, 0.5))
    present = with_row_masks(load_labels(resolve(QUICK)), resolve(QUICK), 3).present
    assert present is not None
    assert partial["bytes_up"] == round(present[0].mean() * whole["bytes_up"])
    del keys["presence"]
    ever, sampled = (run(3, {**keys, **more}).summary for more in ({}, {"subsets": "sampled"}))
    assert ever["test_loss"] == whole["test_loss"] and "test_by_party" not in whole
    assert set(sampled["test_by_parties"]) == {"3"}
    assert set(sampled["test_by_party"]) == {"0", "1", "2"}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"presence": 1.5}, "Set it to at most 1"),
        ({"align": "any"}, "is only for parties with their own files"),
        ({"min-parties": 2}, "min-parties is only for align"),
        ({"presence": 0.5, "dataset": "files:x.csv"}, "Leave it out, and set align"),
        ({"presence": 0.5, "strategy": "ef-vfl", "labels": "shared"}, "which rows other parties"),
        ({"strategy": "dpzv", "subsets": "laser"}, "cannot bound each copy by itself"),
    ],
)
def test_contradictions_are_found_before_anything_starts(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve(keys)


# --- files --------------------------------------------------------------------------------------

TINY: dict[str, Any] = {**QUICK, "presence": 0.3, "batch-size": 2, "window": 1, "epochs": 1}
TINY |= {"test-fraction": 0.8}


@pytest.mark.one_by_day
@pytest.mark.parametrize(
    "system",
    [
        {"strategy": "split-nn"},
        {"strategy": "vafl", "bottom-model": f"{HERE}:Flat"},
        {"strategy": "vafl", "max-delay": 2},
        {"strategy": "cascaded", "party-lr": 0.01},
        {"strategy": "ef-vfl", "downlink-codec": "qsgd"},
        {"strategy": "split-nn", "sampling": "poisson", "batch-size": 1},
        {"strategy": "vafl", "privacy": "perturbed-embedding"},
    ],
    ids=lambda each: "-".join(map(str, each.values())).split("/")[-1],
)
def test_steps_may_have_none_of_a_partys_rows(run: Start, system: dict[str, Any]) -> None:
    assert run(3, {**TINY, "party-lr": 0.01, "server-lr": 0.01, **system}).summary["steps"] > 0


class Flat(nn.Module):
    """A bottom model that cannot take no rows."""

    def __init__(self, sample: Tensor, size: int) -> None:
        super().__init__()
        self.last = nn.Linear(sample.numel(), size)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.view(len(x), -1))


def test_scalar_privacy_counts_the_rows_of_a_mini_batch_whoever_has_them(run: Start) -> None:
    """The top model steps on all of them; of a party's own alone, epsilon would be too small."""
    keys = {**QUICK, "strategy": "syn-zoo", "privacy": "scalar", "noise-multiplier": 5.0}
    keys |= {"epochs": 1, "noise-seed": -1, "party-lr": 0.01, "server-lr": 0.01, "delta": 1e-5}
    whole = run(3, {**keys, "presence": 1.0, "subsets": "sampled"})
    partial = run(3, {**keys, "presence": 0.4})
    assert whole.summary["epsilon"] > 1
    assert partial.summary["epsilon"] == pytest.approx(whole.summary["epsilon"], rel=1e-6)


@pytest.mark.nightly
def test_a_comparison_tells_rows_apart_by_who_has_them(tmp_path: Path) -> None:
    common = {**QUICK, "epochs": 2, "out": str(tmp_path / "compared")}
    folder = compare(2, common, [{"strategy": "split-nn"}], 0.9)
    lines = table(folder).splitlines()
    assert [line.split()[0] for line in lines[1:6]] == [
        *("split-nn", "frozen", "local-only", "centralised", "intersection-only")
    ]
    assert "of 1" in lines[0] and "of 2" in lines[0]
    assert any(line.startswith("of 1, of 2, ...: the same measure on the rows") for line in lines)
    figures = json.loads((folder / "compare.json").read_text())["intersection-only"]
    assert f"{figures['test_by_parties']['1']['accuracy']:.4f}" in lines[5]
    whole = compare(2, {**common, "presence": 1.0, "out": str(tmp_path / "whole")}, [], 0.9)
    assert "intersection-only" not in table(whole) and "of 1" not in table(whole)


FILES: dict[str, Any] = {
    **{"strategy": "vafl", "align": "any", "epochs": 15, "noise-seed": 0},
    **{"party-lr": 0.05, "server-lr": 0.05},
}


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    """Three parties with three fifths of the people each, and a run of them."""
    organisations = cut(tmp_path_factory.mktemp("clinic"), cancer(), parties=3, known=0.6)
    organisations.run("run", FILES)
    return organisations


def known_by(organisations: Organisations) -> dict[Any, str]:
    """Return, in words, the parties that know each of the label holder's people."""
    sets = [set(read(path)[ID]) for path in organisations.files]
    ids = read(organisations.labels)[ID]
    return {
        each: "+".join(str(m) for m, ids in enumerate(sets) if each in ids) or "none"
        for each in ids
    }


@of_words
def test_files_tell_whom_a_run_and_its_predictions_cover(tmp_path: Path) -> None:
    """The control: sets of ids. An alignment that is used again tells the same."""
    organisations = cut(tmp_path / "files", cancer(columns=6, rows=300), parties=2, known=0.8)
    sets = [set(read(path)[ID]) for path in organisations.files]
    ids = set(read(organisations.labels)[ID])
    by_party = {str(party): len(each & ids) for party, each in enumerate(sets)}
    both, some = ids & sets[0] & sets[1], ids & (sets[0] | sets[1])
    short = {"epochs": 1, "bottom-hidden": 4, "top-hidden": 4, "subsets": "sampled"}
    for number, align in enumerate(["psi", "any", "any"]):
        run = organisations.run(f"run-{number}", {**short, "align": align})
        aligned, found = len(some if align == "any" else both), run.summary["coverage"]
        why = "too few parties know them" if align == "any" else "a party lacks them"
        popped = "file", "labels", "aligned without a label", "not_at"
        told = {name: found.pop(name) for name in popped}
        assert told["file"]["rows"] == len(ids) and told["not_at"] == {
            party: len(ids) - number for party, number in by_party.items()
        }
        assert found == {
            **{"asked": len(ids), "aligned": aligned, "by_party": by_party},
            **{"left_out": {why: len(ids) - aligned}, "left_out_parties": []},
            "scored": run.summary["data"]["rows"]["test"],
        }
        card = (run.folder / "model_card.md").read_text().replace("*", "")
        assert f"people left out: {why} | {len(ids) - aligned}" in card
    page = report([run.folder])
    assert f"left out: {why}" in page
    nodes: list[dict[str, Any]] = [dict(each) for each in organisations.node_configs]
    nodes[1] |= {"min-rows": 10**6}  # which refuses the alignment
    out = {"model": str(run.folder), "out": str(tmp_path / "scores.csv")}
    predict_local({**out, "dataset": f"files:{organisations.labels}"}, nodes)
    found = json.loads((tmp_path / "scores.json").read_text())["coverage"]
    scored = len(ids & sets[0])
    assert (found["asked"], found["aligned"], found["scored"]) == (len(ids), scored, scored)
    assert found["left_out"] == {"no party that answered knows them": len(ids) - scored}
    assert found["by_party"] == {"0": scored, "1": 0}
    assert len(found["left_out_parties"]) == 1 and "min-rows" in found["left_out_parties"][0]


@pytest.mark.nightly
def test_everyone_gets_a_line_with_the_parties_used(clinic: Organisations) -> None:
    said = clinic.predict("run").set_index(ID)
    due = known_by(clinic)
    assert said.index.tolist() == read(clinic.labels)[ID].tolist()
    assert said["parties"].astype(str).to_dict() == due
    nobody = said[[due[each] == "none" for each in said.index]]
    found = checkpoint.load(clinic.folder / "run")
    labels = read(clinic.labels).set_index(ID)["label"]
    assert 10 < len(nobody) < 80 and nobody["probability_1"].nunique() == 1
    in_training = labels.loc[read(clinic.labels)[ID].iloc[found.rows]].mean()
    assert nobody["probability_1"].iloc[0] == pytest.approx(in_training, abs=0.03)
    others = said.drop(nobody.index)
    right = said["prediction"] == labels.loc[said.index]
    assert right[others.index].mean() > 0.85
    figures = json.loads((clinic.folder / "run" / "predictions.json").read_text())
    assert figures["accuracy"] == pytest.approx(right[others.index].mean(), abs=1e-6)
    assert figures["accuracy"] > right.mean() + 0.01  # the control: with people whom nobody knows
    assert (figures["rows"], figures["unknown_rows"]) == (len(said), len(nobody))
    in_run = json.loads((clinic.folder / "run" / "summary.json").read_text())
    assert in_run["unknown_rows"] == len(nobody)
    assert "too few: in no figure" in report([clinic.folder / "run"])


@pytest.mark.nightly
def test_parties_that_are_left_out_have_no_part(clinic: Organisations, tmp_path: Path) -> None:
    said = clinic.predict("run", without="1", out=str(tmp_path / "without.csv")).set_index(ID)
    due = {
        who: "+".join(each for each in words.split("+") if each != "1") or "none"
        for who, words in known_by(clinic).items()
    }
    assert said["parties"].astype(str).to_dict() == due
    clinic.files[1].rename(tmp_path / "gone")  # for good
    try:
        gone = clinic.predict("run", without="1", out=str(tmp_path / "gone.csv")).set_index(ID)
        by_itself = clinic.predict("run", out=str(tmp_path / "itself.csv")).set_index(ID)
    finally:
        (tmp_path / "gone").rename(clinic.files[1])
    pd.testing.assert_frame_equal(gone, said)
    pd.testing.assert_frame_equal(by_itself, said)
    with pytest.raises(ConfigError, match="numbers of parties, from 0 to 2"):
        clinic.predict("run", without="3", out=str(tmp_path / "no.csv"))


@pytest.mark.nightly
def test_rows_that_too_few_know_are_not_used(clinic: Organisations, tmp_path: Path) -> None:
    counts = Counter(
        0 if words == "none" else len(words.split("+")) for words in known_by(clinic).values()
    )
    for fewest in (1, 2, 3):
        clinic.run(f"of-{fewest}", {**FILES, "epochs": 1, "min-parties": fewest})
        found = checkpoint.load(clinic.folder / f"of-{fewest}")
        assert found.present is not None
        assert len(found.rows) == sum(n for count, n in counts.items() if count >= fewest)
        assert found.present.sum(1).min() == fewest
    with pytest.raises(ConfigError, match="4 or more of the 3 parties"):
        clinic.run("of-4", {**FILES, "min-parties": 4})


@pytest.mark.nightly
def test_a_label_holder_with_columns_needs_nobody(tmp_path: Path) -> None:
    organisations = cut(tmp_path, cancer(), parties=2, own=10, known=0.4)
    found = organisations.run("run", {**FILES, "min-parties": 0})
    kept_rows = checkpoint.load(found.folder)
    assert len(kept_rows.rows) == 569 and found.summary["test_accuracy"] > 0.85
    assert found.summary["test_by_parties"]["0"]["rows"] > 20
    said = organisations.predict("run").set_index(ID)
    nobody = said[said["parties"] == "none"]
    assert len(nobody) > 100 and nobody["probability_1"].nunique() > 50  # by its own columns


def test_an_alignment_of_partial_rows_is_used_again(tmp_path: Path, caplog: Any) -> None:
    caplog.set_level(logging.INFO, "flwr.notice")
    organisations = cut(tmp_path, small(), parties=2, known=0.6)
    covered: list[Any] = []

    def anew(**keys: Any) -> bool:
        caplog.clear()
        given = {"task": "align", "align": "any", **keys}
        covered.append(organisations.run(f"run-{len(covered)}", given).summary["coverage"])
        return "by the alignment of" not in caplog.text

    assert [anew(), anew()] == [True, False] and covered[0] == covered[1]
    assert [anew(**{"min-parties": 2}), anew(align="psi"), anew(align="psi")] == [True, True, False]
    change(organisations.files[1], lambda frame: frame[1:])
    assert anew()


# --- who is there -------------------------------------------------------------------------------


class Slow(LocalGrid):
    """Nodes that answer one after the other, or fail, or never come."""

    def __init__(self, answers: Mapping[int, Payload | str | None]) -> None:
        self.answers = answers
        self.asked: dict[str, int] = {}
        self.looks = 0

    def get_node_ids(self) -> list[int]:
        return [node for node, each in self.answers.items() if each is not None]

    def send(self, messages: Iterable[Message]) -> list[str]:
        nodes = [each.metadata.dst_node_id for each in messages]
        self.asked |= {f"to {node}": node for node in nodes}
        return [f"to {node}" for node in nodes]

    def receive(self, keys: Iterable[str], deadline: float) -> list[Message]:
        self.looks += 1
        key = f"to {self.looks}"  # node n answers at the n-th look
        if key not in list(keys):
            return []
        order = to_message(AlignOrder(method="psi"), self.looks, 60)
        set_message_id(order, key)
        said = self.answers[self.looks]
        assert said is not None
        return [to_failure(said, order) if isinstance(said, str) else to_reply(said, order)]


def asked_of(answers: Mapping[int, Payload | str | None], without: set[int], time: float) -> Any:
    grid, running = Slow(answers), resolve({"party-timeout": time}).running
    order = AlignOrder(method="psi")
    there = AvailableParties(3, frozenset(without))
    found = gather_all(grid, order, Introduction, running, there)
    return [each.party for each in found.values()]


def test_a_wait_for_parties_names_them(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    for name in ("_SOON", "_TELL"):  # a minute passes at each look
        monkeypatch.setattr(f"vfl_flower.transport.gather.{name}", -1.0)
    zero, one, two = (Introduction(party=m, parties=3) for m in range(3))
    with caplog.at_level(logging.INFO, "flwr.notice"):
        assert asked_of({1: one, 2: zero, 3: two}, set(), 60) == [0, 1, 2]
    assert caplog.messages == [
        "Waiting for parties 0, 2: 1 of 3 have answered.",
        "Waiting for party 2: 2 of 3 have answered.",
    ]
    running = resolve({"party-timeout": 60.0}).running
    order = AlignOrder(method="psi")
    with caplog.at_level(logging.INFO, "flwr.notice"):
        gather_all(Slow({1: None, 2: zero, 3: one, 4: two}), order, Introduction, running)
    assert caplog.messages[2] == "Waiting for parties: none has answered yet."
    assert caplog.messages[3] == "Waiting for parties 1, 2: 1 of 3 have answered."


def test_a_renamed_party_loses_its_name_and_predicts(caplog: pytest.LogCaptureFixture) -> None:
    parties = [Introduction(party=m, parties=3, name=n) for m, n in enumerate("aba")]
    answers: dict[int, Payload | str | None] = dict(enumerate(parties, 1))
    with names.named({0: "a", 1: "b", 2: "c"}):
        assert asked_of(answers, set(), 60) == [0, 1, 2]
        assert names.with_names() == {"names": {"0": "a", "1": "b"}}
    assert "Party 2 has a name too like another's, 'a'" in caplog.text
    running, order = resolve({"party-timeout": 60.0}).running, AlignOrder(method="psi")
    with pytest.raises(ConfigError, match="too alike"):  # the control: training refuses
        gather_all(Slow(answers), order, Introduction, running)


def test_who_fails_or_is_away_is_done_without() -> None:
    zero, one, two = (Introduction(party=m, parties=3) for m in range(3))
    assert asked_of({1: zero, 2: one, 3: two}, set(), 60) == [0, 1, 2]
    assert asked_of({1: "has failed.", 2: one, 3: two}, set(), 60) == [1, 2]
    assert asked_of({1: zero, 2: one, 3: two}, {1}, 60) == [0, 2]
    assert asked_of({1: zero, 2: one, 3: None}, {2}, 60) == [0, 1]
    assert asked_of({1: zero, 2: "has failed.", 3: None}, {2}, 60) == [0]
    assert asked_of({1: zero, 2: one, 3: None}, set(), 0.2) == [0, 1]
    assert asked_of({1: zero, 2: one, 3: two}, {0, 1, 2}, 60) == []
    for party, parties in ((1, 4), (7, 3), (0, 3)):
        wrong = Introduction(party=party, parties=parties)
        with pytest.raises(ConfigError, match="where the model is of 3"):
            asked_of({1: zero, 2: wrong, 3: two}, set(), 60)


def test_the_order_of_rows_says_nothing_of_ids(tmp_path: Path) -> None:
    """In the order of ids, as once, a party could name those between its own."""
    organisations = cut(tmp_path, cancer(columns=4), parties=2, known=0.6)

    def told(align: str) -> float:
        keys = {**FILES, "epochs": 1, "noise-seed": -1, "align": align}
        rows = checkpoint.load(organisations.run(align, keys).folder).rows
        ids = read(organisations.labels)[ID].to_numpy()[rows].astype(str)
        return float(np.corrcoef(np.arange(len(ids)), np.argsort(np.argsort(ids)))[0, 1])

    assert abs(told("any")) < 0.2
    assert told("psi") > 0.999  # of rows that all have, where there are no gaps


@pytest.mark.nightly
def test_any_model_of_any_subset_predicts_for_everyone(tmp_path: Path) -> None:
    organisations = cut(tmp_path, cancer(), parties=3, known=0.8)
    organisations.run("run", {**FILES, "align": "psi", "subsets": "sampled"})
    said = organisations.predict("run", without="2").set_index(ID)
    assert len(said) == 569 and "2" not in "".join(map(str, said["parties"]))
    nobody = organisations.predict("run", without="0,1,2", out=str(tmp_path / "nobody.csv"))
    assert set(nobody["parties"]) == {"none"} and nobody["probability_1"].nunique() == 1
    organisations.run("whole", {**FILES, "align": "psi"})
    refused: list[dict[str, Any]] = [{"without": "1"}, {"align": "any"}]
    for keys in refused:
        with pytest.raises(ConfigError, match="needs all its parties"):
            organisations.predict("whole", **keys)
    strangers = pd.DataFrame({ID: [10**9 + n for n in range(4)]})
    strangers.to_csv(tmp_path / "strangers.csv", index=False)
    out = str(tmp_path / "strangers-said.csv")
    said = organisations.predict("run", tmp_path / "strangers.csv", out=out)
    assert list(said["parties"]) == ["none"] * 4
