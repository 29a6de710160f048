"""Flower: apps, processes and keys of a deployment."""
