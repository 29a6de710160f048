"""The state machines on a real clock: events in, actions out."""
