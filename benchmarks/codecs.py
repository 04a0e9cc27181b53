"""Cost of codecs: bytes and time of a large block, and time of a step with error feedback.

A block of 60000 x 16 normal numbers, as one vector, is encoded and decoded on one core. Then an
epoch of MNIST runs in process, with four quadrant parties 196-16, batch 128, windows 1 and 8. Each
repeat runs `split-nn` and then `ef-vfl` with top-k 10 %, each with one evaluation. Prints one JSON
object as its last line.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.common import PARTIES, SIGMOID_MODEL, local_epoch, mnist_of, parser, report
from vfl_flower.config.options import CodecConfig
from vfl_flower.protocol.codecs.channel import Codec
from vfl_flower.protocol.codecs.qsgd import QSGD
from vfl_flower.protocol.codecs.top_k import TopK

CODECS: dict[str, Codec] = {
    "top-k 10 %": TopK(CodecConfig(keep=0.1)),
    "top-k 1 %": TopK(CodecConfig(keep=0.01)),
    "top-k 0.1 %": TopK(CodecConfig(keep=0.001)),
    "qsgd 8 bits": QSGD(CodecConfig(bits=8)),
    "qsgd 4 bits": QSGD(CodecConfig(bits=4)),
    "qsgd 1 bit": QSGD(CodecConfig(bits=1)),
}
SYSTEMS: dict[str, dict[str, Any]] = {
    "split-nn": {"strategy": "split-nn"},
    "ef-vfl": {"strategy": "ef-vfl", "codec": "top-k", "keep": 0.1},
    "ef-vfl shared labels": {"strategy": "ef-vfl", "keep": 0.1, "labels": "shared"},
    "ef-vfl qsgd": {"strategy": "ef-vfl", "codec": "qsgd", "bits": 4},
}


def block_figures(codec: Codec, repeats: int) -> dict[str, float]:
    """Milliseconds (medians) and bits an entry for the large block."""
    block = np.random.default_rng(0).standard_normal((60_000, 16), np.float32)
    sizes = np.array([block.size])
    encoding, decoding = [], []
    for repeat in range(repeats + 1):  # the first warms up
        start = time.perf_counter()
        arrays = codec.encode("block", block, sizes, str(repeat))
        middle = time.perf_counter()
        codec.decode("block", arrays, block.shape, sizes)
        encoding.append(middle - start)
        decoding.append(time.perf_counter() - middle)
    sent = sum(array.nbytes for array in arrays.values())
    return {
        "encode_ms": round(1e3 * statistics.median(encoding[1:]), 2),
        "decode_ms": round(1e3 * statistics.median(decoding[1:]), 2),
        "bytes": sent,
        "bits_an_entry": round(8 * sent / block.size, 3),
    }


def step_figures(mnist: str, window: int, repeats: int) -> dict[str, dict[str, float]]:
    """Return medians of each system's milliseconds a step, and of their ratio to `split-nn`."""
    common = {**SIGMOID_MODEL, "dataset": f"npz:{mnist}", "batch-size": 128, "epochs": 1}
    milliseconds: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    for repeat in range(repeats + 1):  # the first warms up
        for system, keys in SYSTEMS.items():
            last = local_epoch(PARTIES, {**common, **keys, "window": window})
            if repeat:
                milliseconds[system].append(1e3 * last["seconds"] / last["steps"])
    figures = {}
    for system, each in milliseconds.items():
        ratios = [a / b for a, b in zip(each, milliseconds["split-nn"], strict=True)]
        figures[system] = {
            "ms_a_step": round(statistics.median(each), 2),
            "ratio_to_split_nn": round(statistics.median(ratios), 2),
        }
    return figures


def main() -> None:
    made = parser(__doc__)
    made.add_argument("--repeats", type=int, default=5)
    options = made.parse_args()
    figures: dict[str, Any] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name, codec in CODECS.items():
        figures[name] = block_figures(codec, 2 * options.repeats)
        print(f"{name:14s}", figures[name], flush=True)
    torch.set_num_threads(threads)
    with mnist_of(options) as mnist:
        for window in (1, 8):
            for system, of_system in step_figures(mnist, window, options.repeats).items():
                figures[f"{system}, window {window}"] = of_system
                print(f"{system}, window {window}:", of_system, flush=True)
    report("codecs", figures)


if __name__ == "__main__":
    main()
