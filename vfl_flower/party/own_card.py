"""A party's own card of its part in a run, beside its states. It names columns, and stays here."""

import math

from flwr.app import Context

from vfl_flower.config.node_rules import RULES
from vfl_flower.config.provenance import utc_now
from vfl_flower.data.source import Preparation
from vfl_flower.party import state_file
from vfl_flower.party.party import Party
from vfl_flower.protocol.system import load_system
from vfl_flower.results.model_card import items, write_page
from vfl_flower.results.page import Page, Section


def write(context: Context, party: Party) -> None:
    """Write the card of the party's run as it is now, or replace it."""
    config, block, origin = party.config, party.inputs.block, party.origin
    used, passes = len(block.train) + len(block.test), party.steps / party.sampling.per_epoch
    uploads = math.ceil(passes) * party.estimator.uploads_per_row + origin.fresh
    epsilon = party.learner.mechanism.epsilon_of_uploads(party.inputs.rows, uploads)
    run = {
        "run": origin.run,
        "system": f"{config.strategy}: {load_system(config.strategy).about}",
        "began": origin.began,
        "as of": utc_now(),
        "rows, training": f"{len(block.train):,}",
        "rows, validation and test": f"{len(block.test):,}",
        "rows left out": f"{block.count - used:,}" if block.count else "",
        "messages answered": f"{party.exchange:,}",
        "bytes of embeddings": f"{origin.sent:,}",
        "passes over the training rows": f"{passes:g}",
        "uploads of a row, at most": f"{uploads:,}",
        "epsilon of these uploads": f"{epsilon:.4g}" if epsilon else "none: no noise hides them",
    }
    known = block.preparation or Preparation({}, {}, [], [])
    words = {1: "the score rises with it", -1: "the score falls with it", 0: "free"}
    columns = {name: words[known.monotone.get(name, 0)] for name in known.columns}
    rules = {name: f"{value}" for name, value in context.node_config.items() if name in RULES}
    parts = {"Run": run, "Columns": columns, "Rules": rules}.items()
    sections = [Section(title, [items([*each.items()])] * bool(each)) for title, each in parts]
    page = Page(f"Card of party {party.learner.index}", sections)
    path = state_file.place(context, run=origin.run)
    write_page(page, path.with_suffix(".card.md"), path.with_suffix(".card.html"))
