"""Contract numbers, verdicts, and the error tree that daemon and workers share. Pure data."""
