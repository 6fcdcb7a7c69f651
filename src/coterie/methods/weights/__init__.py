"""Methods that learn client weights."""
