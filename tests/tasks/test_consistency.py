"""Flagged scores: embeddings that do not fit the others, in Gaussians and in trained models."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from flwr.app import Context, Message
from numpy.typing import NDArray
from torch import Tensor

from tests.conftest import nightly, of_words
from tests.organisations import ID, Organisations, cancer, cut, read
from tests.serving import served
from vfl_flower import client_app
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.options.data import rows_to_flag
from vfl_flower.label_holder import checkpoint, consistency
from vfl_flower.label_holder.consistency import Consistency
from vfl_flower.label_holder.scored_rows import ScoredRows
from vfl_flower.launch.engines import predict_local, run_local
from vfl_flower.tasks.inference.model import Predictor
from vfl_flower.tasks.inference.rows import labels_of
from vfl_flower.tools import cli
from vfl_flower.transport.messages import Predicted, PredictOrder, Scored, ScoreOrder
from vfl_flower.transport.wire import read_reply, to_reply

pytestmark = pytest.mark.xdist_group("consistency")  # its tests share trained models

COLUMNS = {0: slice(0, 3), 1: slice(3, 5), 2: slice(5, 8)}
SHORT: dict[str, Any] = {
    **{"dataset": "digits", "validation-fraction": 0.25, "flag-rate": 0.01},
    **{"epochs": 2, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8},
}
SUMS = {"aggregation": "secure", "combine": "sum"}


# --- the Gaussian -------------------------------------------------------------------------------


def linear(blocks: Tensor, own: NDArray[Any], given: NDArray[Any]) -> Tensor:
    """Outputs that are the sum of all embeddings."""
    return blocks.sum(1, keepdim=True)


def drawn(rows: int, seed: int, lacking: float = 0.0) -> ScoredRows:
    """Correlated embeddings of three parties with own columns; parties may lack rows."""
    mixed = np.random.default_rng(0).standard_normal((4, 10))
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((rows, 4)) @ mixed + 0.5 * generator.standard_normal((rows, 10))
    given = generator.random((rows, 3)) >= lacking
    blocks = torch.from_numpy(x[:, :8] * np.repeat(given, [3, 2, 3], 1)).float()
    own = x[:, 8:].astype(np.float32)
    return ScoredRows(blocks, own, given, linear(blocks, own, given))


def fitted(numbers: bool = True, rate: float = 0.05, **more: Any) -> Consistency:
    return Consistency(COLUMNS, linear, numbers).fit(drawn(4000, 1, **more), rate)


@pytest.mark.parametrize("lacking", [0.0, 0.3])
def test_distances_are_what_a_row_is_less_probable_with_the_party_than_without(
    lacking: float,
) -> None:
    """Mahalanobis: D^2 of all columns = D^2 of the others + the party's squared distance."""
    model, rows = fitted(lacking=lacking), drawn(50, 2, lacking)
    x = np.hstack([rows.blocks.numpy(), rows.own]).astype(float)
    x = (x - model._mean.numpy()) / model._scales.numpy()
    covariance = model._covariance.numpy()

    def squared(row: int, parties: list[int]) -> float:
        at = np.r_[(*(COLUMNS[party] for party in parties), slice(8, 10))]
        return float(x[row, at] @ np.linalg.solve(covariance[np.ix_(at, at)], x[row, at]))

    found = model.measures(rows)[:, :, 0].numpy()
    assert not found[~rows.given].any() and rows.given.any(1).sum() > 40
    for row, party in np.argwhere(rows.given):
        all_of_row = np.flatnonzero(rows.given[row]).tolist()
        others = [each for each in all_of_row if each != party]
        due = squared(row, all_of_row) - squared(row, others)
        assert found[row, party] ** 2 == pytest.approx(due, rel=1e-3, abs=1e-4)


