"""Configuration, the only loop, checkpoints and records."""
