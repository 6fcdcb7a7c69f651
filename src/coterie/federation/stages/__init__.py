"""What happens between a client and the server: attacks, faults, privacy, compression."""
