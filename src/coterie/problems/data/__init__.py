"""Data sets in their ordinary public formats."""
