"""Privacy axis: two kinds of noise, and what each is worth.

``perturbed-embedding`` (VAFL section 4) protects the feature values of a record of one party, from
the label holder and whoever reads its messages (with shared labels, the other parties), over all
uploads of that record by that party; a codec adds nothing to it, and takes nothing from it. What
the party's parameters learn from a record, and other rows' uploads then show of it, is not bounded
by it; nor does it protect labels from the parties.

``scalar`` (DPZV section IV) protects labels, and the records behind other parties' embeddings, in
the scalars that parties receive; embeddings reach the label holder as they are. Its epsilon is for
who does not know which rows a mini-batch held. A party knows that of its own mini-batches, so the
summary also has the epsilon without that ignorance. Neither counts what reaches the scalars through
the top model, which learns from labels without noise and is not sent to anyone.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.axes.batches import Window, secret_generator
from vfl_flower.config import RunConfig
from vfl_flower.errors import ConfigError, VflError
from vfl_flower.records import EmbedOrder, EvaluateOrder, Order, TrainOrder


@dataclass(frozen=True)
class Perturbation:
    """Noise in a bottom model, Eq. (10)-(11): uniform in inner layers, Gaussian in the last.

    The noise of a step depends on (secret, exchange, step, layer) alone, so the pass that answers
    the feedback repeats that of the upload. The last layer's output is first clipped to norm R,
    which bounds what one record can change; what the activation does after it is post-processing.
    """

    config: RunConfig
    secret: bytes
    exchange: int
    lengths: tuple[int, ...]
    last: int
    first_step: int = 0
    other_of_pair: bool = False  # zeroth order: each of a pair has noise of its own

    def __call__(self, layer: int, z: Tensor) -> Tensor:
        """``z``, a layer's output before its activation for all rows of a window, with noise."""
        if layer == self.last:
            norms = z.norm(dim=1, keepdim=True).clamp_min(1e-12)
            z = z * (self.config.embedding_bound / norms).clamp_max(1.0)
        elif self.config.inner_noise == 0:
            return z
        noise = [
            self._draw(step, layer, (length, *z.shape[1:]))
            for step, length in enumerate(self.lengths, start=self.first_step)
        ]
        return z + torch.cat(noise).to(z.device)

    def of_step(self, step: int) -> Perturbation:
        """The same noise, for a pass over the rows of one step of the window."""
        return replace(self, lengths=(self.lengths[step],), first_step=step)

    def of_pair(self) -> Perturbation:
        """Noise for the other embedding of a zeroth-order pair."""
        return replace(self, other_of_pair=True)

    def _draw(self, step: int, layer: int, shape: tuple[int, ...]) -> Tensor:
        # Torch's generator would use 32 bits of the seed, which the label holder could try out.
        place = f"|{self.exchange}|{step}|{layer}" + "|other" * self.other_of_pair
        seed = hashlib.sha256(self.secret + place.encode()).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(seed[:16], "little")))
        if layer == self.last:
            noise = self.config.embedding_noise * generator.standard_normal(shape, np.float32)
        else:
            half_width = math.sqrt(3) * self.config.inner_noise
            noise = half_width * (2 * generator.random(shape, np.float32) - 1)
        return torch.from_numpy(noise.astype(np.float32, copy=False))


class ScalarNoise:
    """The label holder's half of scalar privacy: clipping, and noise on each scalar (DPZV Eq. 8).

    Parameters
    ----------
    multiplier : deviation of the noise over C / B, which is what adding or removing a row can
        change in a step's average over B rows.
    """

    def __init__(self, config: RunConfig, multiplier: float) -> None:
        self.clip = config.clip
        self.deviation = multiplier * config.clip / config.batch_size
        self._secret = secrets.token_bytes(16)
        if config.noise_seed >= 0:
            self._secret = f"{config.noise_seed} label holder".encode()
        self.sent = 0  # scalars so far

    def added_to(self, scalars: Tensor) -> Tensor:
        """The scalars [S], each with noise of its own, from which that of others cannot follow."""
        drawn = []
        for _ in range(len(scalars)):
            self.sent += 1
            generator = secret_generator(f"scalar|{self.sent}|".encode() + self._secret)
            drawn.append(self.deviation * generator.standard_normal())
        return scalars + torch.tensor(drawn).to(scalars)


