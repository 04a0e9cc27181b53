"""What a trained model says of new rows.

Parties embed the rows with the bottom models that they have kept; the label holder evaluates its
top model on them, and writes a prediction for each id. With files the rows are those of the label
holder's file that all parties have too, or of a model of any subset all of them, by whoever is
there; else the test rows of the data set.
"""

from __future__ import annotations

import json
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
from vfl_flower.config.files import locked, make_folder, told, whole, write_whole
from vfl_flower.config.plugins import LOSSES, METRICS
from vfl_flower.config.provenance import code_digest
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels, own_table, with_row_masks
from vfl_flower.data.at_party import prepared
from vfl_flower.data.source import Preparation
from vfl_flower.data.tables import is_missing
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.checkpoint import Checkpoint, check_states
from vfl_flower.label_holder.held_out import of_group
from vfl_flower.label_holder.metrics import Metrics, metrics
from vfl_flower.models.tops import load_top
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.privacy.embeddings import epsilon as epsilon_of_uploads
from vfl_flower.protocol.privacy.journal import Journal
from vfl_flower.protocol.privacy.ledger import EVALUATE, hides_labels, ledger_of
from vfl_flower.transport.base import AvailableParties, Transport, ask, ask_all, ask_present
from vfl_flower.transport.messages import SMALL, Predicted, PredictOrder

notice = logging.getLogger("flwr.notice")  # which `vfl predict` shows too

Array = NDArray[Any]


def predictions_file(config: RunConfig) -> Path:
    """The file that predictions go to: ``out``, or predictions.csv in the folder of the run.

    Raises
    ------
    ConfigError
        If it is neither .csv nor .parquet, or is there already.
    """
    path = (
        Path(config.running.out or Path(config.model) / "predictions.csv").expanduser().absolute()
    )
    if path.suffix not in (".csv", ".parquet"):
        raise ConfigError(
            f"out = {config.running.out!r} must be a file that ends in .csv or .parquet."
        )
    for each in (path, path.with_suffix(".json")):
        if each.exists():
            raise ConfigError(f"{each} is there already: name another file, or move it away.")
    return path


@torch.no_grad()
def predict(transport: Transport, config: RunConfig, given: Mapping[str, Any], run: str) -> None:
    """Write predictions by id, and beside them in JSON how they do, where there are labels.

    Columns are that of the ids, by its name in the label holder's file (``id`` where rows have none
    of their own), ``prediction``, and for classes ``probability_CLASS``; of a model of any
    subset also ``parties``, those used, such as ``0+2`` or ``none``. Under regression a prediction
    is in units of the labels. Rows are in the order of the label holder's file.

    Parameters
    ----------
    given : the keys that were given, and their values: for all others those of training hold.
    run : number of this Flower run.

    Raises
    ------
    ConfigError, PartyError
        If the run's checkpoint, a party's or a file does not fit; nothing is written then.
    """
    if not config.model:
        raise ConfigError("There is no model to predict by: name a run's results folder by model.")
    predictions_file(config)  # before anybody is asked
    found = checkpoint.load(config.model)
    there = who_is_there(config, found)
    rows = _rows(transport, config, given, found, run, there)
    epsilon = _count_uploads(config, found)
    classes = found.about_labels["classes"]
    outputs = 1 if len(classes) in (0, 2) else len(classes)
    sizes: list[int] = found.strategy["holder"]["sizes"]
    transport.expect({PredictOrder.kind: SMALL + 4 * max(sizes, default=0) * len(rows.ids)})
    order = PredictOrder(run=found.run, number=found.number)
    aggregation = aggregation_of(found.config)
    order = replace(order, arrays=aggregation.question(transport, config.running))
    if there is None:
        answers = ask_all(transport, order, Predicted, config.running)
    elif rows.nodes is not None:
        orders = dict.fromkeys(rows.nodes.values(), order)
        answers = ask(transport, orders, Predicted, config.running.party_timeout, lenient=True)
    else:
        answers = ask_present(transport, order, Predicted, config.running, there)
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
                raise VflError("embeddings of other rows, or by another version of the code.")
            block = collection.add(party, answer.arrays, (int(places.sum()), sizes[party]))
        except SumError:
            raise
        except VflError as error:
            raise PartyError(f"Party {party}", f"sent {error}") from None
        if block is not None:
            blocks[places, columns[party]] = block
    absent = sorted(set(range(len(sizes))) - {answer.party for answer in answers.values()})
    present[:, absent] = False
    top = aggregation.build_top(sizes, outputs, rows.own.shape[1]).eval()
    load_top(found.config, top, of_group("top", found.arrays))
    own = torch.from_numpy(rows.own)
    said = top(aggregation.rows(blocks, own, torch.from_numpy(present)))
    known = present.sum(1) + rows.own.shape[1] > 0
    if not known.all():
        said = _with_prior(said, known, found)
    reached = _metrics(said, rows.labels, known, found) if rows.labels is not None else None
    figures = {
        "model": str(config.model),
        "rows": len(rows.ids),
        "unknown_rows": int((~known).sum()),
    }
    figures |= {"epsilon": epsilon} if epsilon is not None else {}
    figures |= reached.figures() if reached else {}
    table = _table(rows, said, found)
    if there is not None:
        used = ("+".join(map(str, np.flatnonzero(row))) for row in present)
        table["parties"] = [each or "none" for each in used]
    _write(config, table.iloc[rows.order], figures)
    spent = "" if epsilon is None else f"; epsilon of the run and its predictions {epsilon:.3g}"
    notice.info("%d predictions%s%s", len(rows.ids), _in_words(reached), spent)


