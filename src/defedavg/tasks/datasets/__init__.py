"""Data sets: where they are found, how they are downloaded, checked and read."""
