"""What parties and the label holder read, and which rows all have."""
