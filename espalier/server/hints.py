"""Fields of other servers and clients that cannot change an answer: accepted without effect, and named in a header.

A field belongs here where leaving it out gives the same tokens and the same promises.  What chooses tokens, asks for
something in the answer, or is about who may see what (such as vLLM's cache_salt) does not: it is refused by name.
"""

from collections.abc import Mapping

_SENDER = "about the sender; nothing here depends on it"
_CACHE = "equal beginnings of prompts are shared whatever it says"
_ROUTING = "one engine serves all requests"

HINTS: Mapping[str, str] = {
    # OpenAI
    "user": _SENDER,
    "safety_identifier": _SENDER,
    "prompt_cache_key": _CACHE,
    "prompt_cache_retention": _CACHE,
    "service_tier": "all requests are served alike; use priority",
    # Ollama
    "keep_alive": "a model stays loaded as long as the server runs",
    # llama.cpp
    "cache_prompt": _CACHE,
    "id_slot": "slots are the engine's to choose",
    # vLLM and SGLang
    "request_id": "the answer's id is the header x-request-id, which a client may send",
    "rid": "the answer's id is the header x-request-id, which a client may send",
    "data_parallel_rank": _ROUTING,
    # LiteLLM
    "litellm_call_id": _SENDER,
    "litellm_session_id": _SENDER,
    "litellm_trace_id": _SENDER,
    "litellm_metadata": _SENDER,
    "num_retries": "about the client; nothing is sent twice here",
    "tags": _SENDER,
    # OpenRouter
    "provider": _ROUTING,
    "session_id": _SENDER,
    "trace": _SENDER,
    "usage": "whole answers always have it; streams have it by stream_options",
}