def who_is_there(config: RunConfig, found: Checkpoint) -> AvailableParties | None:
    """By whom a model of any subset predicts, by the key `without`; none of other models.

    Raises
    ------
    ConfigError
        If these are not numbers of parties of that run, or the model needs all parties.
    """
    parties = len(found.strategy["holder"]["sizes"])
    words = config.without.replace(",", " ").split()
    if not aggregation_of(found.config).any_subset:
        asked = "without" if words else "align = 'any'" if config.data.align == "any" else ""
        if asked:
            raise ConfigError(
                f"The model in {config.model} needs all its parties: leave {asked} out, or train "
                "one that predicts by any subset, with subsets = 'sampled'."
            )
        return None
    if words and config.data.align == "ids":
        raise ConfigError(
            "align = 'ids' is for rows that all parties have: set align = 'psi' to leave some out."
        )
    if not all(word.isdecimal() and int(word) < parties for word in words):
        raise ConfigError(
            f"without = {config.without!r} must be numbers of parties, from 0 to {parties - 1}, "
            "with commas between them."
        )
    return AvailableParties(parties, frozenset(int(word) for word in words))


def _with_prior(said: Tensor, known: NDArray[np.bool_], found: Checkpoint) -> Tensor:
    """Return outputs, where unknown rows have those that follow from the training labels alone."""
    nobody = torch.from_numpy(~known)
    prior: list[float] | None = found.strategy["holder"]["prior"]
    what = "what the top model says of no embedding"
    if prior:
        said = torch.where(nobody[:, None], torch.tensor(prior), said)
        what = "the shares of the classes in training, or the mean"
    notice.info(
        "No party has %d of the rows: they get %s, and are in no figure.", int(nobody.sum()), what
    )
    return said


