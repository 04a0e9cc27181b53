"""Flower Strategies: one exchange loop (`vertical`), and a file for each paper.

A paper's file is data, a `vfl_flower.protocol.system.System`. `vfl_flower.config.plugins.SYSTEMS`
names them all.
"""
