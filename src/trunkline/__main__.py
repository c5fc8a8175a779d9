"""`python -m trunkline` is the `trunkline` command."""

from trunkline.cli import main

main()
