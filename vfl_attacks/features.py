"""Attack features in the privacy audit: recover rows from embeddings, and from reports of drift."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from vfl_attacks.clients import Ids, Rows
from vfl_attacks.labels import Finding
from vfl_flower.config.files import whole
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.bins import Bins
from vfl_flower.data.drift import HIDING, LARGE, LEAST, MODERATE, Drift, drift_of
from vfl_flower.models.bottom_model import BottomModel

_IMAGES = 10  # in the picture
_STARTS = 4  # starting points of each inversion
_TARGETS = 200  # rows to attack
_REPORTS = 30  # on each row, such as one a day
_TRIES = 300  # groups to look among

Numbers = NDArray[np.float64]
Counts = NDArray[np.int64]


def explained(rows: Rows, found: Rows, mean: Rows) -> float:
    """Return R2 of reconstructed rows [R, ...]: the explained variance about ``mean``."""
    error = np.square(rows - found).sum(dtype=float)
    return float(1 - error / np.square(rows - mean).sum(dtype=float))


# --- by rows whose features are known -----------------------------------------------------------


def reconstruct(embeddings: Rows, known: Ids, features: Rows) -> Rows:
    """Decode embeddings [R, E] to features [R, F], with a decoder for known rows.

    Its weight decay is strong because few rows are known.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPRegressor
    from sklearn.preprocessing import StandardScaler

    scaled = StandardScaler().fit_transform(embeddings)
    decoder = MLPRegressor(hidden_layer_sizes=(256,), alpha=10, max_iter=300, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        decoder.fit(scaled[known], features if features.shape[1] > 1 else features[:, 0])
    return decoder.predict(scaled).reshape(len(embeddings), -1)


def split(rows: int, shown: int, generator: np.random.Generator) -> list[Ids]:
    """Return the rows that an attacker knows, at most a tenth of all, and the others."""
    return np.split(generator.permutation(rows), [max(2, min(shown, rows // 10))])


def decode(
    config: RunConfig,
    block: Rows,
    embeddings: Rows,
    shown: int,
    generator: np.random.Generator,
    picture: Path | None = None,
) -> tuple[float, int, int]:
    """Reconstruct unknown rows, and draw images; return R2, and numbers of known and other rows."""
    features = block.reshape(len(block), -1)
    known, others = split(len(block), shown, generator)
    decoded = reconstruct(embeddings, known, features[known])
    if picture and block.ndim > 2 and config.models.bottom != "lstm":
        few = others[:_IMAGES]
        draw_images(block[few], decoded.reshape(block.shape)[few], picture)
    success = explained(features[others], decoded[others], features[known].mean(0))
    return success, len(known), len(others)


def draw_images(originals: Rows, decoded: Rows, path: Path) -> None:
    """Draw images [n, H, W] or [n, H, W, colours], each above its reconstruction."""
    from matplotlib.figure import Figure

    low, high = originals.min(), originals.max()
    figure = Figure(figsize=(0.9 * len(originals), 2.2), layout="constrained")
    axes = figure.subplots(2, len(originals), squeeze=False)
    for row, (title, images) in enumerate((("original", originals), ("decoded", decoded))):
        for column, image in enumerate(images):
            scaled = ((image - low) / max(high - low, 1e-9)).clip(0, 1)
            axes[row, column].imshow(scaled, cmap="gray", vmin=0, vmax=1)
            axes[row, column].set(xticks=[], yticks=[])
        axes[row, 0].set_ylabel(title)
    with whole(path) as file:
        figure.savefig(file, format="png", dpi=120)


# --- by the model -------------------------------------------------------------------------------


def invert(
    model: BottomModel, embeddings: Rows, shape: tuple[int, ...], generator: np.random.Generator
) -> Rows:
    """Return rows [R, *shape] whose embeddings by a model are close to these [R, E].

    L-BFGS starts from zeros and from some random rows, and each row's best end counts. This solves
    a linear model exactly.
    """
    model = model.double().requires_grad_(False)
    target = torch.from_numpy(embeddings).double().repeat(_STARTS, 1)
    x = torch.from_numpy(generator.standard_normal((len(target), *shape)))
    x[: len(embeddings)] = 0
    x.requires_grad_()
    search = torch.optim.LBFGS(
        [x],
        max_iter=200,
        tolerance_grad=1e-12,
        tolerance_change=1e-16,
        line_search_fn="strong_wolfe",
    )

    def loss() -> float:
        total = _misses(model, x, target).sum()
        if total.requires_grad:  # else the model is a table, which has no slope
            (x.grad,) = torch.autograd.grad(total, [x])
        return total.item()

    search.step(loss)
    with torch.no_grad():
        best = _misses(model, x, target).view(_STARTS, -1).argmin(0).numpy()
    ends = x.detach().numpy().reshape(_STARTS, len(embeddings), *shape)
    return ends[best, np.arange(len(embeddings))]


def _misses(model: BottomModel, x: Tensor, target: Tensor) -> Tensor:
    """Return the squared distance [R] of rows' embeddings from the target.

    Where the target of a ReLU is positive, the distance is taken before the ReLU: an output of 0
    has no slope.
    """
    *inner, last = zip(model.layers, model.activations, strict=True)
    for layer, activation in inner:
        x = activation(layer(x))
    z = last[0](x)
    is_relu = last[1] is functional.relu
    h = torch.where(target > 0, z, z.relu()) if is_relu else last[1](z)
    return (h - target).square().sum(1)


# --- by reports of drift -------------------------------------------------------------------------
#
# A label holder learns how many columns of a party drift moderately and largely. It predicts groups
# of rows near a threshold, and adds one person to each. The counts then depend on that person.


def drift_counts(
    block: Rows, embeddings: Rows, shown: int, generator: np.random.Generator
) -> list[Finding]:
    """Return how well 30 reports on each row reveal the columns [N, F] of a party.

    The first attacker gets exact counts, as in a simulation. The second one gets the
    reports of a real node, which hides its indices and takes 30 days for 30 reports on a row.
    """
    from sklearn.linear_model import RidgeCV

    few = max(2, min(shown, len(block) // 10))
    ends = few, few + min(_TARGETS, len(block) // 4)
    known, targets, pool = np.split(generator.permutation(len(block)), ends)
    if len(pool) < 2 * LEAST:
        return []
    asked, findings = np.concatenate([known, targets]), []
    for whose, spread in (("exact", 0.0), ("of a real node", HIDING)):
        heard = reports(block, embeddings, pool, asked, spread, generator)
        success = 0.0
        if heard.shape[1]:
            decoder = RidgeCV(np.logspace(0, 5, 11)).fit(heard[:few], block[known])
            found, mean = decoder.predict(heard[few:]), block[known].mean(0)
            success = explained(block[targets], found, mean)
        attacker = f"label holder: {heard.shape[1] // 2} reports a row, features of {few} rows"
        name = f"drift of chosen groups, {whose}"
        findings.append(Finding(name, attacker, "R2", success, 0.0, len(targets)))
    return findings


def reports(
    block: Rows,
    embeddings: Rows,
    pool: Ids,
    asked: Ids,
    spread: float,
    generator: np.random.Generator,
) -> Numbers:
    """Return the party's reports on groups with one asked row each, [asked, 2 x reports].

    The attacker chooses some rows of a group by a direction of the embeddings, and keeps groups
    whose reports are not all equal. A random factor with this ``spread`` hides each index.
    """
    bins = [Bins.learn(column) for column in block.T]
    binned = np.stack([each.of(column) for each, column in zip(bins, block.T, strict=True)], 1)
    width, every = max(each.count for each in bins), np.arange(len(bins))
    then = _counts(binned, width)
    found: list[Numbers] = []
    for _ in range(_TRIES):
        by = np.argsort(embeddings[pool] @ generator.standard_normal(embeddings.shape[1]))
        first = int(generator.uniform(0.05, 1) * (LEAST - 1))
        rest = generator.choice(by[first:], LEAST - 1 - first, replace=False)
        group = _counts(binned[pool[np.concatenate([by[:first], rest])]], width)
        columns = zip(then, group, strict=True)
        drifts = np.array([_of_column(*column, len(bins)) for column in columns])
        raw, value, chance = drifts[every, binned[asked]].transpose(2, 0, 1)  # each [asked, F]
        factor = np.exp(generator.uniform(-spread, spread, raw.shape))
        drifting, large = raw * factor > chance, value * factor > LARGE
        moderate = ~large & (value * factor > MODERATE)
        said = np.stack([(drifting & each).sum(1) for each in (moderate, large)], axis=1)
        if (np.ptp(said, axis=0) > 0).any():
            found.append(said.astype(np.float64))
        if len(found) == _REPORTS:
            break
    return np.concatenate(found, axis=1) if found else np.zeros((len(asked), 0))


def _counts(binned: Counts, width: int) -> Counts:
    """Return counts by column and bin, [F, width]."""
    return np.stack([np.bincount(column, minlength=width) for column in binned.T])


def _of_column(then: Counts, group: Counts, looks: int) -> list[Drift]:
    """Return the drift of a column for each bin that one more row may be in, [width]."""
    return [drift_of(then, group + each, looks) for each in np.eye(len(group), dtype=np.int64)]
