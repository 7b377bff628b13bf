"""`python -m kvblocks` is `kvblocks`."""

import sys

from kvblocks.cli import main

if __name__ == "__main__":
    sys.exit(main())
