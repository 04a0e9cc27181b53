"""Version of the protocol between label holder and parties. `make protocol` writes this file."""

VERSION = 2
"""Both sides of a run must have the same. It changes when an older side could not take part."""

DIGEST = "882ba24f233f3d92feafe4918b4c66a32f3f8cead295095eda95f14a5f7747e7"
"""Digest of the code that both sides share (`config.provenance.shared_code`), when written."""
