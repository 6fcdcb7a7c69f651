"""Somebody's own files as a problem: reading, checking, preparing."""

from coterie.problems.files.problem import PreparedFiles, files, load_files

__all__ = ["PreparedFiles", "files", "load_files"]
