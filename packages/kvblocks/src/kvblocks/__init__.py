"""The block manager of a paged key-value cache: block tables, copy-on-write, prefix caching.

Start with `BlockManager`. Everything here is plain Python without dependencies.
"""

from kvblocks._version import __version__
from kvblocks.decode import DecodeBatch
from kvblocks.errors import (
    InvalidBatch,
    InvalidConfig,
    InvalidLength,
    InvalidLog,
    InvalidNamespace,
    InvalidPin,
    InvalidSnapshot,
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
from kvblocks.hashing import Adapter, Media, chain_hashes, media_keys, namespace_root
from kvblocks.manager import BlockManager
from kvblocks.results import (
    ALL_SALTS,
    Allocation,
    AllSalts,
    BlockCopy,
    BlockMerge,
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
    "Adapter",
    "AllSalts",
    "Allocation",
    "BlockCopy",
    "BlockManager",
    "BlockMerge",
    "DecodeBatch",
    "Forgotten",
    "InvalidBatch",
    "InvalidConfig",
    "InvalidLength",
    "InvalidLog",
    "InvalidNamespace",
    "InvalidPin",
    "InvalidSnapshot",
    "InvalidStep",
    "InvalidTokens",
    "InvariantViolation",
    "KVBlocksError",
    "Match",
    "Media",
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
    "media_keys",
    "namespace_root",
]
