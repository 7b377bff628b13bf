"""`python -m kvkernels` is `kvkernels`."""

import sys

from kvkernels.cli import main

if __name__ == "__main__":
    sys.exit(main())
