"""Bottom models: a party's, from features to embedding.

`config.plugins.BOTTOMS` names ours: layers, between which noise can be put. Anything else is a
**model of one's own**: ``FILE.py:NAME`` or ``package.module:NAME``, a class of torch modules, or a
function that gives one. The contract:

* It is built as ``NAME(sample, size, **arguments)``. ``sample`` is one row as the party's source
  gives it, a tensor [...] or tensors by name, without a dimension of rows: of it shapes and dtypes
  are to be used. ``size`` is the embedding size, and the arguments are those of ``model-args``.
* ``forward(x)`` makes embeddings [R, size] of R rows, a tensor [R, ...] or tensors by name. The
  rows are those of one mini-batch in training, and any in evaluation and prediction, where the
  module is in eval mode and each row is to be embedded by itself.
* All of it is kept between messages, in checkpoints and for predictions: parameters, and buffers
  that are in its ``state_dict``. Buffers learn once a mini-batch, when it is uploaded. What torch
  draws at random in ``forward`` is the same where the pass over a mini-batch is repeated.
* Parameters with ``requires_grad=False`` are neither trained nor perturbed.
* With ``gradients = False`` it says that it has none, and only zeroth order trains it.

Noise of perturbed embeddings is put on its output, and asks that no row has a part in another's.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional

from vfl_flower.config.errors import CodeError, ConfigError, VflError
from vfl_flower.config.options import ModelConfig
from vfl_flower.config.plugins import BOTTOMS
from vfl_flower.config.run_config import RunConfig, pairs
from vfl_flower.data import samples
from vfl_flower.data.augmentation import GENERATOR
from vfl_flower.data.samples import Samples
from vfl_flower.models import passes
from vfl_flower.models.layers import Builder, Shape
from vfl_flower.models.training import autocast, check_size, in_float32, trained

log = logging.getLogger("flwr")

Perturb = Callable[[int, Tensor], Tensor]
"""Noise for layer ``l``, counted from 0, given that layer's output before its activation."""

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": functional.relu,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}


class BottomModel(nn.Module):
    """Layers u_l = sigma_l(w_l u_{l-1} + b_l), VAFL Eq. (9), or with noise Z_l inside, Eq. (10)."""

    by_step = False  # whether steps are to be passed apart (`models.passes`)

    def __init__(
        self,
        layers: Iterable[nn.Module],
        activations: Iterable[str],
        precision: str = "float32",
    ) -> None:
        super().__init__()
        self.precision = precision
        self.layers = nn.ModuleList(layers)
        self.activations = [_ACTIVATIONS[name] for name in activations]

    def forward(self, x: Samples, perturb: Perturb | None = None) -> Tensor:
        """Embeddings [R, E] of samples of R rows; whatever the precision, they are float32."""
        with autocast(self, self.precision):
            for depth, (layer, activation) in enumerate(
                zip(self.layers, self.activations, strict=True)
            ):
                z = layer(x)
                x = activation(z if perturb is None else perturb(depth, in_float32(z)))
        return in_float32(cast(Tensor, x))

    @cached_property
    def stackable(self) -> bool:
        """Whether torch.func.vmap can evaluate it at many parameters at once."""
        return not any(isinstance(each, nn.RNNBase) for each in self.modules())

    def apart(self) -> bool:
        """Whether no row of a mini-batch has a part in another's embedding."""
        return True


