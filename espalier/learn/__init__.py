"""Online learning: keeps token ids of served texts, trains the served draft further, and swaps its weights in.

It is off unless `espalier serve --learn DIR` names a folder.  The training runs in a process of its own (trainer.py).
"""
