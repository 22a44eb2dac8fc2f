"""Drafters, and the checkpoint formats of their draft models (registry.py)."""
