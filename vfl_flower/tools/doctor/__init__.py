"""Checks of `vfl doctor`: of an installation, keys, certificates, the network, disks and runs."""
