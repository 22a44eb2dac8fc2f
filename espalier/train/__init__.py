"""The trainer, which trains three kinds of drafts (EAGLE-3, MTP, block) for Llama, Qwen and Mistral targets.

`espalier train` runs the trainer, which needs torch, transformers, tokenizers and safetensors.  The engine generates
training text with the target.  During training, transformers runs the target.
"""
