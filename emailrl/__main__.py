"""``python -m emailrl`` is the ``emailrl`` command."""

import sys

if not sys.flags.safe_path:
    # `python -m` puts the working folder first: a torch.py in a stranger's folder is not for us to run.
    del sys.path[0]

from emailrl.cli.app import main

main()
