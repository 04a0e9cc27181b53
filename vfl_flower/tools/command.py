"""A command of `vfl` whose errors become one sentence and an exit code."""

from __future__ import annotations

import errno
import logging
import sys
from typing import Any, NoReturn

import click
import typer
from typer.core import TyperCommand

from vfl_flower.config.errors import Terminated, VflError


class Command(TyperCommand):
    """A command whose errors become one sentence and an exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command. It imports what it needs, so that --help waits for no import."""
        try:
            import flwr.app  # noqa: F401  (sets up its logger)

            logging.getLogger("flwr").setLevel(logging.WARNING)
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


def _fail(sentence: str, code: int, error: BaseException) -> NoReturn:
    print(f"vfl: {sentence}", file=sys.stderr)
    raise typer.Exit(code) from error
