"""`python -m superfluid`."""

from superfluid.cli import main

main()
