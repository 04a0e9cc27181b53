"""The papers' tables and figures and our own, one command each: `python -m benchmarks.papers ROW`.

A row is a list of run configurations (`rows.Row`). Its figures are on a page in docs/papers, in
docs/reference/papers.md, or on a page in docs/results.
"""
