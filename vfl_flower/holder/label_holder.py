"""The label holder: labels, top model, and the embedding table.

The table holds the latest embedding that the label holder knows of every (training row, party),
stale or not, side by side: [N, E_1 + ... + E_M]; zero until the first upload. With error feedback
it is the label holder's copy of the parties' surrogates. To their right stand the features of the
label holder's own, if it has any, [N, F]: it is as a party whose embedding, never sent, is always
fresh, by a bottom model that is trained as part of the top model. Messages and waiting are the
strategy's; this module is what the label holder computes between them.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vfl_flower.axes import codecs
from vfl_flower.axes.batches import Window, divisors, draw_window, put, take
from vfl_flower.axes.estimators import first_order, zeroth_order
from vfl_flower.axes.privacy import ScalarNoise
from vfl_flower.config import RunConfig
from vfl_flower.data.sources import Labels, class_weights
from vfl_flower.errors import ConfigError, VflError
from vfl_flower.models import (
    BLACK_BOXES,
    as_tensor,
    build_optimizer,
    build_top,
    choose_device,
    count,
    flat,
    load_model,
    load_optimizer,
    mean_loss,
    model_arrays,
    optimizer_arrays,
)
from vfl_flower.records import Arrays, TrainOrder, Upload, checked


@dataclass(frozen=True)
class Arrival:
    """A party's upload of one window, now in the table."""

    party: int
    window: Window
    coordinated: bool
    pair: tuple[Tensor, Tensor] | None = None  # of embeddings [R, E], under zeroth order
    sent: Arrays = field(default_factory=dict)  # as it came, to be sent on with shared labels


@dataclass(frozen=True)
class Batches:
    """The rows that S steps of the top model use, those of step 0 first.

    ``divisors`` is what each step's sum over rows is divided by. ``places`` says where each
    arrival's rows are, in its own order; empty if all have the same.
    """

    h: Tensor
    labels: Tensor
    lengths: NDArray[Any]
    divisors: NDArray[Any]
    places: list[NDArray[np.int64]]


@dataclass(frozen=True)
class Metrics:
    """How the model does on the test rows; what does not apply is none.

    ``loss`` is the mean without class weights, to compare with runs that have others; ``auc`` is
    for two classes. Under regression ``rmse`` is in units of the labels, and ``r2`` the share of
    the test labels' variance explained, in place of accuracy.
    """

    loss: float
    accuracy: float | None = None
    auc: float | None = None
    rmse: float | None = None
    r2: float | None = None


def metrics(outputs: Tensor, labels: Tensor, deviation: float) -> Metrics:
    """How outputs [R, C] do as predictions of labels [R]; ``deviation`` is a unit of regression."""
    mean = mean_loss(outputs, labels)
    _check_finite(mean)
    loss = mean.item()
    if labels.is_floating_point():
        error = (outputs[:, 0] - labels).double().square().mean()
        variance = labels.double().var(correction=0)
        r2 = (1 - error / variance).item() if variance > 0 else None
        return Metrics(loss, rmse=deviation * error.sqrt().item(), r2=r2)
    if outputs.shape[1] > 1:
        return Metrics(loss, (outputs.argmax(1) == labels).float().mean().item())
    from sklearn.metrics import roc_auc_score  # here, since a party imports this module too

    hits = (outputs[:, 0] > 0).long() == labels
    both = 0 < labels.sum() < len(labels)
    auc = roc_auc_score(labels.cpu(), outputs[:, 0].cpu()) if both else None
    return Metrics(loss, hits.float().mean().item(), auc)


