"""The papers' tables and figures, one command each: `python -m benchmarks.papers ROW`.

A row of docs/reference/papers.md is a list of run configurations (`rows.Row`).
"""
