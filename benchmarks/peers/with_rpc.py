"""Split learning as a plain loop of torch's remote calls: a process for each party and the labels.

A turn is one remote call of each party. It applies the last gradients, and returns the next
embeddings. Tensors go over TCP, as between machines, and not over shared memory.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import torch
from torch import Tensor
from torch.distributed import rpc
from torch.multiprocessing.spawn import spawn
from torch.nn import functional

from benchmarks.peers import shared


class Party:
    """One party's rows and model."""

    def __init__(self, party: int) -> None:
        torch.manual_seed(party)
        self.train, self.test = shared.columns(party)
        self.model = shared.bottom()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=shared.RATE)
        self.embeddings = torch.empty(0)  # of the last turn

    def turn(self, gradients: Tensor | None, ids: Tensor | None) -> Tensor | None:
        """Apply the gradients of the last turn, and return the embeddings of these rows."""
        if gradients is not None:
            self.optimizer.zero_grad()
            self.embeddings.backward(gradients)
            self.optimizer.step()
        if ids is None:
            return None
        self.embeddings = self.model(self.train[ids])
        return self.embeddings.detach()

    def tested(self) -> Tensor:
        """Return the embeddings of the test rows."""
        with torch.no_grad():
            found: Tensor = self.model(self.test)
        return found


def all_of(calls: list[torch.futures.Future[Any]]) -> Tensor:
    """Wait for a call of each party; return their embeddings side by side."""
    return torch.cat(torch.futures.wait_all(calls), dim=1)


def train() -> None:
    """The label holder's loop."""
    torch.manual_seed(9)
    truth, test_truth = shared.labels()
    parties = [rpc.remote(f"party-{p}", Party, args=(p,)) for p in range(shared.PARTIES)]
    model = shared.top()
    optimizer = torch.optim.SGD(model.parameters(), lr=shared.RATE)
    for _ in range(shared.epochs()):
        gradients: list[Any] = [None] * len(parties)
        for ids in torch.randperm(len(truth)).split(shared.BATCH):
            calls = [p.rpc_async().turn(g, ids) for p, g in zip(parties, gradients, strict=True)]
            embeddings = all_of(calls).requires_grad_()
            loss = functional.cross_entropy(model(embeddings), truth[ids])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert embeddings.grad is not None
            gradients = [g.contiguous() for g in embeddings.grad.split(shared.EMBEDDING, dim=1)]
        ends = [p.rpc_async().turn(g, None) for p, g in zip(parties, gradients, strict=True)]
        torch.futures.wait_all(ends)
        with torch.no_grad():
            shared.epoch_done(model(all_of([p.rpc_async().tested() for p in parties])), test_truth)


def side(rank: int, port: int) -> None:
    """Run one side: rank 0 is the label holder."""
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(
        init_method=f"tcp://127.0.0.1:{port}", _transports=["uv"], _channels=["basic"]
    )
    name = f"party-{rank - 1}" if rank else "label-holder"
    rpc.init_rpc(name, rank=rank, world_size=1 + shared.PARTIES, rpc_backend_options=options)
    if not rank:
        train()
    rpc.shutdown()


if __name__ == "__main__":
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(side, args=(port,), nprocs=1 + shared.PARTIES)
