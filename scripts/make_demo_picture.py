"""Write docs/demo.svg from a run of `espalier demo`: `python scripts/make_demo_picture.py`."""

import io
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

from espalier.cli import demo
from espalier.cli.main import parse

PICTURE = Path(__file__).parents[1] / "docs" / "demo.svg"
COMMAND = "espalier demo --prompts 1 --max-tokens 64"
WIDTH = 110
# Width and height of a character in rich's SVG, at font size 20.
CHARACTER = (12.04, 24.4)
BACKGROUND, FOREGROUND = (22, 27, 34), (230, 237, 243)
# The eight colours of a terminal; the bright ones are the same.
COLOURS = [(72, 79, 88), (255, 123, 114), (63, 185, 80), (210, 153, 34)]
COLOURS += [(88, 166, 255), (188, 140, 255), (57, 197, 207), (201, 209, 217)]
THEME = TerminalTheme(BACKGROUND, FOREGROUND, COLOURS)
# Only fonts that every machine has, so that a page with the picture fetches none.
FORMAT = """\
<svg viewBox="VIEW" xmlns="http://www.w3.org/2000/svg" xml:space="preserve">
<title>espalier demo: one prompt completed, one round drawn, and its figures</title>
<style>
.{unique_id}-matrix {{ font-family: ui-monospace, Menlo, Consolas, "DejaVu Sans Mono", monospace;
font-size: {char_height}px; line-height: {line_height}px; }}
{styles}
</style>
<defs>{lines}</defs>
<rect x="-12" y="-12" width="100%" height="100%" rx="8" fill="rgb(22,27,34)"/>
<g>{backgrounds}<g class="{unique_id}-matrix">{matrix}</g></g>
</svg>
"""


def main() -> None:
    console = Console(
        record=True, file=io.StringIO(), force_terminal=True, width=WIDTH, highlight=False, legacy_windows=False
    )
    console.print(f"$ {COMMAND}", style="bold")
    demo.show_demo(parse(COMMAND.split()[1:]), console)
    lines = console.export_text(clear=False).count("\n")
    view = f"-12 -12 {WIDTH * CHARACTER[0] + 24:.0f} {lines * CHARACTER[1] + 24:.0f}"
    made = FORMAT.replace("VIEW", view)
    svg = console.export_svg(theme=THEME, code_format=made, unique_id="demo", font_aspect_ratio=CHARACTER[0] / 20)
    PICTURE.write_text("\n".join(line.rstrip() for line in svg.splitlines()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
