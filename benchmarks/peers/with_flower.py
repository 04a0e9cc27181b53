"""Flower's example of vertical learning, from its description: all rows in each round.

In a round, each ClientApp sends the embeddings of all its rows. The ServerApp puts them side by
side, takes a step, and returns to each its gradients. So an epoch has one step. Nodes run in
Flower's simulation.
"""

from __future__ import annotations

from functools import cache

import torch
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers import shared

client, server = ClientApp(), ServerApp()


@cache
def columns(party: int) -> tuple[Tensor, Tensor]:
    """A party's rows, read once."""
    torch.set_num_threads(1)
    return shared.columns(party)


def model_of(context: Context) -> nn.Module:
    """The model of this node, with the parameters that its state has kept."""
    torch.manual_seed(int(context.node_config["partition-id"]))
    model = shared.bottom()
    if "model" in context.state:
        model.load_state_dict(context.state.array_records["model"].to_torch_state_dict())
    return model


@client.query()
def embed(message: Message, context: Context) -> Message:
    """Send the embeddings of all rows."""
    model = model_of(context)
    context.state["model"] = ArrayRecord(model.state_dict())
    with torch.no_grad():
        train, test = map(model, columns(int(context.node_config["partition-id"])))
    arrays = ArrayRecord({"train": Array(train.numpy()), "test": Array(test.numpy())})
    return Message(RecordDict({"embeddings": arrays}), reply_to=message)


@client.train()
def learn(message: Message, context: Context) -> Message:
    """Take a step by the gradients."""
    model = model_of(context)
    optimizer = torch.optim.SGD(model.parameters(), lr=shared.RATE)
    gradients = message.content.array_records["gradients"]["train"].numpy()
    train, _ = columns(int(context.node_config["partition-id"]))
    model(train).backward(torch.from_numpy(gradients))
    optimizer.step()
    context.state["model"] = ArrayRecord(model.state_dict())
    return Message(RecordDict(), reply_to=message)


def exchange(grid: Grid, kind: str, contents: dict[int, RecordDict]) -> dict[int, RecordDict]:
    """Send each node its content; return what each answers."""
    sent = [Message(content, node, kind) for node, content in contents.items()]
    return {m.metadata.src_node_id: m.content for m in grid.send_and_receive(sent)}


@server.main()
def main(grid: Grid, context: Context) -> None:
    """The label holder's loop."""
    truth, test_truth = shared.labels()
    model = shared.top()
    optimizer = torch.optim.SGD(model.parameters(), lr=shared.RATE)
    for _ in range(shared.epochs()):
        nodes = sorted(grid.get_node_ids())
        answers = exchange(grid, "query", {node: RecordDict() for node in nodes})
        blocks = [answers[node].array_records["embeddings"] for node in nodes]
        train, test = (
            torch.cat([torch.from_numpy(block[part].numpy()) for block in blocks], dim=1)
            for part in ("train", "test")
        )
        with torch.no_grad():
            shared.epoch_done(model(test), test_truth)
        train.requires_grad_()
        optimizer.zero_grad()
        functional.cross_entropy(model(train), truth).backward()
        optimizer.step()
        assert train.grad is not None
        parts = train.grad.split(shared.EMBEDDING, dim=1)
        gradients = [ArrayRecord({"train": Array(part.contiguous().numpy())}) for part in parts]
        contents = (RecordDict({"gradients": each}) for each in gradients)
        exchange(grid, "train", dict(zip(nodes, contents, strict=True)))


if __name__ == "__main__":
    from benchmarks.peers import with_flower  # by the name that actors import

    resources = {"client_resources": {"num_cpus": 1}}
    run_simulation(with_flower.server, with_flower.client, shared.PARTIES, "ray", resources)  # type: ignore[arg-type]
