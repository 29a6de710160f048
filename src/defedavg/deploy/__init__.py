"""Runs on a real network: gRPC or Flower carries the messages, the server machines decide as in a simulation.

``engine`` decides and uses neither Flower nor tensors nor a clock. ``server`` carries out its commands over any
``Transport``. ``client`` trains. ``grpc`` and ``flower`` are the two transports, and hold everything that imports these
packages. ``replay`` turns the event log of a run back into a plan.
"""
