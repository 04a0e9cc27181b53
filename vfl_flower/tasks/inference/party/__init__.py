"""The party's half of inference."""
