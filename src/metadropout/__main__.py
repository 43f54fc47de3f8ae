"""`python -m metadropout` is the same as the command `metadropout`."""

import sys

from metadropout.cli import main

if __name__ == "__main__":
    sys.exit(main())
