"""The `vfl` command, and what it does besides training."""
