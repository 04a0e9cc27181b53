"""VFL-Cascaded on one page: Wang et al., "Secure and Fast Asynchronous Vertical Federated Learning
via Cascaded Hybrid Optimization" (2023), Algorithms 1 and 2.

Algorithm 1 trains the clients by zeroth order, so that no gradient is sent. It trains the server by
the server's own gradient, so that the largest model learns fast. Algorithm 2 (appendix B),
Syn-ZOO-VFL, is the synchronous rival, with zeroth order on both sides.

Where this page and the paper differ: the server sends the difference of the two losses, which is
all that Eq. (3) uses. In Algorithm 2, line 9 prints the perturbed embeddings beside w_0 + mu u_0.
Here the server perturbs w_0 alone, so its difference does not depend on the clients' directions.

Notation: M clients; B rows in a mini-batch; E numbers in an embedding; d parameters of a model.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

Draw = Callable[[], Tensor]  # gives a new direction u, [d]


def at(model: nn.Module, w: Tensor, x: Tensor) -> Tensor:
    """Return the outputs of a model at other parameters w, [d]."""
    named, start = {}, 0
    for name, parameter in model.named_parameters():
        named[name] = w[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return functional_call(model, named, (x,))


class Client:
    """Client m: its columns of all rows, [N, ...], and its model with parameters w_m."""

    def __init__(
        self, model: nn.Module, features: Tensor, lr: float, mu: float, draw: Draw, phi: float = 1
    ) -> None:
        self.model, self.features = model, features
        self.lr, self.mu, self.draw, self.phi = lr, mu, draw, phi

    @torch.no_grad()
    def upload(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Line 4: return c, and c^ at w_m + mu u, of a mini-batch, [B, E]."""
        self.w, self.u = parameters_to_vector(self.model.parameters()), self.draw()
        x = self.features[rows]
        return at(self.model, self.w, x), at(self.model, self.w + self.mu * self.u, x)

    @torch.no_grad()
    def update(self, difference: Tensor) -> None:
        """Lines 6 and 7, Eq. (3), from h^ - h, the difference of the two mean losses."""
        gradient = self.phi / self.mu * difference * self.u
        vector_to_parameters(self.w - self.lr * gradient, self.model.parameters())


class Server:
    """The label holder: labels [N], its model with parameters w_0, last embeddings [M, N, E].

    ``draw`` and ``mu`` are for Algorithm 2, where the server learns by zeroth order too.
    """

    def __init__(
        self,
        model: nn.Module,
        labels: Tensor,
        clients: int,
        size: int,
        lr: float,
        mu: float = 0,
        draw: Draw | None = None,
        phi: float = 1,
    ) -> None:
        self.model, self.labels = model, labels
        self.table = torch.zeros(clients, len(labels), size)
        self.lr, self.mu, self.draw, self.phi = lr, mu, draw, phi

    def losses(self, rows: Tensor, uploads: dict[int, tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
        """Write uploads (c, c^) by client into the table; return h^ - h for each, Eq. (2)."""
        for m, (c, _) in uploads.items():
            self.table[m, rows] = c
        w = parameters_to_vector(self.model.parameters()).detach()
        h = self._loss(w, rows)
        return {m: self._loss(w, rows, {m: c}) - h for m, (_, c) in uploads.items()}

    def step_by_gradient(self, rows: Tensor) -> None:
        """Algorithm 1, lines 10 and 11, Eq. (4)."""
        w = parameters_to_vector(self.model.parameters()).detach().requires_grad_()
        gradient = torch.autograd.grad(self._loss(w, rows), w)[0]
        vector_to_parameters((w - self.lr * gradient).detach(), self.model.parameters())

    @torch.no_grad()
    def step_by_differences(self, rows: Tensor) -> None:
        """Algorithm 2, lines 9 and 10."""
        assert self.draw is not None
        w, u = parameters_to_vector(self.model.parameters()), self.draw()
        difference = self._loss(w + self.mu * u, rows) - self._loss(w, rows)
        gradient = self.phi / self.mu * difference * u
        vector_to_parameters(w - self.lr * gradient, self.model.parameters())

    def _loss(self, w: Tensor, rows: Tensor, instead: dict[int, Tensor] | None = None) -> Tensor:
        """Mean loss at parameters w; embeddings of some clients may be others."""
        c = {**dict(enumerate(self.table[:, rows])), **(instead or {})}
        outputs = at(self.model, w, torch.cat(list(c.values()), dim=1))
        return functional.cross_entropy(outputs, self.labels[rows])


def algorithm_1(
    clients: Sequence[Client], server: Server, activations: Iterable[tuple[int, Tensor]]
) -> Iterator[None]:
    """Train by activations (line 2: client m; line 3: its mini-batch); yield after each."""
    for m, rows in activations:
        differences = server.losses(rows, {m: clients[m].upload(rows)})  # lines 4, 8 and 9
        server.step_by_gradient(rows)  # lines 10 and 11
        clients[m].update(differences[m])  # lines 5 to 7
        yield


def algorithm_2(
    clients: Sequence[Client], server: Server, batches: Iterable[Tensor]
) -> Iterator[None]:
    """Train all clients on shared mini-batches (line 2); yield after each."""
    for rows in batches:
        uploads = {m: client.upload(rows) for m, client in enumerate(clients)}  # lines 3 and 4
        differences = server.losses(rows, uploads)  # line 5
        server.step_by_differences(rows)  # lines 9 and 10
        for m, client in enumerate(clients):
            client.update(differences[m])  # lines 6 and 7
        yield
