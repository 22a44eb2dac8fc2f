"""The trainer: makes the bundled model, and trains EAGLE-3 and MTP drafts for Llama, Qwen and Mistral targets.

It needs torch, transformers, tokenizers and safetensors.  It does not use the engine.
"""
