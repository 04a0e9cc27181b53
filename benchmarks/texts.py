"""SST-2 at two parties, with the first and the second half of each sentence.

Each has a DistilBERT from a configuration, at random first: two layers of 64 units, averaged over
tokens, to an embedding of 32; a linear top model, adamw, three epochs. The tokenizer knows the
words that the training sentences have more than once. The plain loop is ordinary PyTorch on joined
data with the same modules. `alone` is the better party. `lora` begins with the weights of the plain
loop's first tower at both parties, and trains adapters of rank 4 and the heads alone. Accuracies on
the test sentences are means over seeds. Prints one JSON object as its last line.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from torch import nn
from torch.nn import functional
from transformers import DistilBertConfig, PreTrainedTokenizerFast

from benchmarks.common import ALL_ROWS, local_epoch, report
from vfl_flower.data import samples
from vfl_flower.data.at_label_holder import load_labels
from vfl_flower.data.at_party import load_partition
from vfl_flower.models.pretrained import Pretrained
from vfl_flower.protocol.systems import resolve

PARTIES, CPU = 2, torch.device("cpu")
RATE, DECAY = 1e-3, 0.01


def keys_of(folder: Path, sst2: str, epochs: int) -> dict[str, Any]:
    """The run configuration that all share."""
    return {
        **ALL_ROWS,
        **{"dataset": f"hf:{sst2}", "tokenizer": str(folder), "text-length": 24},
        **{"bottom-model": f"hf:{folder}", "embedding-size": 32, "top-model": "linear"},
        **{"batch-size": 32, "epochs": epochs, "eval-every": epochs, "optimizer": "adamw"},
        **{"party-lr": RATE, "server-lr": RATE, "weight-decay": DECAY},
    }


def write(folder: Path, sst2: str) -> None:
    """A tokenizer of the training sentences' words, and the configuration of a model."""
    sentences = parquet.read_table(Path(sst2, "train.parquet"))["sentence"].to_pylist()
    words = Counter(word for each in sentences for word in each.lower().split())
    kept = ["[PAD]", "[UNK]", *sorted(word for word, times in words.items() if times > 1)]
    known = {word: number for number, word in enumerate(kept)}
    tokenizer = Tokenizer(models.WordLevel(known, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]")
    fast.save_pretrained(folder)
    shape = {"dim": 64, "hidden_dim": 128, "n_heads": 2, "n_layers": 2, "pad_token_id": 0}
    of: Any = {**shape, "vocab_size": len(known), "max_position_embeddings": 64}
    DistilBertConfig(**of).save_pretrained(folder)


def plain(keys: dict[str, Any], folder: Path, seed: int) -> tuple[dict[str, float], Pretrained]:
    """Seconds and test accuracy of a plain PyTorch loop on both halves; and the first tower."""
    config = resolve({"strategy": "split-nn", **keys})
    blocks = [load_partition(config, party, PARTIES) for party in range(PARTIES)]
    labels = load_labels(config)
    train_labels, test_labels = (torch.from_numpy(each) for each in (labels.train, labels.test))
    torch.manual_seed(seed)
    towers = [Pretrained(str(folder), samples.first(block.train), 32) for block in blocks]
    top = nn.Linear(32 * PARTIES, 1)
    model = nn.ModuleList([*towers, top])
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=DECAY)

    def outputs(rows: Any, part: str) -> torch.Tensor:
        read = [samples.tensors(getattr(block, part)[rows], CPU) for block in blocks]
        scores: torch.Tensor = top(torch.cat([f(x) for f, x in zip(towers, read, strict=True)], 1))
        return scores.squeeze(1)

    start = time.perf_counter()
    for _ in range(keys["epochs"]):
        for ids in torch.randperm(len(train_labels)).split(keys["batch-size"]):
            due = train_labels[ids].float()
            loss = functional.binary_cross_entropy_with_logits(outputs(ids.numpy(), "train"), due)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        chunks = torch.arange(len(test_labels)).split(1000)
        scores = torch.cat([outputs(ids.numpy(), "test") for ids in chunks])
    seconds = time.perf_counter() - start
    accuracy = float(((scores > 0) == test_labels).float().mean())
    return {"test_accuracy": accuracy, "seconds": seconds}, towers[0]


def main() -> None:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--sst2", default="../shared/data/sst2", metavar="FOLDER")
    made.add_argument("--epochs", type=int, default=3)
    made.add_argument("--seeds", type=int, default=3)
    options = made.parse_args()
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder, weights = Path(name, "random"), Path(name, "weights")
        write(folder, options.sst2)
        write(weights, options.sst2)
        keys = keys_of(folder, options.sst2, options.epochs)
        for seed in range(options.seeds):
            figures, tower = plain(keys, folder, seed)
            tower.backbone.save_pretrained(weights)
            found.setdefault("plain", []).append(figures)
            ways = {
                "split-nn": {"strategy": "split-nn"},
                "alone": {"strategy": "local-only"},
                "lora": {
                    **{"strategy": "split-nn", "bottom-model": f"hf:{weights}"},
                    "model-args": "lora=4",
                },
            }
            for way, more in ways.items():
                last = local_epoch(PARTIES, {**keys, **more, "seed": seed})
                about = {each: last[each] for each in ("test_accuracy", "seconds")}
                found.setdefault(way, []).append(about)
            print({way: each[-1] for way, each in found.items()}, flush=True)
    report(
        "texts",
        {
            way: {
                "test_accuracy": float(np.mean([one["test_accuracy"] for one in each])),
                "deviation": float(np.std([one["test_accuracy"] for one in each])),
                "seconds": float(np.mean([one["seconds"] for one in each])),
            }
            for way, each in found.items()
        },
    )


if __name__ == "__main__":
    main()
