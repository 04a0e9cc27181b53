"""Count the functions and files that one step crosses, in process.

A step begins where the strategy orders the parties' next turns and ends where it orders those
after. Functions of this project alone count, each once. Prints one JSON object as its last line.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.common import parser, report
from strategies.vertical import Vertical
from vfl_flower.launch.engines import run_local

ROOT = Path(__file__).parents[1]
OURS = tuple(str(ROOT / folder) for folder in ("vfl_flower", "strategies"))
KEYS = {"dataset": "digits", "epochs": 20, "window": 1, "out": ""}
STEP = 10
"""Number of the step that is counted: the first ones fill caches."""


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--parties", type=int, default=2)
    made.add_argument("--strategy", default="split-nn")
    made.add_argument("--list", action="store_true", help="print each function and its calls")
    options = made.parse_args()
    calls: Counter[tuple[str, str]] = Counter()
    turns = 0

    def count(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS) and code.co_name[0] != "<":
            calls[str(Path(code.co_filename).relative_to(ROOT)), code.co_qualname] += 1

    ordered = Vertical.configure_train

    def configure_train(self: Vertical, *arguments: Any) -> Any:
        nonlocal turns
        turns += 1
        sys.setprofile(count if turns == STEP else None)
        return ordered(self, *arguments)

    setattr(Vertical, "configure_train", configure_train)  # noqa: B010
    with tempfile.TemporaryDirectory() as folder:
        keys = {**KEYS, "strategy": options.strategy, "out": str(Path(folder, "run"))}
        run_local(options.parties, keys)
    files = Counter(file for file, _ in calls)
    if options.list:
        for (file, name), times in sorted(calls.items()):
            print(f"{times:4} {file} {name}")
    for file, functions in files.most_common():
        print(f"{functions:4} {file}")
    report("step", {"functions": len(calls), "files": len(files), "calls": sum(calls.values())})


if __name__ == "__main__":
    main()
