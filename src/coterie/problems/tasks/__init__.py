"""Oracles: what a work may ask of a problem at one holder of rows."""
