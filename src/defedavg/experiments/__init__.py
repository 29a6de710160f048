"""STUDY: sweeps, tuning, checkpoints, the demo and the benchmark."""
