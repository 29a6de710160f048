"""The command line: one file per command, assembled in ``main``."""
