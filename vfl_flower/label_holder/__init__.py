"""The label holder's end."""
