"""Build the bottom model of a party, which maps features to embeddings.

`config.plugins.BOTTOMS` lists the models of this project. Any other value is a **model of your
own**: the import path of a torch module class, or of a function that returns a module. It is called
with one row, the embedding size and ``model-args``. docs/how-to/own-models.md has the contract.
"""

import hashlib
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from vfl_flower.config.errors import CodeError, ConfigError, VflError
from vfl_flower.config.options import ModelConfig
from vfl_flower.config.plugins import BOTTOMS
from vfl_flower.config.run_config import RunConfig, pairs
from vfl_flower.data import samples
from vfl_flower.data.samples import Samples
from vfl_flower.models.bottom_model import BottomModel, OwnBottom
from vfl_flower.models.layers import Builder, PiecewiseLinear, Shape, rise
from vfl_flower.models.training import check_size, kept, trained

_ROWS_FOR_BINS = 10_000


def has_gradient(bottom: str, key: str = "") -> bool:
    """Return whether a bottom model has gradients; errors name the option ``key``."""
    return bool(getattr(BOTTOMS.load(bottom, key), "gradients", True))


def embedding_size(config: RunConfig, outputs: int) -> int:
    """Return the embedding size E: the number of outputs for a top model without parameters."""
    if config.models.top != "sum":
        return config.models.embedding_size or 32
    if config.models.embedding_size not in (None, outputs):
        raise ConfigError(
            f"embedding-size = {config.models.embedding_size} does not fit top-model = 'sum', "
            f"which adds embeddings to make {outputs} outputs. Leave it out, or choose another "
            "top-model."
        )
    return outputs


def check(models: ModelConfig) -> None:
    """Raise `ConfigError` if options of the bottom model contradict each other."""
    if models.bottom_args and models.bottom in BOTTOMS.known:
        raise ConfigError(
            f"model-args = {models.bottom_args!r} are for a model of your own, and not for "
            f"bottom-model = {models.bottom!r}. Leave them out."
        )


def build_bottom(
    config: RunConfig,
    party: int,
    sample: Samples,
    size: int,
    *,
    signs: Sequence[int] = (),
    secret: bytes = b"",
) -> BottomModel:
    """Build a party's model. The seed, the party's number and ``secret`` decide its parameters.

    Its embeddings are monotone in columns whose ``signs`` are 1 and -1 (`layers.rise`).
    """
    models = config.models
    check(models)
    if models.bottom not in BOTTOMS.known:
        own = _build_own(config, party, sample, size, secret)
        if any(signs):
            rise(own.layers, torch.tensor(signs))  # refuses it
        return own
    if isinstance(sample, dict):
        raise ConfigError(
            f"bottom-model = {models.bottom!r} reads one tensor, but a sample of party {party} has "
            f"{', '.join(sample)}. Set model='FILE.py:NAME' in this party's node configuration, "
            "to give it another model."
        )
    builder: Builder = BOTTOMS.load(models.bottom)
    last = models.embedding_activation or ("none" if models.top == "sum" else "relu")
    with seeded(config, party, secret):
        _check_size(builder, tuple(sample.shape), size, models)
        layers = builder(tuple(sample.shape), size, models)
    if any(signs):
        rise([layer for layer, _ in layers], torch.tensor(signs, dtype=torch.float32))
    activations = [each or last for _, each in layers]
    return BottomModel([layer for layer, _ in layers], activations, config.training.precision)


def learn_bins(model: nn.Module, rows: Any) -> None:
    """Learn a `tabular` model's bins from at most 10,000 of its training rows [N, ...]."""
    for each in model.modules():
        if isinstance(each, PiecewiseLinear):
            most = min(len(rows), _ROWS_FOR_BINS)
            places = np.linspace(0, len(rows) - 1, most).astype(np.int64)
            each.learn(torch.from_numpy(np.asarray(rows[places])))


