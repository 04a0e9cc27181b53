"""Predict new rows with a trained model.

Parties embed the rows with the bottom models that they have saved. The label holder evaluates its
top model on the embeddings, and writes one prediction for each id.

With files, the rows are the rows of the label holder's file that all parties have. A model of any
subset predicts all rows of the file, from the parties that are available. A partitioned data set
has its test rows predicted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.alignment.reuse import aligned
from vfl_flower.config.errors import ConfigError, PartyError, SumError, VflError
from vfl_flower.config.files import locked
from vfl_flower.config.provenance import code_digest
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels, own_table, with_row_masks
from vfl_flower.data.at_party import prepared
from vfl_flower.data.source import Preparation
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.label_holder.earlier_run import check_states
from vfl_flower.label_holder.held_out import of_group
from vfl_flower.label_holder.predictions import (
    frame_of,
    in_words,
    predictions_file,
    reached,
    write,
)
from vfl_flower.models.tops import load_top
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.privacy.journal import EVALUATE, Event, Journal
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.transport.base import Transport
from vfl_flower.transport.gather import AvailableParties, gather, gather_all
from vfl_flower.transport.messages import SMALL, Predicted, PredictOrder

notice = logging.getLogger("flwr.notice")  # `vfl predict` shows these records too

Array = NDArray[Any]


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
    predictions_file(config)  # refuse before parties are asked
    found = checkpoint.load(config.model)
    there = available_parties(config, found)
    rows = _rows(transport, config, given, found, run, there)
    epsilon = _count_uploads(config, found)
    outputs, present = _outputs(transport, config, found, rows, there)
    known = present.sum(1) + rows.own.shape[1] > 0
    if not known.all():
        outputs = _with_prior(outputs, known, found)
    metrics = reached(outputs, rows.labels, known, found) if rows.labels is not None else None
    figures = {
        "model": str(config.model),
        "rows": len(rows.ids),
        "unknown_rows": int((~known).sum()),
    }
    figures |= {"epsilon": epsilon} if epsilon is not None else {}
    figures |= metrics.figures() if metrics else {}
    frame = frame_of(rows.ids, rows.called, outputs, found)
    if there is not None:
        used = ("+".join(map(str, np.flatnonzero(row))) for row in present)
        frame["parties"] = [each or "none" for each in used]
    write(config, frame.iloc[rows.order], figures)
    spent = "" if epsilon is None else f"; epsilon of the run and its predictions {epsilon:.3g}"
    notice.info("%d predictions%s%s", len(rows.ids), in_words(metrics), spent)


@torch.no_grad()
def _outputs(
    transport: Transport,
    config: RunConfig,
    found: Checkpoint,
    rows: _Rows,
    there: AvailableParties | None,
) -> tuple[Tensor, NDArray[np.bool_]]:
    """Return outputs [R, C] from the parties' embeddings, and the row mask [R, M]."""
    aggregation, sizes = aggregation_of(found.config), found.strategy["holder"]["sizes"]
    transport.expect({PredictOrder.kind: SMALL + 4 * max(sizes, default=0) * len(rows.ids)})
    arrays = aggregation.question(transport, config.running)
    order = PredictOrder(run=found.run, number=found.number, arrays=arrays)
    if there and rows.nodes is not None:
        orders = dict.fromkeys(rows.nodes.values(), order)
        answers = gather(transport, orders, Predicted, config.running.party_timeout, lenient=True)
    else:
        answers = gather_all(transport, order, Predicted, config.running, there)
    check_states(found, answers.values(), whole=there is None)
    aggregation.check_agreed(answers.values())
    present = np.ones((len(rows.ids), len(sizes)), bool) if rows.present is None else rows.present
    columns = aggregation.columns(dict(enumerate(sizes)))
    collection = aggregation.collection(len(sizes))
    blocks = torch.zeros(len(rows.ids), max((each.stop for each in columns.values()), default=0))
    for answer in answers.values():
        party = answer.party
        places = torch.from_numpy(present[:, party])
        try:
            if (answer.alignment, answer.code_digest) != (rows.alignment, code_digest()):
                raise VflError("embeddings of other rows, or from another version of the code.")
            block = collection.add(party, answer.arrays, (int(places.sum()), sizes[party]))
        except SumError:
            raise
        except VflError as error:
            raise PartyError(f"Party {party}", f"sent {error}") from None
        if block is not None:
            blocks[places, columns[party]] = block
    absent = sorted(set(range(len(sizes))) - {answer.party for answer in answers.values()})
    present[:, absent] = False
    classes = found.about_labels["classes"]
    outputs = 1 if len(classes) in (0, 2) else len(classes)
    top = aggregation.build_top(sizes, outputs, rows.own.shape[1]).eval()
    load_top(found.config, top, of_group("top", found.arrays))
    h = aggregation.rows(blocks, torch.from_numpy(rows.own), torch.from_numpy(present))
    said: Tensor = top(h)
    return said, present


