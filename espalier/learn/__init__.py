"""Online learning: keeps token ids of served texts, trains the served draft further, and swaps its weights in.

Without `espalier serve --learn DIR`, nothing is learned.  The training runs in a process of its own (trainer.py).
"""
