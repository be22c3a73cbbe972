"""Writes the generated pages of docs/; with --check, fails when one is out of date."""
