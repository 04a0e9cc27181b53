"""Predict new rows with a trained model.

Parties embed the rows with the bottom models that they have saved. The label holder evaluates its
top model on the embeddings, and writes one prediction for each id.

With files, the rows are the rows of the label holder's file that all parties have. A model of any
subset predicts all rows of the file, from the parties that are available. A partitioned data set
has its test rows predicted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import ConfigError, PartyError, SumError, VflError
from vfl_flower.config.files import locked
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.segments import check_segments
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.calibration import check_fitted
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.label_holder.drift import DriftWatch
from vfl_flower.label_holder.earlier_run import check_states
from vfl_flower.protocol import estimators
from vfl_flower.protocol.privacy.journal import EVALUATE, Event, Journal, refused, second_count
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.privacy.release_log import ReleaseLog
from vfl_flower.results.coverage import coverage
from vfl_flower.tasks.inference.predictions import (
    frame_of,
    in_words,
    labelled,
    predictions_file,
    reached,
    write,
)
from vfl_flower.tasks.inference.predictor import Predictor
from vfl_flower.tasks.inference.rows import (
    RowsToPredict,
    available_parties,
    rows_to_predict,
)
from vfl_flower.transport.base import Transport
from vfl_flower.transport.gather import AvailableParties, gather, gather_all
from vfl_flower.transport.messages import SMALL, Predicted, PredictOrder

notice = logging.getLogger("flwr.notice")  # `vfl predict` shows these records too

P = TypeVar("P", bound=Predicted)


def predict(transport: Transport, config: RunConfig, given: Mapping[str, Any], run: str) -> None:
    """Write predictions by id, and figures beside them if there are labels.

    The first column has the ids, under its name in the label holder's file, or ``id``. Then come
    ``prediction``, in units of the labels, and for classes ``probability_CLASS``. A model of any
    subset adds ``parties``: the parties used, such as ``0+2``, or ``none``. Rows are in the order
    of the label holder's file.

    Parameters
    ----------
    given : the options that were given. Training decides all others.
    run : number of this Flower run.

    Raises
    ------
    ConfigError, PartyError
        If the run's checkpoint, a party's checkpoint or a file does not fit. Nothing is written
        then.
    """
    if not config.model:
        raise ConfigError("There is no model to predict with. Set model to a run's results folder.")
    path = predictions_file(config)  # refuse before parties are asked
    found = checkpoint.load(config.model)
    check_fitted(found)
    transport.parties = found.parties
    there = available_parties(config, found)
    rows = rows_to_predict(transport, config, given, found, run, there)
    if rows.labels is not None:
        check_segments(rows.segments)  # before parties are asked
    predictor = Predictor(found, rows.own.shape[1])
    epsilon = UploadCount(config, found).add()
    order = PredictOrder(run=found.run, number=found.number)
    blocks, present, answers = embeddings(
        transport, config, predictor, rows, there, order, Predicted
    )
    drift = DriftWatch(found, predictor.columns)
    for answer in answers.values():
        try:
            drift.take(answer.party, answer.arrays)
        except VflError as error:
            raise PartyError(f"Party {answer.party}", f"sent {error}") from None
    outputs, known = (
        predictor.outputs(blocks, rows.own, present),
        predictor.knows(rows.own, present),
    )
    if not known.all():
        _tell_of_unknown_rows(int((~known).sum()), found)
    drift.count(blocks, outputs, present, known)
    of_labels = _of_labels(given, found, outputs, known, rows)
    figures = {
        "model": str(config.model),
        "rows": len(rows.ids),
        "unknown_rows": int((~known).sum()),
    }
    figures["coverage"] = _coverage(rows, present, known, there, transport.left_out)
    figures |= {"epsilon": epsilon} if epsilon is not None else {}
    learnt = 0 if rows.learnt is None else int(rows.learnt.sum())
    if of_labels and learnt and not mechanism_of(found.config).hides_labels:
        figures["training_rows"] = learnt
        notice.warning(
            "%d of these %d people trained or chose the model: figures on them are too good. Use "
            "the run's own test figures, or label people outside its file.",
            *(learnt, len(rows.ids)),
        )
    figures |= of_labels
    drift.count_own(rows.table, rows.places)
    figures["drift"] = drift.figures()
    frame = frame_of(rows.ids, rows.called, outputs, known, found)
    if there is not None:
        used = ("+".join(map(str, np.flatnonzero(row))) for row in present)
        frame["parties"] = [each or "none" for each in used]
    write(path, frame.iloc[rows.order], figures)
    drift.write_own(path.with_suffix(".drift.csv"))
    drift.warn()
    spent = "" if epsilon is None else f"; epsilon of the run and its predictions {epsilon:.3g}"
    notice.info("%d predictions%s%s", len(rows.ids), in_words(of_labels), spent)
    if rows.table is not None and (left := len(rows.table.ids) - len(rows.ids)):
        notice.info(
            "%d of the %d people in %s get no prediction, since a party does not know them.",
            *(left, len(rows.table.ids), rows.table.whose),
        )
    if transport.medium != "none":  # else the caller prints it
        notice.info("predictions: %s", path)


def _coverage(
    rows: RowsToPredict,
    present: NDArray[np.bool_],
    known: NDArray[np.bool_],
    there: AvailableParties | None,
    left_out: Sequence[str],
) -> dict[str, Any]:
    """Return which people of the label holder's file have a score, and why others have none."""
    asked = len(rows.table.ids) if rows.table else len(rows.ids)
    scored = int(known.sum())
    if there is None:
        left = {"a party lacks them": asked - scored}
        return coverage(asked, scored, scored, left, rows.known)
    left_out = [*left_out, *(f"Party {n} is left out by without." for n in sorted(there.without))]
    aligned = int(rows.known_by(there.parties).any(1).sum())
    left = {"no party that answered knows them": asked - scored}
    by_party = dict(enumerate(present.sum(0).tolist()))
    return coverage(asked, aligned, scored, left, by_party, left_out)


