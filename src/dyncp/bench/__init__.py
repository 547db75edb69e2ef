"""Measuring the planner: a corpus of batches, how each is planned, and tables of the results."""
