"""A party with photographs by id, and one with a table: from files to predictions.

    python examples/images/photographs.py

The photographs are the upper halves of scikit-learn's digits, the table has the pixels of the
lower ones, and each party lacks some people. Photographs go through a ResNet-20, the table through
an mlp.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pandas as pd
from PIL import Image
from sklearn.datasets import load_digits

from vfl_flower.launch.engines import predict_local, run_local

TOWER = f"{Path(__file__).absolute().parent}/towers.py:ResNet20"


def write(folder: Path) -> None:
    """Photographs in a folder, a table, and labels, made of digits."""
    digits = load_digits()
    (folder / "photographs").mkdir()
    for number, image in enumerate(digits.images):
        if number % 20:  # nobody has everyone
            upper = Image.fromarray((15 * image[:4]).astype("uint8")).resize((32, 16))
            upper.save(folder / "photographs" / f"{1000 + number}.png")
    people = pd.Series(range(1000, 1000 + len(digits.target)), name="person")
    table = pd.DataFrame(digits.images[:, 4:].reshape(len(people), -1)).add_prefix("pixel_")
    table.assign(person=people).iloc[3:].to_csv(folder / "table.csv", index=False)
    labels = pd.DataFrame({"person": people, "label": digits.target})
    labels.to_csv(folder / "labels.csv", index=False)


def main(epochs: int = 8) -> float:
    """Train, predict, and say what was reached on held-out people."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        nodes = [
            {"images": str(folder / "photographs"), "model": TOWER, "embedding-size": 16},
            {"file": str(folder / "table.csv"), "id": "person"},
        ]
        run = run_local(
            2,
            {
                **{"dataset": f"files:{folder / 'labels.csv'}", "id": "person"},
                **{"epochs": epochs, "batch-size": 64, "optimizer": "adamw"},
                **{"party-lr": 0.003, "server-lr": 0.003, "lr-schedule": "cosine"},
                "out": str(folder / "run"),
            },
            node_configs=nodes,
        )
        accuracy = float(run.summary["test_accuracy"])
        keys = {"model": str(folder / "run"), "dataset": f"files:{folder / 'labels.csv'}"}
        said = pd.read_csv(predict_local(keys, nodes))
    print(f"accuracy {accuracy:.3f} on held-out people; predictions of {len(said)}")
    return accuracy


if __name__ == "__main__":
    main()
