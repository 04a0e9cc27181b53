"""Split learning on one page: synchronous, first order. EF-VFL's paper calls it SVFL.

The parties' models and the label holder's model form one network, cut in two. Training it is
centralised SGD: the gradient crosses the cut as one row for each embedding.

Notation: M parties; B rows in a mini-batch; E numbers in an embedding.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class Party:
    """One organisation: its columns of all rows, [N, ...], and its bottom model."""

    def __init__(self, model: nn.Module, features: Tensor, lr: float) -> None:
        self.model, self.features = model, features
        self.optimizer = torch.optim.SGD(model.parameters(), lr)

    def embed(self, rows: Tensor) -> Tensor:
        """Return the embeddings of these rows, [B, E]: what leaves the party."""
        self.embedding = self.model(self.features[rows])
        return self.embedding.detach()

    def update(self, gradient: Tensor) -> None:
        """Step along the gradient of the loss by the embeddings, [B, E]."""
        self.optimizer.zero_grad()
        self.embedding.backward(gradient)
        self.optimizer.step()


class LabelHolder:
    """The organisation with the labels, [N], and the top model."""

    def __init__(self, model: nn.Module, labels: Tensor, lr: float) -> None:
        self.model, self.labels = model, labels
        self.optimizer = torch.optim.SGD(model.parameters(), lr)

    def answer(self, rows: Tensor, embeddings: Sequence[Tensor]) -> list[Tensor]:
        """Step the top model; return each party's gradient rows, [B, E]: what leaves."""
        embeddings = [each.clone().requires_grad_() for each in embeddings]
        outputs = self.model(torch.cat(embeddings, dim=1))
        self.optimizer.zero_grad()
        functional.cross_entropy(outputs, self.labels[rows]).backward()
        self.optimizer.step()
        return [each.grad for each in embeddings if each.grad is not None]


def train(
    parties: Sequence[Party], label_holder: LabelHolder, batches: Iterable[Tensor]
) -> Iterator[None]:
    """Train on mini-batches of row numbers, [B] each; yield after each step."""
    for rows in batches:
        embeddings = [party.embed(rows) for party in parties]
        gradients = label_holder.answer(rows, embeddings)
        for party, gradient in zip(parties, gradients, strict=True):
            party.update(gradient)
        yield
