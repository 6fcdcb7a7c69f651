"""What can happen to a client in a phase or to a round: the closed set of kinds that `events.jsonl` may hold."""

from typing import Literal, get_args

Kind = Literal[
    # a client is missing, or is back
    "lost", "timeout", "forgotten", "memory lost", "refused", "rejoined", "client error", "silent",
    # its reply is not used as it came
    "rejected", "clipped", "duplicate", "zero update", "duplicate update",
    # injected faults
    "crashed", "restarted", "late", "delayed", "reordered", "truncated", "misshapen", "nan", "inf", "flip", "huge",
    "lied",
    # the run
    "skipped", "rejected round", "resumed", "early stop", "warning", "bits", "compiled", "not compiled",
]  # fmt: skip
KINDS: frozenset[str] = frozenset(get_args(Kind))
STRANGE = "client error"


def known(kind: str) -> str:
    """The kind itself, or "client error" where a client made one up."""
    return kind if kind in KINDS else STRANGE
