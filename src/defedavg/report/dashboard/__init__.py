"""The live view: a small server for this machine, and its page."""
