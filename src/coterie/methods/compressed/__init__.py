"""Methods that compress what they send."""
