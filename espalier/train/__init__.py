"""The trainer: makes the bundled model, and trains EAGLE-3 drafts for any Llama-, Qwen- or Mistral-like target.

It needs torch, transformers, tokenizers and safetensors, and nothing of the engine.
"""
