"""Top models: the label holder's models, from embeddings to outputs.

`config.plugins.TOPS` lists the top models of this project: linear layers with explicit gradients.
Any other value is a **top model of your own**, as for bottom models (`models.bottoms`). Autograd
gives its gradients, behind the methods of `TopModel`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from vfl_flower.config.errors import CodeError, ConfigError, VflError
from vfl_flower.config.options import ModelConfig
from vfl_flower.config.plugins import BOTTOMS, TOPS
from vfl_flower.config.run_config import RunConfig
from vfl_flower.models import passes
from vfl_flower.models.bottom_model import BottomModel
from vfl_flower.models.bottoms import build_bottom, built, embedding_size, seeded
from vfl_flower.models.layers import Linear, rise, turns
from vfl_flower.models.top_layers import Block, CombiningTop, Outputs, TopModel, clipped, one_by_one
from vfl_flower.models.training import check_size, in_float32, load_model, trained

Monotone = tuple[Collection[int], Sequence[int]]
"""Places of parties whose columns the score is monotone in, and signs of own columns."""


class OwnTop(TopModel):
    """Wrap a module of your own that reads embeddings side by side."""

    stackable = False
    by_step = True

    def __init__(
        self,
        sizes: Sequence[int],
        module: nn.Module,
        outputs: int,
        own: BottomModel | None = None,
        precision: str = "float32",
    ) -> None:
        super().__init__(sizes, "concat", [], outputs, None, precision)
        self.module = module
        self.own = own  # after the module: parameters must have the order of gradients
        self.blocks += own is not None

    def rest(self, z: Tensor) -> Tensor:
        """Return outputs [R, C] of embeddings of all blocks."""
        outputs: Tensor = self.module(*self.given(z))
        return outputs if torch.is_grad_enabled() else outputs.detach()  # TorchScript may ignore it

    def given(self, z: Tensor) -> tuple[Tensor, ...]:
        """Return the arguments of the module's call: copies, since it may write to them."""
        return (z.clone(),)

    def pairs(
        self, h: Tensor, blocks: Sequence[Block], lengths: Sequence[int], key: bytes
    ) -> Iterator[Outputs]:
        """Yield outputs of rows h with the first, and with the second of each party's pair."""

        def outputs(rows: Tensor) -> Tensor:
            return passes.window(self, rows, lengths, key=key, learns=False)[0]

        return one_by_one(h, blocks, outputs)

    def passes(
        self,
        x: Tensor,
        targets: Tensor,
        weights: Tensor | float,
        loss_gradient: Callable[[Tensor, Tensor], Tensor],
        rows: bool,
        parameters: bool,
        bound: float = math.inf,
        sums: torch.dtype = torch.float32,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Pass forward and backward, as `TopModel.passes`."""
        of_module = trained(self.module)
        with torch.enable_grad():
            x = x.detach().requires_grad_(rows)
            outputs = in_float32(self.module(*self.given(x)))
        signal = loss_gradient(outputs.detach(), targets) * weights
        wanted = [x] * rows + list(of_module.values()) * (parameters and bound == math.inf)
        found: Sequence[Tensor] = ()
        if wanted:
            found = torch.autograd.grad(outputs, wanted, signal, materialize_grads=True)
        gradients = list(found[rows:])
        if parameters and bound < math.inf:
            gradients = self._bounded(of_module, x.detach(), signal, bound, sums)
        return outputs.detach(), found[0] if rows else signal, gradients

    def _bounded(
        self,
        of_module: dict[str, nn.Parameter],
        x: Tensor,
        signal: Tensor,
        bound: float,
        sums: torch.dtype,
    ) -> list[Tensor]:
        """Return gradients of parameters, with a bounded norm of each row's part."""

        def of_row(row: Tensor, its_signal: Tensor) -> dict[str, Tensor]:
            def outputs(parameters: dict[str, Tensor]) -> Tensor:
                made: Tensor = functional_call(self.module, parameters, self.given(row[None]))
                return made[0]

            return vjp(outputs, dict(of_module))[1](its_signal)[0]

        of_rows = [each.flatten(1) for each in vmap(of_row)(x, signal).values()]
        bounded = clipped(of_rows, [each.square().sum(1) for each in of_rows], bound)
        both = zip(bounded, of_module.values(), strict=True)
        return [each.sum(0, dtype=sums).view_as(p) for each, p in both]


def check(models: ModelConfig) -> None:
    """Raise `ConfigError` if options of the top model contradict each other."""
    if models.top == "sum" and models.combine != "concat":
        raise ConfigError(
            "combine has no meaning for top-model = 'sum', which adds the embeddings itself. "
            "Leave it out, or choose a linear or mlp top model."
        )
    if models.top in TOPS.known and models.top_args:
        raise ConfigError(
            f"top-args = {models.top_args!r} are for a top model of your own, and not for "
            f"top-model = {models.top!r}. Leave them out."
        )
    if models.top not in TOPS.known and models.combine != "concat":
        raise ConfigError(
            f"combine = {models.combine!r} is for the top models of this project, but top-model = "
            f"{models.top!r} reads embeddings side by side. Leave it out."
        )


def build_top(
    config: RunConfig,
    sizes: Sequence[int],
    outputs: int,
    own_columns: int = 0,
    alone: bool = False,
    kinds: tuple[type[TopModel], type[OwnTop] | None] = (TopModel, OwnTop),
    monotone: Monotone = ((), ()),
) -> TopModel:
    """Build the label holder's model; the seed decides its initial parameters.

    `Aggregation.build_top` names the classes that can read the run's rows, its own and a user's.
    With ``alone``, noise hides each row's part, so that no row may affect another's output.
    """
    models, own, blocks = config.models, None, list(sizes)
    if own_columns:
        blocks.append(embedding_size(config, outputs))
        # As of one more party with a table, so an mlp where others have a cnn, lstm or own modules.
        for_tables = models.bottom in BOTTOMS.known and models.bottom not in ("cnn", "lstm")
        mlp = {} if for_tables else {"bottom-model": "mlp", "model-args": ""}
        about = config.with_values(mlp), len(sizes), torch.zeros(own_columns), blocks[-1]
        own = build_bottom(*about, signs=monotone[1])
    if rising := {*monotone[0], *([len(sizes)] if monotone[1] else [])}:
        _check_monotone(config, outputs, kinds[0])
    precision = config.training.precision
    if models.top not in TOPS.known:
        own_top = kinds[1]
        assert own_top is not None  # `aggregation.check` refuses the others
        module = _build_own(config, own_top, blocks, outputs, alone)
        return own_top(sizes, module, outputs, own, precision)
    beside = sum(blocks) + kinds[0].placeholders(len(sizes))
    inputs = beside if models.combine == "concat" else blocks[0]
    widths = TOPS.load(models.top)(inputs, outputs, models)
    numbers = sum(wide * out for wide, out in pairwise(widths))
    check_size(numbers, "top-hidden or embedding-size")
    with seeded(config, -1):
        layers = [Linear(wide, out) for wide, out in pairwise(widths)]
    if rising and layers:
        each = [turns(size) * (at in rising) for at, size in enumerate(blocks)]
        side_by_side = torch.cat([*each, torch.zeros(beside - sum(blocks))])
        rise(layers, side_by_side if models.combine == "concat" else turns(inputs))
    combine = models.combine if layers else "sum"
    top = kinds[0](sizes, combine, layers, outputs, own, precision)
    for name, _ in top.named_parameters() if isinstance(top, CombiningTop) else ():
        if name.split(".")[0] not in ("layers", "own"):
            raise ConfigError(
                f"aggregation = {models.aggregation!r} has a top model with the parameter "
                f"{name!r}, which nothing trains. Combine embeddings without parameters."
            )
    return top


def _check_monotone(config: RunConfig, outputs: int, kind: type[TopModel]) -> None:
    """Refuse a top model whose score might fall with an embedding of a monotone block."""
    code = config.models.top not in TOPS.known or not kind.__module__.startswith("vfl_flower.")
    noisy = config.privacy.mechanism not in ("none", "labels", "scalar")
    wrong = (outputs > 1 and f"{outputs} classes") or (code and "a top model of your own")
    wrong = wrong or (config.estimator.labels == "shared" and "labels = 'shared'")
    if wrong := wrong or (noisy and f"privacy = {config.privacy.mechanism!r}"):
        raise ConfigError(
            f"A participant has monotonic columns, which do not fit {wrong}. Leave one of them out."
        )


def load_top(config: RunConfig, top: TopModel, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Load a saved top model, whose parameters must be like its own."""
    try:
        load_model(top, arrays)
    except VflError as error:
        raise ConfigError(f"top-model = {config.models.top!r} {error}") from None


def grow_top(
    config: RunConfig,
    top: TopModel,
    arrays: Mapping[str, NDArray[Any]],
    sizes: Sequence[int],
    then: type[TopModel],
) -> None:
    """Load a saved top model of parties with ``sizes`` into one with more; new ones come last.

    With embeddings side by side, outputs stay the same with and without the new parties. The first
    layer's columns of a new party, and its placeholder, begin at zero. With a mean or a sum,
    outputs stay the same for rows without new parties.
    """
    if isinstance(top, OwnTop):
        try:
            load_model(top, arrays)
        except VflError:
            raise ConfigError(
                f"top-model = {config.models.top!r} has other parameters for {top.parties} parties "
                f"than for {len(sizes)}. Leave grow out, or use a model of another kind."
            ) from None
        return
    if top.combine == "concat" and len(top.layers):
        first = cast(nn.Linear, top.layers[0])
        own = first.in_features - top.received - top.placeholders(top.parties)
        ends = top.received + own
        places = [*range(sum(sizes)), *range(top.received, ends)]
        places += range(ends, ends + then.placeholders(len(sizes)))
        weight = np.zeros(tuple(first.weight.shape), np.float32)
        weight[:, places] = arrays["layers.0.weight"]
        arrays = {**arrays, "layers.0.weight": weight}
    load_top(config, top, arrays)


def _build_own(
    config: RunConfig, kind: type[OwnTop], blocks: list[int], outputs: int, alone: bool
) -> nn.Module:
    """Build a module of your own, and try it out."""
    said = f"top-model = {config.models.top!r}"
    make = TOPS.load(config.models.top)
    with seeded(config, -1):
        module = built(make, said, config.models.top_args, blocks, outputs)
    top = kind(blocks, module, outputs)
    h = torch.randn(3, sum(blocks), generator=torch.Generator().manual_seed(0))
    other = torch.cat([h[:1], 2 * h[1:] + 1])
    h, other = (kind.whole(each, len(blocks)) for each in (h, other))
    try:
        top.eval()
        said_of_h = passes.one(top, h, 0, learns=False)
        top.train()
    except Exception as error:
        raise CodeError(f"{said} cannot read embeddings {tuple(h.shape)}", error) from error
    if not isinstance(said_of_h, Tensor) or said_of_h.shape != (3, outputs):
        made = tuple(said_of_h.shape) if isinstance(said_of_h, Tensor) else type(said_of_h).__name__
        raise ConfigError(
            f"{said} returns {made} for 3 rows, but outputs must be {(3, outputs)}. Correct its "
            "forward."
        )
    if not torch.isfinite(said_of_h).all():
        raise ConfigError(f"{said} makes outputs that are not finite. Correct its forward.")
    if alone and not _is_alone(top, h, other):
        raise ConfigError(
            f"{said} lets one row affect another row's outputs, or drops at random, but privacy "
            "= 'scalar' hides each row by itself. Leave out layers such as BatchNorm and Dropout."
        )
    return module


def _is_alone(top: OwnTop, h: Tensor, other: Tensor) -> bool:
    """Return whether the first row's outputs and gradients depend on it alone."""
    try:
        with torch.no_grad():
            first, second = passes.pair(top, h, other, [len(h)], b"")
            x = top.combined(h[:, : top.received], h)
            top.passes(x, first, 1.0, lambda z, _: torch.ones_like(z), False, True, bound=1.0)
    except Exception:  # vmap fails on single rows with many types of errors
        return False
    return torch.allclose(first[0], second[0], rtol=1e-4, atol=1e-6)