class OwnBottom(BottomModel):
    """A module of one's own, as the only layer.

    Parameters
    ----------
    name : what the configuration calls it.
    size : E, of an embedding.
    sample : one row, as those that it will read.
    """

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
        self.name = name
        self.size = size
        self.sample = sample

    def forward(self, x: Samples, perturb: Perturb | None = None) -> Tensor:
        """Embeddings [R, E]; `VflError`, as the end of a sentence, if it makes none."""
        if perturb is not None:
            # Each row by itself: the noise on its embedding hides it nowhere else.
            rows = range(samples.count(x))
            apart = [self._made(samples.rows(x, slice(row, row + 1))) for row in rows]
            z = torch.cat(apart) if apart else self._made(x)
            return self.activations[0](perturb(0, z))
        return self.activations[0](self._made(x))

    def _made(self, x: Samples) -> Tensor:
        due = samples.count(x), self.size
        if not due[0]:  # a step without rows of this party, which many modules cannot take
            learned = [0 * p.sum() for p in self.parameters() if p.requires_grad]
            return torch.zeros(due, device=next(self.parameters()).device) + sum(learned)
        with autocast(self, self.precision):
            z = self.layers[0](x)
        if not isinstance(z, Tensor) or tuple(z.shape) != due:
            made = tuple(z.shape) if isinstance(z, Tensor) else f"a {type(z).__name__}"
            raise VflError(
                f"has a model {self.name!r} that makes {made} of {due[0]} rows, which have to "
                f"become embeddings {due}: correct its forward."
            )
        return z.float()

    @cached_property
    def stackable(self) -> bool:
        """Whether vmap takes it: not if it has buffers, draws at random, or as vmap finds."""
        if any(True for _ in self.buffers()):
            return False
        stacked = {name: torch.stack([p, p]) for name, p in trained(self).items()}
        try:
            with torch.no_grad(), passes.repeatable(self, b""):
                call = vmap(lambda parameters, x: functional_call(self, parameters, (x,)))
                call(stacked, samples.each(self._two(), lambda x: torch.stack([x, x])))
        except Exception as error:  # whatever it is that vmap cannot do
            log.debug("%s is evaluated step by step: %s", self.name, error)
            return False
        return True

    def apart(self) -> bool:
        """Whether no row has a part in another's embedding, if rows are passed one by one.

        That it has where buffers learn from rows, as those of BatchNorm do.
        """
        before = {name: each.clone() for name, each in self.named_buffers()}
        with torch.no_grad():
            passes.one(self, self._two(), 0)
        learned = False
        for name, buffer in self.named_buffers():
            if name not in before or not torch.equal(buffer, before[name]):
                learned = True
                buffer.data.copy_(before.get(name, buffer))
        return not learned

    def check_one_row(self) -> None:
        """Raise `VflError`, as the end of a sentence, if a mini-batch of one row cannot be."""
        one = samples.each(self._two(), lambda x: x[:1])
        try:
            with torch.no_grad():
                passes.one(self, one, 0, learns=False)
        except Exception as error:  # whatever it says of it
            raise VflError(
                f"has a model {self.name!r} that cannot be trained on a mini-batch of one row, as "
                "here some are: choose another batch-size, or where parties may lack rows another "
                "normalisation, such as LayerNorm or GroupNorm."
            ) from error

    def try_out(self, gradients: bool) -> None:
        """Raise `VflError`, as the end of a sentence, if two rows do not become embeddings.

        Nothing in it changes by that.
        """
        self.eval()
        with torch.enable_grad():
            h = passes.one(self, self._two(), 0, learns=False)
        self.train()
        if not torch.isfinite(h).all():
            raise VflError(
                f"has a model {self.name!r} that makes embeddings that are not finite: correct its "
                "forward, or the rows."
            )
        if gradients and not h.requires_grad:
            raise VflError(
                f"has a model {self.name!r} whose embeddings have no gradient: correct its "
                "forward, or have it say gradients = False, for a zeroth-order system."
            )

    def _two(self) -> Samples:
        """Twice the sample, where the model is."""
        device = next(self.parameters()).device
        return samples.each(self.sample, lambda x: torch.stack([x, x]).to(device))


def has_gradient(bottom: str, key: str = "") -> bool:
    """Whether the bottom model of that name, which ``key`` has, says that it has one."""
    return bool(getattr(BOTTOMS.load(bottom, key), "gradients", True))


def embedding_size(config: RunConfig, outputs: int) -> int:
    """E: as configured; the number of outputs for a top model without parameters."""
    if config.models.top != "sum":
        return config.models.embedding_size or 32
    if config.models.embedding_size not in (None, outputs):
        raise ConfigError(
            f"embedding-size = {config.models.embedding_size} does not fit top-model = 'sum', "
            f"which on this data adds embeddings up to {outputs} outputs: leave it out, or choose "
            "another top model."
        )
    return outputs


def check(models: ModelConfig) -> None:
    """Raise `ConfigError` if keys of the bottom model contradict each other."""
    if models.bottom_args and models.bottom in BOTTOMS.known:
        raise ConfigError(
            f"model-args = {models.bottom_args!r} are for a model of your own, and bottom-model = "
            f"{models.bottom!r} is ours: leave them out."
        )


def build_bottom(
    config: RunConfig, party: int, sample: Samples, size: int, secret: bytes = b""
) -> BottomModel:
    """The bottom model of a party, with the initial parameters that (seed, party, secret) give.

    Raises
    ------
    ConfigError
        If the model cannot read such samples, or makes no embeddings of this size.
    """
    models = config.models
    check(models)
    if models.bottom not in BOTTOMS.known:
        return _build_own(config, party, sample, size, secret)
    if isinstance(sample, dict):
        raise ConfigError(
            f"bottom-model = {models.bottom!r} reads one tensor, and a sample of party {party} has "
            f"{', '.join(sample)}: give it a model of its own, by model='FILE.py:NAME' in its node "
            "configuration."
        )
    builder: Builder = BOTTOMS.load(models.bottom)
    last = models.embedding_activation or ("none" if models.top == "sum" else "relu")
    with seeded(config, party, secret):
        _check_size(builder, tuple(sample.shape), size, models)
        layers = builder(tuple(sample.shape), size, models)
    activations = [each or last for _, each in layers]
    return BottomModel([layer for layer, _ in layers], activations, config.training.precision)


