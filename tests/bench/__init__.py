"""Measurements by whole processes, alternating, in one run. `python -m bench --help`."""
