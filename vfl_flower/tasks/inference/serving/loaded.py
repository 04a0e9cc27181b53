"""One version of a model in service."""

from collections.abc import Mapping
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.withdrawn import place, read, version
from vfl_flower.label_holder import checkpoint
from vfl_flower.tasks.drift.label_holder import DriftWatch
from vfl_flower.tasks.inference.contribution_to_score import Explainer
from vfl_flower.tasks.inference.model import Predictor, TrainedModel
from vfl_flower.tasks.inference.releases import Releases
from vfl_flower.tasks.inference.serving.embeddings import Embeddings
from vfl_flower.tasks.inference.serving.metrics import Metrics
from vfl_flower.tasks.inference.serving.parties import Parties
from vfl_flower.tasks.inference.serving.people import People, Person, who
from vfl_flower.tasks.inference.serving.requests import Ids
from vfl_flower.transport.base import Transport


class Loaded(TrainedModel):
    """One version of the model: its rows, its top model, and the parties that have loaded it."""

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
        self.withdrawn = read(place())
        self.files = self._versions()  # before they are read
        super().__init__(transport, config, given, run, found)
        of_explainer = Predictor(found, self.rows.own.shape[1])  # its thread may share no module
        self.explainer = Explainer(of_explainer, self.rows.own.shape[1])
        self.any_subset = self.predictor.aggregation.any_subset
        self.parties = Parties(self, metrics)
        self.parties.begin()
        if self.predictor.consistency is not None:
            for party in range(len(self.predictor.sizes)):  # else a first event is no increase
                metrics.inconsistent.labels(str(party))
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
        table, self._unaligned = self.rows.table, frozenset[str]()
        if table is not None and self.rows.places is not None:
            others = np.setdiff1d(np.arange(len(table.ids)), self.rows.places)
            self._unaligned = frozenset(map(str, table.id_values(others).tolist()))
        seeker, self.people = self.parties.seeker, None
        if seeker and seeker.by_text and table is not None:
            preparation = found.about_labels["preparation"]
            self.people = People(table, seeker.by_text, preparation)

    def rows_of(self, ids: Ids) -> NDArray[np.int64]:
        """Return the position of each id, or -1 for an id that is not known."""
        names = ("\0" if isinstance(one, Person) else str(one) for one in ids)
        return np.fromiter(map(self._row_of.get, names, repeat(-1)), np.int64, len(ids))

    def unknown(self, ids: Ids) -> frozenset[int | str | Person]:
        """Return the people who are not known, and about whom the parties may be asked."""
        out = self.withdrawn.have_ids([who(one) for one in ids])
        return frozenset(ids[at] for at in np.flatnonzero((self.rows_of(ids) < 0) & ~out).tolist())

    def lacks(self, one: int | str | Person) -> bool:
        """Return whether the label holder's file has no such id."""
        return str(one) not in self._unaligned

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
        return [*versions, version(place()) or -1]  # a list that is not there stays so
