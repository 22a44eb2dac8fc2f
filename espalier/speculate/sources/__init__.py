"""Sources: they propose paths of tokens beside the draft, and merge_paths.py joins all paths with the draft's trees."""