_TRAIN, _EMBED, _EVALUATE, _RECEIVED, _ANSWERED = range(5)  # kinds of a journal's events
_NO_ROWS = np.zeros(0, np.int32)


class Accountant:
    """What a run has released, and what that is worth. This one is for runs without privacy.

    It is kept by the label holder, whose honesty in counting is assumed.
    """

    journaled: ClassVar[tuple[int, ...]] = ()  # kinds of events that it counts

    def __init__(self, config: RunConfig, rows: int) -> None:
        self.config = config
        self.rows = rows
        self._journal: BinaryIO | None = None

    def steps_allowed(self, planned: int) -> int:
        """How many of the planned steps, over all parties, the budget allows."""
        return planned

    def noise(self) -> ScalarNoise | None:
        """What the label holder does to scalars before it sends them."""
        return None

    def ordered(self, party: int, order: Order) -> None:
        """Count what an order asks a party to upload."""
        if isinstance(order, TrainOrder):
            self._write(_TRAIN, party, order.epoch, order.first, order.steps)
        elif isinstance(order, EmbedOrder):
            self._write(_EMBED, party, ids=order.arrays["ids"])
        elif isinstance(order, EvaluateOrder):
            self._write(_EVALUATE, party)
        self._ordered(party, order)

    def received(self, party: int, window: Window) -> None:
        """Count the rows that a party has uploaded."""
        self._write(_RECEIVED, party, len(window.lengths), ids=window.ids)
        self._received(party, window)

    def answered(self, party: int, window: Window) -> None:
        """Count the scalars that answer a window."""
        self._write(_ANSWERED, party, len(window.lengths), ids=window.ids)
        self._answered(party, window)

    def _ordered(self, party: int, order: Order) -> None:
        pass

    def _received(self, party: int, window: Window) -> None:
        pass

    def _answered(self, party: int, window: Window) -> None:
        pass

    def keep_journal(self, path: Path) -> None:
        """From now on write to disk what is about to be released, before it is counted.

        What stands there already is counted first: all that a run has released before it was cut
        short, also what came after its last checkpoint and will be released again.
        """
        if not self.journaled:
            return
        path.touch(mode=0o600)
        self._journal = path.open("r+b")
        whole = 0  # bytes of events that were written to their end; others were not released
        for event in _events(self._journal.read()):
            kind, party, first, second, third, ids = event
            whole += 4 * (len(event) + len(ids))
            if kind == _TRAIN:
                order = TrainOrder(
                    exchange=0, epoch=first, first=second, steps=third, coordinated=False
                )
                self._ordered(party, order)
            elif kind == _EMBED:
                self._ordered(party, EmbedOrder(exchange=0, arrays={"ids": ids}))
            elif kind == _EVALUATE:
                self._ordered(party, EvaluateOrder(exchange=0))
            else:
                count = self._received if kind == _RECEIVED else self._answered
                count(party, Window(ids, np.zeros(first, np.int32)))
        self._journal.seek(whole)
        self._journal.truncate()

    def _write(
        self,
        kind: int,
        party: int,
        first: int = 0,
        second: int = 0,
        third: int = 0,
        ids: NDArray[np.int32] = _NO_ROWS,
    ) -> None:
        if self._journal and kind in self.journaled:
            event = np.array([kind, party, first, second, third, len(ids)], "<i4")
            try:
                self._journal.write(event.tobytes() + ids.astype("<i4").tobytes())
                self._journal.flush()
                os.fsync(self._journal.fileno())
            except OSError as error:
                raise VflError(
                    f"What is released cannot be written to {self._journal.name}, and so is not "
                    f"released: {error.strerror}."
                ) from error

    def released_steps(self) -> int:
        """Steps that count towards `steps_allowed`."""
        return 0

    def uploads(self) -> int:
        """Uploads of the most uploaded record of any party, where they are counted."""
        return 0

    def figures(self) -> dict[str, Any]:
        """The privacy part of ``summary.json``; empty epsilons where noise can be repeated."""
        return {"epsilon": None, "delta": None, "epsilon_of_paper": None}


