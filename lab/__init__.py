"""The project's laboratory: what measures and makes Espalier, and no user needs.  It is not installed."""
