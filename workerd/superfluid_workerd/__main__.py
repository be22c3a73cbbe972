"""`python -m superfluid_workerd` is `superfluid-workerd`."""

from superfluid_workerd.entry import main

main()
