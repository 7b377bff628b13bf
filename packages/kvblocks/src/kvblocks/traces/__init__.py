"""Request traces: who asked when, how much, and which blocks of which content it was.

`read_trace` reads every format of `FORMATS`, told by the file itself. Knows files; does not know caches.
"""

from kvblocks.traces.formats import AUTO, FORMATS, Format, read_trace, tell_format
from kvblocks.traces.records import MalformedRow, Request, Trace

__all__ = [
    "AUTO",
    "FORMATS",
    "Format",
    "MalformedRow",
    "Request",
    "Trace",
    "read_trace",
    "tell_format",
]
