"""The client's side of a deployment."""
