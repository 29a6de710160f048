"""Stacked models: many clients, each with its own parameters, in one forward and backward pass."""
