"""Paged attention kernels with one API, for CPU arrays by Numba."""

from kvkernels._version import __version__

__all__ = ["__version__"]
