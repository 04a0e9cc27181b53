"""One version of a model in service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vfl_flower.config.run_config import RunConfig
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.drift import DriftWatch
from vfl_flower.tasks.inference.contribution_to_score import Explainer
from vfl_flower.tasks.inference.model import Predictor, TrainedModel
from vfl_flower.tasks.inference.releases import Releases
from vfl_flower.tasks.inference.serving.embeddings import Embeddings
from vfl_flower.tasks.inference.serving.metrics import Metrics
from vfl_flower.tasks.inference.serving.parties import Parties
from vfl_flower.transport.base import Transport


class Loaded(TrainedModel):
    """One version of the model: its rows, its top model, and the parties that have loaded it.

    The parameters are as of `TrainedModel`.
    """

    def __init__(
        self,
        transport: Transport,
        config: RunConfig,
        given: Mapping[str, Any],
        run: str,
        metrics: Metrics,
    ) -> None:
        found = checkpoint.load(config.model)
        kind, _, path = given.get("dataset", found.config.data.dataset).partition(":")
        self._paths = [Path(config.model) / checkpoint.FILE, *([Path(path)] * (kind == "files"))]
        self.files = self._versions()  # before they are read
        super().__init__(transport, config, given, run, found)
        of_explainer = Predictor(found, self.rows.own.shape[1])  # its thread may share no module
        self.explainer = Explainer(of_explainer, self.rows.own.shape[1])
        self.any_subset = self.predictor.aggregation.any_subset
        self.parties = Parties(self, metrics)
        self.parties.begin()
        nobody = torch.zeros(1, self.predictor.width), self.rows.own[:1]
        if len(self.rows.ids):  # the first request must not wait for torch to begin
            self.predictor.outputs(*nobody, np.zeros((1, len(self.predictor.sizes)), bool))
        self.drift = DriftWatch(found, self.predictor.columns)
        self.embeddings = Embeddings(self.parties, self.predictor, self.rows, self.drift)
        self.releases = Releases(config, found, len(self.rows.ids))
        self.name = f"{found.run}/{found.number}"
        ids = self.rows.ids.tolist()
        self.parties.joined = self.embeddings.number
        self.parties.look_for_others()
        self._row_of = {str(one): row for row, one in enumerate(ids)}  # 7 and "7" are one

    def rows_of(self, ids: Sequence[int | str]) -> NDArray[np.int64]:
        """Return the position of each id, or -1 for an id that is not known."""
        rows = map(self._row_of.get, map(str, ids), repeat(-1))
        return np.fromiter(rows, np.int64, len(ids))

    def unknown(self, ids: Sequence[int | str]) -> frozenset[int | str]:
        """Return the ids that are not known."""
        return frozenset(ids[at] for at in np.flatnonzero(self.rows_of(ids) < 0).tolist())

    @property
    def is_outdated(self) -> bool:
        """Return whether the checkpoint or the label holder's file has changed since."""
        now = self._versions()
        return now != self.files and 0 not in now

    def is_known(self) -> None:
        """Do not load the present files again."""
        self.files = self._versions()

    def _versions(self) -> list[int]:
        """Return when the files were last written; 0 for a file that is not there."""
        versions = []
        for path in self._paths:
            try:
                versions.append(path.expanduser().stat().st_mtime_ns)
            except OSError:
                versions.append(0)
        return versions
