"""Runtimes on disk: fetch, verify, stage, check, place; use, pin, roll back, repair, remove."""
