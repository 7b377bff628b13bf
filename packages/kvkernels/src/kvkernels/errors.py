"""The errors of this package. It knows their tree and nothing of when they are raised.

KVKernelsError
├── ArrayError (TypeError)       not an array in CPU memory that can be viewed without a copy
├── DtypeError (TypeError)       an array of a dtype that is not supported
├── ShapeError (ValueError)      a shape or a stride, or two arrays that do not fit each other
├── ArgumentError (ValueError)   a value: a length, an offset, an option, a list of copies
└── PoolIndexError (IndexError)  a block id or a slot outside the pool

Every error is raised before anything is written.
"""


class KVKernelsError(Exception):
    """Base of all errors that this package raises."""


class ArrayError(KVKernelsError, TypeError):
    """An argument is not an array in CPU memory that can be viewed without a copy."""


class DtypeError(KVKernelsError, TypeError):
    """An array has a dtype that is not supported; the message names those that are."""


class ShapeError(KVKernelsError, ValueError):
    """An array has a wrong shape or stride, or two arrays do not fit each other."""


class ArgumentError(KVKernelsError, ValueError):
    """A value breaks a rule: a length, an offset, an option or a list of copies."""


class PoolIndexError(KVKernelsError, IndexError):
    """A block id or a slot lies outside the pool of blocks."""
