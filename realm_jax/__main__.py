"""`python -m realm_jax`: the command `realm`, for where its script is not on the path."""

import sys

from realm_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
