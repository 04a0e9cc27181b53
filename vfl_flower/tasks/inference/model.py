"""A trained model at the label holder, and the one way to have parties load theirs."""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import ConfigError, VflError, sent_by
from vfl_flower.config.run_config import RunConfig
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.calibration import check_fitted
from vfl_flower.label_holder.checkpoint import Checkpoint
from vfl_flower.label_holder.consistency import Consistency
from vfl_flower.label_holder.earlier_run import check_states
from vfl_flower.label_holder.held_out import of_group
from vfl_flower.label_holder.scored_rows import ScoredRows
from vfl_flower.models.tops import load_top
from vfl_flower.protocol.aggregation import aggregation_of, check_flags
from vfl_flower.tasks.inference.rows import available_parties, rows_to_predict
from vfl_flower.transport.base import Transport
from vfl_flower.transport.gather import gather, gather_all
from vfl_flower.transport.messages import SMALL, Predicted, PredictOrder, Serving

O = TypeVar("O", bound=PredictOrder)  # noqa: E741
A = TypeVar("A", bound=Predicted | Serving)
P = TypeVar("P", bound=Predicted)


def check_model(config: RunConfig, task: str) -> None:
    """Raise `ConfigError` if the run names no model for a task."""
    if not config.model:
        raise ConfigError(f"There is no model to {task}. Set model to a run's results folder.")


def check_streams(transport: Transport, needs: str) -> None:
    """Raise `ConfigError` without streams; ``needs`` begins the sentence."""
    if transport.medium == "messages":
        raise ConfigError(f"{needs} streams: Flower's messages take seconds. Leave transport out.")


class Predictor:
    """The top model of a run, and the layout of the embeddings that it reads.

    sizes : embedding size of each party.
    columns, width : party -> its columns in `outputs`' blocks, and their number.
    consistency : what flags scores, once `flag` has fitted it.
    """

    consistency: Consistency | None = None

    def __init__(self, found: Checkpoint, own_columns: int) -> None:
        self.found, self.own_columns = found, own_columns
        self.aggregation = aggregation_of(found.config)
        self.sizes: list[int] = found.strategy["holder"]["sizes"]
        self.columns = self.aggregation.columns(dict(enumerate(self.sizes)))
        self.width = max((each.stop for each in self.columns.values()), default=0)
        classes = len(found.about_labels["classes"])
        outputs = 1 if classes in (0, 2) else classes
        monotone = found.strategy["holder"].get("monotone", ((), ()))
        shape = self.sizes, outputs, own_columns, False
        self.top = self.aggregation.build_top(*shape, monotone).eval()
        load_top(found.config, self.top, of_group("top", found.arrays))

    def score(
        self, blocks: Tensor, own: NDArray[np.float32], given: NDArray[np.bool_]
    ) -> ScoredRows:
        """Return rows with their outputs.

        If scores are flagged, a model of any subset leaves out the suspect of a row. It does so
        only if two other participants, who agree, have the row.
        """
        rows = ScoredRows(blocks, own, given, self.outputs(blocks, own, given))
        if self.consistency is None:
            return rows
        suspects = self.consistency.suspects(rows)
        participants = given.sum(1) + (own.shape[1] > 0)
        outvoted = (suspects >= 0) & (participants > 2) & self.aggregation.any_subset
        if (at := np.flatnonzero(outvoted)).size:
            given = given.copy()
            given[at, suspects[at]] = False
            outputs = rows.outputs.clone()
            outputs[at] = self.outputs(blocks[at], own[at], given[at])
            rows = replace(rows, given=given, outputs=outputs)
        return replace(rows, suspects=suspects)

    def flag(self, rate: float) -> None:
        """Flag rows in which a party does not fit; at most this share of honest rows."""
        found = self.found
        check_flags(self.aggregation, rate)
        rows = found.arrays.get("compared.rows")
        if rows is None or not found.finished:
            raise ConfigError(
                f"flag-rate = {rate:g} needs a finished run of this version. Resume the run of the "
                "model, train anew, or leave flag-rate out."
            )
        found.config.with_values({"flag-rate": rate}).assessment.check_flags(len(rows))
        own, masks = np.split(rows, [self.own_columns], axis=1)
        given = masks > 0 if masks.size else np.ones((len(rows), len(self.sizes)), bool)
        blocks = torch.from_numpy(found.arrays["test_table.rows"][: len(rows)])
        honest = ScoredRows(blocks, own, given, self.outputs(blocks, own, given))
        consistency = Consistency(
            self.columns, self.outputs, numbers=not found.about_labels["classes"]
        )
        self.consistency = consistency.fit(honest, rate)

    @torch.no_grad()
    def outputs(
        self, blocks: Tensor, own: NDArray[np.float32], present: NDArray[np.bool_]
    ) -> Tensor:
        """Return `differentiable` outputs [R, C], without a graph."""
        return self.differentiable(blocks, torch.from_numpy(own), present)

    def differentiable(self, blocks: Tensor, own: Tensor, present: NDArray[np.bool_]) -> Tensor:
        """Return the outputs [R, C] of rows; a row that no participant knows gets the prior.

        blocks : embeddings, float32 [R, width]; zeros where a party lacks a row.
        own, present : the label holder's own columns, [R, F]; whether a party has a row, [R, M].
        """
        h = self.aggregation.rows(blocks, own, torch.from_numpy(present))
        said: Tensor = self.top(h)
        prior: list[float] | None = self.found.strategy["holder"]["prior"]
        nobody = torch.from_numpy(present.sum(1) + own.shape[1] == 0)
        if prior and nobody.any():
            said = torch.where(nobody[:, None], torch.tensor(prior), said)
        return said


