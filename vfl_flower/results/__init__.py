"""What is shown of runs: figures, charts, model cards and reports, from the files of a run."""
