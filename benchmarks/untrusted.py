"""A hostile party against `flag-rate` and `subsets`: the attacks of `vfl audit`, and two more.

Party 0 wants all test rows of other classes to get the rarest class. Success is the share of these
rows that get it. "unflagged" counts those without a flag. A model of any subset answers a flagged
row without the suspect: "answer" is the success if a reader ignores the flag. Each seed draws rows
of the data, and trains on them.

The attacks of `vfl audit` send real messages. Two attackers stay here, since no party of the
protocol knows as much: the label holder's model, its limits and the others' embeddings. Their
figures are means over all parties as the attacker.

- replay: the one honest embedding of a validation row that decides most rows.
- informed: for each row, projected ascent within the limits.

Attacks of scoring alone share one training. Models of any subset meet only those. Prints one JSON
object as its last line.
"""

from __future__ import annotations

import argparse
import copy
import logging
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from benchmarks.common import check_there, report
from vfl_attacks.hostile import ATTACKS
from vfl_attacks.robustness import Outcome, measured, of_seed
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.scored_rows import ScoredRows
from vfl_flower.tasks.inference.model import Predictor
from vfl_flower.tasks.inference.rows import labels_of

DATA: dict[str, dict[str, Any]] = {
    "mnist": {"epochs": 6},
    "credit": {"epochs": 6},
    "cifar": {"epochs": 6, "bottom-model": "cnn"},
}
KEYS = {"strategy": "split-nn", "batch-size": 128, "validation-fraction": 0.25}
_POOL = 100  # rows of the target class that a replay chooses from, and rows that it tries them on
_ASCENT = 150  # steps


