"""Stages between clients and the server: privacy, attacks, faults, compression; `base` has their mechanism."""
