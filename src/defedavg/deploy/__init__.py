"""Runs on a real network: Flower carries the messages, the server machines decide as in a simulation.

``engine`` decides and uses neither Flower nor tensors nor a clock. ``server`` carries out its commands over any
``Transport``. ``client`` trains. ``flower`` holds everything that imports Flower. ``replay`` turns the event log of a
run back into a plan.
"""
