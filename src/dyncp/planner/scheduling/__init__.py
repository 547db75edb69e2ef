"""Placement -> Schedule."""
