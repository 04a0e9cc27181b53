"""One run of a row, and exact figures of its training rows: all models are in one process.

A label holder alone knows old embeddings of training rows, as they were last sent, and no party's
gradient. This callback takes both anew from the parties' models, without noise and codecs.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import common
from benchmarks.papers.rows import History, Run
from strategies.vertical import Vertical
from vfl_flower.config.errors import DivergedError, PartyError
from vfl_flower.data import samples
from vfl_flower.label_holder.callbacks import Callback
from vfl_flower.models.training import trained
from vfl_flower.party import session

_AT_ONCE = 4096  # rows


class Training(Callback):
    """Adds ``train_accuracy`` to each entry, and with ``gradient`` also ``gradient_norm``.

    The latter is the squared norm of the gradient of the mean loss over all training rows, with
    respect to the parameters of all parties and of the top model.
    """

    def __init__(self, strategy: Vertical, gradient: bool) -> None:
        self.strategy = strategy  # the strategy that makes the entries
        self.gradient = gradient

    def evaluated(self, entry: dict[str, Any]) -> None:
        """Evaluate the training rows, too."""
        holder, parties = self.strategy.run.holder, len(self.strategy.run.records)
        of_parties = [session.live[party, parties].party for party in range(parties)]
        models = [party.learner.model for party in of_parties]
        parameters = [p for each in (*models, holder.top) for p in trained(each).values()]
        total = [torch.zeros_like(p) for p in parameters]
        hits, rows = 0, len(holder.labels)
        for start in range(0, rows, _AT_ONCE):
            part = slice(start, min(rows, start + _AT_ONCE))
            with torch.set_grad_enabled(self.gradient):
                x = [
                    samples.tensors(each.inputs.block.train[part], each.learner.device)
                    for each in of_parties
                ]
                h = [model(of_party) for model, of_party in zip(models, x, strict=True)]
                outputs: Tensor = holder.top(torch.cat(h, dim=1))
                labels = holder.labels[part]
                loss = holder.loss.per_row(outputs, labels).sum() / rows
            binary = outputs.shape[1] == 1
            said = (outputs[:, 0] > 0).long() if binary else outputs.argmax(1)
            hits += int((said == labels).sum())
            if self.gradient:
                found = torch.autograd.grad(loss, parameters, materialize_grads=True)
                for sum_of, each in zip(total, found, strict=True):
                    sum_of += each
        entry["train_accuracy"] = hits / rows
        if self.gradient:
            entry["gradient_norm"] = float(sum(each.square().sum() for each in total))


def history_of(parties: int, keys: Mapping[str, Any], training: str, run: Run | None) -> History:
    """The entries of a run, with the number of its parties; none if it diverges."""
    torch.set_num_threads(1)  # several runs at a time use the cores better
    try:
        if run:
            return run(parties, keys)
        if training:
            callback = partial(Training, gradient=training == "gradient")
            strategy, _, _ = common.trained(parties, keys, callback)
            entries = strategy.history.entries
        else:
            _, entries = common.quiet_run(parties, keys)
    except (PartyError, DivergedError) as error:
        print(f"{keys['strategy']}: {error}", file=sys.stderr)
        return []
    return [{**entry, "parties": parties} for entry in entries]
