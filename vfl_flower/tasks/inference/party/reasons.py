"""A party's reasons for one score: its contribution, split among its columns.

`vfl_flower.tasks.inference.reasons` has the definition, and the label holder's half. The party
computes from its own rows, and keeps all parts with the names of columns in its own file.
"""

import json
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config import files
from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.logs import log
from vfl_flower.config.node_rules import Rules
from vfl_flower.data.at_party import prepared
from vfl_flower.data.on_disk import SequenceColumn
from vfl_flower.data.split import background_rows
from vfl_flower.models.column_change import ColumnChange
from vfl_flower.party.refusals import check_task
from vfl_flower.tasks.inference.parts import References, on_paths
from vfl_flower.tasks.inference.party.features import features_of
from vfl_flower.tasks.inference.party.model import LoadedModel
from vfl_flower.transport.explain_messages import GivenReasons, ReasonsOrder
from vfl_flower.transport.messages import LARGEST, Arrays, checked
from vfl_flower.transport.node import states_folder

_TOLD = 4
"""Most columns that a party tells: as many reasons as a letter usually has."""
_AT_ONCE = 256  # rows whose columns a first layer reads at once


class Reasons:
    """The reference rows of a party, and its columns in a random order that only it knows."""

    def __init__(self, model: LoadedModel) -> None:
        party, self._index, self._folder = model.party, model.index, states_folder(model.context)
        check_task(model.context, "explain")
        if party.seal or party.learner.mechanism.perturbs_uploads:
            raise ConfigError(
                f"Party {model.index} gives no reasons with masked sums or noise on embeddings: "
                "gradients would show what they hide. Leave them out of the request."
            )
        lstm = party.config.models.bottom == "lstm"
        sequences = isinstance(model.source, SequenceColumn) or lstm
        about = model.index, party.inputs.sample, model.block.preparation, sequences
        self._features = features_of(*about)
        self._numbers = np.argsort([secrets.randbits(128) for _ in self._features])
        self._learner, self._rules = party.learner, Rules.of(model.context.node_config)
        columns = [each.index for each in self._features]
        self._model: Callable[[Tensor], Tensor] = party.learner.model
        rows, self._at = _background(model)
        self._references = References(rows, columns)
        if ColumnChange.fits(party.learner.model):
            change, count = ColumnChange(party.learner.model), len(columns)
            sizes = [index[-1].stop - index[-1].start for index in columns]
            owner = self._tensor(np.arange(count).repeat(sizes))
            read = lambda x: change.parts(self._tensor(x), owner, count).cpu().numpy()  # noqa: E731
            self._model, self._references = change.rest, _FirstLayer(rows, read)
        self._latest: tuple[bytes, Any] = b"", None  # places of rows, and these rows as read

    def give(self, order: ReasonsOrder, sample: Any, person: list[str]) -> GivenReasons:
        """Keep the reasons of a sample [1, ...], with its person; return what is permitted."""
        parts, errors = self.parts(order, np.asarray(sample))
        largest = np.argsort(-np.abs(parts), kind="stable")
        line = {
            "request": order.request,
            "person": person,
            "columns": [
                {
                    "column": self._features[at].name,
                    "number": int(self._numbers[at]),
                    "part": float(parts[at]),
                    "error": float(errors[at]),
                }
                for at in largest.tolist()
            ],
        }
        file_of = f"party-{self._index}-{{}}-reasons.jsonl".format
        path = self._folder / file_of(f"{datetime.now(UTC):%Y-%m-%d}")
        if (days := self._rules.retention_days) and not path.exists():
            files.remove_older(self._folder, file_of("*"), days)
        try:
            with files.opened_to_append(path) as file, files.told(path):
                files.write_all(file.fileno(), json.dumps(line).encode() + b"\n")
        except VflError as error:
            log.warning("%s", error)
            raise VflError("cannot write its reasons: its own log says why.") from None
        if self._rules.reasons == "none":
            return GivenReasons()
        told = largest[:_TOLD][parts[largest[:_TOLD]] != 0]
        arrays: Arrays = {
            "columns": self._numbers[told].astype(np.int32),
            "effects": np.sign(parts[told]).astype(np.int32),
        }
        if self._rules.reasons == "names":
            text = "\n".join(self._features[at].name.replace("\n", " ") for at in told.tolist())
            arrays["names"] = np.frombuffer(text.encode(), np.uint8)
        return GivenReasons(arrays=arrays)

    def parts(
        self, order: ReasonsOrder, sample: NDArray[np.float32]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return the part of each column and its standard error, [F] each."""
        given = order.arrays.get("background", np.zeros(0, np.int32))
        shown = checked({"background": given}, "background", "int32", (given.size,))
        known = not len(shown) or 0 <= shown.min() <= shown.max() < len(self._at)
        if not known or not (self._at[shown] >= 0).any():  # or all of them have withdrawn
            raise VflError("was asked to compare with rows that it does not have.")
        size = len(shown), self._learner.size
        slopes = checked(order.arrays, "gradients", "float32", size, LARGEST)
        at = self._at[shown]
        slopes, at = slopes[at >= 0], at[at >= 0]
        _, alphas = on_paths(len(at))
        if self._latest[0] != at.tobytes():  # requests share their rows
            self._latest = at.tobytes(), self._references.read(self._references.rows[at])
        (x, here), (rows, there) = self._references.read(sample), self._latest[1]
        points = there + alphas.reshape(-1, *[1] * (there.ndim - 1)) * (here - there)
        inputs = self._tensor(points).requires_grad_()
        with torch.enable_grad():
            score = (self._model(inputs) * self._tensor(slopes)).sum()
        (found,) = torch.autograd.grad(score, inputs)
        return self._references.split(x, rows, found.cpu().numpy(), order.total)

    def _tensor(self, rows: Any) -> Tensor:
        return torch.from_numpy(np.require(rows, None, "W")).to(self._learner.device)


class _FirstLayer(References):
    """Reference rows of a `tabular` model, as what each column adds to its first layer, [F, U].

    Paths are straight there too. So a request needs no product with the first layer's weights.
    """

    def __init__(self, rows: Any, read: Callable[[Any], Any]) -> None:
        self.rows, self._parts = rows, read
        pieces = [rows[n : n + _AT_ONCE] for n in range(0, len(rows), _AT_ONCE)]
        self.mean = sum(read(piece).sum(0) for piece in pieces) / len(rows)

    def read(self, rows: Any) -> tuple[Any, Any]:
        parts = self._parts(rows)
        return parts, parts.sum(1)

    def products(self, rows: Any, slopes: Any) -> Any:
        return slopes @ rows[0].T if len(rows) == 1 else (rows @ slopes[..., None])[..., 0]


def _background(model: LoadedModel) -> tuple[Any, NDArray[np.int64]]:
    """Return the samples of the reference rows that the party has, and where each is, or -1."""
    source, block = model.source, model.block
    if source is None:
        masks = block.row_masks
        mask = masks[1].mask if masks else np.ones(len(block.test), bool)
        places = np.where(mask, np.cumsum(mask) - 1, -1)[background_rows(len(mask))]
    else:
        here = source.names(np.arange(len(source.ids)))
        where = dict(zip(here.tolist(), range(len(here)), strict=True))
        places = np.array([where.get(name, -1) for name in model.background.tolist()], np.int64)
    there, found = places >= 0, places[places >= 0]
    if not there.any():
        raise ConfigError(
            f"Party {model.index} has none of the rows that reasons compare a person with. "
            "Restore its rows of training, or train the model again."
        )
    at = np.where(there, np.cumsum(there) - 1, -1)
    if source is None:
        return block.test[found], at
    assert block.preparation is not None
    return prepared(source, found, block.preparation)[:], at
