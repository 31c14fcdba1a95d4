"""``python -m emailrl`` is the ``emailrl`` command."""

from emailrl.cli.app import main

main()
