"""Run several configurations, each into its own folder: compare, `--seeds` and sweep share this."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

from vfl_flower.config.errors import ConfigError, VflError
from vfl_flower.config.run_config import RunConfig
from vfl_flower.label_holder.progress import titled
from vfl_flower.label_holder.results import check_free
from vfl_flower.launch.descendants import ending_with_this_process
from vfl_flower.launch.engines import Finished, run_local
from vfl_flower.results.report.read import folder_of

IMPOSSIBLE = 93  # exit code of a process that found that none of its runs can be judged
_LOOK = 0.2  # seconds between two looks at the processes


def check_anew(config: RunConfig, what: str, *more: str) -> None:
    """Raise `ConfigError` if a run begins with another: by task, model, resume, rerun or more."""
    begins = [getattr(config.running, each) for each in ("resume", "rerun", *more)]
    if config.task != "train" or config.model or any(begins):
        names = ["task", "model", "resume", *more]
        raise ConfigError(f"{what} trains every run anew: leave {', '.join(names)} and rerun out.")


def run_each(
    configurations: Mapping[str, Mapping[str, Any]],
    folder: Path,
    run: Callable[[dict[str, Any]], Finished],
    write: Callable[[Mapping[str, Finished]], None],
) -> dict[str, Finished]:
    """Run configurations one after the other, each in a folder by its name.

    ``write`` gets the finished runs after each, so that a failure leaves the earlier results.
    """
    check_free(folder)
    finished: dict[str, Finished] = {}
    for number, (name, keys) in enumerate(configurations.items(), 1):
        with titled(f"{name} ({number}/{len(configurations)})"):
            finished[name] = run({**keys, "out": str(folder / folder_of(name))})
        write(finished)
    return finished


def align_once(
    parties: int, keys: Mapping[str, Any], node_configs: Sequence[Mapping[str, Any]]
) -> None:
    """Align the parties' rows, so that runs side by side use the same alignment again."""
    with tempfile.TemporaryDirectory() as place:
        align = {**keys, "task": "align", "out": str(Path(place, "run"))}
        run_local(parties, align, node_configs=node_configs)


def side_by_side(
    module: str, job: Mapping[str, Any], number: int, log: BinaryIO, look: Callable[[], None]
) -> bool:
    """Run processes of a module with one thread each; return whether they can judge their runs.

    Each reads the job from its standard input. ``look`` is called while they run.
    """
    with ExitStack() as ended, ending_with_this_process() as mark:
        processes = [
            ended.enter_context(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", module],
                    env={**os.environ, **mark, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the process that waits
                )
            )
            for _ in range(number)
        ]
        for process in processes:
            ended.callback(process.terminate)
            assert process.stdin
            with suppress(BrokenPipeError), process.stdin as job_file:
                job_file.write(json.dumps(job).encode())
        while (codes := {process.poll() for process in processes}) <= {0, None} and None in codes:
            look()
            time.sleep(_LOOK)
    if IMPOSSIBLE in codes:
        return False
    if codes != {0}:
        raise VflError(
            "A process of trials has ended by itself, perhaps for want of memory: see "
            f"{job['folder']}/workers.log, lower --jobs, and give the same command again."
        )
    return True
