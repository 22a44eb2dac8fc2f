"""Chat templates rendered beside the API server: the same text, and an error for one that does not end."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from espalier.chat import ChatTemplate, Rendering, _variables_of
from espalier.errors import EspalierError
from espalier.server import template_process
from espalier.server.template_process import TemplateProcess
from tests.tool_calls.families import FAMILIES

SAID = [{"role": "user", "content": "hé\ud800"}]
VARIABLES = {"add_generation_prompt": True, "continue_final_message": False}
PLAIN = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
# A template, and the end of the error that it brings.
HOSTILE = {
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}": "1 s of CPU time",
    "{% set n = namespace(s='a') %}{% for i in range(40) %}{% set n.s = n.s ~ n.s %}{% endfor %}": "MB of memory",
    "{{ 'a' * 10**10 }}": "MB of memory",
    "{{ messages[0].content.ljust(10**10) }}": "MB of memory",
    "{{ 'a'|center(2 * 10**7) }}": "characters",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}": "refuses these messages: maximum recursion",
    "{{ raise_exception('no') }}": "refuses these messages: no",
    "{% if %}": "no Jinja template",
}


def of(template):
    return SimpleNamespace(chat_template=template, special_tokens_map={"bos_token": "<s>"})


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ctrl_c_does_not_reach_the_process_during_its_imports():
    async def run():
        helper = TemplateProcess(of(PLAIN)).helper
        process = await helper.start()
        status = Path(f"/proc/{process.pid}/status").read_text()
        await helper.close()
        return int(re.search(r"^SigBlk:\s*(\w+)", status, re.MULTILINE)[1], 16)

    assert asyncio.run(run()) >> (signal.SIGINT - 1) & 1


def test_it_is_the_same_text_and_a_template_without_end_is_an_error(monkeypatch):
    async def run():
        aside, errors = TemplateProcess(of(PLAIN)), {}
        assert await aside.render(Rendering(SAID, None, VARIABLES)) == "<s>user: hé\\ud800"
        process = await aside.helper.start()
        for template in HOSTILE:
            aside.source = template, {}
            with pytest.raises(EspalierError) as refused:
                await aside.render(Rendering(SAID, None, VARIABLES))
            errors[template] = str(refused.value).partition(";")[0].partition(" (")[0]
        for family in FAMILIES.values():
            hf = family.tokenizer().hf
            aside.source = hf.chat_template, dict(hf.special_tokens_map)
            tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
            for given in (None, tools):
                asked = Rendering([{"role": "user", "content": "é"}], given, VARIABLES)
                assert await aside.render(asked) == ChatTemplate(hf).render(asked)
        assert await aside.helper.start() is process, "it outlives all of them"
        # What Python cannot interrupt.
        os.kill(process.pid, signal.SIGSTOP)
        monkeypatch.setattr(template_process, "MAX_WALL_S", 0.2)
        with pytest.raises(EspalierError, match=r"0\.2 s and the memory"):
            await aside.render(asked)
        monkeypatch.setattr(template_process, "MAX_WALL_S", 60.0)
        assert await aside.render(asked)
        await aside.helper.close()
        return errors

    errors = asyncio.run(asyncio.wait_for(run(), 120))
    for template, end in HOSTILE.items():
        # A text that doubles is written, so on a loaded machine its CPU time may end before the memory does.
        ends = (end, "CPU time for these messages") if "range(40)" in template else (end,)
        assert any(each in errors[template] for each in ends), errors[template]


def test_the_variables_of_a_template_are_found_without_computing_it():
    """Jinja computes constants as it compiles: this would take 10 GB."""
    found = _variables_of("{{ 'a' * 10**10 }}{{ ('b' * 10**10) ~ x|default('y' * 10**10) }}{% set z = 1 %}{{ z }}")
    assert found == {"x"}
