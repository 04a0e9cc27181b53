"""End all that this process has started, even if this process is killed.

A killed process cannot end its children. So a second process watches the first: it is this file,
run as a script. It knows all descendants by a variable in their environment, which they inherit,
whoever started them and in which session or thread, unlike Linux' PR_SET_PDEATHSIG.
"""

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from select import select

import psutil

MARK = "VFL_ENDS_WITH"  # variable whose value is the same in all processes that end together
_GRACE = 10.0  # seconds from SIGTERM to SIGKILL
_MOST = 60.0  # seconds after which a process that no signal ends is left
_LOOK = 0.5  # seconds between two looks at the parent


@contextmanager
def ending_with_this_process(folder: str = "") -> Iterator[dict[str, str]]:
    """Yield a variable for the environment of processes that end with this block, however it ends.

    Their temporary folder is deleted then.
    """
    mark = secrets.token_hex(16)
    watcher = subprocess.Popen(
        [sys.executable, "-P", __file__, str(os.getpid()), mark, folder],
        cwd="/",
        env={name: value for name, value in os.environ.items() if name != MARK},
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield {MARK: mark}
    finally:
        assert watcher.stdin
        watcher.stdin.close()
        watcher.wait()


def _marked(mark: str, known: set[psutil.Process]) -> set[psutil.Process]:
    """Return the running processes with this mark, or that were known to have it.

    Ray's agents write a title over their environment, so the mark of a parent counts for them.
    """
    found = set[psutil.Process]()
    for process in psutil.process_iter():  # by number: parents come first
        with suppress(psutil.Error, OSError):  # it has ended, or is another user's
            environment = process.environ()
            covered = not environment and process.parent() in found
            has_mark = environment.get(MARK) == mark or covered or process in known
            if has_mark and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


def _watch(parent: int, mark: str, folder: str) -> None:
    """Wait until the parent closes its pipe, or is gone: a fork may hold it; then end them all."""
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # it ends with its parent
        signal.signal(each, signal.SIG_IGN)
    while os.getppid() == parent and not select([0], [], [], _LOOK)[0]:
        pass
    began, told = time.monotonic(), set[psutil.Process]()
    while (found := _marked(mark, told)) and (spent := time.monotonic() - began) < _MOST:
        for process in found:  # also one that another has started since
            with suppress(psutil.Error):
                if spent > _GRACE:
                    process.kill()
                elif process not in told:
                    process.terminate()
        told |= found
        time.sleep(_LOOK / 5)
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    _watch(int(sys.argv[1]), *sys.argv[2:])
