"""Attack features in the privacy audit: recover rows from their embeddings."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vfl_attacks.clients import Ids, Rows
from vfl_flower.config.files import whole
from vfl_flower.config.run_config import RunConfig
from vfl_flower.models.bottom_model import BottomModel

_IMAGES = 10  # in the picture
_STARTS = 4  # starting points of each inversion


def explained(rows: Rows, found: Rows, mean: Rows) -> float:
    """Return R2 of reconstructed rows [R, ...]: the explained variance about ``mean``."""
    error = np.square(rows - found).sum(dtype=float)
    return float(1 - error / np.square(rows - mean).sum(dtype=float))


# --- by rows whose features are known -----------------------------------------------------------


def reconstruct(embeddings: Rows, known: Ids, features: Rows) -> Rows:
    """Decode embeddings [R, E] to features [R, F], with a decoder for known rows.

    The decoder has one hidden layer. Its weight decay is strong because few rows are known.
    """
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.neural_network import MLPRegressor
    from sklearn.preprocessing import StandardScaler

    scaled = StandardScaler().fit_transform(embeddings)
    decoder = MLPRegressor(hidden_layer_sizes=(256,), alpha=10, max_iter=300, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        decoder.fit(scaled[known], features if features.shape[1] > 1 else features[:, 0])
    decoded: Rows = decoder.predict(scaled).reshape(len(embeddings), -1)
    return decoded


def decode(
    config: RunConfig,
    block: Rows,
    embeddings: Rows,
    shown: int,
    generator: np.random.Generator,
    picture: Path | None = None,
) -> tuple[float, int, int]:
    """Reconstruct rows that the attacker does not know; draw them if they are images.

    Returns
    -------
    R2, the number of known rows, and the number of unknown rows.
    """
    features = block.reshape(len(block), -1)
    known, others = np.split(
        generator.permutation(len(block)), [max(2, min(shown, len(block) // 10))]
    )
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
    found: Rows = ends[best, np.arange(len(embeddings))]
    return found


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
