"""A party that sends chosen embeddings at scoring time, against `flag-rate` and `subsets`.

Each party of a trained model attacks in turn. It wants all test rows of other classes to get its
class. Success is the share of these rows that get it; with flags, a flagged row is no success. The
attacks:

- random: an honest embedding of a random row. A free rider sends them.
- replay: the one honest embedding of a validation row that decides most rows.
- dominating: one optimised vector, with twice the largest honest norm.
- bounded: the same, with the largest honest norm.
- poisoned: the dominating vector, after the party has sent it for 2 % of the validation rows too.
- adaptive: for each row, projected ascent with the label holder's model and limits, and with the
  others' embeddings of the row. No attacker of the protocol knows as much.

With flags, a model of any subset answers a flagged row without the suspect: "ignored" is the
success if a reader ignores the flag. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import copy
from collections import defaultdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.common import check_there, report
from vfl_flower.label_holder import checkpoint
from vfl_flower.label_holder.consistency import Consistency
from vfl_flower.label_holder.scored_rows import ScoredRows
from vfl_flower.launch.engines import run_local
from vfl_flower.tasks.inference.model import Predictor
from vfl_flower.tasks.inference.rows import labels_of

DATA = {"mnist": (3, 4), "credit": (1, 6)}  # the attackers' class, and epochs
ATTACKS = ["random", "replay", "dominating", "bounded", "poisoned", "adaptive"]
_FEW = 500  # rows of the optimised attacks
_POISONED = 0.02  # share of the validation rows


class Trained:
    """A trained model, its honest rows, and the limits of its flags."""

    def __init__(self, folder: Path, target: int, rate: float) -> None:
        found = checkpoint.load(folder)
        labels, self.target = labels_of(found), target
        self.predictor = Predictor(found, 0)
        self.predictor.flag(rate)
        assert self.predictor.consistency is not None
        self.consistency, self.rate = self.predictor.consistency, rate
        rows = torch.from_numpy(found.arrays["test_table.rows"])[:, : self.predictor.width]
        self.honest, self.test = rows[: labels.validation], rows[labels.validation :]
        self.labels = torch.from_numpy(labels.test[labels.validation :])
        self.of_honest = torch.from_numpy(labels.test[: labels.validation])
        white = copy.copy(self.consistency)
        white._outputs = self._outputs  # with gradients
        self.white = white

    def _outputs(self, blocks: Tensor, own: Any, given: Any) -> Tensor:
        return self.predictor.differentiable(blocks, torch.from_numpy(own), given)

    def rows(self, blocks: Tensor) -> ScoredRows:
        """Return rows of all parties, as the parameters of scores, with outputs for gradients."""
        given = np.ones((len(blocks), len(self.predictor.sizes)), bool)
        own = np.zeros((len(blocks), 0), np.float32)
        return ScoredRows(blocks, own, given, self._outputs(blocks, own, given))

    def logits(self, blocks: Tensor) -> Tensor:
        """Return the logits of all classes, [R, classes]."""
        said = self.rows(blocks).outputs
        return torch.cat([torch.zeros_like(said), said], 1) if said.shape[1] == 1 else said

    def measured(self, blocks: Tensor, party: int) -> dict[str, float]:
        """Return figures of an attack on rows of other classes."""
        with torch.no_grad():
            plain = self.logits(blocks).argmax(1) == self.target
            rows = self.rows(blocks)
            scored = self.predictor.score(blocks, rows.own, rows.given)
            said = scored.outputs
            said = torch.cat([torch.zeros_like(said), said], 1) if said.shape[1] == 1 else said
            hit, suspects = said.argmax(1) == self.target, torch.from_numpy(scored.suspects)
        flagged = suspects >= 0
        named = (suspects[flagged] == party).float().mean().item()
        return {
            "plain": plain.float().mean().item(),
            "flagged": (hit & ~flagged).float().mean().item(),
            "ignored": hit.float().mean().item(),
            **({"named": named} if flagged.any() else {}),
        }

    def attacked(self, blocks: Tensor, party: int, attack: str) -> Tensor:
        """Return rows in which a party attacks."""
        mine, generator = self.predictor.columns[party], torch.Generator().manual_seed(party)
        known, blocks = self.honest[:, mine], blocks.clone()
        if attack == "random":
            blocks[:, mine] = known[torch.randint(len(known), (len(blocks),), generator=generator)]
            return blocks
        if attack == "adaptive":
            return self._adaptive(blocks, mine)
        some = self.honest[torch.randperm(len(known), generator=generator)[:_FEW]]
        if attack == "replay":
            pool = known[self.of_honest == self.target][:_FEW]
            with torch.no_grad():
                decided = [
                    (self.logits(_put(some, mine, one)).argmax(1) == self.target).sum()
                    for one in pool
                ]
            blocks[:, mine] = pool[int(torch.stack(decided).argmax())]
            return blocks
        most = known.norm(dim=1).max() * (1 if attack == "bounded" else 2)
        vector = known.mean(0).requires_grad_()
        optimizer = torch.optim.Adam([vector], lr=0.1 * float(most) / len(vector) ** 0.5)
        for _ in range(150):
            loss = -self.logits(_put(some, mine, vector)).log_softmax(1)[:, self.target].mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            vector.data *= (most / vector.data.norm()).clamp_max(1)
        blocks[:, mine] = vector.detach()
        return blocks

    def poison(self, vector: Tensor | None, mine: slice) -> None:
        """Fit the limits to the validation rows; some may have a party's vector."""
        self.predictor.consistency = self.consistency
        if vector is not None:
            rows = self.honest.clone()
            at = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
            rows[at[: round(_POISONED * len(rows))], mine] = vector
            limits = Consistency(self.predictor.columns, self.predictor.outputs, numbers=False)
            with torch.no_grad():
                self.predictor.consistency = limits.fit(self.rows(rows), self.rate)

    def _adaptive(self, blocks: Tensor, mine: slice) -> Tensor:
        """Return the most successful embeddings of each row that are not flagged."""
        best, reached = blocks.clone(), torch.full((len(blocks),), -torch.inf)
        z = blocks[:, mine].clone().requires_grad_()
        optimizer = torch.optim.Adam([z], lr=0.05 * float(blocks[:, mine].std()) + 1e-6)
        for _ in range(200):
            rows = self.rows(_put(blocks, mine, z))
            beyond = (self.white.measures(rows) / self.white.limits).amax((1, 2))
            said = self.logits(rows.blocks).log_softmax(1)[:, self.target]
            better = (beyond < 0.999) & (said > reached)
            best[better], reached[better] = rows.blocks[better].detach(), said[better].detach()
            loss = (-said + 100 * (beyond - 0.97).clamp_min(0)).sum()
            optimizer.zero_grad()
            loss.backward()
            assert z.grad is not None
            torch.nan_to_num_(z.grad)
            optimizer.step()
        return best


