"""The examples of CONTRIBUTING.md: the text of each file, by its name."""

from __future__ import annotations

import re
from pathlib import Path

_BLOCK = re.compile(r'```python\n("""(\w+\.py): .*?)```', re.DOTALL)

EXAMPLES: dict[str, str] = {
    found[2]: found[1]
    for found in _BLOCK.finditer((Path(__file__).parents[1] / "CONTRIBUTING.md").read_text())
}
