"""Inference: predict a file, serve scores, explain a model, and say what parties contribute.

The modules here are the label holder's. ``party`` is the party's half, and ``serving`` the online
service. `predictor` has the model, `rows` the people, and `predict.embeddings` asks the parties.
"""
