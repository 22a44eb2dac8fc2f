"""What the dashboard and the page name is measured, and says what happened."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"\bespalier_\w+")


def measured(served):
    """Names of families, and of samples, that /metrics has."""
    text = served.request("/metrics")[2]
    return set(NAME.findall(text))


def test_every_expression_of_the_dashboard_reads_what_is_measured(served):
    served.request("/v1/completions", {"model": "bundled", "prompt": "x = ", "max_tokens": 8})
    panels = json.loads((ROOT / "docker" / "grafana.json").read_text())["panels"]
    named = {name for panel in panels for target in panel["targets"] for name in NAME.findall(target["expr"])}
    assert len(panels) > 10 and named - measured(served) == set()


def test_every_metric_is_on_the_page_and_the_other_way_round(served):
    served.request("/v1/completions", {"model": "bundled", "prompt": "x = ", "max_tokens": 8})
    page = (ROOT / "docs" / "server.md").read_text()
    table = page[page.index("| name (`espalier_...`)") : page.index("## Docker")]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {"espalier_" + re.sub(r"\{.*", "", name) for row in rows for name in re.findall(r"`([^`]+)`", row)}
    found = measured(served)
    bases = {re.sub(r"_(bucket|count|sum|created)$", "", name) for name in found}
    families = {name for name in bases if f"{name}_total" not in bases}
    assert named == families


def test_counts_say_what_happened(served):
    names = ("generated_tokens_total", "prompt_tokens_total", "harvests_total", "inter_token_seconds_count")
    before = {name: served.metric(name) for name in names}
    rounds = served.metric("rounds_total", bucket="1", run="eager")
    body = {"model": "bundled", "prompt": "import os\n", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    usage = served.request("/v1/completions", body)[2]["usage"]
    served.until(lambda: served.metric("running_requests") == 0)
    assert served.metric("generated_tokens_total") == before["generated_tokens_total"] + 12
    # All tokens but the first, which the prompt's pass gives alone.
    assert served.metric("inter_token_seconds_count") == before["inter_token_seconds_count"] + 11
    assert served.metric("prompt_tokens_total") == before["prompt_tokens_total"] + usage["prompt_tokens"]
    assert served.metric("rounds_total", bucket="1", run="eager") == rounds + usage["speculation"]["rounds"]
    assert served.metric("harvests_total") > before["harvests_total"]
    assert served.metric("engine_up") == 1 and served.metric("accept_length") > 1
    assert served.metric("http_requests_total", path="/v1/completions", status="200") > 0
