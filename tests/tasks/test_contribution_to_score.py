"""Contributions to one score: equal to Shapley's definition, whatever the model."""

from collections.abc import Sequence
from functools import cache
from itertools import permutations
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.pairwise import pairwise
from vfl_flower.config.errors import ConfigError
from vfl_flower.data.split import background_rows
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.label_holder.scored_rows import ScoredRows
from vfl_flower.models.training import model_arrays
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.systems import resolve
from vfl_flower.tasks.inference import contribution_to_score as contributions
from vfl_flower.tasks.inference.contribution_to_score import HOLDER, Explainer
from vfl_flower.tasks.inference.model import Predictor

SIZE, OWN, HELD_OUT = 3, 2, 250
CLASSES: dict[str, list[Any]] = {"two": ["no", "yes"], "three": [0, 1, 2], "numbers": []}


def model(parties: int, classes: str = "two", own: int = 0, **keys: Any) -> Predictor:
    """A top model with random parameters, and random embeddings of held-out rows."""
    config = resolve({"top-hidden": 6, "embedding-size": SIZE, **keys})
    sizes, generator = [SIZE] * parties, np.random.default_rng(5)
    known = CLASSES[classes]
    aggregation = aggregation_of(config)
    top = aggregation.build_top(sizes, len(known) if len(known) > 2 else 1, own)
    torch.manual_seed(3)
    for parameter in top.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    width = max(each.stop for each in aggregation.columns(dict(enumerate(sizes))).values())
    arrays = {f"top.{name}": each for name, each in model_arrays(top).items()}
    arrays["test_table.rows"] = generator.standard_normal((HELD_OUT, width)).astype(np.float32)
    if own:
        rows = generator.standard_normal((HELD_OUT, own)).astype(np.float32)
        arrays["background.own"] = rows[background_rows(HELD_OUT)]
    prior = [0.7] if len(known) < 3 else [0.1, 0.5, -0.4]
    strategy = {"holder": {"sizes": sizes, "prior": prior}, "history": {"entries": [{}]}}
    about = {"classes": known, "mean": 40.0, "deviation": 3.0}
    none = np.zeros(0, np.int64)
    found = Checkpoint(config, "1-a", 1, True, none, None, about, strategy, arrays, (none, none))
    return Predictor(found, own)


def people(predictor: Predictor, own: int, given: Sequence[Sequence[int]]) -> ScoredRows:
    """Rows of random embeddings, one for each list of the parties that give it."""
    generator = torch.Generator().manual_seed(1)
    mask = np.array([[party in row for party in range(len(predictor.sizes))] for row in given])
    blocks = torch.randn(len(given), predictor.width, generator=generator)
    blocks *= torch.from_numpy(mask.repeat(SIZE, axis=1))
    columns = torch.randn(len(given), own, generator=generator).numpy()
    return ScoredRows(blocks, columns, mask, predictor.outputs(blocks, columns, mask))


def predicted(predictor: Predictor, rows: ScoredRows) -> list[Any]:
    classes = predictor.found.about_labels["classes"]
    if len(classes) < 3:
        return [0.5 if not classes else classes[0]] * len(rows.outputs)
    return [classes[at] for at in rows.outputs.argmax(1).tolist()]


def log_odds(outputs: Tensor, classes: str, chosen: int) -> Any:
    """The scale of contributions, from probabilities."""
    if classes == "numbers":
        return (40.0 + 3.0 * outputs[:, 0].double()).numpy()
    two = outputs.double().sigmoid()[:, 0]
    chances = outputs.double().softmax(1)[:, chosen] if classes == "three" else two
    return (chances / (1 - chances)).log().numpy()


def by_definition(
    predictor: Predictor, rows: ScoredRows, row: int, classes: str, chosen: int
) -> tuple[float, dict[str, float]]:
    """Mean gains over all orders, with one call of the model for each set and background row."""
    found, own = predictor.found, rows.own.shape[1]
    at = background_rows(HELD_OUT)
    theirs = found.arrays["test_table.rows"][at]
    own_theirs = found.arrays.get("background.own", np.zeros((len(at), 0), np.float32))
    parties = np.flatnonzero(rows.given[row]).tolist()
    partial = predictor.aggregation.any_subset

    @cache
    def value(some: frozenset[str]) -> float:
        blocks = np.zeros_like(theirs) if partial else theirs.copy()
        columns = own_theirs.copy()
        present = np.zeros((len(at), len(predictor.sizes)), bool)
        for name in some:
            if name == HOLDER:
                columns[:] = rows.own[row]
            else:
                mine = slice(SIZE * int(name), SIZE * int(name) + SIZE)
                blocks[:, mine] = rows.blocks[row, mine]
                present[:, int(name)] = True
        present |= not partial
        outputs = predictor.outputs(torch.from_numpy(blocks), columns, present)
        return float(log_odds(outputs, classes, chosen).mean())

    names = [*map(str, parties), *[HOLDER] * bool(own)]
    gains: dict[str, list[float]] = {name: [] for name in names}
    for order in permutations(names):
        for place, name in enumerate(order):
            before = frozenset(order[:place])
            gains[name].append(value(before | {name}) - value(before))
    return value(frozenset()), {name: float(np.mean(each)) for name, each in gains.items()}


