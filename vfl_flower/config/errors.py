"""The errors of this application: each is one sentence for the person who can mend it."""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

_OWN_WORDS = re.compile(r"failed: (((?:Party|In party) (\d+)\b).*)", re.DOTALL)

IN_PROCESS = re.compile(r"vfl_flower\.api\.own_code:(\w+?)__in_process_[0-9a-f]{16}")
"""Names of classes and functions that `own_code` holds in this process."""


def asked(name: str, names: Iterable[str], verb: str) -> str:
    """Ask for the name that was perhaps meant, and go on with a verb: the middle of a sentence."""
    close = get_close_matches(str(name).lower(), list(names), 1)
    return f" did you mean {close[0]!r}? {verb.capitalize()}" if close else f" {verb}"


def unknown(key: str, value: Any, names: Sequence[str]) -> ConfigError:
    """Return the error of a value that is none of those that a key can have."""
    ask = asked(value, names, "choose")
    return ConfigError(f"{key} = {value!r} is not known:{ask} one of {', '.join(names)}.")


def _in_words(said: object) -> object:
    """Call a class without an import path by its name in code, in a text."""
    return IN_PROCESS.sub(lambda found: found[1], said) if isinstance(said, str) else said


class VflError(Exception):
    """What is wrong, where, and what to do, in one sentence."""

    def __init__(self, *said: object) -> None:
        super().__init__(*map(_in_words, said))


class ConfigError(VflError):
    """A run configuration, data set or model that cannot work; raised before any training."""


class SharedError(ConfigError):
    """Another user can change a folder that a run reads, or put another in its place.

    where : the folder, or one above it, by which the other user can.
    """

    def __init__(self, folder: object, where: object, why: str, mode: str) -> None:
        mend = f", or run `chmod {mode} {where}`" if mode else ""
        super().__init__(
            f"Other users can change {folder}, since {where} {why}: name a folder that only you "
            f"can write to{mend}."
        )


class CodeError(ConfigError):
    """Code of one's own raises: what it says may quote data, and is for who owns it alone.

    outside : the sentence for others, without that.
    """

    def __init__(self, sentence: str, error: Exception) -> None:
        place = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{place.name}, {place.filename.rsplit('/', 1)[-1]}:{place.lineno}"
        super().__init__(f"{sentence}: {type(error).__name__}: {error}")
        self.outside = f"{sentence} ({type(error).__name__} in {where}): its own log says why."


class Interrupted(KeyboardInterrupt):
    """Ctrl-C has ended a run, of which a checkpoint was kept.

    sentence : what has ended it, and when.
    folder : the results folder, from which the run can be resumed.
    """

    def __init__(self, sentence: str, folder: str) -> None:
        super().__init__(sentence)
        self.sentence, self.folder = sentence, folder

    def __str__(self) -> str:
        return _resumable(self.sentence, self.folder)


class Terminated(SystemExit):
    """SIGTERM has ended this process; of a run with a ``folder`` a checkpoint was kept."""

    def __init__(self, sentence: str = "SIGTERM ended the run.", folder: str = "") -> None:
        super().__init__(128 + signal.SIGTERM)
        self.sentence, self.folder = sentence, folder

    def __str__(self) -> str:
        return _resumable(self.sentence, self.folder)


def _resumable(sentence: str, folder: str) -> str:
    if not folder:
        return sentence
    return f"{sentence.rstrip('.')}: set resume='{folder}' to go on with it."


def why(error: BaseException) -> str:
    """Say in words what has ended a run."""
    if isinstance(error, Interrupted | Terminated):
        return error.sentence
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "Ctrl-C ended the run."
    if isinstance(error, SystemExit):
        signals = {128 + each: each.name for each in signal.Signals}
        name = signals.get(error.code) if isinstance(error.code, int) else None
        return f"{name or 'The end of its process'} ended the run."
    return str(error) or type(error).__name__


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


BY_NODE = "The party on node "
"""How a party is named as long as its number is not known."""


class PartyError(VflError):
    """A party failed, or sent something that must not be used.

    It is named once: by its own words, if they begin with its number, or else by ``who``.
    """

    def __init__(self, who: str, cause: str) -> None:
        own = _OWN_WORDS.fullmatch(cause)
        same = own and (who == f"Party {own[3]}" or who.startswith(BY_NODE))
        super().__init__(own[1] if own and same else f"{who} {cause}")


class PoisonError(PartyError):
    """What a party has uploaded took the loss beyond all numbers that can be used."""

    def __init__(self, party: int, cause: str) -> None:
        super().__init__(f"Party {party}", cause)
        self.party = party
