"""Predict new rows with a trained model.

Parties embed the rows with the bottom models that they have saved, and the label holder evaluates
its top model. With files, these are the rows of the label holder's file that all parties have, or
all rows if the model predicts with any subset. A partitioned data set has its test rows predicted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vfl_flower.config.errors import ConfigError, sent_by
from vfl_flower.config.files import write_whole
from vfl_flower.config.logs import notice
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.bins import check_segments
from vfl_flower.label_holder.about_data import of_people
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.label_holder.scored_rows import ScoredRows
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.results.figures import coverage
from vfl_flower.tasks.drift.label_holder import DriftWatch
from vfl_flower.tasks.inference import predictions
from vfl_flower.tasks.inference.contribution_to_score import Explainer
from vfl_flower.tasks.inference.model import TrainedModel, check_model, check_streams
from vfl_flower.tasks.inference.reasons import Slopes, of_score, refusal
from vfl_flower.tasks.inference.releases import UploadCount
from vfl_flower.tasks.inference.rows import RowsToPredict
from vfl_flower.transport.base import Transport
from vfl_flower.transport.explain_messages import GivenReasons
from vfl_flower.transport.gather import gather
from vfl_flower.transport.messages import Predicted, PredictOrder, ServeOrder, Serving


def predict(transport: Transport, config: RunConfig, given: Mapping[str, Any], run: str) -> None:
    """Write predictions by id, and figures beside them if there are labels.

    The first column has the ids, under its name in the label holder's file, or ``id``. Then come
    ``prediction``, in units of the labels, and for classes ``probability_CLASS``. A model of any
    subset adds ``parties``: the parties used, such as ``0+2``, or ``none``. The option
    ``flag-rate`` adds ``inconsistent``: the party that does not fit the others, if any.
    """
    check_model(config, "predict with")
    path = predictions.predictions_file(config)  # refuse before parties are asked
    model = TrainedModel(transport, config, given, run)
    found, rows, there, predictor = model.found, model.rows, model.there, model.predictor
    if rows.labels is not None:
        check_segments(rows.segments)  # before parties are asked
    explainer = _explainer(model) if config.explain else None
    epsilon = UploadCount(config, found).add()
    scored, answers = model.embed(PredictOrder, Predicted)
    drift = DriftWatch(found, predictor.columns)
    for answer in answers.values():
        with sent_by(answer.party):
            drift.take(answer.party, answer.arrays)
    if unknown := int((~scored.known).sum()):
        _tell_of_unknown_rows(unknown, found)
    drift.count(scored)
    of_labels = _of_labels(given, found, scored, rows)
    figures: dict[str, Any] = {"model": str(config.model), "rows": len(rows.ids)}
    figures |= {"unknown_rows": unknown, "coverage": _coverage(model, scored)}
    figures |= {"epsilon": epsilon} if epsilon is not None else {}
    if of_labels and not mechanism_of(found.config).hides_labels:
        figures |= _learnt(rows)
    figures |= of_labels
    drift.count_own(rows.table, rows.places)
    figures["drift"] = drift.figures()
    frame = predictions.frame_of(rows.ids, rows.called, scored, found)
    if there is not None:
        used = ("+".join(map(str, np.flatnonzero(row))) for row in scored.given)
        frame["parties"] = [each or "none" for each in used]
    if scored.suspects is not None:
        figures["inconsistent"] = _inconsistent(scored.suspects, len(predictor.sizes))
        frame["inconsistent"] = ["" if each < 0 else str(each) for each in scored.suspects.tolist()]
    predictions.write(path, frame.iloc[rows.order], figures)
    if explainer:
        reasons = _reasons(model, explainer, scored, transport)
        write_whole(path.with_suffix(".reasons.jsonl"), b"".join(reasons))
        notice.info("reasons: %s", path.with_suffix(".reasons.jsonl"))
    drift.write_own(path.with_suffix(".drift.csv"))
    drift.warn()
    spent = "" if epsilon is None else f"; epsilon of the run and its predictions {epsilon:.3g}"
    notice.info("%d predictions%s%s", len(rows.ids), predictions.in_words(of_labels), spent)
    if rows.table is not None and (left := len(rows.table.ids) - len(rows.ids)):
        notice.info(
            "%d of the %d people in %s get no prediction, since a party does not know them.",
            *(left, len(rows.table.ids), rows.table.whose),
        )
    if transport.medium != "none":  # else the caller prints it
        notice.info("predictions: %s", path)


def _inconsistent(suspects: NDArray[np.int64], parties: int) -> dict[str, int]:
    """Return how many rows are flagged because of each party, and warn if there are some."""
    counts = np.bincount(suspects[suspects >= 0], minlength=parties).tolist()
    if sum(counts):
        of_parties = ", ".join(f"party {m} in {n}" for m, n in enumerate(counts) if n)
        notice.warning(
            "%d of %d scores are flagged: a party's embedding does not fit the others' (%s).",
            *(sum(counts), len(suspects), of_parties),
        )
    return {str(party): number for party, number in enumerate(counts)}


def _explainer(model: TrainedModel) -> Explainer:
    """Return what explains the scores, or raise `ConfigError`."""
    explainer = Explainer(model.predictor, model.rows.own.shape[1])
    if why := refusal(explainer):
        raise ConfigError(why)
    check_streams(model.transport, "Reasons need")
    return explainer


def _reasons(
    model: TrainedModel, explainer: Explainer, scored: ScoredRows, transport: Transport
) -> Iterator[bytes]:
    """Yield a line of JSON for each row that has a score, in the order of the file."""
    nodes = {each.party: node for node, each in model.ask(model.order(ServeOrder), Serving).items()}
    at = (np.cumsum(scored.given, axis=0) - 1).astype(np.int32)  # among the party's own rows
    refused: dict[int, str] = {}
    said = predictions.predicted_columns(scored.outputs, model.found)["prediction"].tolist()

    def ask(row: int, slopes: dict[int, Slopes]) -> tuple[dict[int, GivenReasons], dict[int, str]]:
        name = f"{model.run}:{row}"
        orders = {
            nodes[party]: each.order(name, rows=at[[row], party])
            for party, each in slopes.items()
            if party not in refused
        }
        timeout = model.config.running.party_timeout
        found = gather(transport, orders, GivenReasons, timeout, lenient=True)
        answers = {party: found[node] for party, node in nodes.items() if node in found}
        refused.update(dict.fromkeys(slopes.keys() - answers, "refused"))
        return answers, {party: refused[party] for party in slopes.keys() - answers}

    for row in model.rows.order[scored.known[model.rows.order]].tolist():
        one = scored.at([row])
        (score,) = explainer.explain(one, said[row : row + 1])
        score |= {"id": model.rows.ids[row], "request": f"{model.run}:{row}"}
        score |= {"prediction": said[row]}
        score |= of_score(explainer, one, score, partial(ask, row))
        yield json.dumps(score, default=str).encode() + b"\n"


def _learnt(rows: RowsToPredict) -> dict[str, int]:
    """Return how many people the model learnt from, if any, and warn of figures on them."""
    learnt = 0 if rows.learnt is None else int(rows.learnt.sum())
    if learnt:
        notice.warning(
            "%d of these %d people trained or chose the model: figures on them are too good. Use "
            "the run's own test figures, or label people outside its file.",
            *(learnt, len(rows.ids)),
        )
    return {"training_rows": learnt} if learnt else {}


def _coverage(model: TrainedModel, scored_rows: ScoredRows) -> dict[str, Any]:
    """Return which people of the label holder's file have a score, and why others have none."""
    rows, there, known, about = model.rows, model.there, scored_rows.known, dict[str, Any]()
    asked, scored = len(rows.table.ids) if rows.table else len(rows.ids), int(known.sum())
    if rows.table is not None and rows.places is not None:
        about = of_people(rows.table, rows.places[known], model.found.config)
    if there is None:
        left = {"a party lacks them": asked - scored}
        return coverage(asked, scored, scored, left, rows.known, rules=rows.rules, **about)
    left_out = [f"Party {n} is left out by without." for n in sorted(there.without)]
    left_out = [*model.transport.left_out, *left_out]
    aligned = int(rows.known_by(there.parties).any(1).sum())
    left = {"no party that answered knows them": asked - scored}
    by_party = dict(enumerate(scored_rows.given.sum(0).tolist()))
    return coverage(asked, aligned, scored, left, by_party, left_out, rows.rules, **about)


