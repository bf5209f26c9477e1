"""`python -m tests.random_networks`: see `networks.py`."""

import sys

from tests.random_networks.networks import main

if __name__ == "__main__":
    sys.exit(main())
