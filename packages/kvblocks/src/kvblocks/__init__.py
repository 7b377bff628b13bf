"""The block manager of a paged key-value cache: block tables, copy-on-write, prefix caching."""

from kvblocks._version import __version__

__all__ = ["__version__"]
