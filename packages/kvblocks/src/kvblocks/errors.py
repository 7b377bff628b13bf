"""Every error this package raises on purpose.

    KVBlocksError
    ├── OutOfBlocks          (MemoryError)     the pool cannot serve the call; carries a Verdict
    ├── UnknownSequence      (KeyError)        no sequence has this id
    ├── UnknownBlock         (IndexError)      a block id outside the pool
    ├── UnknownGroup         (IndexError)      a group that the manager was not made with
    ├── SequenceExists       (ValueError)      a sequence has this id already
    ├── InvalidTokens        (ValueError)      token ids that are no ids, or that contradict known ones
    ├── InvalidNamespace     (ValueError)      a salt or an adapter that is none
    ├── InvalidLength        (ValueError)      a number of tokens outside its range
    ├── InvalidBatch         (ValueError)      a sequence that cannot join or leave a batch
    ├── InvalidPin           (ValueError)      a prefix that cannot be pinned, or a name that pins none
    ├── PinLimit             (MemoryError)     pins would hold more blocks than they may
    ├── InvalidBuffer        (ValueError)      a buffer that cannot be written to
    ├── InvalidSwap          (ValueError)      a sequence that is swapped out, or cannot be swapped so
    ├── InvalidStep          (ValueError)      a step number that was never begun
    ├── InvalidConfig        (ValueError)      a manager that cannot be
    ├── InvalidSnapshot      (ValueError)      bytes that are no snapshot, or ids that cannot be in one
    ├── InvalidLog           (ValueError)      a log of operations that cannot be written or read
    ├── InvalidSize          (ValueError)      a size, a length or a share outside its range
    ├── InvalidUsage         (ValueError)      options that contradict each other, or lack one
    ├── UnreadableFile       (OSError)         a file that cannot be opened or decoded
    ├── InvalidModelConfig   (ValueError)      a model's config.json that cannot be read
    ├── InvalidReadings      (ValueError)      a file of measured readings that cannot be read
    ├── NothingLeft          (ValueError)      a memory whose other uses leave no room for a pool
    ├── InvalidTrace         (ValueError)      a file that is no trace, or a replay it cannot serve
    └── InvariantViolation   (AssertionError)  `check()` found a fault of this package

Each also is the builtin that fits, so callers may catch either. A call that raises one of them changes nothing,
nor does one that stops because a caller's iterable raised. A fault of the interpreter in the midst of a
change, such as a MemoryError of its own or a KeyboardInterrupt, is not undone; `check()` tells whether
the state is whole.
"""

from kvblocks.results import Verdict


class KVBlocksError(Exception):
    """The base of every error of this package."""


class OutOfBlocks(KVBlocksError, MemoryError):
    """The pool cannot serve the call now; `verdict` says when it could."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict)
        self.verdict = verdict


class UnknownSequence(KVBlocksError, KeyError):
    """No sequence has this id: it was never allocated, or was freed."""

    def __str__(self) -> str:
        # KeyError would show the message in quotes.
        return str(self.args[0])


class UnknownBlock(KVBlocksError, IndexError):
    """A block id outside 0..num_blocks-1."""


class UnknownGroup(KVBlocksError, IndexError):
    """Group 0 is full attention; the windows follow in their order."""


class SequenceExists(KVBlocksError, ValueError):
    """A sequence has this id already."""


class InvalidTokens(KVBlocksError, ValueError):
    """Token ids must be integers in [0, 2**32), and must agree with the ids already known."""


class InvalidNamespace(KVBlocksError, ValueError):
    """A salt is a string; an adapter is a name or a number, with a generation or without."""


class InvalidLength(KVBlocksError, ValueError):
    """A number of tokens must keep committed <= computed <= capacity."""


class InvalidBatch(KVBlocksError, ValueError):
    """A batch maps sequence ids to what they append; one joins a decode batch with nothing in flight."""


class InvalidPin(KVBlocksError, ValueError):
    """A pin has a name of its own, and full blocks that are cached."""


class PinLimit(KVBlocksError, MemoryError):
    """Pins hold no more blocks than the manager was made for."""


class InvalidBuffer(KVBlocksError, ValueError):
    """A buffer to write to is writable and contiguous, of the right format and large enough."""


class InvalidSwap(KVBlocksError, ValueError):
    """A sequence is swapped out when nothing of it is in flight, and swapped in before it goes on."""


class InvalidStep(KVBlocksError, ValueError):
    """Steps complete after they were begun."""


class InvalidConfig(KVBlocksError, ValueError):
    """A manager needs at least one block of at least one token."""


class InvalidSnapshot(KVBlocksError, ValueError):
    """Bytes that are no snapshot of this version, or ids that cannot be stored in one."""


class InvalidLog(KVBlocksError, ValueError):
    """A log of operations that cannot be read, or a call that cannot be written to one."""


class InvalidSize(KVBlocksError, ValueError):
    """A size, a length or a share is a number in its range, written as one."""


class InvalidUsage(KVBlocksError, ValueError):
    """The options of a command line belong together."""


class UnreadableFile(KVBlocksError, OSError):
    """A file that somebody named is there, and is text."""


class InvalidModelConfig(KVBlocksError, ValueError):
    """A model's config.json says how many keys and values its layers keep."""


class InvalidReadings(KVBlocksError, ValueError):
    """A file of readings that cannot be read, or that has none of what is asked for."""


class NothingLeft(KVBlocksError, ValueError):
    """A pool is what weights, workspace and reserve leave of a memory."""


class InvalidTrace(KVBlocksError, ValueError):
    """A trace is a file of a known format, and is replayed for what it tells."""


class InvariantViolation(KVBlocksError, AssertionError):
    """A state that this package must never reach; please report it."""
