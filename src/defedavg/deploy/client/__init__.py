"""The client process of a deployment."""
