"""`python -m bpk`: verify a model, check rules, ask what is supported."""

import sys

from bpk.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
