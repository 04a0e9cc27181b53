"""The same model and rows with vfl-flower and with peers that install from a registry."""
