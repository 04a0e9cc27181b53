"""Inference: predict a file, serve scores, explain a model, and say what parties contribute.

The modules here are the label holder's. ``party`` is the party's half, and ``serving`` the online
service. `model.TrainedModel` loads a model and the people, and asks the parties.
"""
