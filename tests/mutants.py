"""Small changes of the code that guards parties, and the share that the daily tests notice.

`python -m tests.mutants` changes one operator, constant or condition at a time in a copy of each
module of `MODULES`, runs the module's tests, and prints the score. A word selects modules by
their path, and a number says how many changes of a module are drawn. Each day draws others.
"""

import ast
import random
import sys
import tempfile
from collections.abc import Iterator
from datetime import date
from pathlib import Path

from tests.planted import copied, fails

MODULES = {
    "party/limits.py": ("party/test_limits.py", "party/test_asked_ids.py"),
    "protocol/sampling/base.py": ("protocol/test_batches.py",),
    "protocol/privacy/gaussian.py": (
        "protocol/test_accountants.py",
        "protocol/test_scalar_privacy.py",
    ),
    "protocol/privacy/labels.py": ("protocol/test_label_noise.py", "protocol/test_label_draws.py"),
    "transport/http/tokens.py": ("transport/test_gate.py", "tasks/test_serving.py"),
    "transport/stream/links.py": ("stream/test_strangers.py", "stream/test_broken.py"),
    "protocol/codecs/channel.py": ("protocol/test_codecs.py", "protocol/test_ef_vfl.py"),
}
OTHERS: dict[type[ast.AST], type[ast.AST]] = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt},
    **{ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.In: ast.NotIn, ast.NotIn: ast.In},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.And: ast.Or, ast.Or: ast.And},
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult},
}


def mutants(source: str) -> Iterator[tuple[int, str]]:
    """Yield each change of a module: its line, and the changed module."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHERS:
            ops = node.ops
            node.ops = [OTHERS[type(ops[0])](), *ops[1:]]  # type: ignore[list-item]
            yield line, ast.unparse(tree)
            node.ops = ops
        elif isinstance(node, ast.BoolOp | ast.BinOp) and type(node.op) in OTHERS:
            op = node.op
            node.op = OTHERS[type(op)]()  # type: ignore[assignment]
            yield line, ast.unparse(tree)
            node.op = op
        elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
            value = node.value
            node.value = not value if isinstance(value, bool) else value + 1
            yield line, ast.unparse(tree)
            node.value = value
        elif isinstance(node, ast.If):
            test = node.test
            node.test = ast.UnaryOp(ast.Not(), test)
            yield line, ast.unparse(tree)
            node.test = test


def noticed(folder: Path, tests: list[str]) -> bool:
    """Return whether the tests fail, or cannot even import the change."""
    try:
        return fails(folder, *tests)
    except RuntimeError:
        return True


def score(module: str, most: int, folder: Path) -> tuple[int, int]:
    """Return how many changes of a module its tests notice, and how many were made."""
    file = folder / "vfl_flower" / module
    source = file.read_text()
    tests = [f"tests/{name}" for name in MODULES[module]]
    if fails(folder, *tests):
        raise SystemExit(f"The tests of {module} fail without a change. Repair them first.")
    drawn = list(mutants(source))
    random.Random(f"{module} {date.today()}").shuffle(drawn)
    hits = 0
    for line, changed in drawn[:most]:
        file.write_text(changed)
        hit = noticed(folder, tests)
        hits += hit
        if not hit:
            print(f"not noticed: {module}:{line}", flush=True)
    file.write_text(source)
    return hits, len(drawn[:most])


def main() -> None:
    """Print the score of all modules, or of those that the words select."""
    words = [word for word in sys.argv[1:] if not word.isdigit()]
    most = next((int(word) for word in sys.argv[1:] if word.isdigit()), 20)
    sums = [0, 0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "copy"
        copied(folder)
        for module in MODULES:
            if not words or any(word in module for word in words):
                hits, made = score(module, most, folder)
                sums = [sums[0] + hits, sums[1] + made]
                print(f"{hits} of {made} changes of {module} are noticed.", flush=True)
    print(f"{sums[0]} of {sums[1]} changes are noticed.")


if __name__ == "__main__":
    main()
