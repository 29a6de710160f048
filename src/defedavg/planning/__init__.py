"""PLAN: a virtual clock drives the machines of an algorithm and yields a plan."""
