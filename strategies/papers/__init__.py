"""One file for each paper: its defaults, its citation and its quorum."""
