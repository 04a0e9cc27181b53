"""Attack explanations in the privacy audit: columns at the label holder, labels at a party.

The label holder has embeddings of each test row as it is, and with one feature permuted. Their
difference depends on that feature far more than the embedding does. A party that cheats uploads
embeddings of its choice in place of permuted rows, so that its figures depend on few labels.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from sklearn.metrics import roc_auc_score

from vfl_attacks.clients import Ids, Rows
from vfl_attacks.features import explained, reconstruct, split
from vfl_attacks.labels import Finding
from vfl_flower import client_app
from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.data import samples
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_features
from vfl_flower.launch.engines import explain_local
from vfl_flower.protocol.aggregation.masks import from_fixed
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.tasks.inference import explain as at_label_holder
from vfl_flower.tasks.inference.party import explain
from vfl_flower.tasks.inference.party.explain import Explanation
from vfl_flower.tasks.inference.party.features import features_of
from vfl_flower.tasks.inference.told_figures import EPSILON, Noise
from vfl_flower.transport import explain_messages
from vfl_flower.transport.node import index_and_parties
from vfl_flower.transport.wire import read_order, read_reply, to_reply

_FEATURES = 8  # of party 0, whose columns are reconstructed
_QUERIES = 40  # rows whose labels a party asks for, at least; each takes a figure
DELTA = 1e-5
_ZEROS = 4  # numbers at the end of a masked block


class Tap(ClientApp):
    """Reads the uploads of an explanation, as the label holder does.

    They are of party 0, or masked uploads of all parties. Their order is None for rows as they are,
    else (first, count, start, stop).
    """

    def __init__(self) -> None:
        super().__init__()
        self.uploads: dict[Any, list[Any]] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the reply of the parties' ClientApp, after reading it."""
        kind, key = message.metadata.message_type, None
        party, parties = index_and_parties(context)
        if kind == explain_messages.FiguresOrder.kind:
            return to_reply(explain_messages.Noted(party=party, parties=parties), message)
        reply: Message = client_app.app(message, context)
        if kind == explain_messages.ExplainOrder.kind:
            block: Any = read_reply(reply, explain_messages.Explained).arrays["embedding"]
        elif kind == explain_messages.PermuteOrder.kind:
            order = read_order(message, explain_messages.PermuteOrder)
            if order.party:
                return reply
            block = read_reply(reply, explain_messages.Permuted).arrays["embedding"]
            key = order.first, order.count, order.start, order.stop
        else:
            return reply
        if party == 0 or block.dtype == np.int32:
            self.uploads.setdefault(key, []).append(block)
        return reply

    def read(self, width: int) -> tuple[Rows, Rows]:
        """Return embeddings [n, E] of the rows, and [features, n, E] of permuted rows; or sums."""
        found = {key: self._read(blocks, width) for key, blocks in self.uploads.items()}
        plain = found.pop(None)
        features = max(first + count for first, count, *_ in found)
        permuted = np.zeros((features, *plain.shape), np.float32)
        for (first, count, start, stop), block in found.items():
            permuted[first : first + count, start:stop] = block.reshape(count, -1, width)
        return plain, permuted

    @staticmethod
    def _read(blocks: list[Any], width: int) -> Rows:
        if blocks[0].dtype != np.int32:
            return blocks[0]
        total: Any = np.sum(blocks, 0, dtype=np.int32)
        return from_fixed(total[:-_ZEROS], len(blocks)).reshape(-1, width)


class Cheat(ClientApp):
    """A party 0 that moves rows of its choice, for each feature, in place of permuting it.

    It moves them from known rows of other classes towards known rows of the second class.
    """

    def __init__(self, moved: list[Ids], known: tuple[Ids, Ids]) -> None:
        super().__init__()
        self.moved, self.known = moved, known

    def __call__(self, message: Message, context: Context) -> Message:
        """Return the reply of the parties' ClientApp, with the party's own code replaced."""
        party, _ = index_and_parties(context)
        reply: Message = client_app.app(message, context)
        if message.metadata.message_type == explain_messages.ExplainOrder.kind and party == 0:
            found = explain.current(context)
            vars(found)["permuted"] = partial(self._moved, found)
        return reply

    def _moved(self, found: Explanation, order: explain_messages.PermuteOrder) -> Rows:
        of_class, of_others = (found.plain[rows].mean(0) for rows in self.known)
        extreme = of_class + 30 * (of_class - of_others)
        blocks = np.repeat(found.plain[None], order.count, 0)
        for block, rows in zip(blocks, self.moved[order.first :], strict=False):
            block[rows] = extreme
        kept: Rows = blocks[:, order.start : order.stop]
        return kept.reshape(-1, kept.shape[2])


def of_explanation(
    config: RunConfig, parties: int, folder: Path, known: int, shown: int
) -> list[Finding]:
    """Attack explanations of the run in this folder, from both sides."""
    generator = np.random.default_rng([config.training.seed, 8])
    try:
        return [
            *_columns(config, parties, folder, shown, generator),
            *_labels(config, folder, known, generator),
        ]
    except ConfigError:  # such as a class with one test row: nothing is explained, or attacked
        return []