class TrainedModel:
    """A model of a run's results folder, and the rows that a task predicts.

    given : the options that were given. Training decides all others.
    there : the parties that a model of any subset can use; None if it needs all.
    """

    def __init__(
        self,
        transport: Transport,
        config: RunConfig,
        given: Mapping[str, Any],
        run: str,
        found: Checkpoint | None = None,
    ) -> None:
        self.transport, self.config, self.run = transport, config, run
        self.found = found = found or checkpoint.load(config.model)
        check_fitted(found)
        transport.parties = found.parties
        self.there = available_parties(config, found)
        self.rows = rows_to_predict(transport, config, given, found, run, self.there)
        self.predictor = Predictor(found, self.rows.own.shape[1])
        rate = given.get("flag-rate", found.config.assessment.flag_rate)
        if rate and found.parties:
            self.predictor.flag(rate)

    def order(self, kind: type[O], **fields: Any) -> O:
        """Return the order to load this model, with fresh keys if sums are masked."""
        found, aggregation = self.found, self.predictor.aggregation
        arrays = aggregation.question(self.transport, self.config.running)
        return kind(run=found.run, number=found.number, arrays=arrays, **fields)

    def ask(self, order: PredictOrder, kind: type[A]) -> dict[int, A]:
        """Have all parties load their models and rows, and check these: node -> answer."""
        if not self.found.parties:  # a distilled model
            return {}
        running, nodes = self.config.running, self.rows.nodes
        if self.there and nodes is not None:
            orders = {node: self._of_party(order, party) for party, node in nodes.items()}
            answers = gather(self.transport, orders, kind, running.party_timeout, lenient=True)
        else:  # every party has every row
            answers = gather_all(
                self.transport, self._of_party(order, 0), kind, running, self.there
            )
        check_states(self.found, answers.values(), whole=self.there is None)
        self.predictor.aggregation.check_agreed(answers.values())
        return answers

    def _of_party(self, order: PredictOrder, party: int) -> PredictOrder:
        """Return the order to a party, which names the rows if not all are wanted."""
        if self.rows.chosen is None:
            return order
        wanted = self.rows.chosen[:, party]
        rows = wanted[wanted >= 0].astype(np.int32)
        return replace(order, arrays={**order.arrays, "rows": rows})

    def embed(
        self, kind_of_order: type[PredictOrder], kind: type[P], **fields: Any
    ) -> tuple[ScoredRows, dict[int, P]]:
        """Ask all parties for embeddings of the rows; return their scores, and node -> answer."""
        rows, sizes = self.rows, self.predictor.sizes
        largest = SMALL + 4 * max(sizes, default=0) * len(rows.ids)
        self.transport.expect({kind_of_order.kind: largest})
        answers = self.ask(self.order(kind_of_order, **fields), kind)
        present = rows.known_by(len(sizes))
        collection = self.predictor.aggregation.collection(len(sizes))
        blocks = torch.zeros(len(rows.ids), self.predictor.width)
        for answer in answers.values():
            party, places = answer.party, torch.from_numpy(present[:, answer.party])
            with sent_by(party):
                if answer.alignment != rows.alignment:
                    raise VflError("embeddings of other rows.")
                block = collection.add(party, answer.arrays, (int(places.sum()), sizes[party]))
            if block is not None:
                blocks[places, self.predictor.columns[party]] = block
        absent = sorted(set(range(len(sizes))) - {answer.party for answer in answers.values()})
        present[:, absent] = False
        return self.predictor.score(blocks, rows.own, present), answers

    @property
    def about(self) -> str:
        """Return the configuration of the model's run, in JSON."""
        return json.dumps(self.found.config.values())
