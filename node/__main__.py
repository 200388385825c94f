"""`python -m node` is `potluck`, for places where the console script is not on the path."""

import sys

from node.app.main import main

if __name__ == "__main__":
    sys.exit(main())