def _check_size(builder: Builder, shape: Shape, size: int, models: ModelConfig) -> None:
    """Raise `ConfigError` if one of ours would not fit into memory; to find out takes none."""
    keys = "bottom-hidden or embedding-size"
    try:
        with torch.device("meta"):
            layers = [layer for layer, _ in builder(shape, size, models)]
    except RuntimeError:  # not even its numbers can be counted
        check_size(float("inf"), keys)
        raise
    check_size(sum(p.numel() for layer in layers for p in layer.parameters()), keys)


def _build_own(
    config: RunConfig, party: int, sample: Samples, size: int, secret: bytes
) -> OwnBottom:
    """A model of one's own, as the module's docstring has it, that has been tried out."""
    models, said = config.models, f"Party {party}'s model"
    if config.privacy.inner_noise:
        raise ConfigError(
            f"{said} {models.bottom!r} has no layers between which inner-noise could be put: leave "
            "that out, or choose one of ours."
        )
    make = BOTTOMS.load(models.bottom, said)
    name = models.bottom.rpartition("/")[2]  # folders are nobody else's affair
    said = f"{said} {name!r}"
    with seeded(config, party, secret):
        module = built(make, said, models.bottom_args, sample, size)
        _draw_lazy(module, sample)
    if not trained(module):
        raise ConfigError(
            f"{said} has no parameter to train: add a layer, or leave one requires_grad."
        )
    activation, precision = models.embedding_activation or "none", config.training.precision
    model = OwnBottom(module, activation, name, size, sample, precision)
    try:
        model.try_out(gradients=has_gradient(models.bottom))
    except VflError as error:
        raise ConfigError(f"Party {party} {error}") from None
    except Exception as error:
        what = f"{said} cannot read samples of shape {samples.shape(sample)}"
        raise CodeError(what, error) from error
    return model


def _draw_lazy(module: nn.Module, sample: Samples) -> None:
    """Have layers that wait for their first rows draw their parameters now, while it is secret."""
    if any(nn.parameter.is_lazy(p) for p in module.parameters()):
        module.eval()
        with torch.no_grad():
            module(samples.each(sample, lambda x: torch.stack([x, x])))
        module.train()


def built(make: Any, said: str, arguments: str, *given: Any) -> nn.Module:
    """The module that code of one's own makes of what is given, and of arguments ``NAME=VALUE``.

    Raises
    ------
    ConfigError
        With what is ``said`` of it, if it makes none.
    """
    keys = pairs([f"{arguments} "], f"{said} has arguments that") if arguments else {}
    try:
        inspect.signature(make).bind(*given, **keys)
    except TypeError as error:
        what = f"the arguments {arguments!r}" if arguments else "what models are built of"
        raise ConfigError(f"{said} does not take {what}: {error}. See docs/models.md.") from error
    except ValueError:  # it does not say which it takes
        pass
    try:
        module = make(*given, **keys)
    except VflError as error:  # of ours, as the end of a sentence
        raise ConfigError(f"{said} {error}") from None
    except Exception as error:
        raise CodeError(f"{said} cannot be built", error) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(f"{said} makes a {type(module).__name__}, and no torch module.")
    odd = {str(p.dtype) for p in trained(module).values()} - {"torch.float32"}
    if odd:
        raise ConfigError(f"{said} trains parameters of {odd.pop()}: make them torch.float32.")
    for p in trained(module).values():
        if not nn.parameter.is_lazy(p):  # directions are added to them as they lie in memory
            p.data = p.data.contiguous()
    return module


@contextmanager
def seeded(config: RunConfig, who: int, secret: bytes = b"") -> Iterator[None]:
    """Initialise a model from (seed, who, secret), leaving torch's own random state as it was."""
    with GENERATOR, torch.random.fork_rng(devices=[]):
        sequence = np.random.SeedSequence([config.training.seed, who + 1])
        words = sequence.generate_state(1, np.uint64)
        torch.manual_seed(int(words[0] >> np.uint64(1)))
        if secret:
            _seed_all_words(secret)
        yield


def _seed_all_words(secret: bytes) -> None:
    """Have torch's generator, an MT19937, follow from all of a secret.

    A seed decides it by 32 bits, which who sees an embedding could try out one by one.
    """
    stream = hashlib.shake_256(b"vfl-flower model|" + secret).digest(4 * 624)
    state = torch.get_rng_state()
    state.view(torch.int64)[3:627] = torch.from_numpy(np.frombuffer(stream, "<u4").astype(np.int64))
    torch.set_rng_state(state)
