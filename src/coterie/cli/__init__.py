"""The command line. Commands are thin; heavy imports happen inside them, so that --help is quick.

Each module of this package registers its commands on `app` when it is imported; their order here is that of --help.
"""

from coterie.cli.app import app, main  # isort: skip
from coterie.cli import advise, report, export  # isort: skip  # noqa: F401
from coterie.cli import running, compare, listing, leaderboard, reproduce  # isort: skip  # noqa: F401
from coterie.cli import study, data  # isort: skip  # noqa: F401

__all__ = ["app", "main"]
