"""Any decoder of the transformers library as a target: `load.py` reads or refuses a config, `target.py` runs it."""
