"""Fields of other servers and clients that are accepted without effect and named in a response header.

A field belongs here if the response is the same without it.  A field that changes tokens, adds something to the
response, or separates users (such as vLLM's cache_salt) does not belong here: the server refuses it by name.
"""

from collections.abc import Mapping

_SENDER = "describes the sender; the server does not use it"
CACHE = "the prefix cache always shares equal prompt prefixes"
# Marks of a message, an item, a part of one or a tool: Anthropic's, and OpenAI's.
CACHE_MARKS = ("cache_control", "prompt_cache_breakpoint")
_ROUTING = "the server chooses the engine"

HINTS: Mapping[str, str] = {
    # OpenAI
    "user": _SENDER,
    "safety_identifier": _SENDER,
    "prompt_cache_key": CACHE,
    "prompt_cache_retention": CACHE,
    "service_tier": "there is only one tier; use priority",
    # Ollama
    "keep_alive": "the model stays loaded while the server runs",
    # llama.cpp
    "cache_prompt": CACHE,
    "id_slot": "the engine chooses the slot",
    # vLLM and SGLang
    "request_id": "send the id as the header x-request-id",
    "rid": "send the id as the header x-request-id",
    "data_parallel_rank": _ROUTING,
    # LiteLLM
    "litellm_call_id": _SENDER,
    "litellm_session_id": _SENDER,
    "litellm_trace_id": _SENDER,
    "litellm_metadata": _SENDER,
    "num_retries": "retries are the client's; the server makes none",
    "tags": _SENDER,
    # OpenRouter
    "provider": _ROUTING,
    "session_id": _SENDER,
    "trace": _SENDER,
    "usage": "a response always has it; for a stream use stream_options",
}
