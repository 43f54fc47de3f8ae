"""A run's folder: what is in it, and how to read, write and load it."""
