"""The trainer: makes drafts of three kinds, EAGLE-3, MTP and block, for Llama, Qwen and Mistral targets.

`espalier train` runs it.  It needs torch, transformers, tokenizers and safetensors.  The target's own text comes from
the engine; the training itself runs the target by transformers.
"""
