"""`python -m deepep_moe`, for launchers of ranks and where the command `deepep-moe` is not on the path."""

import sys

from deepep_moe.command import main

if __name__ == "__main__":
    sys.exit(main())
