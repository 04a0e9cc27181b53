"""The papers' tables and figures, one command each: `python -m benchmarks.papers ROW`.

A row of docs/papers.md is a list of run configurations (`rows.Row`), in a module for each paper.
"""
