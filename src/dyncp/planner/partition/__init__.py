"""Blocks -> Placement."""
