"""NVFlare's split learning between two sites, as the documentation of its Collab API describes it.

``site-1`` holds all columns and the bottom models, and ``site-2`` the labels and the top model. The
server starts the loop at ``site-1``, which calls ``site-2`` with the embeddings of each mini-batch
and gets their gradients. The documented example exchanges float16; this one float32, as all peers.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from nvflare.collab import collab
from nvflare.collab.recipe import CollabRecipe
from nvflare.recipe import SimEnv
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.peers import shared

SECONDS = 3600.0  # until a call fails


class Site:
    """Either site; its role is a property that the recipe sets."""

    @collab.init
    def start(self) -> None:
        """Read this site's data, and make its model."""
        torch.set_num_threads(1)
        torch.manual_seed(0)
        if collab.get_app_prop("role") == "labels":
            self.truth, self.test_truth = shared.labels()
            self.model = shared.top()
        else:
            blocks = [shared.columns(party) for party in range(shared.PARTIES)]
            self.train, self.test = zip(*blocks, strict=True)
            self.model = nn.ModuleList(shared.bottom() for _ in blocks)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=shared.RATE)

    def forward(self, blocks: list[Tensor]) -> Tensor:
        """Embeddings of all columns."""
        return torch.cat([m(x) for m, x in zip(self.model, blocks, strict=True)], dim=1)  # type: ignore[call-overload]

    @collab.publish
    def run(self) -> None:
        """The loop, at the site that has columns."""
        (other,) = collab.other_clients
        other = other(timeout=SECONDS)
        for _ in range(shared.epochs()):
            for ids in torch.randperm(len(self.train[0])).split(shared.BATCH):
                embeddings = self.forward([x[ids] for x in self.train])
                gradients = other.loss(ids, embeddings.detach())
                self.optimizer.zero_grad()
                embeddings.backward(gradients)
                self.optimizer.step()
            with torch.no_grad():
                other.tested(self.forward(list(self.test)))

    @collab.publish
    def loss(self, ids: Tensor, embeddings: Tensor) -> Tensor | None:
        """A step of the top model, at the site that has labels; return gradients."""
        embeddings = embeddings.requires_grad_()
        self.optimizer.zero_grad()
        functional.cross_entropy(self.model(embeddings), self.truth[ids]).backward()
        self.optimizer.step()
        return embeddings.grad

    @collab.publish
    def tested(self, embeddings: Tensor) -> bool:
        """Test, at the site that has labels."""
        with torch.no_grad():
            shared.epoch_done(self.model(embeddings), self.test_truth)
        return True


class Server:
    """Starts the loop."""

    @collab.main
    def main(self) -> Any:
        """Call the site that has columns, and wait."""
        (site,) = collab.get_clients(["site-1"])
        return site(timeout=SECONDS).run()


def main() -> None:
    from benchmarks.peers.with_nvflare import Server, Site  # by the name that sites import

    recipe = CollabRecipe("split-learning", server=Server(), client=Site(), min_clients=2)
    recipe.set_per_site_config({"site-1": {"role": "columns"}, "site-2": {"role": "labels"}})
    sites = recipe.configured_sites()
    recipe.execute(SimEnv(clients=sites, log_config="ERROR", workspace_root=sys.argv[1]))


if __name__ == "__main__":
    main()
