"""Sources propose paths of tokens beside the draft.  merge_paths.py joins all paths with the draft's trees."""
