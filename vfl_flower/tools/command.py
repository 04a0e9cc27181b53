"""A command of `vfl` whose errors become one sentence and an exit code."""

import errno
import logging
import re
import sys
from difflib import get_close_matches
from typing import Any, NoReturn

import click
import typer
from typer.core import TyperCommand

from vfl_flower.config import logs
from vfl_flower.config.errors import Terminated, VflError, meant
from vfl_flower.config.run_config import KEYS

_MEANT = {
    **dict.fromkeys(("train", "fit", "start", "simulate"), "vfl run"),
    **dict.fromkeys(("test", "score", "evaluate"), "vfl predict"),
    **dict.fromkeys(("plot", "show", "summary"), "vfl report"),
    **dict.fromkeys(("options", "systems", "strategies"), "vfl list"),
    **{"tune": "vfl sweep", "check": "vfl doctor", "attack": "vfl audit"},
    **{"help": "vfl --help", "version": "vfl --version"},
    **dict.fromkeys(("resume", "continue"), "vfl run -c \"resume='RUN'\""),
}
"""Names that other programs give to a command, and the command."""


def shown_usage(error: click.ClickException) -> int:
    """Show an error about the command line, with what may be meant; return an exit code."""
    said, asks = error.message, "Did you mean" in error.message
    if named := re.match(r"No such command '([\w-]+)'", said):
        cutoff = 1.0 if asks else 0.6  # typer has found a close name
        for close in get_close_matches(named[1], _MEANT, 1, cutoff):
            said = f"{named[0]}. You may want `{_MEANT[close]}`."
    elif (named := re.match(r"No such option:? '?--([\w-]+)", said)) and (
        named[1] in KEYS or meant(named[1], KEYS, exact=True)
    ):
        hint = "" if named[1] in KEYS else meant(named[1], KEYS)
        where = 'Options of a run stand in -c, as in -c "epochs=5".'
        said, asks = f"No such option --{named[1]}. {hint}{where}", True
    elif isinstance(error, click.MissingParameter):
        if error.param and error.param.name in ("model", "run"):
            said = "RUN is the results folder of a run, such as runs/a."
    elif "unexpected extra argument" in said and "=" in said:
        said += ". Write all options in one pair of quotes after -c."
    elif re.search(r"unexpected extra argument.*\.(csv|gz|parquet)\W", said):
        said += (
            ". Name the file by dataset='files:PATH' in -c, and parties' files by --node-config."
        )
    vars(error).update(message=said, **({"possibilities": None} if asks else {}))  # click asks too
    error.show()
    return error.exit_code


class Command(TyperCommand):
    """A command whose errors become one sentence and an exit code."""

    uses_flower = True
    notices = logging.NOTSET  # level from which `flwr.notice` is shown: here, as all of Flower

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. It imports what it needs, so that --help waits for no import."""
        try:
            if self.uses_flower:
                import flwr.app  # noqa: F401  (sets up its logger)

                logging.getLogger("flwr").setLevel(logging.WARNING)
                logs.notice.setLevel(self.notices)
                logs.without_colours()
            return super().invoke(ctx)
        except VflError as error:
            _fail(str(error), 1, error)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            where = error.filename or "The disk"  # perhaps the disk of temporary files
            _fail(f"{where} is out of space: make some, and try again.", 1, error)
        except KeyboardInterrupt as error:
            _fail(str(error) or "stopped.", 130, error)
        except Terminated as error:
            print(f"vfl: {error}", file=sys.stderr)
            raise


class NotifyingCommand(Command):
    """A command that also shows what its work notes on the way."""

    notices = logging.INFO


class LightCommand(Command):
    """A command that answers at once, since it imports neither Flower nor torch."""

    uses_flower = False


def _fail(sentence: str, code: int, error: BaseException) -> NoReturn:
    print(f"vfl: {sentence}", file=sys.stderr)
    raise typer.Exit(code) from error
