"""Bottom models of parties, top models of label holders, losses and optimizers."""