class EmbeddingAccountant(Accountant):
    """Perturbed embeddings: how often each row was asked for.

    An upload counts when it is asked for, so one that is lost or refused counts too; noise protects
    test rows as it does training rows. A zeroth-order pair counts as two.
    """

    journaled = (_TRAIN, _EMBED, _EVALUATE, _RECEIVED)

    def __init__(self, config: RunConfig, rows: int) -> None:
        super().__init__(config, rows)
        self.steps: dict[int, int] = {}  # by party: mini-batches asked for
        # Passes over the rows that have begun, each of which uploads a row once; an order that is
        # given anew, or comes before the last, begins another.
        self.passes: dict[int, int] = {}
        self.last: dict[int, tuple[int, int]] = {}  # epoch and first step of the last order
        self.queries: dict[int, NDArray[np.int32]] = {}  # of each training row, apart from those
        self.evaluations: dict[int, int] = {}  # uploads of every test row
        self.sampled: dict[int, NDArray[np.int32]] = {}  # Poisson: uploads of each training row
        self.unseen: dict[int, int] = {}  # Poisson: steps whose rows are not known, or not yet

    def _ordered(self, party: int, order: Order) -> None:
        """Count what this order asks a party for."""
        if isinstance(order, TrainOrder):
            self.steps[party] = self.steps.get(party, 0) + order.steps
            self.unseen[party] = self.unseen.get(party, 0) + order.steps
            place, last = (order.epoch, order.first), self.last.get(party, (-1, 0))
            begun = 1 if place <= last else order.epoch - last[0]
            self.passes[party] = self.passes.get(party, 0) + begun
            self.last[party] = place
        elif isinstance(order, EmbedOrder):
            queries = self.queries.setdefault(party, np.zeros(self.rows, np.int32))
            queries[order.arrays["ids"]] += 1  # ids do not repeat
        elif isinstance(order, EvaluateOrder):
            self.evaluations[party] = self.evaluations.get(party, 0) + 1

    def _received(self, party: int, window: Window) -> None:
        """Count the rows that Poisson sampling took, in the place of one a step."""
        if self.config.sampling == "poisson":
            counts = self.sampled.setdefault(party, np.zeros(self.rows, np.int32))
            counts += np.bincount(window.ids, minlength=self.rows).astype(np.int32)
            self.unseen[party] -= len(window.lengths)

    def most_uploads(self, party: int) -> int:
        """Uploads of the row that this party uploads most."""
        trained = np.full(1, self.passes.get(party, 0), np.int32)
        if self.config.sampling == "poisson":
            trained = self.sampled.get(party, np.zeros(1, np.int32)) + self.unseen.get(party, 0)
        each = 2 if self.config.estimator == "zeroth-order" else 1
        most = int((each * trained + self.queries.get(party, 0)).max())
        return max(most, self.evaluations.get(party, 0))

    def uploads(self) -> int:
        """Uploads of the most uploaded record of any party."""
        parties = {*self.passes, *self.queries, *self.evaluations}
        return max((self.most_uploads(party) for party in parties), default=0)

    def figures(self) -> dict[str, Any]:
        """Epsilon of the most uploaded record of any party, and what the paper would claim."""
        if self.config.noise_seed >= 0:
            return super().figures()
        samples = max(self.steps.values(), default=0) * self.config.batch_size
        return {
            "epsilon": epsilon(self.config, self.uploads()),
            "delta": _delta(self.config),
            "epsilon_of_paper": epsilon_of_theorem_6(self.config, self.rows, samples),
            "epsilon_protects": "features of a party's record, from the label holder's "
            + ("and the other parties' " if self.config.labels == "shared" else "")
            + "view of that record's uploads",
        }