def test_a_party_of_a_linear_score_has_the_part_that_the_others_do_not_predict() -> None:
    """The control: regression by least squares, on the same rows."""
    model, rows, train = fitted(), drawn(40, 2), drawn(4000, 1)
    model._estimate(train)  # of all rows, not of their bulk
    x, new = (np.hstack([each.blocks.numpy(), each.own]) for each in (train, rows))
    for party, mine in COLUMNS.items():
        others = np.delete(np.arange(10), mine)
        design, of_new = (np.c_[each[:, others], np.ones(len(each))] for each in (x, new))
        weights = np.linalg.lstsq(design, x[:, mine].sum(1), rcond=None)[0]
        due = np.abs(new[:, mine].sum(1) - of_new @ weights)
        np.testing.assert_allclose(model.measures(rows)[:, party, 1], due, atol=0.05)


@pytest.mark.one_by_day
@pytest.mark.parametrize("rate", [0.01, 0.05])
def test_honest_rows_are_flagged_no_more_often_than_the_rate(rate: float) -> None:
    """In 40 draws, about 5 % of the limits may flag more. The control: half of the limit."""
    exceeded, halved = 0, 0.0
    for seed in range(40):
        model = Consistency(COLUMNS, linear, True).fit(drawn(600, seed + 10), rate)
        honest = drawn(4000, 1000 + seed)
        exceeded += (model.suspects(honest) >= 0).mean() > rate
        model.limits /= 2
        halved += (model.suspects(honest) >= 0).mean() / 40
    assert exceeded <= 8 and halved > 2 * rate


@pytest.mark.parametrize("numbers", [True, False])
@pytest.mark.parametrize("party", COLUMNS)
def test_the_party_that_sends_other_embeddings_is_named(numbers: bool, party: int) -> None:
    model, rows = fitted(numbers), drawn(300, 3)
    blocks = rows.blocks.clone()
    blocks[:, COLUMNS[party]] = 12.0
    changed = replace(rows, blocks=blocks, outputs=linear(blocks, rows.own, rows.given))
    assert (model.suspects(changed) == party).mean() > 0.95
    assert (model.suspects(rows) == -1).mean() > 0.9


def test_a_score_that_seldom_moves_leaves_the_distances_their_limits() -> None:
    """Nine in a thousand honest rows have a part of the score, and all others have none."""

    def steep(blocks: Tensor, own: NDArray[Any], given: NDArray[Any]) -> Tensor:
        return 1e4 * (blocks[:, :1] - bound).clamp_min(0)

    honest = drawn(4000, 1)
    bound = honest.blocks[:, 0].quantile(0.991).item()
    honest = replace(honest, outputs=steep(honest.blocks, honest.own, honest.given))
    model = Consistency(COLUMNS, steep, True).fit(honest, 0.01)
    blocks = honest.blocks.clone()
    blocks[:, COLUMNS[1]] = 12.0  # has no part of the score
    changed = replace(honest, blocks=blocks)
    assert (model.suspects(changed) == 1).mean() > 0.95
    assert (model.suspects(honest) >= 0).mean() < 0.01


