"""Vertical federated learning from Python: `train`, `Model`, scikit-learn estimators."""
