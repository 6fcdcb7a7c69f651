"""Somebody's own files as a problem: reading, checking, preparing."""

from coterie.problems.files.problem import Ground, files, ground

__all__ = ["Ground", "files", "ground"]
