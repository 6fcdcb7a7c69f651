"""Personal models for every client, each learned with the clients that help it."""
