"""The experiments of the DeFedAvg paper: published values, runs at its settings, and tables that compare both."""
