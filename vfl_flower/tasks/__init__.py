"""Tasks besides training. Each folder has both halves of one task: label holder and party."""
