"""Moving values between server and clients, and counting them."""

from coterie.federation.api import Call, Engine, Failure, Replies
from coterie.federation.ledger import Ledger
from coterie.federation.local import LocalEngine, faster_mode
from coterie.federation.screening import Screening
from coterie.federation.shards import Batch, Rows, Shard, Stack, pack
from coterie.federation.stages.attacks import Attack
from coterie.federation.stages.base import Stage, Staged, staged
from coterie.federation.tree import Tree
from coterie.federation.verbs import Federation, Gathered, Participation
from coterie.federation.work import RESULT, Each, Memory, Static, Update, Work, moved_from, work

__all__ = [
    "RESULT",
    "Attack",
    "Batch",
    "Call",
    "Each",
    "Engine",
    "Failure",
    "Federation",
    "Gathered",
    "Ledger",
    "LocalEngine",
    "Memory",
    "Participation",
    "Replies",
    "Rows",
    "Screening",
    "Shard",
    "Stack",
    "Stage",
    "Staged",
    "Static",
    "Tree",
    "Update",
    "Work",
    "faster_mode",
    "moved_from",
    "pack",
    "staged",
    "work",
]
