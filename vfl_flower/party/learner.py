"""A party's bottom model and its training: what an estimator sees of a party."""

import secrets
from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data import samples
from vfl_flower.data.samples import Samples, augmented
from vfl_flower.data.source import signs_in
from vfl_flower.models import rebuilt
from vfl_flower.models.bottom_model import BottomModel, OwnBottom
from vfl_flower.models.bottoms import build_bottom, embedding_size, learn_bins
from vfl_flower.models.optimizers import build_optimizer
from vfl_flower.models.training import (
    choose_device,
    is_large,
    kept,
    load_model,
    load_optimizer,
    optimizer_tensors,
)
from vfl_flower.party.inputs import Inputs
from vfl_flower.protocol.batches import Window, joined
from vfl_flower.protocol.directions.window import Directions
from vfl_flower.protocol.estimators.base import window_key
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.protocol.privacy.noise import Perturbation
from vfl_flower.protocol.sampling import sampling_of
from vfl_flower.protocol.systems import sized
from vfl_flower.transport.messages import Arrays, TrainOrder

_AT_ONCE = 2**22
"""Number of samples that built-in layers evaluate at once.

Other models evaluate 256 rows, and large models a mini-batch.
"""


class Learner:
    """The `PartyEnd` of a party's estimator; ``own`` has the party's own model and training."""

    def __init__(
        self,
        config: RunConfig,
        own: RunConfig,
        index: int,
        parties: int,
        outputs: int,
        inputs: Inputs,
        frozen: bool,
        secret: bytes,
    ) -> None:
        own = sized(own, inputs.rows)
        self.config = config = sized(config, inputs.rows)
        self.sampling, self.mechanism = sampling_of(config, inputs.rows), mechanism_of(config)
        self.index, self.parties, self.outputs, self.rows = index, parties, outputs, inputs.rows
        self.inputs, self.frozen = inputs, frozen
        self.device = choose_device(config)
        self.size = embedding_size(own, outputs)
        # Seeds noise, directions and Poisson mini-batches. Only this party knows it. It is new for
        # each message, unless the run has a seed of noise.
        self.secret = secret
        if config.privacy.noise_seed >= 0:
            self.secret = f"{config.privacy.noise_seed} {index}".encode()
        self._own = own
        self.model = self._build(self.secret)
        self._rebuilt = cache(self._build)  # initial values of a large model take long to draw
        learn_bins(self.model, inputs.block.train)
        self._check(own)
        rate = own.training.party_lr
        self.optimizer = build_optimizer(own, self.model, rate, self.sampling.per_epoch)
        self.arrays: Arrays = {}  # state of the estimator
        self.exchange = 0  # number of the message whose window the model processes
        self._directions: Directions | None = None  # of the last window
        self.trace: Any = None  # intermediate results of the last upload, if in this process
        self.learning()

    def _build(self, secret: bytes = b"") -> BottomModel:
        """Build the bottom model, as each process of this party does.

        With own data the secret seeds it too, since a known first model would reveal features.
        """
        config, secret = self.config, secret or secrets.token_bytes(16)
        of_model = secret if config.data.apart and config.privacy.noise_seed < 0 else b""
        about = self._own, self.index, self.inputs.sample, self.size
        signs = signs_in(self.inputs.block.preparation)
        model = build_bottom(*about, signs=signs, secret=of_model)
        return model.to(self.device)

    def try_out(self) -> None:
        """Raise `ConfigError` if a user's model would predict otherwise than it is tested."""
        if rebuilt.is_own(self.model) and not self.frozen:
            said = f"Party {self.index}'s model {self.model.name!r}"
            some = self._some(self.inputs.block.train)
            rebuilt.try_out(said, self._build(), self._rebuilt, some)

    def check(self) -> None:
        """Raise `VflError` if a user's model would predict test rows otherwise than here."""
        if rebuilt.is_own(self.model):
            said, test = f"Party {self.index}'s model {self.model.name!r}", self.inputs.block.test
            rebuilt.check(said, self.model, self._rebuilt, self._some(test))

    def _some(self, rows: Any) -> Samples:
        """Return the first rows of a block, or the sample twice if it has fewer than two rows."""
        found = samples.tensors(rows[: rebuilt.ROWS], self.device)
        if samples.count(found) > 1:
            return found
        return samples.each(self.inputs.sample, lambda x: torch.stack([x, x]).to(self.device))

    def _check(self, own: RunConfig) -> None:
        """Raise `ConfigError` if the model fails, or noise cannot hide its rows.

        Noise hides a row only if no other row affects its embedding.
        """
        config, augment = self.config, self.inputs.block.augment
        self.mechanism.check_bottom(self.index, own.models.bottom, self.model, augment)
        small, batch = self.sampling.varies, config.training.batch_size
        few = small or batch == 1 or self.rows % batch == 1 or self.inputs.mask is not None
        try:
            augmented(augment, samples.each(self.inputs.sample, lambda x: x[None]), b"", 0)
            if isinstance(self.model, OwnBottom) and few and not self.frozen:
                self.model.check_one_row()
        except ConfigError:
            raise
        except VflError as error:
            raise ConfigError(f"Party {self.index} {error}") from None

    def learning(self) -> None:
        """Put the model into training mode, unless it is frozen."""
        self.model.train(not self.frozen)

    # --- interface for estimators ---------------------------------------------------------------

    def features(self, window: Window) -> Samples:
        """Return the window's rows, [R, ...], with the same augmentation in each pass."""
        block, places = self.inputs.block, self.inputs.places
        train = block.train
        if isinstance(train, np.ndarray) and places is None:
            rows = train if window.whole else train[window.ids]
            x: Samples = torch.from_numpy(rows).to(self.device, non_blocking=True)
        else:
            x = samples.tensors(train[self.inputs.places_of(window.ids)], self.device)
        if block.augment is samples.none:
            return x
        return augmented(block.augment, x, self.secret, self.exchange)

    def noise(self, exchange: int, window: Window) -> Perturbation:
        """Return the noise of the upload that answers this message.

        Refuse if the model has diverged. Under noise its embeddings would not show it.
        """
        finite = [p.isfinite().all() for p in self.model.parameters()]
        if finite and not torch.stack(finite).all():
            raise VflError("has parameters that are not finite. Lower the learning rates.")
        last, lengths = len(self.model.layers) - 1, tuple(window.lengths.tolist())
        return self.mechanism.perturbation(self.secret, exchange, lengths, last)

    def directions(self, order: TrainOrder) -> Directions:
        """Return the directions of the window of an order, the same for upload and answer."""
        key, here = window_key(self.secret, order), self._directions
        if here is None or here.key != key or self.model.by_step:  # it may have made new tensors
            here = self._directions = Directions(self.config.estimator, key, self.model)
        return here

    # --- interface for the party ----------------------------------------------------------------

    def embeddings(self, rows: Any, ids: NDArray[np.int32] | None = None) -> Tensor:
        """Return embeddings [n, E] of all rows of a block, or of ``ids``.

        Add noise if the run has any. Read and embed the rows in parts, so that memory does not grow
        with their number.
        """
        places = np.arange(len(rows), dtype=np.int32) if ids is None else ids
        most = 256 if self.model.by_step else max(1, _AT_ONCE // self.inputs.columns)
        most = min(most, self.model.rows_at_once)
        if is_large(self.model):
            most = self.config.training.batch_size
        starts = range(0, max(1, len(places)), most)
        parts = [places[start : start + most] for start in starts]
        window = Window(places, np.array([len(part) for part in parts], np.int32))
        perturbs = self.mechanism.perturbs_uploads
        noise = self.noise(self.exchange, window) if perturbs else None
        found, learns = [], self.model.training
        if learns:
            self.model.eval()
        try:
            with torch.no_grad():
                for number, part in enumerate(parts):
                    read = rows[part] if len(parts) > 1 or ids is not None else rows[:]
                    x = samples.tensors(read, self.device)
                    found.append(self.model(x, noise.of_step(number) if noise else None))
        finally:
            if learns:  # a service's model never does
                self.learning()
        return joined(found)

    def fresh_embeddings(
        self, rows: Any, ids: NDArray[np.int32] | None = None
    ) -> NDArray[np.float32]:
        """Return `embeddings` with noise that no earlier upload had.

        Equal noise of two rows would vanish in the difference of their embeddings.
        """
        self.exchange += 1
        if self.config.privacy.noise_seed < 0:
            self.secret = secrets.token_bytes(16)
        found: NDArray[np.float32] = self.embeddings(rows, ids).cpu().numpy()
        return found

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """Return the live tensors of the model and its optimizer."""
        return {"model": kept(self.model), "optimizer": optimizer_tensors(self.optimizer)}

    def load_state_dict(self, state: Mapping[str, Arrays]) -> None:
        """Copy the arrays of a model and its optimizer."""
        load_model(self.model, state["model"])
        load_optimizer(self.optimizer, state["optimizer"])
