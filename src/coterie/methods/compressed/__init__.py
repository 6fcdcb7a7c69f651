"""Methods that compress their payloads."""
