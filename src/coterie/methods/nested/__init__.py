"""Nested problems: the FedNest family."""
