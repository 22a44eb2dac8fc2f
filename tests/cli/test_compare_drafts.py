"""The table of compared drafts: what it says of plain decoding's tokens."""

from scripts.compare_drafts import Row, show


def row(name, *texts):
    return Row(name, (2, 1, 3), seconds=[1.0], texts=[list(text) for text in texts])


def test_tokens_are_compared_with_plain_decoding_alone(capsys):
    show(0.0, [row("ngram", (1, 2), (3, 4)), row("plain", (1, 2), (3, 5))])
    assert "1 of 2" in capsys.readouterr().out
    # Without it nothing is the same: the first draft would be compared with itself.
    show(0.0, [row("ngram", (1, 2), (3, 4))])
    assert " of 2" not in capsys.readouterr().out
