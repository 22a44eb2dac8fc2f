"""The trainer: makes drafts of three kinds, EAGLE-3, MTP and block, for Llama, Qwen and Mistral targets.

`espalier train` runs the trainer, which needs torch, transformers, tokenizers and safetensors.  The engine makes the
target's own text.  For the training itself, transformers runs the target.
"""
