"""How the server's processes collect garbage, once all that lives as long as they do is loaded."""

import gc

# New objects after which the youngest generation is collected.  The default, 700, is a few requests: those that arrive
# together would wait for collections.
COLLECT_AFTER = 20_000


def keep_loaded() -> None:
    """From now on, collections do not search what exists, and are rarer."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER)