@dataclass(frozen=True)
class _Rows:
    """What the label holder has of the rows to predict.

    ``called`` is the column of ``ids``. ``own`` are its own columns, float32 [N, F]; ``order`` puts
    rows into that of its file. ``present`` says who has which, [N, M], if any may lack some;
    ``nodes`` who was told of them.
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
    """The rows that all have; or the test rows, as the model was trained beside."""
    trained = found.config
    if not trained.data.own_data:
        if given.get("dataset", trained.data.dataset) != trained.data.dataset:
            raise ConfigError(
                f"The model in {config.model} is of {trained.data.dataset}, which was divided, and "
                "predicts its test rows: leave dataset out. New rows need dataset = 'files:PATH' "
                "from training on."
            )
        parties = len(found.strategy["holder"]["sizes"])
        labels = with_row_masks(load_labels(trained), trained, parties)
        if labels.about(hides_labels(trained)) != found.about_labels:
            raise ConfigError(f"{trained.data.dataset} has changed since the model was trained.")
        labels = labels.tested
        own = np.zeros((len(labels.test), 0), np.float32)
        ids = np.arange(len(own))
        present = labels.present[1].copy() if labels.present else None
        return _Rows(ids, labels.alignment, own, ids, labels.test, present)
    if not config.data.own_data:
        raise ConfigError(
            f"The model in {config.model} is of files: name that of the new rows by "
            "dataset='files:PATH'."
        )
    words = trained.with_values({name: given[name] for name in _OF_FILE if name in given})
    file = own_table(words.data)
    preparation = found.about_labels["preparation"]
    if there and words.data.align == "psi":  # everyone is to have a line
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
    """Epsilon of perturbed embeddings, with the uploads that are about to be asked for.

    They are counted beside the run first, as if the rows were those that it uploaded most.
    """
    trained = found.config
    if ledger_of(trained).noise_on != "embeddings" or trained.privacy.noise_seed >= 0:
        return None
    path = Path(config.model).expanduser() / "predictions.journal"
    with locked(path.with_suffix(".lock"), f"Another prediction is counted in {path}: try again."):
        journal = Journal(path, found.run.partition("-")[0])
        times = 1 + sum(1 for _ in journal.read())
        journal.write((EVALUATE, 0, 0, 0, 0), np.zeros(0, np.int32))
    rows = len(found.arrays["table.rows"])
    return epsilon_of_uploads(trained, rows, found.strategy["uploads"] + times)


def _table(rows: _Rows, outputs: Tensor, found: Checkpoint) -> Any:
    """The data frame to write."""
    import pandas as pd

    predicted = _predicted(outputs, found)
    called = "id" if rows.called in (*predicted, "parties") else rows.called
    return pd.DataFrame({called: rows.ids, **predicted})


def _predicted(outputs: Tensor, found: Checkpoint) -> dict[str, Any]:
    """The columns to write, by name: what is predicted, and of classes how probable each is."""
    about, classes = found.about_labels, found.about_labels["classes"]
    if not classes:
        numbers = about["mean"] + about["deviation"] * outputs[:, 0].double()
        return {"prediction": numbers.numpy()}
    if outputs.shape[1] == 1:
        of_second = outputs[:, 0].double().sigmoid()
        chances = torch.stack([1 - of_second, of_second], dim=1)
    else:
        chances = outputs.double().softmax(1)
    predicted = np.array(classes)[chances.argmax(1).numpy()]
    of_classes = {f"probability_{name}": chances[:, n] for n, name in enumerate(classes)}
    return {"prediction": predicted, **of_classes}


def _metrics(
    outputs: Tensor, labels: Array, known: NDArray[np.bool_], found: Checkpoint
) -> Metrics | None:
    """Return how the outputs do on the rows that are ``known`` to somebody and have labels.

    Labels are as in the file, or as `load_labels` has them.
    """
    about, classes = found.about_labels, found.about_labels["classes"]
    if found.config.data.own_data:
        known = known & ~is_missing(labels)
    if not known.any():
        return None
    outputs, labels = outputs[torch.from_numpy(known)], labels[known]
    if found.config.data.own_data:
        labels = _encoded(labels, classes) if classes else _standardised(labels, about)
    models = found.config.models
    own = None if models.loss in LOSSES.known else LOSSES.load(models.loss)
    given = outputs, torch.from_numpy(labels), about["deviation"]
    return metrics(*given, own, METRICS.load(models.metrics))


def _encoded(labels: Array, classes: list[Any]) -> NDArray[np.int64]:
    numbers = {name: number for number, name in enumerate(classes)}
    said = [_like(classes[0], label) for label in labels.tolist()]
    unknown = set(said) - numbers.keys()
    if unknown:
        raise ConfigError(
            f"The labels of the new rows have {len(unknown)} values that the model has never "
            "seen: correct them, or leave that column out."
        )
    return np.array([numbers[each] for each in said], np.int64)


def _like(known: Any, label: Any) -> Any:
    """A label as one of the classes would be: in a column with gaps, numbers come otherwise."""
    if isinstance(known, str):
        return str(label)
    words = {"True": True, "False": False} if isinstance(known, bool) else {}
    try:
        return words[str(label)] if str(label) in words else float(label)
    except ValueError:
        return str(label)


def _standardised(labels: Array, about: dict[str, Any]) -> NDArray[np.float32]:
    try:
        numbers = labels.astype(np.float64)
    except ValueError:
        raise ConfigError(
            "The labels of the new rows are not numbers: correct them, or leave that column out."
        ) from None
    standardised: NDArray[np.float32] = (numbers - about["mean"]) / about["deviation"]
    return standardised.astype(np.float32)


def _in_words(reached: Metrics | None) -> str:
    names = {"accuracy": "accuracy", "auc": "AUC", "loss": "loss", "rmse": "RMSE", "r2": "R2"}
    values = reached.figures() if reached else {}
    said = [f"{names[key]} {values[key]:.4f}" for key in names if values.get(key) is not None]
    return f": {', '.join(said)}" if said else ""


def _write(config: RunConfig, frame: Any, figures: dict[str, Any]) -> None:
    path = predictions_file(config)
    of_figures, lock = path.with_suffix(".json"), path.with_name(f"{path.name}.lock")
    with told(path):
        make_folder(path.parent)
    with locked(lock, f"Others write {path} just now: name another file."), told(path):
        predictions_file(config)  # which others may have written by now
        write_whole(of_figures, (json.dumps(figures, indent=2) + "\n").encode())
        try:
            with whole(path) as file:
                (frame.to_csv if path.suffix == ".csv" else frame.to_parquet)(file, index=False)
        except BaseException:
            of_figures.unlink()
            raise
