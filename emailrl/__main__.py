"""The entry point of the ``emailrl`` command, also as ``python -m emailrl``."""

import os
import sys
from typing import NoReturn

if __name__ == "__main__" and not sys.flags.safe_path:
    # `python -m` puts the working folder first: a torch.py in a stranger's folder is not for us to run.
    del sys.path[0]

from emailrl.base import process


def main() -> NoReturn:
    """Run the command line (``emailrl.cli.app.main``); Ctrl-C works while it is still being imported."""
    os.environ["PYTHONSAFEPATH"] = "1"  # ranks, servers and their children do not import from the folder either
    try:
        process.install()
        from emailrl.cli.app import main as run

        run()
    except KeyboardInterrupt:  # before or after ``run`` handles it
        process.leave()
    finally:
        process.ending()


if __name__ == "__main__":
    main()
