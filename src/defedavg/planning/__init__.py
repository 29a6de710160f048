"""PLAN: a virtual clock drives the machines of an algorithm on a fleet of devices and yields a plan."""
