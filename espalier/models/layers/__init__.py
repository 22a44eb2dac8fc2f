"""The layers that all families share.  They are plain objects, not nn.Modules: a call costs little but its kernels."""
