"""Attack reasons for scores in the privacy audit: from gradients at a party, and from names.

Party 0 gets gradients of each explained score. They depend on the top model, and on the other
parties' embeddings of the person. The label holder gets the columns that count most, if the party's
rule is ``reasons='names'``.
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import roc_auc_score

from vfl_attacks.clients import Ids, Rows
from vfl_attacks.features import explained, reconstruct, split
from vfl_attacks.labels import Finding
from vfl_flower import client_app
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_features
from vfl_flower.launch.engines import predict_local
from vfl_flower.tasks.inference import predict
from vfl_flower.tasks.inference.party.model import current
from vfl_flower.tasks.inference.party.scoring import Served
from vfl_flower.transport.explain_messages import GivenReasons, ReasonsOrder
from vfl_flower.transport.node import index_and_parties
from vfl_flower.transport.wire import read_order, read_reply

_PEOPLE = 400  # most scores that are explained


class Tap(ClientApp):
    """Reads the orders for reasons of party 0, as it does, and its answers, for each person."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[Rows] = []  # sent to the party
        self.own: list[Rows] = []  # its embedding
        self.told: list[Rows] = []  # rank and effect of each column

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the reply of the parties' ClientApp, after reading both."""
        reply: Message = client_app.app(message, context)
        if message.metadata.message_type != ReasonsOrder.kind or index_and_parties(context)[0]:
            return reply
        order, answer = read_order(message, ReasonsOrder), read_reply(reply, GivenReasons).arrays
        served = current(context, Served, "model")
        places = served.at[order.arrays["rows"]].astype(np.int32)
        self.own.append(served.party.learner.embeddings(served.features, places).numpy()[0])
        mean = order.arrays["gradients"].mean(0)
        self.gradients.append(np.append(mean, order.total).astype(np.float32))
        told = np.zeros(served.party.inputs.columns, np.float32)
        ranks = 1 / np.arange(1, 1 + len(answer["columns"]))
        told[answer["columns"]] = ranks * answer["effects"]
        self.told.append(told)
        return reply


def of_reasons(
    config: RunConfig, parties: int, folder: Path, known: int, shown: int
) -> list[Finding]:
    """Attack reasons for the scores of test rows of the run in this folder, from both sides."""
    tap = Tap()
    lines = predict._reasons
    with TemporaryDirectory() as out:
        first = patch.object(predict, "_reasons", lambda *all: islice(lines(*all), _PEOPLE))
        keys = {"model": str(folder), "out": f"{out}/predictions.csv", "explain": True}
        nodes = [{"states": str(folder), "reasons": "names"} for _ in range(parties)]
        try:
            with first:
                predict_local(keys, nodes, client=tap)
        except ConfigError:  # such as noise or masked sums: nothing is explained, or attacked
            return []
        finally:
            for path in folder.glob("party-0-*-reasons.jsonl"):
                path.unlink()
    if not tap.own:
        return []
    own, gradients, told = map(np.stack, (tap.own, tap.gradients, tap.told))
    rows, generator = len(own), np.random.default_rng([config.training.seed, 9])
    mine, theirs = (_columns(config, party, parties, rows) for party in (0, 1))
    few, rest = split(rows, shown, generator)
    y = load_labels(config).tested.test[:rows]
    both = np.hstack([own, gradients])
    found = [
        _decoded(f"other party's columns, {name}", f"party 0: {name}", view, theirs, few, rest)
        for name, view in (("without reasons", own), ("by reasons", both))
    ]
    found.append(
        _decoded("columns, by told reasons", "label holder: names in order", told, mine, few, rest)
    )
    return [*found, *_labels(y, {"without reasons": own, "by reasons": both}, known, generator)]


def _columns(config: RunConfig, party: int, parties: int, rows: int) -> Rows:
    """Return a party's columns of the first test rows, [n, F]."""
    block = load_features(config, party, parties)
    samples: Rows = np.asarray(block.test)[block.tested][:rows]
    return samples.reshape(len(samples), -1)


def _decoded(name: str, who: str, view: Rows, truth: Rows, few: Ids, rest: Ids) -> Finding:
    success = explained(truth[rest], reconstruct(view, few, truth[few])[rest], truth[few].mean(0))
    attacker = f"{who}, features of {len(few)} rows"
    return Finding(name, attacker, "R2", success, 0.0, len(rest))


def _labels(
    y: Any, views: dict[str, Rows], known: int, generator: np.random.Generator
) -> list[Finding]:
    """Infer whether a label is of the second class, from known rows of each class."""
    classes = [generator.permutation(np.flatnonzero(y == n)) for n in np.unique(y)]
    if min(map(len, classes)) <= known or len(classes) < 2:
        return []
    few, rest = (
        np.concatenate([each[part] for each in classes])
        for part in (slice(known), slice(known, None))
    )
    found = []
    for name, view in views.items():
        scaled = (view - view.mean(0)) / (view.std(0) + 1e-9)
        model = LogisticRegression(C=0.1).fit(scaled[few], y[few] == 1)
        success = float(roc_auc_score(y[rest] == 1, model.decision_function(scaled[rest])))
        attacker = f"party 0: {name}, {known} labels a class"
        found.append(Finding(f"labels, {name}", attacker, "AUC", success, 0.5, len(rest)))
    return found