class Informed:
    """Attackers that have a trained model, its limits, and the other parties' embeddings."""

    def __init__(self, folder: Path, target: int) -> None:
        found = checkpoint.load(folder)
        labels, self.target = labels_of(found), target
        self.predictor = Predictor(found, 0)
        self.predictor.flag(found.config.assessment.flag_rate)
        assert self.predictor.consistency is not None
        rows = torch.from_numpy(found.arrays["test_table.rows"])[:, : self.predictor.width]
        self.honest, self.test = rows[: labels.validation], rows[labels.validation :]
        self.labels = torch.from_numpy(labels.test[labels.validation :])
        self.of_honest = torch.from_numpy(labels.test[: labels.validation])
        self.white = copy.copy(self.predictor.consistency)
        self.white._outputs = self._outputs  # with gradients

    def _outputs(self, blocks: Tensor, own: Any, given: Any) -> Tensor:
        return self.predictor.differentiable(blocks, torch.from_numpy(own), given)

    def rows(self, blocks: Tensor) -> ScoredRows:
        """Return rows of all parties, as the parameters of scores, with outputs for gradients."""
        given = np.ones((len(blocks), len(self.predictor.sizes)), bool)
        own = np.zeros((len(blocks), 0), np.float32)
        return ScoredRows(blocks, own, given, self._outputs(blocks, own, given))

    @torch.no_grad()
    def answers(self, blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the classes of rows, their classes by answers to flagged rows, and the flags."""
        rows = self.rows(blocks)
        scored = self.predictor.score(blocks, rows.own, rows.given)
        assert scored.suspects is not None
        said, answered = (logits(each.outputs).argmax(1) for each in (rows, scored))
        return said, answered, torch.from_numpy(scored.suspects >= 0)

    def figures(self, few: int) -> Iterator[tuple[str, float]]:
        """Yield the figures of honest rows, and of both attacks."""
        said, _, flagged = self.answers(self.test)
        right = said == self.labels
        yield "accuracy", right.float().mean().item()
        yield "accuracy, flagged wrong", (right & ~flagged).float().mean().item()
        yield "false flags", flagged.float().mean().item()
        others, found = self.test[self.labels != self.target], defaultdict[str, list[float]](list)
        for mine in self.predictor.columns.values():
            sent = {
                "replay": self.replay(others, mine),
                "informed": self.ascent(others[:few], mine),
            }
            for attack, blocks in sent.items():
                plain, answer, flags = (each.numpy() for each in self.answers(blocks))
                won = answer == self.target
                found[f"{attack}, plain"].append(float((plain == self.target).mean()))
                found[f"{attack}, answer"].append(float(won.mean()))
                found[f"{attack}, unflagged"].append(float((won & ~flags).mean()))
        yield from ((key, float(np.mean(each))) for key, each in found.items())

    @torch.no_grad()
    def replay(self, blocks: Tensor, mine: slice) -> Tensor:
        """Return rows with the honest embedding that decides most of the honest rows."""
        pool = self.honest[self.of_honest == self.target][:_POOL, mine]
        sent = [self.rows(put(self.honest[:_POOL], mine, each)).outputs for each in pool]
        decided = torch.stack([(logits(each).argmax(1) == self.target).sum() for each in sent])
        return put(blocks, mine, pool[int(decided.argmax())])

    def ascent(self, blocks: Tensor, mine: slice) -> Tensor:
        """Return the most successful embeddings of each row that are not flagged."""
        best, reached = blocks.clone(), torch.full((len(blocks),), -torch.inf)
        z = blocks[:, mine].clone().requires_grad_()
        optimizer = torch.optim.Adam([z], lr=0.05 * float(z.detach().std()) + 1e-6)
        for _ in range(_ASCENT):
            rows = self.rows(put(blocks, mine, z))
            beyond = (self.white.measures(rows) / self.white.limits).amax((1, 2))
            said = logits(rows.outputs).log_softmax(1)[:, self.target]
            better = (beyond < 0.999) & (said > reached)
            best[better], reached[better] = rows.blocks[better].detach(), said[better].detach()
            loss = (-said + 100 * (beyond - 0.97).clamp_min(0)).sum()
            optimizer.zero_grad()
            loss.backward()
            assert z.grad is not None
            torch.nan_to_num_(z.grad)
            optimizer.step()
        return best


def put(blocks: Tensor, mine: slice, embedding: Tensor) -> Tensor:
    """Return rows with other embeddings of a party."""
    given = embedding.expand(len(blocks), -1)
    return torch.cat([blocks[:, : mine.start], given, blocks[:, mine.stop :]], 1)


def logits(outputs: Tensor) -> Tensor:
    """Return the logits of all classes, [R, classes]."""
    return torch.cat([torch.zeros_like(outputs), outputs], 1) if outputs.shape[1] == 1 else outputs


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--mnist", default="../shared/data/mnist.npz", metavar="PATH")
    made.add_argument("--credit", default="../shared/data/uci_credit_default.npz", metavar="PATH")
    made.add_argument("--cifar", default="../shared/data/cifar10", metavar="FOLDER")
    made.add_argument("--data", nargs="+", choices=DATA, default=["mnist", "credit"])
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--parties", type=int, default=4)
    made.add_argument("--epochs", type=int, help="of training, to try it out")
    made.add_argument("--flag-rate", type=float, default=0.01)
    made.add_argument("--rows", type=int, default=8000, help="of training; a quarter to test")
    made.add_argument("--few", type=int, default=100, help="rows of the informed attack")
    options = made.parse_args()
    logging.getLogger("flwr").setLevel(logging.ERROR)
    figures: dict[str, Any] = {}
    for name in options.data:
        check_there(f"--{name}", getattr(options, name))
        for subsets in ("off", "sampled"):
            found = defaultdict[str, list[float]](list)
            for seed in range(options.seeds):
                with TemporaryDirectory() as folder:
                    for key, value in of_data(name, subsets, seed, Path(folder), options):
                        found[key].append(round(value, 4))
            title = f"{name}, subsets {subsets}"
            figures[title] = found
            for key, each in found.items():
                mean, spread = np.mean(each), np.std(each, ddof=len(each) > 1)
                print(f"{title:24} {key:24} {mean:.3f} +- {spread:.3f}  {each}", flush=True)
    report("untrusted", figures)


def of_data(
    name: str, subsets: str, seed: int, folder: Path, options: argparse.Namespace
) -> Iterator[tuple[str, float]]:
    """Yield the figures of a seed: of honest rows, and of each attack."""
    keys = {**KEYS, **DATA[name], "subsets": subsets, "flag-rate": options.flag_rate, "seed": seed}
    keys |= {"epochs": options.epochs} if options.epochs else {}
    keys["dataset"] = drawn(getattr(options, name), folder, options.rows, seed)
    names = [each for each, kind in ATTACKS.items() if subsets == "off" or not kind.trains]
    for attack, client, of_attack in of_seed(options.parties, keys, names, folder / "runs"):
        yield from of_outcome(attack, of_attack)
        yield f"{attack}, accuracy", of_attack.accuracy
        if subsets != "off":  # the model that answers each row as it comes
            yield f"{attack}, plain", measured(client, True, **{"flag-rate": 0.0}).success
    assert of_attack.control is not None
    yield from of_outcome("no attack", of_attack.control)
    yield from Informed(folder / "runs/Hostile", client.target).figures(options.few)


def of_outcome(name: str, outcome: Outcome) -> Iterator[tuple[str, float]]:
    """Yield the success by answers, and without flagged rows."""
    assert outcome.unflagged is not None
    yield f"{name}, answer", outcome.success
    yield f"{name}, unflagged", outcome.unflagged


def drawn(place: str, folder: Path, rows: int, seed: int) -> str:
    """Write random rows of a data set, and return its name as an option."""
    generator = np.random.default_rng(seed)
    arrays: dict[str, Any] = {}
    whole = arrays_of(place)
    for part, most in {"": rows, "_train": rows, "_test": rows // 4}.items():
        if f"y{part}" in whole:
            chosen = generator.permutation(len(whole[f"y{part}"]))[:most]
            arrays |= {f"{each}{part}": whole[f"{each}{part}"][chosen] for each in "Xy"}
    np.savez(folder / "part.npz", **arrays)
    return f"npz:{folder}/part.npz"


@cache
def arrays_of(place: str) -> dict[str, NDArray[Any]]:
    """Return the arrays of an npz, or of a folder of images in parquet files."""
    names = [f"{each}{part}" for part in ("", "_train", "_test") for each in "Xy"]
    if not Path(place).is_dir():
        with np.load(place, allow_pickle=False) as file:
            return {name: file[name] for name in names if name in file.files}
    arrays = {}
    for part in ("train", "test"):
        table = parquet.read_table(Path(place, f"{part}.parquet"))
        opened = (Image.open(BytesIO(each["bytes"])) for each in table["image"].to_pylist())
        arrays[f"X_{part}"] = np.stack([np.asarray(each) for each in opened])
        arrays[f"y_{part}"] = table["label"].to_numpy()
    return arrays


if __name__ == "__main__":
    main()
