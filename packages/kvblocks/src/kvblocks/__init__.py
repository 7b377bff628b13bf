"""The block manager of a paged key-value cache: block tables, copy-on-write, prefix caching.

Start with `BlockManager`. Everything here is plain Python without dependencies.
"""

from kvblocks._version import __version__
from kvblocks.decode import DecodeBatch
from kvblocks.errors import (
    InvalidBatch,
    InvalidConfig,
    InvalidLength,
    InvalidPin,
    InvalidStep,
    InvalidTokens,
    InvariantViolation,
    KVBlocksError,
    OutOfBlocks,
    PinLimit,
    SequenceExists,
    UnknownBlock,
    UnknownSequence,
)
from kvblocks.hashing import chain_hashes, namespace_root
from kvblocks.manager import BlockManager
from kvblocks.results import (
    ALL_SALTS,
    Allocation,
    AllSalts,
    BlockCopy,
    Forgotten,
    Match,
    PinName,
    SequenceId,
    Stats,
    StepPlan,
    Usage,
    Verdict,
    When,
)

__all__ = [
    "ALL_SALTS",
    "AllSalts",
    "Allocation",
    "BlockCopy",
    "BlockManager",
    "DecodeBatch",
    "Forgotten",
    "InvalidBatch",
    "InvalidConfig",
    "InvalidLength",
    "InvalidPin",
    "InvalidStep",
    "InvalidTokens",
    "InvariantViolation",
    "KVBlocksError",
    "Match",
    "OutOfBlocks",
    "PinLimit",
    "PinName",
    "SequenceExists",
    "SequenceId",
    "Stats",
    "StepPlan",
    "UnknownBlock",
    "UnknownSequence",
    "Usage",
    "Verdict",
    "When",
    "__version__",
    "chain_hashes",
    "namespace_root",
]
