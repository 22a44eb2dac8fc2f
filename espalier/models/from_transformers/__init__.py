"""Any decoder of the transformers library as a target: read and refused by `config.py`, run by `target.py`."""
