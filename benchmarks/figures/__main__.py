"""The command line: `python -m benchmarks.figures`, or `nox -s figures`."""

import sys

from benchmarks.figures import main

sys.exit(main())
