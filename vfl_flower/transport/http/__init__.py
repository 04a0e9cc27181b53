"""The front of what answers HTTP: connections, certificate, tokens and bounds."""
