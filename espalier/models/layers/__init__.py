"""The layers that all families share.  Layers are plain objects, not nn.Modules, so that a call takes little more time
than its kernel launches."""
