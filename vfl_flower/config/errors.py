"""Errors of this application: each is a message for the person who can fix it."""

from __future__ import annotations

import copyreg
import re
import signal
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from types import FrameType
from typing import Any

from vfl_flower.config.names import in_words

_OWN_WORDS = re.compile(r"failed: ((?:Party|In party) ([\w-]+).*)", re.DOTALL)

_LONGEST = 200  # characters of a value in an error

IN_PROCESS = re.compile(r"vfl_flower\.api\.own_code:(\w+?)__in_process_[0-9a-f]{16}")
"""Names of classes and functions that `own_code` holds in this process."""


def shown(value: object) -> str:
    """Return a value as an error may show it: never the rows of a frame, an array or a list."""
    if isinstance(value, str | int | float | type | None) or callable(value):
        text = repr(value)
        return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    size = f" of length {len(value)}" if isinstance(value, Sized) else ""
    size = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else size
    return f"<{type(value).__name__}{size}>"


def asked(name: str, names: Iterable[str], verb: str) -> str:
    """Suggest a similar name, then continue with a verb: the middle of a sentence."""
    close = get_close_matches(str(name).lower(), list(names), 1)
    return f" did you mean {close[0]!r}? {verb.capitalize()}" if close else f" {verb}"


def label_asked(label: str, names: Sequence[str]) -> str:
    """Return the end of an error about an absent label column, as `asked`: what to set."""
    if not names:
        return " it has no other column. Add one."
    if len(names) == 1:
        return f"{asked(label, names, 'set')} label={names[0]!r}."
    return f"{asked(label, names, 'set')} label='...' with one of {first_of(names)}."


def first_of(names: Sequence[str], most: int = 8) -> str:
    """Return the first names in a row, each in quotes if a comma or a space could part it."""
    shown = [repr(name) if "," in name or name != name.strip() else name for name in names[:most]]
    return ", ".join(shown) + ", ..." * (len(names) > most)


_SYNONYMS = {
    **dict.fromkeys(("lr", "learning-rate", "eta"), ("party-lr", "server-lr")),
    **dict.fromkeys(("rounds", "num-rounds", "num-server-rounds"), ("epochs",)),
    **dict.fromkeys(("system", "algorithm", "method"), ("strategy",)),
    **dict.fromkeys(("gpu", "cuda"), ("device",)),
    **dict.fromkeys(("path", "csv", "data", "file", "filename"), ("file", "dataset")),
    **dict.fromkeys(("key", "index", "join", "on", "id-column", "id-col"), ("id",)),
    **dict.fromkeys(("noise", "dp"), ("privacy", "epsilon")),
    **dict.fromkeys(("y", "label-column", "target-column"), ("label",)),
    **{"momentum": ("optimizer",), "early-stopping": ("patience",)},
    **{"hidden": ("bottom-hidden", "top-hidden"), "random-state": ("seed",)},
}
"""Name of an option in other programs -> our options, in the order of likelihood."""


def meant(name: object, names: Iterable[str], exact: bool = False) -> str:
    """Ask whether one of these names is meant; if ``exact``, by what other programs call it."""
    like = str(name).lower().replace("_", "-")
    dashed = {each.replace("_", "-"): each for each in names}
    known = [each for each in _SYNONYMS.get(like, ()) if each in dashed]
    found = known or ([] if exact else get_close_matches(like, dashed, 1))
    return f"Did you mean {' or '.join(dashed[each] for each in found)}? " if found else ""


def unknown(key: str, value: Any, names: Sequence[str]) -> ConfigError:
    """Return the error of a value that an option cannot have."""
    ask = asked(value, names, "choose")
    return ConfigError(f"{key} = {shown(value)} is not known:{ask} one of {', '.join(names)}.")


