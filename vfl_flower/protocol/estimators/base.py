"""Base of estimators: how a party and the label holder learn together.

The methods stand in the order in which data meets them. A party embeds a window of rows (`embed`).
The label holder reads the upload (`read`) and answers it (`answer`). The party learns from the
answer (`update`). All four take and return tensors by name.

`Links` encode these tensors at one end, and decode them at the other. An estimator uses only the
attributes of each end that `ends.PartyEnd` and `ends.HolderEnd` list.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from vfl_flower.config.errors import ConfigError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.protocol.aggregation import aggregation_of
from vfl_flower.protocol.batches import Joint, Window
from vfl_flower.protocol.codecs.channel import Blocks, Channel, Links
from vfl_flower.protocol.ends import Arrival, HolderEnd, PartyEnd, Reading
from vfl_flower.protocol.privacy.mechanism import mechanism_of
from vfl_flower.transport.messages import Arrays, TrainOrder


def window_key(secret: bytes, order: TrainOrder) -> bytes:
    """Return the key of what a party draws for the window of an order."""
    return secret + f"|{order.exchange}".encode()


class Estimator(ABC):
    """How parties learn. Each party has an instance, and so has the label holder.

    windows : the default number of steps in a window, by the cost of an exchange: nothing, less
        than a step, or seconds (`transport.base.Cost`).
    uploads_per_row : number of embeddings of a row in an upload.
    uploads_reach : the adversary whose view of uploads the noise on them protects against.
    gradients : whether bottom models must have gradients.
    answers_by_scalars : whether the label holder answers one number for each step.
    broadcasts : whether the label holder passes uploads and the top model on to all parties, which
        then step together.
    answer_dtype : dtype of gradient rows in a message, if no codec changes it.
    """

    windows: ClassVar[Mapping[str, int]] = {"free": 1, "cheap": 8, "dear": 16}
    uploads_per_row: ClassVar[int] = 1
    uploads_reach: ClassVar[str] = "the label holder's"
    gradients: ClassVar[bool] = True
    answers_by_scalars: ClassVar[bool] = False
    broadcasts: ClassVar[bool] = False
    answer_dtype: ClassVar[str] = "float32"

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.aggregation = aggregation_of(config)
        self.mechanism = mechanism_of(config)

    @property
    def word(self) -> str:
        """Return a short description."""
        return self.config.estimator.kind

    @classmethod
    def check(cls, config: RunConfig) -> None:
        """Raise `ConfigError` if the estimator cannot work as configured."""
        if config.estimator.local_steps > 1:
            raise ConfigError(
                f"local-steps = {config.estimator.local_steps} needs labels = 'shared': without "
                "labels and top model, a party has a gradient for one step only. Leave "
                "`local-steps` out, or set labels = 'shared'."
            )

    # --- links: both ends ---------------------------------------------------------------------

    def uplinks(self, table: Tensor) -> Links:
        """Make one end of the links of uploads.

        Both ends compare surrogates in the order of these links.

        Parameters
        ----------
        table : [N, E], this end's surrogates. At the label holder it is the party's columns of the
            table.
        """
        return Links(embedding=self.uplink(table))

    def fresh_links(self, uplinks: Links, table: Tensor) -> Links:
        """Return one end of the link of fresh embeddings, for rows that are too old.

        The link is the one in ``uplinks`` that carries embeddings, with its surrogates. Without
        one, make it as `uplinks` does.
        """
        return Links(embedding=uplinks.get("embedding") or self.uplink(table))

    def downlinks(self, rows: int, size: int) -> Links:
        """Make the label holder's end of the links of answers to one party.

        Parameters
        ----------
        rows, size : the party's number of training rows N, and the length E of an embedding.
        """
        return Links()

    def downlinks_of(self, end: PartyEnd) -> Links:
        """Make a party's end of the links of its answers."""
        return self.downlinks(end.rows, end.size)

    def links_of_all(self, end: HolderEnd) -> Links:
        """Return the links that carry the same to all parties."""
        return Links()

    def compared(self, end: HolderEnd, party: int) -> list[Tensor]:
        """Return the surrogates that a party must have too, in comparison order."""
        links = end.uplinks[party], end.downlinks[party]
        return [surrogate for each in links for _, surrogate in each.with_surrogates()]

    def party_tables(self, parties: int) -> int:
        """Return the number of surrogate tables [N, E] that a party keeps."""
        return int(self.config.uplink.surrogates)

    def holder_tables(self) -> int:
        """Return the label holder's number of surrogate tables [N, E] for one party.

        Its table of embeddings does not count.
        """
        return 0

    def answer_bytes(self, end: PartyEnd, rows: int, steps: int) -> int:
        """Return an upper bound of an answer's bytes, for R rows and S steps."""
        return 2 * 4 * rows * (end.size + 1)  # with ids; twice that, because a codec may add bytes

    def uplink(self, table: Tensor, saved: str = "uplink") -> Channel:
        """Make one end of a link of embeddings; the parameters are as in `Channel`."""
        return Channel(self.config.uplink, table, self.mechanism.encodes_by_row, saved=saved)

    def downlink(self, table: Tensor, saved: str, by_step: bool = False) -> Channel:
        """Make one end of a link of answers; the parameters are as in `Channel`."""
        by_row, dtype = self.mechanism.encodes_by_row, "float32" if by_step else self.answer_dtype
        return Channel(
            *(self.config.downlink, table, by_row), saved=saved, by_step=by_step, dtype=dtype
        )

    # --- the protocol ---------------------------------------------------------------------------

    def opening(self, end: HolderEnd, party: int) -> Arrays:
        """Return the arrays to send with the first order of a party."""
        return {}

    @abstractmethod
    def embed(self, end: PartyEnd, order: TrainOrder, window: Window) -> Blocks:
        """Embed the rows of a window at a party.

        Returns
        -------
        The blocks of its upload, by the names in `uplinks`.
        """

    def read(self, blocks: Blocks, window: Window) -> Reading:
        """Read the blocks of an upload at the label holder."""
        rows = blocks["embedding"]
        return Reading(rows, (rows,))

    @abstractmethod
    def answer(
        self, end: HolderEnd, arrivals: Sequence[Arrival], joint: Joint
    ) -> dict[int, Blocks]:
        """Step the top model at the label holder, and answer each party.

        Returns
        -------
        The blocks of each party's answer, by the names in `downlinks`. A party whose model is
        frozen gets no blocks.
        """

    def encode(
        self, end: HolderEnd, arrivals: Sequence[Arrival], answers: Mapping[int, Blocks]
    ) -> dict[int, Arrays]:
        """Make the arrays of each party's answer."""
        encoded = {}
        for arrival in arrivals:
            whose = "all" if self.aggregation.alike else arrival.party
            key = f"{self.config.training.seed}|down|{whose}|{end.steps}"
            links, blocks = end.downlinks[arrival.party], answers[arrival.party]
            encoded[arrival.party] = links.encode(blocks, arrival.window, key)
        return encoded

    def silence(self, arrival: Arrival) -> Blocks:
        """Return an answer without information, for use once the budget is spent.

        Every estimator that answers by scalars must have this method. It must also pass every value
        that depends on labels to the noise of its `HolderEnd`, if there is noise. The accountant
        does not count any other release of labels.
        """
        raise NotImplementedError

    @abstractmethod
    def update(self, end: PartyEnd, blocks: Blocks, order: TrainOrder, window: Window) -> None:
        """Learn at a party from the answer to its upload.

        The model still has the parameters that made the upload. It changes in place, by whole
        steps, because no copy exists to restore.

        Raises
        ------
        VflError
            If the answer lacks its content. The caller puts the text after a colon.
        """