def _of_labels(
    given: Mapping[str, Any],
    found: Checkpoint,
    outputs: Tensor,
    known: NDArray[np.bool_],
    rows: RowsToPredict,
) -> dict[str, Any]:
    """Return figures of the rows with labels, and their assessment; empty without labels."""
    if rows.labels is None:
        return {}
    numbers, labels = labelled(rows.labels, known, found)
    if not len(numbers):
        return {}
    from vfl_flower.label_holder.assessment.of_predictions import of_predictions  # lazy: slow

    outputs = outputs[torch.from_numpy(numbers)]
    metrics = reached(outputs, labels, found).figures()
    segments = {name: values[numbers] for name, values in rows.segments.items()}
    least = given.get("min-segment", found.config.assessment.min_segment)
    assessment = of_predictions(outputs, labels, found, segments, least)
    if assessment is None:
        return metrics
    known_figures = {name: each["value"] for name, each in assessment["figures"].items()}
    return {**known_figures, **metrics, "assessment": assessment}


def embeddings(
    transport: Transport,
    config: RunConfig,
    predictor: Predictor,
    rows: RowsToPredict,
    there: AvailableParties | None,
    order: PredictOrder,
    kind: type[P],
) -> tuple[Tensor, NDArray[np.bool_], dict[int, P]]:
    """Ask all parties for embeddings of rows.

    Parameters
    ----------
    order, kind : the order to each party, and the kind of its answer.

    Returns
    -------
    blocks of embeddings [R, width], the row mask [R, M], and node -> answer.
    """
    found, sizes, aggregation = predictor.found, predictor.sizes, predictor.aggregation
    transport.expect({order.kind: SMALL + 4 * max(sizes, default=0) * len(rows.ids)})
    order = replace(order, arrays=aggregation.question(transport, config.running))
    if there and rows.nodes is not None:
        orders = {node: _of_party(order, rows, party) for party, node in rows.nodes.items()}
        answers = gather(transport, orders, kind, config.running.party_timeout, lenient=True)
    else:  # every party has every row
        answers = gather_all(transport, _of_party(order, rows), kind, config.running, there)
    check_states(found, answers.values(), whole=there is None)
    aggregation.check_agreed(answers.values())
    present = np.ones((len(rows.ids), len(sizes)), bool) if rows.present is None else rows.present
    collection = aggregation.collection(len(sizes))
    blocks = torch.zeros(len(rows.ids), predictor.width)
    for answer in answers.values():
        party = answer.party
        places = torch.from_numpy(present[:, party])
        try:
            if answer.alignment != rows.alignment:
                raise VflError("embeddings of other rows.")
            block = collection.add(party, answer.arrays, (int(places.sum()), sizes[party]))
        except SumError:
            raise
        except VflError as error:
            raise PartyError(f"Party {party}", f"sent {error}") from None
        if block is not None:
            blocks[places, predictor.columns[party]] = block
    absent = sorted(set(range(len(sizes))) - {answer.party for answer in answers.values()})
    present[:, absent] = False
    return blocks, present, answers


