"""VAFL on one page: Chen, Jin, Sun and Yin, "VAFL: a Method of Vertical Asynchronous Federated
Learning" (2020), Algorithms 1 and 2.

Each party draws its own mini-batches and never waits for another. The label holder keeps the last
embedding of each row from each party, however old it is, and computes with these embeddings.

Where this page and the paper differ: a table entry is zero until its party first uploads that row,
and there is no regulariser r.

Notation: M parties; B rows in a mini-batch; E numbers in an embedding.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class Client:
    """A party: its columns of all rows, [N, ...], and its model theta_m."""

    def __init__(self, model: nn.Module, features: Tensor, lr: float) -> None:
        self.model, self.features = model, features
        self.optimizer = torch.optim.SGD(model.parameters(), lr)

    def upload(self, rows: Tensor) -> Tensor:
        """Line 5: return h_{n,m} = h_m(theta_m; x_{n,m}) of a mini-batch, [B, E]."""
        self.embedding = self.model(self.features[rows])
        return self.embedding.detach()

    def update(self, gradient: Tensor) -> None:
        """Line 7, Eq. (4a): step along the answer to the query, [B, E]."""
        self.optimizer.zero_grad()
        self.embedding.backward(gradient)
        self.optimizer.step()


class Server:
    """The label holder: labels [N], model theta_0, and the table of embeddings [M, N, E]."""

    def __init__(
        self, model: nn.Module, labels: Tensor, parties: int, size: int, lr: float
    ) -> None:
        self.model, self.labels = model, labels
        self.table = torch.zeros(parties, len(labels), size)
        self.optimizer = torch.optim.SGD(model.parameters(), lr)

    def receive(self, party: int, rows: Tensor, embedding: Tensor) -> None:
        """Line 8: write an upload into the table."""
        self.table[party, rows] = embedding

    def answer(self, uploads: Sequence[tuple[int, Tensor]]) -> list[Tensor]:
        """Lines 9 to 13 for the uploads (party, rows): step, and return each one's gradient.

        The gradients of Eq. (2a) and (2b) are taken at the same theta_0, before its step.
        """
        losses, queried = [], []
        for party, rows in uploads:
            h = [each[rows] for each in self.table]  # stale but for the party's own, Eq. (3)
            queried.append(h[party].requires_grad_())
            outputs = self.model(torch.cat(h, dim=1))
            losses.append(functional.cross_entropy(outputs, self.labels[rows], reduction="none"))
        answers = [
            torch.autograd.grad(loss.mean(), embedding, retain_graph=True)[0]
            for loss, embedding in zip(losses, queried, strict=True)
        ]  # lines 12 and 13, Eq. (2b)
        self.optimizer.zero_grad()
        torch.cat(losses).mean().backward()  # line 9, Eq. (2a)
        self.optimizer.step()  # line 10
        return answers


def algorithm_1(
    clients: Sequence[Client], server: Server, activations: Iterable[tuple[int, Tensor]]
) -> Iterator[None]:
    """Train by activations (line 3: client m; line 4: its mini-batch); yield after each."""
    yield from algorithm_2(clients, server, ([activation] for activation in activations))


def algorithm_2(
    clients: Sequence[Client], server: Server, groups: Iterable[Sequence[tuple[int, Tensor]]]
) -> Iterator[None]:
    """The same, where the server waits for uploads of t clients: a group; yield after each.

    A group has the clients that were activated since the last one: a client is in the next group
    as soon as its answer has come.
    """
    for group in groups:
        for m, rows in group:
            server.receive(m, rows, clients[m].upload(rows))  # lines 3 to 8
        answers = server.answer(group)  # lines 9 to 13
        for (m, _), gradient in zip(group, answers, strict=True):
            clients[m].update(gradient)
        yield
