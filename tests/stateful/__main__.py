"""`python -m tests.stateful`: see `sequences.py`."""

import sys

from tests.stateful.sequences import main

if __name__ == "__main__":
    sys.exit(main())
