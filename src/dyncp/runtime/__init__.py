"""Runs plans on tensors: the first place that imports torch."""
