"""The trainer's command line: every flag is explained, and an interruption is one line."""

from __future__ import annotations

import argparse
import sys

import pytest

from espalier import train
from espalier.train.command import make_parser


def commands() -> dict[str, argparse.ArgumentParser]:
    actions = make_parser()._actions
    return next(dict(each.choices) for each in actions if isinstance(each, argparse._SubParsersAction))


@pytest.mark.parametrize("command", commands())
def test_every_flag_is_explained_in_words(command: str) -> None:
    for action in commands()[command]._actions:
        assert len((action.help or "").partition("[")[0].split()) >= 2, action.option_strings


@pytest.mark.parametrize("module", ["espalier.train.command", "espalier.train.mtp"])
def test_an_interrupt_while_modules_load_ends_in_a_line(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupting:
        def find_spec(self, name: str, *_: object) -> None:
            if name == module:
                raise KeyboardInterrupt

    for name in ("espalier.train.command", module):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupting(), *sys.meta_path])
    assert train.start(["mtp", "--help"]) == 130
    assert capsys.readouterr() == ("", "espalier.train: interrupted\n")
