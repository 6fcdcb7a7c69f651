"""What people look at: the live display and the tables in the terminal."""
