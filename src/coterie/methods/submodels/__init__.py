"""Methods for clients that cannot train the whole model."""