class VflError(Exception):
    """Say what is wrong, where, and what to do."""

    def __init__(self, *said: object, outside: str = "") -> None:
        # A class without an import path has its name in code.
        super().__init__(*(IN_PROCESS.sub(r"\1", t) if isinstance(t, str) else t for t in said))
        self._outside = outside

    @property
    def outside(self) -> str:
        """Return the message for others than the owner of the data and the code."""
        return self._outside or str(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the text: subclasses are made of other arguments."""
        return copyreg.__newobj__, (type(self), *self.args), vars(self)  # type: ignore[attr-defined]


class ConfigError(VflError):
    """A run configuration, data set or model is invalid; raised before any training."""


class UnfitError(ConfigError):
    """A table cannot be used: `data.survey` says all that it and the other tables need."""


class SharedError(ConfigError):
    """Another user can change, or replace, a folder that a run reads."""

    def __init__(self, folder: object, where: object, why: str, mode: str) -> None:
        mend = f", or run `chmod {mode} {where}`" if mode else ""
        super().__init__(
            f"Other users can change {folder}, since {where} {why}. Name a folder that only you "
            f"can write to{mend}."
        )


class CodeError(ConfigError):
    """User code raises an error.

    Its message may quote data, so only the owner of the code may see it.
    """

    def __init__(self, sentence: str, error: Exception) -> None:
        outside = f"{sentence} ({place(error)}). {_SHOWN}"
        line = next(iter(str(error).splitlines()), "")  # torch's texts may have a hundred more
        super().__init__(f"{sentence}: {type(error).__name__}: {line[:_MOST]}", outside=outside)


_MOST = 400  # characters of an error of a user's code
_SHOWN = "Its text may quote data: a party's own log and a run in one process show it."
_LIBRARIES = "-packages/"  # in the path of a library: of the user, the system or Python
_STDLIB = sysconfig.get_path("stdlib")
_PACKAGE = str(Path(__file__).parents[1])


def in_own_code(error: BaseException) -> bool:
    """Return whether an error passed through a user's own file, not only through libraries."""
    if isinstance(error, CodeError):
        return True
    files = {each.filename for each in traceback.extract_tb(error.__traceback__)}
    # An editable installation has this package outside of the libraries.
    here = (_STDLIB, _PACKAGE, "<")
    return any(not (_LIBRARIES in each or each.startswith(here)) for each in files)


def place(error: BaseException) -> str:
    """Return the type of an error and its last place outside of libraries, without its text."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [each for each in frames if _LIBRARIES not in each.filename]
    last = (own or frames)[-1]
    where = f"{last.name}, {last.filename.rsplit('/', 1)[-1]}:{last.lineno}"
    return f"{type(error).__name__} in {where}"


def places(error: BaseException) -> str:
    """Return the type of an error, and of its causes, each with its places in the code."""
    before = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    frames = traceback.extract_tb(error.__traceback__)
    lines = [f"{each.filename}:{each.lineno} in {each.name}" for each in frames]
    said = "\n".join([type(error).__name__, *lines])
    return f"{places(before)}\n{said}" if before else said


def raised(error: Exception) -> str:
    """Return what others may know of an unexpected error: its type and place."""
    return f"raised {place(error)}. {_SHOWN}"


class Interrupted(KeyboardInterrupt):
    """Ctrl-C has ended a run that saved a checkpoint in this folder."""

    def __init__(self, sentence: str, folder: str) -> None:
        super().__init__(sentence, folder)
        self.sentence, self.folder = sentence, folder

    def __str__(self) -> str:
        return _resumable(self.sentence, self.folder)


class Terminated(SystemExit):
    """A signal of `TERMINATING` has ended this process. A run may have saved a checkpoint."""

    def __init__(self, number: int, sentence: str = "", folder: str = "") -> None:
        super().__init__(128 + number)
        self.number, self.folder = number, folder
        self.sentence = sentence or f"{signal_in_words(number)} ended the run."

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the arguments, and not only the exit status."""
        return Terminated, (self.number, self.sentence, self.folder), vars(self)

    def __str__(self) -> str:
        return _resumable(self.sentence, self.folder)


TERMINATING = signal.SIGTERM, signal.SIGHUP
"""Signals that end a process. A terminal that closes sends SIGHUP."""


senders: dict[int, str] = {signal.SIGINT: "`flwr stop`"}
"""Senders of signals to a ServerApp, as far as they are known."""


def signal_in_words(number: int) -> str:
    """Return what has sent a signal, or the signal's name."""
    return senders.get(number) or signal.Signals(number).name


@contextmanager
def terminating(*more: signal.Signals) -> Iterator[None]:
    """Have `TERMINATING` and more raise `Terminated`, so that the processes of a run end too.

    A signal that is ignored stays ignored, as SIGHUP under nohup.
    """
    before = {each: signal.getsignal(each) for each in (*TERMINATING, *more)}
    for each, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(each, terminate)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def terminate(number: int, frame: FrameType | None) -> None:
    """End this process by an exception."""
    raise Terminated(number)


def _resumable(sentence: str, folder: str) -> str:
    return f"{sentence.rstrip('.')}. Set resume='{folder}' to continue." if folder else sentence


def why(error: BaseException) -> str:
    """Say what has ended a run."""
    if isinstance(error, Interrupted | Terminated):
        return error.sentence
    if isinstance(error, KeyboardInterrupt):
        return str(error) or "Ctrl-C ended the run."
    if isinstance(error, SystemExit):
        signals = {128 + each: each.name for each in signal.Signals}
        name = signals.get(error.code) if isinstance(error.code, int) else None
        return f"{name or 'The end of its process'} ended the run."
    return in_words(str(error)) or type(error).__name__


class OutOfStepError(VflError):
    """A party's state does not match its last message. The party has served nothing."""


class DivergedError(VflError):
    """A loss or a gradient is too large to be used, or not finite."""

    def __init__(self) -> None:
        super().__init__("The loss is no longer finite. Lower the learning rates.")


class SumError(VflError):
    """The parties' uploads make no sum of embeddings. The faulty party is unknown."""

    def __init__(self) -> None:
        super().__init__(
            "The parties' masked embeddings cannot be added. A party's embeddings may be too large "
            "(its own log says so then), or parties got different messages. Resume the run from "
            "its last checkpoint."
        )


BY_NODE = "The party on node "  # name of a party whose number is not known, followed by its node


class PartyError(VflError):
    """A party failed, or sent something unusable.

    The error names the party once: by ``cause`` if that begins with its number, else by ``who``.
    """

    def __init__(self, who: str, cause: str) -> None:
        own = _OWN_WORDS.fullmatch(cause)
        same = own and (who.startswith(BY_NODE) or in_words(who) == in_words(f"Party {own[2]}"))
        super().__init__(own[1] if own and same else f"{who} {cause}")


@contextmanager
def sent_by(party: int) -> Iterator[None]:
    """Name the party in an error about what it has sent: a `PartyError`. A `SumError` stays."""
    try:
        yield
    except SumError:
        raise
    except VflError as error:
        raise PartyError(f"Party {party}", f"sent {error}") from None


class PoisonError(PartyError):
    """A party's upload made the loss non-finite."""

    def __init__(self, party: int, cause: str) -> None:
        super().__init__(f"Party {party}", cause)
        self.party = party
