"""The server's side of a deployment, over any transport."""
