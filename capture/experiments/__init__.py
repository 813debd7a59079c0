"""Measurements that end in a results file, and the tables drawn from such files."""
