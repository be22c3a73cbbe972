"""The daemon and its command line."""
