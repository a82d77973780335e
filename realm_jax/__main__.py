"""`python -m realm_jax`: run the command `realm`, if its script is not on your PATH."""

import sys

from realm_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
