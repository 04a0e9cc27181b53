"""Benchmarks: `python -m benchmarks.NAME`; each prints one JSON object as its last line."""

import atexit
import os
import sys
from contextlib import ExitStack

if sys.argv[0] == "-m":  # as long as Python looks for the module of `python -m benchmarks.NAME`
    from vfl_flower.launch.descendants import ending_with_this_process

    _until_end = ExitStack()
    os.environ |= _until_end.enter_context(ending_with_this_process())
    atexit.register(_until_end.close)
