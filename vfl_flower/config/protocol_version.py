"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "a122195a9bfd1733c59e136a49ae427d25a85829448fc4ee74cb2f751c5dd09f"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
