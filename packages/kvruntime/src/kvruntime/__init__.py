"""A small transformer engine on paged memory: continuous batching, prefix caching, sampling by copy-on-write."""

from kvruntime._version import __version__

__all__ = ["__version__"]
