"""Baselines for methods that learn weights: averaging, personalisation, training alone."""
