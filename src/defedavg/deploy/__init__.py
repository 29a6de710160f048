"""The machines on a real network: Flower messages in, the same machines, an event log out.

``engine`` decides and knows neither Flower nor tensors nor a clock; ``coordinator`` carries out what it decides over
any ``Port``; ``flower`` is the one file on the server's side that speaks Flower, ``flower_client`` on the client's.
"""
