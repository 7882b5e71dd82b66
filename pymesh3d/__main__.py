"""`python -m pymesh3d` is the command `pymesh3d`."""

import sys

from pymesh3d.cli import main

if __name__ == "__main__":
    sys.exit(main())
