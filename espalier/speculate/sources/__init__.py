"""Sources propose paths of tokens in addition to the draft.  merge_paths.py joins the paths with the draft's trees."""
