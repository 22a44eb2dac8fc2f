"""The layers that all families share.  The layers are plain objects instead of nn.Modules, so that a call takes little
more time than its kernel launches."""
