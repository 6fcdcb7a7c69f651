"""Somebody's own files as a problem: reading, checking, preparing."""

from coterie.problems.files.problem import FilesProblem, Ground, files, ground

__all__ = ["FilesProblem", "Ground", "files", "ground"]
