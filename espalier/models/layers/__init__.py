"""The layers that all families share.  They are plain objects, not nn.Modules: a call costs its kernel launches and
almost nothing else."""
