"""coterie's methods on NVIDIA FLARE, over its Collab API: many exchanges a round, over mutual TLS.

FLARE keeps a process at every site for the time of a job. Compute runs in a child of it, because FLARE ends the whole
job when a job process dies.
"""
