"""`python -m vfl_flower` is the command `vfl`."""

import sys

from vfl_flower.tools.cli import main

sys.exit(main())
