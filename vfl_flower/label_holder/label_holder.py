"""The label holder: labels, top model, and the embedding table.

Messages and waiting are the strategy's; this module is what the label holder computes between them.
What it reads of an upload, and how it answers, is the estimator's (`protocol.estimators`).
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.config.errors import DivergedError, PoisonError, SumError, VflError
from vfl_flower.config.plugins import METRICS
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data.labels import Labels
from vfl_flower.label_holder import metrics as figures
from vfl_flower.label_holder.metrics import Metrics, check_finite, metrics
from vfl_flower.label_holder.table import USUAL, Table, own_features
from vfl_flower.models import losses
from vfl_flower.models.losses import loss_of
from vfl_flower.models.tops import grow_top, load_top
from vfl_flower.models.training import (
    as_tensor,
    build_optimizer,
    choose_device,
    flat,
    load_optimizer,
    model_arrays,
    optimizer_arrays,
    trained,
)
from vfl_flower.protocol import estimators, server_update, subsets
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.batches import Window, among, join, take, uploaded
from vfl_flower.protocol.codecs.channel import digest
from vfl_flower.protocol.estimators.directions import Directions
from vfl_flower.protocol.privacy.noise import ScalarNoise
from vfl_flower.protocol.subsets import Copies
from vfl_flower.protocol.systems import sized
from vfl_flower.protocol.uploads import Arrival
from vfl_flower.transport.messages import LARGEST, Arrays, TrainOrder, Upload


class LabelHolder:
    """What the label holder knows and learns.

    Parameters
    ----------
    sizes : party -> embedding size.
    noise : what is done to scalars before they are sent, if anything.
    per_epoch : steps of the top model in an epoch.

    Raises
    ------
    ConfigError
        If the class weights do not fit the labels, or features of its own the configuration.
    """

    def __init__(
        self,
        config: RunConfig,
        labels: Labels,
        sizes: Mapping[int, int],
        noise: ScalarNoise | None = None,
        per_epoch: float = 1,
    ) -> None:
        self.config = config = sized(config, len(labels.train))
        self.noise = noise
        self.device = choose_device(config)
        self.labels = torch.from_numpy(labels.train).to(self.device)  # of the training rows
        self.test_labels = torch.from_numpy(labels.test).to(self.device)
        self.validation = labels.validation  # how many of the test rows are, the first
        self.deviation = labels.deviation  # a unit of the outputs, under regression
        # What is said of a row that nobody has. Where noise is not on labels, they would tell.
        self.prior = None if noise else labels.prior(config.privacy)
        self.loss = loss_of(config, labels.train, len(labels.classes), self.device)
        self.label_noise = labels.noise(config.privacy)
        self.subsets = config.subsets  # of which the top model learns
        alone = noise is not None
        losses.try_out(self.loss, config.models.loss, labels.outputs, self.labels[:8], alone)
        self.more = METRICS.load(config.models.metrics)
        figures.try_out(self.more, config.models.metrics, labels.outputs, self.test_labels)
        train, test = own_features(config, labels)
        self.aggregation = aggregation_of(config)
        present = self.aggregation.row_masks(labels, list(sizes))
        delay = config.schedule.max_delay
        of_train, of_test = present or (None, None)
        self.columns = self.aggregation.columns(sizes)
        self.table = Table(self.columns, train, self.device, delay, of_train)
        self.test_table = Table(self.columns, test, self.device, 0, of_test)
        self.collection = self.aggregation.collection(len(sizes))  # of test rows that have come
        self.parties = len(sizes)
        self.by_subsets = self.aggregation.any_subset  # whether figures are by subsets too
        of_parties, own = list(sizes.values()), train.shape[1]
        top = self.aggregation.build_top(of_parties, labels.outputs, own, alone)
        self.top = top.to(self.device)
        trainable = bool(trained(self.top))
        rate = config.training.server_lr
        self.optimizer = build_optimizer(config, self.top, rate, per_epoch) if trainable else None
        self.estimator = estimators.choose(config)(config)
        # The label holder's ends of the links of uploads, and of answers.
        self.uplinks = {party: self.estimator.uplinks(self.table.of(party)) for party in sizes}
        self.downlinks = {
            party: self.estimator.downlinks(*self.table.of(party).shape) for party in sizes
        }
        self.secret = secrets.token_bytes(16)  # decides zeroth-order directions of the top model
        if config.privacy.noise_seed >= 0:
            self.secret = f"{config.privacy.noise_seed} top model".encode()
        self.frozen: Collection[int] = ()  # parties whose models stay as they are
        self.drawn = 0  # how often directions were
        self.steps = 0  # label-holder steps so far: VAFL's counter k
        self.losses: list[Tensor] = []  # of steps, since the last `train_loss`
        self.best: Arrays = {}  # top model and test table at the best evaluation

    # --- uploads --------------------------------------------------------------------------------

    def receive(self, party: int, order: TrainOrder, upload: Upload) -> Arrival:
        """Check the upload that answers an order, and write it into the table.

        Raises
        ------
        VflError
            If its ids or embeddings are not what the order asked for.
        """
        rows, present = len(self.labels), self.table.present[party]
        batches, window = uploaded(self.config, rows, party, order, upload.arrays, present)
        try:
            reading = self.aggregation.read(self, party, window, upload.arrays)
        except VflError as error:
            raise VflError(f"sent an upload that cannot be used: {error}") from None
        sent = self.uplinks[party].select(upload.arrays) if self.estimator.broadcasts else {}
        return Arrival(party, window, order.coordinated, reading, batches, sent)

    def refresh(self, party: int, ids: NDArray[np.int32], upload: Upload) -> None:
        """Write a party's fresh embeddings of these rows into the table."""
        window = Window(ids, np.array([len(ids)], np.int32), distinct=True)
        try:
            links = self.estimator.fresh_links(self.uplinks[party], self.table.of(party))
            rows = links.decode(upload.arrays, window)["embedding"]
        except VflError as error:
            raise VflError(f"sent an upload that cannot be used: {error}") from None
        held = self.config.uplink.surrogates  # as these columns, which decoding has written
        self.table.write(party, window, rows, (rows,), self.steps, held)

    def too_old(
        self, arrivals: Sequence[Arrival], parties: Sequence[int]
    ) -> dict[int, NDArray[np.int32]]:
        """Rows of these arrivals whose embeddings of other parties exceed the delay bound D."""
        uploads = [(each.party, each.window) for each in arrivals if not each.coordinated]
        return self.table.too_old(uploads, parties, self.steps)

    # --- answers --------------------------------------------------------------------------------

    def opening(self) -> Arrays:
        """What goes with each party's first order."""
        return self.estimator.opening(self)

    def answer(self, arrivals: Sequence[Arrival]) -> dict[int, Arrays]:
        """Evaluate the windows of one quorum, step the top model, and return each party's feedback.

        Step j takes the j-th mini-batch of every arrival: one shared batch when they are
        coordinated (split learning), else the parties' own, one after the other (VAFL Alg. 2; with
        one arrival, Alg. 1). A party's feedback is of the mean loss of its own batch.

        Raises
        ------
        DivergedError, PoisonError
            If a loss is not finite, or a gradient not bounded; the latter names the party whose
            embeddings are the largest, if they are such that they can have done it. The table
            knows nothing of it then, and if a run can go on without it, the top model is as it was.
        """
        if self.aggregation.waits:
            arrivals = self.aggregation.complete(self, arrivals)
        coordinated = arrivals[0].coordinated
        batches = [each.batches for each in arrivals[: 1 if coordinated else None]]
        joint = join(self.config, len(self.labels), batches)
        if coordinated and any(each.window is not each.batches for each in arrivals):
            places = [among(each.window, each.batches) for each in arrivals]
            joint = replace(joint, places=places)
        before = self._top_state() if self.config.running.on_party_failure == "continue" else {}
        try:
            answers = self.estimator.answer(self, arrivals, joint)
            return self.estimator.encode(self, arrivals, answers)
        except DivergedError:
            if before:
                self._load_top(before)
            self._refuse_largest(arrivals)
            raise

    def silent(self, arrivals: Sequence[Arrival]) -> dict[int, Arrays]:
        """Answers that say nothing, and nothing is learned from."""
        answers = {arrival.party: self.estimator.silence(arrival) for arrival in arrivals}
        return self.estimator.encode(self, arrivals, answers)

    def _refuse_largest(self, arrivals: Sequence[Arrival] = ()) -> None:
        """Raise `PoisonError` of the party with the largest embeddings, if they are unusual."""
        if self.aggregation.waits:  # nobody knows which party they came from
            return
        party, peak = self.table.largest({m.party: m.reading.embeddings for m in arrivals})
        if peak > USUAL:
            self.table.forget(party)
            raise PoisonError(
                party,
                f"sent embeddings of up to {peak:,.0f}, by which the loss is no longer finite: "
                "lower the learning rates, or see to that party.",
            ) from None

    def learn(self, window: Window) -> None:
        """Step the top model on a window, by what the table holds; nobody is answered."""
        h, labels = self.gather(window)
        joint = join(self.config, len(self.labels), [window])
        lengths, divided = window.lengths.tolist(), joint.divisors.tolist()
        try:
            self.count(self.step(h, labels, lengths, divided, gradients=False)[1])
        except DivergedError:
            self._refuse_largest()
            raise

    def gather(self, window: Window) -> tuple[Tensor, Tensor]:
        """The window's rows of the table, as `TopModel` reads them, and its labels."""
        return take(self.table.rows, window), take(self.labels, window)

    def step(
        self, h: Tensor, labels: Tensor, lengths: list[int], divisors: list[int], gradients: bool
    ) -> tuple[Tensor | None, Tensor]:
        """Step the top model once a mini-batch; gradient rows, if wanted, and losses [S].

        Raises
        ------
        DivergedError
            If gradient rows are such as no party would take.
        """
        rows: Tensor | None = None
        copies = self.copies(h, lengths)
        batches = h, labels, lengths, divisors
        if self.config.estimator.server_update == "first-order":
            rows, losses = server_update.by_gradient(
                *(self.top, self.optimizer, *batches, gradients),
                *(self.loss, self.noise_of_top, self.key, self.steps, copies),
            )
        else:
            if gradients:
                rows, _ = server_update.by_gradient(
                    *(self.top, None, *batches, True, self.loss, None, self.key, 0, copies),
                )
            losses = server_update.by_differences(
                *(self.directions(), self.top, self.optimizer, *batches),
                *(self.loss, self.noise_of_top, self.steps, copies),
            )
        if rows is not None and not (rows.abs() <= LARGEST).all():
            raise DivergedError
        return rows, losses

    def copies(self, h: Tensor, lengths: list[int], step: int | None = None) -> Copies | None:
        """The rows with subsets of their parties, if the top model is to learn from these.

        ``step`` : by whose number subsets are drawn; without it, that of the next step.
        """
        if self.subsets == "off":
            return None
        least = int(self.top.own is None)
        key = [self.config.training.seed, 8, self.steps if step is None else step]
        return subsets.copies(self.subsets, h, lengths, self.parties, least, key)

    def directions(self) -> Directions:
        """New directions of the top model."""
        self.drawn += 1
        key = self.secret + f"|{self.drawn}".encode()
        return Directions(self.config.estimator, key, self.top)

    @property
    def key(self) -> bytes:
        """What is random in the top model's next passes follows from it."""
        return f"{self.config.training.seed}|top model|{self.steps}".encode()

    @property
    def noise_of_top(self) -> ScalarNoise | None:
        """What is done to the steps of the top model, if anything."""
        return self.noise if self.noise and self.noise.of_top else None

    def count(self, losses: Tensor) -> None:
        """Count steps of the top model, whose losses are to be finite.

        Where noise hides labels, it is the model that is to be: by whether a loss is finite, one
        label would decide if the run goes on.
        """
        check_finite(flat(self.top) if self.noise else losses)
        self.steps += len(losses)
        self.losses.append(losses)

    def train_loss(self) -> float | None:
        """Mean loss of the steps since the last call, if there were any, as it is minimised.

        Class weights are in it.
        """
        if not self.losses:
            return None
        mean = torch.cat(self.losses).mean().item()
        self.losses.clear()
        return mean

    # --- evaluation -----------------------------------------------------------------------------

    def receive_test(self, party: int, digest: str, upload: Upload) -> None:
        """Check a party's embeddings of the test rows, and write them into the test table.

        ``digest`` is what its surrogates' must be: `digest_for` when it was asked.
        """
        table, held = self.test_table.of(party), self.test_table.present[party]
        rows = len(table) if held is None else int(held.sum())
        try:
            new = self.collection.add(party, upload.arrays, (rows, table.shape[1]))
            if new is not None:
                at = slice(None) if held is None else torch.from_numpy(held)
                table[at] = new.to(self.device)
        except SumError:
            raise
        except VflError as error:
            raise VflError(f"sent an upload that cannot be used: {error}") from None
        if digest != upload.surrogates:
            raise VflError("keeps other surrogates than the label holder: start the run again.")

    @torch.no_grad()
    def evaluate(self) -> tuple[Metrics | None, Metrics]:
        """The model on the validation rows, if there are, and on the test rows.

        It is by the latest embeddings of every party.
        """
        self.top.eval()
        outputs, first = self.top(self.test_table.rows), self.validation
        given = self.test_labels[first:], self.deviation
        validation = self._validated(outputs[:first]) if first else None
        test = metrics(outputs[first:], *given, self.loss.own, self.more)
        if self.by_subsets:
            test = replace(test, subsets=figures.by_subset(self._by, self._test_present, *given))
        self.top.train()
        return validation, test

    def _validated(self, outputs: Tensor) -> Metrics:
        """The model on the validation rows, of which it makes these outputs by all their parties.

        The loss is that of training: with class weights, with correction for noise on labels, and
        over subsets of each row's parties. Every evaluation has the same subsets, so that epochs
        differ by their models alone. Other figures are corrected for noise, too.
        """
        first = self.validation
        h, labels = self.test_table.rows[:first], self.test_labels[:first]
        copies = self.copies(h, [first], step=0)
        said = outputs if copies is None else self.top(copies.h)
        losses = subsets.row_losses(self.loss, said, labels, copies)
        found = metrics(outputs, labels, self.deviation, self.loss.own)
        check_finite(loss := losses.mean())
        found = replace(found, loss=loss.item())
        return figures.corrected(found, outputs, labels, self.label_noise)

    @property
    def _test_present(self) -> Tensor:
        """Who has which test row, [R, M]."""
        rows = self.test_table.rows[self.validation :]
        return rows[:, rows.shape[1] - self.parties :]

    def _by(self, used: Tensor) -> Tensor:
        """Outputs for the test rows, [R, C], by the parties for which ``used`` is 1, [R, M]."""
        rows = self.test_table.rows[self.validation :]
        outputs: Tensor = self.top(torch.cat([rows[:, : rows.shape[1] - self.parties], used], 1))
        return outputs

    def remember(self) -> None:
        """Keep a copy of what this evaluation was of: none was better."""
        top = {f"top.{name}": each.copy() for name, each in model_arrays(self.top).items()}
        self.best = {"rows": self.test_table.state()["rows"].copy(), **top}

    def restore(self) -> None:
        """Have the top model, and the embeddings of test rows, of the best evaluation."""
        self.test_table.go_on_from(self.best)
        load_top(self.config, self.top, of_group("top", self.best))

    # --- parties that come back -----------------------------------------------------------------

    def digest_for(self, party: int) -> str:
        """The digest of all surrogates that a party should have now, in the order of its links."""
        return digest(self.estimator.compared(self, party))

    def surrogate_of(self, party: int) -> Arrays:
        """The copy that a party needs which comes back; empty without error feedback."""
        if not self.config.uplink.surrogates:
            return {}
        return {"embedding": self.table.of(party).cpu().contiguous().numpy()}

    def rejoined(self, party: int) -> None:
        """A party has come back, with its surrogates as they are here."""
        for _, surrogate in self.downlinks[party].with_surrogates():
            surrogate.zero_()

    # --- checkpoints ----------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """All that the label holder must keep to go on: scalars, and arrays.

        Secrets are not in it: after an interruption noise and directions are drawn anew, unless
        they are to be repeatable.
        """
        scalars = {
            "steps": self.steps,
            "drawn": self.drawn,
            "noises": self.noise.drawn if self.noise else 0,
            "sizes": [each.stop - each.start for each in self.columns.values()],
            "prior": self.prior,
            "frozen": sorted(self.frozen),
        }
        losses = torch.cat([torch.zeros(0), *(each.cpu() for each in self.losses)])
        groups = {
            "table": self.table.state(),
            "test_table": self.test_table.state(),
            **self._top_arrays(),
            "link": {name: each.cpu().numpy() for name, each in self._surrogates_of_answers()},
            "best": self.best,
        }
        arrays = {
            f"{group}.{name}": each for group, of in groups.items() for name, each in of.items()
        }
        return scalars, {"losses": losses.numpy(), **arrays}

    def go_on_from(self, scalars: dict[str, Any], arrays: Arrays) -> None:
        """Take over what `state` gave."""
        self.steps, self.drawn = scalars["steps"], scalars["drawn"]
        self.frozen = scalars["frozen"]
        if self.noise:
            self.noise.drawn = scalars["noises"]
        self.table.go_on_from(of_group("table", arrays))
        self.test_table.go_on_from(of_group("test_table", arrays))
        self.losses = [as_tensor(arrays["losses"]).to(self.device)]
        self.best = of_group("best", arrays)
        self._load_top({group: of_group(group, arrays) for group in ("top", "optimizer")})
        for name, surrogate in self._surrogates_of_answers():
            surrogate.copy_(as_tensor(arrays[f"link.{name}"]))

    def begin_by(self, config: RunConfig, scalars: dict[str, Any], arrays: Arrays) -> None:
        """Begin by the top model of an earlier run, so configured, of which `state` gave these."""
        sizes: list[int] = scalars["sizes"]
        then = aggregation_of(config).tops[0]
        grow_top(self.config, self.top, of_group("top", arrays), sizes, then)
        if self.config.training.freeze:
            self.frozen = range(len(sizes))

    def _top_arrays(self) -> dict[str, Arrays]:
        """The top model and its optimizer, which go on using this memory."""
        optimizer = optimizer_arrays(self.optimizer) if self.optimizer else {}
        return {"top": model_arrays(self.top), "optimizer": optimizer}

    def _top_state(self) -> dict[str, Arrays]:
        """A copy of them."""
        groups = self._top_arrays()
        return {group: {k: v.copy() for k, v in of.items()} for group, of in groups.items()}

    def _load_top(self, groups: dict[str, Arrays]) -> None:
        """Take over what `_top_arrays` gave."""
        load_top(self.config, self.top, groups["top"])
        if self.optimizer:
            load_optimizer(self.optimizer, groups["optimizer"])

    def _surrogates_of_answers(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the surrogates outside the table, by the names under which they are saved."""
        yield from self.estimator.links_of_all(self).with_surrogates()
        for party, links in self.downlinks.items():
            for name, surrogate in links.with_surrogates():
                yield f"{name}.{party}", surrogate


def of_group(group: str, arrays: Arrays) -> Arrays:
    """Those arrays of `LabelHolder.state` that are of a group, by their names in it."""
    prefix = f"{group}."
    return {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}
