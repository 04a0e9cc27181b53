"""Information value of the parties' columns."""
