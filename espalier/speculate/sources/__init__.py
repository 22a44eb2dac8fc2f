"""Sources: they propose paths of tokens beside the draft, and graft.py joins all paths with the draft's trees."""
