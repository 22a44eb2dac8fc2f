"""Any decoder of the transformers library as a target: read and refused by `load.py`, run by `target.py`."""
