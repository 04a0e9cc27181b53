"""Files of three parties with three kinds of data, made of digits: photographs, a table, notes.

    python examples/mixed_files.py FOLDER

The photographs show the upper halves. The table has the pixels of the lower left quarters. A note
says in words how dark each place of the lower right quarter is. A clinic has the labels:
`labels.csv` is for training, and `new.csv` has the fifth of the people who are held out. Each party
lacks some people. `bert` is a tokenizer and the configuration of a small DistilBERT.
docs/how-to/own-data.md has the commands, from these files to predictions on SuperNodes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DistilBertConfig, PreTrainedTokenizerFast

SHADES = ("white", "light", "dark", "black")


def write(folder: Path) -> None:
    """All files."""
    digits = load_digits()
    photographs = folder / "photographs"
    photographs.mkdir(parents=True)
    ids = np.random.default_rng(0).permutation(10 * len(digits.images))[: len(digits.images)]
    people = pd.Series(ids, name="person")
    new = np.arange(len(people)) % 5 == 4
    for number, (person, image) in enumerate(zip(ids, digits.images, strict=True)):
        if number % 21:
            upper = Image.fromarray((15 * image[:4]).astype("uint8")).resize((32, 16))
            upper.save(photographs / f"{person}.png")
    left = digits.images[:, 4:, :4].reshape(len(people), -1)
    table = pd.DataFrame(left).add_prefix("pixel_").assign(person=people)
    table[people.index % 21 != 1].to_csv(folder / "table.csv", index=False)
    shades = (digits.images[:, 4:, 4:].reshape(len(people), -1) // 5).astype(int)
    notes = [" ".join(f"{at}-{SHADES[shade]}" for at, shade in enumerate(row)) for row in shades]
    told = pd.DataFrame({"person": people, "note": notes})
    told[people.index % 21 != 2].to_csv(folder / "notes.csv", index=False)
    labels = pd.DataFrame({"person": people, "label": digits.target})
    labels[~new].to_csv(folder / "labels.csv", index=False)
    labels[new].to_csv(folder / "new.csv", index=False)

    words = ["[PAD]", "[UNK]", *(f"{at}-{shade}" for at in range(16) for shade in SHADES)]
    known = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder / "bert")
    DistilBertConfig(
        vocab_size=len(known), dim=32, hidden_dim=64, n_heads=2, n_layers=1, pad_token_id=0
    ).save_pretrained(folder / "bert")


if __name__ == "__main__":
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("folder", type=Path, help="where the files go; made if it is not there")
    write(made.parse_args().folder)