def available_parties(config: RunConfig, found: Checkpoint) -> AvailableParties | None:
    """Return the parties that a model of any subset can use; None if it needs all.

    Raises
    ------
    ConfigError
        If the option ``without`` does not name parties of that run, or the model needs all parties.
    """
    parties = len(found.strategy["holder"]["sizes"])
    words = config.without.replace(",", " ").split()
    if not aggregation_of(found.config).any_subset:
        asked = "without" if words else "align = 'any'" if config.data.align == "any" else ""
        if asked:
            raise ConfigError(
                f"The model in {config.model} needs all its parties. Leave {asked} out, or train "
                "a model that predicts with any subset: set subsets = 'sampled'."
            )
        return None
    if words and config.data.align == "ids":
        raise ConfigError(
            "align = 'ids' is for rows that all parties have. Set align = 'psi' to leave some out."
        )
    if not all(word.isdecimal() and int(word) < parties for word in words):
        raise ConfigError(
            f"without = {config.without!r} must be numbers of parties, from 0 to {parties - 1}. "
            "Separate them with commas."
        )
    return AvailableParties(parties, frozenset(int(word) for word in words))


def _with_prior(said: Tensor, known: NDArray[np.bool_], found: Checkpoint) -> Tensor:
    """Replace the outputs of unknown rows by a prior from the training labels."""
    nobody = torch.from_numpy(~known)
    prior: list[float] | None = found.strategy["holder"]["prior"]
    what = "the top model's output without any embedding"
    if prior:
        said = torch.where(nobody[:, None], torch.tensor(prior), said)
        what = "the class shares of training, or the mean"
    count = int(nobody.sum())
    notice.info("No party has %d of the rows: they get %s, and no figure counts them.", count, what)
    return said


@dataclass(frozen=True)
class _Rows:
    """The label holder's data of the rows to predict.

    ids, called : ids, and the name of their column.
    own : the label holder's own columns, float32 [N, F].
    order : puts rows into the order of its file.
    present : row mask [N, M], if parties may lack rows.
    nodes : party -> node, for the parties that know the rows.
    """

    ids: Array
    alignment: str
    own: NDArray[np.float32]
    order: Array
    labels: Array | None = None
    present: NDArray[np.bool_] | None = None
    nodes: Mapping[int, int] | None = None
    called: str = "id"


def _rows(
    transport: Transport,
    config: RunConfig,
    given: Mapping[str, Any],
    found: Checkpoint,
    run: str,
    there: AvailableParties | None,
) -> _Rows:
    """Return the rows of the file that can be predicted, or the test rows."""
    trained = found.config
    if not trained.data.own_data:
        if given.get("dataset", trained.data.dataset) != trained.data.dataset:
            raise ConfigError(
                f"The model in {config.model} learned from {trained.data.dataset}, a partitioned "
                "data set, and predicts its test rows. Leave dataset out. New rows need dataset = "
                "'files:PATH' from training on."
            )
        parties = len(found.strategy["holder"]["sizes"])
        labels = with_row_masks(load_labels(trained), trained, parties)
        if labels.about(mechanism_of(trained).hides_labels) != found.about_labels:
            raise ConfigError(
                f"{trained.data.dataset} has changed since the model was trained. Restore its data."
            )
        labels = labels.tested
        own = np.zeros((len(labels.test), 0), np.float32)
        ids = np.arange(len(own))
        present = labels.present[1].copy() if labels.present else None
        return _Rows(ids, labels.alignment, own, ids, labels.test, present)
    if not config.data.own_data:
        raise ConfigError(
            f"The model in {config.model} learned from files. Name the file of the new rows by "
            "dataset='files:PATH'."
        )
    words = trained.with_values({name: given[name] for name in _OF_FILE if name in given})
    file = own_table(words.data)
    preparation = found.about_labels["preparation"]
    if there and words.data.align == "psi":  # every row of the file gets a prediction
        words = words.with_values({"align": "any"})
    there = there if words.data.align == "any" else None
    common = aligned(transport, words, file, run, there)
    nodes = common.nodes if there else None
    rows = common.rows
    own = np.zeros((len(rows), 0), np.float32)
    if preparation:
        own = np.asarray(prepared(file, rows, Preparation(**preparation)))
    said = file.labels_with_gaps(rows) if file.has_labels else None
    by_file = np.argsort(rows)
    of_rows = _Rows(file.id_values(rows), common.name, own, by_file, said, common.present, nodes)
    return replace(of_rows, called=file.id) if file.has_ids else of_rows


_OF_FILE = ("dataset", "id", "label", "columns", "missing", "text", "align", "party-timeout")


def _count_uploads(config: RunConfig, found: Checkpoint) -> float | None:
    """Count this prediction's uploads, and return the epsilon of perturbed embeddings.

    Count the uploads before they happen, in a file beside the run. Assume that they are uploads of
    the rows that were uploaded most.
    """
    mechanism = mechanism_of(found.config)
    if not (mechanism.perturbs_uploads and mechanism.claims):
        return None
    path = Path(config.model).expanduser() / "predictions.journal"
    with locked(path.with_suffix(".lock"), f"Another prediction uses {path}. Try again."):
        journal = Journal(path, found.run.partition("-")[0])
        times = 1 + sum(1 for _ in journal.read())
        journal.write(Event(EVALUATE, 0))
    rows = len(found.arrays["table.rows"])
    return mechanism.epsilon_of_uploads(rows, found.strategy["uploads"] + times)
