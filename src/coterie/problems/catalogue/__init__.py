"""The named problems of the papers, and their registry."""
