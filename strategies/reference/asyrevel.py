"""AsyREVEL on one page: Zhang, Gu et al., "Desirable Companion for Vertical Federated Learning: New
Zeroth-Order Gradient Based Algorithm" (2021), Algorithm 1.

Nobody computes a gradient. A party uploads its embeddings at w_m and at w_m + mu u. The server
answers the losses of both. Each side steps along its own random direction u.

Where this page and the paper differ: the server sends the difference of the two losses, which is
all that line 6 uses. The factor phi(d) is 1 for Gaussian directions and d for the unit sphere,
where Eq. (15) and (17) have d for both: so E[phi u u^T] is the identity.

Notation: q parties; B rows in a mini-batch; E numbers in an embedding; d parameters of a model.
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


class Party:
    """Party m: its columns of all rows, [n, ...], and its black box F_m with parameters w_m."""

    def __init__(
        self, model: nn.Module, features: Tensor, lr: float, mu: float, draw: Draw, phi: float
    ) -> None:
        self.model, self.features = model, features
        self.lr, self.mu, self.draw, self.phi = lr, mu, draw, phi

    @torch.no_grad()
    def upload(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Line 4: return c = F_m(w_m; x) and c^ = F_m(w_m + mu u; x) of a mini-batch, [B, E]."""
        self.w, self.u = parameters_to_vector(self.model.parameters()), self.draw()
        x = self.features[rows]
        return at(self.model, self.w, x), at(self.model, self.w + self.mu * self.u, x)

    @torch.no_grad()
    def update(self, difference: Tensor) -> None:
        """Lines 6 and 7, Eq. (15), from h^ - h, the difference of the two mean losses."""
        v = self.phi / self.mu * difference * self.u
        vector_to_parameters(self.w - self.lr * v, self.model.parameters())


class Server:
    """The label holder: labels [n], model F_0 with parameters w_0, last embeddings [q, n, E]."""

    def __init__(
        self,
        model: nn.Module,
        labels: Tensor,
        parties: int,
        size: int,
        lr: float,
        mu: float,
        draw: Draw,
        phi: float,
    ) -> None:
        self.model, self.labels = model, labels
        self.table = torch.zeros(parties, len(labels), size)
        self.lr, self.mu, self.draw, self.phi = lr, mu, draw, phi

    @torch.no_grad()
    def answer(self, m: int, rows: Tensor, c: Tensor, c_perturbed: Tensor) -> Tensor:
        """Lines 8 to 11: return the difference for party m, and step w_0."""
        self.table[m, rows] = c
        w, u = parameters_to_vector(self.model.parameters()), self.draw()
        h = self._loss(w, rows)  # line 9: h, and h with bar, and h with hat
        h_of_party = self._loss(w, rows, m, c_perturbed)
        h_of_server = self._loss(w + self.mu * u, rows)
        v = self.phi / self.mu * (h_of_server - h) * u  # line 10, Eq. (17)
        vector_to_parameters(w - self.lr * v, self.model.parameters())  # line 11
        return h_of_party - h

    def _loss(self, w: Tensor, rows: Tensor, m: int = 0, instead: Tensor | None = None) -> Tensor:
        """Mean loss at parameters w; party m's embeddings are others, if they are given."""
        c = [each[rows] for each in self.table]
        if instead is not None:
            c[m] = instead
        outputs = at(self.model, w, torch.cat(c, dim=1))
        return functional.cross_entropy(outputs, self.labels[rows])


def train(
    parties: Sequence[Party], server: Server, activations: Iterable[tuple[int, Tensor]]
) -> Iterator[None]:
    """Train by activations (line 2: party m; line 3: its mini-batch); yield after each."""
    for m, rows in activations:
        difference = server.answer(m, rows, *parties[m].upload(rows))
        parties[m].update(difference)
        yield