@pairwise(classes=[*CLASSES], own=[0, OWN], keys=[{}, {"subsets": "sampled"}])
def test_contributions_are_shapley_values_and_add_up(
    classes: str, own: int, keys: dict[str, Any]
) -> None:
    predictor = model(3, classes, own, **keys)
    rows = people(predictor, own, [[0, 1, 2], [0, 2] if keys else [0, 1, 2]])
    said = predicted(predictor, rows)
    explained = Explainer(predictor, own).explain(rows, said)
    for row, each in enumerate(explained):
        chosen = CLASSES[classes].index(said[row]) if classes == "three" else 1
        base, due = by_definition(predictor, rows, row, classes, chosen)
        assert each["contributions"] == pytest.approx(due, abs=1e-5)
        assert each["base"] == pytest.approx(base, abs=1e-5)
        assert each["score"] == pytest.approx(log_odds(rows.outputs, classes, chosen)[row])
        total = each["base"] + sum(each["contributions"].values())
        assert total == pytest.approx(each["score"], abs=1e-9)
        assert max(abs(share) for share in each["contributions"].values()) > 0.01
        assert each["scale"].startswith("units" if classes == "numbers" else "log-odds before")
        of = {"two": "yes", "three": str(said[row]), "numbers": None}[classes]
        assert each["explained_class"] == of


@pytest.mark.parametrize("combine", ["concat", "mean", "sum"])
@pytest.mark.parametrize("top", ["mlp", "linear"])
def test_changes_of_the_first_layer_give_the_scores_of_whole_passes(
    combine: str, top: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = model(4, "three", OWN, combine=combine, **{"top-model": top})
    rows = people(predictor, OWN, [range(4)])
    said = predicted(predictor, rows)
    (quick,) = Explainer(predictor, OWN).explain(rows, said)
    passes = Mock(side_effect=predictor.outputs)
    monkeypatch.setattr(predictor, "outputs", passes)
    assert Explainer(predictor, OWN).explain(rows, said) == [quick] and not passes.called
    predictor.top.precision = "other"
    monkeypatch.setattr(type(predictor.top), "forward", lambda self, h: self.rest(self.first(h)))
    (slow,) = Explainer(predictor, OWN).explain(rows, said)
    assert passes.called and slow["contributions"] == pytest.approx(
        quick["contributions"], abs=1e-5
    )
    assert slow["base"] == pytest.approx(quick["base"], abs=1e-5)


def test_a_missing_party_has_no_contribution() -> None:
    predictor = model(3, subsets="sampled")
    rows = people(predictor, 0, [[0, 2], [1]])
    first, second = Explainer(predictor, 0).explain(rows, ["no", "no"])
    assert list(first["contributions"]) == ["0", "2"] and list(second["contributions"]) == ["1"]
    # Nobody's score is the share of the classes in training.
    assert first["base"] == second["base"] == pytest.approx(0.7)
    assert second["contributions"]["1"] == pytest.approx(second["score"] - 0.7)


@pytest.mark.parametrize("keys", [{}, {"subsets": "sampled"}], ids=["whole", "any"])
def test_random_orders_add_up_and_come_close(
    keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = model(6, "two", OWN, **keys)
    rows = people(predictor, OWN, [range(6)])
    (exact,) = Explainer(predictor, OWN).explain(rows, ["no"])
    monkeypatch.setattr(contributions, "EXACT", 1)
    (drawn,) = Explainer(predictor, OWN).explain(rows, ["no"])
    assert drawn["base"] == pytest.approx(exact["base"], abs=1e-5)
    total = drawn["base"] + sum(drawn["contributions"].values())
    assert total == pytest.approx(drawn["score"], abs=1e-9)
    found, due = (np.array(list(each["contributions"].values())) for each in (drawn, exact))
    assert np.abs(found - due).max() < 0.1 * np.abs(due).max()


def test_the_most_ids_of_a_request_bound_the_calls_of_the_top_model() -> None:
    most = {parties: Explainer(model(parties), 0).most_ids for parties in (2, 8, 10, 12)}
    assert most == {2: 1048, 8: 40, 10: 10, 12: 403}
    assert Explainer(model(2, subsets="sampled"), 0).most_ids > 10_000


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"aggregation": "secure", "top-model": "sum"}, "only sums of this model's embeddings"),
        ({"entries": []}, "has no evaluation yet"),
        ({"background.own": None}, "an earlier version wrote it"),
    ],
    ids=lambda each: next(iter(each)) if isinstance(each, dict) else "",
)
def test_models_without_contributions_say_why(change: dict[str, Any], said: str) -> None:
    own = OWN if "background.own" in change else 0
    predictor = model(2, "two", own, **(change if "aggregation" in change else {}))
    predictor.found.strategy["history"] |= change
    if own:
        del predictor.found.arrays["background.own"]
    explainer = Explainer(predictor, own)
    assert said in explainer.refusal and explainer.refusal.endswith(".")
    rows = ScoredRows(
        torch.zeros(1, SIZE),
        np.zeros((1, own), np.float32),
        np.ones((1, 2), bool),
        torch.ones(1, 1),
    )
    with pytest.raises(ConfigError, match=said):
        explainer.explain(rows, ["no"])
