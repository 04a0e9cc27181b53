"""Baseline `frozen`: the same models, but the parties are never trained.

Each party uploads every embedding once, and the label holder trains its top model on them. The
result equals `split-nn` with ``party-lr = 0``, for one exchange a party. The gain of a system over
this baseline is the gain of training the parties.
"""

from strategies.vertical import Vertical
from vfl_flower.config.errors import DivergedError
from vfl_flower.label_holder.label_holder import LabelHolder
from vfl_flower.protocol.batches import Window
from vfl_flower.transport.messages import EmbedOrder, EvaluateOrder


class Frozen(Vertical):
    """Gets training and test embeddings once, then trains without messages."""

    can_resume = False

    def train(self) -> None:
        """Collect all embeddings, and train the top model on them."""
        run, epochs = self.run, self.config.training.epochs
        for record in run.records:
            ids = run.holder.table.ids_of(record.party)
            order = EmbedOrder(exchange=1, arrays={"ids": ids})
            run.messenger.post([run.messenger.message(record, order)])
        self.wait_for(run.records)
        evaluate = EvaluateOrder(exchange=2)
        run.messenger.post(run.messenger.message(record, evaluate) for record in run.records)
        self.wait_for(run.records)
        for epoch in range(epochs):
            window = run.holder.sampling.window(None, epoch, 0, run.budget.per_epoch, b"")
            learn(run.holder, window)
            run.budget.answered += run.budget.of_epoch
            run.tell("progressed", run.budget.answered, run.budget.planned)
            if run.budget.evaluates_after(epoch + 1, epochs):
                run.evaluate()
            if run.budget.stopped:
                break


def learn(holder: LabelHolder, window: Window) -> None:
    """Step the top model on a window of the table, without answering parties."""
    h, labels = holder.gather(window)
    divided = holder.sampling.divisors(window.lengths).tolist()
    try:
        holder.count(holder.step(h, labels, window.lengths.tolist(), divided, gradients=False)[1])
    except DivergedError:
        holder.table.blame({})
        raise
