"""The command line: `python -m vgrad` and a command."""

import sys

from vgrad_command import main as main

if __name__ == "__main__":
    sys.exit(main())