class LabelHolder:
    """What the label holder knows and learns.

    Parameters
    ----------
    sizes : party -> embedding size.
    noise : what is done to scalars before they are sent, if anything.

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
    ) -> None:
        self.config = config
        self.noise = noise
        self.device = choose_device(config)
        self.train_labels = torch.from_numpy(labels.train).to(self.device)
        self.test_labels = torch.from_numpy(labels.test).to(self.device)
        self.deviation = labels.deviation  # a unit of the outputs, under regression
        weights = class_weights(config, labels.train, len(labels.classes))
        self.class_weights = None if weights is None else torch.from_numpy(weights).to(self.device)
        ends = np.cumsum(list(sizes.values())).tolist()
        self.columns = {
            party: slice(end - size, end)
            for (party, size), end in zip(sizes.items(), ends, strict=True)
        }
        received = sum(sizes.values())
        features = _own_features(config, labels)
        self.own = slice(received, received + features[0].shape[1])  # columns of its own features
        self.table = torch.zeros(len(labels.train), self.own.stop, device=self.device)
        self.test_table = torch.zeros(len(labels.test), self.own.stop, device=self.device)
        for table, own in zip((self.table, self.test_table), features, strict=True):
            table[:, self.own] = torch.from_numpy(own)
        own_columns = self.own.stop - self.own.start
        top = build_top(config, list(sizes.values()), labels.outputs, own_columns)
        self.top = top.to(self.device)
        trainable = any(True for _ in self.top.parameters())
        self.optimizer = build_optimizer(config, self.top, config.server_lr) if trainable else None
        rows = len(labels.train)
        shared = config.labels == "shared"
        # This end of the parties' links.
        self.uplinks = {
            party: codecs.uplink(config, self.table[:, columns])
            for party, columns in self.columns.items()
        }
        self.changes = codecs.changes(config)
        self.gradients = {
            party: codecs.downlink(config, codecs.zeros((rows, size)))
            for party, size in sizes.items()
            if not shared
        }
        self.top_link = codecs.downlink(config, codecs.zeros((1, count(self.top))))
        self.secret = secrets.token_bytes(16)  # decides zeroth-order directions of the top model
        if config.noise_seed >= 0:
            self.secret = f"{config.noise_seed} top model".encode()
        self.drawn = 0  # how often directions were
        self.steps = 0  # label-holder steps so far: VAFL's counter k
        self.losses: list[Tensor] = []  # of steps, since the last `train_loss`
        # By party: the step at which each row's entry was written, -1 for never (delay bound).
        self.written = (
            {party: np.full(rows, -1, np.int64) for party in sizes} if config.max_delay else {}
        )

    # --- training -------------------------------------------------------------------------------

    def receive(self, party: int, order: TrainOrder, upload: Upload) -> Arrival:
        """Check the upload that answers an order, and write it into the table.

        Raises
        ------
        VflError
            If its ids or embeddings are not what the order asked for.
        """
        owner = None if order.coordinated else party
        rows = len(self.train_labels)
        if order.coordinated or self.config.sampling == "shuffle":
            window = draw_window(self.config, rows, owner, order.epoch, order.first, order.steps)
            if not order.coordinated:
                self._check_ids(upload, window.ids)
        else:
            window = self._read_window(upload, order.steps)
        if self.config.estimator == "first-order":
            self._write(party, window, self._decoded(party, upload, window, "embedding"))
            shared = self.config.labels == "shared"
            names = self.uplinks[party].codec.names("embedding") if shared else ()
            sent = {name: upload.arrays[name] for name in names}
            return Arrival(party, window, order.coordinated, sent=sent)
        first, second = (
            self._decoded(party, upload, window, name)
            for name in zeroth_order.block_names(self.config)
        )
        pair = zeroth_order.pair_of(self.config, first, second)
        self._write(party, window, zeroth_order.fresh(self.config, pair))
        return Arrival(party, window, order.coordinated, pair)

    def refresh(self, party: int, ids: NDArray[np.int32], upload: Upload) -> None:
        """Write a party's fresh embeddings of these rows into the table."""
        window = Window(ids, np.array([len(ids)], np.int32))
        self._write(party, window, self._decoded(party, upload, window, "embedding"))

    def rejoined(self, party: int) -> None:
        """A party has come back, with its surrogates as they are here."""
        link = self.gradients.get(party)
        if link is not None and link.surrogate is not None:
            link.surrogate.zero_()

    def surrogate_of(self, party: int) -> Arrays:
        """The copy that a party needs which comes back; empty without error feedback."""
        known = self.uplinks[party].surrogate
        return {} if known is None else {"embedding": known.cpu().contiguous().numpy()}

    def shared_labels(self) -> Arrays:
        """The training labels, for the parties, if they are to know them."""
        if self.config.labels == "private":
            return {}
        labels = self.train_labels.cpu().numpy()
        return {"labels": labels.astype(np.min_scalar_type(labels.max()))}

    def _write(self, party: int, window: Window, embeddings: Tensor) -> None:
        if self.uplinks[party].surrogate is None:  # which else is these columns, already written
            put(self.config, self.table[:, self.columns[party]], window, embeddings)
        if self.config.max_delay:
            self.written[party][window.ids] = self.steps

    def too_old(
        self, arrivals: Sequence[Arrival], parties: Sequence[int]
    ) -> dict[int, NDArray[np.int32]]:
        """Rows of these arrivals whose embeddings of other parties exceed the delay bound D."""
        if not self.config.max_delay or arrivals[0].coordinated:
            return {}
        late: dict[int, list[NDArray[np.int32]]] = {}
        for arrival in arrivals:
            ids, lengths = arrival.window.ids, arrival.window.lengths
            used_at = self.steps + np.repeat(np.arange(len(lengths)), lengths)
            for party in set(parties) - {arrival.party}:
                written = self.written[party][ids]
                old = (written < 0) | (used_at - written > self.config.max_delay)
                if old.any():
                    late.setdefault(party, []).append(ids[old])
        return {party: np.unique(np.concatenate(ids)) for party, ids in late.items()}

    def answer(self, arrivals: Sequence[Arrival]) -> dict[int, Arrays]:
        """Evaluate the windows of one quorum, step the top model, and return each party's feedback.

        Step j takes the j-th mini-batch of every arrival: one shared batch when they are
        coordinated (split learning), else the parties' own, one after the other (VAFL Alg. 2; with
        one arrival, Alg. 1). A party's feedback is of the mean loss of its own batch: gradient
        rows, each step's at the top model that the last one left; or scalar differences, at the top
        model that the window met. With shared labels it is the other parties' uploads, as they
        came, and the top model that each step met.
        """
        if self.config.labels == "shared":
            return self._broadcast(arrivals, self._learn_step_by_step(arrivals))
        feedback: dict[int, Arrays] = {}
        for arrival in arrivals:
            if arrival.pair is not None:
                feedback[arrival.party] = {"difference": self._differences(arrival, arrival.pair)}
        rows, batches = self.learn(arrivals)
        if rows is not None:
            for number, arrival in enumerate(arrivals):
                mine = self._gradient_rows(arrival, batches, number, rows)
                link, window = self.gradients[arrival.party], arrival.window
                key = f"{self.config.seed}|down|{arrival.party}|{self.steps}"
                sent = link.send("gradient", mine, window, key)
                feedback[arrival.party] = sent
        return feedback

    def _broadcast(self, arrivals: Sequence[Arrival], tops: Tensor) -> dict[int, Arrays]:
        """EF-VFL Alg. 1 line 4: to each party the others' uploads, and each step's top model."""
        key = f"{self.config.seed}|down|{self.steps}"
        top: Arrays = {}
        if self.optimizer:
            top = self.top_link.send("top", tops, codecs.top_window(len(tops)), key)
        uploads = {a.party: codecs.for_party(a.party, a.sent) for a in arrivals}
        feedback: dict[int, Arrays] = {}
        for party in uploads:
            feedback[party] = dict(top)
            for other in uploads.keys() - {party}:
                feedback[party].update(uploads[other])
        return feedback

    def learn(self, arrivals: Sequence[Arrival]) -> tuple[Tensor | None, Batches]:
        """Step the top model once a mini-batch; under first order, also the gradient rows."""
        batches = self._gather(arrivals)
        lengths, divided = batches.lengths.tolist(), batches.divisors.tolist()
        rows, losses = self._evaluated(batches.h, batches.labels, lengths, divided)
        self._count(losses)
        return rows, batches

    def _learn_step_by_step(self, arrivals: Sequence[Arrival]) -> Tensor:
        """Q steps of the top model on each mini-batch; its parameters before each, [S, d_0]."""
        batches = self._gather(arrivals)
        lengths, divided = batches.lengths.tolist(), batches.divisors.tolist()
        tops, losses = [], []
        for h, labels, length, divisor in zip(
            batches.h.split(lengths), batches.labels.split(lengths), lengths, divided, strict=True
        ):
            tops.append(flat(self.top))
            steps = [
                self._evaluated(h, labels, [length], [divisor])[1]
                for _ in range(self.config.local_steps)
            ]
            losses.append(steps[0])
        self._count(torch.cat(losses))
        return torch.stack(tops)

    def _count(self, losses: Tensor) -> None:
        _check_finite(losses)
        self.steps += len(losses)
        self.losses.append(losses)

    def _evaluated(
        self, h: Tensor, labels: Tensor, lengths: list[int], divided: list[int]
    ) -> tuple[Tensor | None, Tensor]:
        """Gradient rows, if parties need them, and losses; the top model has stepped."""
        evaluated = h, labels, lengths, divided
        wanted = self.config.estimator == "first-order" and self.config.labels == "private"
        first_order_server = self.config.server_update == "first-order"
        rows: Tensor | None = None
        if wanted or first_order_server:
            optimizer = self.optimizer if first_order_server else None
            rows, losses = first_order.answer(
                self.top, optimizer, *evaluated, wanted, self.class_weights
            )
        if not first_order_server:
            self.drawn += 1
            key = self.secret + f"|{self.drawn}".encode()
            losses = zeroth_order.step_top(
                self.config, self.top, self.optimizer, *evaluated, key, self.class_weights
            )
        return rows if wanted else None, losses

    def _gather(self, arrivals: Sequence[Arrival]) -> Batches:
        """The rows of these arrivals' windows, step by step."""
        windows = [arrivals[0].window] if arrivals[0].coordinated else [a.window for a in arrivals]
        if len(windows) == 1:
            window = windows[0]
            h, labels = take(self.table, window), take(self.train_labels, window)
            return Batches(h, labels, window.lengths, divisors(self.config, window.lengths), [])
        step_of = np.concatenate([np.repeat(np.arange(len(w.lengths)), w.lengths) for w in windows])
        by_step = np.argsort(step_of, kind="stable")  # all rows of step 0 first
        steps = max(len(window.lengths) for window in windows)
        divided = np.zeros(steps, np.int64)
        for window in windows:
            divided[: len(window.lengths)] += divisors(self.config, window.lengths)
        ids = np.concatenate([window.ids for window in windows])
        rows = torch.from_numpy(ids[by_step]).to(self.device)
        starts = np.cumsum([len(window.ids) for window in windows])[:-1]
        return Batches(
            self.table.index_select(0, rows),
            self.train_labels.index_select(0, rows),
            np.bincount(step_of, minlength=steps),
            divided,
            np.split(np.argsort(by_step), starts),
        )

    def _gradient_rows(
        self, arrival: Arrival, batches: Batches, number: int, rows: Tensor
    ) -> Tensor:
        """A party's columns of its own rows, in its own order, of a mean over its own batch."""
        mine = rows[:, self.columns[arrival.party]]
        if not batches.places:
            return mine
        lengths = arrival.window.lengths
        own = divisors(self.config, lengths)
        scale = np.repeat(batches.divisors[: len(own)] / own, lengths).astype(np.float32)
        mine = mine[torch.from_numpy(batches.places[number]).to(self.device)]
        return mine * torch.from_numpy(scale).to(self.device)[:, None]

    def _differences(self, arrival: Arrival, pair: tuple[Tensor, Tensor]) -> NDArray[np.float32]:
        """One scalar a step, [S]: the loss difference of a pair, over its distance."""
        window = arrival.window
        rows = torch.from_numpy(window.ids).to(self.device)
        differences = zeroth_order.answer(
            self.config,
            self.top,
            self.table.index_select(0, rows),
            self.columns[arrival.party],
            pair,
            self.train_labels.index_select(0, rows),
            window.lengths.tolist(),
            divisors(self.config, window.lengths).tolist(),
            self.noise,
            self.class_weights,
        )
        array: NDArray[np.float32] = differences.cpu().numpy()
        return array

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
        columns = self.columns[party]
        shape = len(self.test_labels), columns.stop - columns.start
        embeddings = as_tensor(self._checked(upload, "embedding", shape, "float32"))
        self.test_table[:, columns] = embeddings.to(self.device)
        if digest != upload.surrogates:
            raise VflError("keeps other surrogates than the label holder: start the run again.")

    def digest_for(self, party: int) -> str:
        """The digest of all surrogates that a party should have now, in the order of its links."""
        links = [self.uplinks[party]]
        if self.config.labels == "private":
            links.append(self.gradients[party])
        else:
            links += [link for other, link in self.uplinks.items() if other != party]
            links.append(self.top_link)
        return codecs.digest(links)

    @torch.no_grad()
    def evaluate(self) -> Metrics:
        """The model on the test rows, by the latest embeddings of every party."""
        return metrics(self.top(self.test_table), self.test_labels, self.deviation)

    # --- checkpoints ----------------------------------------------------------------------------

    def state(self) -> tuple[dict[str, Any], Arrays]:
        """All that the label holder must keep to go on: scalars, and arrays.

        Secrets are not in it: after an interruption noise and directions are drawn anew, unless
        they are to be repeatable.
        """
        scalars = {
            "steps": self.steps,
            "drawn": self.drawn,
            "noises": self.noise.sent if self.noise else 0,
        }
        arrays: Arrays = {
            "table": self.table[:, : self.own.start].cpu().numpy(),
            "test_table": self.test_table[:, : self.own.start].cpu().numpy(),
            "losses": torch.cat([torch.zeros(0), *(each.cpu() for each in self.losses)]).numpy(),
        }
        arrays.update({f"top.{name}": each for name, each in model_arrays(self.top).items()})
        if self.optimizer:
            of_optimizer = optimizer_arrays(self.optimizer)
            arrays.update({f"optimizer.{name}": each for name, each in of_optimizer.items()})
        for party, rows in self.written.items():
            arrays[f"written.{party}"] = rows
        for name, link in self._other_links():
            if link.surrogate is not None:
                arrays[name] = link.surrogate.cpu().numpy()
        return scalars, arrays

    def go_on_from(self, scalars: dict[str, Any], arrays: Arrays) -> None:
        """Take over what `state` gave."""
        self.steps, self.drawn = scalars["steps"], scalars["drawn"]
        if self.noise:
            self.noise.sent = scalars["noises"]
        for name, table in (("table", self.table), ("test_table", self.test_table)):
            table[:, : self.own.start] = as_tensor(arrays[name]).to(self.device)
        self.losses = [as_tensor(arrays["losses"]).to(self.device)]
        load_model(self.top, of_group("top.", arrays))
        if self.optimizer:
            load_optimizer(self.optimizer, of_group("optimizer.", arrays))
        for party in self.written:
            self.written[party][:] = arrays[f"written.{party}"]
        for name, link in self._other_links():
            if link.surrogate is not None:
                link.surrogate.copy_(as_tensor(arrays[name]))

    def _other_links(self) -> Iterator[tuple[str, codecs.Channel]]:
        """The links whose surrogates are not in the table."""
        yield "top_link", self.top_link
        for party, link in self.gradients.items():
            yield f"gradient.{party}", link

    # --- checks ---------------------------------------------------------------------------------

    def _decoded(self, party: int, upload: Upload, window: Window, name: str) -> Tensor:
        columns = self.columns[party]
        link = self.uplinks[party] if name == "embedding" else self.changes
        width = columns.stop - columns.start
        try:
            rows = link.receive(name, upload.arrays, window, width)
            return rows.to(self.device)
        except VflError as error:
            raise VflError(f"sent an upload that cannot be used: {error}") from None

    def _check_ids(self, upload: Upload, expected: NDArray[np.int32]) -> None:
        ids = self._checked(upload, "ids", expected.shape)
        if not np.array_equal(ids, expected):
            raise VflError(
                "sent sample ids that are not those of its mini-batches: another party's, or "
                "another run's."
            )

    def _read_window(self, upload: Upload, steps: int) -> Window:
        """The mini-batches that a party has drawn in secret."""
        rows = len(self.train_labels)
        lengths = self._checked(upload, "lengths", (steps,))
        if lengths.min() < 0 or lengths.max() > rows:
            raise VflError(f"sent mini-batches of {lengths.min()} to {lengths.max()} rows.")
        ids = self._checked(upload, "ids", (int(lengths.sum(dtype=np.int64)),))
        if len(ids) and not (ids.min() >= 0 and ids.max() < rows):
            raise VflError("sent sample ids out of range.")
        places = np.repeat(np.arange(steps), lengths) * rows + ids  # one number for (step, row)
        if len(np.unique(places)) < len(places):
            raise VflError("sent a mini-batch in which a row occurs more than once.")
        return Window(ids, lengths)

    def _checked(
        self, upload: Upload, name: str, shape: tuple[int, ...], dtype: str = "int32"
    ) -> NDArray[Any]:
        try:
            array: NDArray[Any] = checked(upload.arrays, name, dtype, shape)
        except VflError as error:
            raise VflError(f"sent an upload that cannot be used: {error}") from None
        return array


def of_group(prefix: str, arrays: Arrays) -> Arrays:
    """Those arrays of `LabelHolder.state` whose names begin so, without that."""
    return {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}


def _check_finite(losses: Tensor) -> None:
    if not torch.isfinite(losses).all():
        raise VflError("The loss is no longer finite: lower the learning rates.")


def _own_features(config: RunConfig, labels: Labels) -> tuple[NDArray[Any], NDArray[Any]]:
    """The label holder's own columns, of training and test rows; none are [rows, 0]."""
    if labels.features is None:
        return np.zeros((len(labels.train), 0), np.float32), np.zeros(
            (len(labels.test), 0), np.float32
        )
    if config.labels == "shared":
        raise ConfigError(
            "labels = 'shared' sends the top model to the parties, and with it what the label "
            "holder's own columns have taught: set columns = 'none', or leave labels out."
        )
    if config.bottom_model in BLACK_BOXES and config.server_update == "first-order":
        raise ConfigError(
            f"bottom-model = {config.bottom_model!r} has no gradient, which server-update = "
            "'first-order' needs of the label holder's own columns: set server-update = "
            "'zeroth-order', or columns = 'none'."
        )
    return labels.features
