"""The label holder's ends of the links to all parties."""

from collections.abc import Iterator

import torch
from torch import Tensor

from vfl_flower.label_holder.table import Table
from vfl_flower.protocol.codecs.channel import digest
from vfl_flower.protocol.ends import HolderEnd
from vfl_flower.protocol.estimators.base import Estimator
from vfl_flower.transport.messages import Arrays


class HolderLinks:
    """Uplinks and downlinks by party, with the surrogates that the table holds for uploads."""

    def __init__(self, end: HolderEnd, estimator: Estimator, table: Table) -> None:
        blocks = {party: table.of(party) for party in table.columns}
        self.up = {party: estimator.uplinks(block) for party, block in blocks.items()}
        self.down = {
            party: estimator.downlinks(end.sampling.rows, block.shape[1])
            for party, block in blocks.items()
        }
        self._end, self._estimator, self._table = end, estimator, table

    def digest(self, party: int) -> str:
        """Return the digest of all surrogates that a party must hold now."""
        return digest(self._estimator.compared(self._end, party))

    def surrogate(self, party: int) -> Arrays:
        """Return a party's surrogate, if uploads have any, to send when it returns."""
        if not self._end.config.uplink.surrogates:
            return {}
        return {"embedding": self._table.of(party).cpu().contiguous().numpy()}

    def begin_again(self, party: int) -> None:
        """Reset a party's downlink surrogates, after the party came back without them."""
        for _, surrogate in self.down[party].with_surrogates():
            surrogate.zero_()

    def state_dict(self) -> Arrays:
        """Return the surrogates that are not in the embedding table."""
        return {name: each.cpu().numpy() for name, each in self._beside_table()}

    def load_state_dict(self, arrays: Arrays) -> None:
        """Restore what `state_dict` returned."""
        for name, surrogate in self._beside_table():
            surrogate.copy_(torch.from_numpy(arrays[name]))

    def _beside_table(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each surrogate outside the table, with its name in a checkpoint."""
        yield from self._estimator.links_of_all(self._end).with_surrogates()
        for party, links in self.down.items():
            for name, surrogate in links.with_surrogates():
                yield f"{name}.{party}", surrogate
