"""Federated learning that learns whom to learn from."""
