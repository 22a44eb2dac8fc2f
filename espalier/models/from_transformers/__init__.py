"""Any decoder of the transformers library as a target: `probe.py` reads or refuses a config, `target.py` runs it."""