class ScalarAccountant(Accountant):
    """Scalar noise: how many noisy scalars all parties together were sent."""

    journaled = (_ANSWERED,)

    def __init__(self, config: RunConfig, rows: int) -> None:
        super().__init__(config, rows)
        self.multiplier = 0.0
        self.released = 0
        self.taken = np.zeros(rows, np.int32)  # releases that each row was in

    def steps_allowed(self, planned: int) -> int:
        """All that are planned, where noise is calibrated to them; else what the budget allows.

        Raises
        ------
        ConfigError
            If the budget does not allow a single step.
        """
        config = self.config
        if config.noise_multiplier is None:
            calibrate = calibrated if config.calibration == "pld" else calibrated_by_paper
            self.multiplier = calibrate(config, self.rows, planned)
            return planned
        self.multiplier = config.noise_multiplier
        if config.epsilon is None:
            return planned
        allowed = most_steps(config, self.rows, self.multiplier, planned)
        if allowed == 0:
            raise ConfigError(
                f"The budget epsilon = {config.epsilon:g} is already spent: noise-multiplier = "
                f"{self.multiplier:g} spends more in one step; raise one of them."
            )
        return allowed

    def noise(self) -> ScalarNoise:
        """Clipping and noise."""
        return ScalarNoise(self.config, self.multiplier)

    def _answered(self, party: int, window: Window) -> None:
        """Count a release for each step, and the rows that were in it."""
        self.released += len(window.lengths)
        self.taken += np.bincount(window.ids, minlength=self.rows).astype(np.int32)

    def released_steps(self) -> int:
        """Scalars sent."""
        return self.released

    def figures(self) -> dict[str, Any]:
        """Epsilon as spent, the paper's, and to those who know the rows of every mini-batch."""
        figures = {**super().figures(), "noise_multiplier": self.multiplier}
        if self.config.noise_seed >= 0 or self.multiplier == 0:
            return figures
        config, sigma = self.config, self.multiplier
        most = int(self.taken.max())
        return {
            **figures,
            "epsilon": epsilon_of_scalars(config, self.rows, sigma, self.released),
            "delta": _delta(config),
            "epsilon_of_paper": epsilon_of_theorem_vi5(config, self.rows, sigma, self.released),
            "epsilon_known_batches": _epsilon(sigma / math.sqrt(most), config) if most else 0.0,
            "epsilon_protects": "a record and its label, from who sees the scalars of all parties "
            "but not which rows a mini-batch held, which parties draw honestly; not from the label "
            "holder, and not what the top model learns from labels without noise",
        }