def _check_size(builder: Builder, shape: Shape, size: int, models: ModelConfig) -> None:
    """Refuse a model of this project that would not fit into memory."""
    keys = "bottom-hidden or embedding-size"
    try:
        with torch.device("meta"):
            layers = [layer for layer, _ in builder(shape, size, models)]
    except RuntimeError:  # torch cannot count so many numbers
        check_size(float("inf"), keys)
        raise
    check_size(sum(p.numel() for layer in layers for p in layer.parameters()), keys)


def _build_own(
    config: RunConfig, party: int, sample: Samples, size: int, secret: bytes
) -> OwnBottom:
    """Build a model of your own, and try it out."""
    models, said = config.models, f"Party {party}'s model"
    if config.privacy.inner_noise:
        raise ConfigError(
            f"{said} {models.bottom!r} has no layers for inner-noise. Leave inner-noise out, or "
            "choose a bottom-model of this project."
        )
    make = BOTTOMS.load(models.bottom, said)
    name = models.bottom.rpartition("/")[2]  # other parties must not learn of folders
    said = f"{said} {name!r}"
    with seeded(config, party, secret):
        module = built(make, said, models.bottom_args, sample, size)
        if any(nn.parameter.is_lazy(each) for each in (*module.parameters(), *module.buffers())):
            module.eval()
            with torch.no_grad():  # lazy layers draw their parameters now, from the secret
                module(samples.each(sample, lambda x: torch.stack([x, x])))
            module.train()
    if not trained(module):
        raise ConfigError(
            f"{said} has no parameter to train. Add a layer, or set requires_grad of a parameter."
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


def built(make: Any, said: str, arguments: str, *given: Any) -> nn.Module:
    """Call ``make`` with ``given`` and the keyword arguments of a text ``NAME=VALUE ...``.

    Refuse a module that cannot be trained and saved; ``said`` is the subject of errors.
    """
    keys = pairs([f"{arguments} "], f"{said} has arguments that") if arguments else {}
    try:
        inspect.signature(make).bind(*given, **keys)
    except TypeError as error:
        what = f"the arguments {arguments!r}" if arguments else "the arguments of every model"
        page = "docs/how-to/own-models.md"
        raise ConfigError(f"{said} does not take {what}: {error}. See {page}.") from error
    except ValueError:  # some builtins have no signature
        pass
    try:
        module = make(*given, **keys)
    except VflError as error:  # its text lacks a subject
        raise ConfigError(f"{said} {error}") from None
    except Exception as error:
        words = ", ".join(
            f"a sample of shape {samples.shape(each)}"
            if isinstance(each, torch.Tensor | dict)
            else repr(each)
            for each in given
        )
        raise CodeError(f"{said} cannot be built from {words}", error) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"{said} is not a torch module, but a {type(module).__name__}. Return a torch module."
        )
    if odd := {str(p.dtype) for p in trained(module).values()} - {"torch.float32"}:
        raise ConfigError(f"{said} trains parameters of {odd.pop()}. Make them torch.float32.")
    for p in trained(module).values():
        if not nn.parameter.is_lazy(p):  # zeroth-order directions are added in memory order
            p.data = p.data.contiguous()
    try:
        kept(module)
    except VflError as error:
        raise ConfigError(f"{said} {error}") from None
    except Exception as error:
        raise CodeError(f"{said} cannot be saved", error) from error
    return module


@contextmanager
def seeded(config: RunConfig, who: int, secret: bytes = b"") -> Iterator[None]:
    """Seed all default generators by (seed, who, secret) inside the context."""
    sequence = np.random.SeedSequence([config.training.seed, who + 1])
    words = sequence.generate_state(1, np.uint64)
    with samples.seeded(int(words[0] >> np.uint64(1)), secret):
        if secret:
            # A seed has 32 bits only, and anybody with an embedding could try all seeds. So all
            # bits of the secret set torch's generator, an MT19937.
            stream = hashlib.shake_256(b"vfl-flower model|" + secret).digest(4 * 624)
            state, numbers = torch.get_rng_state(), np.frombuffer(stream, "<u4").astype(np.int64)
            state.view(torch.int64)[3:627] = torch.from_numpy(numbers)
            torch.set_rng_state(state)
        yield