def _of_party(order: PredictOrder, rows: RowsToPredict, party: int = 0) -> PredictOrder:
    """Return the order to a party, which names the rows if not all are wanted."""
    if rows.chosen is None:
        return order
    wanted = rows.chosen[:, party]
    return replace(order, arrays={**order.arrays, "rows": wanted[wanted >= 0].astype(np.int32)})


def _tell_of_unknown_rows(count: int, found: Checkpoint) -> None:
    what = "the top model's output without any embedding"
    if found.strategy["holder"]["prior"]:
        what = "the class shares of training, or the mean"
    notice.info("No party has %d of the rows: they get %s, and no figure counts them.", count, what)


def counts_uploads(found: Checkpoint) -> bool:
    """Return whether each prediction with this model is a release that costs epsilon."""
    mechanism = mechanism_of(found.config)
    return mechanism.perturbs_uploads and mechanism.claims


class UploadCount:
    """Counts uploads of a row under noise on embeddings, and knows their epsilon.

    It counts the uploads before they happen, in a file beside the run and in a second count. It
    assumes that they are uploads of the rows that were uploaded most.
    """

    def __init__(self, config: RunConfig, found: Checkpoint) -> None:
        self._folder, self._found = Path(config.model).expanduser(), found
        self._journal: Journal | None = None
        self._times = 0  # that the journal counts
        self._trained = 0

    def add(self, uploads: int = 1) -> float | None:
        """Count uploads, and return the epsilon of perturbed embeddings; None without them.

        Read the file only if it is new, or if something else has written to it.

        Raises
        ------
        ConfigError
            If a journal is damaged or of another run, or if a journal of training is older than it
            was.
        """
        found = self._found
        if not counts_uploads(found):
            return None
        path = self._folder / "predictions.journal"
        with locked(path.with_suffix(".lock"), f"Another prediction uses {path}. Try again."):
            if self._journal is None or not self._journal.is_current:
                self._journal, self._times = self._read(path)
                self._trained = _trained(self._folder, found)
            lost = self._journal.lost
            self._journal.write(Event(EVALUATE, 0), uploads + lost)
            self._times += uploads
        rows = len(found.arrays["table.rows"])
        times = self._trained + self._times
        return mechanism_of(found.config).epsilon_of_uploads(rows, times)

    def _read(self, path: Path) -> tuple[Journal, int]:
        run = self._found.origin.partition("-")[0]
        journal = Journal(path, run, second_count(self._found.origin, path.name))
        times = sum(1 for _ in journal.read())
        if journal.run != run and "origin" in self._found.strategy:  # 0.2.0 named another one
            raise refused(path, "of another run")
        if journal.lost:
            notice.warning(
                "%s lacks %d predictions that %s has: it was deleted, restored or copied. They "
                "count.",
                *(path, journal.lost, journal.second),
            )
        return journal, times + journal.lost


def _trained(folder: Path, found: Checkpoint) -> int:
    """Return how often training has uploaded a row, also after the checkpoint of a cut-off run."""
    known, mark = int(found.strategy["uploads"]), found.strategy.get("journal")
    if found.finished or mark is None:
        return known
    config = found.config
    mechanism, rows = mechanism_of(config), len(found.arrays["table.rows"])
    accountant = mechanism.accountant(rows, estimators.choose(config)(config))
    second = second_count(found.origin, checkpoint.JOURNAL)
    ReleaseLog(accountant).keep(folder / checkpoint.JOURNAL, mark=mark, second=second)
    return max(known, accountant.uploads())