def _events(text: bytes) -> Iterator[tuple[int, int, int, int, int, NDArray[np.int32]]]:
    """What a journal holds; the last, if it was cut short, was not released."""
    numbers = np.frombuffer(text[: len(text) // 4 * 4], "<i4")
    at = 0
    while at + 6 <= len(numbers) and at + 6 + numbers[at + 5] <= len(numbers):
        kind, party, first, second, third, rows = numbers[at : at + 6].tolist()
        yield kind, party, first, second, third, numbers[at + 6 : at + 6 + rows]
        at += 6 + rows


def accountant(config: RunConfig, rows: int) -> Accountant:
    """The accountant of a run on so many training rows."""
    kinds = {"perturbed-embedding": EmbeddingAccountant, "scalar": ScalarAccountant}
    return kinds.get(config.privacy, Accountant)(config, rows)


# --- perturbed embeddings -----------------------------------------------------------------------


def epsilon(config: RunConfig, uploads: int) -> float:
    """Epsilon at delta of a record that one party has uploaded this many times.

    Each upload is a Gaussian mechanism of sensitivity R and deviation c (a record's embedding
    against none, in its place), and k of them compose to one of deviation c / (R sqrt(k)), whose
    epsilon is exact. Sub-sampling gives nothing, since the label holder sees which rows are sent.
    """
    if uploads == 0:
        return 0.0
    return _epsilon(config.embedding_noise / (config.embedding_bound * math.sqrt(uploads)), config)


def epsilon_of_theorem_6(config: RunConfig, rows: int, samples: int) -> float:
    """What VAFL's Theorem 6 would claim, with its unstated constant taken as 1.

    Eq. (15): mu = N_m sqrt(K) / (c N) for batch size N_m, N rows and K samples processed; a mu-GDP
    mechanism is as private as a Gaussian one of deviation 1 / mu.
    """
    mu = config.batch_size * math.sqrt(samples) / (config.embedding_noise * rows)
    return _epsilon(1 / mu, config) if mu > 0 else 0.0


# --- scalar noise -------------------------------------------------------------------------------


def epsilon_of_scalars(config: RunConfig, rows: int, multiplier: float, steps: int) -> float:
    """Epsilon at delta of so many noisy scalars, each over a Poisson sample of the rows.

    By privacy loss distributions, for adding or removing one record. Every scalar of every party
    counts, since parties may put theirs together.
    """
    if steps == 0:
        return 0.0
    import dp_accounting as dp
    from dp_accounting import pld

    one = dp.GaussianDpEvent(multiplier)
    sampled = dp.PoissonSampledDpEvent(min(1.0, config.batch_size / rows), one)
    # Privacy losses grow as 1 / multiplier^2; steps that grow with them keep the work the same.
    accountant = pld.PLDAccountant(value_discretization_interval=1e-4 * max(1, multiplier**-2))
    accountant.compose(dp.SelfComposedDpEvent(sampled, steps))
    return float(accountant.get_epsilon(_delta(config)))


def calibrated(config: RunConfig, rows: int, steps: int) -> float:
    """The least noise multiplier, to 0.1 %, at which so many scalars spend at most epsilon."""
    budget = config.epsilon or math.inf

    def spent(multiplier: float) -> float:
        return epsilon_of_scalars(config, rows, multiplier, steps)

    enough = 1.0
    while spent(enough) > budget:
        enough *= 2
    too_small = enough / 2
    while spent(too_small) <= budget:  # little noise takes long to account for: approach it slowly
        enough, too_small = too_small, too_small / 1.5
    while enough / too_small > 1.001:
        middle = math.sqrt(enough * too_small)
        if spent(middle) <= budget:
            enough = middle
        else:
            too_small = middle
    return enough


def most_steps(config: RunConfig, rows: int, multiplier: float, planned: int) -> int:
    """The most scalars, up to those planned, that spend no more than epsilon."""
    budget = config.epsilon or math.inf

    def fits(steps: int) -> bool:
        return multiplier > 0 and epsilon_of_scalars(config, rows, multiplier, steps) <= budget

    fit, over = 0, 1
    while over < planned and fits(over):
        fit, over = over, 2 * over
    if over >= planned:
        if fits(planned):
            return planned
        over = planned
    while over - fit > 1:
        middle = (fit + over) // 2
        fit, over = (middle, over) if fits(middle) else (fit, middle)
    return fit


def calibrated_by_paper(config: RunConfig, rows: int, steps: int) -> float:
    """The multiplier that DPZV's Theorem VI.5 gives for epsilon, which can be far too small.

    Its sigma = 2 C sqrt(T) / (D mu) treats sub-sampling as if it scaled the mechanism's mu.
    """
    from dp_accounting import get_sigma_gaussian

    mu = 1 / float(get_sigma_gaussian(config.epsilon, config.delta))
    return 2 * config.batch_size * math.sqrt(steps) / (rows * mu)


def epsilon_of_theorem_vi5(config: RunConfig, rows: int, multiplier: float, steps: int) -> float:
    """What DPZV's Theorem VI.5 would claim for so many scalars."""
    mu = 2 * config.batch_size * math.sqrt(steps) / (rows * multiplier)
    return _epsilon(1 / mu, config) if mu > 0 else 0.0


def _delta(config: RunConfig) -> float:
    return 1e-5 if config.delta is None else config.delta


def _epsilon(noise_multiplier: float, config: RunConfig) -> float:
    from dp_accounting import get_epsilon_gaussian  # here, since parties start often and need none

    return float(get_epsilon_gaussian(noise_multiplier, _delta(config)))
