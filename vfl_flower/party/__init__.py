"""The party's side."""
