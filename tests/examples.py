"""The examples of CONTRIBUTING.md and of two guides: the text of each file, by its name."""

import re
from pathlib import Path

_ROOT = Path(__file__).parents[1]
_PAGES = ("CONTRIBUTING.md", "docs/how-to/write-a-codec.md", "docs/how-to/write-an-estimator.md")
_BLOCK = re.compile(r'```python\n("""(\w+\.py): .*?)```', re.DOTALL)

EXAMPLES: dict[str, str] = {
    found[2]: found[1] for page in _PAGES for found in _BLOCK.finditer((_ROOT / page).read_text())
}
