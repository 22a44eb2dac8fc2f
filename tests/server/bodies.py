"""What clients of OpenAI's API send, as noted from their requests: (path, body) by client."""

from typing import Any

HI = [{"role": "user", "content": "hi"}]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "guidellm 0.8, text": (
        "/v1/completions",
        {
            "model": "bundled",
            "prompt": "x",
            "stream": True,
            "max_tokens": 4,
            "stop": None,
            "ignore_eos": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "guidellm 0.8, chat": (
        "/v1/chat/completions",
        {
            "model": "bundled",
            "stream": True,
            "max_completion_tokens": 4,
            "stop": None,
            "ignore_eos": True,
            "messages": PARTS,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        },
    ),
    "guidellm before 0.3": (
        "/v1/completions",
        {
            "model": "bundled",
            "prompt": "x",
            "stream": True,
            "max_tokens": 4,
            "max_completion_tokens": 4,
            "stop": None,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        },
    ),
    "vLLM's bench, text": (
        "/v1/completions",
        {
            "model": "bundled",
            "prompt": "x",
            "repetition_penalty": 1.0,
            "max_tokens": 4,
            "logprobs": None,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "temperature": 0.0,
        },
    ),
    "vLLM's bench, chat": (
        "/v1/chat/completions",
        {
            "model": "bundled",
            "max_completion_tokens": 4,
            "stream": True,
            "ignore_eos": True,
            "messages": PARTS,
            "stream_options": {"include_usage": True},
        },
    ),
    "SGLang's bench, text": (
        "/v1/completions",
        {
            "model": "bundled",
            "prompt": "x",
            "temperature": 0.0,
            "best_of": 1,
            "max_tokens": 4,
            "stream": True,
            "ignore_eos": True,
        },
    ),
    "SGLang's bench, chat": (
        "/v1/chat/completions",
        {"model": "bundled", "messages": HI, "temperature": 0.0, "max_tokens": 4, "stream": True},
    ),
    "lm-eval, text": (
        "/v1/completions",
        {
            "prompt": ["x", "y"],
            "model": "bundled",
            "max_tokens": 4,
            "temperature": 0,
            "seed": 1234,
            "stop": ["\n\n", "<|endoftext|>"],
        },
    ),
    "lm-eval, chat": (
        "/v1/chat/completions",
        {"messages": HI, "model": "bundled", "max_tokens": 4, "temperature": 0, "stop": ["\n\n"], "seed": 1234},
    ),
}
