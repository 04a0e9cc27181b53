"""The same with vfl-flower, whose MNIST in quadrants and models are built in."""

import sys

from vfl_flower.api.training import train

options = {
    "dataset": f"npz:{sys.argv[3]}",
    "bottom-model": "linear",
    "embedding-size": 128,
    "top-hidden": 128,
    "batch-size": 64,
    "party-lr": 0.1,
    "server-lr": 0.1,
    "validation-fraction": 0,
    "epochs": int(sys.argv[4]),
    "window": int(sys.argv[2]),
    "out": sys.argv[5],
}
train(options, parties=4, engine=sys.argv[1])
