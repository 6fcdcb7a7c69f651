"""Methods for clients that cannot hold the whole model."""
