"""The decisions of a deployment, as a deterministic function of its events."""
