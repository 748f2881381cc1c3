"""`python -m regardant`: the command line, where the script of that name is not on the path."""

import sys

from regardant.cli import main

if __name__ == "__main__":
    sys.exit(main())