def _columns(
    config: RunConfig, parties: int, folder: Path, shown: int, generator: np.random.Generator
) -> list[Finding]:
    """Reconstruct columns of party 0 at the label holder."""
    tap = Tap()
    _explain(folder, tap)
    block = load_features(config, 0, parties)
    rows = np.asarray(block.test)[block.tested]
    sequences = config.models.bottom == "lstm"
    features = features_of(0, samples.first(block.test), None, sequences)[:_FEATURES]
    first = tap.uploads[None][0]
    masked = first.dtype == np.int32
    plain, permuted = tap.read((len(first) - _ZEROS) // len(rows) if masked else first.shape[1])
    known, others = split(len(rows), shown, generator)
    success: dict[str, list[float]] = {"plain": [], "explained": [], "difference": []}
    for feature, new in zip(features, permuted, strict=False):
        truth = rows[feature.index].reshape(len(rows), -1)
        if not np.ptp(truth[known]) or not np.ptp(truth[others]):  # a deviation rounds
            continue
        change = new - plain
        for name, view in (("plain", plain), ("explained", np.hstack([plain, change]))):
            decoded = reconstruct(view, known, truth[known])
            mean = truth[known].mean(0)
            success[name].append(explained(truth[others], decoded[others], mean))
        success["difference"].append(_alike(plain, change, truth))
    if not success["plain"]:
        return []
    whose = "the sum over all parties" if masked else "party 0"
    of_rows = f"features of {len(known)} rows"
    rows_of = len(others)
    means = {name: float(np.mean(values)) for name, values in success.items()}
    attacks = (
        ("columns, without explanation", f"test embeddings of {whose}, {of_rows}", "plain"),
        ("columns, by explanation", f"permuted embeddings of {whose}, {of_rows}", "explained"),
        ("columns, by explanation alone", f"permuted embeddings of {whose}", "difference"),
    )
    return [
        Finding(name, f"label holder: {view}", "R2", means[which], 0.0, rows_of)
        for name, view, which in attacks
    ]


def _alike(plain: Rows, change: Rows, truth: Rows) -> float:
    """Return R2 of columns [R, n] by the main direction of changes [R, E], without known rows.

    A change is the value of another row less the row's own. So it also teaches a decoder of the
    embeddings as they are, which reads a row's value and not the other's. The better one counts.
    """
    centred = change - change.mean(0)
    if not np.abs(centred).max() > 0:
        return 0.0
    left, sizes, _ = np.linalg.svd(centred, full_matrices=False)
    main = left[:, :1] * sizes[0]
    decoded = reconstruct(plain, np.arange(len(plain)), main)
    varied = truth[:, np.ptp(truth, axis=0) > 0]
    return max(
        float(np.mean([np.corrcoef(found[:, 0], column)[0, 1] ** 2 for column in varied.T]))
        if np.ptp(found)
        else 0.0
        for found in (main, decoded)
    )


def _labels(
    config: RunConfig, folder: Path, known: int, generator: np.random.Generator
) -> list[Finding]:
    """Infer labels of test rows at party 0, from figures of uploads that it has chosen."""
    if mechanism_of(config).hides_labels:  # parties are told no figures
        return []
    labels = load_labels(config).tested
    y = labels.test
    classes = [generator.permutation(np.flatnonzero(y == n)) for n in range(len(labels.classes))]
    if min(map(len, classes)) <= known:
        return []
    shown = [each[:known] for each in classes]
    guide = shown[1], np.concatenate([*shown[:1], *shown[2:]])
    rest = generator.permutation(np.concatenate([each[known:] for each in classes]))
    falls, _ = figures(folder, Cheat(shown, guide))
    features = len(falls)
    # Moved rows all get one class. With more than two, known rows show which class it is.
    is_class = y == (1 if len(classes) == 2 else int(falls[: len(classes)].argmin()))
    exact, told = [], []
    for at in range(0, min(_QUERIES, len(rest)), features):
        targets = rest[at : at + features]
        moved = [targets[n : n + 1] for n in range(len(targets))]
        falls, noisy = figures(folder, Cheat(moved, guide))
        exact += [*zip(targets, -falls, strict=False)]
        told += [*zip(targets, -noisy, strict=False)]
    groups = np.array_split(rest, features)
    _, noisy = figures(folder, Cheat(list(groups), guide))
    of_groups = [(row, -fall) for rows, fall in zip(groups, noisy, strict=True) for row in rows]
    attacks = (
        ("labels, exact figures", "exact figures of rows that it moves", exact),
        ("labels, figures as told", "noisy figures of rows that it moves", told),
        ("labels, groups, as told", "noisy figures of groups that it moves", of_groups),
    )
    findings = []
    for name, what, pairs in attacks:
        ids, scores = np.array([row for row, _ in pairs]), np.array([value for _, value in pairs])
        success = float(roc_auc_score(is_class[ids], scores)) if is_class[ids].std() else 0.5
        attacker = f"party 0: {what}, {known} labels a class"
        findings.append(Finding(name, attacker, "AUC", success, 0.5, len(ids)))
    return findings


def figures(folder: Path, client: ClientApp, epsilon: float = EPSILON) -> tuple[Any, Any]:
    """Return the exact figures of party 0, and the figures that a real party would be told.

    A real party would be told none about few people, and nothing a second time.
    """
    found: list[Any] = []

    def tell(transport: Any, config: Any, turns: dict[int, Any], plain: Any, *rest: Any) -> str:
        noise = Noise(plain.score, plain.fresh, len(turns), epsilon, DELTA)
        (mine,) = (each for each in turns.values() if each.party == 0)
        found.extend((mine.values, mine.to_tell.told(noise)[0]))
        return ""

    with patch.object(at_label_holder, "_tell", tell):
        _explain(folder, client)
    exact, told = found
    return exact, told


def _explain(folder: Path, client: ClientApp) -> None:
    """Explain the run in a folder, and write no explanation there."""
    with TemporaryDirectory() as out:
        explain_local({"model": str(folder), "out": out}, client=client)
