"""Assessment of a model: figures, curves and segments with 95 % intervals, on rows with labels."""