def _put(blocks: Tensor, mine: slice, embedding: Tensor) -> Tensor:
    """Return rows with another embedding of a party."""
    given = embedding.expand(len(blocks), -1)
    return torch.cat([blocks[:, : mine.start], given, blocks[:, mine.stop :]], 1)


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--mnist", default="../shared/data/mnist.npz", metavar="PATH")
    made.add_argument("--credit", default="../shared/data/uci_credit_default.npz", metavar="PATH")
    made.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--parties", type=int, default=4)
    made.add_argument("--epochs", type=int, help="instead of 4 and 6, to try it out")
    made.add_argument("--flag-rate", type=float, default=0.01)
    made.add_argument("--few", type=int, default=_FEW, help="rows of the adaptive attack")
    made.add_argument("--runs", metavar="FOLDER", help="keep the runs there, and use them again")
    options = made.parse_args()
    with TemporaryDirectory() as folder:
        options.runs = options.runs or folder
        report("untrusted", measured(options))


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of each seed, by data and subsets."""
    figures: dict[str, Any] = {}
    for name in options.data:
        place = getattr(options, name)
        check_there(f"--{name}", place)
        target, epochs = DATA[name]
        for subsets in ("off", "sampled"):
            found = defaultdict[str, list[float]](list)
            for seed in range(options.seeds):
                folder = Path(options.runs, f"{name}-{options.parties}-{subsets}-{seed}").absolute()
                keys = {"dataset": f"npz:{place}", "epochs": options.epochs or epochs}
                keys |= {"subsets": subsets, "seed": seed, "out": str(folder)}
                if not folder.exists():
                    run_local(options.parties, keys)
                for key, value in of_model(Trained(folder, target, options.flag_rate), options):
                    found[key].append(value)
            title = f"{name}, subsets {subsets}"
            figures[title] = {key: [round(v, 4) for v in each] for key, each in found.items()}
            for key, each in found.items():
                print(f"{title:24} {key:22} {np.mean(each):.3f}  {np.round(each, 3)}", flush=True)
    return figures


def of_model(model: Trained, options: argparse.Namespace) -> list[tuple[str, float]]:
    """Return the figures of honest rows, and of each attack, as means over the attackers."""
    with torch.no_grad():
        rows = model.rows(model.test)
        scored = model.predictor.score(model.test, rows.own, rows.given)
        assert scored.suspects is not None
        right = model.logits(model.test).argmax(1) == model.labels
    flagged = torch.from_numpy(scored.suspects >= 0)
    figures = [
        ("accuracy", right.float().mean().item()),
        ("accuracy, unflagged", (right & ~flagged).float().mean().item()),
        ("false flags", flagged.float().mean().item()),
    ]
    others = model.test[model.labels != model.target]
    for attack in ATTACKS:
        some = others[: options.few] if attack == "adaptive" else others
        each = []
        for party, mine in model.predictor.columns.items():
            rows_sent = model.attacked(some, party, attack)
            model.poison(rows_sent[0, mine] if attack == "poisoned" else None, mine)
            each.append(model.measured(rows_sent, party))
        for key in ("plain", "flagged", "ignored", "named"):
            values = [of[key] for of in each if key in of]
            figures += [(f"{attack}, {key}", float(np.mean(values)))] if values else []
    with torch.no_grad():
        base = (model.logits(others).argmax(1) == model.target).float().mean().item()
    return [*figures, ("no attack", base)]


if __name__ == "__main__":
    main()
