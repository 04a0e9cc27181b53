"""EF-VFL on one page: Valdeira, Xavier, Soares and Chi, "Communication-efficient Vertical Federated
Learning via Compressed Error Feedback" (2025), Algorithms 1 and 2.

Both ends keep a surrogate G_k of client k's embeddings. The client sends C(H_k - G_k), the
compressed change, and both ends add it: errors of the compressor are made good later (EF21).

Where this page and the paper differ: a step compresses the rows of its mini-batch, at the start of
the step. Surrogates begin at zero. So a row's first message is C(H_k), sent when it is first drawn.
In the paper clients send C(H_k) of all rows before the first step, as `initial_surrogates` does.
The rows of the first mini-batch are then compressed twice before their step, in the paper once.

Notation: K clients; B rows in a mini-batch; E numbers in an embedding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

Compressor = Callable[[Tensor], Tensor]  # the operator C on a block of embeddings, [B, E]


def top_k(keep: float) -> Compressor:
    """Return the operator that keeps a share of a block's entries, the largest (section 5)."""

    def compress(block: Tensor) -> Tensor:
        flat = block.flatten()
        largest = flat.abs().argsort(descending=True, stable=True)  # of equals the first
        kept = largest[: math.ceil(keep * len(flat))]
        return torch.zeros_like(flat).index_copy(0, kept, flat[kept]).view_as(block)

    return compress


class Client:
    """Client k: its columns of all rows, [N, ...], its model, and its surrogate G_k, [N, E]."""

    def __init__(
        self, model: nn.Module, features: Tensor, size: int, lr: float, compress: Compressor
    ) -> None:
        self.model, self.features, self.compress = model, features, compress
        self.surrogate = torch.zeros(len(features), size)
        self.optimizer = torch.optim.SGD(model.parameters(), lr)

    def send(self, rows: Tensor) -> Tensor:
        """Lines 3 and 5: return the message C(H_k - G_k), [B, E], and add it to the surrogate."""
        self.embedding: Tensor = self.model(self.features[rows])
        message = self.compress(self.embedding.detach() - self.surrogate[rows])
        self.surrogate[rows] += message
        return message

    def update(self, gradient: Tensor) -> None:
        """Line 2: step along the gradient of the loss by the client's embeddings, [B, E].

        It is not passed back through the error feedback (section 3.1).
        """
        self.optimizer.zero_grad()
        self.embedding.backward(gradient)
        self.optimizer.step()


class Server:
    """The server: labels [N], model x_0, and its copies of the surrogates, [K, N, E]."""

    def __init__(
        self, model: nn.Module, labels: Tensor, clients: int, size: int, lr: float
    ) -> None:
        self.model, self.labels = model, labels
        self.surrogates = torch.zeros(clients, len(labels), size)
        self.optimizer = torch.optim.SGD(model.parameters(), lr)

    def receive(self, k: int, rows: Tensor, message: Tensor) -> None:
        """Line 5: G_k <- G_k + C_k, as the client does."""
        self.surrogates[k, rows] += message

    def gradient(self, k: int, rows: Tensor, exact: Tensor | None = None) -> Tensor:
        """Return the loss's gradient by client k's embeddings, [B, E].

        At the surrogates of all (Eq. 5, Algorithm 2 line 4), or at client k's ``exact`` embeddings
        and the surrogates of the others (Eq. 4, Algorithm 1).
        """
        h = [each[rows] for each in self.surrogates]
        h[k] = (h[k] if exact is None else exact).detach().requires_grad_()
        return torch.autograd.grad(self._loss(h, rows), h[k])[0]

    def step(self, rows: Tensor) -> None:
        """Line 2 for k = 0: step x_0 at the surrogates."""
        self.optimizer.zero_grad()
        self._loss([each[rows] for each in self.surrogates], rows).backward()
        self.optimizer.step()

    def _loss(self, embeddings: Sequence[Tensor], rows: Tensor) -> Tensor:
        outputs: Tensor = self.model(torch.cat(list(embeddings), dim=1))
        return functional.cross_entropy(outputs, self.labels[rows])


def initial_surrogates(clients: Sequence[Client], server: Server) -> None:
    """Input of both algorithms: begin the surrogates of all rows at G_k = C(H_k(x_0))."""
    every = torch.arange(len(server.labels))
    for k, client in enumerate(clients):
        server.receive(k, every, client.send(every))


def algorithm_1(
    clients: Sequence[Client], server: Server, batches: Iterable[Tensor]
) -> Iterator[None]:
    """Shared labels: train on mini-batches of row numbers, [B] each; yield after each.

    In the paper each client computes its own gradient. It uses the other clients' messages, the top
    model and the labels, which line 4 sends to all. This function computes the same gradients.
    """
    for rows in batches:
        for k, client in enumerate(clients):
            server.receive(k, rows, client.send(rows))  # lines 3 to 5
        gradients = [server.gradient(k, rows, client.embedding) for k, client in enumerate(clients)]
        server.step(rows)
        for client, gradient in zip(clients, gradients, strict=True):
            client.update(gradient)  # line 2
        yield


def algorithm_2(
    clients: Sequence[Client], server: Server, batches: Iterable[Tensor]
) -> Iterator[None]:
    """Private labels: train on mini-batches of row numbers, [B] each; yield after each."""
    for rows in batches:
        for k, client in enumerate(clients):
            server.receive(k, rows, client.send(rows))  # lines 3 and 5
        gradients = [server.gradient(k, rows) for k in range(len(clients))]  # line 4
        server.step(rows)
        for client, gradient in zip(clients, gradients, strict=True):
            client.update(gradient)  # line 2
        yield
