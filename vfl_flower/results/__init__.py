"""Figures, charts, model cards and reports of runs, made from the files of a run."""