def _of_labels(
    given: Mapping[str, Any], found: Checkpoint, scored: ScoredRows, rows: RowsToPredict
) -> dict[str, Any]:
    """Return figures of the rows with labels, and their assessment; empty without labels."""
    if rows.labels is None:
        return {}
    numbers, labels = predictions.labelled(rows.labels, scored.known, found)
    if not len(numbers):
        return {}
    from vfl_flower.label_holder.assessment.of_model import of_predictions  # lazy: slow

    outputs = scored.outputs[torch.from_numpy(numbers)]
    metrics = predictions.reached(outputs, labels, found).figures()
    segments = {name: values[numbers] for name, values in rows.segments.items()}
    least = given.get("min-segment", found.config.assessment.min_segment)
    by = segments, least, rows.table.time if rows.table else ""
    assessment = of_predictions(outputs, labels, found, by)
    if assessment is None:
        return metrics
    known_figures = {name: each["value"] for name, each in assessment["figures"].items()}
    return {**known_figures, **metrics, "assessment": assessment}


def _tell_of_unknown_rows(count: int, found: Checkpoint) -> None:
    what = "the top model's output without any embedding"
    if found.strategy["holder"]["prior"]:
        what = "the class shares of training, or the mean"
    notice.info("No party has %d of the rows: they get %s, and no figure counts them.", count, what)
