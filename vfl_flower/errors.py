"""The errors of this application: each is one sentence for the person who can mend it."""

from __future__ import annotations

import traceback


class VflError(Exception):
    """What is wrong, where, and what to do, in one sentence."""


class ConfigError(VflError):
    """A run configuration, data set or model that cannot work; raised before any training."""


class CodeError(ConfigError):
    """Code of one's own raises: what it says may quote data, and is for who owns it alone.

    outside : the sentence for others, without that.
    """

    def __init__(self, sentence: str, error: Exception) -> None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.name}, {place.filename.rsplit('/', 1)[-1]}:{place.lineno}"
        super().__init__(f"{sentence}: {type(error).__name__}: {error}")
        self.outside = f"{sentence} ({type(error).__name__} in {where}): its own log says why."


class OutOfStepError(VflError):
    """A party's state is not that of the last message that it was sent; it has served nothing."""


class DivergedError(VflError):
    """A loss, or a gradient, has grown beyond all numbers that can be used."""

    def __init__(self) -> None:
        super().__init__("The loss is no longer finite: lower the learning rates.")


class SumError(VflError):
    """What parties have uploaded makes no sum of embeddings, and nobody knows whose fault it is."""

    def __init__(self) -> None:
        super().__init__(
            "The parties' masked embeddings make no sum: one has sent what is none, as of "
            "embeddings that are too large (its own log says so then), or they were not all sent "
            "the same. A run can be resumed from its last checkpoint."
        )


class PartyError(VflError):
    """A party failed, or sent something that must not be used."""

    def __init__(self, who: str, cause: str) -> None:
        super().__init__(f"{who} {cause}")


class PoisonError(PartyError):
    """What a party has uploaded took the loss beyond all numbers that can be used."""

    def __init__(self, party: int, cause: str) -> None:
        super().__init__(f"Party {party}", cause)
        self.party = party
