"""Data of the parties and the label holder."""
