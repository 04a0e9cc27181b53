"""Reasons for one score: a participant's contribution, split among the participant's columns.

A participant's column j gets integrated gradients along the straight path from a reference row r to
the person's row x (Sundararajan et al., 2017, "Axiomatic Attribution", eq. 1):

    (x_j - r_j) * integral over a in [0, 1] of dF(r + a (x - r)) / dx_j

The mean over rows r of `background_rows` counts. F is what the participant adds to random
participants before it, as in a Shapley value. At a party, F(x) = G(h(x)), with the embedding h. The
owners of G and h take the integral in two steps, as Chen et al. (2022, "Explaining a series of
models by propagating Shapley values") do between institutions. The label holder computes gradients
of G on the paths from h(r) to h(x) (`slopes`). The party computes its own Jacobian on the paths
from r to x, so it uploads no further embedding. If G and h are linear, these are the Shapley values
of the columns.

`POINTS` of the rows, evenly in the order of their scores, have points on their paths. This leaves
a rest, which is spread over the columns by the size of their parts (`parts.References`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import VflError
from vfl_flower.data.source import Preparation
from vfl_flower.label_holder.scored_rows import ScoredRows
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.tasks.inference.contribution_to_score import HOLDER, Explainer
from vfl_flower.tasks.inference.parts import References, on_paths
from vfl_flower.transport.explain_messages import GivenReasons, ReasonsOrder
from vfl_flower.transport.messages import checked
from vfl_flower.transport.wire import said

Floats = NDArray[np.float32]


DRAWS = 2
"""Number of points on a path, beside random participants."""


class Slopes(NamedTuple):
    """Slopes by which a participant splits its contribution.

    rows, gradients : reference rows, [k], and the score's gradient on the path from each, [k, E].
    total : what the columns add up to. A model of any subset also gets something from a party
        without its columns: that the party has the person at all.
    """

    rows: NDArray[np.int32]
    gradients: Floats
    total: float

    def order(self, request: str, **arrays: Any) -> ReasonsOrder:
        """Return the order to a party; ``arrays`` name the person, as in `ScoreOrder`."""
        arrays = {**arrays, "background": self.rows, "gradients": self.gradients}
        return ReasonsOrder(request=request, total=self.total, arrays=arrays)


Ask = Callable[[dict[int, Slopes]], tuple[Mapping[int, GivenReasons], dict[int, str]]]


def refusal(explainer: Explainer) -> str:
    """Return why scores of this model have no reasons by columns; empty if they have."""
    mechanism = mechanism_of(explainer.predictor.found.config)
    if mechanism.hides_labels or mechanism.perturbs_uploads:
        return (
            "The run of this model has noise for privacy, and no epsilon covers the gradients that "
            "reasons need. Ask for the parties' contributions alone."
        )
    return explainer.refusal


def slopes(
    explainer: Explainer, row: ScoredRows, chosen: int, contributions: Mapping[str, float]
) -> dict[int | str, Slopes]:
    """Return the slopes of each participant in the score of a row, for the explained class."""
    return {
        player: _slopes(explainer, row, chosen, player, contributions[str(player)])
        for player in explainer.players(row)
    }


def _slopes(
    explainer: Explainer, row: ScoredRows, chosen: int, player: int | str, total: float
) -> Slopes:
    is_party, predictor, players = player != HOLDER, explainer.predictor, explainer.players(row)
    columns = predictor.columns[int(player)] if is_party else slice(None)
    theirs = explainer.blocks if is_party else torch.from_numpy(explainer.own)
    may_lack, everywhere = explainer.any_subset and is_party, explainer.by_score
    if may_lack:
        everywhere = everywhere[theirs[:, columns].any(1).numpy()[everywhere]]

    def inputs(shown: NDArray[np.int64]) -> tuple[Tensor, Tensor, NDArray[np.bool_]]:
        """Return the inputs of the top model for the person beside each of these rows."""
        sets = _companions(len(shown), len(players), players.index(player))
        blocks, of_holder, present = explainer.rows(row, sets, shown)
        return blocks, torch.from_numpy(of_holder), present

    def moved(given: tuple[Tensor, Tensor, NDArray[np.bool_]], at: Tensor) -> Tensor:
        """Return the scores with other inputs of the participant; they have gradients."""
        (given[0] if is_party else given[1])[:, columns] = at
        return explainer.scores(predictor.differentiable(*given), chosen)

    if may_lack:
        with torch.no_grad():
            given = inputs(everywhere)
            total = float(explainer.scores(predictor.differentiable(*given), chosen).mean())
            total -= float(moved(given, theirs[everywhere, columns]).mean())
    at, alphas = on_paths(len(everywhere), DRAWS)
    some = everywhere[at]
    given = inputs(some)
    mine = (given[0] if is_party else given[1])[:, columns]
    points = torch.lerp(theirs[some, columns], mine, torch.from_numpy(alphas)[:, None])
    with torch.enable_grad():
        (slopes,) = torch.autograd.grad(moved(given, points.requires_grad_()).sum(), points)
    slopes = slopes.view(-1, DRAWS, slopes.shape[1]).mean(1)
    return Slopes(some[::DRAWS].astype(np.int32), slopes.numpy(), total)


@lru_cache(64)
def _companions(count: int, players: int, player: int) -> NDArray[np.bool_]:
    """Return which participants show the person beside each row, [count, players].

    With a random share u, each other participant comes before this one with probability u. The
    next row has the opposite order: all others come after it there.
    """
    drawn = np.random.default_rng(1)
    share = (drawn.permutation(count) + 0.5) / count
    sets = drawn.random((count, players)) < share[:, None]
    sets[1::2] = ~sets[: count - 1 : 2]
    sets[:, player] = True
    return sets


def of_score(
    explainer: Explainer, row: ScoredRows, score: Mapping[str, Any], ask: Ask
) -> dict[str, Any]:
    """Return what participants tell of the columns behind a score, as fields of an answer."""
    chosen = explainer.chosen(row, score["prediction"])
    of_players = slopes(explainer, row, chosen, score["contributions"])
    told = dict[str, list[dict[str, Any]]]()
    if own := of_players.pop(HOLDER, None):
        told[HOLDER] = _of_label_holder(explainer, row, own)
    answers, missing = ask({int(party): each for party, each in of_players.items()})
    for party, answer in answers.items():
        try:
            told[str(party)] = _read(answer)
        except VflError:
            missing[party] = "faulty"
    return {"reasons": told, "no_reasons": {str(each): missing[each] for each in missing}}


def _of_label_holder(explainer: Explainer, row: ScoredRows, own: Slopes) -> list[dict[str, Any]]:
    """Return the parts of the label holder's own columns by name, the largest first."""
    columns = Preparation(**explainer.predictor.found.about_labels["preparation"]).columns
    index = [(..., at) for at in columns.values()]
    references = References(explainer.own, index)
    both = references.split(row.own, explainer.own[own.rows], own.gradients, own.total)
    found = zip(columns, *(each.tolist() for each in both), strict=True)
    named = [{"column": name, "part": part, "error": error} for name, part, error in found]
    return sorted(named, key=lambda each: -abs(each["part"]))


def _read(answer: GivenReasons) -> list[dict[str, Any]]:
    """Return what a party tells of its reasons; raise `VflError` if that cannot be used."""
    told, texts = answer.arrays.get("columns", np.zeros(0, np.int32)), answer.arrays.get("names")
    columns = checked({"columns": told}, "columns", "int32", (told.size,)).tolist()
    if columns and texts is not None:
        columns = [said(text) for text in bytes(texts).decode(errors="replace").split("\n")]
    effects = checked(answer.arrays, "effects", "int32", (len(columns),)) if columns else ()
    pairs = zip(columns, effects, strict=True)
    return [{"column": each, "effect": "raises" if up > 0 else "lowers"} for each, up in pairs]