@pytest.mark.parametrize("lacking", [0.0, 0.3])
@pytest.mark.parametrize("party", [0, 2])
def test_outliers_for_few_validation_rows_widen_no_limit(
    party: int, lacking: float, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """The control: one Gaussian of all rows, whose limits the largest measures set."""

    def sent(rows: int, seed: int, share: float) -> ScoredRows:
        honest = drawn(rows, seed, lacking)
        few = (np.random.default_rng(seed).random(rows) < share) & honest.given[:, party]
        blocks = honest.blocks.clone()
        blocks[np.flatnonzero(few), COLUMNS[party]] = torch.tensor([40.0, -40, 40])
        outputs = linear(blocks, honest.own, honest.given)
        return replace(honest, blocks=blocks, outputs=outputs)

    def flags() -> tuple[float, float]:
        model = Consistency(COLUMNS, linear, True).fit(sent(2000, 1, 0.04), 0.01)
        attacked, honest = sent(2000, 2, 1.0), drawn(4000, 3, lacking)
        suspects = model.suspects(attacked)[attacked.given[:, party]]
        return (suspects == party).mean(), (model.suspects(honest) >= 0).mean()

    found, false = flags()
    assert found > 0.95 and false < 0.015
    assert f"party {party} attacks, or has odd rows" in caplog.text
    caplog.clear()
    fitted(rate=0.01, lacking=lacking)
    assert not caplog.text
    monkeypatch.setattr(consistency, "_BULK", 1.0)
    monkeypatch.setattr(consistency, "_BEYOND", np.inf)
    assert flags()[0] < 0.5


@pytest.mark.parametrize(("rows", "warns"), [(299, True), (3000, False)])
def test_odd_rows_warn_where_they_break_the_confidence(rows: int, warns: bool, caplog: Any) -> None:
    """Of 299 rows, the confidence permits none to exceed a limit; of 3,000, it permits some."""
    honest = drawn(rows, 1)
    Consistency(COLUMNS, linear, True).fit(honest, 0.01)
    assert not caplog.text  # the control
    honest.blocks[7, COLUMNS[1]] = 40.0
    Consistency(COLUMNS, linear, True).fit(honest, 0.01)
    assert ("1 validation rows are far" in caplog.text) == warns


@pytest.mark.parametrize("value", [1e6, -1e6])
def test_embeddings_that_overflow_the_score_are_flagged(value: float) -> None:
    def overflows(blocks: Tensor, own: NDArray[Any], given: NDArray[Any]) -> Tensor:
        return torch.where(blocks.abs().amax(1, keepdim=True) > 1e5, torch.nan, blocks[:, :1])

    honest = drawn(4000, 1)
    honest = replace(honest, outputs=overflows(honest.blocks, honest.own, honest.given))
    for numbers in (True, False):
        model = Consistency(COLUMNS, overflows, numbers).fit(honest, 0.01)
        blocks = honest.blocks.clone()
        blocks[:, COLUMNS[2]] = value
        outputs = overflows(blocks, honest.own, honest.given)
        assert (model.suspects(replace(honest, blocks=blocks, outputs=outputs)) == 2).all()


def test_too_few_rows_of_a_party_or_too_many_columns_are_refused() -> None:
    assert rows_to_flag(0.01) == 299 and (1 - 0.01) ** 299 < 0.05 < (1 - 0.01) ** 298
    rows = drawn(299, 1)
    Consistency(COLUMNS, linear, True).fit(rows, 0.01)
    rows.given[0, 2] = False
    with pytest.raises(ConfigError, match="party 2 has 298 validation rows, fewer than 299"):
        Consistency(COLUMNS, linear, True).fit(rows, 0.01)
    wide = replace(rows, blocks=torch.zeros(299, 5000))
    with pytest.raises(ConfigError, match="5,002 columns of embeddings exceed 4,096"):
        Consistency({0: slice(0, 5000)}, linear, True).fit(wide, 0.02)


# --- trained models -----------------------------------------------------------------------------


class Model:
    """A trained model of divided data, and its honest rows."""

    def __init__(self, folder: Path, rate: float = 0.01) -> None:
        found = checkpoint.load(folder)
        self.predictor, held = Predictor(found, 0), len(found.arrays["compared.rows"])
        self.predictor.flag(rate)
        rows = torch.from_numpy(found.arrays["test_table.rows"])
        rows = rows[held:] if held < len(rows) else rows  # without validation rows, all test rows
        self.blocks, self.own = rows[:, : self.predictor.width], np.zeros((len(rows), 0), "f4")
        self.given = np.ones((len(rows), len(self.predictor.sizes)), bool)
        if found.config.data.presence < 1:
            present = labels_of(found).present
            assert present is not None
            self.given = present[1][held:]

    def score(self, party: int | None = None) -> ScoredRows:
        """Score the test rows; a party may send large embeddings."""
        blocks = self.blocks.clone()
        if party is not None:
            mine = self.predictor.columns[party]
            blocks[:, mine] = 3 * self.blocks[:, mine].abs().max()
            blocks[~torch.from_numpy(self.given[:, party]), mine] = 0
        return self.predictor.score(blocks, self.own, self.given)


@pytest.mark.parametrize(
    ("parties", "keys"),
    [
        (2, {}),
        (4, {"presence": 0.8, "calibrate": "platt", "validation-fraction": 0.4}),
        (3, {"strategy": "vafl", "privacy": "perturbed-embedding", "embedding-noise": 0.1}),
        (3, {"strategy": "ef-vfl", "epochs": 1}),
        (3, {"strategy": "dpzv", "validation-fraction": 0.0, "epochs": 1, "epsilon": 10.0}),
        nightly(2, {"strategy": "cascaded", "subsets": "sampled"}),
        nightly(4, {"strategy": "asyrevel"}),
        nightly(3, {"privacy": "labels", "epsilon": 5.0, "codec": "qsgd"}),
        nightly(4, {"combine": "mean", "top-model": "linear", "subsets": "laser"}),
    ],
    ids=str,
)
def test_a_system_flags_a_party_and_few_honest_rows(
    tmp_path: Path, parties: int, keys: dict[str, Any]
) -> None:
    run_local(parties, {**SHORT, **keys, "out": str(tmp_path / "run")})
    model = Model(tmp_path / "run")
    honest = model.score()
    assert honest.suspects is not None and (honest.suspects >= 0).mean() < 0.04
    for party in range(parties):
        attacked = model.score(party)
        assert attacked.suspects is not None
        sent = model.given[:, party]
        assert (attacked.suspects[sent] >= 0).mean() > 0.95
        if parties > 2:
            assert (attacked.suspects[sent] == party).mean() > 0.9


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Organisations:
    """Three parties and a label holder with columns; "run" needs all parties, "any" does not."""
    folder = tmp_path_factory.mktemp("flagged")
    organisations = cut(folder, cancer(), parties=3, own=6, known=1.0)
    keys = {"epochs": 3, "bottom-hidden": 8, "embedding-size": 4, "top-hidden": 8}
    organisations.run("run", {**keys, "validation-fraction": 0.3})
    organisations.run("any", {**keys, "subsets": "sampled", "flag-rate": 0.05})
    return organisations


HONEST = client_app.app
KINDS: dict[str, Any] = {PredictOrder.kind: Predicted, ScoreOrder.kind: Scored}


def hostile(message: Message, context: Context) -> Message:
    """Party 1 sends large embeddings at scoring time."""
    reply: Message = HONEST(message, context)
    kind = KINDS.get(message.metadata.message_type)
    if context.node_config["partition-id"] != 1 or kind is None:
        return reply
    said = read_reply(reply, kind)
    block = np.full_like(said.arrays["embedding"], 30.0)
    return to_reply(replace(said, arrays={**said.arrays, "embedding": block}), message)


@of_words
@pytest.mark.parametrize("run", ["run", "any"])
def test_predictions_and_the_service_flag_a_hostile_party(
    trained: Organisations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: str
) -> None:
    """The control: the honest parties. A model of any subset answers without the suspect."""
    model: dict[str, Any] = {"model": str(trained.folder / run)}
    model |= {"dataset": f"files:{trained.labels}"}
    model |= {"flag-rate": 0.05} if run == "run" else {}  # it was trained without
    honest = read(predict_local({**model, "out": f"{tmp_path}/0.csv"}, trained.node_configs))
    assert honest["inconsistent"].notna().mean() < 0.1
    monkeypatch.setattr(client_app, "app", hostile)
    table = read(predict_local({**model, "out": f"{tmp_path}/1.csv"}, trained.node_configs))
    figures = json.loads(Path(tmp_path, "1.json").read_text())
    flagged = (table["inconsistent"] == 1).to_numpy()
    assert flagged.mean() > 0.95 and figures["inconsistent"]["1"] == flagged.sum()
    folder = Path(shutil.copytree(trained.folder / run, tmp_path / "copy"))
    (folder / "predictions.json").write_text(json.dumps(figures))
    assert cli.main(["report", str(folder), "--out", f"{tmp_path}/page.html"]) == 0
    said = f"party 1 does not fit the others in {flagged.sum():,} scores"
    assert said in Path(tmp_path, "page.html").read_text()
    chances = table["probability_1"].to_numpy()
    if run == "any":
        without = {**model, "flag-rate": 0.0, "without": "1", "out": f"{tmp_path}/2.csv"}
        alone = read(predict_local(without, trained.node_configs))["probability_1"]
        np.testing.assert_allclose(chances[flagged], alone[flagged], atol=1e-6)
        assert set(table["parties"][flagged]) == {"0+2"}
    else:
        assert np.abs(chances - honest["probability_1"])[flagged].mean() > 0.05
    keys = {key: each for key, each in model.items() if key != "model"}
    nodes = trained.node_configs
    with served(trained.folder / run, tmp_path, keys, nodes, hostile) as found:
        ids = table[ID].tolist()
        answers = found.ask(*ids)
        text = found.http.get("/metrics").text
    suspects = [each["inconsistent"] for each in answers]
    np.testing.assert_array_equal(pd.Series(suspects, dtype=float), table["inconsistent"])
    left_out = [each["missing"] == {"1": "inconsistent"} for each in answers]
    assert left_out == (flagged & (run == "any")).tolist()
    assert f'vfl_inconsistent_scores_total{{party="1"}} {flagged.sum():.1f}' in text


def test_of_two_participants_nobody_is_left_out(tmp_path: Path) -> None:
    """Nobody can tell which one lies. The control: a third participant outvotes the suspect."""
    run_local(2, {**SHORT, "subsets": "sampled", "out": str(tmp_path / "run")})
    model = Model(tmp_path / "run")
    attacked = model.score(1)
    assert attacked.suspects is not None and (attacked.suspects >= 0).mean() > 0.95
    np.testing.assert_array_equal(attacked.given, model.given)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (SUMS, "aggregation = 'secure' shows their sum alone"),
        ({"validation-fraction": 0.2}, "needs 299 validation rows, and there are 288"),
        ({"validation-fraction": 0.0, "test-fraction": 0.0}, "and there are 0"),
        ({"flag-rate": 1.0}, "flag-rate"),
    ],
)
def test_flags_are_refused_before_training(tmp_path: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_local(2, {**SHORT, **keys, "out": str(tmp_path / "run")})


@pytest.mark.parametrize("change", [{"finished": False}, {"arrays": {}}])
def test_an_unfinished_or_earlier_run_is_not_flagged(
    trained: Organisations, change: dict[str, Any]
) -> None:
    predictor = Predictor(checkpoint.load(trained.folder / "run"), 6)
    predictor.flag(0.05)  # the control
    predictor.found = replace(predictor.found, **change)
    with pytest.raises(ConfigError, match="needs a finished run of this version"):
        predictor.flag(0.05)


def test_flags_of_a_trained_model_are_refused_in_a_sentence(tmp_path: Path) -> None:
    keys = {**SHORT, "epochs": 1, "flag-rate": 0.0}
    both: dict[str, dict[str, Any]] = {"few": {"validation-fraction": 0.1}, "sum": SUMS}
    for name, more in both.items():
        run_local(2, {**keys, **more, "out": str(tmp_path / name)})
    for name, said in {"few": "there are 144", "sum": "shows their sum alone"}.items():
        given = {"model": str(tmp_path / name), "out": f"{tmp_path}/p.csv"}
        with pytest.raises(ConfigError, match=said):
            predict_local({**given, "flag-rate": 0.01})
        assert "inconsistent" not in read(predict_local({**given, "out": f"{tmp_path}/{name}.csv"}))
