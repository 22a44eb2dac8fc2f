"""The bundled model's card, made from `card_template.md` and the stages' figures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from espalier.train.settings import Eagle3Config
from lab.bundle.base import PretrainConfig

TEMPLATE = Path(__file__).with_name("card_template.md")


def source_rows(sources: list[dict[str, Any]]) -> str:
    taken = sorted((s for s in sources if s["taken"]), key=lambda s: -s["bytes"])
    rows = [(s["name"], s["version"], shorten_text(s["license"]), s["files"], f"{s['bytes'] / 1e6:.2f}") for s in taken]
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)


def shorten_text(text: str, limit: int = 60) -> str:
    text = text.replace("|", "/")
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def accept_rows(accept: dict[str, dict[str, float]]) -> str:
    names = {"tree": "5, 4, 16 (tree)", "chain": "5, 1, 6 (chain)", "wide tree": "6, 8, 64 (wide tree)"}
    return "\n".join(
        f"| {names[name]} | **{r['fresh']:.2f}** | {r['repeated']:.2f} | {r['every_root']:.2f} |"
        for name, r in accept.items()
    )


def num_parameters(directory: Path) -> int:
    weights = load_file(directory / "model.safetensors")
    return sum(t.numel() for t in weights.values() if t.is_floating_point())


def settings_text(config: PretrainConfig | Eagle3Config) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in vars(config).items() if isinstance(value, int | float))


def write_card(
    path: Path, results: dict[str, Any], sources: list[dict[str, Any]], base: PretrainConfig, draft: Eagle3Config
) -> None:
    figures = results["draft"]
    total_mb = sum(s["bytes"] for s in sources) / 1e6
    heldout_mb = results["heldout_bytes"] / 1e6
    agreement = [v for k, v in figures.items() if k.startswith("agreement_")]
    text = TEMPLATE.read_text(encoding="utf-8").format(
        target_parameters=num_parameters(path.parent / "target") / 1e6,
        draft_parameters=num_parameters(path.parent / "draft") / 1e6,
        base_bits=results["base_bits"],
        ngram_bits=results["ngram_bits"],
        heldout_mb=heldout_mb,
        train_mb=total_mb - heldout_mb,
        train_tokens=results["train_tokens"] / 1e6,
        base_tokens=base.num_tokens / 1e9,
        epochs=base.num_tokens / results["train_tokens"],
        base_minutes=results["base_seconds"] / 60,
        base_device=results["base_device"],
        draft_tokens=figures["seen_tokens"] / 1e6,
        draft_minutes=results["draft_seconds"] / 60,
        draft_device=results["draft_device"],
        own_share=draft.own_share,
        own_tokens=figures["own_tokens"] / 1e6,
        sampled=draft.sampled_share,
        coverage=figures["coverage"],
        num_prompts=results["num_prompts"],
        accept_device=results["accept_device"],
        repeated_share=results["accept"]["tree"]["repeated_share"],
        accept_rows=accept_rows(results["accept"]),
        agreement=", ".join(f"{a:.3f}" for a in agreement),
        notes=results.get("notes", ""),
        base_settings=settings_text(base),
        draft_settings=settings_text(draft),
        python=next(s["version"] for s in sources if s["name"] == "python"),
        source_rows=source_rows(sources),
        left_out=", ".join(f"{s['name']} ({shorten_text(s['license'])})" for s in sources if not s["taken"]),
    )
    path.write_text(text, encoding="utf-8")
