"""KEEP: the files of a run folder, written, read, exported."""
