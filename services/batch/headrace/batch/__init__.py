"""Batch: the requests of a file in, the files of their results out, whoever is killed meanwhile."""
