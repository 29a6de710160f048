"""Runs on a Ray cluster: the scheduler spreads runs over workers, each of which is a batched executor.

The scheduler neither plans nor trains. It assigns runs, receives their evaluations, and keeps the last reported state
of each, so a lost worker costs only what it did since. Ray is imported only where it is used.
"""
