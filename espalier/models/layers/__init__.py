"""The layers that all families share.  They are plain objects, not nn.Modules, so that a call costs little more than
its kernel launches."""
