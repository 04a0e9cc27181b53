"""How parties learn: each estimator with the halves of both ends."""
