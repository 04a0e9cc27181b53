"""Flower Strategies: one exchange loop (`vertical`) with its parts, and a file for each paper.

A paper's file is data (`vfl_flower.systems.System`); `vfl_flower.registry.SYSTEMS` names them all.
"""
