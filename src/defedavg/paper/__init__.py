"""The experiments of the DeFedAvg paper: its settings, its figures to compare with, and the commands that repeat it."""
