"""A hospital's notes and a laboratory's values, made up: who comes back within a month?

    python examples/text/notes.py

The hospital reads its notes with a tokenizer and a small DistilBERT from its own folders, as
`transformers` saves them. The model's folder has only a configuration, so its weights begin at
random. The laboratory has a table. Neither party sees the other's data, and the label holder sees
neither's.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DistilBertConfig, PreTrainedTokenizerFast

from vfl_flower.launch.engines import run_local

PEOPLE = 600
GOOD, BAD = ("walks well", "no pain", "eats well"), ("short of breath", "in pain", "fell twice")


def write(folder: Path) -> None:
    """Notes, values, labels; a tokenizer and the configuration of a model."""
    generator = np.random.default_rng(0)
    sick, weak = generator.integers(0, 2, (2, PEOPLE))
    people = pd.Series(range(PEOPLE), name="person")
    notes = [
        " ".join(["patient", *generator.permutation([*(BAD if each else GOOD), "seen today"])])
        for each in sick
    ]
    pd.DataFrame({"person": people, "note": notes}).to_csv(folder / "notes.csv", index=False)
    values = generator.standard_normal((PEOPLE, 4)) + weak[:, None]
    table = pd.DataFrame(values, columns=["crp", "sodium", "urea", "glucose"])
    table.assign(person=people).to_csv(folder / "values.csv", index=False)
    labels = pd.DataFrame({"person": people, "label": sick & weak})
    labels.to_csv(folder / "labels.csv", index=False)
    words = sorted({word for note in notes for word in note.split()})
    known = {word: number for number, word in enumerate(["[PAD]", "[UNK]", *words])}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder / "bert")
    config = DistilBertConfig(
        vocab_size=len(known), dim=32, hidden_dim=64, n_heads=2, n_layers=1, pad_token_id=0
    )
    config.save_pretrained(folder / "bert")


def main(epochs: int = 12) -> float:
    """Train, and say what was reached on held-out people."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder)
        run = run_local(
            2,
            {
                **{"dataset": f"files:{folder / 'labels.csv'}", "id": "person"},
                **{"epochs": epochs, "batch-size": 32, "optimizer": "adamw"},
                **{"party-lr": 0.003, "server-lr": 0.003, "embedding-size": 16},
                "out": str(folder / "run"),
            },
            node_configs=[
                {
                    **{"file": str(folder / "notes.csv"), "id": "person", "columns": "note"},
                    **{"text": "tokens", "tokenizer": str(folder / "bert"), "text-length": 16},
                    "model": f"hf:{folder / 'bert'}",
                },
                {"file": str(folder / "values.csv"), "id": "person"},
            ],
        )
        accuracy = float(run.summary["test_accuracy"])
    print(f"accuracy {accuracy:.3f} on held-out people")
    return accuracy


if __name__ == "__main__":
    main()
