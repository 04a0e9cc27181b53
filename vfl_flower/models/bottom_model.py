"""Bottom models: modules that map a party's features to embeddings.

`BottomModel` holds the layers of this project. A mechanism can add noise between them. `OwnBottom`
holds a module of your own.
"""

from collections.abc import Callable, Iterable
from functools import cached_property
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from vfl_flower.config.errors import VflError
from vfl_flower.config.logs import log
from vfl_flower.data import samples
from vfl_flower.data.samples import Samples
from vfl_flower.models import passes
from vfl_flower.models.training import (
    autocast,
    extra_states,
    in_float32,
    load_extra_states,
    trained,
)

Perturb = Callable[[int, Tensor], Tensor]
"""Adds noise to a layer's output, given the layer's number, from 0, and the output."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


class BottomModel(nn.Module):
    """Stack layers u_l = sigma_l(w_l u_{l-1} + b_l), VAFL Eq. (9).

    With noise Z_l inside each layer it is VAFL Eq. (10).
    """

    by_step = False  # whether each step needs its own forward pass (`models.passes`)
    name = ""  # of a module of your own, in the configuration

    def __init__(
        self, layers: Iterable[nn.Module], activations: Iterable[str], precision: str = "float32"
    ) -> None:
        super().__init__()
        self.precision = precision
        self.layers = nn.ModuleList(layers)
        self.activations = [_ACTIVATIONS[name] for name in activations]

    def forward(self, x: Samples, perturb: Perturb | None = None) -> Tensor:
        """Return float32 embeddings [R, E] of R rows, whatever the precision."""
        if perturb is None and not torch.is_grad_enabled() and len(x) > self.rows_at_once:
            return torch.cat([self(part) for part in cast(Tensor, x).split(self.rows_at_once)])
        with autocast(self, self.precision):
            for depth, (layer, activation) in enumerate(
                zip(self.layers, self.activations, strict=True)
            ):
                z = layer(x)
                x = activation(z if perturb is None else perturb(depth, in_float32(z)))
        return cast(Tensor, x).float()

    @cached_property
    def rows_at_once(self) -> int:
        """Return the most rows for one pass without gradients, by the memory inside the layers."""
        return min((getattr(each, "rows_at_once", 2**31) for each in self.layers), default=2**31)

    @cached_property
    def stackable(self) -> bool:
        """Return whether torch.func.vmap can evaluate it at many parameters at once."""
        return not any(isinstance(each, nn.RNNBase) for each in self.modules())

    def apart(self) -> bool:
        """Return whether each row's embedding depends on that row alone."""
        return True


class OwnBottom(BottomModel):
    """Wrap your own module ``name``, which embeds rows like ``sample`` in ``size`` numbers."""

    by_step = True

    def __init__(
        self,
        module: nn.Module,
        activation: str,
        name: str,
        size: int,
        sample: Samples,
        precision: str,
    ) -> None:
        super().__init__([module], [activation], precision)
        self.name, self.size, self.sample = name, size, sample

    def forward(self, x: Samples, perturb: Perturb | None = None) -> Tensor:
        """Return embeddings [R, E], whose shape is checked."""
        if perturb is not None:
            # Noise on a row's embedding does not hide this row in another row's embedding.
            rows = range(samples.count(x))
            each = [self._made(samples.rows(x, slice(row, row + 1))) for row in rows]
            z = torch.cat(each) if each else self._made(x)
            return self.activations[0](perturb(0, z))
        return self.activations[0](self._made(x))

    def _made(self, x: Samples) -> Tensor:
        due = samples.count(x), self.size
        if not due[0]:  # many modules cannot read a batch without rows
            learned = [0 * p.sum() for p in self.parameters() if p.requires_grad]
            return torch.zeros(due, device=next(self.parameters()).device) + sum(learned)
        with autocast(self, self.precision):
            z = self.layers[0](samples.each(x, torch.clone))  # it may write to its input
        if not isinstance(z, Tensor) or tuple(z.shape) != due or z.is_complex():
            made = tuple(z.shape) if isinstance(z, Tensor) else f"a {type(z).__name__}"
            made = "complex numbers" if isinstance(z, Tensor) and z.is_complex() else made
            raise VflError(
                f"has a model {self.name!r} that returns {made} for {due[0]} rows, but embeddings "
                f"must be {due}. Correct its forward."
            )
        return (z if torch.is_grad_enabled() else z.detach()).float()  # TorchScript may ignore it

    @cached_property
    def stackable(self) -> bool:
        """Return whether vmap can evaluate it: not with buffers, extra states or random draws."""
        if any(True for _ in self.buffers()) or extra_states(self):
            return False
        stacked = {name: torch.stack([p, p]) for name, p in trained(self).items()}
        try:
            with torch.no_grad(), passes.repeatable(self, b""):
                call = vmap(lambda parameters, x: functional_call(self, parameters, (x,)))
                call(stacked, samples.each(self._two(), lambda x: torch.stack([x, x])))
        except Exception as error:  # vmap fails with many types of errors
            log.debug(
                "%s runs step by step, because vmap failed: %s", self.name, type(error).__name__
            )
            return False
        return True

    def apart(self) -> bool:
        """Return whether no buffer or extra state learns from rows, as BatchNorm's do.

        Noise passes one row at a time, so only these can carry one row into another's embedding.
        """
        before = {name: each.clone() for name, each in self.named_buffers()}
        extra = extra_states(self)
        with torch.no_grad():
            passes.one(self, self._two(), 0)
        now = extra_states(self).items()
        learned = any(not torch.equal(each, extra[name]) for name, each in now)
        load_extra_states(self, extra)
        for name, buffer in self.named_buffers():
            if name not in before or not torch.equal(buffer, before[name]):
                learned = True
                buffer.data.copy_(before.get(name, buffer))
        return not learned

    def check_one_row(self) -> None:
        """Refuse a module that cannot train on a mini-batch of one row."""
        one = samples.each(self._two(), lambda x: x[:1])
        try:
            with torch.no_grad():
                passes.one(self, one, 0, learns=False)
        except Exception as error:  # of the module
            raise VflError(
                f"has a model {self.name!r} that cannot train on a mini-batch of one row, but "
                "some mini-batches have one row. Choose another batch-size. If parties lack rows, "
                "choose another normalisation, such as LayerNorm or GroupNorm."
            ) from error

    def try_out(self, gradients: bool) -> None:
        """Refuse a module that cannot make embeddings of two rows. It does not change."""
        self.eval()
        with torch.enable_grad():
            h = learned = passes.one(self, self._two(), 0, learns=False)
            self.train()
            if gradients and not h.requires_grad:  # such as a moving average in eval mode
                learned = passes.one(self, self._two(), 0, learns=False)
        if not torch.isfinite(h).all():
            raise VflError(
                f"has a model {self.name!r} that makes embeddings that are not finite. Correct its "
                "forward, or the rows."
            )
        if gradients and not learned.requires_grad:
            raise VflError(
                f"has a model {self.name!r}, and its embeddings have no gradient. Correct its "
                "forward, or set gradients = False in its class and use a zeroth-order system."
            )

    def _two(self) -> Samples:
        """Return two copies of the sample, on the model's device."""
        device = next(self.parameters()).device
        return samples.each(self.sample, lambda x: torch.stack([x, x]).to(device))
