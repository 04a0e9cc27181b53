"""Alignment of rows: private set intersection, and reuse of its result."""
